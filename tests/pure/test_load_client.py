"""The open-loop client: schedules, percentiles, and latency from the intended send time."""

import asyncio
import contextlib
import math
from collections import Counter

import pytest

from load_tests import client
from load_tests.client import Answer, LoadResult, Payload, Shot

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def test_schedule_repeats_and_is_sorted():
    rates, items = {"a": 200.0, "b": 50.0}, {"a": 5, "b": 3}
    first = client.plan_poisson(rates, items, 4.0, seed=3)
    assert first == client.plan_poisson(rates, items, 4.0, seed=3)
    assert first != client.plan_poisson(rates, items, 4.0, seed=4)
    assert [shot.at_ns for shot in first] == sorted(shot.at_ns for shot in first)
    assert all(0 <= shot.at_ns < 4 * client.NS and shot.item < items[shot.tenant] for shot in first)


def test_schedule_of_a_tenant_does_not_depend_on_others():
    alone = client.plan_poisson({"a": 100.0}, {"a": 5}, 2.0, seed=1)
    both = client.plan_poisson({"b": 30.0, "a": 100.0}, {"a": 5, "b": 2}, 2.0, seed=1)
    assert alone == tuple(shot for shot in both if shot.tenant == "a")


def test_schedule_has_the_asked_rates():
    schedule = client.plan_poisson(
        {"a": 400.0, "b": 100.0, "c": 0.0}, dict.fromkeys("abc", 1), 20, 1
    )
    counts = Counter(shot.tenant for shot in schedule)
    # Five standard deviations of a Poisson count.
    assert abs(counts["a"] - 8000) < 5 * math.sqrt(8000)
    assert abs(counts["b"] - 2000) < 5 * math.sqrt(2000)
    assert counts["c"] == 0


@pytest.mark.parametrize("duration_s", [0, -1, client.DURATION_S_LIMIT + 1])
def test_schedule_is_bounded_in_time(duration_s):
    with pytest.raises(ValueError, match="duration_s"):
        client.plan_poisson({"a": 1.0}, {"a": 1}, duration_s, 0)


def test_schedule_is_bounded_in_shots(monkeypatch):
    monkeypatch.setattr(client, "SHOTS_LIMIT", 100)
    with pytest.raises(ValueError, match="more than 100 shots"):
        client.plan_poisson({"a": 1000.0}, {"a": 1}, 1.0, 0)


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0, 1.0), (1, 1.0), (50, 50.0), (99, 99.0), (99.5, 100.0), (100, 100.0)],
)
def test_percentile_is_a_seen_value(percent, expected):
    assert client.percentile([float(value) for value in range(100, 0, -1)], percent) == expected


def test_percentile_of_nothing_is_nan():
    assert math.isnan(client.percentile([], 99))


def answer_at(at_ms, done_ms, status=200):
    return Answer(Shot(at_ms * 1_000_000, "a", 0), status, done_ns=done_ms * 1_000_000)


def test_summary_counts_failures_and_lateness_as_missed():
    answers = (answer_at(0, 10), answer_at(5, 35), answer_at(10, 260), answer_at(20, 21, 429))
    (summary,) = LoadResult(answers, 1.0, 0.0, 0.0).summarise({"a": 100.0})
    assert summary.requests == 4
    assert (summary.p50_ms, summary.p99_ms) == (30.0, 250.0)
    assert summary.attainment == 0.5
    assert summary.outcomes == {200: 3, 429: 1}
    assert LoadResult(answers, 1.0, 0.0, 0.0).goodput_rps({"a": 100.0}, 2.0) == 1.0


@pytest.mark.parametrize("host", ["10.0.0.1", "8.8.8.8", "0.0.0.0"])
def test_only_loopback(host):
    with pytest.raises(ValueError, match="loopback"):
        asyncio.run(client.run_load((), {}, host=host))


class Server:
    """Answers requests once its gate is open, which happens when `expected` have arrived."""

    def __init__(self, expected):
        self.expected = expected
        self.gate = asyncio.Event()
        self.bodies = []
        self.talks = []

    async def __aenter__(self):
        self.listener = await asyncio.start_server(self.talk, "127.0.0.1", 0)
        self.port = self.listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.gate.set()
        self.listener.close()
        await self.listener.wait_closed()
        await asyncio.gather(*self.talks)

    async def talk(self, reader, writer):
        self.talks.append(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.bodies.append((head.split(b" ")[1], await reader.readexactly(length)))
                if len(self.bodies) >= self.expected:
                    self.gate.set()
                await self.gate.wait()
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


PAYLOADS = {"a": [Payload("/x", b"abc"), Payload("/y", b"")]}


def send(schedule, *, expected, connections=8, drain_s=5.0):
    async def run():
        async with Server(expected) as server:
            result = await client.run_load(
                schedule, PAYLOADS, port=server.port, connections=connections, drain_s=drain_s
            )
        return result, server

    return asyncio.run(run())


def test_answers_come_back_with_their_shots():
    schedule = tuple(Shot(i * 100_000, "a", i % 2) for i in range(40))
    result, server = send(schedule, expected=1, connections=4)
    assert [answer.shot for answer in result.answers] == list(schedule)
    assert all(answer.is_ok and answer.body == b"ok" for answer in result.answers)
    assert Counter(server.bodies) == {(b"/x", b"abc"): 20, (b"/y", b""): 20}
    assert all(answer.sent_ns >= answer.shot.at_ns for answer in result.answers)


def test_latency_counts_from_the_intended_time():
    """Over one connection the second shot is sent when the first is answered, but is due before."""
    result, _ = send((Shot(0, "a", 0), Shot(1, "a", 1)), expected=1, connections=1)
    first, second = result.answers
    assert first.is_ok
    assert second.is_ok
    assert second.sent_ns >= first.done_ns
    assert second.latency_ns == second.done_ns - 1
    assert second.latency_ns > second.done_ns - second.sent_ns


def test_arrivals_do_not_wait_for_answers():
    """The server answers nothing before it has seen all: a closed loop would never get there."""
    result, _ = send(tuple(Shot(i * 1000, "a", 0) for i in range(8)), expected=8)
    assert all(answer.is_ok for answer in result.answers)


def test_what_is_not_answered_is_given_up():
    result, server = send((Shot(0, "a", 0),), expected=2, drain_s=0.05)
    (answer,) = result.answers
    assert answer.status == client.NO_ANSWER
    assert server.bodies == [(b"/x", b"abc")]


def test_refused_connections_are_outcomes():
    async def run():
        async with Server(1) as server:
            pass
        schedule = tuple(Shot(i, "a", 0) for i in range(3))
        return await client.run_load(schedule, PAYLOADS, port=server.port)

    result = asyncio.run(run())
    assert [answer.status for answer in result.answers] == [client.NO_CONNECTION] * 3
