"""The window: tenants, every admitted request, and what is attached.

From admission (insert) and retire (close, release); its ready kernels go to pick and coalesce.
"""

from __future__ import annotations

from enum import Enum, unique
from heapq import heapify, heappop, heappush
from typing import TypeVar, final

from coissue.scheduler.messages import RequestId, SignatureId, Submitted, TenantSpec
from coissue.scheduler.program import Part, Profile, Program, parts_of
from coissue.scheduler.ready import Kernel, Ready
from coissue.scheduler.states import KernelState, RequestState

_Id = TypeVar("_Id", bound=int)
BLOCKED, READY, RUNNING = KernelState.BLOCKED, KernelState.READY, RequestState.RUNNING


@final
class Tenant:
    """A tenant by name, over its versions."""

    __slots__ = (
        "active_share", "active_until_ns", "alone", "caution", "failures", "finish_ns", "hopeless",
        "is_out", "name", "open", "program", "spec", "turn",
    )  # fmt: skip

    def __init__(self, spec: TenantSpec) -> None:
        self.name = spec.name
        #: What new requests use; no program once detached.
        self.spec = spec
        self.program: Program | None = None
        #: Its unfinished requests in order of admission.
        self.open: dict[RequestId, Request] = {}
        #: Its own, in millionths of the predicted wait (see admission).
        self.caution = 1_000_000
        #: Requests refused as too long by themselves while nothing was open.
        self.hopeless = 0
        #: When `time_only` last served it: a counter.
        self.turn = 0
        #: Its fair finish, its share as counted while it is active, and until when (see fairness).
        self.finish_ns = 0
        self.active_share = 0.0
        self.active_until_ns = 0
        #: Out of the groups; requests in a row that failed; out of service (see health).
        self.alone = False
        self.failures = 0
        self.is_out = False


@final
class Request:
    """An admitted request until its outcome is out and its last kernel is back."""

    __slots__ = (
        "backlog_slot", "begin_ns", "bytes", "charges", "cuts", "deadline_ns", "device_ns",
        "due_ns", "fair_ns", "first_launch_ns", "id", "in_flight", "lane", "last_done_ns", "left",
        "margin",
        "parts", "priority", "profile", "program", "ready", "retried", "rows", "spec", "state",
        "states", "submitted_ns", "tenant", "tokens", "waiting",
    )  # fmt: skip

    def __init__(
        self, event: Submitted, tenant: Tenant, program: Program, profile: Profile, priority: int
    ) -> None:
        self.id = event.request
        self.tenant = tenant
        self.spec = tenant.spec
        self.program = program
        self.profile = profile
        self.priority = priority
        self.deadline_ns = event.deadline_ns
        self.rows = event.rows
        self.tokens = event.tokens
        self.bytes = event.bytes_needed
        self.state = RequestState.ADMITTED
        #: State of each kernel, by index.
        self.states: list[KernelState] = [BLOCKED] * len(program.successors)
        #: Producers not yet done, by kernel index.
        self.waiting = list(program.producer_counts)
        #: Its READY kernels by index.
        self.ready: dict[int, Kernel] = {}
        #: Kernels not DONE.
        self.left = len(program.successors)
        #: Kernels IN_FLIGHT.
        self.in_flight = 0
        #: Rows done of kernels that run in parts, by index.
        self.parts: dict[int, int] = {}
        #: Kernels with a part in flight that is not the last: the backlog counts their rest.
        self.cuts: set[int] = set()
        #: Kernels whose launch failed once.
        self.retried: set[int] = set()
        #: Place in the order of segments: where it stood in its last launch; 0: it is new.
        self.lane = 0
        #: Predicted device time by kernel index, as counted in the backlog (see admission).
        self.charges: list[int] = []
        self.backlog_slot = 0
        #: The most caution that would have let it in (see admission).
        self.margin = 0
        #: Its fair begin and how long it would take from there; by when it is due (see fairness).
        self.begin_ns = 0
        self.fair_ns = 0
        self.due_ns = event.deadline_ns
        self.submitted_ns = event.at_ns
        self.first_launch_ns = 0
        self.last_done_ns = 0
        self.device_ns = 0

    def still_needs(self, signature: SignatureId) -> bool:
        """True when a kernel of this signature is not launched yet."""
        return any(
            state <= READY and found == signature
            for state, found in zip(self.states, self.program.signatures, strict=True)
        )


@unique
class PlanState(Enum):
    """Of a signature that has no plan."""

    COMPILING = "compiling"
    FAILED = "failed"


def _add(counts: dict[_Id, int], key: _Id, step: int) -> None:
    """Changes a count; none of them is zero."""
    counts[key] = counts.get(key, 0) + step
    if not counts[key]:
        del counts[key]


