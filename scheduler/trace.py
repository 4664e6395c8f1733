"""What happened, as plain data: one record per launch and one per request.

The core records and never logs. Whoever takes the records (metrics, timeline, simulator report)
gets each once; when nobody does, the oldest stay, newer ones are counted as dropped. A launch is
kept as it is and described when taken, which may happen on another thread: what the description
reads does not change any more.
"""

from __future__ import annotations

from typing import NamedTuple, final

from coissue.scheduler.coalesce import Batch
from coissue.scheduler.messages import (
    KernelIndex,
    LaunchId,
    Outcome,
    Reason,
    RequestId,
    SignatureId,
)


class LaunchRecord(NamedTuple):
    launch: LaunchId
    signature: SignatureId
    start_ns: int
    end_ns: int
    predicted_ns: int
    #: (tenant, request, kernel, units) of each member, in launch order.
    segments: tuple[tuple[str, RequestId, KernelIndex, int], ...]
    #: Empty unless the launch failed.
    failure: str = ""


class RequestRecord(NamedTuple):
    request: RequestId
    #: Empty when the tenant is unknown: names that clients make up must not become labels.
    tenant: str
    rows: int
    tokens: int
    submitted_ns: int
    #: 0: never launched.
    first_launch_ns: int
    last_done_ns: int
    completed_ns: int
    deadline_ns: int
    #: Its share, by units, of the device time of its launches.
    device_ns: int
    outcome: Outcome
    reason: Reason | None


def describe(flight: Batch) -> LaunchRecord:
    """Of a launch that came back, or was lost."""
    launch = flight.launch
    members = zip(flight.members, launch.segments, strict=True)
    return LaunchRecord(
        launch.launch, launch.signature, launch.earliest_ns, flight.end_ns, launch.predicted_ns,
        tuple([(k.request.tenant.name, s.request, s.kernel, s.units) for k, s in members]),
        flight.failure,
    )  # fmt: skip


@final
class Trace:
    """The two bounded lists of records."""

    __slots__ = ("_launches", "_limit", "_requests", "dropped_count")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._launches: list[Batch] = []
        self._requests: list[RequestRecord] = []
        #: Records not kept because nobody took the earlier ones; never reset.
        self.dropped_count = 0

    def add_launch(self, flight: Batch, end_ns: int, failure: str) -> None:
        flight.end_ns, flight.failure = end_ns, failure
        if len(self._launches) < self._limit:
            self._launches.append(flight)
        else:
            self.dropped_count += 1

    def add_request(self, record: RequestRecord) -> None:
        if len(self._requests) < self._limit:
            self._requests.append(record)
        else:
            self.dropped_count += 1

    def take(self) -> tuple[list[Batch], list[RequestRecord]]:
        taken = self._launches, self._requests
        self._launches, self._requests = [], []
        return taken
