"""Does the simulator predict a live run? Records a CPU run and simulates the same requests.

    python -m load_tests.sim.predict [--rate 300] [--seconds 10] [--rounds 3] [--write]

A `SchedulerHost` (no Ray) serves the backbone tenants of `load_tests/parity`; another process sends
requests at Poisson times over the channel. Generated code is compiled before. Each round records
two runs at the same rate. From the first come the costs (those measured at attach, corrected by
what its launches took), how far launches were from them, and the time per launch that is not the
device's (`overhead`); the second is predicted from its requests' times alone. Latency is that of
the scheduler: from the turn that saw a request to that of its answer. The recording is replayed
event by event, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
from rich.console import Console

from coissue.deployments.capture.pipeline import capture
from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.channel.frames import Endpoint
from coissue.deployments.costs import Costs
from coissue.deployments.host import SchedulerHost
from coissue.deployments.settings import AppSettings
from coissue.kernels.cost_table import CostTable
from coissue.scheduler.ports import MS
from coissue.scheduler.recording import replay
from coissue.scheduler.simulation import simulate
from coissue.scheduler.simulation.report import percentile_ns, sum_up
from load_tests import results
from load_tests.demo.data import ROOT
from load_tests.parity import models
from load_tests.sim.recorded import (
    RecordedRun,
    find_overheads,
    find_ratios,
    make_scenario,
    read_run,
)

DEADLINE_MS = 1000.0


def make_settings(cache: Path, record_to: Path) -> AppSettings:
    return AppSettings.model_validate(
        {
            "device": {"memory_mib": 512, "cache": str(cache)},
            "scheduler": {"metrics_port": None, "record_to": str(record_to)},
            "slo_classes": {"all": {"deadline_ms": DEADLINE_MS}},
            "tenants": [
                {
                    "name": f"head-{head}",
                    "model": {
                        "factory": "load_tests.parity.models:backbone", "kwargs": {"head": head}
                    },
                    "slo": "all",
                }
                for head in range(models.TENANTS)
            ],
        }
    )  # fmt: skip


@contextmanager
def serve(folder: Path, record_to: Path) -> Iterator[SchedulerHost]:
    settings = make_settings(folder / "cache", record_to)
    host = SchedulerHost(settings, tempfile.mkdtemp(prefix="ci-", dir=folder))
    host.start()
    try:
        for tenant in settings.tenants:
            artifact = folder / tenant.name
            if not artifact.exists():
                capture(tenant.model, tenant.limits, tenant.name).save(artifact)
            error = host.attach(tenant.model_dump(), 1, str(artifact))
            if error:
                raise RuntimeError(error)
        yield host
    finally:
        host.stop()


def build(folder: Path) -> None:
    """Generates and compiles the tenants' code, so that costs are of what runs in every round."""
    with serve(folder, folder / "build.jsonl") as host:
        assert host.forge is not None, "`device.native_kernels` is on"
        host.forge.wait()


async def send(endpoint: Endpoint, rate_hz: float, seconds: float, seed: int) -> int:
    """Open loop, Poisson; how many were answered."""
    client = await SchedulerClient.connect(endpoint)
    names = [f"head-{head}" for head in range(models.TENANTS)]
    await client.wait_ready(*names, timeout_s=30)
    rng, inputs = Random(seed), {"input": np.ones((1, models.WIDTH), np.float32)}
    start_s, at_s, tasks = time.monotonic(), 0.0, []
    while (at_s := at_s + rng.expovariate(rate_hz)) < seconds:
        await asyncio.sleep(start_s + at_s - time.monotonic())
        tasks.append(asyncio.create_task(client.infer(rng.choice(names), inputs)))
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    return sum(not isinstance(answer, BaseException) for answer in answers)


def record_run(folder: Path, args: argparse.Namespace, seed: int) -> tuple[RecordedRun, CostTable]:
    """A live run, replayed once; and the cost table at its end."""
    path = folder / f"run-{seed}.jsonl"
    with serve(folder, path) as host:
        client = [
            sys.executable, "-m", "load_tests.sim.predict", "--client", str(host.endpoint.path),
            "--rate", str(args.rate), "--seconds", str(args.seconds), "--seed", str(seed),
        ]  # fmt: skip
        subprocess.run(client, cwd=ROOT, check=True, capture_output=True)
        table = host.costs.table
    with path.open() as lines:
        replay(lines)
    with path.open() as lines:
        return read_run(lines), table


def compare(known: RecordedRun, table: CostTable, run: RecordedRun) -> dict[str, float]:
    """Recorded and predicted latencies of `run` in ms; costs and overhead are those of `known`."""
    costs = Costs(table, learns=False)
    for number in sorted(run.names):
        if costs.intern(run.names[number]) != number:
            raise RuntimeError("the recording numbers signatures differently")
    report = simulate(make_scenario(run, known, costs), 0, cost=costs)
    live, before = sorted(run.latencies_ns.values()), sorted(known.latencies_ns.values())
    simulated = sum_up(report.tenants.values())
    found: dict[str, float] = {"requests": len(run.submitted)}
    for percent in (50, 99):
        there, here = percentile_ns(live, percent), simulated.percentile_ns(percent)
        found[f"live_p{percent}_ms"] = there / MS
        found[f"simulated_p{percent}_ms"] = here / MS
        found[f"error_p{percent}"] = here / there - 1
        # How far apart two live runs are: no prediction can be nearer.
        found[f"live_spread_p{percent}"] = percentile_ns(before, percent) / there - 1
    members = [len(own.launch.segments) for own in run.flown]
    found["live_members"] = statistics.fmean(members)
    found["simulated_members"] = report.segment_count / max(1, report.launch_count)
    found["overhead_us"] = statistics.fmean(find_overheads(known)) / 1000
    found["ratio"] = statistics.fmean(find_ratios(known, costs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=300.0, help="requests/s")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="a result file in docs/results")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(asyncio.run(send(Endpoint(path=args.client), args.rate, args.seconds, args.seed)))
        return
    console, started, rounds = Console(), time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="ci-predict-") as folder:
        build(Path(folder))
        for number in range(args.rounds):
            known, table = record_run(Path(folder), args, 2 * number)
            run, _ = record_run(Path(folder), args, 2 * number + 1)
            rounds.append(compare(known, table, run))
            console.print_json(json.dumps(rounds[-1]))
    worst = {p: max(abs(own[f"error_p{p}"]) for own in rounds) for p in (50, 99)}
    found = {
        "rate": args.rate, "tenants": models.TENANTS, "worst_error_p50": worst[50],
        "worst_error_p99": worst[99], "rounds": rounds, "wanted": "errors at most 0.15",
    }  # fmt: skip
    console.print_json(json.dumps({k: v for k, v in found.items() if k != "rounds"}))
    if args.write:
        out = ROOT / "docs" / "results"
        results.write(out, "sim-predict", found, seconds=time.monotonic() - started)


if __name__ == "__main__":
    main()
