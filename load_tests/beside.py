"""A short tenant beside a long one, and equal tenants that all want the device: no Ray, no HTTP.

    python -m load_tests.beside [--seconds 20] [--rounds 3]

`beside`: requests of about 2 ms with 20 ms to be answered, beside requests of about 300 ms, Poisson
arrivals that ask for 90 % of the device, a third of it by the short ones. Attainment and latency of
the short tenant under each policy, in turns, with the same arrivals. `shares`: eight equal tenants
with four requests each always open; Jain's index of the device time that each got.
The rates come from the device times measured at the start, so the load is right on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from coissue.deployments.capture.pipeline import capture
from coissue.deployments.channel.checking import InferError
from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.host import SchedulerHost
from coissue.deployments.settings import AppSettings
from load_tests import results
from load_tests.client import percentile
from load_tests.demo.data import ROOT

POLICIES = ("space_time", "fifo", "time_only")
LOAD = 0.9
SHORT_MS, LONG_MS, SLO_MS = 2.0, 300.0, 20.0
LONG_ROWS = 128
#: Half of the default: the short tenant's 20 ms have to hold a launch of the long one, its own
#: time and that of the other short requests that came meanwhile.
BOUND_MS = 5.0
EQUALS = 8
WIDTH = 1024


def describe(name: str, slo: str, layers: int, rows: int, seed: int) -> dict[str, Any]:
    kwargs = {"seed": seed, "layers": layers, "width": WIDTH, "rows": rows}
    factory = "load_tests.parity.models:stack"
    limits = {"rows": max(2, rows), "in_flight": 256}
    return {"name": name, "slo": slo, "limits": limits,
            "model": {"factory": factory, "kwargs": kwargs}}  # fmt: skip


def make_settings(tenants: list[dict[str, Any]], folder: Path) -> AppSettings:
    return AppSettings.model_validate({
        "device": {"kind": "cpu", "threads": 1, "memory_mib": 4096, "cache": str(folder)},
        "scheduler": {"metrics_port": None, "preemption_bound_ms": BOUND_MS},
        "slo_classes": {
            "tight": {"deadline_ms": SLO_MS, "objective": 0.99},
            "loose": {"deadline_ms": 60_000, "objective": 0.99},
        },
        "tenants": tenants,
    })  # fmt: skip


class Bench:
    """A scheduler with its tenants attached, and a client on a loop of its own."""

    def __init__(self, tenants: list[dict[str, Any]], console: Console) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="coissue-beside-")
        folder = Path(self._folder.name)
        settings = make_settings(tenants, folder / "cache")
        self.host = SchedulerHost(settings, str(folder))
        self.host.start()
        self.inputs: dict[str, np.ndarray] = {}
        for tenant in settings.tenants:
            artifact = folder / tenant.name
            capture(tenant.model, tenant.limits, tenant.name).save(artifact)
            error = self.host.attach(tenant.model_dump(), 1, str(artifact))
            if error:
                raise SystemExit(f"{tenant.name}: {error}")
            rows = tenant.model.kwargs["rows"]
            self.inputs[tenant.name] = np.random.default_rng(0).random((rows, WIDTH), np.float32)
            console.print(f"  {tenant.name} attached")

    async def connect(self) -> SchedulerClient:
        client = await SchedulerClient.connect(self.host.endpoint)
        await client.wait_ready(*self.inputs, timeout_s=30)
        return client

    async def ask(self, client: SchedulerClient, name: str) -> tuple[float, float, str]:
        """(latency in ms, device time in ms, "" or why not)."""
        start = time.monotonic()
        try:
            answer = await client.infer(name, {"input": self.inputs[name]})
        except InferError as error:
            return (time.monotonic() - start) * 1e3, 0.0, error.reason
        return (time.monotonic() - start) * 1e3, answer.device_ns / 1e6, ""

    async def device_ms(self, name: str) -> float:
        """Median device time of a request alone."""
        client = await self.connect()
        times = [(await self.ask(client, name))[1] for _ in range(9)]
        await client.close()
        return statistics.median(times)

    def close(self) -> None:
        self.host.stop()
        self._folder.cleanup()


def plan(rates: dict[str, float], seconds: float, seed: int) -> list[tuple[float, str]]:
    """(second, tenant) of Poisson arrivals."""
    found = []
    for name, rate in rates.items():
        rng = Random(f"{seed}/{name}")
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            found.append((at_s, name))
            at_s += rng.expovariate(rate)
    return sorted(found)


async def load(bench: Bench, arrivals: list[tuple[float, str]]) -> dict[str, list[Any]]:
    """All requests at their times; answers by tenant."""
    client = await bench.connect()
    tasks = []
    start = asyncio.get_running_loop().time()
    for at_s, name in arrivals:
        wait_s = start + at_s - asyncio.get_running_loop().time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append((name, asyncio.create_task(bench.ask(client, name))))
    found: dict[str, list[Any]] = {}
    for name, task in tasks:
        found.setdefault(name, []).append(await task)
    await client.close()
    return found


def bring_up(console: Console) -> tuple[Bench, dict[str, float]]:
    """The two tenants, with as many layers as make their device times about right alone."""
    layers = {"short": 16, "long": 64}
    for number in range(4):
        bench = Bench(
            [
                describe("short", "tight", layers["short"], 1, 1),
                describe("long", "loose", layers["long"], LONG_ROWS, 2),
            ],
            console,
        )
        alone = {name: uvloop.run(bench.device_ms(name)) for name in layers}
        console.print(f"  layers {layers}, device ms alone {alone}", highlight=False)
        off = {"short": SHORT_MS / alone["short"], "long": LONG_MS / alone["long"]}
        if number == 3 or all(0.8 < factor < 1.25 for factor in off.values()):
            break
        bench.close()
        layers = {name: max(1, round(layers[name] * off[name])) for name in layers}
    return bench, alone


def run_beside(console: Console, args: argparse.Namespace) -> dict[str, Any]:
    bench, alone = bring_up(console)
    try:
        rates = {
            "short": LOAD / 3 / (alone["short"] / 1e3),
            "long": LOAD * 2 / 3 / (alone["long"] / 1e3),
        }
        console.print(f"  device ms alone {alone}, requests/s {rates}", highlight=False)
        longest_ms = 0.0
        runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
        for number in range(args.rounds):
            for policy in POLICIES:
                bench.host.set_policy(policy)
                found = uvloop.run(load(bench, plan(rates, args.seconds, number)))
                runs[policy].append(judge(found))
                if number == 0 and policy == "space_time":  # the others do not split
                    longest_ms = bench.host.runtime.core.stats().longest_ns / 1e6
                console.print(f"  {policy}: {runs[policy][-1]}", highlight=False)
    finally:
        bench.close()
    medians = {
        policy: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for policy, found in runs.items()
    }
    attained = [run["short_attained"] for run in runs["space_time"]]
    return {
        "alone_ms": alone, "rates_hz": rates, "longest_launch_ms": longest_ms,
        "medians": medians, "space_time_attained": attained,
        "wanted": "space_time: short_attained >= 0.99",
    }  # fmt: skip


def judge(found: dict[str, list[Any]]) -> dict[str, float]:
    short = found["short"]
    good = [ms for ms, _, why in short if not why and ms <= SLO_MS]
    answered = [ms for ms, _, why in short if not why]
    long = [ms for ms, _, why in found["long"] if not why]
    return {
        "short_attained": len(good) / len(short),
        "short_p50_ms": percentile(answered, 50),
        "short_p99_ms": percentile(answered, 99),
        "long_answered": len(long) / len(found["long"]),
        "long_p50_ms": percentile(long, 50),
    }


def run_shares(console: Console, args: argparse.Namespace) -> dict[str, Any]:
    names = [f"equal-{index}" for index in range(EQUALS)]
    tenants = [describe(name, "loose", 4, 8, 10 + i) for i, name in enumerate(names)]
    bench = Bench(tenants, console)
    stop = threading.Event()
    got = dict.fromkeys(names, 0.0)

    async def keep_asking(client: SchedulerClient, name: str) -> None:
        while not stop.is_set():
            _, device_ms, why = await bench.ask(client, name)
            assert not why, why
            got[name] += device_ms

    async def work() -> None:
        client = await bench.connect()
        tasks = [asyncio.create_task(keep_asking(client, n)) for n in names for _ in range(4)]
        await asyncio.sleep(args.seconds)
        stop.set()
        await asyncio.gather(*tasks)
        await client.close()

    try:
        uvloop.run(work())
    finally:
        bench.close()
    times = list(got.values())
    jain = sum(times) ** 2 / (len(times) * sum(value**2 for value in times))
    return {"device_ms": got, "jain": jain, "wanted": "jain >= 0.99"}


PARTS = {"beside": run_beside, "shares": run_shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    args, console = parser.parse_args(), Console()
    started = time.monotonic()
    found = {}
    for part in args.only.split(","):
        console.print(f"[bold]{part}[/bold]")
        found[part] = PARTS[part](console, args)
    path = results.write(args.out, "beside", found, seconds=time.monotonic() - started)
    console.print(f"-> {path}")


if __name__ == "__main__":
    main()
