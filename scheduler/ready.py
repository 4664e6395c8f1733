"""The ready kernels, in heaps by signature.

NOTE. A ready kernel's place is (priority, latest start, sequence), which never changes while it
waits, so plain heaps hold the slack order: one heap per signature, and one heap of their heads per
priority. Picking costs the logarithm of the number of signatures, whatever the window's size.
A kernel that leaves from the middle (its request ended, another policy took it) only loses its
`live` mark; dead entries are dropped when they surface or when they outnumber the live ones.
From admission (insert) and retire (push, withdraw); to pick and coalesce.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, final

from coissue.scheduler.messages import SignatureId, WeightsId
from coissue.scheduler.states import KernelState

if TYPE_CHECKING:
    from coissue.scheduler.window import Request

#: Priorities are 1 (first) to PRIORITIES; larger ones count as the last.
PRIORITIES: Final = 16
#: The level behind all priorities: kernels whose request can no longer meet its deadline. They
#: run when nothing else is ready, so late work never makes other work late.
LATE: Final = PRIORITIES + 1
#: The level before all priorities: kernels that are past due behind others in their own queue.
PAST_DUE: Final = 0
#: Of them in one turn, the most urgent: just one can lead, and after a late launch all may be.
PAST_DUE_MOVES: Final = 8

BLOCKED, READY, BATCHED = KernelState.BLOCKED, KernelState.READY, KernelState.BATCHED
CANCELLED = KernelState.CANCELLED


@final
class Kernel:
    """A kernel of a request from READY on."""

    __slots__ = (
        "charge_ns", "done_by_ns", "index", "latest_ns", "live", "part", "queue", "request",
        "units", "urgency_ns", "weights",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, queue: ReadyQueue) -> None:
        spec = request.spec.kernels[index]
        profile = request.profile
        tail_ns, own_ns = profile.tail_ns[index], profile.own_ns[index]
        self.request = request
        self.index = index
        self.queue = queue
        self.weights: WeightsId = spec.weights
        self.units = request.tokens if spec.per_token else request.rows
        #: Its place among others: the latest start for the request to be done when due.
        self.urgency_ns = request.due_ns - tail_ns
        #: Started later than this, the request is predicted to miss its deadline.
        self.latest_ns = latest_ns = request.deadline_ns - tail_ns
        #: Done later than this, likewise.
        self.done_by_ns = latest_ns + own_ns
        #: In its queue. False: its heap entry is dead.
        self.live = True
        #: The rows it is launched for, if not all; what the backlog counted for them.
        self.part: tuple[int, int] | None = None
        self.charge_ns = 0
        if index in request.parts:
            self._go_on(request.parts[index], own_ns)

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


Entry = tuple[int, int, int, Kernel]


@final
class ReadyQueue:
    """READY kernels of one signature in slack order."""

    __slots__ = ("alone", "dead_count", "gated", "group_hint", "heap", "held_since_ns", "listed",
                 "owner", "partings", "signature")  # fmt: skip

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
        #: Groups of it that were predicted to cost somewhat more than their parts.
        self.partings = 0

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

    def bury(self, count: int = 1) -> None:
        """So many more entries are dead; clears them all when they are the most."""
        self.dead_count += count
        if self.dead_count > 16 and 2 * self.dead_count > len(self.heap):
            self.heap = [entry for entry in self.heap if entry[3].live]
            heapify(self.heap)
            self.dead_count = 0


#: (urgency, sequence, queue) of a queue's head.
Head = tuple[int, int, ReadyQueue]


@final
class Ready:
    """All ready queues, and by priority the heads of those that may be launched."""

    __slots__ = ("_families", "_most_listed", "_sequence", "behind", "count", "levels", "queues",
                 "tight_ns", "tight_until_ns", "used")  # fmt: skip

    def __init__(self) -> None:
        #: (signature, alone, tenant out of the groups or "") -> queue; bounded by what is attached.
        self.queues: dict[tuple[SignatureId, bool, str], ReadyQueue] = {}
        #: The queues of each signature.
        self._families: dict[SignatureId, list[ReadyQueue]] = {}
        #: By priority: heap of heads. An item counts only while its
        #: sequence is that of the queue's head at this priority; others are dropped on sight.
        self.levels: list[list[Head]] = [[] for _ in range(LATE + 1)]
        #: The priorities whose levels were ever used, in order: most never are.
        self.used: list[int] = []
        #: A level with more entries than this is cleared of those that do not count.
        self._most_listed = 64
        self._sequence = 0
        #: Heap of (urgency, sequence, kernel) where there are several classes, of which the later
        #: may stand behind others of their queue for ever. Those that left are dropped on sight.
        self.behind: list[tuple[int, int, Kernel]] = []
        #: Kernels READY.
        self.count = 0
        #: The shortest time that a request had when it came, of late; until when that counts.
        self.tight_ns = self.tight_until_ns = 0

    def queue(self, signature: SignatureId, alone: bool = False, owner: str = "") -> ReadyQueue:
        found = self.queues.get((signature, alone, owner))
        if found is None:
            found = ReadyQueue(signature, alone=alone, owner=owner)
            self.queues[signature, alone, owner] = found
            self._most_listed += 4
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
        self._sequence = sequence = self._sequence + 1
        entry = (request.priority, kernel.urgency_ns, sequence, kernel)
        heap = queue.heap
        heappush(heap, entry)
        if heap[0][2] == sequence and not queue.gated:
            self._list(queue, entry)
        # Where there is one class alone, urgency is their order already.
        is_behind = request.priority > 1 or len(self.used) > 1
        if is_behind and request.due_ns < request.deadline_ns:
            heappush(self.behind, (kernel.urgency_ns, sequence, kernel))
            if len(self.behind) > 64 + 4 * self.count:
                self.behind = [one for one in self.behind if one[2].live]
                heapify(self.behind)

    def list_head(self, queue: ReadyQueue) -> None:
        """To be called whenever the queue's head may be another one."""
        head = queue.head()
        if head is not None and not queue.gated and head[2] != queue.listed:
            self._list(queue, head)

    def _list(self, queue: ReadyQueue, head: Entry) -> None:
        priority, urgency_ns, sequence, _ = head
        queue.listed = sequence
        level = self.levels[priority]
        if not level and priority not in self.used:
            insort(self.used, priority)
        heappush(level, (urgency_ns, sequence, queue))
        if len(level) > self._most_listed:
            heads = [(queue.head(), queue) for queue in self.queues.values() if not queue.gated]
            level[:] = [(h[1], h[2], q) for h, q in heads if h and self.levels[h[0]] is level]
            heapify(level)

    def top(self, priority: int) -> ReadyQueue | None:
        """The queue with the least slack at this priority, None if none is there."""
        level = self.levels[priority]
        while level:
            _, sequence, queue = level[0]
            heap = queue.heap
            if not heap or not heap[0][3].live:  # else `is_head`, without its calls
                if self.is_head(level[0]):
                    return queue
            elif heap[0][2] == sequence and not queue.gated:
                return queue
            heappop(level)
        return None

    @staticmethod
    def is_head(item: Head) -> bool:
        """True if the item counts."""
        _, sequence, queue = item
        heap = queue.heap
        head = heap[0] if heap and heap[0][3].live else queue.head()
        return head is not None and head[2] == sequence and not queue.gated

    def heads_before(self, limit_ns: int, looks: int) -> Iterator[ReadyQueue]:
        """Queues whose heads are more urgent than `limit_ns`, by priority and about by urgency:
        those that `looks` items of each level show. LATE ones do not count."""
        for priority in self.used:
            level = self.levels[priority]
            if priority == LATE or not level or level[0][0] >= limit_ns:
                continue
            size, places = len(level), [0]
            for _ in range(looks):
                if not places:
                    break
                place = places.pop()
                if place < size and level[place][0] < limit_ns:
                    if self.is_head(level[place]):
                        yield level[place][2]
                    places += (2 * place + 2, 2 * place + 1)

    def take_past_due(self, now_ns: int) -> None:
        """Puts kernels that are past due before all others of their queues, under new entries."""
        behind, moved = self.behind, 0
        while (
            behind and moved < PAST_DUE_MOVES and (behind[0][0] < now_ns or not behind[0][2].live)
        ):
            urgency_ns, _, kernel = heappop(behind)
            if not kernel.live:
                continue
            moved += 1
            request, queue = kernel.request, kernel.queue
            kernel.live = False
            request.ready[kernel.index] = again = Kernel(request, kernel.index, queue)
            self._sequence += 1
            heappush(queue.heap, (PAST_DUE, urgency_ns, self._sequence, again))
            self._bury(queue)

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
            request, index = kernel.request, kernel.index
            kernel.live = False
            del request.ready[index]
            request.states[index] = BATCHED

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
                self._most_listed -= 4
