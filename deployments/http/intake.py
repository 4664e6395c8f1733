"""What a replica takes in at once: requests, bodies being read, and the bytes of those it holds.

Each has a bound, and what is beyond it is refused at once: a client that sends slowly or much can
take the place of others for `body_seconds`, not for ever. Serve lets more requests in than
`ongoing` (see `SPARE`), so a refusal and the routes without a body never wait behind the bodies.
Nothing here blocks; all of it belongs to the replica's loop.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from coissue.deployments.channel.checking import show
from coissue.deployments.http.errors import Answer, HttpError, malformed
from coissue.deployments.settings import BODY_BYTES_PER_SECOND, MIB

#: Requests that Serve lets into a replica beyond `ongoing`: to be refused, or without a body.
SPARE: Final = 512
BUSY_NS: Final = 1_000_000_000
#: For a body to be there whole, where too many others are on their way.
WHOLE_SECONDS: Final = 0.1


@dataclass(frozen=True)
class IntakeLimits:
    #: Largest body, before and after decompression.
    body_bytes: int = 64 * MIB
    #: A body has this long to come, and a second more for each `BODY_BYTES_PER_SECOND` of it.
    body_seconds: float = 10.0
    #: Requests with a body at once.
    ongoing: int = 512
    #: Bytes of bodies at once, from the first byte until the request is answered.
    held_bytes: int = 512 * MIB

    @property
    def reading(self) -> int:
        """Bodies being read at once: the rest of `ongoing` stays for those that came whole."""
        return max(1, self.ongoing * 3 // 4)


@final
class Due:
    """When a request came to this replica, and how long it may take from there."""

    def __init__(self, budget_ns: int, arrived_ns: int) -> None:
        self.budget_ns = budget_ns
        #: As `time.monotonic_ns` counts.
        self.arrived_ns = arrived_ns
        #: Where the time went, as the value of a `Server-Timing` header; empty: not known.
        self.timing = b""

    def left_ns(self) -> int:
        """Never 0: raises once the deadline has passed."""
        left = self.budget_ns - (time.monotonic_ns() - self.arrived_ns)
        if left <= 0:
            raise self.mark(HttpError("expired", "the deadline passed before the request was done"))
        return left

    def mark(self, error: HttpError) -> HttpError:
        """The error, with what it says of a request that the scheduler has done, or has not."""
        error.is_done = bool(self.timing)
        return error

    def keep(self, answer: Answer) -> Answer:
        """The answer, if it is in time."""
        self.left_ns()
        if self.timing:
            answer[1].append((b"server-timing", self.timing))
        return answer


class Intake:
    """Counts what is in the replica now. The limits may change meanwhile."""

    def __init__(self, limits: Callable[[], IntakeLimits]) -> None:
        self.limits = limits
        self.ongoing = 0
        self.reading = 0
        self.held_bytes = 0


class Body:
    """The body of one request, around which it is a context: what the body holds is given back at
    the end. Written out, not by `contextmanager`: each request pays for it."""

    __slots__ = ("_intake", "held_bytes")

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.held_bytes = 0

    def __enter__(self) -> Body:
        intake = self._intake
        if intake.ongoing >= intake.limits().ongoing:
            raise _full("window_full", f"{intake.ongoing} requests are open in this replica")
        intake.ongoing += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._intake.ongoing -= 1
        self._intake.held_bytes -= self.held_bytes

    def _hold(self, num_bytes: int) -> None:
        intake = self._intake
        limit = intake.limits().held_bytes
        if intake.held_bytes + num_bytes > limit:
            held = f"bodies: {intake.held_bytes} bytes are held in this replica"
            raise _full("memory", f"{held}, allowed: {limit}")
        intake.held_bytes += num_bytes
        self.held_bytes += num_bytes

    async def read(
        self, headers: Mapping[bytes, bytes], receive: Callable[[], Awaitable[dict[str, Any]]]
    ) -> bytes:
        intake = self._intake
        limits = intake.limits()
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limits.body_bytes:
            raise too_large(limits.body_bytes, f"{length[:20].decode('latin-1')} bytes")
        is_slow = intake.reading < limits.reading  # it may be
        intake.reading += is_slow
        try:
            body = await self._receive(receive, limits.body_seconds if is_slow else 0.0)
        finally:
            intake.reading -= is_slow
        encoding = headers.get(b"content-encoding")
        if encoding is None:
            return body
        plain = decompress(body, encoding, limits.body_bytes)
        self._hold(len(plain))
        return plain

    async def _receive(
        self, receive: Callable[[], Awaitable[dict[str, Any]]], base_seconds: float
    ) -> bytes:
        """`base_seconds` 0: only if it comes whole."""
        limits = self._intake.limits()
        started = asyncio.get_running_loop().time()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout_at(started + (base_seconds or WHOLE_SECONDS)) as clock:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HttpError("client_gone", "the client left while sending")
                    part: bytes = message.get("body", b"")
                    self._hold(len(part))
                    parts.append(part)
                    size += len(part)
                    if size > limits.body_bytes:
                        raise too_large(limits.body_bytes, f"{size} bytes and more")
                    if not message.get("more_body"):
                        return part if len(parts) == 1 else b"".join(parts)
                    if base_seconds:
                        clock.reschedule(started + base_seconds + size / BODY_BYTES_PER_SECOND)
        except TimeoutError:
            if not base_seconds:
                raise _full(
                    "replica_full", f"{self._intake.reading} bodies are on the way already"
                ) from None
            seconds = base_seconds + size / BODY_BYTES_PER_SECOND
            raise HttpError(
                "body_timeout",
                f"body: {size} bytes and no end of it in {seconds:.0f} s",
                closes=True,
            ) from None


def _full(reason: str, message: str) -> HttpError:
    return HttpError(reason, message, BUSY_NS, closes=True)


def too_large(limit: int, given: str) -> HttpError:
    # The rest of the body is not read: the connection cannot be used again.
    return HttpError("too_large", f"body: {given}, allowed: {limit}", closes=True)


def decompress(body: bytes, encoding: bytes, limit: int) -> bytes:
    """The gzip or deflate (zlib) body; never holds more than `limit` bytes of it."""
    named = encoding.lower()
    if named == b"identity":
        return body
    bits = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}.get(named)
    if bits is None:
        name = show(encoding.decode("latin-1"))
        raise malformed(f"header Content-Encoding: {name} is not gzip or deflate")
    inflater = zlib.decompressobj(bits)
    try:
        result = inflater.decompress(body, limit + 1)
    except zlib.error:
        raise malformed(f"body: not valid {encoding.decode()}") from None
    if len(result) > limit:
        raise too_large(limit, f"more than {limit} bytes unpacked")
    if not inflater.eof or inflater.unused_data:
        raise malformed(f"body: the {encoding.decode()} data are truncated or followed by others")
    return result
