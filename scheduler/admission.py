"""Admission: what cannot be served in time, or does not fit, is refused at once with a reason.

NOTE. Predicted finish = now + rest of the running launch + work ahead + own work. Work is summed
as each kernel would really be run: the first kernel of a signature among those waiting is charged
its own launch, those that find one waiting are charged their share of a common launch
(`program.Profile`). Charging every request its lone time would refuse a load that coalescing
carries with ease; charging all of them the share would promise too much to a mixed load that does
not coalesce. "Ahead" is what has a higher priority, or the same and no later a deadline; deadlines
are told apart to `WIDTH_NS`, and all that came with more than `HORIZON_NS` to go are equal, and
behind the others for good. Later requests that join launches take device time too, predictions err,
and past saturation a little optimism ends in tiny groups and lost requests. So the predicted wait
is taken times a *caution*, which rises by `CAUTION_UP` with each request that misses and was let in
by a narrow margin, and falls by a hundredth of it with each other: few admitted requests miss under
any overload, and goodput stays flat. The caution of all is learned from everybody's requests, at a
tenth of the pace: most of many tenants ask too seldom to learn one of their own. Each has its own
too, and the larger one counts: whoever misses by its own fault is refused before the others are.
A miss that far more caution would have let in says nothing about waiting (a launch took twice its
time), and would only refuse others in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from coissue.scheduler.messages import Reason, SignatureId, Submitted
from coissue.scheduler.ports import MS, CoreLimits, CostView
from coissue.scheduler.program import Program
from coissue.scheduler.ready import PRIORITIES
from coissue.scheduler.window import READY, PlanState, Request, Tenant, Window

WIDTH_NS: Final = 1 << 22
BUCKETS: Final = 1024
HORIZON_NS: Final = WIDTH_NS * (BUCKETS - 1)
#: The predicted wait as it is; cautions and margins are in millionths of it.
ONE: Final = 1_000_000
CAUTION_UP: Final = ONE // 10
CAUTION_MAX: Final = 4 * ONE
#: The caution of all moves so many times less than a tenant's.
SHARED: Final = 10
#: In hundredths of the caution: a margin up to this is narrow.
NARROW: Final = 150
#: A time to the deadline counts as the shortest of late for so long.
TIGHT_NS: Final = 1000 * MS
#: With nothing else to do, one of so many requests that are predicted to take too long is let in.
PROBED: Final = 8


@dataclass(frozen=True, slots=True)
class Reject:
    reason: Reason
    #: 0: trying again cannot help, or nothing is known.
    retry_after_ns: int = 0


@dataclass(frozen=True, slots=True)
class Lack:
    """What a refused request would need: predicted work taken away before it, places, bytes."""

    work_ns: int = 0
    places: int = 0
    bytes: int = 0
    priority: int = PRIORITIES


@final
class Backlog:
    """Predicted device time of admitted kernels that are not launched, by priority and deadline."""

    __slots__ = ("_rings", "_totals", "_waiting")

    def __init__(self) -> None:
        #: By priority: work by deadline bucket, a ring over time; in the last what came with more.
        self._rings: list[list[int]] = [[0] * (BUCKETS + 1) for _ in range(PRIORITIES + 1)]
        self._totals = [0] * (PRIORITIES + 1)
        #: Kernels not launched, by signature; no zeros.
        self._waiting: dict[SignatureId, int] = {}

    @property
    def total_ns(self) -> int:
        return sum(self._totals)

    def charges(self, request: Request) -> list[int]:
        """What each kernel of the request would add now."""
        own, share, waiting = request.profile.own_ns, request.profile.share_ns, self._waiting
        return [
            share[index] if signature in waiting else own[index]
            for index, signature in enumerate(request.program.signatures)
        ]

    def ahead_ns(self, priority: int, deadline_ns: int, now_ns: int) -> int:
        """Work that is served before a request with this priority and deadline."""
        if deadline_ns >= now_ns + HORIZON_NS:
            return self.most_ns(priority)
        first, ring = now_ns // WIDTH_NS, self._rings[priority]
        start = first % BUCKETS
        stop = start + max(deadline_ns // WIDTH_NS - first, 0) + 1
        within = sum(ring[start : min(stop, BUCKETS)]) + sum(ring[: max(0, stop - BUCKETS)])
        return sum(self._totals[:priority]) + within

    def most_ns(self, priority: int) -> int:
        """The most that `ahead_ns` can be, whatever the deadline."""
        return sum(self._totals[: priority + 1])

    def add(self, request: Request, now_ns: int) -> None:
        by_ns, far_ns = max(request.deadline_ns, now_ns), now_ns + HORIZON_NS
        request.backlog_slot = BUCKETS if by_ns >= far_ns else by_ns // WIDTH_NS % BUCKETS
        work_ns = sum(request.charges)
        self._rings[request.priority][request.backlog_slot] += work_ns
        self._totals[request.priority] += work_ns
        for signature in request.program.signatures:
            self._waiting[signature] = self._waiting.get(signature, 0) + 1

    def remove(self, request: Request, index: int) -> int:
        """The kernel is launched, or never will be; its predicted time."""
        work_ns, priority = request.charges[index], request.priority
        self._rings[priority][request.backlog_slot] -= work_ns
        self._totals[priority] -= work_ns
        signature, waiting = request.program.signatures[index], self._waiting
        left = waiting[signature] - 1
        if left:
            waiting[signature] = left
        else:
            del waiting[signature]
        return work_ns

    def remove_part(self, request: Request, index: int, work_ns: int) -> None:
        """A part of the kernel is launched, and the rest goes on waiting."""
        self._rings[request.priority][request.backlog_slot] -= work_ns
        self._totals[request.priority] -= work_ns
        request.charges[index] -= work_ns
        request.cuts.add(index)

    def remove_rest(self, request: Request) -> int:
        """Takes out the kernels that the request's end will cancel; their predicted time."""
        work_ns = 0
        for index, state in enumerate(request.states):
            waits = state <= READY or index in request.cuts
            if waits and index not in request.retried:
                work_ns += self.remove(request, index)
        return work_ns


