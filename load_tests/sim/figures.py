"""The simulator's figures, on one core each.

    python -m load_tests.sim.figures [--only launches,policies,tenants] [--small] [--write]

launches: wall time of a run of 1,000,000 launches, all in. policies: `many.yaml` (1,000 tenants,
Zipf 1.0, CV 4, eight GPUs) under every policy at loads from 20 to 120 % of what perfect packing
could do, and `space_time` at twice that. tenants: control per kernel from 10 to 10,000 tenants.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from coissue.deployments.cli.mix import Group, Mix, make_scenario
from coissue.deployments.cli.simulate import load_mix, render_table, run_mix
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.simulation import Scenario, simulate
from load_tests import results
from load_tests.demo.data import ROOT
from load_tests.micro.core_decision import Load, make_core

LOADS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
OVERLOADS = (1.6, 2.0, 2.4)
TENANTS = (10, 100, 1000, 10_000)
MANY = Path(__file__).with_name("many.yaml")


def measure_launches(console: Console, small: bool) -> dict[str, Any]:
    """Launches of little more than a kernel each: a light load, so that nearly nothing coalesces.

    The load that coalesces is measured too: there a launch takes longer, and a kernel less.
    """
    found: dict[str, Any] = {"wanted": "1,000,000 launches in under 60 s"}
    wanted = 20_000 if small else 1_000_000
    for name, load in (("light", 0.04), ("busy", 0.2)):
        trial = make_scenario(Mix(load=load, duration_s=1), 0)
        rate = simulate(trial, 0).launch_count
        scenario = make_scenario(Mix(load=load, duration_s=1.01 * wanted / rate), 0)
        started, cpu = time.perf_counter(), time.process_time()
        report = simulate(scenario, 0)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        found[name] = {
            "launches": report.launch_count,
            "members_per_launch": report.segment_count / report.launch_count,
            "seconds": seconds,
            "cpu_seconds": cpu_s,
            "cpu_us_per_launch": cpu_s / report.launch_count * 1e6,
            "cpu_us_per_member": cpu_s / report.segment_count * 1e6,
        }
        console.print(f"  {name}: {found[name]}", highlight=False)
    return found


def measure_policies(console: Console, small: bool) -> dict[str, Any]:
    mix = replace(load_mix(MANY), duration_s=0.2) if small else load_mix(MANY)
    runs = []
    for policy in POLICIES:
        for load in (*LOADS, *OVERLOADS) if policy == "space_time" else LOADS:
            runs.append(run_mix(replace(mix, policy=policy, load=load), 1))
            console.print(f"  {policy} at {load:g}: {runs[-1]['summary']['attainment']:.4f}")
    console.print(render_table(runs))
    goodput = {p: {r["load"]: r["summary"]["goodput_hz"] for r in runs if r["policy"] == p}
               for p in POLICIES}  # fmt: skip
    ours = goodput["space_time"]
    others = {load: max([0.0, *(own[load] for policy, own in goodput.items()
                                if policy != "space_time")]) for load in LOADS}  # fmt: skip
    return {
        "attainment_at_80": next(
            r["summary"]["attainment"]
            for r in runs
            if (r["policy"], r["load"]) == ("space_time", 0.8)
        ),
        "least_ratio_to_best_other": min(ours[load] / max(1, others[load]) for load in LOADS),
        "goodput_at_twice_the_load_to_peak": ours[2.0] / max(ours.values()),
        "wanted": "attainment >= 0.99; no other policy better; at 2x the load >= 0.9 of the peak",
        "runs": {f"{run['policy']} at {run['load']:g}": run["summary"] for run in runs},
    }


def time_run(scenario: Scenario) -> tuple[float, int]:
    """CPU seconds, and the kernels that ran."""
    started = time.process_time()
    members = simulate(scenario, 0).segment_count
    return time.process_time() - started, members


def measure_tenants(console: Console, small: bool) -> dict[str, Any]:
    """Control of the core alone, and of whole runs, per kernel."""
    kernels, repeats = (2000, 2) if small else (20_000, 7)
    core_us: dict[int, list[float]] = {}
    for tenants in TENANTS:
        load = Load(make_core(256, 16, 10, tenants), tenants)
        load.run(kernels)
        gc.collect()
        core_us[tenants] = [load.run(kernels) * 1e6 for _ in range(repeats)]
    run_us = {}
    for tenants in TENANTS:
        groups = tuple(Group(name=f"g{i}", tenants=tenants // 10) for i in range(10))
        mix = Mix(groups=groups, load=0.6, duration_s=0.3 if small else 5)
        scenario = make_scenario(mix, 0)
        empty_s, _ = time_run(replace(scenario, duration_ns=1))  # attaching alone
        seconds, members = time_run(scenario)
        run_us[tenants] = (seconds - empty_s) / members * 1e6
    found = {
        "window": 256,
        "core_us_per_kernel": {n: statistics.median(us) for n, us in core_us.items()},
        "core_us_spread": {n: [min(us), max(us)] for n, us in core_us.items()},
        "run_us_per_kernel": run_us,
        "wanted": "flat from 10 to 10,000 tenants",
    }
    medians = list(found["core_us_per_kernel"].values())
    found["core_ratio_10000_to_10"] = medians[-1] / medians[0]
    console.print(f"  {found}", highlight=False)
    return found


PARTS: dict[str, Callable[[Console, bool], dict[str, Any]]] = {
    "launches": measure_launches,
    "policies": measure_policies,
    "tenants": measure_tenants,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="a look at whether it works")
    parser.add_argument("--write", action="store_true", help="result files in docs/results")
    args, console = parser.parse_args(), Console()
    for part in args.only.split(","):
        console.print(f"[bold]{part}[/bold]")
        started = time.monotonic()
        found = PARTS[part](console, args.small)
        plain = {key: value for key, value in found.items() if not isinstance(value, dict)}
        console.print(f"  {json.dumps(plain)}", highlight=False)
        if args.write:
            out, seconds = ROOT / "docs" / "results", time.monotonic() - started
            console.print(results.write(out, f"sim-{part}", found, seconds=seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
