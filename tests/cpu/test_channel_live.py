"""Client and server of the channel over real sockets, on both event loops."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import stat
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import uvloop

from coissue.deployments.channel.arena import Arena, open_peer_arena
from coissue.deployments.channel.backend import Answer
from coissue.deployments.channel.checking import InferError
from coissue.deployments.channel.client import ChannelRefused, SchedulerClient, _Open
from coissue.deployments.channel.frames import (
    FROM_SERVER,
    PREFIX,
    PROTOCOL_VERSION,
    ChannelLimits,
    Endpoint,
    Goodbye,
    Hello,
    Infer,
    PortInfo,
    Refused,
    Report,
    TenantInfo,
    TensorRef,
    Times,
)
from coissue.deployments.channel.framing import FrameReader, frame_buffers
from coissue.deployments.channel.server import ChannelServer
from coissue.kernels.ir import R, fixed

WAIT_S = 60.0  # a hang, not a speed, fails a test
SMALL = ChannelLimits(arena_bytes=1 << 22)


def tenant(name: str, **changed) -> TenantInfo:
    port = (R, *fixed(4))
    values = {
        "version": 1,
        "state": "ready",
        "inputs": (PortInfo("a", "f32", port), PortInfo("b", "f32", port)),
        "outputs": (PortInfo("sum", "f32", port), PortInfo("a", "f32", port)),
        "rows_limit": 1 << 20,
    }
    return TenantInfo(name, **{**values, **changed})


class Adder:
    """Answers (a + b, a); requests of tenant "held" wait until they are released or cancelled."""

    def __init__(self) -> None:
        self.tenants = [tenant("add"), tenant("held"), tenant("strict", nan="reject")]
        self.tenants.append(tenant("new", state="loading", reason="3 of 7 kernels"))
        self.held: dict = {}
        self.cancelled: list[int] = []
        self.seen: list = []
        self.refused: list = []
        self.times: list = []
        self.changed = asyncio.Event()

    def directory(self):
        return self.tenants

    def submit(self, request, reply):
        self.seen.append((request.rows, request.tokens, request.budget_ns, request.priority))
        if request.tenant == "held":
            self.held[request.handle] = (request, reply)
            self.changed.set()
            return
        self.answer(request, reply)

    def answer(self, request, reply):
        a, b = request.inputs
        reply(Answer((a + b, a), queue_ns=1, device_ns=2, launches=3))

    def cancel(self, handle):
        self.cancelled.append(handle)
        _, reply = self.held.pop(handle)
        reply(Answer(reason="cancelled", message="withdrawn"))
        self.changed.set()

    def count_refused(self, refused):
        self.refused.append(refused)
        self.changed.set()

    def observe_times(self, times):
        self.times.append(times)
        self.changed.set()

    def ask(self, what):
        if what == "broken":
            raise RuntimeError("no")
        return {"metrics": b"# metrics", "big": bytes(1 << 20)}[what]

    async def until(self, condition):
        while not condition():
            await asyncio.wait_for(self.changed.wait(), WAIT_S)
            self.changed.clear()


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="co-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def start(main):
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(main, WAIT_S))

    return start


class Pair:
    """A server and a client of it; checks at the end that nothing is left open."""

    def __init__(self, endpoint: Endpoint, limits=SMALL, backend=None) -> None:
        self.backend = backend or Adder()
        self.server = ChannelServer(endpoint, self.backend, limits)
        self.limits = limits

    async def __aenter__(self):
        self.endpoint = await self.server.start()
        self.client = await SchedulerClient.connect(self.endpoint, self.limits)
        await self.client.wait_ready("add")
        return self

    async def __aexit__(self, kind, *_):
        try:
            if kind is None and self.client.is_connected:
                assert self.client.open_requests == 0
                arena = self.client._connection.arena
                assert arena is None or not arena._reserved
        finally:
            await self.client.close()
            await self.server.stop()
        assert not self.server.sessions


def inputs(rows: int = 2, offset: float = 0.0) -> dict[str, np.ndarray]:
    a = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) + np.float32(offset)
    return {"a": a, "b": a * 2}


def check_sum(result, sent) -> None:
    np.testing.assert_array_equal(result.outputs["sum"], sent["a"] + sent["b"])
    np.testing.assert_array_equal(result.outputs["a"], sent["a"])


ENDPOINTS = [
    lambda folder: Endpoint(path=str(folder / "s")),
    lambda folder: Endpoint(host="127.0.0.1", secret="open sesame"),
]


@pytest.mark.parametrize("make", ENDPOINTS, ids=["unix", "tcp"])
@pytest.mark.parametrize("rows", [1, 3, 20_000, 100_000])
def test_infer(run, folder, make, rows):
    """Small tensors inline; 20,000 rows in the arena (Unix); 100,000 do not fit the arena."""

    async def main():
        async with Pair(make(folder)) as pair:
            sent = inputs(rows)
            result = await pair.client.infer("add", sent, budget_ns=7, priority=2)
            check_sum(result, sent)
            assert (result.queue_ns, result.device_ns, result.launches) == (1, 2, 3)
            assert pair.backend.seen == [(rows, 0, 7, 2)]

    run(main())


def test_large_tensors_use_the_arena_and_fall_back_when_it_is_full(run, folder):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            sent = inputs(20_000)  # 4 tensors of 320 KB: three requests fill 4 MB
            tasks = [asyncio.create_task(pair.client.infer("held", sent)) for _ in range(5)]
            await pair.backend.until(lambda: len(pair.backend.held) == 5)
            entries = pair.client._connection.open.values()
            assert [entry.block >= 0 for entry in entries] == [True] * 3 + [False] * 2
            for request, reply in pair.backend.held.values():
                pair.backend.answer(request, reply)
            for result in await asyncio.gather(*tasks):
                check_sum(result, sent)

    run(main())


def test_strided_and_read_only_inputs(run, folder):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            sent = {name: array[::2] for name, array in inputs(20_000).items()}
            for array in sent.values():
                array.flags.writeable = False
            check_sum(await pair.client.infer("add", sent), sent)

    run(main())


def test_answers_of_another_thread_come_in_any_order(run, folder):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            sent = [inputs(3, float(number)) for number in range(200)]
            tasks = [asyncio.create_task(pair.client.infer("held", each)) for each in sent]
            await pair.backend.until(lambda: len(pair.backend.held) == len(sent))

            def answer():
                for request, reply in reversed(pair.backend.held.values()):
                    pair.backend.answer(request, reply)

            thread = threading.Thread(target=answer)
            thread.start()
            for each, result in zip(sent, await asyncio.gather(*tasks), strict=True):
                check_sum(result, each)
            thread.join()

    run(main())


def test_ten_thousand_requests_leave_nothing(run, folder):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            small, large = inputs(4), inputs(6_000)

            async def worker():
                for number in range(200):
                    sent = small if number % 20 else large
                    check_sum(await pair.client.infer("add", sent), sent)

            await asyncio.gather(*(worker() for _ in range(50)))
            (session,) = pair.server.sessions
            assert not session._pending
            assert session._held_bytes == 0

    run(main())


def test_cancel_withdraws_and_keeps_the_memory_until_the_answer(run, folder):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            task = asyncio.create_task(pair.client.infer("held", inputs(20_000)))
            await pair.backend.until(lambda: pair.backend.held)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pair.client._connection.arena._reserved
            await pair.backend.until(lambda: pair.backend.cancelled)
            check_sum(await pair.client.infer("add", inputs()), inputs())
            assert pair.client.open_requests == 0

    run(main())


def test_nobody_waits_beyond_the_deadline_for_a_scheduler_that_hangs(run, folder):
    """What the request holds is given back by the answer, when it comes."""

    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            with pytest.raises(InferError, match="did not answer in time") as error:
                await pair.client.infer("held", inputs(20_000), budget_ns=1_000_000)
            assert error.value.reason == "expired"
            assert pair.client._connection.arena._reserved
            pair.backend.cancel(next(iter(pair.backend.held)))  # the answer comes
            check_sum(await pair.client.infer("add", inputs()), inputs())
            assert pair.client.open_requests == 0
            assert not pair.client._connection.arena._reserved

    run(main())


@pytest.mark.parametrize(
    ("name", "sent", "reason", "words"),
    [
        ("nobody", inputs(), "unknown_tenant", "'nobody'"),
        ("new", inputs(), "loading", "3 of 7 kernels"),
        ("add", {"a": inputs()["a"]}, "malformed", "'b' is missing"),
        ("strict", {**inputs(), "b": np.full((2, 4), np.nan, "f4")}, "malformed", "'b': has NaN"),
    ],
)
def test_refusals(run, folder, name, sent, reason, words):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            with pytest.raises(InferError, match=words) as error:
                await pair.client.infer(name, sent)
            assert error.value.reason == reason

    run(main())


def test_a_frame_too_large_for_either_end_is_refused(run, folder):
    async def main():
        limits = ChannelLimits(frame_bytes=1 << 18, arena_bytes=0)
        async with Pair(Endpoint(path=str(folder / "s")), limits) as pair:
            with pytest.raises(InferError, match="inputs: 320000 bytes") as error:
                await pair.client.infer("add", inputs(10_000))
            assert error.value.reason == "too_large"
            check_sum(await pair.client.infer("add", inputs()), inputs())

    run(main())


def test_outputs_too_large_for_a_frame_are_refused_before_the_model_runs(run, folder):
    async def main():
        backend = Adder()
        port = PortInfo("sum", "f32", (R, *fixed(4000)))
        backend.tenants.append(tenant("wide", outputs=(port,)))
        limits = ChannelLimits(frame_bytes=1 << 18, arena_bytes=0)
        async with Pair(Endpoint(path=str(folder / "s")), limits, backend) as pair:
            with pytest.raises(InferError, match="outputs: 320000 bytes, allowed: 196608") as error:
                await pair.client.infer("wide", inputs(20))
            assert error.value.reason == "too_large"
            assert backend.seen == []

    run(main())


def test_large_answers_wait_until_the_client_has_read(run, folder):
    """Far more inline bytes than may be on the way at once: none is lost, nobody is dropped."""

    async def main():
        limits = ChannelLimits(arena_bytes=0, unread_bytes=1 << 18, unread_s=5.0)
        async with Pair(Endpoint(path=str(folder / "s")), limits) as pair:
            client, server = pair.client._connection, next(iter(pair.server.sessions))
            sent = inputs(20_000)  # 640 KB there, 640 KB back
            tasks = []
            for count in range(1, 21):
                tasks.append(asyncio.create_task(pair.client.infer("held", sent)))
                await pair.backend.until(lambda n=count: len(pair.backend.held) == n)
            client._transport.pause_reading()
            for request, reply in pair.backend.held.values():
                pair.backend.answer(request, reply)
            small = asyncio.create_task(pair.client.infer("add", inputs()))
            await asyncio.sleep(0.1)
            assert server._waiting
            assert server._transport.get_write_buffer_size() < 3 << 20
            client._transport.resume_reading()
            for result in await asyncio.gather(*tasks):
                check_sum(result, sent)
            check_sum(await small, inputs())
            assert server._held_bytes == 0
            assert pair.client._connection is client

    run(main())


def test_a_client_does_not_send_what_the_server_has_no_time_to_read(run, folder):
    """One request is refused; the connection stays."""

    async def main():
        limits = ChannelLimits(arena_bytes=0, unread_bytes=1 << 18)
        async with Pair(Endpoint(path=str(folder / "s")), limits) as pair:
            server, sent = next(iter(pair.server.sessions)), inputs(20_000)
            server._transport.pause_reading()
            tasks = [asyncio.create_task(pair.client.infer("add", sent)) for _ in range(6)]
            await asyncio.sleep(0.1)
            server._transport.resume_reading()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [error for error in results if isinstance(error, InferError)]
            assert 1 <= len(refused) < 6
            assert {error.reason for error in refused} == {"memory"}
            check_sum(await pair.client.infer("add", sent), sent)

    run(main())


def test_ask(run, folder):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            assert await pair.client.ask("metrics") == b"# metrics"
            assert await pair.client.ask("big") == bytes(1 << 20)
            for what, reason in (("else", "malformed"), ("broken", "internal")):
                with pytest.raises(InferError, match=what) as error:
                    await pair.client.ask(what)
                assert error.value.reason == reason

    run(main())


def test_nobody_waits_for_ever_for_what_a_scheduler_that_hangs_says_of_itself(run, folder):
    over = threading.Event()
    hangs = Adder()
    hangs.ask = lambda what: b"late" if over.wait(WAIT_S) else b""

    async def main():
        limits = ChannelLimits(arena_bytes=1 << 22, ask_s=0.1)
        async with Pair(Endpoint(path=str(folder / "s")), limits, hangs) as pair:
            with pytest.raises(InferError, match="did not answer in time"):
                await pair.client.ask("status")
            over.set()
            assert await pair.client.ask("status") == b"late"
            while pair.client.open_requests:  # the first answer may be the second to come
                await asyncio.sleep(0.001)

    run(main())


def test_refusals_of_replicas_and_of_the_server_are_counted(run, folder):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            told = [Refused(f"t{number}", "malformed", number) for number in range(300)]
            times = [Times("http", f"t{number}", (number, 1), 0.5) for number in range(400)]
            assert pair.client.report(Report(tuple(told), tuple(times)))
            with pytest.raises(InferError) as error:
                await pair.client.infer("new", inputs(1))
            await pair.backend.until(lambda: len(pair.backend.refused) == 301)
            assert pair.backend.refused == [*told, Refused("new", error.value.reason, 1)]
            await pair.backend.until(lambda: len(pair.backend.times) == 400)
            assert pair.backend.times == times
            assert error.value.is_counted
            with pytest.raises(InferError) as error:
                await pair.client.infer("add", {})
            assert not error.value.is_counted
            await pair.server.stop()
            await pair.client._connection.lost
            assert not pair.client.report(Report(tuple(told)))

    run(main())


def test_directory_is_pushed_and_a_version_change_fails_no_request(run, folder):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            old = pair.client.directory["add"]
            swapped = tenant("add", version=2, inputs=old.inputs[::-1], outputs=old.outputs)
            pair.backend.tenants = [swapped, tenant("late")]
            # The request is encoded against version 1 before the push can arrive.
            task = asyncio.create_task(pair.client.infer("add", inputs()))
            await asyncio.sleep(0)
            pair.server.push_directory()
            result = await task
            np.testing.assert_array_equal(result.outputs["a"], inputs()["b"])
            await pair.client.wait_ready("late")
            assert set(pair.client.directory) == {"add", "late"}
            await asyncio.to_thread(pair.server.push_directory)

    run(main())


def test_restart_of_the_server(run, folder):
    """In-flight and new requests fail at once; the resolver is asked again; then all is well."""

    async def main():
        asked = []

        async def resolver():
            asked.append(folder / f"s{min(1, len(asked))}")
            return Endpoint(path=str(asked[-1]))

        backend = Adder()
        server = ChannelServer(Endpoint(path=str(folder / "s0")), backend, SMALL)
        await server.start()
        client = await SchedulerClient.connect(resolver, SMALL)
        task = asyncio.create_task(client.infer("held", inputs(20_000)))
        await backend.until(lambda: backend.held)
        for session in list(server.sessions):
            session.drop("as if killed")
        with pytest.raises(InferError) as in_flight:
            await task
        with pytest.raises(InferError) as meanwhile:
            await client.infer("add", inputs())
        for error in (in_flight.value, meanwhile.value):
            assert error.reason == "restarting"
            assert error.retry_after_ns > 0
        await server.stop()
        assert "add" in client.directory
        server = ChannelServer(Endpoint(path=str(folder / "s1")), Adder(), SMALL)
        await server.start()
        await client.wait_ready("add")
        check_sum(await client.infer("add", inputs(20_000)), inputs(20_000))
        assert len(asked) > 1
        await client.close()
        await server.stop()

    run(main())


def test_a_client_may_come_before_the_server(run, folder):
    async def main():
        endpoint = Endpoint(path=str(folder / "s"))
        client = await SchedulerClient.connect(endpoint, SMALL)
        with pytest.raises(InferError, match="FileNotFoundError") as error:
            await client.infer("add", inputs())
        assert error.value.reason == "restarting"
        with pytest.raises(TimeoutError):
            await client.wait_ready("add", timeout_s=0.01)
        async with Pair(endpoint):
            await client.wait_ready("add")
            check_sum(await client.infer("add", inputs()), inputs())
            await client.close()

    run(main())


@pytest.mark.parametrize("secret", ["", "wrong", "open sesam", "open sesame!", "öffne"])
def test_wrong_secret(run, folder, secret):
    async def main():
        async with Pair(Endpoint(host="127.0.0.1", secret="open sesame")) as pair:
            port = pair.endpoint.port
            with pytest.raises(ChannelRefused, match="wrong secret"):
                await SchedulerClient.connect(Endpoint(host="127.0.0.1", port=port, secret=secret))
            assert "sesame" not in f"{pair.endpoint} {pair.endpoint!r}"

    run(main())


def test_tcp_without_a_secret_is_refused():
    with pytest.raises(ValueError, match="secret"):
        ChannelServer(Endpoint(host="127.0.0.1"), Adder())


async def last_words(path: str, data: bytes) -> str:
    """Sends `data` and reads until the server closes; what its Goodbye says."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    received = await reader.read()
    writer.close()
    frames = FrameReader(FROM_SERVER, 1 << 20, 1 << 20)
    frames.get_buffer()[: len(received)] = received
    *_, (message, _) = frames.feed(len(received))
    assert isinstance(message, Goodbye)
    return message.error


