"""Kernels longer than the bound go in parts of rows, so that others wait for one part at most."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from pure.scheduler_fakes import Bench, ended, kernel, launched, launches, tenant

from coissue.scheduler.messages import Complete, Free, LaunchFailed, Outcome, Reason
from coissue.scheduler.null_device import LinearCost

FAR = 10**9


def parts(commands) -> list[tuple[int, int] | None]:
    return [segment.part for launch in launches(commands) for segment in launch.segments]


def make(bound_ns: int = 300, **given) -> Bench:
    """A launch of n units takes 100 + 10 n."""
    long = tenant("long", kernel(1, splittable=True, **given), kernel(2, 0, 0))
    return Bench(long, tenant("short", kernel(3)), preemption_bound_ns=bound_ns)


def test_a_long_kernel_goes_in_equal_parts_and_its_successor_waits_for_the_last():
    bench = make()
    commands, seen = bench.send(bench.submit(1, "long", FAR, rows=50)), []
    while launches(commands):
        seen += parts(commands)
        assert launches(commands)[0].predicted_ns <= 300 or seen[-1] is None
        commands = bench.land(launches(commands)[0])
    # At most 20 rows fit the bound: three parts, and then the second kernel.
    assert seen == [(0, 17), (17, 34), (34, 50), None]
    assert commands == [Complete(1, Outcome.COMPLETED), Free(1)]


def test_tokens_are_split_by_rows():
    bench = make(per_token=True)
    commands = bench.send(bench.submit(1, "long", FAR, rows=10, tokens=50))
    assert parts(commands) == [(0, 4)]
    assert launches(commands)[0].segments[0].units == 20


def test_a_short_request_goes_between_two_parts():
    bench = make()
    first = bench.send(bench.submit(1, "long", FAR, rows=50))
    bench.send(bench.submit(2, "short", deadline_ns=2_000))
    second = bench.land(launches(first)[0])
    assert launched(second) == [[(2, 0)]]
    assert parts(bench.land(launches(second)[0])) == [(17, 34)]


def test_what_cannot_be_split_runs_whole():
    bench = Bench(tenant("long", kernel(1)), preemption_bound_ns=300)
    assert parts(bench.send(bench.submit(1, "long", FAR, rows=50))) == [None]


def test_one_row_runs_whole_however_long():
    bench = make(bound_ns=50)
    commands = bench.send(bench.submit(1, "long", FAR, rows=2))
    assert parts(commands) == [(0, 1)]
    assert parts(bench.land(launches(commands)[0])) == [(1, 2)]


def test_a_failed_part_is_tried_again_alone_and_the_rest_goes_on():
    bench = make()
    first = bench.send(bench.submit(1, "long", FAR, rows=50))
    again = bench.send(LaunchFailed(bench.now_ns, launches(first)[0].launch, "broken"))
    assert parts(again) == [(0, 17)]
    assert parts(bench.land(launches(again)[0])) == [(17, 34)]


def test_between_two_parts_a_request_expires_at_its_deadline():
    bench = make()
    first = bench.send(bench.submit(1, "long", bench.now_ns + 1_500, rows=50))
    commands = bench.land(launches(first)[0], 2_000)
    assert commands == ended(1, Outcome.EXPIRED, Reason.DEADLINE)


def test_a_cancelled_request_leaves_with_its_part():
    from coissue.scheduler.messages import Cancelled

    bench = make()
    first = bench.send(bench.submit(1, "long", FAR, rows=50))
    commands = bench.send(Cancelled(bench.now_ns, 1))
    assert commands == [Complete(1, Outcome.CANCELLED, Reason.CLIENT_GONE)]
    assert bench.land(launches(first)[0]) == [Free(1)]


@settings(deadline=None)
@given(rows=st.integers(1, 200), bound=st.integers(50, 3_000), tokens=st.integers(0, 5))
def test_parts_cover_all_rows_once_and_keep_the_bound(rows, bound, tokens):
    per_token = tokens > 0
    long = tenant("long", kernel(1, splittable=True, per_token=per_token))
    bench = Bench(long, preemption_bound_ns=bound, cost=LinearCost(100, 10, 0))
    commands = bench.send(bench.submit(1, "long", FAR, rows=rows, tokens=rows * tokens))
    done = units = 0
    while launches(commands):
        (launch,) = launches(commands)
        (segment,) = launch.segments
        start, stop = segment.part or (0, rows)
        assert start == done
        assert segment.units == (stop - start) * (tokens or 1)
        assert launch.predicted_ns <= bound or stop - start == 1
        done, units = stop, units + segment.units
        commands = bench.land(launch)
    assert done == rows
    assert units == rows * (tokens or 1)
    assert bench.core.stats().backlog_ns == 0
