"""What the scheduler is given from outside: limits, costs, a clock, an executor.

Rules: protocols and plain data only. The core sees numbers, never a device; the executor turns
launches into device work and lives in deployments (or in `null_device` for simulation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coissue.scheduler.messages import Complete, Launch, RequestId, SignatureId

MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Every container of the core is bounded by one of these; limit k admits k."""

    #: Most admitted, unfinished requests.
    window: int = 1024
    #: Launches outstanding at once (CPU device: 1).
    slots: int = 1
    #: Most members of one launch.
    segments: int = 256
    #: Device bytes that admitted requests may reserve together.
    bytes: int = 1 << 40
    #: No launch of several members is predicted longer; one member alone may be.
    preemption_bound_ns: int = 10 * MS
    #: Longest that a kernel waits for partners while other work runs; 0: not at all.
    hold_ns: int = 10 * MS
    #: How far a tenant may get ahead of another that waits, in device time per unit of share.
    fair_window_ns: int = 100 * MS
    #: Reject at once what is predicted to finish after its deadline.
    admission: bool = True
    #: Launch records and request records kept until taken; more are counted as dropped.
    records: int = 65_536


class CostView(Protocol):
    """Predicted device time, asked by the core; corrected by what was measured."""

    def predict_ns(
        self, signature: SignatureId, units: int, segments: int, sets: int, joins: bool = False
    ) -> int:
        """Time of one launch with so many weight sets; must not fall when any argument grows.

        `joins`: its segments do not travel together so far, so their inputs must be joined first.
        """

    def observe_ns(
        self, signature: SignatureId, units: int, segments: int, sets: int, took_ns: int,
        joins: bool,
    ) -> None:  # fmt: skip
        """A launch of this size took so long."""


class InvariantViolation(Exception):
    """A bug of the scheduler: the rule's name and what was seen. Never caught in the core."""

    def __init__(self, name: str, story: str) -> None:
        super().__init__(f"{name}: {story}")
        self.name = name
        self.story = story


class Clock(Protocol):
    def now_ns(self) -> int:
        """Never goes back."""


class LaunchError(Exception):
    """The launch failed; the device still works. The text reaches the request's answer."""

    def __init__(self, message: str, *, by_input: bool = False) -> None:
        super().__init__(message)
        #: The input of a request is to blame, not its tenant.
        self.by_input = by_input


class DeviceLostError(Exception):
    """The device is gone, with all that it held."""


class RuntimeStoppedError(RuntimeError):
    """The runtime has ended; the function was not run."""


class Executor(Protocol):
    """Carries out the core's commands; called on the runtime's thread only."""

    def launch(self, launch: Launch) -> int:
        """Runs the batch and returns its device time in ns. Blocks, without the GIL.

        Raises `LaunchError` (any other exception counts as one) or `DeviceLostError`.
        """

    def compile(self, signature: SignatureId) -> None:
        """Makes the plan of an attached signature whose plan failed before; raises if it cannot."""

    def complete(self, complete: Complete) -> None:
        """The outcome of a request, exactly once; outputs are to be read before `free`."""

    def put_out(self, tenant: str, message: str) -> None:
        """The core takes no more requests of this tenant, which failed again and again."""

    def free(self, request: RequestId) -> None:
        """No kernel of the request will run any more: drop its buffers."""
