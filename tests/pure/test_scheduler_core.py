"""The way of a request through the core: events in, commands out."""

from __future__ import annotations

import pytest
from scheduler_fakes import (
    LATER,
    Bench,
    chain,
    completed,
    ended,
    kernel,
    launched,
    launches,
    take_records,
    tenant,
    without_wakes,
)

from coissue.scheduler.messages import (
    Attached,
    Cancelled,
    Compile,
    CompileFailed,
    Complete,
    Detached,
    DeviceBack,
    DeviceLost,
    Drain,
    Free,
    KernelIndex,
    Launch,
    LaunchDone,
    LaunchFailed,
    LaunchId,
    Outcome,
    PlanReady,
    PolicyChosen,
    Reason,
    RequestId,
    Segment,
    SignatureId,
    WakeAt,
    WeightsId,
    Woke,
)
from coissue.scheduler.ports import InvariantViolation

R1, R2 = RequestId(1), RequestId(2)


def test_one_request_from_submission_to_outcome():
    bench = Bench(tenant("a", *chain(7, 8)))
    first = Segment(R1, KernelIndex(0), WeightsId(0), 2)
    assert bench.send(bench.submit(1, rows=2)) == [
        Launch(LaunchId(1), SignatureId(7), (first,), 0, 120, 1, LATER - 240),
        WakeAt(LATER),
    ]
    second = first._replace(kernel=KernelIndex(1))
    assert bench.send(LaunchDone(121, LaunchId(1), 120)) == [
        Launch(LaunchId(2), SignatureId(8), (second,), 0, 120, 121, LATER - 120)
    ]
    assert bench.send(LaunchDone(241, LaunchId(2), 120)) == completed(1)


def test_requests_of_one_turn_share_a_launch_whatever_their_weights():
    bench = Bench(tenant("a", *chain(7, weights=1)), tenant("b", *chain(7, weights=2)))
    commands = bench.send(bench.submit(1, "a"), bench.submit(2, "b"), bench.submit(3, "a"))
    (launch,) = launches(commands)
    assert [(s.request, s.weights) for s in launch.segments] == [(1, 1), (2, 2), (3, 1)]
    assert launch.predicted_ns == 130
    assert bench.land(launch) == completed(1, 2, 3)


def test_units_are_tokens_where_the_kernel_says_so():
    bench = Bench(tenant("a", kernel(7, per_token=True), kernel(8, 0, 0)))
    commands = bench.send(bench.submit(1, rows=2, tokens=14))
    assert launches(commands)[0].segments[0].units == 14
    assert launches(bench.land(launches(commands)[0]))[0].segments[0].units == 2


def test_a_group_stays_together_and_in_order_and_latecomers_join_at_a_border():
    bench = Bench(tenant("a", *chain(7, 8, 8)))
    one = launches(bench.send(bench.submit(2, deadline_ns=9000), bench.submit(1)))[0]
    bench.send(bench.submit(3))
    three = launches(bench.land(one))
    assert launched(three) == [[(2, 1), (1, 1)]]  # least slack leads, 3 has another signature
    assert launched(bench.land(three[0])) == [[(2, 2), (1, 2)]]


def test_segments_keep_the_order_of_their_last_launches():
    bench = Bench(tenant("a", *chain(7, 9)), tenant("b", *chain(8, 9)))
    requests = [(1, "a", 5000), (2, "a", 6000), (3, "b", 5050), (4, "b", 5060)]
    first = bench.send(*[bench.submit(*request) for request in requests])
    assert launched(first) == [[(1, 0), (2, 0)]]
    second = bench.land(launches(first)[0])
    assert launched(second) == [[(3, 0), (4, 0)]]
    # In slack order it would be 1, 3, 4, 2: two pieces of the first launch's output, not one.
    third = bench.land(launches(second)[0])
    assert launched(third) == [[(1, 1), (2, 1), (3, 1), (4, 1)]]


