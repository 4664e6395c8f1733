"""The window: every admitted request and its kernels, and the ready ones in heaps by signature.

NOTE. A ready kernel's place is (priority, latest start, sequence), which never changes while it
waits, so plain heaps hold the slack order: one heap per signature, and one heap of their heads per
priority. Picking costs the logarithm of the number of signatures, whatever the window's size.
A kernel that leaves from the middle (its request ended, another policy took it) only loses its
`live` mark; dead entries are dropped when they surface or when they outnumber the live ones.
From admission (insert) and retire (make_ready, withdraw); to pick and coalesce.
"""

from __future__ import annotations

from enum import Enum, unique
from heapq import heapify, heappop, heappush
from typing import Final, final

from coissue.scheduler.messages import RequestId, SignatureId, Submitted, WeightsId
from coissue.scheduler.program import Profile, Program
from coissue.scheduler.states import KernelState, RequestState

#: Priorities are 1 (first) to PRIORITIES; larger ones count as the last.
PRIORITIES: Final = 16
#: The level behind all priorities: kernels whose request can no longer meet its deadline. They
#: run when nothing else is ready, so late work never makes other work late.
LATE: Final = PRIORITIES + 1

BLOCKED, READY, BATCHED = KernelState.BLOCKED, KernelState.READY, KernelState.BATCHED
CANCELLED, RUNNING = KernelState.CANCELLED, RequestState.RUNNING


