"""The two state tables: of a kernel and of a request. All legal moves are here and nowhere else.

`render_diagram` writes them as Mermaid for ARCHITECTURE.md. Request moves are checked as they
happen; kernel moves are too frequent for that and are checked by tests on every edge taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, unique
from typing import Final

from coissue.scheduler.messages import Outcome


class _State(IntEnum):
    #: Enum's own hash is Python code, and these are looked up for every request.
    __hash__ = int.__hash__


@unique
class KernelState(_State):
    BLOCKED = 0  # a producer is not done
    READY = 1  # in the ready queue of its signature
    BATCHED = 2  # chosen; only inside one pump
    IN_FLIGHT = 3  # in a launch that has not come back
    DONE = 4
    FAILED = 5
    CANCELLED = 6  # its request ended first


@unique
class RequestState(_State):
    ADMITTED = 0  # nothing launched yet
    RUNNING = 1  # has results or work on the device
    COMPLETED = 2
    EXPIRED = 3
    FAILED = 4
    CANCELLED = 5
    REJECTED = 6  # gave way before anything was launched


_K, _R = KernelState, RequestState

KERNEL_EDGES: Final[Mapping[KernelState, tuple[KernelState, ...]]] = {
    _K.BLOCKED: (_K.READY, _K.CANCELLED),
    _K.READY: (_K.BATCHED, _K.CANCELLED),
    _K.BATCHED: (_K.IN_FLIGHT,),
    #: Back to READY: its launch failed and it is tried once more, alone.
    _K.IN_FLIGHT: (_K.DONE, _K.READY, _K.FAILED, _K.CANCELLED),
    _K.DONE: (),
    _K.FAILED: (),
    _K.CANCELLED: (),
}

REQUEST_EDGES: Final[Mapping[RequestState, tuple[RequestState, ...]]] = {
    #: COMPLETED at once when the program has no kernel.
    _R.ADMITTED: (
        _R.RUNNING,
        _R.COMPLETED,
        _R.EXPIRED,
        _R.FAILED,
        _R.CANCELLED,
        _R.REJECTED,
    ),
    _R.RUNNING: (_R.COMPLETED, _R.EXPIRED, _R.FAILED, _R.CANCELLED),
    _R.COMPLETED: (),
    _R.EXPIRED: (),
    _R.FAILED: (),
    _R.CANCELLED: (),
    _R.REJECTED: (),
}

#: The state in which a request with this outcome ends.
END_STATE: Final[Mapping[Outcome, RequestState]] = {
    Outcome.COMPLETED: _R.COMPLETED,
    Outcome.EXPIRED: _R.EXPIRED,
    Outcome.FAILED: _R.FAILED,
    Outcome.CANCELLED: _R.CANCELLED,
    Outcome.REJECTED: _R.REJECTED,
}


def render_diagram(
    edges: Mapping[KernelState, tuple[KernelState, ...]]
    | Mapping[RequestState, tuple[RequestState, ...]],
) -> str:
    """A Mermaid state diagram of one table."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(edges)).name}"]
    for start, ends in edges.items():
        lines += [f"    {start.name} --> {end.name}" for end in ends or ()]
        lines += [] if ends else [f"    {start.name} --> [*]"]
    return "\n".join(lines) + "\n"
