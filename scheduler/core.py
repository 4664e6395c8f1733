"""The core: a pure state machine. Events in, commands out; `event.at_ns` is the only time.

    Submitted -> admission -> window -> pick -> coalesce -> dispatch -> Launch
    LaunchDone, LaunchFailed -> retire -> window (successors) or Complete and Free

Rules. No clock, thread, I/O, global or unseeded randomness. All events of a turn are applied, then
one pump fills the free slots: batches form from what waits, and nothing waits while a slot is free.
Requests expire at their deadline, before the pump; only one whose last kernels are in flight then
gets what they bring, late. When the device is lost, requests
that had anything on it fail and the others wait for it within their deadlines; new ones are
refused until it is back. The weights and plans of attached tenants are on the device already:
`Load` and `Evict` are not issued, `Compile` only for a signature whose plan failed before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import final

from coissue.scheduler.admission import Admission, Reject
from coissue.scheduler.dispatch import Dispatch
from coissue.scheduler.fairness import Fairness
from coissue.scheduler.health import Health
from coissue.scheduler.invariants import check_all
from coissue.scheduler.messages import (
    Attached,
    Cancelled,
    Command,
    Compile,
    CompileFailed,
    Detached,
    DeviceBack,
    DeviceLost,
    Drain,
    Event,
    Launch,
    LaunchDone,
    LaunchFailed,
    Outcome,
    PlanReady,
    PolicyChosen,
    Reason,
    Submitted,
    WakeAt,
)
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.ports import CoreLimits, CostView, InvariantViolation
from coissue.scheduler.retire import Retire
from coissue.scheduler.trace import Trace
from coissue.scheduler.window import PlanState, Window


@dataclass(frozen=True, slots=True)
class Stats:
    """The core at one moment, as plain data."""

    policy: str
    draining: bool
    device_up: bool
    requests_open: int
    kernels_ready: int
    launches_outstanding: int
    bytes_reserved: int
    backlog_ns: int
    records_dropped: int
    #: Longest device time of one launch.
    longest_ns: int
    #: Tenants that run alone for now (see health).
    alone: tuple[str, ...]
    outcomes: Mapping[Outcome, int]
    #: Unfinished requests by tenant.
    tenants: Mapping[str, int]


@final
class Core:
    """Wires the stages; each owns its state. One `handle` per turn."""

    def __init__(self, limits: CoreLimits, policy: str, cost: CostView, rng: Random) -> None:
        self.limits = limits
        self._cost = cost
        self._rng = rng
        self.now_ns = 0
        self.window = Window()
        self.admission = Admission(limits, self.window, cost)
        self.fairness = Fairness(limits.fair_window_ns)
        self.health = Health(self.window)
        self.dispatch = Dispatch(limits, self.admission.backlog)
        self.trace = Trace(limits.records)
        self.retire = Retire(
            self.window,
            self.admission,
            self.fairness,
            self.health,
            self.dispatch,
            cost,
            self.trace,
        )
        self._choose_policy(policy)
        self.device_up = True
        #: The time last asked for by WakeAt; 0: none.
        self._armed_ns = 0

    def _choose_policy(self, name: str) -> None:
        self.policy_name = name
        self.policy = POLICIES[name](self.limits, self._cost, self._rng)
        self.fairness.enabled = self.policy.is_fair
        self.admission.unlearn()

    def handle(self, *events: Event) -> list[Command]:
        """Applies all events, then pumps once. Times of events must not go back."""
        commands = self.retire.commands = []
        for event in events:
            self._apply(event)
        deadline_ns = self._expire()
        self._pump()
        self._arm(deadline_ns)
        return commands

    def _apply(self, event: Event) -> None:
        at_ns = event.at_ns
        if at_ns < self.now_ns:
            raise InvariantViolation("event times", f"{at_ns} comes after {self.now_ns}")
        self.now_ns = self.retire.now_ns = at_ns
        match event:
            case LaunchDone():
                self.retire.done(event)
            case Submitted():
                self._submit(event)
            case LaunchFailed():
                self.retire.failed(event)
            case Cancelled():
                self._cancel(event)
            case Attached():
                self._attach(event)
            case Detached():
                self.window.detach(event.tenant)
                self.health.forget(event.tenant)
            case PlanReady():
                self.window.set_plan(event.signature, None)
            case CompileFailed():
                self._fail_plan(event)
            case DeviceLost():
                self.device_up = False
                self.retire.lost(event.message)
            case DeviceBack():
                self.device_up = True
            case PolicyChosen():
                self._choose_policy(event.policy)
            case Drain():
                self.admission.draining = True

    def _submit(self, event: Submitted) -> None:
        if event.request in self.window.open or event.request in self.window.ended:
            raise InvariantViolation("request ids", f"request {event.request} is there already")
        busy_until_ns = self.dispatch.busy_until_ns(self.now_ns) if self.device_up else None
        decision = self.admission.decide(event, busy_until_ns, self.now_ns)
        if isinstance(decision, Reject) and self._make_room(event, decision):
            decision = self.admission.decide(event, busy_until_ns, self.now_ns)
        if isinstance(decision, Reject):
            self.retire.reject(event, decision)
            return
        self.fairness.enter(decision, self.now_ns, len(self.window.open))
        self.window.insert(decision)
        if not decision.left:
            self.retire.end(decision, Outcome.COMPLETED)

    def _make_room(self, event: Submitted, reject: Reject) -> bool:
        """Lets requests of tenants that are ahead of their share give way to this one."""
        lacks = self.admission.lacks(event, reject)
        tenant = self.window.tenants.get(event.tenant)
        if not self.fairness.enabled or lacks is None or tenant is None:
            return False
        begin_ns = self.fairness.begin_ns(tenant, self.now_ns)
        found = self.fairness.give_way(begin_ns, event, lacks)
        for request in found:
            wait_ns = reject.retry_after_ns
            self.retire.end(request, Outcome.REJECTED, Reason.OVER_SHARE, retry_after_ns=wait_ns)
        return bool(found)

    def _cancel(self, event: Cancelled) -> None:
        request = self.window.open.get(event.request)
        if request is not None:  # else its outcome is on the way already
            self.retire.end(request, Outcome.CANCELLED, Reason.CLIENT_GONE)

    def _attach(self, event: Attached) -> None:
        program = self.window.attach(event.tenant, self.limits.preemption_bound_ns)
        self.health.forget(event.tenant.name)
        for signature in dict.fromkeys(program.signatures):
            if self.window.plans.get(signature) is PlanState.FAILED:
                self.window.set_plan(signature, PlanState.COMPILING)
                self.retire.commands.append(Compile(signature))

    def _fail_plan(self, event: CompileFailed) -> None:
        """Requests that still need the signature fail; new ones are refused until it has a plan."""
        self.window.set_plan(event.signature, PlanState.FAILED)
        for request in list(self.window.open.values()):
            if request.still_needs(event.signature):
                self.retire.end(request, Outcome.FAILED, Reason.COMPILE_FAILED, event.message)

    def _expire(self) -> int | None:
        """Ends what is overdue; the next deadline, if there is one."""
        window, now_ns = self.window, self.now_ns
        while (deadline_ns := window.next_deadline_ns()) is not None and deadline_ns <= now_ns:
            self.retire.expire(window.pop_next_deadline())
        return deadline_ns

    def _pump(self) -> None:
        free = self.dispatch.free_slots if self.device_up else ()
        while free and (batch := self.policy.choose(self.window, self.now_ns)) is not None:
            self.retire.commands.append(self.dispatch.issue(batch, self.now_ns))

    def _arm(self, deadline_ns: int | None) -> None:
        """Asks to be woken at the deadline, or when the policy wants to be asked again, unless a
        wake-up comes before that."""
        wake_ns = self.policy.wake_ns
        if wake_ns and wake_ns > self.now_ns and (deadline_ns is None or wake_ns < deadline_ns):
            deadline_ns = wake_ns
        if deadline_ns is None or self.now_ns < self._armed_ns <= deadline_ns:
            return
        self._armed_ns = deadline_ns
        self.retire.commands.append(WakeAt(deadline_ns))

    def ends_with(self, launch: Launch) -> bool:
        """True if nothing can be launched after `launch` unless something new arrives."""
        open_requests = self.window.open
        return not self.window.ready.count and all(
            request.left == 1 and (segment.part is None or segment.part[1] == request.rows)
            for segment in launch.segments
            if (request := open_requests.get(segment.request)) is not None
        )

    def stats(self) -> Stats:
        window = self.window
        return Stats(
            policy=self.policy_name,
            draining=self.admission.draining,
            device_up=self.device_up,
            requests_open=len(window.open),
            kernels_ready=window.ready.count,
            launches_outstanding=len(self.dispatch.flights),
            bytes_reserved=window.bytes_reserved,
            backlog_ns=self.admission.backlog.total_ns,
            records_dropped=self.trace.dropped_count,
            longest_ns=self.retire.longest_ns,
            alone=tuple(self.health.alone),
            outcomes=dict(self.retire.outcomes),
            tenants={name: len(tenant.open) for name, tenant in window.tenants.items()},
        )

    def check(self) -> None:
        """Raises InvariantViolation when a rule of the core is broken; for tests and simulation."""
        check_all(self)
