"""Open-loop HTTP load: a schedule fixed beforehand, sent at its times whatever the answers do.

A `Schedule` is data, made from a seed, so that the same one runs against several systems. Latency
counts from the *intended* send time: a late generator or a full connection pool makes it worse,
never better, and the generator's own lag is reported beside it. Raw HTTP/1.1 with keep-alive.
Bounded in shots, time, connections and answer size; loopback addresses only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools
import numpy as np

SHOTS_LIMIT = 200_000
DURATION_S_LIMIT = 120.0
CONNECTIONS_LIMIT = 512
ANSWER_BYTES_LIMIT = 1 << 20
#: Statuses of answers that never came: connection refused or broken, and too late for the run.
NO_CONNECTION = 0
NO_ANSWER = -1
NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: `item` of the tenant's payloads, to be sent at `at_ns` from the start."""

    at_ns: int
    tenant: str
    item: int


Schedule = tuple[Shot, ...]


@dataclass(frozen=True, slots=True)
class Payload:
    path: str
    body: bytes
    content_type: str = "application/octet-stream"
    headers: tuple[tuple[str, str], ...] = ()

    def encode(self, host: str) -> bytes:
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"host: {host}",
            f"content-type: {self.content_type}",
        ]
        lines += [f"{key}: {value}" for key, value in self.headers]
        lines += [f"content-length: {len(self.body)}", "", ""]
        return "\r\n".join(lines).encode() + self.body


@dataclass(slots=True)
class Answer:
    """What became of a shot. `sent_ns` and `done_ns` count from the start, like `shot.at_ns`."""

    shot: Shot
    status: int = NO_ANSWER
    sent_ns: int = 0
    done_ns: int = 0
    body: bytes = b""

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    @property
    def latency_ns(self) -> int:
        return self.done_ns - self.shot.at_ns


@dataclass(frozen=True, slots=True)
class TenantSummary:
    tenant: str
    requests: int
    #: Percentiles of the answers with status 200; NaN without any.
    p50_ms: float
    p99_ms: float
    #: Share of all requests answered with 200 within the deadline.
    attainment: float
    outcomes: dict[int, int]