HELLO = frame_buffers(Hello(PROTOCOL_VERSION))[0]
PAIR = (TensorRef("f32", (1, 4)), TensorRef("f32", (1, 4)))
HELD = Infer(1, "held", 1, PAIR)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (os.urandom(64) + bytes([255] * 64), "bytes"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "header of"),
        (HELLO + PREFIX.pack(1 << 30, 8), "frame of 1073741824"),
        (HELLO + PREFIX.pack(16, 8) + b"\x80\x04\x95cposix", "not a message"),
        (HELLO + HELLO, "second Hello"),
        (frame_buffers(HELD)[0], "first frame is Infer"),
        (frame_buffers(Hello(99))[0], "protocol version 99"),
        (HELLO + frame_buffers(HELD, [np.zeros(8, "f4")])[0] * 2, "open already"),
    ],
    ids=["noise", "http", "huge", "pickle", "hellos", "no-hello", "version", "same-id"],
)
def test_bad_peers_are_told_and_others_are_served(run, folder, data, words):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            assert words in await last_words(pair.endpoint.path, data)
            check_sum(await pair.client.infer("add", inputs()), inputs())
            assert not pair.backend.held, "what the bad peer had in flight is cancelled"

    run(main())


def test_a_silent_peer_is_dropped(run, folder):
    async def main():
        limits = ChannelLimits(arena_bytes=0, hello_s=0.05)
        async with Pair(Endpoint(path=str(folder / "s")), limits) as pair:
            assert "no hello" in await last_words(pair.endpoint.path, b"")

    run(main())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": (TensorRef("f32", (1, 4), 64), PAIR[1])}, "there is no arena"),
        ({"inputs": PAIR[:1]}, "1 inputs, allowed: 2"),
        ({"inputs": (TensorRef("f64", (1, 4)), PAIR[1])}, "dtype f64, allowed: f32"),
        ({"inputs": (TensorRef("f32", (2**40, 4)),) * 2}, "rows"),
        ({"inputs": (TensorRef("f32", (9, 4)),) * 2}, "body of 32 bytes"),
        ({"outputs": (0,)}, "1 offsets, allowed: 0 or 2"),
        ({"outputs": (0, -1)}, "'sum': there is no arena"),
        ({"budget_ns": -1}, "budget_ns: -1"),
        ({"priority": 17}, "priority: 17, allowed: 0 to 16"),
        ({"tenant": "nobody"}, "'nobody'"),
    ],
)
def test_the_server_trusts_no_header(run, folder, change, words):
    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            fields = {name: getattr(HELD, name) for name in HELD.__struct_fields__}
            bad = Infer(**{**fields, "tenant": "add", **change})
            future = asyncio.get_running_loop().create_future()
            connection = pair.client._connection
            connection.open[1] = _Open(future)
            connection.arena = next(iter(pair.server.sessions))._arena = None
            connection.send(bad, [np.zeros(8, "f4")])
            with pytest.raises(InferError, match=words):
                await future
            assert not pair.backend.seen

    run(main())


