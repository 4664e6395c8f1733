"""The timeline as a trace of the newest records, no larger than one answer can be."""

from __future__ import annotations

import json

from coissue.deployments.channel.frames import ChannelLimits
from coissue.deployments.timeline import Timeline
from coissue.scheduler.messages import Outcome
from coissue.scheduler.trace import LaunchRecord, RequestRecord


def test_a_full_timeline_fits_into_an_answer_and_keeps_the_newest():
    timeline = Timeline()
    long_ns, numbers = 10**16, range(10**6, 10**6 + 20_000)
    segments = tuple((f"some-long-tenant-name-{n}", 10**6, 3, 16) for n in range(12))
    timeline.add(
        [LaunchRecord(n, 7, long_ns, long_ns + 1, 1, segments) for n in numbers],
        [
            RequestRecord(n, "a" * 64, 1, 0, *[long_ns] * 5, 1, Outcome.COMPLETED, None)
            for n in numbers
        ],
    )
    trace = timeline.render(lambda signature: "gemm linear+gelu+add+3 #ab12cd")
    assert len(trace) < ChannelLimits().unread_bytes
    launches = [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X"]
    assert len(launches) < 20_000
    assert launches[-1]["args"]["launch"] == numbers[-1]
