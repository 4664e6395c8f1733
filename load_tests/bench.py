"""`make bench`: the product against its baselines, and the micro-benchmarks; results as files.

Parts: `path` (empty model against an empty Serve deployment, wrk), `goodput` (twelve tenants on one
backbone against tuned stock Serve), `memory` (one more tenant), `micro` (load_tests/micro/*). Each
part writes docs/results/<date>-<part>.json and .md with machine, versions, command and spread. The
systems of a comparison run in one cluster and are loaded in turns. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from load_tests import results, wrk
from load_tests.client import Payload, Shot, run_load
from load_tests.demo.data import ROOT
from load_tests.goodput import P99_MS_LIMIT, Probe, Target, compare, measure
from load_tests.hosted import (
    Hosted,
    HostFailed,
    find_free_port,
    interrupt_on_signals,
    wait_ready,
)
from load_tests.parity import models, stock_serve

CONFIGS = ROOT / "configs"
LOG = ROOT / "out" / "bench-serve.log"
RATE_LIMIT = 6000.0
READY_SECONDS_MAX = 300.0
EXTRA_HEADS = 8
MICRO = ROOT / "load_tests" / "micro"
MICRO_SECONDS_MAX = 300


def settle(hosted: Hosted, tenants: int, console: Console) -> None:
    """Wait until all tenants are ready; a failed one ends the benchmark with its reason."""
    *_, states = wait_ready(hosted, tenants, READY_SECONDS_MAX)
    failed = [f"{name}: {why}" for name, (state, why) in states.items() if state != "ready"]
    if failed:
        raise HostFailed("; ".join(failed))
    console.print(f"  {tenants} tenants ready")


# --- path -------------------------------------------------------------------------------------


def bench_path(console: Console, args: argparse.Namespace) -> dict[str, Any]:
    """Requests/s at 64 connections and p50 at one, product and empty deployment in turns."""
    if shutil.which("wrk") is None:
        return {"skipped": "wrk is not installed (Debian package wrk)"}
    runs: dict[str, dict[str, list[wrk.Wrk]]] = {
        name: {"64": [], "1": []} for name in ("coissue", "empty_serve")
    }
    paths = {"coissue": "/tenants/empty", "empty_serve": "/empty-serve"}
    body = np.ones(models.EMPTY_FLOATS, np.float32).tobytes()
    with Hosted(LOG, config=CONFIGS / "empty.yaml", empty=True, port=find_free_port()) as hosted:
        settle(hosted, 1, console)
        for path in paths.values():
            wrk.run_wrk(hosted.port, path, body, 16, 2.0)
        for _ in range(args.rounds):
            for name, path in paths.items():
                for connections, found in runs[name].items():
                    found.append(
                        wrk.run_wrk(hosted.port, path, body, int(connections), args.seconds)
                    )
                    console.print(f"  {name} at {connections}: {found[-1]}", highlight=False)
    rps = {name: spread([w.rps for w in found["64"]]) for name, found in runs.items()}
    p50 = {name: spread([w.p50_ms for w in found["1"]]) for name, found in runs.items()}
    errors = sum(w.errors for found in runs.values() for ws in found.values() for w in ws)
    return {
        "rps_at_64": rps,
        "p50_ms_at_1": p50,
        "errors": errors,
        "rps_ratio": rps["coissue"]["median"] / rps["empty_serve"]["median"],
        "added_ms": p50["coissue"]["median"] - p50["empty_serve"]["median"],
        "wanted": "rps_ratio >= 0.85, added_ms <= 0.25, errors 0",
    }


# --- goodput ----------------------------------------------------------------------------------


def make_bodies(path: Callable[[int], str], tenants: int) -> dict[str, list[Payload]]:
    """The same bodies for every system: eight vectors per tenant, by tenant number."""
    return {
        str(head): [
            Payload(path(head), row.tobytes())
            for row in np.random.default_rng(head).random((8, models.WIDTH), np.float32)
        ]
        for head in range(tenants)
    }


def tune_stock(hosted: Hosted, target: Target, args: argparse.Namespace) -> tuple[int, float]:
    """The batch size and wait under which stock Serve carries most, by a short search each."""
    best, best_rate = stock_serve.CANDIDATES[0], -1.0
    for size, wait_s in stock_serve.CANDIDATES:
        hosted.ask("tune_stock", count=args.tenants, batch_size=size, wait_s=wait_s)

        def probe(target: Target, rate: float) -> Probe:
            return measure(target, rate, max(2.0, args.seconds / 2), seed=5)

        rate, _ = compare([target], {target.name: 300.0}, RATE_LIMIT, probe)[target.name]
        if rate > best_rate:
            best, best_rate = (size, wait_s), rate
    hosted.ask("tune_stock", count=args.tenants, batch_size=best[0], wait_s=best[1])
    return best


def bench_goodput(console: Console, args: argparse.Namespace) -> dict[str, Any]:
    """Highest rate with p99 <= 50 ms, both systems searched in turns, `rounds` times.

    Each has a cluster of its own, and stands still while the other is measured: the idle work of
    twelve stock replicas alone takes a quarter of a core.
    """
    ours = Hosted(LOG, config=CONFIGS / "backbone.yaml", port=find_free_port())
    stock = Hosted(LOG.with_name("bench-stock.log"), stock=args.tenants, port=find_free_port())
    with ours, stock:
        settle(ours, models.TENANTS, console)
        if not stock.poll_started(READY_SECONDS_MAX):
            raise HostFailed(f"stock Serve did not start within {READY_SECONDS_MAX:.0f} s")
        targets = [
            Target(name, hosted.port, make_bodies(path, args.tenants))
            for name, hosted, path in (
                ("coissue", ours, lambda h: f"/tenants/head-{h}"),
                ("stock", stock, lambda h: f"/{stock_serve.name_of(h)}"),
            )
        ]
        check_same_answers(*targets)
        with ours.paused():
            size, wait_s = tune_stock(stock, targets[1], args)
        console.print(f"  stock tuned: batches of {size}, wait {wait_s * 1e3:.0f} ms")
        rates, probes = search_goodput(targets, {"coissue": stock, "stock": ours}, console, args)
        resident = ours.resident_bytes()
    return {
        "p99_ms_limit": P99_MS_LIMIT,
        "tenants": args.tenants,
        "stock_tuning": {"max_batch_size": size, "batch_wait_timeout_s": wait_s},
        "goodput_rps": rates,
        "ratio": rates["coissue"]["median"] / max(rates["stock"]["median"], 1e-9),
        "resident_mib": {name: size / 2**20 for name, size in resident.items()},
        "probes": probes,
        "wanted": "ratio >= 5",
    }


def search_goodput(
    targets: list[Target], others: dict[str, Hosted], console: Console, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, list[dict[str, float]]]]:
    """Per system: the spread of the rates found, and all probes. `others` stand still meanwhile."""
    found: dict[str, list[float]] = {target.name: [] for target in targets}
    probes: dict[str, list[dict[str, float]]] = {target.name: [] for target in targets}
    starts = {"coissue": 1000.0, "stock": 300.0}
    for number in range(args.rounds):

        def probe(target: Target, rate: float, number: int = number) -> Probe:
            with others[target.name].paused():
                measure(target, 50.0, 1.0, seed=1)  # what woke up finds its feet
                return measure(target, rate, args.seconds, seed=100 + number)

        def tell(name: str, probe: Probe) -> None:
            console.print(f"  {name}: {probe}", highlight=False)

        made = compare(targets, starts, RATE_LIMIT, probe, tell)
        for name, (rate, taken) in made.items():
            found[name].append(rate)
            probes[name] += [describe(p) for p in taken]
    return {name: spread(values) for name, values in found.items()}, probes


def describe(probe: Probe) -> dict[str, float]:
    """A probe as JSON data: an endless p99 becomes -1."""
    p99 = probe.p99_ms if math.isfinite(probe.p99_ms) else -1.0
    return {"rate": probe.rate, "p99_ms": p99, "ok": probe.ok_share, "lag_ms": probe.lag_ms}


def check_same_answers(ours: Target, stock: Target) -> None:
    """Both systems must compute the same before they are compared."""
    answers = []
    for target in (ours, stock):
        shots = tuple(Shot(i * 20_000_000, tenant, 0) for i, tenant in enumerate(target.payloads))
        load = run_load(shots, target.payloads, port=target.port)
        answers.append(uvloop.run(load).answers)
    for mine, theirs in zip(*answers, strict=True):
        if not (mine.is_ok and theirs.is_ok):
            raise HostFailed(f"statuses {mine.status} and {theirs.status}: {mine.body[:200]!r}")
        np.testing.assert_allclose(
            np.frombuffer(mine.body, np.float32),
            np.frombuffer(theirs.body, np.float32),
            atol=1e-4,
        )


# --- memory -----------------------------------------------------------------------------------


def bench_memory(console: Console, args: argparse.Namespace) -> dict[str, Any]:
    """Resident bytes of scheduler and pool before and after attaching more tenants, used once."""
    with Hosted(LOG, config=CONFIGS / "backbone.yaml", port=find_free_port()) as hosted:
        settle(hosted, models.TENANTS, console)
        bodies = make_bodies(lambda h: f"/tenants/head-{h}", models.TENANTS + EXTRA_HEADS)
        warm = Target("warm", hosted.port, {k: bodies[k] for k in map(str, range(models.TENANTS))})
        measure(warm, 200.0, 3.0, seed=1)
        steps = [hosted.resident_bytes()]
        for extra in range(EXTRA_HEADS):
            head = models.TENANTS + extra
            hosted.ask("attach_head", head=head, slo="default")
            measure(Target("one", hosted.port, {str(head): bodies[str(head)]}), 50.0, 1.0, seed=1)
            steps.append(hosted.resident_bytes())
            console.print(f"  {head + 1} tenants: {steps[-1]}", highlight=False)
    totals = [
        sum(size for name, size in step.items() if "haproxy" not in name and "Control" not in name)
        for step in steps
    ]
    head_bytes = (models.WIDTH + 1) * models.CLASSES * 4
    return {
        "tenants": models.TENANTS,
        "head_bytes": head_bytes,
        "resident_mib": [total / 2**20 for total in totals],
        "mean_mib_per_extra_tenant": (totals[-1] - totals[0]) / EXTRA_HEADS / 2**20,
        "mib_per_extra_tenant": spread(
            [(after - before) / 2**20 for before, after in itertools.pairwise(totals)]
        ),
        "wanted": f"mean_mib_per_extra_tenant <= {head_bytes / 2**20 + 5:.2f}",
    }


# --- micro ------------------------------------------------------------------------------------


def bench_micro(console: Console, args: argparse.Namespace) -> dict[str, Any]:
    """Each module of load_tests/micro in a process of its own; its last line is its result."""
    found: dict[str, Any] = {}
    for path in sorted(MICRO.glob("*.py")):
        if path.stem == "__init__":
            continue
        made = subprocess.run(
            [sys.executable, "-m", f"load_tests.micro.{path.stem}"],
            cwd=ROOT, capture_output=True, text=True, timeout=MICRO_SECONDS_MAX, check=False,
        )  # fmt: skip
        lines = made.stdout.strip().splitlines()
        failed = made.returncode != 0 or not lines
        found[path.stem] = {"failed": made.stderr[-2000:]} if failed else json.loads(lines[-1])
        console.print(f"  {path.stem}")
        for line in lines:
            console.print(f"    {line}", highlight=False)
    return found or {"skipped": "there are no micro-benchmarks"}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


PARTS = {
    "path": bench_path,
    "goodput": bench_goodput,
    "memory": bench_memory,
    "micro": bench_micro,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help=f"parts, of {','.join(PARTS)}", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=6.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tenants", type=int, default=models.TENANTS, help="of the goodput part")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    console, args = Console(), parser.parse_args()
    os.chdir(ROOT)
    interrupt_on_signals()
    failures = 0
    for part in args.only.split(","):
        console.print(f"[bold]{part}[/bold]")
        started = time.monotonic()
        try:
            found = PARTS[part](console, args)
        except KeyboardInterrupt:
            console.print("interrupted; everything is stopped")
            return 130
        except (HostFailed, AssertionError, subprocess.TimeoutExpired) as error:
            console.print(f"  failed: {error}", markup=False, highlight=False, style="red")
            failures += 1
            continue
        path = results.write(args.out, part, found, seconds=time.monotonic() - started)
        console.print(f"  {results.summarise(found)}\n  -> {path}", highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