@final
class Window:
    """Tenants, their open requests, and the ready kernels."""

    __slots__ = (
        "_deadlines", "_sequence", "bytes_reserved", "ended", "feeders", "open", "plans",
        "programs", "ready", "tenants", "weights",
    )  # fmt: skip

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        #: Requests without outcome, in order of admission.
        self.open: dict[RequestId, Request] = {}
        #: Requests with an outcome whose last kernel is still in flight; they hold their bytes.
        self.ended: dict[RequestId, Request] = {}
        self.ready = Ready()
        #: Attached programs by their parts.
        self.programs: dict[tuple[Part, ...], Program] = {}
        #: signature -> weights -> attached kernels that have them.
        self.weights: dict[SignatureId, dict[int, int]] = {}
        #: signature -> signatures of producers of its kernels -> how many attached kernels say so.
        self.feeders: dict[SignatureId, dict[SignatureId, int]] = {}
        #: Attached signatures without a plan; all others have one.
        self.plans: dict[SignatureId, PlanState] = {}
        #: Sum over `open` and `ended`.
        self.bytes_reserved = 0
        #: Heap of (deadline, sequence, request); ended requests are dropped on sight.
        self._deadlines: list[tuple[int, int, Request]] = []
        self._sequence = 0

    def attach(self, spec: TenantSpec, bound_ns: int) -> Program:
        """New requests of the name use this version; those in the window keep theirs."""
        parts = parts_of(spec)
        program = self.programs.get(parts) or Program(parts, bound_ns)
        self.programs[parts] = program
        self._count(spec, program, 1)
        tenant = self.tenants.setdefault(spec.name, Tenant(spec))
        self._drop(tenant)
        tenant.spec, tenant.program = spec, program
        return program

    def detach(self, name: str) -> None:
        """The name takes no more requests; forgotten when its last one has ended."""
        tenant = self.tenants.get(name)
        if tenant is None:
            return
        self._drop(tenant)
        tenant.program = None
        if not tenant.open:
            del self.tenants[name]

    def _count(self, spec: TenantSpec, program: Program, step: int) -> None:
        """Counts a version in (1) or out (-1)."""
        program.count_user(step)
        for kernel in spec.kernels:
            _add(self.weights.setdefault(kernel.signature, {}), kernel.weights, step)
            feeders = self.feeders.setdefault(kernel.signature, {})
            for producer in kernel.producers:
                _add(feeders, program.signatures[producer], step)

    def _drop(self, tenant: Tenant) -> None:
        """Counts its version out, if there is one."""
        program = tenant.program
        if program is None:
            return
        self._count(tenant.spec, program, -1)
        if not program.users:
            del self.programs[program.parts]
        for signature in program.signatures:
            if not self.weights.get(signature, True):
                del self.weights[signature], self.feeders[signature]
                self.plans.pop(signature, None)
                self.ready.forget(signature)

    def plan_states(self, program: Program) -> list[PlanState]:
        """Of the program's signatures that have no plan."""
        if not self.plans:
            return []
        return [self.plans[sig] for sig in program.signatures if sig in self.plans]

    def set_plan(self, signature: SignatureId, state: PlanState | None) -> None:
        """None: the plan is ready."""
        if state is None:
            self.plans.pop(signature, None)
        elif signature in self.weights:
            self.plans[signature] = state
        self.ready.gate(signature, closed=signature in self.plans)

    def insert(self, request: Request) -> None:
        self.open[request.id] = request
        request.tenant.open[request.id] = request
        self.bytes_reserved += request.bytes
        self._sequence += 1
        heappush(self._deadlines, (request.deadline_ns, self._sequence, request))
        if len(self._deadlines) > 64 + 4 * len(self.open):
            self._deadlines = [d for d in self._deadlines if d[2].state <= RUNNING]
            heapify(self._deadlines)
        for index in request.program.roots:
            self.ready.push(request, index)

    def close(self, request: Request) -> None:
        """The request has its outcome: nothing of it will be launched any more."""
        del self.open[request.id]
        del request.tenant.open[request.id]
        if request.left:
            self.ready.withdraw(request)
        if request.tenant.program is None and not request.tenant.open:
            self.tenants.pop(request.tenant.name, None)
        if request.in_flight:
            self.ended[request.id] = request
        else:
            self.bytes_reserved -= request.bytes

    def release(self, request: Request) -> None:
        """The last kernel of an ended request is back."""
        del self.ended[request.id]
        self.bytes_reserved -= request.bytes

    def next_deadline_ns(self) -> int | None:
        """The earliest deadline of open requests; None: there are none."""
        heap = self._deadlines
        while heap:
            deadline_ns, _, request = heap[0]
            if request.state <= RUNNING:
                return deadline_ns
            heappop(heap)
        return None

    def pop_next_deadline(self) -> Request:
        """The open request with the earliest deadline, which is then no longer watched."""
        return heappop(self._deadlines)[2]
