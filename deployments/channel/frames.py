"""Frames: what goes over the channel between a replica and the scheduler, as bytes.

One frame is `u32 size of the whole frame, u32 size of the header` (little-endian), the header (one
message below as msgpack), zeros up to a multiple of `ALIGN`, then the body: the tensors that do not
travel in shared memory, raw little-endian, each starting at a multiple of `ALIGN`.

Rules: a header decodes to one of the messages or the connection ends; nothing is ever unpickled.
bf16 has no numpy type: its bit patterns travel as uint16, which no other IR dtype uses. `framing`
makes the bytes and reads them: these structures are not compiled (decision 012), that is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from coissue.kernels.ir import Dim

PROTOCOL_VERSION: Final = 2
ALIGN: Final = 16
PREFIX: Final = struct.Struct("<II")
#: Frames up to this size are collected in the receive buffer; a larger one gets its own memory.
CHUNK_BYTES: Final = 256 * 1024
#: Request sizes remembered per tenant.
SIZES_LIMIT: Final = 1024
#: Tensors up to this size travel in the body, larger ones in shared memory.
INLINE_BYTES: Final = 64 * 1024

NUMPY_DTYPES: Final[dict[str, np.dtype]] = {
    name: np.dtype(code)
    for name, code in {
        "bool": "?", "u8": "u1", "i8": "i1", "i16": "<i2", "i32": "<i4", "i64": "<i8",
        "f16": "<f2", "bf16": "<u2", "f32": "<f4", "f64": "<f8",
    }.items()
}  # fmt: skip
DTYPE_NAMES: Final[dict[np.dtype, str]] = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


#: In seconds, from 0.5 ms to 10 s; finer between 5 and 200 ms, where objectives live.
TIME_BOUNDS: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0,
)  # fmt: skip
#: The tensors of a frame that are not in shared memory.
Body = memoryview | bytes


class FrameError(Exception):
    """The peer sent bytes that are not a frame: the connection cannot go on."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a scheduler listens: `path` (Unix socket), or `host` and `port` with a secret."""

    path: str = ""
    host: str = ""
    port: int = 0
    secret: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"tcp:{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Bounds of one connection, at the end that enforces them."""

    frame_bytes: int = 128 << 20
    #: Header a server accepts; a client accepts 256 times as much (directories).
    header_bytes: int = 64 << 10
    #: Largest arena a server maps, and the arena a client makes.
    arena_bytes_limit: int = 1 << 30
    arena_bytes: int = 128 << 20
    #: With more than this on the way to a peer, tensors wait or are refused until it has read.
    unread_bytes: int = 64 << 20
    #: A peer that reads nothing for so long, with more than `unread_bytes` on the way, is dropped.
    unread_s: float = 30.0
    #: Open requests of one connection, and the inline tensor bytes of their inputs and outputs.
    open_requests: int = 16_384
    held_bytes: int = 512 << 20
    connections: int = 1024
    hello_s: float = 5.0
    #: For an answer about the scheduler itself; looked at once a second.
    ask_s: float = 5.0


class PortInfo(msgspec.Struct, frozen=True):
    """An input or output of a tenant: the IR's dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    #: An input whose values are looked up in a table: 0 to this, exclusive. 0: none that is known.
    below: int = 0

    def at(self, rows: int, tokens: int) -> tuple[int, ...]:
        """The shape for a request of `rows` rows of `tokens` tokens."""
        return tuple([d.scale * rows**d.rows * tokens**d.tokens for d in self.shape])


class TensorRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a request or result: in the arena at `offset`, or next in the body if -1."""

    dtype: str
    shape: tuple[int, ...]
    offset: int = -1


def printable(text: str) -> str:
    """`text` as JSON and UTF-8 carry it. What comes from a tenant's code may hold halves of
    surrogate pairs, of which Python makes file names that are not UTF-8: they become escapes."""
    return text.encode(errors="backslashreplace").decode()


