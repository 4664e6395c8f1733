"""The policies: ways to choose the next batch from the same window, for side-by-side runs.

A policy is asked once per free slot, after all events of the turn are applied, and takes what it
chooses out of the ready kernels. It may be replaced at any pump, with work in the window.
`space_time` is the product. `time_only` is the baseline of time slicing. Fair shares by virtual
device time, holding and the baselines `space_only`, `batch_per_model` and `fifo` have their place
here, as further classes in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final, Protocol, final

from coissue.scheduler.coalesce import Batch, coalesce
from coissue.scheduler.pick import pick
from coissue.scheduler.ports import CoreLimits, CostView
from coissue.scheduler.window import Kernel, Request, Window


class Policy(Protocol):
    #: False: may leave a slot free while something is ready.
    work_conserving: bool
    #: True: fair shares decide who competes (see fairness).
    is_fair: bool

    def choose(self, window: Window, now_ns: int) -> Batch | None:
        """The next batch, READY -> BATCHED; None: nothing to launch now."""


@final
class SpaceTime:
    """Least slack leads; equal kernels of all tenants join."""

    work_conserving = True
    is_fair = True

    def __init__(self, limits: CoreLimits, cost: CostView, rng: Random) -> None:
        self._limits = limits
        self._cost = cost

    def choose(self, window: Window, now_ns: int) -> Batch | None:
        lead = pick(window.ready, now_ns)
        if lead is None:
            return None
        return coalesce(lead, window.ready, self._limits, self._cost, now_ns)


@final
class TimeOnly:
    """One request at a time, all its kernels in order; tenants in turn, each first come first."""

    work_conserving = False
    is_fair = False

    def __init__(self, limits: CoreLimits, cost: CostView, rng: Random) -> None:
        self._cost = cost
        #: The request being served; ended or stuck ones are replaced.
        self._current: Request | None = None
        self._turn = 0

    def choose(self, window: Window, now_ns: int) -> Batch | None:
        current = self._current
        if current is not None and current.in_flight:
            return None
        if current is None or current.id not in window.open or not _runnable(current):
            current = self._next(window)
        self._current = current
        kernel = None if current is None else _runnable(current)
        if kernel is None:
            return None
        window.ready.take(kernel)
        return Batch(kernel, self._cost, now_ns)

    def _next(self, window: Window) -> Request | None:
        """The first request that can run, of the tenant served longest ago."""
        for tenant in sorted(window.tenants.values(), key=lambda tenant: tenant.turn):
            for request in tenant.open.values():
                if _runnable(request):
                    self._turn += 1
                    tenant.turn = self._turn
                    return request
        return None


def _runnable(request: Request) -> Kernel | None:
    """Its first kernel that may be launched now."""
    if request.in_flight:
        return None
    kernels = [kernel for kernel in request.ready.values() if not kernel.queue.gated]
    return min(kernels, key=lambda kernel: kernel.index, default=None)


POLICIES: Final[dict[str, Callable[[CoreLimits, CostView, Random], Policy]]] = {
    "space_time": SpaceTime,
    "time_only": TimeOnly,
}
