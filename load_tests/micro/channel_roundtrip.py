"""Round trips over the channel, between two processes: latency by size, and requests/s pipelined.

    python load_tests/micro/channel_roundtrip.py [--loop uvloop|asyncio] [--tcp] [--one-core]

The server process echoes each request's tensor; `loop` answers at once on the channel's loop,
`thread` from another thread, as the scheduler's runtime does. `floor` is what the machine takes for
the same bytes: blocking sockets, no event loop, no frames. On an idle virtual machine most of it is
waking a halted core, which `--one-core` takes out. Prints a table and one JSON line. Nothing else
should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import queue
import resource
import socket
import tempfile
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
import uvloop

from coissue.deployments.channel.backend import Answer
from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.channel.frames import Endpoint, PortInfo, TenantInfo
from coissue.deployments.channel.server import ChannelServer
from coissue.kernels.ir import Dim, R

PORTS = {name: (PortInfo(name, "f32", (R, Dim(256))),) for name in "xy"}
ECHO = TenantInfo("echo", 1, "ready", PORTS["x"], PORTS["y"], rows_limit=4096)
SIZES = {"4 KB": 4, "600 KB": 600}
PIPELINED = {"2 KB": 2, "4 KB": 4}
IN_FLIGHT = 64


class Echo:
    """Answers each request with its inputs."""

    def __init__(self, has_thread: bool) -> None:
        self._todo: queue.SimpleQueue = queue.SimpleQueue()
        self._has_thread = has_thread
        if has_thread:
            threading.Thread(target=self._answer, daemon=True).start()

    def directory(self) -> list[TenantInfo]:
        return [ECHO]

    def submit(self, request, reply) -> None:
        if self._has_thread:
            self._todo.put((request, reply))
        else:
            reply(Answer(request.inputs))

    def cancel(self, handle: int) -> None:
        pass

    def ask(self, what: str) -> bytes:
        raise KeyError(what)

    def _answer(self) -> None:
        while True:
            request, reply = self._todo.get()
            reply(Answer(request.inputs))


def run(main, loop: str):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        return runner.run(main)


def serve(endpoint: Endpoint, has_thread: bool, loop: str, pipe: Connection) -> None:
    async def main() -> None:
        server = ChannelServer(endpoint, Echo(has_thread))
        pipe.send(await server.start())
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await server.stop()

    run(main(), loop)


def echo_bytes(path: str, pipe: Connection) -> None:
    """The floor's server: echoes messages of the sizes in `SIZES`, each as often as told."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        pipe.send(path)
        peer, _ = listener.accept()
        with peer:
            while count := pipe.recv():
                data = bytearray(count[1])
                for _ in range(count[0]):
                    receive(peer, data)
                    peer.sendall(data)


def receive(peer: socket.socket, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[peer.recv_into(view) :]


def measure_floor(count: int, folder: str) -> dict:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    path = os.path.join(folder, "floor")
    process = context.Process(target=echo_bytes, args=(path, theirs), daemon=True)
    process.start()
    found = {}
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(ours.recv())
        for name, kilobytes in SIZES.items():
            data = bytearray(kilobytes * 1024)
            ours.send((count, len(data)))
            times = []
            for _ in range(count):
                start = time.perf_counter()
                peer.sendall(data)
                receive(peer, data)
                times.append(time.perf_counter() - start)
            found[f"latency {name}"] = summarise(times)
        ours.send(None)
        process.join(10)
    return found


def summarise(times_s: list[float]) -> dict:
    return {"p50_ms": percentile_ms(times_s, 50), "p99_ms": percentile_ms(times_s, 99)}


def percentile_ms(times_s: list[float], percent: float) -> float:
    return round(float(np.percentile(times_s, percent)) * 1e3, 4)


async def measure_latency(client: SchedulerClient, kilobytes: int, count: int) -> dict:
    x = {"x": np.ones((kilobytes, 256), np.float32)}
    times = []
    for index in range(count + count // 10):
        start = time.perf_counter()
        await client.infer("echo", x)
        if index >= count // 10:
            times.append(time.perf_counter() - start)
    return summarise(times)


async def measure_rate(client: SchedulerClient, kilobytes: int, count: int) -> dict:
    x = {"x": np.ones((1, 256 * kilobytes), np.float32).reshape(-1, 256)}

    async def worker() -> None:
        for _ in range(count // IN_FLIGHT):
            await client.infer("echo", x)

    start, cpu = time.perf_counter(), cpu_s()
    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    done = count // IN_FLIGHT * IN_FLIGHT
    return {
        "requests_per_s": round(done / (time.perf_counter() - start)),
        "client_cpu_us": round((cpu_s() - cpu) / done * 1e6, 1),
    }


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(endpoint: Endpoint, count: int) -> dict:
    client = await SchedulerClient.connect(endpoint)
    await client.wait_ready("echo", timeout_s=10)
    found = {
        f"latency {name}": await measure_latency(client, kb, count) for name, kb in SIZES.items()
    }
    for name, kb in PIPELINED.items():
        found[f"pipelined {name}"] = await measure_rate(client, kb, 4 * count)
    await client.close()
    return found


def measure_backend(kind: str, arguments: argparse.Namespace, folder: str) -> dict:
    if arguments.tcp:
        endpoint = Endpoint(host="127.0.0.1", secret="benchmark")
    else:
        endpoint = Endpoint(path=os.path.join(folder, kind))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=serve, args=(endpoint, kind == "thread", arguments.loop, theirs), daemon=True
    )
    process.start()
    try:
        return run(measure(ours.recv(), arguments.count), arguments.loop)
    finally:
        ours.send("stop")
        process.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--tcp", action="store_true", help="TCP on 127.0.0.1, tensors inline")
    parser.add_argument("--count", type=int, default=2000, help="round trips per latency row")
    parser.add_argument("--one-core", action="store_true", help="both processes on one core")
    arguments = parser.parse_args()
    if arguments.one_core:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory(prefix="coissue-") as folder:
        found = {"floor": measure_floor(arguments.count, folder)}
        for kind in ("loop", "thread"):
            found[kind] = measure_backend(kind, arguments, folder)
    print(f"{'answered on':12} {'what':18} values")
    for kind, rows in found.items():
        for what, values in rows.items():
            text = "  ".join(f"{key}={value}" for key, value in values.items())
            print(f"{kind:12} {what:18} {text}")
    print(json.dumps({"benchmark": "channel_roundtrip", **vars(arguments), "results": found}))


if __name__ == "__main__":
    main()
