"""Pick: which kernel leads the next launch.

NOTE. Least slack first within priority, slack up to when the request is due (see fairness). All
ready kernels see the same `now`, so least slack is the earliest latest start, which the heaps
already hold. Priority ends where fairness begins: who would get less than its share leads,
whatever its class. A kernel whose start is so late that its
request is lost goes behind everything that can still be served in time. Predictions are not exact,
so it counts as lost only when a quarter of its remaining time is missing.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import Final

from coissue.scheduler.coalesce import place
from coissue.scheduler.ports import CoreLimits, CostView
from coissue.scheduler.ready import LATE, Kernel, Ready, ReadyQueue

#: Queues weighed against the lead, and kernels looked at in each.
RIVALS: Final = 3
GROUP_LOOKS: Final = 8


def pick(ready: Ready, now_ns: int) -> ReadyQueue | None:
    """The queue whose head leads; None: nothing may be launched."""
    lead: Kernel | None = None
    if ready.behind:
        ready.take_past_due(now_ns)
    levels = ready.levels
    for priority in ready.used:
        level = levels[priority]
        if not level or (lead is not None and level[0][0] >= now_ns):
            continue  # nothing there is overdue
        while level and (queue := ready.top(priority)) is not None:
            kernel = queue.heap[0][3]
            if kernel.latest_ns < now_ns and priority != LATE and is_lost(kernel, now_ns):
                ready.demote(queue)
                continue
            if lead is None or (priority != LATE and _leads(kernel, lead, now_ns)):
                lead = kernel
            break
    return None if lead is None else lead.queue


def _leads(kernel: Kernel, lead: Kernel, now_ns: int) -> bool:
    """True when a kernel of a later class must not wait for the lead."""
    if not is_overdue(kernel, now_ns):
        return False
    return not is_overdue(lead, now_ns) or kernel.urgency_ns < lead.urgency_ns


def is_overdue(kernel: Kernel, now_ns: int) -> bool:
    """True when its tenant falls behind its share by more than the window allows."""
    return kernel.urgency_ns < now_ns and kernel.request.due_ns < kernel.request.deadline_ns


def is_lost(kernel: Kernel, now_ns: int) -> bool:
    """True when not even a launch at once is predicted to save the request."""
    late_ns = now_ns - kernel.latest_ns
    return late_ns > 0 and 4 * late_ns > kernel.request.deadline_ns - kernel.latest_ns


def resolve(
    lead: ReadyQueue, ready: Ready, limits: CoreLimits, cost: CostView, now_ns: int
) -> ReadyQueue:
    """The queue to lead where not all can be served in time: the one after which most are.

    NOTE. Least slack first is best only as long as everything can be met. If the lead's own launch
    is predicted to spoil the head of another queue, the lead and up to `RIVALS` such heads are
    weighed: each by how many its group gets done in time, and how many the groups of the others
    still can afterwards. Nobody is weighed where nobody is spoiled.
    """
    kernel = lead.heap[0][3]
    if kernel.request.first_launch_ns or is_overdue(kernel, now_ns):
        return lead
    own_ns = kernel.done_by_ns - kernel.latest_ns
    rivals = _spoiled(lead, ready, now_ns, now_ns + own_ns)
    if not rivals:
        return lead
    groups = [
        (queue, *_weigh(queue, limits, cost, now_ns), queue.heap[0][3].latest_ns)
        for queue in [lead, *rivals]
    ]

    def good_after(index: int) -> int:
        end_ns = now_ns + groups[index][2]
        return groups[index][1] + sum(
            good
            for other, (_, good, _, latest_ns) in enumerate(groups)
            if other != index and latest_ns >= end_ns
        )

    best = max(range(len(groups)), key=lambda index: (good_after(index), -index))
    return groups[best][0]


def _spoiled(lead: ReadyQueue, ready: Ready, now_ns: int, end_ns: int) -> list[ReadyQueue]:
    """Other queues whose heads can be met now, but not once `end_ns` has come."""
    found: list[ReadyQueue] = []
    for queue in ready.heads_before(end_ns, 2 * RIVALS):
        if queue is not lead and now_ns <= queue.heap[0][3].latest_ns < end_ns:
            found.append(queue)
            if len(found) == RIVALS:
                break
    return found


def _weigh(queue: ReadyQueue, limits: CoreLimits, cost: CostView, now_ns: int) -> tuple[int, int]:
    """(members done in time, predicted time) of a group of the most urgent of the queue."""
    entries = nsmallest(GROUP_LOOKS, [entry for entry in queue.heap if entry[3].live])
    members = [entries[0][3]]
    joins = False
    took_ns = cost.predict_ns(queue.signature, members[0].units, 1, 1)
    done_by_ns = members[0].done_by_ns
    for entry in entries[1:] if not queue.alone else ():
        kernel = entry[3]
        units = sum(member.units for member in members) + kernel.units
        sets = len({member.weights for member in members} | {kernel.weights})
        joins = joins or place(kernel) != place(members[0])
        joined_ns = cost.predict_ns(queue.signature, units, len(members) + 1, sets, joins)
        by_ns = min(done_by_ns, kernel.done_by_ns)
        if joined_ns <= limits.preemption_bound_ns and now_ns + joined_ns <= by_ns:
            members.append(kernel)
            took_ns, done_by_ns = joined_ns, by_ns
    return len(members) - (entries[0][3].latest_ns < now_ns), took_ns
