"""The policies: ways to choose the next batch from the same window, for side-by-side runs.

A policy is asked once per free slot, after all events of the turn are applied, and takes what it
chooses out of the ready kernels. It may be replaced at any pump, with work in the window.
`space_time` is the product; the others are what it is compared with (T1 to T4 of the papers, and a
dynamic batcher per model). Only `space_time` reads deadlines, shares and priorities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import islice
from random import Random
from typing import Final, final

from coissue.scheduler.coalesce import Batch, coalesce
from coissue.scheduler.hold import hold
from coissue.scheduler.pick import pick, resolve
from coissue.scheduler.ports import MS, CoreLimits, CostView
from coissue.scheduler.ready import Kernel
from coissue.scheduler.window import Request, Tenant, Window


class Policy(ABC):
    """What the core asks for batches; the defaults are those of most baselines."""

    #: False: may leave a slot free while something is ready.
    work_conserving = False
    #: True: fair shares decide who competes (see fairness).
    is_fair = False
    #: When to be asked again even if nothing happens; 0: never.
    wake_ns = 0

    def __init__(self, limits: CoreLimits, cost: CostView, rng: Random) -> None:
        self._limits = limits
        self._cost = cost
        #: How often a tenant was served in turn.
        self._turn = 0

    @abstractmethod
    def choose(self, window: Window, now_ns: int) -> Batch | None:
        """The next batch, READY -> BATCHED; None: nothing to launch now."""


@final
class SpaceTime(Policy):
    """Least slack leads; equal kernels of all tenants join."""

    work_conserving = True
    is_fair = True

    def choose(self, window: Window, now_ns: int) -> Batch | None:
        ready, limits, cost = window.ready, self._limits, self._cost
        lead = pick(ready, now_ns)
        if lead is None:
            return None
        lead = resolve(lead, ready, limits, cost, now_ns)
        if limits.hold_ns:
            lead = hold(lead, window, limits, cost, now_ns) or lead
        return coalesce(lead, ready, limits, cost, now_ns)


@final
class TimeOnly(Policy):
    """One request at a time, all its kernels in order; tenants in turn, each first come first."""

    #: The request being served; ended or stuck ones are replaced.
    _current: Request | None = None

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


@final
class Fifo(Policy):
    """Requests in order of arrival, each with all its kernels in order, one launch at a time."""

    work_conserving = True

    def choose(self, window: Window, now_ns: int) -> Batch | None:
        for request in window.open.values():
            kernel = _first_ready(request)
            if kernel is not None:
                window.ready.take(kernel)
                return Batch(kernel, self._cost, now_ns)
        return None


@final
class SpaceOnly(Policy):
    """A stream per tenant: its requests in order, one kernel at a time, beside those of the others.

    As many streams run at a time as there are slots; tenants take turns for a free one.
    """

    def choose(self, window: Window, now_ns: int) -> Batch | None:
        best: tuple[int, Tenant, Kernel] | None = None
        for tenant in window.tenants.values():
            if best is not None and tenant.turn >= best[0]:
                continue
            for request in tenant.open.values():
                kernel = _runnable(request)
                if kernel is not None:
                    best = tenant.turn, tenant, kernel
                if kernel is not None or request.in_flight:
                    break
        if best is None:
            return None
        self._turn += 1
        best[1].turn = self._turn
        window.ready.take(best[2])
        return Batch(best[2], self._cost, now_ns)


@final
class BatchPerModel(Policy):
    """A dynamic batcher per model, as Triton Inference Server has it (T1 with arrivals).

    Requests of one tenant are gathered until there are `BATCH_MAX` or the oldest has waited for
    `DELAY_NS`; then they run through the model together, kernel by kernel, one model at a time per
    slot. Whole batches are served in the order in which they were due.
    """

    BATCH_MAX: Final = 32
    DELAY_NS: Final = 2 * MS

    def __init__(self, limits: CoreLimits, cost: CostView, rng: Random) -> None:
        super().__init__(limits, cost, rng)
        self._most = min(self.BATCH_MAX, limits.segments)
        #: The batches that run, each the requests of one tenant.
        self._running: list[list[Request]] = []

    def choose(self, window: Window, now_ns: int) -> Batch | None:
        self._running = [
            alive
            for batch in self._running
            if (alive := [r for r in batch if r.id in window.open or r.id in window.ended])
        ]
        for batch in self._running:
            kernels = self._next_kernels(batch)
            if kernels:
                return self._make(kernels, window, now_ns)
        gathered = self._gather(window, now_ns)
        kernels = self._next_kernels(gathered)
        if not kernels:
            return None
        self._running.append(gathered)
        return self._make(kernels, window, now_ns)

    def _gather(self, window: Window, now_ns: int) -> list[Request]:
        """The requests of the batch that has been due for longest; notes when the next one is."""
        due: tuple[int, list[Request]] | None = None
        self.wake_ns = 0
        taken = {request.id for batch in self._running for request in batch}
        for tenant in window.tenants.values():
            waiting = [
                request for request in islice(tenant.open.values(), 4 * self._most)
                if request.id not in taken and _first_ready(request) is not None
            ][: self._most]  # fmt: skip
            if not waiting:
                continue
            full = len(waiting) >= self._most
            due_ns = waiting[0].submitted_ns + (0 if full else self.DELAY_NS)
            if due_ns > now_ns:
                self.wake_ns = min(self.wake_ns or due_ns, due_ns)
            elif due is None or due_ns < due[0]:
                due = due_ns, waiting
        return due[1] if due is not None else []

    @staticmethod
    def _next_kernels(batch: list[Request]) -> list[Kernel]:
        """The kernels that the batch launches next; none while one of it is on the device."""
        if any(request.in_flight for request in batch):
            return []
        ready = [kernel for r in batch if (kernel := _first_ready(r)) is not None]
        if not ready:
            return []
        first = min(ready, key=lambda kernel: kernel.index)
        if first.queue.alone:
            return [first]
        return [kernel for kernel in ready if kernel.queue is first.queue]

    def _make(self, kernels: list[Kernel], window: Window, now_ns: int) -> Batch:
        for kernel in kernels:
            window.ready.take(kernel)
        batch = Batch(kernels[0], self._cost, now_ns)
        batch.take_all(kernels[1:], self._cost)
        return batch


def _runnable(request: Request) -> Kernel | None:
    """Its first kernel that may be launched now; None while one of it is on the device."""
    return None if request.in_flight else _first_ready(request)


def _first_ready(request: Request) -> Kernel | None:
    kernels = [kernel for kernel in request.ready.values() if not kernel.queue.gated]
    return min(kernels, key=lambda kernel: kernel.index, default=None)


POLICIES: Final[dict[str, type[Policy]]] = {
    "space_time": SpaceTime,
    "time_only": TimeOnly,
    "space_only": SpaceOnly,
    "batch_per_model": BatchPerModel,
    "fifo": Fifo,
}
