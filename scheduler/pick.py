"""Pick: which kernel leads the next launch.

NOTE. Least slack first within priority. All ready kernels see the same `now`, so least slack is
earliest latest start, which the heaps already hold. A kernel whose start is so late that its
request is lost goes behind everything that can still be served in time. Predictions are not exact,
so it counts as lost only when a quarter of its remaining time is missing.
"""

from __future__ import annotations

from coissue.scheduler.window import LATE, Kernel, Ready, ReadyQueue


def pick(ready: Ready, now_ns: int) -> ReadyQueue | None:
    """The queue whose head leads; None: nothing may be launched."""
    for priority, level in enumerate(ready.levels):
        while level and (queue := ready.top(priority)) is not None:
            if priority == LATE or not is_lost(queue.heap[0][3], now_ns):
                return queue
            ready.demote(queue)
    return None


def is_lost(kernel: Kernel, now_ns: int) -> bool:
    """True when not even a launch at once is predicted to save the request."""
    late_ns = now_ns - kernel.latest_ns
    return late_ns > 0 and 4 * late_ns > kernel.request.deadline_ns - kernel.latest_ns
