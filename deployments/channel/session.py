"""One client's connection at the scheduler, and the `Backend` that its requests go to.

Flow: frames -> check -> `Backend.submit` -> (the backend's threads) -> `Server.queue_reply` ->
`Session.answer` -> frames. Trusts nobody: what a client sends is checked against the directory
again, and a connection that breaks the protocol ends with a Goodbye that says why.

Every submitted request gets exactly one reply, also after `cancel`; its input arrays stay valid
until the backend drops them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, final

import numpy as np

from coissue.deployments.channel import frames
from coissue.deployments.channel.arena import Mapping, open_peer_arena, take_tensors
from coissue.deployments.channel.backend import Answer, SubmitRequest
from coissue.deployments.channel.checking import (
    MALFORMED,
    STALE,
    TOO_LARGE,
    InferError,
    check_types,
    check_values,
    show,
)
from coissue.deployments.channel.frames import DTYPE_NAMES, Refused, TenantInfo, TensorRef
from coissue.deployments.channel.framing import tensor_bytes
from coissue.deployments.channel.link import Link
from coissue.scheduler.ready import PRIORITIES

if TYPE_CHECKING:
    from coissue.deployments.channel.server import ChannelServer

log = logging.getLogger(__name__)

_PEER: Final = struct.Struct("3i")  # pid, uid, gid
_ASKS: Final = 8


@final
class _Pending:
    def __init__(
        self,
        handle: int,
        info: TenantInfo,
        refs: tuple[TensorRef, ...],
        outputs: tuple[int, ...],
        held_bytes: int,
    ) -> None:
        self.handle = handle
        self.info = info
        #: The outputs to come.
        self.refs = refs
        #: Their arena offsets, -1: inline. Empty: all inline.
        self.outputs = outputs
        #: Bytes of the frame's body, kept alive by the inputs, and of the outputs that will be
        #: inline.
        self.held_bytes = held_bytes


class Session(Link):
    """One client's connection."""

    def __init__(self, server: ChannelServer) -> None:
        super().__init__(frames.FROM_CLIENT, server.limits, server.limits.header_bytes)
        self._server = server
        self._arena: Mapping | None = None
        self._greeted = False
        #: Requests without an answer on its way, by the client's id.
        self._pending: dict[int, _Pending] = {}
        #: Answers that wait until the client has read others.
        self._waiting: deque[tuple[int, Answer]] = deque()
        #: Inline tensor bytes of all pending: inputs, and outputs to come.
        self._held_bytes = 0
        self._asks = 0
        self._peer_pid = 0
        self._hello_timer: asyncio.TimerHandle | None = None

    def on_open(self) -> None:
        server = self._server
        if self.socket.family == socket.AF_UNIX:
            raw = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            self._peer_pid, uid, _ = _PEER.unpack(raw)
            if uid != os.getuid():
                error = f"user {uid} may not use the scheduler of user {os.getuid()}"
                self.close(error, is_refusal=True)
                return
        if len(server.sessions) >= self.limits.connections:
            self.close(f"too many connections, allowed: {self.limits.connections}")
            return
        server.sessions[self] = None
        self._hello_timer = self._loop.call_later(
            self.limits.hello_s, self.close, f"no hello within {self.limits.hello_s} s"
        )

    def on_message(self, message: frames.Message, body: frames.Body) -> None:
        if not self._greeted and not isinstance(message, frames.Hello):
            raise frames.FrameError(f"first frame is {type(message).__name__}, allowed: Hello")
        if isinstance(message, frames.Infer):
            self._infer(message, body)
        elif isinstance(message, frames.Cancel):
            if entry := self._pending.get(message.id):
                self._server.backend.cancel(entry.handle)
        elif isinstance(message, frames.Ask):
            self._ask(message)
        elif isinstance(message, frames.Report):
            for refused in message.refused[: frames.REPORT_LIMIT]:
                self._server.backend.count_refused(refused)
            for times in message.times[: frames.REPORT_LIMIT]:
                self._server.backend.observe_times(times)
        elif isinstance(message, frames.Hello):
            self._hello(message)
        elif isinstance(message, frames.Goodbye):
            self.close()

    def on_lost(self) -> None:
        self._server.sessions.pop(self, None)
        if self._hello_timer:
            self._hello_timer.cancel()
        pending, self._pending = self._pending, {}
        for number, _ in self._waiting:
            del pending[number]
        self._waiting.clear()
        for entry in pending.values():
            self._server.backend.cancel(entry.handle)
        self._arena = None  # unmapped with the last array on it

    def _hello(self, hello: frames.Hello) -> None:
        if self._greeted:
            raise frames.FrameError("a second Hello")
        if hello.version != frames.PROTOCOL_VERSION:
            given = f"protocol version {hello.version}"
            raise frames.FrameError(f"{given}, allowed: {frames.PROTOCOL_VERSION}")
        secret = self._server.endpoint.secret
        if secret and not hmac.compare_digest(hello.secret.encode(), secret.encode()):
            raise frames.FrameError("wrong secret")
        self._greeted = True
        if self._hello_timer:
            self._hello_timer.cancel()
        if hello.arena_fd >= 0 and self._peer_pid:
            try:
                self._arena = open_peer_arena(
                    self._peer_pid, hello.arena_fd, hello.arena_bytes, self.limits.arena_bytes_limit
                )
            except (OSError, ValueError) as error:
                log.warning("channel arena refused: pid=%d error=%s", self._peer_pid, error)
        self.send(frames.Welcome(frames.PROTOCOL_VERSION, self._arena is not None))
        self.send(frames.Directory(tuple(self._server.tenants.values())))

    def _infer(self, message: frames.Infer, body: frames.Body) -> None:
        if message.id in self._pending:
            raise frames.FrameError(f"request {message.id} is open already")
        try:
            request, entry = self._check(message, body)
        except InferError as error:
            if error.reason != STALE:  # the client tries again by itself
                self._server.backend.count_refused(Refused(message.tenant, error.reason, 1))
            self._fail(message.id, error)
            return
        self._pending[message.id] = entry
        self._held_bytes += entry.held_bytes
        reply = partial(self._server.queue_reply, self, message.id)
        try:
            self._server.backend.submit(request, reply)
        except Exception:
            log.exception("submit failed: tenant=%s", message.tenant)
            reply(Answer(reason="internal", message="the scheduler failed to take the request"))

    def _check(self, message: frames.Infer, body: frames.Body) -> tuple[SubmitRequest, _Pending]:
        info = self._server.tenants.get(message.tenant)
        limits = self.limits
        if info is None:
            raise InferError("unknown_tenant", f"there is no tenant {show(message.tenant)}")
        if info.state != "ready":
            why = f": {info.reason}" if info.reason else ""
            raise InferError(info.state, f"tenant {info.name!r} is {info.state}{why}")
        if message.version != info.version:
            raise InferError(STALE, f"version {message.version}, allowed: {info.version}")
        if message.budget_ns is not None and message.budget_ns < 0:
            raise InferError(MALFORMED, f"budget_ns: {message.budget_ns}, allowed: 0 or more")
        if not 0 <= message.priority <= PRIORITIES:
            raise InferError(MALFORMED, f"priority: {message.priority}, allowed: 0 to {PRIORITIES}")
        if len(self._pending) >= limits.open_requests:
            raise InferError("window_full", f"open requests: {len(self._pending)} are the limit")
        rows, tokens = check_types(info, [(ref.dtype, ref.shape) for ref in message.inputs])
        inputs = take_tensors(message.inputs, body, self._arena)
        check_values(info, inputs)
        refs = info.output_refs(rows, tokens)
        held = len(body) + self._check_outputs(info, message.outputs, refs)
        if self._held_bytes + held > limits.held_bytes:
            raise InferError("memory", f"open requests hold {self._held_bytes} bytes already")
        handle = self._server.next_handle()
        return (
            SubmitRequest(
                handle, info.name, info.version, rows, tokens, inputs,
                message.budget_ns, message.priority,
            ),
            _Pending(handle, info, refs, message.outputs, held),
        )  # fmt: skip

    def _check_outputs(
        self, info: TenantInfo, offsets: tuple[int, ...], refs: tuple[TensorRef, ...]
    ) -> int:
        """Bytes of the outputs that will be inline."""
        if len(offsets) not in (0, len(info.outputs)):
            raise InferError(
                MALFORMED, f"outputs: {len(offsets)} offsets, allowed: 0 or {len(info.outputs)}"
            )
        inline = 0
        for port, ref, offset in zip(info.outputs, refs, offsets or (-1,) * len(refs), strict=True):
            if offset < 0:
                inline += tensor_bytes(ref)
                continue
            if self._arena is None:
                raise InferError(MALFORMED, f"output {port.name!r}: there is no arena")
            self._arena.view(ref.dtype, ref.shape, offset)
        allowed = self.limits.frame_bytes - self.limits.header_bytes
        if inline > allowed:
            raise InferError(TOO_LARGE, f"outputs: {inline} bytes, allowed: {allowed}")
        return inline

    def answer(self, number: int, answer: Answer) -> None:
        """Sends the answer of request `number`, as soon as the client has read enough of the
        others, unless it is gone."""
        if number not in self._pending:
            return
        if self._waiting or (answer.outputs and self.is_full):
            self._waiting.append((number, answer))
        else:
            self._answer(number, answer)

    def on_room(self) -> None:
        while self._waiting and not self.closed and not self.is_full:
            self._answer(*self._waiting.popleft())
            self.flush()

    def _answer(self, number: int, answer: Answer) -> None:
        entry = self._pending.pop(number)
        self._held_bytes -= entry.held_bytes
        try:
            if answer.reason:
                raise InferError(answer.reason, answer.message, answer.retry_after_ns)
            refs, inline = self._place(entry, answer.outputs)
        except InferError as error:
            self._fail(number, error)
            return
        times = answer.queue_ns, answer.device_ns, answer.launches
        self.send(frames.Result(number, refs, *times, answer.request), inline)

    def _place(
        self, entry: _Pending, outputs: Sequence[np.ndarray]
    ) -> tuple[tuple[TensorRef, ...], list[np.ndarray]]:
        """Copies outputs into the arena where the client reserved room; the rest goes inline."""
        refs = entry.refs
        if len(outputs) != len(refs):
            raise InferError("internal", f"{len(outputs)} outputs computed, not {len(refs)}")
        inline = []
        for index, (ref, output) in enumerate(zip(refs, outputs, strict=True)):
            if output.shape != ref.shape or DTYPE_NAMES.get(output.dtype) != ref.dtype:
                raise InferError(
                    "internal",
                    f"output {entry.info.outputs[index].name!r}: computed {output.dtype} "
                    f"{list(output.shape)}, not {ref.dtype} {list(ref.shape)}",
                )
            if entry.outputs and entry.outputs[index] >= 0:
                assert self._arena is not None  # `_check_outputs` saw to that
                np.copyto(self._arena.view(ref.dtype, ref.shape, entry.outputs[index]), output)
            else:
                inline.append(np.asarray(output, order="C"))
        if entry.outputs:
            placed = zip(refs, entry.outputs, strict=True)
            refs = tuple([TensorRef(ref.dtype, ref.shape, offset) for ref, offset in placed])
        return refs, inline

    def push(self, message: frames.Directory) -> None:
        if self._greeted:
            self.send(message)

    def _fail(self, number: int, error: InferError) -> None:
        self.send(frames.Failure(number, error.reason, error.message, error.retry_after_ns))

    def _ask(self, message: frames.Ask) -> None:
        if self._asks >= _ASKS:
            self._fail(message.id, InferError("window_full", f"asks: {_ASKS} are open already"))
            return
        self._asks += 1
        future = self._loop.run_in_executor(None, self._server.backend.ask, message.what)
        future.add_done_callback(partial(self._told, message))

    def _told(self, message: frames.Ask, future: asyncio.Future[bytes]) -> None:
        self._asks -= 1
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            data = np.frombuffer(future.result(), np.uint8)
            self.send(frames.Told(message.id), [data])
        elif isinstance(error, KeyError):
            self._fail(message.id, InferError(MALFORMED, f"what: {show(message.what)} is unknown"))
        else:
            log.error("ask failed: what=%s", message.what, exc_info=error)
            self._fail(message.id, InferError("internal", f"{message.what} failed"))