@pytest.mark.parametrize("offset", [1, 32, 1 << 22, (1 << 22) - 64, 1 << 62])
def test_ranges_outside_the_arena_are_refused(offset):
    arena = Arena(1 << 22)
    arena.close_fd()
    with pytest.raises(InferError, match=f"offset {offset}"):
        arena.view("f32", (100, 4), offset)


def test_arena_blocks_never_overlap_and_all_comes_back():
    arena = Arena(1 << 16)
    arena.close_fd()
    rng = np.random.default_rng(5)
    live: dict[int, int] = {}
    for _ in range(3000):
        if live and rng.random() < 0.5:
            offset = list(live)[rng.integers(len(live))]
            arena.release(offset)
            del live[offset]
        else:
            size = int(rng.integers(0, 6000))
            offset = arena.reserve(size)
            if offset is not None:
                assert offset % 64 == 0
                assert offset + size <= 1 << 16
                for other, length in live.items():
                    assert offset + max(size, 1) <= other or other + length <= offset
                live[offset] = max(size, 1)
    for offset in live:
        arena.release(offset)
    assert not arena._reserved
    assert arena.reserve(1 << 16) == 0, "the free list is one piece again"
    assert arena.reserve(1) is None


def test_only_sealed_memory_of_the_right_size_is_mapped(folder):
    arena = Arena(1 << 16)
    mapped = open_peer_arena(os.getpid(), arena.fd, 1 << 16, 1 << 20)
    arena.view("u8", (4,), 64)[...] = 7
    assert mapped.view("u8", (4,), 64).tolist() == [7] * 4
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.fd, 0)
    for size, limit, words in ((1 << 15, 1 << 20, "has 65536"), (1 << 16, 1 << 15, "allowed")):
        with pytest.raises(OSError, match=words):
            open_peer_arena(os.getpid(), arena.fd, size, limit)
    arena.close_fd()
    with open(folder / "file", "w+b") as file:
        file.truncate(1 << 16)
        with pytest.raises(OSError, match=r"seal|Invalid"):
            open_peer_arena(os.getpid(), file.fileno(), 1 << 16, 1 << 20)