@dataclass(frozen=True, slots=True)
class LoadResult:
    answers: tuple[Answer, ...]
    #: Wall time of the run, drain included.
    wall_s: float
    #: How much later than intended shots were handed to the loop.
    lag_ms_p50: float
    lag_ms_p99: float

    def summarise(self, deadlines_ms: Mapping[str, float]) -> list[TenantSummary]:
        """One summary for each tenant of `deadlines_ms`, in its order."""
        by_tenant: dict[str, list[Answer]] = {tenant: [] for tenant in deadlines_ms}
        for answer in self.answers:
            by_tenant[answer.shot.tenant].append(answer)
        return [
            summarise_answers(tenant, answers, deadlines_ms[tenant])
            for tenant, answers in by_tenant.items()
        ]

    def goodput_rps(self, deadlines_ms: Mapping[str, float], duration_s: float) -> float:
        """Requests answered with 200 within their deadline, per second of the schedule."""
        good = sum(
            answer.is_ok and answer.latency_ns <= deadlines_ms[answer.shot.tenant] * 1e6
            for answer in self.answers
        )
        return good / duration_s


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of `values` do not exceed; NaN without any."""
    if not values:
        return float("nan")
    return float(np.percentile(values, percent, method="inverted_cdf"))


def summarise_answers(tenant: str, answers: Sequence[Answer], deadline_ms: float) -> TenantSummary:
    latencies = [answer.latency_ns / 1e6 for answer in answers if answer.is_ok]
    good = sum(latency <= deadline_ms for latency in latencies)
    return TenantSummary(
        tenant=tenant,
        requests=len(answers),
        p50_ms=percentile(latencies, 50),
        p99_ms=percentile(latencies, 99),
        attainment=good / len(answers) if answers else float("nan"),
        outcomes=dict(Counter(answer.status for answer in answers)),
    )


def plan_poisson(
    rates: Mapping[str, float], items: Mapping[str, int], duration_s: float, seed: int
) -> Schedule:
    """Independent Poisson arrivals per tenant, `rates` in requests/s, `items` payloads to choose.

    A tenant's arrivals depend on the seed and its own name and rate alone.
    """
    if not 0 < duration_s <= DURATION_S_LIMIT:
        raise ValueError(f"duration_s must be in (0, {DURATION_S_LIMIT}], not {duration_s}")
    shots: list[Shot] = []
    for tenant, rate in rates.items():
        rng = random.Random(f"{seed}/{tenant}")
        at_s = rng.expovariate(rate) if rate > 0 else duration_s
        while at_s < duration_s:
            shots.append(Shot(int(at_s * NS), tenant, rng.randrange(items[tenant])))
            at_s += rng.expovariate(rate)
        if len(shots) > SHOTS_LIMIT:
            raise ValueError(f"more than {SHOTS_LIMIT} shots")
    return tuple(sorted(shots, key=lambda shot: (shot.at_ns, shot.tenant)))


def check_loopback(host: str) -> None:
    if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        raise ValueError(f"{host} is not a loopback address: the load client refuses it")


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request on it."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.transport: asyncio.Transport | None = None
        self.answer: Answer | None = None
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, answer: Answer, data: bytes) -> None:
        assert self.transport is not None
        self.answer = answer
        self.body, self.body_bytes = [], 0
        answer.sent_ns = self.sender.now_ns()
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        if self.body_bytes > ANSWER_BYTES_LIMIT:
            self.close()
        else:
            self.body.append(body)

    def on_message_complete(self) -> None:
        answer, self.answer = self.answer, None
        if answer is None:
            return
        answer.status, answer.body = self.parser.get_status_code(), b"".join(self.body)
        keep = self.parser.should_keep_alive()
        self.parser = httptools.HttpResponseParser(self)
        if not keep:
            self.close()
        self.sender.finish(answer, self if keep else None)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        answer, self.answer = self.answer, None
        self.sender.drop(self)
        if answer is not None:
            answer.status = NO_CONNECTION
            self.sender.finish(answer, None)


@dataclass(slots=True)
class Sender:
    """Sends the shots of one schedule over a pool of connections."""

    host: str
    port: int
    payloads: Mapping[str, Sequence[bytes]]
    connections_limit: int
    #: Open connections without a request, most recently used last.
    idle: list[Connection] = field(default_factory=list)
    #: Shots waiting for a connection.
    waiting: deque[Answer] = field(default_factory=deque)
    opening: set[asyncio.Task[None]] = field(default_factory=set)
    connections: dict[Connection, None] = field(default_factory=dict)
    lags_ns: list[int] = field(default_factory=list)
    open_count: int = 0
    start_ns: int = 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)

    def now_ns(self) -> int:
        return time.monotonic_ns() - self.start_ns

    def submit(self, answer: Answer) -> None:
        self.open_count += 1
        self.lags_ns.append(self.now_ns() - answer.shot.at_ns)
        if self.idle:
            self.idle.pop().send(answer, self.payloads[answer.shot.tenant][answer.shot.item])
            return
        self.waiting.append(answer)
        self.open_another()

    def open_another(self) -> None:
        if len(self.connections) + len(self.opening) < self.connections_limit:
            task = asyncio.get_running_loop().create_task(self.open())
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self), self.host, self.port
            )
        except OSError:
            if self.waiting:
                answer = self.waiting.popleft()
                answer.status = NO_CONNECTION
                self.finish(answer, None)
            return
        self.connections[connection] = None
        self.use(connection)

    def use(self, connection: Connection) -> None:
        if self.waiting:
            answer = self.waiting.popleft()
            connection.send(answer, self.payloads[answer.shot.tenant][answer.shot.item])
        else:
            self.idle.append(connection)

    def finish(self, answer: Answer, connection: Connection | None) -> None:
        answer.done_ns = self.now_ns()
        self.open_count -= 1
        if self.open_count == 0:
            self.quiet.set()
        if connection is not None:
            self.use(connection)

    def drop(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        if connection in self.idle:
            self.idle.remove(connection)
        if self.waiting:
            self.open_another()

    async def run(self, schedule: Schedule, drain_s: float) -> LoadResult:
        answers = tuple(Answer(shot) for shot in schedule)
        self.start_ns = time.monotonic_ns()
        await self.pace(answers)
        if self.open_count:
            self.quiet.clear()
            try:
                await asyncio.wait_for(self.quiet.wait(), drain_s)
            except TimeoutError:
                self.give_up(answers)
        wall_s = self.now_ns() / NS
        await self.close()
        lags = [lag / 1e6 for lag in self.lags_ns]
        return LoadResult(answers, wall_s, percentile(lags, 50), percentile(lags, 99))

    async def pace(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            wait_ns = answer.shot.at_ns - self.now_ns()
            if wait_ns > 0:
                await asyncio.sleep(wait_ns / NS)
            self.submit(answer)

    def give_up(self, answers: Iterable[Answer]) -> None:
        now_ns = self.now_ns()
        for answer in answers:
            if answer.done_ns == 0:
                answer.done_ns = now_ns

    async def close(self) -> None:
        self.waiting.clear()
        for task in self.opening:
            task.cancel()
        for connection in tuple(self.connections):
            connection.answer = None
            connection.close()
        await asyncio.sleep(0)


async def run_load(
    schedule: Schedule,
    payloads: Mapping[str, Sequence[Payload]],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    connections: int = 256,
    drain_s: float = 5.0,
) -> LoadResult:
    """Send `schedule` to `host:port`; answers that take longer than `drain_s` after it are lost."""
    check_loopback(host)
    if len(schedule) > SHOTS_LIMIT or connections > CONNECTIONS_LIMIT:
        raise ValueError(f"at most {SHOTS_LIMIT} shots over {CONNECTIONS_LIMIT} connections")
    if schedule and schedule[-1].at_ns > DURATION_S_LIMIT * NS:
        raise ValueError(f"the schedule is longer than {DURATION_S_LIMIT} s")
    encoded = {
        tenant: [item.encode(f"{host}:{port}") for item in items]
        for tenant, items in payloads.items()
    }
    return await Sender(host, port, encoded, connections).run(schedule, drain_s)
