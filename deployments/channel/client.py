"""The replica's end of the channel: `SchedulerClient`, one per process and loop.

Flow: `infer` encodes one frame and waits on one future; the answer's frame resolves it. A lost
connection fails what is in flight with reason "restarting", and a task connects again, asking the
resolver for the endpoint each time. Memory of a request in the arena is released by the server's
one answer, never earlier: also after a cancel the server may still be writing there.

Nothing here is thread-safe; all calls belong to the loop that called `connect`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np

from coissue.deployments.channel import frames
from coissue.deployments.channel.arena import Arena, round_up, take_tensors
from coissue.deployments.channel.backend import InferResult
from coissue.deployments.channel.checking import STALE, TOO_LARGE, InferError, check_inputs, show
from coissue.deployments.channel.frames import ChannelLimits, Endpoint, TenantInfo, TensorRef
from coissue.deployments.channel.framing import tensor_bytes
from coissue.deployments.channel.link import Link
from coissue.deployments.channel.wire import Wire

RESTARTING: Final = "restarting"
_BACKOFF_S: Final = 0.02
_BACKOFF_S_MAX: Final = 1.0
_ATTEMPT_S: Final = 10.0
#: Nobody waits longer than this for the answer that a scheduler owes at the deadline; and how
#: often that is looked at.
_OVERDUE_S: Final = 1.0
_RETRY_AFTER_NS: Final = 1_000_000_000
#: Room for the header in the largest frame.
_HEADER_ROOM: Final = 4096

Resolver = Callable[[], Awaitable[Endpoint]]
_Answer = frames.Result | frames.Failure | frames.Told


class ChannelRefused(Exception):
    """The scheduler does not want this client (wrong secret, other protocol version)."""


class _Open:
    """One request (or ask, without `info`) that waits for its answer."""

    def __init__(self, future: asyncio.Future[Any], info: TenantInfo | None = None) -> None:
        self.future = future
        self.info = info
        #: Its block in the arena, -1: none.
        self.block = -1
        #: When it is overdue, as the loop counts.
        self.until = math.inf


class _Connection(Link):
    """One connection: from Hello until it is lost."""

    def __init__(self, client: SchedulerClient, endpoint: Endpoint) -> None:
        limits = client.limits
        super().__init__(frames.FROM_SERVER, limits, limits.header_bytes * 256)
        loop = asyncio.get_running_loop()
        self.arena = Arena(limits.arena_bytes) if endpoint.path and limits.arena_bytes else None
        #: Requests without an answer by id; also those cancelled.
        self.open: dict[int, _Open] = {}
        self.welcome: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._client = client
        self._secret = endpoint.secret
        self._next_id = 0
        self._overdue_timer: asyncio.TimerHandle | None = None

    def on_open(self) -> None:
        self._overdue_timer = self._loop.call_later(_OVERDUE_S, self._end_overdue)
        fd, size = (self.arena.fd, self.arena.num_bytes) if self.arena else (-1, 0)
        self.send(frames.Hello(frames.PROTOCOL_VERSION, self._secret, fd, size))

    def on_message(self, message: frames.Message, body: frames.Body) -> None:
        if isinstance(message, (frames.Result, frames.Failure, frames.Told)):
            entry = self.open.pop(message.id, None)
            if entry is None:
                raise frames.FrameError(f"answer to unknown request {message.id}")
            self._settle(entry, message, body)
        elif isinstance(message, frames.Directory):
            self._client._learn(message.tenants)
            if not self.welcome.done():
                self.welcome.set_result(None)
        elif isinstance(message, frames.Welcome):
            if self.arena:
                self.arena.close_fd()
                self.arena = self.arena if message.arena else None
        elif isinstance(message, frames.Goodbye):
            if message.is_refusal and not self.welcome.done():
                self.welcome.set_exception(ChannelRefused(message.error))
            self.drop(message.error or "the scheduler said goodbye")

    def _end_overdue(self) -> None:
        """A scheduler that hangs must not keep anybody beyond their deadlines until it is found
        out. Their memory is given back by its answer, should it come."""
        now = self._loop.time()
        for entry in self.open.values():
            if now > entry.until and not entry.future.done():
                entry.future.set_exception(
                    InferError("expired", "the scheduler did not answer in time")
                )
        self._overdue_timer = self._loop.call_later(_OVERDUE_S, self._end_overdue)

    def on_lost(self) -> None:
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()
        if self.arena:
            self.arena.close_fd()
        for entry in self.open.values():
            if not entry.future.done():
                entry.future.set_exception(
                    InferError(RESTARTING, f"scheduler lost: {self.error}", _RETRY_AFTER_NS)
                )
        self.open.clear()
        if not self.welcome.done():
            self.welcome.set_exception(ConnectionError(self.error))
        self.lost.set_result(None)

    def ask(self, what: str) -> asyncio.Future[bytes]:
        entry = _Open(self._loop.create_future())
        entry.until = self._loop.time() + self.limits.ask_s
        self.send(frames.Ask(self._enter(entry), what))
        return entry.future

    def infer(
        self,
        info: TenantInfo,
        inputs: Mapping[str, np.ndarray],
        budget_ns: int | None,
        priority: int,
    ) -> tuple[int, asyncio.Future[InferResult]]:
        rows, tokens = check_inputs(info, inputs)
        arrays = [np.asarray(inputs[port.name], order="C") for port in info.inputs]
        entry = _Open(self._loop.create_future(), info)
        if budget_ns is not None:
            entry.until = self._loop.time() + budget_ns * 1e-9 + _OVERDUE_S
        sizes = [array.nbytes for array in arrays]
        places = self._reserve(
            entry, sizes + [tensor_bytes(ref) for ref in info.output_refs(rows, tokens)]
        )
        refs, body = [], []
        for port, array, place in zip(info.inputs, arrays, places, strict=False):
            refs.append(TensorRef(port.dtype, array.shape, place))
            if place < 0 or self.arena is None:
                body.append(array)
            else:
                self.arena.view(port.dtype, array.shape, place)[...] = array
        if body:
            self._check_inline(entry, sum(array.nbytes for array in body))
        number = self._enter(entry)
        outputs = tuple(places[len(arrays) :]) if entry.block >= 0 else ()
        message = frames.Infer(
            number, info.name, info.version, tuple(refs), outputs, budget_ns, priority
        )
        self.send(message, body)
        if len(self.open) == 1:
            self.flush()  # a lone request has nobody to share the write with
        return number, entry.future

    def _check_inline(self, entry: _Open, num_bytes: int) -> None:
        """Whether so much may go inline now. Raises `InferError`."""
        try:
            allowed = self.limits.frame_bytes - _HEADER_ROOM
            if num_bytes > allowed:
                raise InferError(TOO_LARGE, f"inputs: {num_bytes} bytes, allowed: {allowed}")
            if num_bytes > frames.INLINE_BYTES and self.is_full:
                raise InferError(
                    "memory", "the scheduler has not read what is on the way", _RETRY_AFTER_NS
                )
        except InferError:
            self._release(entry)
            raise

    def _enter(self, entry: _Open) -> int:
        self._next_id += 1
        self.open[self._next_id] = entry
        return self._next_id

    def _reserve(self, entry: _Open, sizes: list[int]) -> list[int]:
        """Where each tensor goes: one block for all the large ones, or inline (-1)."""
        inline = [-1] * len(sizes)
        if self.arena is None or max(sizes, default=0) <= frames.INLINE_BYTES:
            return inline
        large = [round_up(size) if size > frames.INLINE_BYTES else 0 for size in sizes]
        start = self.arena.reserve(sum(large))
        if start is None:
            return inline
        entry.block = start
        ends = accumulate(large, initial=start)
        return [place if size else -1 for place, size in zip(ends, large, strict=False)]

    def _settle(self, entry: _Open, message: _Answer, body: frames.Body) -> None:
        try:
            if entry.future.done():
                return
            if isinstance(message, frames.Failure):
                error = InferError(message.reason, message.message, message.retry_after_ns)
                error.is_counted = True
                entry.future.set_exception(error)
            elif isinstance(message, frames.Told):
                entry.future.set_result(bytes(body))
            else:
                entry.future.set_result(self._result(entry, message, body))
        except (InferError, ValueError) as error:  # not the server's answer to this request
            entry.future.set_exception(InferError("internal", f"answer of the scheduler: {error}"))
        finally:
            self._release(entry)

    def _release(self, entry: _Open) -> None:
        if self.arena and entry.block >= 0:
            self.arena.release(entry.block)

    def _result(self, entry: _Open, message: frames.Result, body: frames.Body) -> InferResult:
        assert entry.info is not None, "an answer to `ask` has no tensors"
        arrays = take_tensors(message.outputs, body, self.arena)
        outputs = {
            port.name: array.copy() if ref.offset >= 0 else array
            for port, array, ref in zip(entry.info.outputs, arrays, message.outputs, strict=True)
        }
        times = message.queue_ns, message.device_ns, message.launches
        return InferResult(outputs, *times, message.request)


class SchedulerClient:
    """`await SchedulerClient.connect(endpoint or resolver)`; then `infer`, `ask`, `directory`."""

    def __init__(self, resolver: Resolver, limits: ChannelLimits) -> None:
        self.limits = limits
        #: Tenants by name, as the scheduler last told; kept while disconnected.
        self.directory: dict[str, TenantInfo] = {}
        #: Why the last attempt to connect failed, or the last connection was lost.
        self.last_error = ""
        self._resolver = resolver
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None]
        #: Set, and replaced, whenever directory or connection change.
        self._changed = asyncio.Event()

    @classmethod
    async def connect(
        cls, where: Endpoint | Resolver, limits: ChannelLimits | None = None
    ) -> SchedulerClient:
        """A client that is connected, or keeps trying (see `wait_ready`) if nobody answers yet.

        Raises `ChannelRefused` if the scheduler is there and refuses.
        """
        resolver = partial(_resolved, where) if isinstance(where, Endpoint) else where
        client = cls(resolver, limits or ChannelLimits())
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        client._task = asyncio.create_task(client._keep_connected(first))
        try:
            await first
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    @property
    def open_requests(self) -> int:
        return len(self._connection.open) if self._connection else 0

    async def wait_ready(self, *tenants: str, timeout_s: float | None = None) -> None:
        """Returns when connected and all of `tenants` are ready. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while not self.is_connected or not all(
                name in self.directory and self.directory[name].state == "ready" for name in tenants
            ):
                await self._changed.wait()

    async def infer(
        self,
        tenant: str,
        inputs: Mapping[str, np.ndarray],
        budget_ns: int | None = None,
        priority: int = 0,
        *,
        version: int | None = None,
    ) -> InferResult:
        """Runs one request. Raises `InferError`; cancelling withdraws it at the scheduler.

        None: whatever version is served. With a `version` that is served no more: reason "stale".
        """
        while True:
            connection = self._live()
            info = self.directory.get(tenant)
            if info is None:
                raise InferError("unknown_tenant", f"there is no tenant {show(tenant)}")
            if version not in (None, info.version):
                raise InferError(STALE, f"version {version} is served no more")
            number, future = connection.infer(info, inputs, budget_ns, priority)
            try:
                return await future
            except asyncio.CancelledError:
                if number in connection.open:
                    connection.send(frames.Cancel(number))
                raise
            except InferError as error:
                # The directory with the new version came before this answer.
                is_stale = error.reason == STALE and version is None
                if not is_stale or self.directory.get(tenant) is info:
                    raise

    async def ask(self, what: str) -> bytes:
        """The scheduler's "metrics", "status" or "timeline"."""
        return await self._live().ask(what)

    def report(self, report: frames.Report) -> bool:
        """Tells the scheduler what happened here. False: nobody is there to be told."""
        connection = self._connection
        if connection is None or connection.closed:
            return False
        refused, times = report.refused, report.times
        for start in range(0, max(len(refused), len(times)), frames.REPORT_LIMIT):
            part = slice(start, start + frames.REPORT_LIMIT)
            connection.send(frames.Report(refused[part], times[part]))
        return not connection.closed

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._connection:
            self._connection.close()
            await self._connection.lost
            self._connection = None

    def _live(self) -> _Connection:
        connection = self._connection
        if connection is None or connection.closed:
            why = f": {self.last_error}" if self.last_error else ""
            raise InferError(RESTARTING, f"no scheduler is connected{why}", _RETRY_AFTER_NS)
        return connection

    def _learn(self, tenants: Sequence[TenantInfo]) -> None:
        self.directory = {info.name: info for info in tenants}
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_connected(self, first: asyncio.Future[None]) -> None:
        backoff_s = _BACKOFF_S
        while True:
            try:
                async with asyncio.timeout(_ATTEMPT_S):
                    connection = await self._open()
            except Exception as error:  # a resolver may raise anything
                self.last_error = f"{type(error).__name__}: {error}"
                if not first.done():
                    if isinstance(error, ChannelRefused):
                        first.set_exception(error)
                        return
                    first.set_result(None)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)
                continue
            backoff_s = _BACKOFF_S
            self._connection = connection
            self._notify()
            if not first.done():
                first.set_result(None)
            await asyncio.shield(connection.lost)
            self.last_error = connection.error
            self._notify()

    async def _open(self) -> _Connection:
        endpoint = await self._resolver()
        connection = _Connection(self, endpoint)
        loop = asyncio.get_running_loop()
        try:
            if endpoint.path:
                await loop.create_unix_connection(lambda: Wire(connection), endpoint.path)
            else:
                await loop.create_connection(lambda: Wire(connection), endpoint.host, endpoint.port)
            await connection.welcome
        except BaseException:
            if connection.arena:
                connection.arena.close_fd()
            connection.drop("given up")
            raise
        return connection


async def _resolved(endpoint: Endpoint) -> Endpoint:
    return endpoint