@final
class Admission:
    """Decides on each submitted request; owns the backlog."""

    __slots__ = ("_cost", "_limits", "_window", "backlog", "caution", "draining")

    def __init__(self, limits: CoreLimits, window: Window, cost: CostView) -> None:
        self._limits = limits
        self._window = window
        self._cost = cost
        self.backlog = Backlog()
        #: Of all tenants.
        self.caution = ONE
        self.draining = False

    def decide(self, event: Submitted, busy_until_ns: int | None, now_ns: int) -> Request | Reject:
        """The request, not yet in the window, or why it is refused.

        `busy_until_ns`: when the next slot is free; None while the device is lost.
        """
        tenant = self._window.tenants.get(event.tenant)
        if tenant is None or tenant.program is None:
            return Reject(Reason.UNKNOWN_TENANT)
        if tenant.is_out:
            return Reject(Reason.TENANT_FAILED)
        if self.draining:
            return Reject(Reason.DRAINING)
        if busy_until_ns is None:
            return Reject(Reason.DEVICE_LOST)
        if PlanState.FAILED in self._window.plan_states(tenant.program):
            return Reject(Reason.COMPILE_FAILED)
        busy_ns = max(0, busy_until_ns - now_ns)
        full = self._find_full(tenant, event)
        if full is not None:
            return Reject(full, busy_ns + self.backlog.total_ns // self._limits.slots)
        return self._admit(event, tenant, tenant.program, busy_ns, now_ns)

    def _find_full(self, tenant: Tenant, event: Submitted) -> Reason | None:
        window, limits = self._window, self._limits
        if len(tenant.open) >= tenant.spec.in_flight_limit:
            return Reason.TENANT_QUOTA
        if len(window.open) >= limits.window:
            return Reason.WINDOW_FULL
        if window.bytes_reserved + event.bytes_needed > limits.bytes:
            return Reason.MEMORY
        return None

    def _admit(
        self, event: Submitted, tenant: Tenant, program: Program, busy_ns: int, now_ns: int
    ) -> Request | Reject:
        weights = self._window.weights
        profile = program.profile(event.rows, event.tokens, now_ns, self._cost, weights)
        priority = self._priority(event, tenant)
        request = Request(event, tenant, program, profile, priority)
        request.charges = self.backlog.charges(request)
        if self._limits.admission:
            late_ns = self._late_ns(request, self.backlog.most_ns(priority), busy_ns, now_ns)
            # The sum over deadlines costs more, and is seldom needed.
            if late_ns > 0 or self._is_narrow(request):
                ahead_ns = self.backlog.ahead_ns(priority, event.deadline_ns, now_ns)
                late_ns = self._late_ns(request, ahead_ns, busy_ns, now_ns)
            if late_ns > 0:
                hopeless = now_ns + profile.path_ns > event.deadline_ns
                if hopeless and event.deadline_ns > now_ns and self._probes(tenant):
                    self.backlog.add(request, now_ns)
                    return request
                return Reject(Reason.DEADLINE, 0 if hopeless else late_ns)
        self.backlog.add(request, now_ns)
        ready, own_ns = self._window.ready, event.deadline_ns - event.at_ns
        if own_ns <= ready.tight_ns or ready.tight_until_ns <= now_ns:
            ready.tight_ns, ready.tight_until_ns = own_ns, now_ns + TIGHT_NS
        return request

    def _probes(self, tenant: Tenant) -> bool:
        """Whether a request that is too long by itself is let in to see: what is never launched is
        never corrected, and a slow spell of the device would refuse the tenant for good."""
        if self._window.open:
            return False
        tenant.hopeless += 1
        return tenant.hopeless % PROBED == 0

    def _late_ns(self, request: Request, ahead_ns: int, busy_ns: int, now_ns: int) -> int:
        """Predicted finish behind `ahead_ns` of work, from the deadline on; may be negative."""
        path_ns = request.profile.path_ns
        work_ns = (ahead_ns + sum(request.charges)) // self._limits.slots
        wait_ns = busy_ns + max(0, work_ns - path_ns)
        spare_ns = request.deadline_ns - now_ns - path_ns
        request.margin = ONE * spare_ns // max(wait_ns, 1)
        return wait_ns * self._caution_of(request.tenant) // ONE - spare_ns

    def _caution_of(self, tenant: Tenant) -> int:
        return max(tenant.caution, self.caution)

    def _is_narrow(self, request: Request) -> bool:
        return 100 * request.margin <= NARROW * self._caution_of(request.tenant)

    def lacks(self, event: Submitted, reject: Reject) -> Lack | None:
        """None: no room in the window can help it."""
        match reject.reason:
            case Reason.WINDOW_FULL:
                return Lack(places=1)
            case Reason.MEMORY:
                most = self._limits.bytes
                return Lack(bytes=self._window.bytes_reserved + event.bytes_needed - most)
            case Reason.DEADLINE if reject.retry_after_ns:
                tenant = self._window.tenants[event.tenant]
                caution = self._caution_of(tenant)
                work_ns = reject.retry_after_ns * ONE * self._limits.slots // caution
                return Lack(work_ns=work_ns + 1, priority=self._priority(event, tenant))
        return None

    @staticmethod
    def _priority(event: Submitted, tenant: Tenant) -> int:
        return min(max(event.priority or tenant.spec.priority, 1), PRIORITIES)

    def learn(self, request: Request, *, missed: bool) -> None:
        """An admitted request met its deadline, or missed it. One that was let in to see says
        nothing of how long requests wait."""
        if request.margin < 0:
            return
        step = CAUTION_UP if missed and self._is_narrow(request) else -CAUTION_UP // 100
        tenant = request.tenant
        tenant.caution = min(max(tenant.caution + step, ONE), CAUTION_MAX)
        self.caution = min(max(self.caution + step // SHARED, ONE), CAUTION_MAX)

    def unlearn(self) -> None:
        """Cautions were learned from how another policy lets requests wait."""
        self.caution = ONE
        for tenant in self._window.tenants.values():
            tenant.caution = ONE
