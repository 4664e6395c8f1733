"""Dispatch: gives a batch a slot and an id, and keeps it until it comes back.

Segments are ordered by where their requests stood in their last launches. Requests that travel
together so stay neighbours in the same order, and the executor can use the output of one launch as
the input of the next without a gather.
"""

from __future__ import annotations

from operator import attrgetter
from typing import final

from coissue.scheduler.admission import Backlog
from coissue.scheduler.coalesce import LANE_BITS, Batch
from coissue.scheduler.messages import Launch, LaunchId, Segment
from coissue.scheduler.ports import CoreLimits, InvariantViolation
from coissue.scheduler.ready import Kernel
from coissue.scheduler.states import KernelState, RequestState

#: Enum members cost a call each time they are looked up on their class (Python 3.11).
IN_FLIGHT, ADMITTED, RUNNING = KernelState.IN_FLIGHT, RequestState.ADMITTED, RequestState.RUNNING
_lane = attrgetter("request.lane")
#: A named tuple's own constructor is Python code.
_make = tuple.__new__


@final
class Dispatch:
    """The slots and the launches outstanding."""

    __slots__ = ("_backlog", "_launch_count", "flights", "forgotten", "free_slots")

    def __init__(self, limits: CoreLimits, backlog: Backlog) -> None:
        self._backlog = backlog
        self._launch_count = 0
        #: Launches that have not come back; their members are all IN_FLIGHT.
        self.flights: dict[LaunchId, Batch] = {}
        #: Slots without a launch; with `flights` they are all slots.
        self.free_slots = list(reversed(range(limits.slots)))
        #: Launches up to this one were lost with the device; their answers mean nothing.
        self.forgotten = LaunchId(0)

    def issue(self, batch: Batch, now_ns: int) -> Launch:
        """BATCHED -> IN_FLIGHT."""
        if len(batch.members) > 1:
            batch.members.sort(key=_lane)
        self._launch_count += 1
        launch_id = LaunchId(self._launch_count)
        lane = self._launch_count << LANE_BITS
        segments = []
        for kernel in batch.members:
            request, index, part = kernel.request, kernel.index, kernel.part
            if index in request.retried:
                pass  # the backlog has let go of it
            elif part is None:
                kernel.charge_ns = self._backlog.remove(request, index)
            else:
                self._uncount(kernel, part)
            request.states[index] = IN_FLIGHT
            request.in_flight += 1
            request.lane = lane = lane + 1
            if request.state is ADMITTED:
                request.state = RUNNING
                request.first_launch_ns = now_ns
            segments.append(_make(Segment, (request.id, index, kernel.weights, kernel.units, part)))
        predicted_ns = batch.predicted_ns
        latest_ns = batch.done_by_ns - predicted_ns
        batch.launch = launch = Launch(
            launch_id, batch.signature, tuple(segments), self.free_slots.pop(), predicted_ns,
            now_ns, latest_ns if latest_ns > now_ns else now_ns, len(batch.places) > 1,
        )  # fmt: skip
        self.flights[launch_id] = batch
        return launch

    def _uncount(self, kernel: Kernel, part: tuple[int, int]) -> None:
        """Takes the part that is launched out of the backlog."""
        request, index = kernel.request, kernel.index
        if part[1] == request.rows:
            kernel.charge_ns = self._backlog.remove(request, index)
            return
        rows, left = part[1] - part[0], request.rows - part[0]
        kernel.charge_ns = request.charges[index] * rows // left
        self._backlog.remove_part(request, index, kernel.charge_ns)

    def busy_until_ns(self, now_ns: int) -> int:
        """When the next slot is predicted to be free."""
        if self.free_slots:
            return now_ns
        launches = [flight.launch for flight in self.flights.values()]
        return min([launch.earliest_ns + launch.predicted_ns for launch in launches])

    def land(self, launch: LaunchId) -> Batch | None:
        """The launch is back: its slot is free. None if it was lost with the device."""
        flight = self.flights.pop(launch, None)
        if flight is None:
            if 0 < launch <= self.forgotten:
                return None
            raise InvariantViolation("one answer per launch", f"launch {launch} is not outstanding")
        self.free_slots.append(flight.launch.slot)
        return flight

    def lose_all(self) -> list[Batch]:
        """The device is gone: no launch comes back."""
        lost = [flight for launch in list(self.flights) if (flight := self.land(launch))]
        self.forgotten = LaunchId(self._launch_count)
        return lost
