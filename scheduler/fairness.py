"""Fair shares of the device: by when a request is due, and who gives way when there is no room.

NOTE. If the device were shared fluidly by the tenants that are active, by their shares, a request
would begin when its tenant's last one finished, and need its predicted device time over
the tenant's part of the device. That gives each admitted request a fair begin and a fair finish, in
real time and once for all. A tenant without open requests begins now: who was idle banks nothing.
One with open requests begins no earlier than its oldest was submitted: credit is for being kept
waiting, not for asking little. Finishes are corrected by what launches really took.

A request is *due* at its deadline, or `fair_window_ns` after its fair finish if that is earlier.
Slack counts up to then (earliest deadline where deadlines are tight, weighted fair queueing where
they are lax), and who is past due leads whatever its priority. So of two tenants that always have
kernels waiting, neither gets ahead in device time per share by more than what the window and the
largest requests of both amount to, however long they run and whatever their deadlines and
priorities; and no class waits for ever.

Where deadlines are short, admission decides before any queue is long, and would serve tenants in
proportion to what they ask. So a request that finds no room may take it from those with the latest
fair begins that are not launched yet (`Reason.OVER_SHARE`), if that is later than its own by more
than `LEAD` of their fair times.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import Final, final

from coissue.scheduler.admission import Lack
from coissue.scheduler.messages import Submitted
from coissue.scheduler.states import RequestState
from coissue.scheduler.window import Request, Tenant

#: A request gives way only to one that begins earlier by so many of its own fair times.
LEAD: Final = 4
#: Requests looked at to make room for one.
LOOKS: Final = 16
ADMITTED = RequestState.ADMITTED


@final
class Fairness:
    """Fair times of the open requests, and which of them begin last."""

    __slots__ = ("_latest", "_leaving", "_sequence", "enabled", "shares", "window_ns")

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        #: False: requests are due at their deadlines, and none gives way (baseline policies).
        self.enabled = True
        #: Sum of the shares of active tenants: with a request open now or within the window. Who
        #: asks often but little has none open at most moments; a long request that did not reckon
        #: with it would be due too early, and go before it.
        self.shares = 0.0
        #: (when it is active no longer, tenant) of those without open requests, in that order.
        self._leaving: deque[tuple[int, Tenant]] = deque()
        #: Heap of (-begin, sequence, request); those launched or ended are dropped on sight.
        self._latest: list[tuple[int, int, Request]] = []
        self._sequence = 0

    @staticmethod
    def begin_ns(tenant: Tenant, now_ns: int) -> int:
        """The fair begin of a request that the tenant sends now."""
        oldest = next(iter(tenant.open.values()), None)
        return max(tenant.finish_ns, now_ns if oldest is None else oldest.submitted_ns)

    def fair_ns(self, request: Request, device_ns: int) -> int:
        """How long so much device time takes in a fair part of the device."""
        return int(device_ns * self.shares / request.spec.share)

    def enter(self, request: Request, now_ns: int, open_count: int) -> None:
        """Gives an admitted request its fair times; to be called before the window has it."""
        tenant = request.tenant
        self._let_go(now_ns)
        if not tenant.active_share:
            tenant.active_share = request.spec.share
            self.shares += tenant.active_share
        tenant.active_until_ns = 0
        request.begin_ns = self.begin_ns(tenant, now_ns)
        request.fair_ns = self.fair_ns(request, sum(request.charges))
        tenant.finish_ns = request.begin_ns + request.fair_ns
        if not self.enabled:
            return
        request.due_ns = min(request.deadline_ns, tenant.finish_ns + self.window_ns)
        self._sequence += 1
        heappush(self._latest, (-request.begin_ns, self._sequence, request))
        if len(self._latest) > 64 + 4 * open_count:
            self._latest = [entry for entry in self._latest if entry[2].state is ADMITTED]
            heapify(self._latest)

    def leave(self, tenant: Tenant, now_ns: int) -> None:
        """The tenant's last open request has ended."""
        tenant.active_until_ns = now_ns + self.window_ns
        self._leaving.append((tenant.active_until_ns, tenant))

    def _let_go(self, now_ns: int) -> None:
        """Tenants whose last request is longer ago than the window are not active any more."""
        leaving = self._leaving
        while leaving and leaving[0][0] <= now_ns:
            until_ns, tenant = leaving.popleft()
            if tenant.active_until_ns == until_ns:  # it has sent nothing since
                self.shares = max(0.0, self.shares - tenant.active_share)
                tenant.active_share = 0.0

    def charge(self, request: Request, more_ns: int) -> None:
        """The request takes so much more device time than its tenant's finish reckons with."""
        request.tenant.finish_ns += int(more_ns * self.shares / request.spec.share)

    def give_way(self, begin_ns: int, event: Submitted, lack: Lack) -> list[Request]:
        """Requests that begin late enough to give way to `event`, which begins at `begin_ns`; empty
        if those that begin last do not free what it lacks."""
        latest = self._latest
        looked: list[tuple[int, int, Request]] = []
        found: list[Request] = []
        work_ns, places, bytes_ = lack.work_ns, lack.places, lack.bytes
        while latest and len(looked) < LOOKS and max(work_ns, places, bytes_) > 0:
            entry = heappop(latest)
            request = entry[2]
            if request.state is not ADMITTED:
                continue
            looked.append(entry)
            if request.begin_ns - begin_ns <= LEAD * request.fair_ns:
                break
            is_before = (
                request.priority <= lack.priority and request.deadline_ns <= event.deadline_ns
            )
            if lack.work_ns == 0 or is_before:
                found.append(request)
                work_ns, places = work_ns - sum(request.charges), places - 1
                bytes_ -= request.bytes
        for entry in looked:
            heappush(latest, entry)
        return found if max(work_ns, places, bytes_) <= 0 else []
