"""CPU of one request on its way through a replica's code and the scheduler's, without Ray and HTTP.

    python -m load_tests.micro.request_path [--count 4000] [--rounds 7] [--turns]

One process: `HttpApp` is called as a server would, on a loop of its own; its client talks over a
Unix socket to a whole `SchedulerHost` with the empty model of the parity test. User and system time
per request, of the thread with the app (`replica`) and of all others (`scheduler`), medians over
rounds. CPU, not wall time, so other load on the machine disturbs it less. With `--turns` it runs a
round for each line it reads and answers with JSON: to compare two trees, let them run in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from coissue.deployments.capture.pipeline import capture
from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.host import SchedulerHost
from coissue.deployments.http.app import HttpApp, HttpSettings
from coissue.deployments.settings import AppSettings
from load_tests.parity.models import EMPTY_FLOATS

TENANT = {
    "name": "empty",
    "model": {"factory": "load_tests.parity.models:empty"},
    "slo": "default",
    "limits": {"in_flight": 1024},
}
SETTINGS = {
    "device": {"threads": 1, "memory_mib": 512},
    "scheduler": {"metrics_port": None},
    "slo_classes": {"default": {"deadline_ms": 10_000}},
    "tenants": [TENANT],
}
BODY = np.ones(EMPTY_FLOATS, np.float32).tobytes()
SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/tenants/empty",
    "root_path": "",
    "headers": [
        (b"host", b"127.0.0.1:8000"),
        (b"content-type", b"application/octet-stream"),
        (b"content-length", b"%d" % len(BODY)),
    ],
}
PARTS = ("replica", "scheduler")


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": BODY, "more_body": False}


async def ask(app: HttpApp) -> None:
    answer: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        answer.append(message)

    await app(SCOPE, receive, send)
    assert answer[0]["status"] == 200, answer


async def measure(app: HttpApp, in_flight: int, count: int) -> dict[str, float]:
    """Microseconds of CPU per request, by part."""

    async def worker() -> None:
        for _ in range(count // in_flight):
            await ask(app)

    here, all_ = time.thread_time(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    here, all_ = time.thread_time() - here, time.process_time() - all_
    return dict(zip(PARTS, (here / count * 1e6, (all_ - here) / count * 1e6), strict=True))


async def run(arguments: argparse.Namespace, host: SchedulerHost) -> None:
    client = await SchedulerClient.connect(host.endpoint)
    await client.wait_ready("empty", timeout_s=30)
    app = HttpApp(lambda: client, HttpSettings())
    cases = {64: arguments.count // 64 * 64, 1: arguments.count // 4}
    for in_flight, count in cases.items():
        await measure(app, in_flight, count)
    gc.freeze()
    rounds = sys.stdin if arguments.turns else range(arguments.rounds)
    found: dict[str, list[float]] = {}
    for _ in rounds:
        for in_flight, count in cases.items():
            for part, us in (await measure(app, in_flight, count)).items():
                found.setdefault(f"{part} at {in_flight}", []).append(us)
        if arguments.turns:
            print(json.dumps({name: us[-1] for name, us in found.items()}), flush=True)
    await client.close()
    if not arguments.turns:
        result = {name: round(statistics.median(us), 1) for name, us in found.items()}
        for name, us in result.items():
            print(f"{name:16} {us:7.1f} us of CPU per request")
        print(json.dumps({"benchmark": "request_path", "cpu_us": result}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=4000, help="requests per round at 64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", action="store_true", help="a round for each line of the input")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coissue-") as folder:
        SETTINGS["device"] |= {"cache": f"{folder}/cache"}
        settings = AppSettings.model_validate(SETTINGS)
        (tenant,) = settings.tenants
        capture(tenant.model, tenant.limits, tenant.name).save(Path(folder, "artifact"))
        host = SchedulerHost(settings, folder)
        host.start()
        try:
            said = host.attach(tenant.model_dump(), 1, f"{folder}/artifact")
            assert said == "", said
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run(arguments, host))
        finally:
            host.stop()


if __name__ == "__main__":
    main()
