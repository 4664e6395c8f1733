"""The timeline as a trace, within the size of one answer."""

from __future__ import annotations

import json

from coissue.deployments.timeline import Timeline
from coissue.scheduler.messages import Outcome
from coissue.scheduler.trace import LaunchRecord, RequestRecord


def filled(**limits):
    timeline = Timeline(**limits)
    numbers = range(1, 101)
    timeline.add(
        [LaunchRecord(n, 7, n, n + 1, 1, (("a", n, 0, 1),)) for n in numbers],
        [RequestRecord(n, "a", 1, 0, n, n, n, n, n, 1, Outcome.COMPLETED, None) for n in numbers],
    )
    return json.loads(timeline.render(str))["traceEvents"]


def launches(events):
    return [event["args"]["launch"] for event in events if event["ph"] == "X"]


def test_the_newest_records_are_kept_where_all_would_be_too_large():
    assert launches(filled()) == list(range(1, 101))
    kept = launches(filled(bytes_max=20_000))
    assert kept == list(range(101 - len(kept), 101))
    assert 1 < len(kept) < 100
    assert launches(filled(bytes_max=300)) == []
