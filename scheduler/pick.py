"""Pick: which kernel leads the next launch.

NOTE. Least slack first within priority, slack up to when the request is due (see fairness). All
ready kernels see the same `now`, so least slack is the earliest latest start, which the heaps
already hold. Priority ends where fairness begins: who would get less than its share leads,
whatever its class. A kernel whose start is so late that its
request is lost goes behind everything that can still be served in time. Predictions are not exact,
so it counts as lost only when a quarter of its remaining time is missing.
"""

from __future__ import annotations

from coissue.scheduler.window import LATE, Kernel, Ready, ReadyQueue


def pick(ready: Ready, now_ns: int) -> ReadyQueue | None:
    """The queue whose head leads; None: nothing may be launched."""
    lead: Kernel | None = None
    for priority, level in enumerate(ready.levels):
        while level and (queue := ready.top(priority)) is not None:
            kernel = queue.heap[0][3]
            if priority != LATE and is_lost(kernel, now_ns):
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