def test_a_dag_makes_every_kernel_ready_whose_producers_are_done():
    diamond = kernel(1), kernel(2, 0, 0), kernel(3, 0, 0), kernel(4, 0, 1, 2)
    bench = Bench(tenant("a", *diamond), slots=2)
    commands = bench.send(bench.submit(1))
    assert launched(commands) == [[(1, 0)]]
    both = bench.land(launches(commands)[0])
    assert launched(both) == [[(1, 1)], [(1, 2)]]
    assert {launch.slot for launch in launches(both)} == {0, 1}
    assert bench.land(launches(both)[0]) == []
    assert launched(bench.land(launches(both)[1])) == [[(1, 3)]]


def test_equal_kernels_of_one_request_share_a_launch():
    bench = Bench(tenant("a", kernel(1, 1), kernel(1, 2), kernel(2, 0, 0, 1)))
    commands = bench.send(bench.submit(1))
    assert launched(commands) == [[(1, 0), (1, 1)]]
    assert launched(bench.land(launches(commands)[0])) == [[(1, 2)]]


def test_a_program_without_kernels_completes_at_once():
    bench = Bench(tenant("a"))
    assert bench.send(bench.submit(1)) == completed(1)


def test_producers_must_stand_before_their_consumer():
    with pytest.raises(InvariantViolation, match="program order"):
        Bench(tenant("a", kernel(1, 0, 1), kernel(1)))


# --- ends ---


def test_a_waiting_request_expires_at_its_deadline_and_is_never_launched():
    bench = Bench(tenant("a", *chain(7)), admission=False)
    bench.send(bench.submit(1))
    assert bench.send(bench.submit(2, deadline_ns=50)) == [WakeAt(50)]
    assert bench.send(Woke(49)) == []
    expired = ended(2, Outcome.EXPIRED, Reason.DEADLINE)
    assert bench.send(Woke(50)) == [*expired, WakeAt(LATER)]
    assert bench.send(LaunchDone(111, LaunchId(1), 110)) == completed(1)


def test_a_request_between_kernels_expires_and_is_freed_when_its_kernel_is_back():
    bench = Bench(tenant("a", *chain(7, 8)), admission=False)
    bench.send(bench.submit(1, deadline_ns=150))
    outcome = Complete(R1, Outcome.EXPIRED, Reason.DEADLINE)
    assert bench.send(Woke(150)) == [outcome]
    assert bench.send(LaunchDone(160, LaunchId(1), 159)) == [Free(R1)]


def test_the_last_kernel_in_flight_at_the_deadline_still_counts():
    bench = Bench(tenant("a", *chain(7)), admission=False)
    bench.send(bench.submit(1, deadline_ns=50))
    assert bench.send(Woke(50)) == []
    assert bench.send(LaunchDone(111, LaunchId(1), 110)) == completed(1)
    (record,) = take_records(bench.core)[1]
    assert record.completed_ns > record.deadline_ns


def test_a_cancelled_request_is_withdrawn_and_its_results_are_dropped():
    bench = Bench(tenant("a", *chain(7, 8)))
    bench.send(bench.submit(1))
    bench.send(bench.submit(2))
    gone = Outcome.CANCELLED, Reason.CLIENT_GONE
    assert bench.send(Cancelled(2, R2)) == ended(2, *gone)
    assert bench.send(Cancelled(2, R1)) == [Complete(R1, *gone)]
    assert bench.send(Cancelled(2, R1)) == []
    assert bench.send(LaunchDone(111, LaunchId(1), 110)) == [Free(R1)]


def test_a_failed_batch_is_retried_one_by_one_and_only_the_guilty_fails():
    bench = Bench(tenant("a", *chain(7)))
    bench.send(bench.submit(1), bench.submit(2), bench.submit(3))
    retry = bench.send(LaunchFailed(2, LaunchId(1), "bad"))
    assert launched(retry) == [[(1, 0)]]
    bench.now_ns = 3
    assert bench.send(LaunchDone(3, LaunchId(2), 1), bench.submit(4))[:2] == completed(1)
    # The retries keep their place before 4, which came later; each goes alone.
    assert bench.core.dispatch.flights[LaunchId(3)].launch.segments[0].request == 2
    failed = bench.send(LaunchFailed(4, LaunchId(3), "bad"))
    assert failed[:2] == ended(2, Outcome.FAILED, Reason.LAUNCH_FAILED, "bad")
    assert launched(failed) == [[(3, 0)]]
    assert launched(bench.send(LaunchDone(5, LaunchId(4), 1))) == [[(4, 0)]]


