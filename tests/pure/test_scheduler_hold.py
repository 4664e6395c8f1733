"""Holding: for partners that are one kernel behind, within slack and bound, never with an idle
device."""

from __future__ import annotations

from pure.scheduler_fakes import Bench, chain, launched, launches, tenant

from coissue.scheduler.null_device import LinearCost

#: Joining saves nearly all of the second launch.
COST = LinearCost(100, 1, 0)


def make(**limits) -> Bench:
    """Request 1 has its first kernel done, request 2 comes now; both want kernel 2 next."""
    bench = Bench(
        tenant("a", *chain(1, 2)), tenant("b", *chain(1, 2, weights=1)), cost=COST, **limits
    )
    (first,) = launches(bench.send(bench.submit(1, "a", deadline_ns=5_000)))
    bench.now_ns += first.predicted_ns - 1
    bench.send(bench.submit(2, "b", deadline_ns=9_000))
    bench.first = first
    return bench


def test_a_latecomer_catches_up_and_both_travel_together():
    bench = make(hold_ns=1_000)
    commands = bench.land(bench.first, 1)
    assert launched(commands) == [[(2, 0)]], "the lead has slack: the latecomer goes first"
    assert launched(bench.land(launches(commands)[0])) == [[(1, 1), (2, 1)]]


def test_without_holding_the_lead_goes_first():
    bench = make(hold_ns=0)
    assert launched(bench.land(bench.first, 1)) == [[(1, 1)]]


def test_nothing_is_held_beyond_its_slack():
    tight = Bench(tenant("a", *chain(1, 2)), tenant("b", *chain(1, 2, weights=1)), cost=COST,
                  hold_ns=1_000)  # fmt: skip
    (first,) = launches(tight.send(tight.submit(1, "a", deadline_ns=300)))
    tight.now_ns += first.predicted_ns - 1
    tight.send(tight.submit(2, "b", deadline_ns=9_000))
    # 101 for the latecomer and 102 for both would end at 309 from now, 106.
    assert launched(tight.land(first, 5)) == [[(1, 1)]]


def test_nothing_is_held_for_longer_than_the_bound():
    bench = make(hold_ns=90)
    assert launched(bench.land(bench.first, 1)) == [[(1, 1)]], "the latecomer's launch takes 101"


def test_a_steady_stream_of_latecomers_holds_nobody_for_ever():
    bench = make(hold_ns=250)
    commands, sequence = bench.land(bench.first, 1), []
    for number in range(3, 9):
        (launch,) = launches(commands)
        sequence += [(s.request, s.kernel) for s in launch.segments]
        if (1, 1) in sequence:
            break
        bench.send(bench.submit(number, "b", deadline_ns=9_000))
        commands = bench.land(launch)
    assert (1, 1) in sequence
    assert len(sequence) <= 6


def test_what_joining_does_not_help_is_not_held():
    bench = Bench(tenant("a", *chain(1, 2)), tenant("b", *chain(1, 2, weights=1)),
                  cost=LinearCost(0, 100, 0), hold_ns=1_000)  # fmt: skip
    (first,) = launches(bench.send(bench.submit(1, "a", deadline_ns=5_000)))
    bench.now_ns += first.predicted_ns - 1
    bench.send(bench.submit(2, "b", deadline_ns=9_000))
    assert launched(bench.land(first, 1)) == [[(1, 1)]]
