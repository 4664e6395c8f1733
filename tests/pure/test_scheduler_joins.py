"""Who lies together on the device: what a join costs is predicted, and a join that does not pay is
not made."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_fakes import LATER, Bench, chain, kernel, launched, launches, tenant

from coissue.deployments.costs import Costs
from coissue.kernels.cost_table import CostTable
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


def three_weights() -> list:
    return [tenant(name, kernel(7, weights=n)) for n, name in enumerate("abc")]


@pytest.mark.parametrize(("set_ns", "groups"), [(104, [[1, 2, 3, 4]]), (106, [[1, 4], [2], [3]])])
def test_weights_share_a_launch_if_one_for_each_takes_clearly_longer(set_ns, groups):
    """Two further sets against three launches of two rows, 120 each, less three per cent."""
    bench = Bench(*three_weights(), cost=LinearCost(100, 10, set_ns))
    commands = bench.send(*[bench.submit(n, name) for n, name in enumerate("abca", 1)])
    found = []
    while launches(commands):
        found += [[request for request, _ in group] for group in launched(commands)]
        commands = bench.land(launches(commands)[0])
    assert found == groups


def test_mates_by_weights_are_found_among_many_tenants():
    """Each of 64 tenants has 8 requests, in turns; sets of weights never gain by sharing."""
    names = [f"t{n}" for n in range(64)]
    own = [tenant(name, kernel(7, weights=n)) for n, name in enumerate(names)]
    bench = Bench(*own, cost=LinearCost(10, 10, 300))
    submits = [bench.submit(n, names[n % 64], deadline_ns=LATER + n) for n in range(512)]
    commands = bench.send(*submits)
    for first in range(64):
        (group,) = launched(commands)
        assert [request for request, _ in group] == list(range(first, 512, 64))
        commands = bench.land(launches(commands)[0])


def busy_sets(true_ns: int) -> tuple[list[int], CostTable]:
    """Members of 1,500 groups of two weights whose launch takes `true_ns`, while the table has 220
    for it and, rightly, 100 for each alone; and the table."""
    table = CostTable()
    for point in ((1, 1, 1, 100), (2, 1, 1, 110), (2, 2, 1, 110), (2, 2, 2, 220)):
        table.record("s", *point)
    costs = Costs(table)
    signature = costs.intern("s")
    own = [tenant(n, kernel(signature, weights=w)) for w, n in enumerate("ab")]
    bench = Bench(*own, cost=costs)
    sizes = []
    for number in range(0, 3000, 2):
        commands = bench.send(
            *[
                bench.submit(number + n, name, deadline_ns=bench.now_ns + LATER)
                for n, name in enumerate("ab")
            ]
        )
        sizes.append(len(launches(commands)[0].segments))
        while launches(commands):
            (launch,) = launches(commands)
            alone = len(launch.segments) == 1
            commands = bench.land(launch, after_ns=100 if alone else true_ns)
    return sizes, table


def test_what_only_looked_dear_is_tried_now_and_then_and_then_done():
    sizes, table = busy_sets(130)
    tried = [number for number, size in enumerate(sizes) if size == 2]
    assert tried[:2] == [60, 121], "every 61st"
    assert all(size == 2 for size in sizes[-500:])
    assert table.predict_ns("s", 2, 2, 2) == pytest.approx(130, rel=0.05)


def test_one_small_request_does_not_part_large_ones_that_gain_by_sharing():
    own = [tenant(f"t{n}", kernel(7, weights=n)) for n in range(16)]
    bench = Bench(*own, cost=LinearCost(100_000, 1000, 5000), preemption_bound_ns=10**9)
    submits = [bench.submit(n, f"t{n}", rows=200, deadline_ns=10**9) for n in range(15)]
    small = bench.submit(15, "t15", deadline_ns=2 * 10**9)
    (launch,) = launches(bench.send(*submits, small))
    assert len(launch.segments) == 16


def test_what_is_dear_stays_seldom_and_what_is_very_dear_is_not_tried():
    sizes, _ = busy_sets(205)
    assert sizes.count(2) == len(sizes) // 61
    bench = Bench(*three_weights(), cost=LinearCost(10, 10, 300))
    for number in range(0, 400, 2):
        commands = bench.send(bench.submit(number, "a"), bench.submit(number + 1, "b"))
        while launches(commands):
            (launch,) = launches(commands)
            assert len(launch.segments) == 1
            commands = bench.land(launch)


class Dear(LinearCost):
    """Two sets take 1.3 times what they take apart, three take five times as long."""

    def predict_ns(self, signature, units, segments, sets, joins=False):
        return (0, 100, 260, 1500)[sets]


@pytest.mark.parametrize("every", [2, 3, 4])
def test_groups_that_are_much_too_dear_take_no_ones_trial(every):
    bench, tried, pairs = Bench(*three_weights(), cost=Dear()), 0, 0
    for number in range(0, 3000, 3):
        names = "ab" if number // 3 % every else "abc"
        pairs += names == "ab"
        submits = [
            bench.submit(number + n, name, deadline_ns=bench.now_ns + LATER)
            for n, name in enumerate(names)
        ]
        commands = bench.send(*submits)
        while launches(commands):
            (launch,) = launches(commands)
            tried += len(launch.segments) > 1
            commands = bench.land(launch)
    assert tried >= pairs // 61 - 1


def test_a_class_that_gains_nothing_from_the_others_waits_its_fair_time_only():
    """A tenant of the first class always has work for the same kernels, with other weights."""
    first, second = (tenant(n, kernel(7, weights=w), priority=w) for n, w in (("a", 1), ("b", 2)))
    bench = Bench(first, second, cost=LinearCost(100, 10, 200), fair_window_ns=10_000)
    far, number = 10**9, 10
    commands = bench.send(
        *[bench.submit(n, "a", deadline_ns=far) for n in (1, 2, 3)],
        bench.submit(4, "b", deadline_ns=far),
    )
    request = bench.core.window.open[4]
    while request.first_launch_ns == 0:
        (launch,) = launches(commands)
        members = [segment.request for segment in launch.segments]
        more = [bench.submit(number + i, "a", deadline_ns=far) for i in range(len(members))]
        number += len(members)
        commands = bench.send(*more) + bench.land(launch)
        assert bench.now_ns < request.due_ns + 1000, "two launches at most after it was due"


def past_due(*classes: int) -> tuple[Bench, list]:
    """Tenant 0 of the first class, whose three requests with far deadlines come back for ever, and
    one request of each given class, all with the same kernels and weights of their own; and its
    commands. Sharing never gains."""
    own = [tenant("0", kernel(7, weights=0))]
    own += [tenant(str(n), kernel(7, weights=n), priority=p) for n, p in enumerate(classes, 1)]
    bench = Bench(*own, cost=LinearCost(100, 10, 200), fair_window_ns=5000)
    far = [bench.submit(10 + n, "0", deadline_ns=10**9) for n in range(3)]
    asked = [bench.submit(n, str(n), deadline_ns=10**9) for n in range(1, len(own))]
    return bench, bench.send(*far, *asked)


@pytest.mark.parametrize("classes", [(2,), (2, 2), (2, 3, 2), (1, 2, 2), (3, 2, 1)])
def test_requests_that_are_past_due_lead_in_order_of_that(classes):
    bench, commands = past_due(*classes)
    due = {n: bench.core.window.open[n].due_ns for n in range(1, len(classes) + 1)}
    served, number = {}, 100
    while len(served) < len(classes):
        (launch,) = launches(commands)
        for segment in launch.segments:
            if segment.request <= len(classes):
                served[segment.request] = bench.now_ns
        again = [s for s in launch.segments if s.request >= 10]
        more = [bench.submit(number + i, "0", deadline_ns=10**9) for i in range(len(again))]
        number += len(more)
        commands = bench.send(*more) + bench.land(launch)
        assert bench.now_ns < 10**6, "somebody waits for ever"
    for n, at_ns in served.items():
        assert at_ns <= due[n] + 110 * (1 + len(classes))


class Flat(LinearCost):
    """Up to eight units take as long as eight; a further set of weights takes less than that."""

    def predict_ns(self, signature, units, segments, sets, joins=False):
        return 10 * max(8, units) + 30 * (sets - 1)


@pytest.mark.parametrize(("rows", "members"), [(100, 1), (1, 2)])
def test_a_small_request_does_not_share_a_launch_with_a_large_one_of_other_weights(rows, members):
    """Groups of equal size gain nothing there, though one for each set takes longer: 1,080."""
    bench = Bench(*three_weights(), cost=Flat())
    (launch,) = launches(bench.send(bench.submit(1, "a", rows=rows), bench.submit(2, "b")))
    assert len(launch.segments) == members


class Sublinear(LinearCost):
    """A launch of several sets of weights takes nine tenths of one for each."""

    def predict_ns(self, signature, units, segments, sets, joins=False):
        return round((0.9 if sets > 1 else 1) * (100 * sets + 10 * units))


@pytest.mark.parametrize(("rows", "members"), [(60, 1), (9, 3), (1, 3)])
def test_a_small_request_waits_for_a_large_one_of_other_weights_only_for_a_clear_gain(
    rows, members
):
    """A tenth is gained. The small ones would wait for the large one: that is worth a quarter."""
    bench = Bench(*three_weights(), cost=Sublinear())
    submits = [bench.submit(1, "a", rows=rows), bench.submit(2, "b"), bench.submit(3, "c")]
    (launch,) = launches(bench.send(*submits))
    assert len(launch.segments) == members


class Steep(LinearCost):
    """A launch of more than two units falls out of the cache."""

    def predict_ns(self, signature, units, segments, sets, joins=False):
        return 100 + 10 * units + (1000 if units > 2 else 0)


def test_what_takes_less_one_by_one_goes_one_by_one():
    bench = Bench(tenant("a", kernel(7)), cost=Steep())
    commands = bench.send(*[bench.submit(n, rows=2) for n in (1, 2, 3)])
    found = []
    while launches(commands):
        found += [[request for request, _ in group] for group in launched(commands)]
        commands = bench.land(launches(commands)[0])
    assert found == [[1], [2], [3]]


class Knee(LinearCost):
    """Each unit beyond eight takes four times what it does up to there."""

    def predict_ns(self, signature, units, segments, sets, joins=False):
        return 100 + 10 * units + 30 * max(0, units - 8)


class KneeOfSeven(Knee):
    def predict_ns(self, signature, units, segments, sets, joins=False):
        return 100 if signature == 8 else super().predict_ns(signature, units, segments, sets)


@pytest.mark.parametrize("waiting", [8, 9, 10, 16, 17, 31, 64, 100])
def test_about_so_many_go_as_take_least_for_each(waiting):
    """Eight take 22.5 each; a group of ten parts for them, what is left over goes as it is."""
    cost = Knee()
    bench = Bench(tenant("a", kernel(7)), cost=cost)
    commands = bench.send(*[bench.submit(n, deadline_ns=LATER + n) for n in range(waiting)])
    found = []
    while launches(commands):
        found += [[request for request, _ in group] for group in launched(commands)]
        commands = bench.land(launches(commands)[0])
    assert [n for own in found for n in own] == list(range(waiting)), "the most urgent first"
    each = [cost.predict_ns(7, len(own), len(own), 1) / len(own) for own in found]
    assert all(ns <= 1.1 * 22.5 for ns in each[:-1])


def test_a_group_that_lies_together_parts_where_it_is_too_large_and_stays_so():
    bench = Bench(tenant("a", *chain(8, 7, 7)), cost=KneeOfSeven())
    commands = bench.send(*[bench.submit(n, deadline_ns=LATER + n) for n in range(16)])
    sizes = []
    while launches(commands):
        sizes += [len(group) for group in launched(commands)]
        assert not launches(commands)[0].joins
        commands = bench.land(launches(commands)[0])
    assert sizes == [16, 8, 8, 8, 8]


@given(st.integers(0, 2**32), st.integers(0, 300), st.integers(0, 60), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_no_launch_is_predicted_to_take_longer_than_its_requests_one_by_one(
    seed, set_ns, join_unit_ns, square_ns
):
    """Whatever sets of weights, joins and more units cost."""

    class Cost(LinearCost):
        def predict_ns(self, signature, units, segments, sets, joins=False):
            linear_ns = LinearCost.predict_ns(self, signature, units, segments, sets, joins)
            return linear_ns + square_ns * units * units

    rng = random.Random(seed)
    cost = Cost(100, 10, set_ns, join_unit_ns=join_unit_ns)
    own = [tenant(n, *chain(7, 8, 7, weights=w), limit=99) for w, n in enumerate("abc")]
    bench = Bench(*own, cost=cost)
    rows = {number: rng.randint(1, 3) for number in range(1, 25)}
    waiting, flying, shared = list(rows), [], 0
    while waiting or flying:
        some = [waiting.pop() for _ in range(min(len(waiting), rng.randrange(6)))]
        commands = bench.send(*[bench.submit(n, rng.choice("abc"), rows=rows[n]) for n in some])
        if flying:
            commands += bench.land(flying.pop(0))
        flying += launches(commands)
        for launch in launches(commands):
            alone = [cost.predict_ns(7, rows[segment.request], 1, 1) for segment in launch.segments]
            assert launch.predicted_ns <= sum(alone)
            shared += len(alone) > 1
    assert shared or set_ns + join_unit_ns + square_ns > 0
