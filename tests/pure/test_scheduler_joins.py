"""Who lies together on the device: what a join costs is predicted, and a join that does not pay is
not made."""

from __future__ import annotations

import pytest
from scheduler_fakes import Bench, chain, kernel, launched, launches, tenant

from coissue.scheduler.null_device import LinearCost


def two_places(join_unit_ns: int) -> tuple[Bench, list]:
    """A bench where 1 and 2 have been through their first kernel together, and 3 is new; and its
    commands. Joining these three saves one launch of 100."""
    cost = LinearCost(100, 10, 0, join_unit_ns=join_unit_ns)
    bench = Bench(tenant("a", *chain(7, 7, 7)), cost=cost)
    (launch,) = launches(bench.send(bench.submit(1), bench.submit(2)))
    assert not launch.joins
    bench.send(bench.submit(3))
    return bench, bench.land(launch)


@pytest.mark.parametrize("join_unit_ns", [0, 20, 33])
def test_a_join_that_pays_is_made_and_predicted(join_unit_ns):
    bench, commands = two_places(join_unit_ns)
    (launch,) = launches(commands)
    assert len(launch.segments) == 3
    assert launch.joins
    assert launch.predicted_ns == 130 + 3 * join_unit_ns
    (together,) = launches(bench.land(launch))
    assert (len(together.segments), together.joins) == (3, False), "from there on they lie together"


def test_a_join_that_does_not_pay_is_not_made_and_takes_no_group_apart():
    bench, commands = two_places(60)
    groups = []
    while launches(commands):
        (launch,) = launches(commands)
        groups += launched(commands)
        assert not launch.joins
        commands = bench.land(launch)
    members = [[request for request, _ in group] for group in groups]
    assert members == [[3], [1, 2], [3], [1, 2], [3]]


def test_mates_are_found_behind_others_in_slack_order():
    """1, 3, 5 and 2, 4, 6 travel apart, with deadlines in turn."""
    bench = Bench(
        tenant("a", *chain(7, 9)), tenant("b", *chain(8, 9)),
        cost=LinearCost(100, 10, 0, join_unit_ns=100),
    )  # fmt: skip
    numbers = range(1, 7)
    events = [bench.submit(n, "ba"[n % 2], deadline_ns=10_000 + n) for n in numbers]
    groups, commands = [], bench.send(*events)
    while launches(commands):
        groups += launched(commands)
        commands = bench.land(launches(commands)[0])
    assert [[request for request, _ in group] for group in groups] == [
        [1, 3, 5], [2, 4, 6], [1, 3, 5], [2, 4, 6],
    ]  # fmt: skip


def test_mates_go_as_far_as_they_fit_past_one_whose_join_takes_too_long():
    cost = LinearCost(100, 10, 0, join_unit_ns=100)
    bench = Bench(tenant("a", *chain(7, 7)), tenant("b", kernel(7)), cost=cost)
    events = [bench.submit(n, deadline_ns=1000 + 10 * n) for n in range(1, 9)]
    (launch,) = launches(bench.send(*events))
    assert len(launch.segments) == 8
    bench.send(bench.submit(20, "b", deadline_ns=1015))
    (first,) = launches(bench.land(launch, after_ns=850))
    # At most five are done by 1010; half of the seven behind the lead are tried next.
    assert [segment.request for segment in first.segments] == [1, 2, 3, 4]
    assert not first.joins
