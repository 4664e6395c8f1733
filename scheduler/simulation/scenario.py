"""A scenario: tenants, traffic, devices, limits and faults, as data. All of a run but the seed.

Everything here goes to plain data and back (`coissue.scheduler.plain`), so that a scenario that
failed can be kept in a file. `mix.py` makes scenarios from few words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from coissue.scheduler.messages import Submitted, TenantSpec
from coissue.scheduler.null_device import DeviceModel, LinearCost
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.ports import MS, CoreLimits

SECOND: Final = 1000 * MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How a tenant's requests come. One of: a trace, bursts, gamma-distributed gaps."""

    #: Coefficient of variation of the gaps: 1 is Poisson, more is bursty (gamma).
    cv: float = 1.0
    #: Mean lengths of bursts and of the silence between them (exponential); on 0: no bursts.
    on_ns: int = 0
    off_ns: int = 0
    #: Times of a recorded trace from 0 on, rising; scaled to the tenant's rate, repeated, and
    #: begun anywhere. Empty: no trace.
    trace_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.cv <= 100:
            raise ValueError(f"cv must be above 0 and at most 100, not {self.cv}")
        if self.on_ns < 0 or self.off_ns < 0:
            raise ValueError("on_ns and off_ns must not be negative")
        if self.trace_ns and (len(self.trace_ns) < 2 or self.trace_ns[-1] <= self.trace_ns[0]):
            raise ValueError("a trace needs two different times")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTenant:
    """A tenant and its traffic. Ranges are inclusive and drawn evenly."""

    spec: TenantSpec
    #: 0: only the scenario's `given` requests.
    rate_hz: float
    #: From submission.
    deadline_ns: int
    traffic: Traffic = Traffic()
    rows: tuple[int, int] = (1, 1)
    #: T of one request; all its rows have it.
    tokens: tuple[int, int] = (0, 0)
    bytes_needed: int = 0
    #: Launches with its weights in them take this many times longer than the core was told.
    slowdown: float = 1.0
    #: Until then; 0: always.
    slow_until_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong besides launches (see `DeviceModel`), at drawn times."""

    #: Chance of each request to be cancelled at some time before its deadline.
    cancel_rate: float = 0.0
    #: How often a plan is lost, and a device (for 10 ms).
    compile_failures: int = 0
    device_losses: int = 0
    #: How often one tenant sends `burst_requests` at once.
    bursts: int = 0
    burst_requests: int = 200
    #: How often a device's clock jumps: for `jump_ns` its scheduler sees nothing of what happens.
    clock_jumps: int = 0
    jump_ns: int = 50 * MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    tenants: tuple[SimTenant, ...]
    duration_ns: int
    policy: str = "space_time"
    #: Of each device.
    limits: CoreLimits = field(default_factory=CoreLimits)
    devices: int = 1
    #: What the core believes of launches; the device differs from it by `device`.
    cost: LinearCost = field(default_factory=LinearCost)
    device: DeviceModel = field(default_factory=DeviceModel)
    faults: Faults = Faults()
    #: Requests at fixed times, besides those drawn (a recorded run).
    given: tuple[Submitted, ...] = ()
    #: As the live runtime: what comes during a launch is seen when it ends. Needs one slot.
    blocking: bool = False
    #: Check every invariant after every turn, and make the digest.
    check: bool = True

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.duration_ns < 1 or self.devices < 1:
            raise ValueError("duration_ns and devices must be at least 1")
        if self.blocking and self.limits.slots != 1:
            raise ValueError("a blocking device has one slot")