def test_a_lone_launch_is_tried_twice():
    bench = Bench(tenant("a", *chain(7)))
    bench.send(bench.submit(1))
    assert launched(bench.send(LaunchFailed(2, LaunchId(1), "one"))) == [[(1, 0)]]
    failed = ended(1, Outcome.FAILED, Reason.LAUNCH_FAILED, "two")
    assert bench.send(LaunchFailed(3, LaunchId(2), "two")) == failed


def test_a_lost_device_fails_what_was_on_it_and_the_rest_waits_for_it():
    bench = Bench(tenant("a", *chain(7, 8)))
    bench.send(bench.submit(1))
    bench.send(bench.submit(2))
    lost = Outcome.FAILED, Reason.DEVICE_LOST, "gone"
    assert bench.send(DeviceLost(5, "gone")) == ended(1, *lost)
    refused = Complete(RequestId(3), Outcome.REJECTED, Reason.DEVICE_LOST)
    bench.now_ns = 5
    assert bench.send(bench.submit(3)) == [refused]
    assert bench.send(LaunchDone(6, LaunchId(1), 5)) == []  # an answer from before the loss
    assert launched(bench.send(DeviceBack(7))) == [[(2, 0)]]


def test_a_lost_plan_fails_its_requests_and_refuses_new_ones_until_it_is_ready():
    bench = Bench(tenant("a", *chain(7, 8)), tenant("b", *chain(9)))
    bench.send(bench.submit(1), bench.submit(2, "b"))
    failure = Outcome.FAILED, Reason.COMPILE_FAILED, "no registers"
    assert bench.send(CompileFailed(2, SignatureId(8), "no registers"))[0] == Complete(R1, *failure)
    bench.now_ns = 3
    refused = Complete(RequestId(3), Outcome.REJECTED, Reason.COMPILE_FAILED)
    assert bench.send(bench.submit(3)) == [refused]
    assert bench.send(Attached(4, tenant("a", *chain(7, 8)))) == [Compile(SignatureId(8))]
    bench.now_ns = 5
    free = bench.send(LaunchDone(5, LaunchId(1), 4), bench.submit(4))
    assert launched(free) == [[(4, 0)]]
    first = bench.send(LaunchDone(6, LaunchId(2), 1))
    assert launched(first) == [[(2, 0)]]  # 8 has no plan yet
    assert bench.send(LaunchDone(7, LaunchId(3), 1)) == completed(2)
    assert launched(bench.send(PlanReady(8, SignatureId(8)))) == [[(4, 1)]]


# --- tenants, drain, policies


def test_a_new_version_takes_over_and_requests_in_flight_keep_theirs():
    bench = Bench(tenant("a", *chain(7, 8)))
    (old,) = launches(bench.send(bench.submit(1)))
    bench.now_ns = 2
    bench.send(Attached(2, tenant("a", *chain(5))), bench.submit(2, deadline_ns=2 * LATER))
    new = bench.send(LaunchDone(111, old.launch, 110))
    assert launched(new) == [[(1, 1)]]
    assert launched(bench.send(LaunchDone(221, LaunchId(2), 110)))[0] == [(2, 0)]
    assert bench.core.dispatch.flights[LaunchId(3)].launch.signature == 5


def test_a_detached_tenant_finishes_and_takes_no_more():
    bench = Bench(tenant("a", *chain(7)))
    (launch,) = launches(bench.send(bench.submit(1)))
    bench.send(Detached(2, "a"))
    bench.now_ns = 2
    refused = Complete(R2, Outcome.REJECTED, Reason.UNKNOWN_TENANT)
    assert bench.send(bench.submit(2)) == [refused]
    assert bench.land(launch) == completed(1)
    assert bench.core.stats().tenants == {}
    assert bench.core.window.weights == {}


