"""What goes into the core and what comes out: events, commands, and the data they carry.

Rules: plain data that nobody changes (events and commands are not frozen: that costs 1 us each);
ids are integers given by the caller or by a counter of the core; all times are integer nanoseconds
on the core's clock. The runtime makes events and carries out commands; the simulator does the same
on a simulated clock. The core never sees a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, unique
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", int)
LaunchId = NewType("LaunchId", int)
#: Index of a kernel inside its tenant's program.
KernelIndex = NewType("KernelIndex", int)
#: Equal for two kernels exactly when they may share a launch (interned by the caller).
SignatureId = NewType("SignatureId", int)
#: Equal for two kernels exactly when they read the same weights (interned by the caller).
WeightsId = NewType("WeightsId", int)


@unique
class Outcome(StrEnum):
    """How an admitted request ended."""

    #: Enum's own hash is Python code, and outcomes are counted for every request.
    __hash__ = str.__hash__

    COMPLETED = "completed"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


@unique
class Reason(Enum):
    """Why a request was rejected, expired or failed. One table in deployments maps it to HTTP."""

    DEADLINE = "deadline"  # predicted to finish too late (at admission), or expired while queued
    TENANT_QUOTA = "tenant_quota"  # the tenant's in-flight limit
    WINDOW_FULL = "window_full"
    MEMORY = "memory"
    OVER_SHARE = "over_share"  # gave way to a tenant that had less than its share
    DRAINING = "draining"
    UNKNOWN_TENANT = "unknown_tenant"
    COMPILE_FAILED = "compile_failed"
    TENANT_FAILED = "tenant_failed"  # its requests failed again and again: it is out of service
    LAUNCH_FAILED = "launch_failed"
    DEVICE_LOST = "device_lost"
    CLIENT_GONE = "client_gone"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel of a tenant's program, as the scheduler knows it."""

    signature: SignatureId
    weights: WeightsId
    #: Kernels of the same program that must be done first.
    producers: tuple[KernelIndex, ...]
    #: True: work is counted in tokens (R*T); False: in rows (R).
    per_token: bool
    #: Its rows may run in several launches, one part after the other.
    splittable: bool = False


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """A tenant as the core knows it. A new version is attached under the same name."""

    name: str
    kernels: tuple[KernelSpec, ...]
    #: Relative share of device time.
    share: float
    #: Most requests in flight at once.
    in_flight_limit: int
    #: 1 is served first among equal slack classes; larger is later.
    priority: int


# --- events: what happened ------------------------------------------------------------------


@dataclass(slots=True)
class Event:
    at_ns: int


@dataclass(slots=True)
class Attached(Event):
    tenant: TenantSpec


@dataclass(slots=True)
class Detached(Event):
    """The tenant takes no more requests; those admitted finish."""

    tenant: str


@dataclass(slots=True)
class Submitted(Event):
    request: RequestId
    tenant: str
    rows: int
    #: All tokens of the request, R*T; 0 when the program has no token axis.
    tokens: int
    deadline_ns: int
    #: 0 takes the tenant's.
    priority: int
    #: Device bytes the request needs while it runs.
    bytes_needed: int


@dataclass(slots=True)
class Cancelled(Event):
    request: RequestId


@dataclass(slots=True)
class PlanReady(Event):
    signature: SignatureId


@dataclass(slots=True)
class CompileFailed(Event):
    signature: SignatureId
    message: str


@dataclass(slots=True)
class LaunchDone(Event):
    launch: LaunchId
    #: Device time of the launch.
    measured_ns: int


@dataclass(slots=True)
class LaunchFailed(Event):
    launch: LaunchId
    message: str
    #: The input of a request is to blame, not the tenant.
    by_input: bool = False


@dataclass(slots=True)
class DeviceLost(Event):
    message: str


@dataclass(slots=True)
class DeviceBack(Event):
    pass


@dataclass(slots=True)
class Woke(Event):
    """A time asked for by `WakeAt` has come."""


@dataclass(slots=True)
class PolicyChosen(Event):
    """Use another policy from the next pump on (side-by-side runs)."""

    policy: str


@dataclass(slots=True)
class Drain(Event):
    """Admit nothing more; finish what is admitted."""


# --- commands: what is to be done --------------------------------------------------------------


@dataclass(slots=True)
class Command:
    pass


class Segment(NamedTuple):
    """One member of a batch: a request's kernel with its share of the work.

    A named tuple: the most frequent object of the core, three times cheaper to make so.
    """

    request: RequestId
    kernel: KernelIndex
    weights: WeightsId
    #: Rows or tokens, by `KernelSpec.per_token`.
    units: int
    #: The rows [start, stop) of the request that this launch is for; None: all.
    part: tuple[int, int] | None = None


@dataclass(slots=True)
class Launch(Command):
    launch: LaunchId
    signature: SignatureId
    segments: tuple[Segment, ...]
    slot: int
    predicted_ns: int
    #: Earlier than this is a bug of the scheduler; later is an expected outcome.
    earliest_ns: int
    latest_ns: int
    #: Its members come from different launches: the device joins their inputs first.
    joins: bool = False


@dataclass(slots=True)
class Compile(Command):
    signature: SignatureId


@dataclass(slots=True)
class Complete(Command):
    """The one outcome of a request. `reason` is None exactly when it completed."""

    request: RequestId
    outcome: Outcome
    reason: Reason | None = None
    message: str = ""
    #: For rejections: when trying again may succeed; 0 says nothing.
    retry_after_ns: int = 0


@dataclass(slots=True)
class PutOut(Command):
    """The tenant is out of service until it is attached anew; its open requests have failed."""

    tenant: str
    message: str


@dataclass(slots=True)
class WakeAt(Command):
    at_ns: int


@dataclass(slots=True)
class Load(Command):
    weights: WeightsId


@dataclass(slots=True)
class Evict(Command):
    weights: WeightsId


@dataclass(slots=True)
class Free(Command):
    """No kernel of the request will run any more: drop its buffers."""

    request: RequestId