def test_a_late_answer_for_a_client_that_is_gone(run, folder):
    """Arrays on a lost client's memory stay valid until they are dropped; writing is harmless."""

    async def main():
        async with Pair(Endpoint(path=str(folder / "s"))) as pair:
            backend = pair.backend
            backend.cancel = backend.cancelled.append
            task = asyncio.create_task(pair.client.infer("held", inputs(20_000)))
            await backend.until(lambda: backend.held)
            await pair.client.close()
            with pytest.raises(InferError):
                await task
            while not backend.cancelled:
                await asyncio.sleep(0)
            ((request, reply),) = backend.held.values()
            gc.collect()
            np.testing.assert_array_equal(request.inputs[0], inputs(20_000)["a"])
            request.inputs[0][...] = 0
            backend.answer(request, reply)

    run(main())


def test_a_peer_that_does_not_read_is_dropped(run, folder):
    """The server's memory for it is bounded by `held_bytes`, and it has `unread_s`."""

    async def main():
        limits = ChannelLimits(
            arena_bytes=0, unread_bytes=1 << 18, held_bytes=1 << 20, unread_s=0.2
        )
        async with Pair(Endpoint(path=str(folder / "s")), limits) as pair:
            _, deaf = await asyncio.open_unix_connection(pair.endpoint.path)
            deaf.transport.pause_reading()
            deaf.writelines(frame_buffers(Hello(PROTOCOL_VERSION)))
            arrays = [np.zeros((1000, 4), "f4")] * 2
            refs = tuple(TensorRef("f32", (1000, 4)) for _ in arrays)
            while len(pair.server.sessions) < 2:
                await asyncio.sleep(0)
            session = list(pair.server.sessions)[1]
            for number in range(200):
                deaf.writelines(frame_buffers(Infer(number, "add", 1, refs), arrays))
                await asyncio.sleep(0)
            while len(pair.server.sessions) == 2:
                assert session._held_bytes <= 1 << 20
                await asyncio.sleep(0.01)
            assert "read nothing for 0.2 s" in session.error
            assert [entry.reason for entry in pair.backend.refused][:1] == ["memory"]
            check_sum(await pair.client.infer("add", inputs()), inputs())
            deaf.transport.abort()

    run(main())