@final
class Tenant:
    """A tenant by name, over its versions."""

    __slots__ = (
        "active_share", "active_until_ns", "alone", "caution", "failures", "finish_ns", "is_out",
        "name", "open", "program", "turn",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        #: What new requests use; None once detached.
        self.program: Program | None = None
        #: Its unfinished requests in order of admission.
        self.open: dict[RequestId, Request] = {}
        #: Thousandths of the predicted wait that admission reckons with (see there).
        self.caution = 1000
        #: When `time_only` last served it: a counter.
        self.turn = 0
        #: Its fair finish, its share as counted while it is active, and until when (see fairness).
        self.finish_ns = 0
        self.active_share = 0.0
        self.active_until_ns = 0
        #: Out of the groups; out of service; requests in a row that failed (see health).
        self.alone = self.is_out = False
        self.failures = 0


@final
class Request:
    """An admitted request until its outcome is out and its last kernel is back."""

    __slots__ = (
        "backlog_slot", "begin_ns", "bytes", "charges", "cuts", "deadline_ns", "device_ns",
        "due_ns", "fair_ns", "first_launch_ns", "id", "in_flight", "lane", "last_done_ns", "left",
        "margin", "parts", "priority", "profile", "program", "ready", "retried", "rows", "state",
        "states", "submitted_ns", "tenant", "tokens", "waiting",
    )  # fmt: skip

    def __init__(
        self, event: Submitted, tenant: Tenant, program: Program, profile: Profile, priority: int
    ) -> None:
        self.id = event.request
        self.tenant = tenant
        self.program = program
        self.profile = profile
        self.priority = priority
        self.deadline_ns = event.deadline_ns
        self.rows, self.tokens = event.rows, event.tokens
        self.bytes = event.bytes_needed
        self.state = RequestState.ADMITTED
        #: State of each kernel, by index.
        self.states: list[KernelState] = [BLOCKED] * len(program.successors)
        #: Producers not yet done, by kernel index.
        self.waiting = list(program.producer_counts)
        #: Its READY kernels by index.
        self.ready: dict[int, Kernel] = {}
        #: Kernels not DONE, and those IN_FLIGHT.
        self.left, self.in_flight = len(program.successors), 0
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
        self.first_launch_ns = self.last_done_ns = self.device_ns = 0

    def still_needs(self, signature: SignatureId) -> bool:
        """True when a kernel of this signature is not launched yet."""
        return any(
            state <= READY and found == signature
            for state, found in zip(self.states, self.program.signatures, strict=True)
        )


@final
class Kernel:
    """A kernel of a request from READY on."""

    __slots__ = (
        "charge_ns", "done_by_ns", "index", "latest_ns", "live", "part", "queue", "request",
        "units", "urgency_ns", "weights",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, queue: ReadyQueue) -> None:
        spec = request.program.spec.kernels[index]
        profile = request.profile
        self.request = request
        self.index = index
        self.queue = queue
        self.weights: WeightsId = spec.weights
        self.units = request.tokens if spec.per_token else request.rows
        #: Its place among others: the latest start for the request to be done when due.
        self.urgency_ns = request.due_ns - profile.tail_ns[index]
        #: Started later than this, the request is predicted to miss its deadline.
        self.latest_ns = request.deadline_ns - profile.tail_ns[index]
        #: Done later than this, likewise.
        self.done_by_ns = self.latest_ns + profile.own_ns[index]
        #: In its queue. False: its heap entry is dead.
        self.live = True
        #: The rows it is launched for, if not all; what the backlog counted for them.
        self.part: tuple[int, int] | None = None
        self.charge_ns = 0
        if index in request.parts:
            self._go_on(request.parts[index], profile.own_ns[index])

    def _go_on(self, done: int, own_ns: int) -> None:
        """`done` rows are behind it."""
        rows = self.request.rows
        spared_ns = own_ns * done // rows
        self.part = (done, rows)
        self.units -= self.units * done // rows
        self.urgency_ns += spared_ns
        self.latest_ns += spared_ns

    def cut(self, stop: int) -> int:
        """Launches it for its next rows up to `stop` only; the predicted time of the rest."""
        rows = self.request.rows
        start = self.part[0] if self.part else 0
        whole, left_ns = self.units, self.done_by_ns - self.latest_ns
        self.part = (start, stop)
        self.units = whole * (stop - start) // (rows - start)
        return left_ns * (whole - self.units) // whole


@unique
class PlanState(Enum):
    """Of a signature that has no plan."""

    COMPILING = "compiling"
    FAILED = "failed"


Entry = tuple[int, int, int, Kernel]


@final
class ReadyQueue:
    """READY kernels of one signature in slack order."""

    __slots__ = ("alone", "dead_count", "gated", "group_hint", "heap", "held_since_ns", "listed",
                 "owner", "signature")  # fmt: skip

    def __init__(self, signature: SignatureId, *, alone: bool, owner: str) -> None:
        self.signature = signature
        #: The one tenant whose kernels these are, if it is out of the groups.
        self.owner = owner
        #: Its kernels may not share a launch (retries).
        self.alone = alone
        #: True while no plan exists: nothing of it may be launched.
        self.gated = False
        self.heap: list[Entry] = []
        self.dead_count = 0
        #: Sequence of the head that was listed last in `Ready.levels`; 0: none.
        self.listed = 0
        #: Members of its last launch: where coalescing begins to search.
        self.group_hint = 8
        #: Since when its head has waited for partners; 0: it has not.
        self.held_since_ns = 0

    @property
    def live_count(self) -> int:
        return len(self.heap) - self.dead_count

    def head(self) -> Entry | None:
        """The most urgent live kernel; drops dead ones before it."""
        heap = self.heap
        while heap:
            if heap[0][3].live:
                return heap[0]
            heappop(heap)
            self.dead_count -= 1
        return None

    def bury(self) -> None:
        """One more entry is dead; clears them all when they are the most."""
        self.dead_count += 1
        if self.dead_count > 16 and 2 * self.dead_count > len(self.heap):
            self.heap = [entry for entry in self.heap if entry[3].live]
            heapify(self.heap)
            self.dead_count = 0


@final
class Ready:
    """All ready queues, and by priority the heads of those that may be launched."""

    __slots__ = ("_families", "_sequence", "count", "levels", "queues", "tight_ns",
                 "tight_until_ns")  # fmt: skip

    def __init__(self) -> None:
        #: (signature, alone, tenant out of the groups or "") -> queue; bounded by what is attached.
        self.queues: dict[tuple[SignatureId, bool, str], ReadyQueue] = {}
        #: The queues of each signature.
        self._families: dict[SignatureId, list[ReadyQueue]] = {}
        #: By priority: heap of (latest start, sequence, queue). An item counts only while its
        #: sequence is that of the queue's head at this priority; others are dropped on sight.
        self.levels: list[list[tuple[int, int, ReadyQueue]]] = [[] for _ in range(LATE + 1)]
        self._sequence = 0
        #: Kernels READY.
        self.count = 0
        #: The shortest time that a request had when it came, of late; until when that counts.
        self.tight_ns = self.tight_until_ns = 0

    def queue(self, signature: SignatureId, alone: bool = False, owner: str = "") -> ReadyQueue:
        found = self.queues.get((signature, alone, owner))
        if found is None:
            found = ReadyQueue(signature, alone=alone, owner=owner)
            self.queues[signature, alone, owner] = found
            family = self._families.setdefault(signature, [])
            found.gated = bool(family) and family[0].gated
            family.append(found)
        return found

    def push(self, request: Request, index: int, *, alone: bool = False) -> None:
        """Makes a kernel READY whose producers are done."""
        tenant = request.tenant
        key = request.program.signatures[index], alone, tenant.name if tenant.alone else ""
        queue = self.queues.get(key) or self.queue(*key)
        kernel = Kernel(request, index, queue)
        request.states[index] = READY
        request.ready[index] = kernel
        self.count += 1
        self._sequence += 1
        entry = (request.priority, kernel.urgency_ns, self._sequence, kernel)
        heappush(queue.heap, entry)
        if queue.heap[0] is entry and not queue.gated:
            self._list(queue, entry)

    def list_head(self, queue: ReadyQueue) -> None:
        """To be called whenever the queue's head may be another one."""
        head = queue.head()
        if head is not None and not queue.gated and head[2] != queue.listed:
            self._list(queue, head)

    def _list(self, queue: ReadyQueue, head: Entry) -> None:
        queue.listed = head[2]
        level = self.levels[head[0]]
        heappush(level, (head[1], head[2], queue))
        if len(level) > 64 + 4 * len(self.queues):
            heads = [(queue.head(), queue) for queue in self.queues.values() if not queue.gated]
            level[:] = [(h[1], h[2], q) for h, q in heads if h and self.levels[h[0]] is level]
            heapify(level)

    def top(self, priority: int) -> ReadyQueue | None:
        """The queue with the least slack at this priority, None if none is there."""
        level = self.levels[priority]
        while level:
            _, sequence, queue = level[0]
            heap = queue.heap  # first the usual case of `is_head`, without its calls
            if heap and heap[0][2] == sequence and heap[0][3].live and not queue.gated:
                return queue
            if self.is_head(level[0]):
                return queue
            heappop(level)
        return None

    @staticmethod
    def is_head(item: tuple[int, int, ReadyQueue]) -> bool:
        queue = item[2]
        head = queue.head()
        return head is not None and head[2] == item[1] and not queue.gated

    def demote(self, queue: ReadyQueue) -> None:
        """Moves the queue's head to the LATE level, under a new sequence."""
        _, latest_ns, _, kernel = heappop(queue.heap)
        self._sequence += 1
        heappush(queue.heap, (LATE, latest_ns, self._sequence, kernel))
        self.list_head(queue)

    def pop(self, queue: ReadyQueue, most: int, last_priority: int) -> list[Entry]:
        """Takes out up to `most` kernels in slack order, none behind `last_priority`.

        They stay READY until `commit`; `put_back` undoes it.
        """
        taken: list[Entry] = []
        heap = queue.heap
        while heap and len(taken) < most and heap[0][0] <= last_priority:
            entry = heappop(heap)
            if entry[3].live:
                taken.append(entry)
            else:
                queue.dead_count -= 1
        return taken

    def put_back(self, queue: ReadyQueue, entries: list[Entry]) -> None:
        for entry in entries:
            heappush(queue.heap, entry)

    def commit(self, kernels: list[Kernel]) -> None:
        """READY -> BATCHED for kernels that were popped."""
        self.count -= len(kernels)
        for kernel in kernels:
            kernel.live = False
            del kernel.request.ready[kernel.index]
            kernel.request.states[kernel.index] = BATCHED

    def take(self, kernel: Kernel) -> None:
        """READY -> BATCHED for a kernel wherever it stands in its queue."""
        self.commit([kernel])
        self._bury(kernel.queue)

    def withdraw(self, request: Request) -> None:
        """Cancels all kernels of the request that are not launched."""
        for kernel in request.ready.values():
            kernel.live = False
            self._bury(kernel.queue)
        self.count -= len(request.ready)
        request.ready.clear()
        states = request.states
        for index, state in enumerate(states):
            if state is BLOCKED or state is READY:
                states[index] = CANCELLED

    def _bury(self, queue: ReadyQueue) -> None:
        queue.bury()
        self.list_head(queue)

    def gate(self, signature: SignatureId, *, closed: bool) -> None:
        """Closed: nothing of this signature may be launched."""
        self.queue(signature)
        for queue in self._families[signature]:
            queue.gated = closed
            queue.listed = 0
            self.list_head(queue)

    def forget(self, signature: SignatureId) -> None:
        """Drops the queues of a signature that no tenant has any more, if they are empty."""
        if all(queue.head() is None for queue in self._families.get(signature, ())):
            self._families.pop(signature, None)
            for key in [key for key in self.queues if key[0] == signature]:
                del self.queues[key]


@final
class Window:
    """Tenants, their open requests, and the ready kernels."""

    __slots__ = (
        "_deadlines", "_sequence", "bytes_reserved", "ended", "feeders", "open", "plans", "ready",
        "tenants", "weights",
    )  # fmt: skip

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        #: Requests without outcome, in order of admission.
        self.open: dict[RequestId, Request] = {}
        #: Requests with an outcome whose last kernel is still in flight; they hold their bytes.
        self.ended: dict[RequestId, Request] = {}
        self.ready = Ready()
        #: signature -> weights -> programs that have it attached.
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

    def attach(self, program: Program) -> None:
        """New requests of the name use this program; those in the window keep theirs."""
        for kernel in program.spec.kernels:
            users = self.weights.setdefault(kernel.signature, {})
            users[kernel.weights] = users.get(kernel.weights, 0) + 1
            feeders = self.feeders.setdefault(kernel.signature, {})
            for producer in kernel.producers:
                signature = program.spec.kernels[producer].signature
                feeders[signature] = feeders.get(signature, 0) + 1
        tenant = self.tenants.setdefault(program.spec.name, Tenant(program.spec.name))
        self._drop_users(tenant.program)
        tenant.program = program

    def detach(self, name: str) -> None:
        """The name takes no more requests; forgotten when its last one has ended."""
        tenant = self.tenants.get(name)
        if tenant is None:
            return
        self._drop_users(tenant.program)
        tenant.program = None
        if not tenant.open:
            del self.tenants[name]

    def _drop_users(self, program: Program | None) -> None:
        if program is None:
            return
        for kernel in program.spec.kernels:
            users = self.weights[kernel.signature]
            users[kernel.weights] -= 1
            if not users[kernel.weights]:
                del users[kernel.weights]
            feeders = self.feeders[kernel.signature]
            for producer in kernel.producers:
                signature = program.spec.kernels[producer].signature
                feeders[signature] -= 1
                if not feeders[signature]:
                    del feeders[signature]
            if not users:
                del self.weights[kernel.signature], self.feeders[kernel.signature]
                self.plans.pop(kernel.signature, None)
                self.ready.forget(kernel.signature)

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
        while heap and heap[0][2].state > RUNNING:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_next_deadline(self) -> Request:
        """The open request with the earliest deadline, which is then no longer watched."""
        return heappop(self._deadlines)[2]