def test_draining_finishes_what_is_admitted():
    bench = Bench(tenant("a", *chain(7)))
    (launch,) = launches(bench.send(bench.submit(1)))
    bench.send(Drain(2))
    bench.now_ns = 2
    assert bench.send(bench.submit(2)) == [Complete(R2, Outcome.REJECTED, Reason.DRAINING)]
    assert bench.land(launch) == completed(1)


def test_time_only_serves_one_request_at_a_time_and_tenants_in_turn():
    bench = Bench(
        tenant("a", *chain(7, 8)), tenant("b", *chain(7, 8)), policy="time_only", admission=False
    )
    commands = bench.send(
        bench.submit(1, "a"), bench.submit(2, "a", 9000), bench.submit(3, "b"), bench.submit(4, "b")
    )
    order = []
    while batch := launches(commands):
        assert len(batch[0].segments) == 1
        order.append((batch[0].segments[0].request, batch[0].segments[0].kernel))
        commands = bench.land(batch[0])
    assert order == [(1, 0), (1, 1), (3, 0), (3, 1), (2, 0), (2, 1), (4, 0), (4, 1)]


def test_the_policy_changes_at_the_next_pump_with_work_in_the_window():
    bench = Bench(tenant("a", *chain(7, 8)), policy="time_only")
    (first,) = launches(bench.send(*[bench.submit(i) for i in (1, 2, 3)]))
    bench.send(PolicyChosen(2, "space_time"))
    (second,) = launches(bench.land(first))
    assert launched([second]) == [[(2, 0), (3, 0)]]
    bench.send(PolicyChosen(bench.now_ns, "time_only"))
    commands, order = bench.land(second), []
    while batch := launches(commands):
        order += launched(batch)
        commands = bench.land(batch[0])
    assert all(len(members) == 1 for members in order)
    assert bench.core.stats().outcomes[Outcome.COMPLETED] == 3


# --- records and bugs ---


def test_records_hold_each_launch_and_each_request_once():
    bench = Bench(tenant("a", *chain(7)), tenant("b", *chain(7, weights=1)))
    (launch,) = launches(bench.send(bench.submit(1, "a", rows=3), bench.submit(2, "b")))
    bench.land(launch, after_ns=200)
    launch_records, requests = take_records(bench.core)
    (record,) = launch_records
    assert record.segments == (("a", 1, 0, 3), ("b", 2, 0, 1))
    assert (record.start_ns, record.end_ns, record.predicted_ns) == (1, 201, 140)
    assert [r.device_ns for r in requests] == [150, 50]
    assert [(r.first_launch_ns, r.last_done_ns, r.completed_ns) for r in requests] == [
        (1, 201, 201)
    ] * 2
    assert take_records(bench.core) == ([], [])


def test_records_are_bounded_and_what_is_dropped_is_counted():
    bench = Bench(tenant("a"), records=3)
    bench.send(*[bench.submit(i) for i in range(5)])
    assert len(take_records(bench.core)[1]) == 3
    assert bench.core.stats().records_dropped == 2


def test_names_of_unknown_tenants_are_not_recorded():
    bench = Bench()
    bench.send(bench.submit(1, "made-up"))
    assert take_records(bench.core)[1][0].tenant == ""


def test_bugs_of_the_caller_are_invariant_violations():
    bench = Bench(tenant("a", *chain(7)))
    bench.send(bench.submit(1))
    with pytest.raises(InvariantViolation, match="request ids"):
        bench.core.handle(bench.submit(1))
    with pytest.raises(InvariantViolation, match="one answer per launch"):
        bench.core.handle(LaunchDone(5, LaunchId(9), 1))
    with pytest.raises(InvariantViolation, match="event times"):
        bench.core.handle(Woke(4))


def test_a_wake_up_is_asked_for_once():
    bench = Bench(tenant("a", *chain(7)), admission=False)
    assert WakeAt(900) in bench.send(bench.submit(1, deadline_ns=900))
    assert without_wakes(bench.send(bench.submit(2, deadline_ns=950))) == []
    assert bench.send(bench.submit(3, deadline_ns=800)) == [WakeAt(800)]