def test_socket_files(run, folder):
    async def main():
        path = folder / "private" / "s"
        async with Pair(Endpoint(path=str(path))):
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with pytest.raises(FileExistsError, match="another scheduler"):
                await ChannelServer(Endpoint(path=str(path)), Adder()).start()
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        async with Pair(Endpoint(path=str(path))) as pair:
            check_sum(await pair.client.infer("add", inputs()), inputs())
        path.write_text("not a socket")
        with pytest.raises(FileExistsError, match="not a socket"):
            await ChannelServer(Endpoint(path=str(path)), Adder()).start()
        with pytest.raises(ValueError, match="allowed: 107"):
            await ChannelServer(Endpoint(path=str(folder / ("x" * 100))), Adder()).start()
        path.parent.chmod(0o755)
        with pytest.raises(PermissionError, match="0700"):
            await ChannelServer(Endpoint(path=str(path)), Adder()).start()

    run(main())


# --- other processes, killed ---


def serve_forever(path: str) -> None:
    async def main():
        await ChannelServer(Endpoint(path=path), Adder(), SMALL).start()
        await asyncio.Event().wait()

    asyncio.run(main())


def infer_forever(path: str, pipe) -> None:
    async def main():
        client = await SchedulerClient.connect(Endpoint(path=path), SMALL)
        pipe.send(client._connection.arena is not None)
        await client.infer("held", inputs(20_000))

    asyncio.run(main())


