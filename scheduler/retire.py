"""Retire: launches that came back, and the ends of requests.

Rules. A kernel's successors become ready in the order of the launch. A failed launch sends each
member back to be tried once more, alone; the member that fails alone the second time fails its
request, and nobody else's. A request's outcome is given once, at once; its buffers are freed when
its last kernel is back, so `Free` follows the outcome, sometimes later.
"""

from __future__ import annotations

from typing import final

from coissue.scheduler.admission import Admission, Reject
from coissue.scheduler.dispatch import Dispatch
from coissue.scheduler.fairness import Fairness
from coissue.scheduler.health import Health
from coissue.scheduler.messages import (
    Command,
    Complete,
    Free,
    LaunchDone,
    LaunchFailed,
    Outcome,
    PutOut,
    Reason,
    Submitted,
)
from coissue.scheduler.ports import CostView, InvariantViolation
from coissue.scheduler.states import END_STATE, REQUEST_EDGES, KernelState, RequestState
from coissue.scheduler.trace import RequestRecord, Trace
from coissue.scheduler.window import Request, Tenant, Window

DONE, FAILED, CANCELLED = KernelState.DONE, KernelState.FAILED, KernelState.CANCELLED
RUNNING = RequestState.RUNNING
COMPLETED, EXPIRED = Outcome.COMPLETED, Outcome.EXPIRED


