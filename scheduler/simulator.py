"""Whole runs of the core on a simulated clock: seeded arrivals and faults, a null device, a report.

    simulate(scenario, seed) -> Report

The same scenario and seed give the same run, event for event, in any process. With `check` every
invariant is checked after every turn, and the digest of all records tells two runs apart. After the
last arrival everything must drain: a request without outcome, or a launch or byte left, is an
InvariantViolation. One device; placement over several is not simulated.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import final

from coissue.scheduler.clock import SimulatedClock
from coissue.scheduler.core import Core
from coissue.scheduler.messages import (
    Attached,
    Cancelled,
    Command,
    Compile,
    CompileFailed,
    DeviceBack,
    DeviceLost,
    Event,
    Launch,
    LaunchDone,
    LaunchFailed,
    Outcome,
    PlanReady,
    RequestId,
    Submitted,
    TenantSpec,
    WakeAt,
    Woke,
)
from coissue.scheduler.null_device import LinearCost, NullDevice
from coissue.scheduler.ports import MS, CoreLimits, InvariantViolation, LaunchError
from coissue.scheduler.trace import LaunchRecord, RequestRecord

SECOND = 1000 * MS


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTenant:
    """A tenant and its traffic. Ranges are inclusive and drawn evenly."""

    spec: TenantSpec
    rate_hz: float
    #: From submission.
    deadline_ns: int
    #: Coefficient of variation of the gaps: 1 is Poisson, more is bursty (gamma).
    cv: float = 1.0
    rows: tuple[int, int] = (1, 1)
    #: T of one request; all its rows have it.
    tokens: tuple[int, int] = (0, 0)
    bytes_needed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    #: Chance of each launch to fail, and to take ten times as long.
    fail_rate: float = 0.0
    slow_rate: float = 0.0
    #: Chance of each request to be cancelled at some time before its deadline.
    cancel_rate: float = 0.0
    #: How often, at drawn times, a plan is lost, and the device (for 10 ms).
    compile_failures: int = 0
    device_losses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    tenants: tuple[SimTenant, ...]
    duration_ns: int
    policy: str = "space_time"
    limits: CoreLimits = field(default_factory=CoreLimits)
    #: What the core believes; the device takes this times 1 to 1 + noise.
    cost: LinearCost = field(default_factory=LinearCost)
    noise: float = 0.0
    faults: Faults = Faults()
    check: bool = True


@dataclass(slots=True)
class TenantReport:
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    #: Completed within the deadline.
    good_count: int = 0
    device_ns: int = 0
    #: Of completed requests, from submission; sorted in the finished report.
    latencies_ns: list[int] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        """Good among all that the client did not cancel."""
        asked = self.outcomes.total() - self.outcomes[Outcome.CANCELLED]
        return self.good_count / asked if asked else 1.0

    def percentile_ns(self, percent: float) -> int:
        """Latency that `percent` of the completed requests stayed within; 0 if none completed."""
        last = len(self.latencies_ns) - 1
        return self.latencies_ns[round(percent / 100 * last)] if last >= 0 else 0


@dataclass(slots=True)
class Report:
    tenants: dict[str, TenantReport]
    #: When the last event was done.
    end_ns: int = 0
    busy_ns: int = 0
    launch_count: int = 0
    segment_count: int = 0
    #: Sum over launches of the different tenants in each.
    tenant_count: int = 0
    #: Longest launch of several members, as predicted.
    longest_ns: int = 0
    digest: str = ""

    def goodput_hz(self, duration_ns: int) -> float:
        good = sum(tenant.good_count for tenant in self.tenants.values())
        return good * SECOND / duration_ns


def simulate(scenario: Scenario, seed: int) -> Report:
    return _Run(scenario, seed).run()


@final
class _Run:
    """One run: the queue of events to come, the core, and the report so far."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed
        faults = scenario.faults
        self._core = Core(scenario.limits, scenario.policy, scenario.cost, self._random("core"))
        self._device = NullDevice(
            scenario.cost,
            self._random("device"),
            noise=scenario.noise,
            fail_rate=faults.fail_rate,
            slow_rate=faults.slow_rate,
        )
        self._clock = SimulatedClock()
        self._cancels = self._random("cancels")
        self._request_count = 0
        self._digest = hashlib.sha256()
        self._report = Report({tenant.spec.name: TenantReport() for tenant in scenario.tenants})
        #: (time, sequence, event, where its tenant's next arrival comes from).
        self._coming: list[tuple[int, int, Event, Iterator[Submitted] | None]] = []
        self._sequence = 0

    def _random(self, purpose: str) -> Random:
        """A stream of its own per purpose, so that one more draw here changes nothing there."""
        return Random(f"{self._seed}/{purpose}")

    def run(self) -> Report:
        for tenant in self._scenario.tenants:
            self._add(Attached(0, tenant.spec))
            self._add_next(self._arrivals(tenant, self._random(tenant.spec.name)))
        self._add_faults(self._random("faults"))
        while self._coming:
            self._turn()
        self._check_drained()
        for tenant_report in self._report.tenants.values():
            tenant_report.latencies_ns.sort()
        self._report.digest = self._digest.hexdigest()
        self._report.end_ns = self._clock.now_ns()
        return self._report

    def _turn(self) -> None:
        """Everything that happens at the next moment."""
        now_ns = self._coming[0][0]
        self._clock.move_to(now_ns)
        events = []
        while self._coming and self._coming[0][0] == now_ns:
            _, _, event, arrivals = heappop(self._coming)
            events.append(event)
            if arrivals is not None:
                self._add_next(arrivals)
        for command in self._core.handle(*events):
            self._carry_out(command, now_ns)
        if self._scenario.check:
            self._core.check()
        launches, requests = self._core.take_records()
        for launch in launches:
            self._count_launch(launch)
        for request in requests:
            self._count_request(request)

    def _carry_out(self, command: Command, now_ns: int) -> None:
        match command:
            case Launch():
                try:
                    time_ns = self._device.run_ns(command)
                    self._add(LaunchDone(now_ns + time_ns, command.launch, time_ns))
                except LaunchError as error:
                    end_ns = now_ns + command.predicted_ns
                    self._add(LaunchFailed(end_ns, command.launch, str(error)))
            case WakeAt():
                self._add(Woke(command.at_ns))
            case Compile():
                self._add(PlanReady(now_ns + 5 * MS, command.signature))

    def _add(self, event: Event, arrivals: Iterator[Submitted] | None = None) -> None:
        self._sequence += 1
        heappush(self._coming, (event.at_ns, self._sequence, event, arrivals))

    def _add_next(self, arrivals: Iterator[Submitted]) -> None:
        event = next(arrivals, None)
        if event is None:
            return
        self._add(event, arrivals)
        if self._cancels.random() < self._scenario.faults.cancel_rate:
            at_ns = self._cancels.randint(event.at_ns, event.deadline_ns)
            self._add(Cancelled(at_ns, event.request))

    def _arrivals(self, tenant: SimTenant, rng: Random) -> Iterator[Submitted]:
        shape = 1 / tenant.cv**2
        at_ns = 0
        while True:
            at_ns += round(rng.gammavariate(shape, SECOND / (tenant.rate_hz * shape)))
            if at_ns >= self._scenario.duration_ns:
                return
            self._request_count += 1
            rows = rng.randint(*tenant.rows)
            yield Submitted(
                at_ns,
                RequestId(self._request_count),
                tenant.spec.name,
                rows,
                rows * rng.randint(*tenant.tokens),
                at_ns + tenant.deadline_ns,
                0,
                tenant.bytes_needed,
            )

    def _add_faults(self, rng: Random) -> None:
        faults, duration_ns = self._scenario.faults, self._scenario.duration_ns
        specs = [tenant.spec for tenant in self._scenario.tenants if tenant.spec.kernels]
        for _ in range(faults.compile_failures if specs else 0):
            at_ns, spec = rng.randrange(duration_ns), rng.choice(specs)
            self._add(CompileFailed(at_ns, rng.choice(spec.kernels).signature, "simulated"))
            self._add(Attached(at_ns + 10 * MS, spec))
        for _ in range(faults.device_losses):
            at_ns = rng.randrange(duration_ns)
            self._add(DeviceLost(at_ns, "simulated"))
            self._add(DeviceBack(at_ns + 10 * MS))

    def _count_launch(self, record: LaunchRecord) -> None:
        report = self._report
        report.launch_count += 1
        report.busy_ns += record.end_ns - record.start_ns
        report.segment_count += len(record.segments)
        report.tenant_count += len({segment[0] for segment in record.segments})
        if len(record.segments) > 1:
            report.longest_ns = max(report.longest_ns, record.predicted_ns)
        if self._scenario.check:
            self._digest.update(repr(record).encode())

    def _count_request(self, record: RequestRecord) -> None:
        tenant = self._report.tenants[record.tenant]
        tenant.outcomes[record.outcome] += 1
        tenant.device_ns += record.device_ns
        if record.outcome is Outcome.COMPLETED:
            tenant.latencies_ns.append(record.completed_ns - record.submitted_ns)
            tenant.good_count += record.completed_ns <= record.deadline_ns
        if self._scenario.check:
            self._digest.update(repr(record).encode())

    def _check_drained(self) -> None:
        stats = self._core.stats()
        left = stats.requests_open, stats.launches_outstanding, stats.bytes_reserved
        ended = sum(stats.outcomes.values())
        if any(left) or ended != self._request_count:
            raise InvariantViolation(
                "drain", f"{left} left, {ended} of {self._request_count} ended"
            )
