"""Coalesce: who joins the lead kernel in its launch.

NOTE. Members are taken in slack order from the lead's own signature, whatever their weights, for as
long as the launch, as predicted for all of them together, (a) stays within `preemption_bound`,
(b) lets every member be done in time that still can be, and (c) ends before the latest start of
every other signature's head that could still be served after the lead alone. The prediction does
not fall as members join and the limits only tighten, so the largest group is found by growing in
steps and then halving the gap. The lead alone is always allowed: someone must go first. If it
alone is longer than the bound, or than a quarter of the time that requests with the least of it
have had of late (which may come at any moment), and its rows may run apart, it goes in parts.

Requests whose last launch was the same lie together on the device; a launch of others has to join
their inputs first, and is predicted so. If that costs more than one launch for all saves, only
those who lie with the lead already go with it. Likewise, if a launch for each set of weights is
predicted to take about as long, only those with the lead's. If launches of a half, a quarter, ...
of the members take clearly less in all, for what all read and write does not stay in the cache, so
many go; and if one for each request takes less, nobody. What is not launched is not learned, so
every `_TRIED`th group that only looks dear goes together all the same.
"""

from __future__ import annotations

from collections.abc import Set
from heapq import heappop
from typing import Final, final

from coissue.scheduler.messages import Launch, SignatureId, WeightsId
from coissue.scheduler.ports import MS, CoreLimits, CostView
from coissue.scheduler.program import count_parts
from coissue.scheduler.ready import LATE, PRIORITIES, Entry, Kernel, Ready, ReadyQueue

#: A request's lane is the number of its last launch, and in so many lower bits its place in it.
LANE_BITS = 20
#: Heads looked at per priority in the search for one that must be protected.
_LOOKS = 8
#: Kernels looked at in the search for those that are like the lead.
_MATES = 1024
_NEVER = 1 << 62
#: Parts of long kernels are no longer than one of so many parts of the shortest time of others.
_TIGHT = 4
#: What a launch of several sets of weights may take at most of one for each, and those of smaller
#: groups of the whole one's: less than predictions err by is no gain.
_GAIN = 0.97
#: Groups of weights are not alike if one of equal size takes so many times what the smallest does,
#: and then must gain so much.
_UNLIKE = 2
_CLEAR_GAIN = 0.75
#: One of so many groups that are predicted to cost more than their parts, but not `_DEAR` times as
#: much, is launched to see: a point that was measured in a busy moment would else stay for good.
#: A prime, so that of groups that come in turn each has its trials.
_TRIED = 61
_DEAR = 2
_NO_WEIGHTS: Set[WeightsId] = frozenset()

#: What members of a launch may have in common; 0: nothing.
_Key = int
_PLACE: Final = 1
_WEIGHTS: Final = 2
_REQUEST: Final = 3
#: In nothing: fewer of them.
_SIZE: Final = 4


def place(kernel: Kernel) -> int:
    """The last launch of its request, with whose other members it lies together; 0: it is new."""
    return kernel.request.lane >> LANE_BITS


def _of(kernel: Kernel, key: _Key) -> int:
    if key == _WEIGHTS:
        return kernel.weights
    return place(kernel) if key == _PLACE else kernel.request.id


def _alike(entries: list[Entry], lead: Kernel, keys: list[_Key]) -> list[Entry]:
    """Those that have all `keys` in common with the lead."""
    for key in keys:
        own = _of(lead, key)
        entries = [entry for entry in entries if _of(entry[3], key) == own]
    return entries