def test_kill_of_the_server(run, folder):
    context = multiprocessing.get_context("spawn")
    path = str(folder / "s")

    async def main():
        process = context.Process(target=serve_forever, args=(path,), daemon=True)
        process.start()
        client = await SchedulerClient.connect(Endpoint(path=path), SMALL)
        await client.wait_ready("add")
        task = asyncio.create_task(client.infer("held", inputs(20_000)))
        check_sum(await client.infer("add", inputs()), inputs())
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(InferError) as error:
            await task
        assert error.value.reason == "restarting"
        process.join()
        async with Pair(Endpoint(path=path)):  # takes over the file that the dead one left
            await client.wait_ready("add")
            check_sum(await client.infer("add", inputs(20_000)), inputs(20_000))
            await client.close()

    run(main())


def test_kill_of_the_client_leaves_nothing(run, folder):
    context = multiprocessing.get_context("spawn")

    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("coissue-arena")

    async def main():
        server = ChannelServer(Endpoint(path=str(folder / "s")), Adder(), SMALL)
        await server.start()
        ours, theirs = context.Pipe()
        process = context.Process(target=infer_forever, args=(str(folder / "s"), theirs))
        process.start()
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, ours.recv), "the arena must be in use"
        await server.backend.until(lambda: server.backend.held)
        assert mapped() == 1
        os.kill(process.pid, signal.SIGKILL)
        await loop.run_in_executor(None, process.join)
        await server.backend.until(lambda: server.backend.cancelled)
        assert not server.sessions
        assert mapped() == 0
        assert not [name for name in os.listdir("/dev/shm") if "coissue" in name]
        ours.close()
        theirs.close()
        process.close()
        await server.stop()

    run(main())
