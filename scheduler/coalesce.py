"""Coalesce: who joins the lead kernel in its launch.

NOTE. Members are taken in slack order from the lead's own signature, whatever their weights, for as
long as the launch, as predicted for all of them together, (a) stays within `preemption_bound`,
(b) lets every member be done in time that still can be, and (c) ends before the latest start of
every other signature's head that could still be served after the lead alone. The prediction does
not fall as members join and the limits only tighten, so the largest group is found by growing in
steps and then halving the gap. The lead alone is always allowed: someone must go first.
Holding (waiting for partners while other work keeps the device busy) would be a second answer of
this function; it is not decided here yet: a launch is made of what is ready.
"""

from __future__ import annotations

from typing import final

from coissue.scheduler.messages import SignatureId, WeightsId
from coissue.scheduler.ports import CoreLimits, CostView
from coissue.scheduler.window import LATE, PRIORITIES, Entry, Kernel, Ready, ReadyQueue

#: Heads looked at per priority in the search for one that must be protected.
_LOOKS = 32
_NEVER = 1 << 62


@final
class Batch:
    """Kernels of one signature, to be launched together."""

    __slots__ = ("done_by_ns", "members", "predicted_ns", "units", "weights")

    def __init__(self, members: list[Kernel]) -> None:
        self.members = members
        self.units = 0
        self.weights: set[WeightsId] = set()
        self.predicted_ns = 0
        #: Earliest time by which a member that is still in time must be done.
        self.done_by_ns = _NEVER

    @property
    def signature(self) -> SignatureId:
        return self.members[0].queue.signature

    def grown(self, entries: list[Entry], cost: CostView, now_ns: int) -> Batch:
        """This batch with more members, and its prediction."""
        joining = [entry[3] for entry in entries]
        batch = Batch(self.members + joining)
        batch.weights = self.weights.copy()
        units, done_by_ns = self.units, self.done_by_ns
        for kernel in joining:
            units += kernel.units
            batch.weights.add(kernel.weights)
            if kernel.done_by_ns < done_by_ns and kernel.latest_ns >= now_ns:
                done_by_ns = kernel.done_by_ns
        batch.units, batch.done_by_ns = units, done_by_ns
        signature = batch.members[0].queue.signature
        batch.predicted_ns = cost.predict_ns(
            signature, units, len(batch.members), len(batch.weights)
        )
        return batch


def coalesce(
    lead: ReadyQueue, ready: Ready, limits: CoreLimits, cost: CostView, now_ns: int
) -> Batch:
    """Takes the head of `lead` and those who may join it out of the ready kernels."""
    level = lead.heap[0][0]
    batch = Batch([]).grown(ready.pop(lead, 1, level), cost, now_ns)
    if lead.heap and not lead.alone and limits.segments > 1:
        batch = _join(
            batch, lead, ready, limits, cost, now_ns, LATE if level == LATE else PRIORITIES
        )
    lead.group_hint = len(batch.members)
    ready.commit(batch.members)
    ready.list_head(lead)
    return batch


def _join(
    batch: Batch,
    queue: ReadyQueue,
    ready: Ready,
    limits: CoreLimits,
    cost: CostView,
    now_ns: int,
    last_priority: int,
) -> Batch:
    alone_ns = now_ns + batch.predicted_ns
    end_ns = min(now_ns + limits.preemption_bound_ns, earliest_other(ready, queue, alone_ns))
    #: How many have joined, and the smallest number known not to fit.
    joined, too_many = 0, limits.segments
    step = max(8, 2 * queue.group_hint)
    while joined + 1 < too_many:
        entries = ready.pop(queue, min(step, too_many - 1 - joined), last_priority)
        if not entries:
            break
        larger = batch.grown(entries, cost, now_ns)
        if now_ns + larger.predicted_ns <= min(end_ns, larger.done_by_ns):
            batch = larger
            joined += len(entries)
        else:
            ready.put_back(queue, entries)
            too_many = joined + len(entries)
        step = 2 * step if too_many == limits.segments else (too_many - joined) // 2
    return batch


def earliest_other(ready: Ready, queue: ReadyQueue, alone_ns: int) -> int:
    """The earliest latest start among other queues' heads that the lead alone does not spoil.

    Heads that the lead spoils anyway do not limit it, so the heaps are searched below them.
    """
    earliest = _NEVER
    for level in ready.levels[:LATE]:
        places = [0] if level else []
        for _ in range(_LOOKS):
            if not places:
                break
            place = places.pop()
            if place >= len(level) or level[place][0] >= earliest:
                continue
            latest_ns, _, other = level[place]
            if other is not queue and latest_ns >= alone_ns and ready.is_head(level[place]):
                earliest = latest_ns
            else:
                places += (2 * place + 2, 2 * place + 1)
    return earliest