@final
class Batch:
    """Kernels of one signature that are launched together, until they have come back."""

    __slots__ = (
        "done_by_ns", "end_ns", "failure", "launch", "members", "places", "predicted_ns",
        "signature", "units", "weights",
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
        #: The launches that the members were in last.
        self.places = {place(lead)}
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
        if left < 2 or not lead.units or not lead.request.spec.kernels[lead.index].splittable:
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
        self.places = {place(kernel) for kernel in self.members}
        self.predicted_ns = _predict_ns(self.signature, self.members, cost)

    def grow(self, entries: list[Entry], cost: CostView, now_ns: int, end_ns: int) -> bool:
        """Takes the entries in if all can be done by `end_ns` and nobody misses for it."""
        units, done_by_ns = self.units, self.done_by_ns
        weights, places = set(self.weights or (self.members[0].weights,)), self.places.copy()
        for entry in entries:
            kernel = entry[3]
            units += kernel.units
            weights.add(kernel.weights)
            places.add(place(kernel))
            if kernel.done_by_ns < done_by_ns and kernel.latest_ns >= now_ns:
                done_by_ns = kernel.done_by_ns
        count = len(self.members) + len(entries)
        joins = len(places) > 1
        predicted_ns = cost.predict_ns(self.signature, units, count, len(weights), joins)
        if now_ns + predicted_ns > min(end_ns, done_by_ns):
            return False
        self.members += [entry[3] for entry in entries]
        self.units, self.done_by_ns, self.predicted_ns = units, done_by_ns, predicted_ns
        self.weights, self.places = weights, places
        return True

    def leave(self, units: int, done_by_ns: int, predicted_ns: int) -> None:
        """All but the lead, which is as it was before."""
        lead = self.members[0]
        self.members, self.weights, self.places = [lead], _NO_WEIGHTS, {place(lead)}
        self.units, self.done_by_ns, self.predicted_ns = units, done_by_ns, predicted_ns

    def find_costly(self, cost: CostView, dear: int = 1) -> _Key:
        """In what the members differ although a launch for each of it is predicted to take less,
        `dear` times less, or that they are too many; 0 if neither."""
        count, together_ns = len(self.members), self.predicted_ns
        if len(self.places) > 1 and dear * self._apart_ns(_PLACE, cost) < together_ns:
            return _PLACE
        if self.is_costly_by_weights(cost, dear):
            return _WEIGHTS
        if self.find_knee(cost, dear) < count:
            return _SIZE
        least_ns = cost.predict_ns(self.signature, min(k.units for k in self.members), 1, 1)
        if dear * count * least_ns >= together_ns:  # most end here
            return 0
        return _REQUEST if dear * self._apart_ns(_REQUEST, cost) < together_ns else 0

    def find_knee(self, cost: CostView, dear: int = 1) -> int:
        """The size of those groups, of all members, a half, a quarter, ... or so, that take least
        for each; all, if others do not save enough (C16: the knee of the measured curve)."""
        count = len(self.members)
        whole_ns = best_ns = self.predicted_ns / count
        best, size = count, -(-count // 2)
        while size < best and (each_ns := self._each_ns(size, cost)) < best_ns:
            best, best_ns, size = size, each_ns, -(-size // 2)
        if best == count:  # most end here, at half
            return count
        for size in (best + best // 2, best - best // 4):
            if size < count and (each_ns := self._each_ns(size, cost)) < best_ns:
                best, best_ns = size, each_ns
        return best if dear * best_ns < _GAIN * whole_ns else count

    def _each_ns(self, size: int, cost: CostView) -> float:
        """For each of `size` members like these."""
        count, sets = len(self.members), len(self.weights) or 1
        units, sets = -(-self.units * size // count), -(-sets * size // count)
        return cost.predict_ns(self.signature, units, size, sets, len(self.places) > 1) / size

    def is_costly_by_weights(self, cost: CostView, dear: int = 1) -> bool:
        """By groups of equal size, for what common launches gain was measured so. Where a small
        group would wait for larger ones, the launch must gain clearly by its own sizes too."""
        sets = len(self.weights)
        if sets < 2:
            return False
        units, segments = -(-self.units // sets), -(-len(self.members) // sets)
        group_ns = cost.predict_ns(self.signature, units, segments, 1)
        if dear * _GAIN * sets * group_ns < self.predicted_ns:
            return True
        by_weights: dict[WeightsId, int] = {}
        for kernel in self.members:
            by_weights[kernel.weights] = by_weights.get(kernel.weights, 0) + kernel.units
        least_ns = cost.predict_ns(self.signature, min(by_weights.values()), 1, 1)
        if _UNLIKE * least_ns >= group_ns:
            return False
        return dear * _CLEAR_GAIN * self._apart_ns(_WEIGHTS, cost) < self.predicted_ns

    def _apart_ns(self, key: _Key, cost: CostView) -> int:
        apart: dict[int, list[Kernel]] = {}
        for kernel in self.members:
            apart.setdefault(_of(kernel, key), []).append(kernel)
        return sum(_predict_ns(self.signature, own, cost) for own in apart.values())


def _predict_ns(signature: SignatureId, kernels: list[Kernel], cost: CostView) -> int:
    """Of a launch of these kernels."""
    units, sets = sum(k.units for k in kernels), len({k.weights for k in kernels})
    joins = len({place(kernel) for kernel in kernels}) > 1
    return cost.predict_ns(signature, units, len(kernels), sets, joins)


def coalesce(
    lead: ReadyQueue, ready: Ready, limits: CoreLimits, cost: CostView, now_ns: int
) -> Batch:
    """Takes the head of `lead` and those who may join it out of the ready kernels."""
    heap, bound_ns = lead.heap, limits.preemption_bound_ns
    priority, _, _, kernel = heappop(heap)
    batch = Batch(kernel, cost, now_ns)
    part_ns = min(bound_ns, max(ready.tight_ns // _TIGHT, MS))
    own_ns = kernel.request.deadline_ns - kernel.request.submitted_ns
    if own_ns <= ready.tight_ns:
        part_ns = bound_ns
    if batch.predicted_ns > part_ns:
        batch.split(cost, part_ns)
    if part_ns < 2 * batch.predicted_ns <= 2 * part_ns:
        bound_ns = part_ns  # a second one of this length would save little
    mates = 0
    if heap and limits.segments > 1 and not lead.alone:
        end_ns = latest_end(ready, lead, now_ns + batch.predicted_ns, now_ns + bound_ns)
        last_priority = LATE if priority == LATE else PRIORITIES
        first = batch.units, batch.done_by_ns, batch.predicted_ns
        most = limits.segments
        taken = _join(batch, lead, ready, most, cost, now_ns, end_ns, last_priority)
        keys: list[_Key] = []
        if len(batch.places) == 1:
            mates = _join_mates(batch, [_PLACE], lead, most, cost, now_ns, end_ns, last_priority)
        key = batch.find_costly(cost)
        if key and not batch.find_costly(cost, _DEAR):
            lead.partings += 1
            key = key if lead.partings % _TRIED else 0
        while key:
            if key == _SIZE:
                most = batch.find_knee(cost)
            else:
                keys.append(key)
            batch.leave(*first)
            ready.put_back(lead, taken)
            taken, mates = [], 0
            if keys:
                mates = _join_mates(batch, keys, lead, most, cost, now_ns, end_ns, last_priority)
            else:
                taken = _join(batch, lead, ready, most, cost, now_ns, end_ns, last_priority)
            key = batch.find_costly(cost)
    lead.group_hint = len(batch.members)
    lead.held_since_ns = 0
    ready.commit(batch.members)
    lead.bury(mates)
    ready.list_head(lead)
    return batch


def _join(
    batch: Batch, queue: ReadyQueue, ready: Ready, most: int, cost: CostView, now_ns: int,
    end_ns: int, last_priority: int,
) -> list[Entry]:  # fmt: skip
    """Takes in as many as fit; who they are. Few, if already these gain nothing."""
    taken: list[Entry] = []
    #: How many have joined, and the smallest number known not to fit.
    joined, too_many = 0, most
    step = max(8, 2 * queue.group_hint)
    while joined + 1 < too_many:
        entries = ready.pop(queue, min(step, too_many - 1 - joined), last_priority)
        if not entries:
            break
        if batch.grow(entries, cost, now_ns, end_ns):
            taken += entries
            joined += len(entries)
            if batch.is_costly_by_weights(cost) or batch.find_knee(cost) <= joined:
                break
        else:
            ready.put_back(queue, entries)
            too_many = joined + len(entries)
        step = 2 * step if too_many == most else (too_many - joined) // 2
    return taken


def _join_mates(
    batch: Batch, keys: list[_Key], queue: ReadyQueue, most: int, cost: CostView, now_ns: int,
    end_ns: int, last_priority: int,
) -> int:  # fmt: skip
    """Takes in who is like the lead by all `keys`, behind others for whom a join is too long or
    does not pay; about as many as fit. How many: their entries stay where they are."""
    lead, head = batch.members[0], queue.head()
    if head is None or (len(batch.members) > 1 and _alike([head], lead, keys)):
        return 0  # nobody else was in the way
    near = [one for one in queue.heap[:_MATES] if one[3].live and one[0] <= last_priority]
    mates = sorted(_alike(near, lead, keys))
    del mates[most - len(batch.members) :]
    while mates and not batch.grow(mates, cost, now_ns, end_ns):
        del mates[len(mates) // 2 :]
    return len(mates)


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
