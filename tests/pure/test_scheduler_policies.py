"""What each baseline policy does, and does not."""

from __future__ import annotations

from pure.scheduler_fakes import Bench, chain, launched, launches, tenant

from coissue.scheduler.messages import WakeAt, Woke
from coissue.scheduler.policies import BatchPerModel
from coissue.scheduler.ports import MS

FAR = 10_000 * MS


def test_fifo_serves_requests_in_order_of_arrival_whatever_their_deadlines():
    bench = Bench(tenant("a", *chain(1, 2)), tenant("b", *chain(1)), policy="fifo")
    commands = bench.send(
        bench.submit(1, "a", deadline_ns=FAR), bench.submit(2, "b", deadline_ns=5_000)
    )
    order = []
    while launches(commands):
        order += launched(commands)
        commands = bench.land(launches(commands)[0])
    assert order == [[(1, 0)], [(1, 1)], [(2, 0)]]


def test_space_only_has_one_kernel_of_a_tenant_at_a_time_and_tenants_take_turns():
    tenants = [tenant(name, *chain(1, 2)) for name in "abc"]
    bench = Bench(*tenants, policy="space_only", slots=2)
    first = bench.send(*[bench.submit(i, "abc"[i % 3]) for i in range(6)])
    assert launched(first) == [[(0, 0)], [(1, 0)]], "two streams, two slots"
    second = bench.land(launches(first)[0])
    assert launched(second) == [[(2, 0)]], "the tenant that has had no turn goes first"
    third = bench.land(launches(first)[1])
    assert launched(third) == [[(0, 1)]], "then the stream of the first goes on"


def test_space_only_never_joins():
    bench = Bench(tenant("a", *chain(1)), tenant("b", *chain(1)), policy="space_only", slots=4)
    commands = bench.send(*[bench.submit(i, "ab"[i % 2]) for i in range(8)])
    assert [len(launch.segments) for launch in launches(commands)] == [1, 1]


def make_batcher(**limits) -> Bench:
    tenants = tenant("a", *chain(1, 2)), tenant("b", *chain(1, 2, weights=1))
    return Bench(*tenants, policy="batch_per_model", **limits)


def test_a_batch_waits_for_its_delay_and_then_runs_through_the_model_together():
    bench = make_batcher()
    commands = bench.send(bench.submit(1, "a", FAR), bench.submit(2, "a", FAR))
    due_ns = bench.now_ns + BatchPerModel.DELAY_NS
    assert not launches(commands)
    assert WakeAt(due_ns) in commands
    bench.now_ns += MS
    assert not launches(bench.send(bench.submit(3, "a", FAR), bench.submit(4, "b", FAR)))
    bench.now_ns = due_ns
    first = bench.send(Woke(due_ns))
    assert launched(first) == [[(1, 0), (2, 0), (3, 0)]], "one model, all that came"
    bench.now_ns += MS
    second = bench.land(launches(first)[0])
    assert launched(second) == [[(1, 1), (2, 1), (3, 1)]], "the batch goes on before another model"
    bench.now_ns += MS
    third = bench.land(launches(second)[0])
    assert launched(third) == [[(4, 0)]], "its delay is over by now"


def test_a_full_batch_waits_for_nothing():
    bench = make_batcher(segments=4)
    commands = bench.send(*[bench.submit(i, "a", FAR) for i in range(5)])
    assert launched(commands) == [[(0, 0), (1, 0), (2, 0), (3, 0)]]


def test_latecomers_wait_for_the_next_batch():
    bench = make_batcher(segments=2)
    first = bench.send(bench.submit(1, "a", FAR), bench.submit(2, "a", FAR))
    bench.send(bench.submit(3, "a", FAR))
    second = bench.land(launches(first)[0])
    assert launched(second) == [[(1, 1), (2, 1)]]
