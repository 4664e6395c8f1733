"""What a replica tells the scheduler, once a second: refusals, and times that only a replica sees.

The objective counts from a request's arrival here. What passes before (HAProxy, and requests that
wait for the event loop's turn) no replica can measure for each request: `lag` is a sample of it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from coissue.deployments.channel.frames import TIME_BOUNDS, Refused, Report, TenantInfo, Times

#: What happened reaches the scheduler's metrics so much later.
REPORT_AFTER_S: Final = 1.0
#: Between two looks at how late the event loop is.
LAG_SAMPLE_S: Final = 0.1


class Listener(Protocol):
    """What is used of a `SchedulerClient`."""

    directory: dict[str, TenantInfo]

    def report(self, report: Report) -> bool: ...


class Tally:
    """A histogram of seconds with the bounds that the scheduler has."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(TIME_BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(TIME_BOUNDS, seconds)] += 1
        self.seconds += seconds


class Reports:
    """Of one replica, on its loop; what no scheduler was there to hear is told to the next."""

    def __init__(self, listener: Callable[[], Listener | None]) -> None:
        self._listener = listener
        self.report_after_s = REPORT_AFTER_S
        self.lag_sample_s = LAG_SAMPLE_S
        #: (tenant or "", reason, whether it was done) -> answers that the scheduler has not been
        #: told of.
        self._refused: Counter[tuple[str, str, bool]] = Counter()
        #: (kind, tenant) -> times that it has not been told of.
        self._times: dict[tuple[str, str], Tally] = {}
        self._is_due = self._is_sampling = False

    def refuse(self, tenant: str, reason: str, *, is_done: bool = False) -> None:
        """A name that is no tenant's counts under "": clients can make up any number of them."""
        listener = self._listener()
        is_tenant = listener is not None and tenant in listener.directory
        self._refused[tenant if is_tenant else "", reason, is_done] += 1
        self._schedule()

    def observe(self, kind: str, tenant: str, seconds: float) -> None:
        tally = self._times.get((kind, tenant))
        if tally is None:
            tally = self._times[kind, tenant] = Tally()
        tally.add(seconds)
        self._schedule()

    def sample_lag(self) -> None:
        """From the first call on, for as long as the loop runs."""
        if not self._is_sampling:
            self._is_sampling = True
            self._sample(0.0)

    def _sample(self, due_at: float) -> None:
        loop = asyncio.get_running_loop()
        if due_at:
            self.observe("lag", "", loop.time() - due_at)
        due_at = loop.time() + self.lag_sample_s
        loop.call_at(due_at, self._sample, due_at)

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(self.report_after_s, self._report)

    def _report(self) -> None:
        """At most tenants times reasons entries, once in `report_after_s`."""
        self._is_due = False
        listener = self._listener()
        refused = [
            Refused(tenant, reason, count, is_done)
            for (tenant, reason, is_done), count in self._refused.items()
        ]
        times = [Times(*key, tuple(t.counts), t.seconds) for key, t in self._times.items()]
        if listener is not None and listener.report(Report(tuple(refused), tuple(times))):
            self._refused.clear()
            self._times.clear()
        else:
            self._schedule()
