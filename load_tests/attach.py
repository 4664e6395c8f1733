"""How long a tenant takes from its captured program to its first answer, and what compiling costs.

    python -m load_tests.attach [--models minilm,lstm] [--rounds 3] [--out docs/results]

Each start is a process of its own with the scheduler's host in it: one tenant is attached, then
asked once over the channel, then its native kernels are awaited.

    cold   nothing is on disk: costs are measured, kernels are planned and compiled beside it
    warm   all of that is on disk, as after a restart
    table  as warm, with `device.native_kernels` off: what generated code adds to a start

`attach s` is until the tenant is ready, `first ms` its first answer from then, `built s` until the
last kernel is compiled, counted from the start of attaching. `build cpu s` is CPU time of planning
and compiling: all threads and children from ready to the last kernel, the answer's share included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from load_tests import results
from load_tests.stitching_models import CASES, LENGTH

STARTS = {"cold": True, "warm": True, "table": False}
START_SECONDS_MAX = 600


def describe(name: str, cache: Path, *, native: bool) -> dict[str, Any]:
    """The settings of an application with this tenant alone."""
    model = {"factory": "load_tests.stitching_models:build", "kwargs": {"name": name}}
    limits = {"rows": 8, "tokens": LENGTH}
    return {
        "device": {"cache": str(cache), "native_kernels": native},
        "scheduler": {"metrics_port": None},
        "slo_classes": {"slow": {"deadline_ms": 60_000}},
        "tenants": [{"name": name, "model": model, "slo": "slow", "limits": limits}],
    }


def save_artifact(name: str, folder: Path) -> None:
    from coissue.deployments.capture.pipeline import capture
    from coissue.deployments.settings import AppSettings

    (tenant,) = AppSettings.model_validate(describe(name, folder, native=False)).tenants
    capture(tenant.model, tenant.limits, name).save(folder / "artifact")


def start_once(name: str, folder: Path, *, native: bool) -> dict[str, float]:
    """One start, in this process."""
    from coissue.deployments.channel.client import SchedulerClient
    from coissue.deployments.host import SchedulerHost
    from coissue.deployments.settings import AppSettings

    settings = AppSettings.model_validate(describe(name, folder / "cache", native=native))
    inputs = {key: value.numpy() for key, value in CASES[name].inputs(1).items()}
    with tempfile.TemporaryDirectory(prefix="coissue-attach-") as run_dir:
        host = SchedulerHost(settings, run_dir)
        host.start()
        begun = time.monotonic()
        artifact = str(folder / "artifact")
        if error := host.attach(settings.tenants[0].model_dump(), 1, artifact):
            raise SystemExit(error)
        ready, cpu = time.monotonic(), cpu_seconds()
        first_ms = asyncio.run(ask_once(SchedulerClient, host.endpoint, name, inputs))
        if host.forge is not None:
            host.forge.wait()
        found = {
            "attach s": ready - begun,
            "first ms": first_ms,
            "built s": time.monotonic() - begun,
            "build cpu s": cpu_seconds() - cpu,
            "kernels": host.forge.states().get("ready", 0) if host.forge else 0,
        }
        host.stop()
    return found


async def ask_once(
    client_type: Any, endpoint: Any, name: str, inputs: dict[str, np.ndarray]
) -> float:
    client = await client_type.connect(endpoint)
    await client.wait_ready(name, timeout_s=30)
    start = time.monotonic()
    await client.infer(name, inputs)
    took_ms = 1e3 * (time.monotonic() - start)
    await client.close()
    return took_ms


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_child(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "load_tests.attach", "--child", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=START_SECONDS_MAX,
    )  # fmt: skip
    if run.returncode:
        raise SystemExit(f"{arguments}: {run.stderr[-2000:]}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def measure(name: str, rounds: int, console: Console) -> dict[str, Any]:
    """Median and range of each figure, by kind of start."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in STARTS}
    with tempfile.TemporaryDirectory(prefix="coissue-attach-") as root:
        run_child("capture", name, str(Path(root)))
        for number in range(rounds):
            own = Path(root) / str(number)
            own.mkdir()
            (own / "artifact").symlink_to(Path(root) / "artifact")
            for kind, native in STARTS.items():
                with console.status(f"{name}, {kind}, {number + 1}/{rounds}"):
                    found[kind].append(run_child("native" if native else "table", name, str(own)))
    return {
        kind: {key: summarise([start[key] for start in starts]) for key in starts[0]}
        for kind, starts in found.items()
    }


def summarise(values: list[float]) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.3g}" if least == most else f"{middle:.3g} ({least:.3g} to {most:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder of result files")
    args = parser.parse_args()
    console, begun, models = Console(), time.monotonic(), {}
    for name in args.models.split(","):
        models[name] = measure(name, args.rounds, console)
        for kind, found in models[name].items():
            text = ", ".join(f"{key} {value}" for key, value in found.items())
            console.print(f"{name} {kind}: {text}", highlight=False)
    if args.out is not None:
        seconds = time.monotonic() - begun
        console.print(str(results.write(args.out, "attach", models, seconds=seconds)))


def child(kind: str, name: str, folder: str) -> None:
    if kind == "capture":
        save_artifact(name, Path(folder))
        print("{}")
    else:
        print(json.dumps(start_once(name, Path(folder), native=kind == "native")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
