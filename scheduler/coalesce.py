"""Coalesce: who joins the lead kernel in its launch.

NOTE. Members are taken in slack order from the lead's own signature, whatever their weights, for as
long as the launch, as predicted for all of them together, (a) stays within `preemption_bound`,
(b) lets every member be done in time that still can be, and (c) ends before the latest start of
every other signature's head that could still be served after the lead alone. The prediction does
not fall as members join and the limits only tighten, so the largest group is found by growing in
steps and then halving the gap. The lead alone is always allowed: someone must go first. If it
alone is longer than the bound and its rows may run apart, it goes in parts.
"""

from __future__ import annotations

from collections.abc import Set
from heapq import heappop
from typing import final

from coissue.scheduler.messages import Launch, WeightsId
from coissue.scheduler.ports import CoreLimits, CostView
from coissue.scheduler.program import count_parts
from coissue.scheduler.ready import LATE, PRIORITIES, Entry, Kernel, Ready, ReadyQueue

#: Heads looked at per priority in the search for one that must be protected.
_LOOKS = 8
_NEVER = 1 << 62
_NO_WEIGHTS: Set[WeightsId] = frozenset()


@final
class Batch:
    """Kernels of one signature that are launched together, until they have come back."""

    __slots__ = (
        "done_by_ns", "end_ns", "failure", "launch", "members", "predicted_ns", "signature",
        "units", "weights",
    )  # fmt: skip

    #: Set when it is issued; when it came back, and why it failed.
    launch: Launch
    end_ns: int
    failure: str

    def __init__(self, lead: Kernel, cost: CostView, now_ns: int) -> None:
        self.signature = signature = lead.queue.signature
        #: The lead first; once issued in segment order.
        self.members = [lead]
        self.units = units = lead.units
        #: Those of all members; empty while the lead is alone.
        self.weights: Set[WeightsId] = _NO_WEIGHTS
        self.predicted_ns = cost.predict_ns(signature, units, 1, 1)
        #: Earliest time by which a member that is still in time must be done.
        self.done_by_ns = lead.done_by_ns if lead.latest_ns >= now_ns else _NEVER

    def split(self, cost: CostView, bound_ns: int) -> None:
        """Takes only so many rows of a lead that may run in parts as fit the bound, at least one.

        The parts are made about equal.
        """
        lead = self.members[0]
        start = lead.part[0] if lead.part else 0
        left = lead.request.rows - start
        if left < 2 or not lead.request.spec.kernels[lead.index].splittable:
            return
        parts = count_parts(self.signature, left, lead.units // left, bound_ns, cost)
        rest_ns = lead.cut(start + -(-left // parts))
        self.units = lead.units
        self.predicted_ns = cost.predict_ns(self.signature, self.units, 1, 1)
        if self.done_by_ns < _NEVER:
            self.done_by_ns -= rest_ns

    def take_all(self, kernels: list[Kernel], cost: CostView) -> None:
        """Takes the kernels in, whatever it does to anyone's deadline."""
        if not kernels:
            return
        self.members += kernels
        self.units += sum(kernel.units for kernel in kernels)
        self.weights = {kernel.weights for kernel in self.members}
        count, sets = len(self.members), len(self.weights)
        self.predicted_ns = cost.predict_ns(self.signature, self.units, count, sets)

    def grow(self, entries: list[Entry], cost: CostView, now_ns: int, end_ns: int) -> bool:
        """Takes the entries in if all can be done by `end_ns` and nobody misses for it."""
        units, done_by_ns = self.units, self.done_by_ns
        weights = set(self.weights or (self.members[0].weights,))
        for entry in entries:
            kernel = entry[3]
            units += kernel.units
            weights.add(kernel.weights)
            if kernel.done_by_ns < done_by_ns and kernel.latest_ns >= now_ns:
                done_by_ns = kernel.done_by_ns
        count = len(self.members) + len(entries)
        predicted_ns = cost.predict_ns(self.signature, units, count, len(weights))
        if now_ns + predicted_ns > min(end_ns, done_by_ns):
            return False
        self.members += [entry[3] for entry in entries]
        self.units, self.done_by_ns, self.weights = units, done_by_ns, weights
        self.predicted_ns = predicted_ns
        return True


def coalesce(
    lead: ReadyQueue, ready: Ready, limits: CoreLimits, cost: CostView, now_ns: int
) -> Batch:
    """Takes the head of `lead` and those who may join it out of the ready kernels."""
    heap, bound_ns = lead.heap, limits.preemption_bound_ns
    priority, _, _, kernel = heappop(heap)
    batch = Batch(kernel, cost, now_ns)
    if batch.predicted_ns > bound_ns:
        batch.split(cost, bound_ns)
    if heap and limits.segments > 1 and not lead.alone:
        end_ns = now_ns + bound_ns
        end_ns = latest_end(ready, lead, now_ns + batch.predicted_ns, end_ns)
        last_priority = LATE if priority == LATE else PRIORITIES
        _join(batch, lead, ready, limits.segments, cost, now_ns, end_ns, last_priority)
    lead.group_hint = len(batch.members)
    lead.held_since_ns = 0
    ready.commit(batch.members)
    ready.list_head(lead)
    return batch


def _join(
    batch: Batch,
    queue: ReadyQueue,
    ready: Ready,
    most: int,
    cost: CostView,
    now_ns: int,
    end_ns: int,
    last_priority: int,
) -> None:
    #: How many have joined, and the smallest number known not to fit.
    joined, too_many = 0, most
    step = max(8, 2 * queue.group_hint)
    while joined + 1 < too_many:
        entries = ready.pop(queue, min(step, too_many - 1 - joined), last_priority)
        if not entries:
            break
        if batch.grow(entries, cost, now_ns, end_ns):
            joined += len(entries)
        else:
            ready.put_back(queue, entries)
            too_many = joined + len(entries)
        step = 2 * step if too_many == most else (too_many - joined) // 2


def latest_end(ready: Ready, queue: ReadyQueue, alone_ns: int, end_ns: int) -> int:
    """By when the launch must end for the heads of other queues, `end_ns` at most.

    The heads follow one after the other, by latest start. Those that the lead alone (done at
    `alone_ns`) spoils anyway do not count. Only heads that are urgent before `end_ns` and the next
    launch after it are looked at, and at most `_LOOKS` of a class.
    """
    horizon_ns = end_ns + (end_ns - alone_ns)
    heads: list[tuple[int, int]] = []
    for other in ready.heads_before(horizon_ns, _LOOKS):
        if other is not queue:
            kernel = other.heap[0][3]
            heads.append((kernel.latest_ns, kernel.done_by_ns - kernel.latest_ns))
    heads.sort()
    before_ns = 0
    for latest_ns, own_ns in heads:
        if latest_ns - before_ns >= alone_ns:
            end_ns = min(end_ns, latest_ns - before_ns)
            before_ns += own_ns
    return end_ns
