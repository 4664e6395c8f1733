"""One connection, either end: receives into one buffer, sends once per loop turn.

Rules: everything here runs on the loop that owns the connection. `on_open`, `on_message` and
`on_lost` are for the ends (`client`, `server`); `on_lost` comes exactly once. What is sent within
one turn of the loop leaves in one write. A peer that reads is never dropped, however slowly it
does: the ends send nothing large while `is_full`. One that stopped reading is, after `unread_s`, or
when small messages alone fill `frame_bytes` more.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final, cast

import msgspec
import numpy as np

from coissue.deployments.channel.frames import (
    INLINE_BYTES,
    Body,
    ChannelLimits,
    FrameError,
    Goodbye,
    Message,
)
from coissue.deployments.channel.framing import FrameReader, frame_buffers

#: A peer gets this long to read our last words.
_CLOSE_S: Final = 1.0
#: Noticing that the other host is gone: first probe, interval (seconds), count.
_KEEPALIVE: Final = (5, 2, 3)


class Link:
    def __init__(
        self, decoder: msgspec.msgpack.Decoder[Message], limits: ChannelLimits, header_bytes: int
    ) -> None:
        self.limits = limits
        self.closed = False
        #: Why the connection ends, as far as known.
        self.error = ""
        self._reader = FrameReader(decoder, limits.frame_bytes, header_bytes)
        #: Buffers of this turn, not yet given to the transport.
        self._out: list[bytes | memoryview] = []
        #: Their bytes.
        self._out_bytes = 0
        self._flush_due = False
        #: From `connection_made` on.
        self._transport: asyncio.Transport
        self._is_made = False
        self._unread_timer: asyncio.TimerHandle | None = None

    def on_open(self) -> None: ...

    def on_message(self, message: Message, body: Body) -> None:
        raise NotImplementedError

    def on_lost(self) -> None:
        raise NotImplementedError

    def send(self, message: Message, arrays: Sequence[np.ndarray] = ()) -> None:
        """Queues a frame; `arrays` must not change until they are sent."""
        if self.closed:
            return
        buffers = frame_buffers(message, arrays)
        self._out += buffers
        self._out_bytes += sum(map(len, buffers))
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    @property
    def is_full(self) -> bool:
        """Nothing large should be sent now; `on_room` tells when it may be again."""
        unread = self._transport.get_write_buffer_size() + self._out_bytes
        return unread > self.limits.unread_bytes

    def on_room(self) -> None:
        """For the ends: called when much of what was on the way has been read."""

    def flush(self) -> None:
        self._flush_due = False
        if self.closed or not self._out:
            return
        unread = self._transport.get_write_buffer_size()
        limit = self.limits.unread_bytes + self.limits.frame_bytes
        if unread > limit:
            self.drop(f"peer left {unread} bytes unread, allowed: {limit}")
            return
        out, self._out = self._out, []
        size, self._out_bytes = self._out_bytes, 0
        if len(out) == 1:
            self._transport.write(out[0])
        elif size <= INLINE_BYTES:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)

    def close(self, error: str = "", *, is_refusal: bool = False) -> None:
        """Says goodbye and ends the connection, whether or not the peer reads."""
        if self.closed:
            return
        self.error = self.error or error
        self.send(Goodbye(error, is_refusal))
        self.flush()
        if not self.closed:
            self.closed = True
            self._transport.close()
            self._loop.call_later(_CLOSE_S, self._transport.abort)

    def drop(self, error: str) -> None:
        """Ends the connection at once; does nothing on one that never came to be."""
        self.error = self.error or error
        self.closed = True
        if self._is_made:
            self._transport.abort()

    # --- called by the loop, through a `Wire` ---

    def pause_writing(self) -> None:
        """More than `unread_bytes` are on the way."""
        self._watch(self._transport.get_write_buffer_size())

    def _watch(self, unread_before: int) -> None:
        def look() -> None:
            unread = self._transport.get_write_buffer_size()
            if unread < unread_before:
                self._watch(unread)
            else:
                self.drop(f"peer read nothing for {self.limits.unread_s} s, {unread} bytes wait")

        self._unread_timer = self._loop.call_later(self.limits.unread_s, look)

    def resume_writing(self) -> None:
        if self._unread_timer:
            self._unread_timer.cancel()
            self._unread_timer = None
        self.on_room()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._is_made = True
        limit = self.limits.unread_bytes
        self._transport.set_write_buffer_limits(high=limit, low=limit // 4)
        self.socket = transport.get_extra_info("socket")
        if self.socket.family != socket.AF_UNIX:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            for name, value in zip(names, _KEEPALIVE, strict=True):
                self.socket.setsockopt(socket.IPPROTO_TCP, name, value)
        self.on_open()

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, num_bytes: int) -> None:
        try:
            for message, body in self._reader.feed(num_bytes):
                if self.closed:
                    return
                self.on_message(message, body)
        except FrameError as error:
            self.close(str(error), is_refusal=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._unread_timer:
            self._unread_timer.cancel()
        self._out.clear()
        self.error = self.error or (str(exc) if exc else "connection closed by the other side")
        self.on_lost()