@final
class Retire:
    """Applies what launches came to; the only place where requests end."""

    __slots__ = ("_admission", "_cost", "_dispatch", "_fairness", "_health", "_window", "commands",
                 "longest_ns", "now_ns", "outcomes", "trace")  # fmt: skip

    def __init__(
        self,
        window: Window,
        admission: Admission,
        fairness: Fairness,
        health: Health,
        dispatch: Dispatch,
        cost: CostView,
        trace: Trace,
    ) -> None:
        self._window = window
        self._admission = admission
        self._fairness = fairness
        self._health = health
        self._dispatch = dispatch
        self._cost = cost
        self.trace = trace
        #: Where commands of the turn go; the core sets it, and the time.
        self.commands: list[Command] = []
        self.now_ns = 0
        #: The longest launch that came back: for so long others were blocked.
        self.longest_ns = 0
        #: Requests ended, by outcome.
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)

    def done(self, event: LaunchDone) -> None:
        flight = self._dispatch.land(event.launch)
        if flight is None:
            return
        now_ns, measured_ns = self.now_ns, event.measured_ns
        units, members = flight.units, flight.members
        self._cost.observe_ns(
            flight.signature, units, len(members), len(flight.weights) or 1, measured_ns,
            flight.launch.joins,
        )  # fmt: skip
        self._health.landed(flight, measured_ns, now_ns)
        if measured_ns > self.longest_ns:
            self.longest_ns = measured_ns
        self.trace.add_launch(flight, now_ns, "")
        # Without units (no rows, no tokens) the members share evenly.
        per_unit = measured_ns / (units or len(members))
        for kernel in members:
            request, index, part = kernel.request, kernel.index, kernel.part
            own_ns = int(per_unit * (kernel.units if units else 1))
            request.device_ns += own_ns
            self._fairness.charge(request, own_ns - kernel.charge_ns)
            request.last_done_ns = now_ns
            request.in_flight -= 1
            if request.cuts:
                request.cuts.discard(index)
            if request.state is not RUNNING:
                self._return_late(request, index)
            elif part is None or part[1] == request.rows:
                self._advance(request, index)
            else:
                self._go_on(request, index, part[1])

    def _advance(self, request: Request, index: int) -> None:
        """The kernel is done: what waited for it becomes ready, or the request has ended."""
        request.states[index] = DONE
        request.left -= 1
        if not request.left:
            self.end(request, COMPLETED)
        waiting = request.waiting
        for successor in request.program.successors[index]:
            waiting[successor] = count = waiting[successor] - 1
            if not count:
                self._window.ready.push(request, successor)

    def _go_on(self, request: Request, index: int, rows_done: int) -> None:
        """A part of the kernel is done, and the next waits for its turn."""
        request.parts[index] = rows_done
        self._window.ready.push(request, index, alone=index in request.retried)
        if request.deadline_ns <= self.now_ns:
            self.expire(request)

    def _return_late(self, request: Request, index: int) -> None:
        """A kernel of a request that already has its outcome is back."""
        request.states[index] = CANCELLED
        if not request.in_flight:
            self._window.release(request)
            self.commands.append(Free(request.id))

    def failed(self, event: LaunchFailed) -> None:
        flight = self._dispatch.land(event.launch)
        if flight is None:
            return
        self.trace.add_launch(flight, self.now_ns, event.message)
        for kernel in flight.members:
            request, index = kernel.request, kernel.index
            request.in_flight -= 1
            if request.state is not RUNNING:
                self._return_late(request, index)
            elif index in request.retried:
                request.states[index] = FAILED
                self.end(request, Outcome.FAILED, Reason.LAUNCH_FAILED, event.message)
                if not event.by_input and self._health.failed(request.tenant, self.now_ns):
                    self._put_out(request.tenant, event.message)
            elif request.deadline_ns <= self.now_ns:
                request.states[index] = CANCELLED
                self.expire(request)
            else:
                if index in request.cuts:
                    request.cuts.discard(index)
                    self._admission.backlog.remove(request, index)
                request.retried.add(index)
                self._window.ready.push(request, index, alone=True)

    def _put_out(self, tenant: Tenant, message: str) -> None:
        """Nothing of the tenant will be tried any more."""
        for request in list(tenant.open.values()):
            self.end(request, Outcome.FAILED, Reason.TENANT_FAILED, message)
        self.commands.append(PutOut(tenant.name, message))

    def lost(self, message: str) -> None:
        """The device is gone: requests with anything on it fail, the others keep their place."""
        for flight in self._dispatch.lose_all():
            self.trace.add_launch(flight, self.now_ns, message)
            for kernel in flight.members:
                kernel.request.in_flight -= 1
                kernel.request.states[kernel.index] = FAILED
        for request in list(self._window.ended.values()):
            self._window.release(request)
            self.commands.append(Free(request.id))
        for request in [r for r in self._window.open.values() if r.state is RUNNING]:
            self.end(request, Outcome.FAILED, Reason.DEVICE_LOST, message)

    def expire(self, request: Request) -> None:
        """Its deadline is over. If all that it lacks is in flight, it gets that, late."""
        if request.left > request.in_flight:
            self.end(request, EXPIRED, Reason.DEADLINE)

    def end(
        self,
        request: Request,
        outcome: Outcome,
        reason: Reason | None = None,
        message: str = "",
        retry_after_ns: int = 0,
    ) -> None:
        """The one outcome of an admitted request."""
        state = END_STATE[outcome]
        if state not in REQUEST_EDGES[request.state]:
            raise InvariantViolation(
                "one outcome per request", f"request {request.id}: {request.state!r} -> {state!r}"
            )
        if request.left:
            left_ns = self._admission.backlog.remove_rest(request)
            self._fairness.charge(request, -left_ns)
        if outcome is COMPLETED:
            request.tenant.failures = 0
        if outcome in (COMPLETED, EXPIRED):
            late = outcome is EXPIRED or self.now_ns > request.deadline_ns
            self._admission.learn(request, missed=late)
        request.state = state
        self._window.close(request)
        if not request.tenant.open:
            self._fairness.leave(request.tenant, self.now_ns)
        self.outcomes[outcome] += 1
        self.trace.add_request(
            RequestRecord(
                request.id, request.tenant.name, request.rows, request.tokens,
                request.submitted_ns, request.first_launch_ns, request.last_done_ns, self.now_ns,
                request.deadline_ns, request.device_ns, outcome, reason,
            )
        )  # fmt: skip
        self.commands.append(Complete(request.id, outcome, reason, message, retry_after_ns))
        if not request.in_flight:
            self.commands.append(Free(request.id))

    def reject(self, event: Submitted, reject: Reject) -> None:
        tenant = "" if reject.reason is Reason.UNKNOWN_TENANT else event.tenant
        self.outcomes[Outcome.REJECTED] += 1
        self.trace.add_request(
            RequestRecord(
                event.request, tenant, event.rows, event.tokens, event.at_ns, 0, 0, self.now_ns,
                event.deadline_ns, 0, Outcome.REJECTED, reject.reason,
            )
        )  # fmt: skip
        self.commands.append(
            Complete(
                event.request, Outcome.REJECTED, reject.reason,
                retry_after_ns=reject.retry_after_ns,
            )
        )  # fmt: skip
