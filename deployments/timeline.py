"""The records of the last launches and requests as a trace that ui.perfetto.dev opens.

Chrome trace event format: times in microseconds; one track for the device with a slice per launch,
and an asynchronous track per tenant with a span per request, split into queue and run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from coissue.scheduler.messages import SignatureId
from coissue.scheduler.trace import LaunchRecord, RequestRecord

US = 1e-3
DEVICE_TRACK: Final = 1
TENANT_TRACK: Final = 2


class Timeline:
    """Keeps the newest records, up to `limit` of each kind: about 20 MB, which fits an answer."""

    def __init__(self, limit: int = 16_384) -> None:
        self._launches: deque[LaunchRecord] = deque(maxlen=limit)
        self._requests: deque[RequestRecord] = deque(maxlen=limit)

    def add(self, launches: Iterable[LaunchRecord], requests: Iterable[RequestRecord]) -> None:
        self._launches.extend(launches)
        self._requests.extend(requests)

    def render(self, describe: Callable[[SignatureId], str]) -> bytes:
        """The trace as JSON. `describe` names a signature in words."""
        events = list(name_tracks())
        events += [launch_event(record, describe) for record in tuple(self._launches)]
        for request in tuple(self._requests):
            events += request_events(request)
        return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def name_tracks() -> Iterator[dict[str, Any]]:
    for pid, name in ((DEVICE_TRACK, "device"), (TENANT_TRACK, "tenants")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def launch_event(record: LaunchRecord, describe: Callable[[SignatureId], str]) -> dict[str, Any]:
    tenants = Counter(segment[0] for segment in record.segments)
    return {
        "ph": "X",
        "pid": DEVICE_TRACK,
        "tid": 1,
        "name": f"{describe(record.signature)} x{len(record.segments)}",
        "cat": "launch,failed" if record.failure else "launch",
        "ts": record.start_ns * US,
        "dur": (record.end_ns - record.start_ns) * US,
        "args": {
            "launch": record.launch,
            "tenants": dict(tenants),
            "rows": sum(segment[3] for segment in record.segments),
            "predicted_us": record.predicted_ns * US,
            "requests": [segment[1] for segment in record.segments],
            "failure": record.failure,
        },
    }


def request_events(record: RequestRecord) -> Iterator[dict[str, Any]]:
    """Nested spans: the whole request, and in it queue and run."""
    end = record.completed_ns
    spans = [(f"request ({record.outcome.value})", record.submitted_ns, end)]
    if record.first_launch_ns:
        spans.append(("queue", record.submitted_ns, record.first_launch_ns))
        spans.append(
            ("run", record.first_launch_ns, max(record.last_done_ns, record.first_launch_ns))
        )
    args = {
        "rows": record.rows,
        "tokens": record.tokens,
        "slack_us": (record.deadline_ns - end) * US,
        "device_us": record.device_ns * US,
        "reason": record.reason.value if record.reason else "",
    }
    common = {
        "cat": record.tenant or "unknown",
        "pid": TENANT_TRACK,
        "tid": 1,
        "id": record.request,
    }
    for name, start, stop in spans:
        yield {**common, "ph": "b", "name": name, "ts": start * US, "args": args}
        yield {**common, "ph": "e", "name": name, "ts": stop * US}
