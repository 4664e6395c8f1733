"""What the two ends of the channel give to those who use them: plain structures, and the server's
`Backend`. Like all structures of msgspec they are not compiled (decision 012)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from coissue.deployments.channel.frames import Refused, TenantInfo, Times


class InferResult(msgspec.Struct, frozen=True):
    outputs: dict[str, np.ndarray]
    queue_ns: int
    device_ns: int
    launches: int
    #: Its number in the scheduler, which the timeline and recordings have too.
    request: int


class SubmitRequest(msgspec.Struct, frozen=True):
    """A checked request. `handle` is unique in this server; `tokens` is T (0: no token axis)."""

    handle: int
    tenant: str
    version: int
    rows: int
    tokens: int
    #: In the tenant's order; read-only by convention: they may lie in the client's memory.
    inputs: list[np.ndarray]
    #: From now; None: the tenant's SLO.
    budget_ns: int | None
    #: 0: the tenant's.
    priority: int


class Answer(msgspec.Struct, frozen=True):
    """Outputs in the tenant's order (not to be changed any more), or a `reason` why not."""

    outputs: Sequence[np.ndarray] = ()
    queue_ns: int = 0
    device_ns: int = 0
    launches: int = 0
    request: int = 0
    reason: str = ""
    message: str = ""
    retry_after_ns: int = 0


class Backend(Protocol):
    """What the server serves. All methods but `ask` are called on the loop and must be quick."""

    def directory(self) -> list[TenantInfo]: ...

    def submit(self, request: SubmitRequest, reply: Callable[[Answer], None]) -> None:
        """`reply` may be called from any thread, now or later, exactly once."""

    def cancel(self, handle: int) -> None:
        """The client does not want the answer any more; unknown handles are ignored."""

    def observe_times(self, times: Times) -> None: ...

    def count_refused(self, refused: Refused) -> None:
        """Requests that never came to `submit`; nothing in it has been checked."""

    def ask(self, what: str) -> bytes:
        """Called on a worker thread. Raises `KeyError` for what it does not know."""