class TenantInfo(msgspec.Struct, frozen=True, dict=True):
    """What a replica must know of a tenant; `reason` says why it is not ready."""

    name: str
    version: int
    state: Literal["ready", "loading", "failed", "draining"]
    inputs: tuple[PortInfo, ...] = ()
    outputs: tuple[PortInfo, ...] = ()
    rows_limit: int = 1
    tokens_limit: int = 0
    slo_class: str = ""
    deadline_ns: int = 0
    objective: float = 0.99
    priority: int = 1
    in_flight_limit: int = 1
    share: float = 1.0
    nan: Literal["allow", "reject"] = "allow"
    reason: str = ""
    #: Its `HandlerSettings` as JSON: they change in the same step as the version. Empty: none.
    handler: str = ""

    def __post_init__(self) -> None:
        # All tenants travel in one message: none may be the one that cannot be written.
        msgspec.structs.force_setattr(self, "reason", printable(self.reason))

    @cached_property
    def sizes(self) -> dict[Any, tuple[int, int]]:
        """(R, T) by the inputs' types that were found to be in order; see `checking`."""
        return {}

    @cached_property
    def _outputs(self) -> dict[tuple[int, int], tuple[TensorRef, ...]]:
        return {}

    def output_refs(self, rows: int, tokens: int) -> tuple[TensorRef, ...]:
        """The outputs of a request of this size, inline."""
        refs = self._outputs.get((rows, tokens))
        if refs is None:
            if len(self._outputs) >= SIZES_LIMIT:
                self._outputs.clear()
            refs = tuple(TensorRef(port.dtype, port.at(rows, tokens)) for port in self.outputs)
            self._outputs[rows, tokens] = refs
        return refs


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Hello(Message, frozen=True, tag=1):
    """First frame of a client. `arena_fd` is its descriptor of a sealed memfd (see `arena`)."""

    version: int
    secret: str = ""
    arena_fd: int = -1
    arena_bytes: int = 0


class Infer(Message, frozen=True, tag=2):
    """A request. Inputs are in the tenant's order; `outputs` are arena offsets (-1: inline)."""

    id: int
    tenant: str
    version: int
    inputs: tuple[TensorRef, ...]
    outputs: tuple[int, ...] = ()
    #: Nanoseconds from arrival to deadline; None takes the tenant's SLO.
    budget_ns: int | None = None
    priority: int = 0


class Cancel(Message, frozen=True, tag=3):
    id: int


class Ask(Message, frozen=True, tag=4):
    id: int
    what: str


class Refused(NamedTuple):
    """Requests that a replica answered itself: malformed, too large, no such tenant."""

    #: Empty when there is none of that name.
    tenant: str
    reason: str
    requests: int
    #: Whether the scheduler had done them, and counted them as answered.
    is_done: bool = False


class Times(NamedTuple):
    """How long something took in a replica, as a histogram."""

    #: "http": arrival to answer, of a tenant's requests; "lag": how late the loop was, of none.
    kind: str
    tenant: str
    #: Per bound of `TIME_BOUNDS`, and beyond the last.
    counts: tuple[int, ...]
    seconds: float


#: Entries of each kind in one report.
REPORT_LIMIT: Final = 256


class Report(Message, frozen=True, tag=11):
    """What happened in a replica since its last report; there is no answer."""

    refused: tuple[Refused, ...] = ()
    times: tuple[Times, ...] = ()


class Goodbye(Message, frozen=True, tag=5):
    """Last frame of either side. `is_refusal`: trying again with the same bytes is no use."""

    error: str = ""
    is_refusal: bool = False


class Welcome(Message, frozen=True, tag=6):
    """Answer to Hello. `arena` says whether the offered arena is in use."""

    version: int
    arena: bool = False


class Directory(Message, frozen=True, tag=7):
    tenants: tuple[TenantInfo, ...]


class Result(Message, frozen=True, tag=8):
    id: int
    outputs: tuple[TensorRef, ...]
    queue_ns: int = 0
    device_ns: int = 0
    launches: int = 0
    #: Its number in the scheduler.
    request: int = 0


class Failure(Message, frozen=True, tag=9):
    id: int
    reason: str
    message: str
    retry_after_ns: int = 0


class Told(Message, frozen=True, tag=10):
    """Answer to Ask: the body."""

    id: int


FROM_CLIENT: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(
    Hello | Infer | Cancel | Ask | Goodbye | Report
)
FROM_SERVER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(
    Welcome | Directory | Result | Failure | Told | Goodbye
)
