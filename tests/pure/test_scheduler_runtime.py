"""The runtime's thread: order, calls, wake-ups, failures, crash, stop. No sleeps."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
from scheduler_fakes import COST, chain, kernel, take_records, tenant

from coissue.scheduler.clock import MonotonicClock
from coissue.scheduler.core import Core
from coissue.scheduler.messages import (
    Attached,
    CompileFailed,
    Complete,
    DeviceBack,
    Launch,
    LaunchDone,
    LaunchId,
    Outcome,
    Reason,
    RequestId,
    SignatureId,
    Submitted,
)
from coissue.scheduler.ports import CoreLimits, DeviceLostError, LaunchError, RuntimeStoppedError
from coissue.scheduler.runtime import Runtime

WAIT_S = 30


class FakeExecutor:
    """Tells the test what it is asked to do; a launch waits for the test's word."""

    def __init__(self) -> None:
        self.seen: SimpleQueue = SimpleQueue()
        self.words: SimpleQueue = SimpleQueue()

    def launch(self, launch: Launch) -> int:
        self.seen.put(launch)
        word = self.words.get(timeout=WAIT_S)
        if isinstance(word, Exception):
            raise word
        return word

    def compile(self, signature: int) -> None:
        self.seen.put(("compile", signature))

    def complete(self, complete: Complete) -> None:
        self.seen.put(complete)

    def free(self, request: RequestId) -> None:
        self.seen.put(("free", request))

    def next(self):
        return self.seen.get(timeout=WAIT_S)


class Rig:
    """A started runtime with tenant "a" of two kernels attached."""

    def __init__(self, **limits) -> None:
        self.clock = MonotonicClock()
        self.executor = FakeExecutor()
        self.crashes: SimpleQueue = SimpleQueue()
        core = Core(CoreLimits(hold_ns=0, **limits), "space_time", COST, None)
        self.runtime = Runtime(core, self.executor, self.clock, on_crash=self.crashes.put)
        self.runtime.start()
        self.runtime.post(Attached(self.clock.now_ns(), tenant("a", *chain(7, 8))))

    def submit(self, id: int, in_ns: int = 60_000_000_000) -> None:
        now_ns = self.clock.now_ns()
        self.runtime.post(Submitted(now_ns, RequestId(id), "a", 1, 0, now_ns + in_ns, 0, 0))

    def launched(self) -> list[int]:
        return [segment.request for segment in self.executor.next().segments]


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.executor.words.put(1)
    assert rig.runtime.stop(WAIT_S)


def test_a_request_is_launched_completed_and_freed(rig):
    rig.submit(1)
    for _ in range(2):
        assert rig.launched() == [1]
        rig.executor.words.put(1000)
    assert rig.executor.next() == Complete(RequestId(1), Outcome.COMPLETED)
    assert rig.executor.next() == ("free", 1)
    launches, (request,) = rig.runtime.call(lambda: take_records(rig.runtime.core)).result(WAIT_S)
    assert [launch.predicted_ns for launch in launches] == [110, 110]
    assert request.device_ns == 2000


def test_what_comes_while_a_launch_runs_is_one_batch(rig):
    rig.submit(1)
    assert rig.launched() == [1]
    for id in (2, 3, 4):
        rig.submit(id)
    rig.executor.words.put(1)
    assert rig.launched() == [1]
    rig.executor.words.put(1)
    assert rig.executor.next() == Complete(RequestId(1), Outcome.COMPLETED)
    assert rig.executor.next() == ("free", 1)
    assert rig.launched() == [2, 3, 4]


def test_answers_do_not_wait_for_the_next_launch(rig):
    rig.submit(1)
    rig.launched()
    rig.submit(2)
    rig.executor.words.put(1)
    rig.executor.next()
    rig.executor.words.put(1)
    kinds = [type(rig.executor.next()) for _ in range(3)]
    assert kinds == [Complete, tuple, Launch]


def test_calls_run_on_the_runtimes_thread_and_bring_results_and_errors(rig):
    name = rig.runtime.call(lambda: threading.current_thread().name)
    assert name.result(WAIT_S) == "coissue-runtime"
    with pytest.raises(ZeroDivisionError):
        rig.runtime.call(lambda: 1 / 0).result(WAIT_S)


def test_a_deadline_wakes_the_runtime_up(rig):
    rig.submit(1)
    rig.launched()
    rig.executor.words.put(DeviceLostError("off the bus"))
    assert rig.executor.next().reason is Reason.DEVICE_LOST
    rig.executor.next()
    rig.runtime.post(DeviceBack(rig.clock.now_ns()))
    gate = CompileFailed(rig.clock.now_ns(), SignatureId(7), "none")
    rig.runtime.post(gate)
    rig.submit(2)
    assert rig.executor.next().reason is Reason.COMPILE_FAILED
    rig.runtime.call(lambda: rig.runtime.core.window.plans.clear()).result(WAIT_S)
    rig.submit(3, in_ns=5_000_000)  # admitted, but its signature is gated
    assert rig.executor.next() == Complete(RequestId(3), Outcome.EXPIRED, Reason.DEADLINE)


def test_a_failed_launch_is_retried_and_a_second_failure_is_the_answer(rig):
    rig.submit(1)
    rig.launched()
    rig.executor.words.put(LaunchError("out of registers"))
    assert rig.launched() == [1]
    rig.executor.words.put(ValueError("unexpected"))
    failed = Complete(RequestId(1), Outcome.FAILED, Reason.LAUNCH_FAILED, "unexpected")
    assert rig.executor.next() == failed


def test_a_lost_plan_is_compiled_again_when_its_tenant_is_attached(rig):
    rig.runtime.post(CompileFailed(rig.clock.now_ns(), SignatureId(7), "none"))
    rig.runtime.post(Attached(rig.clock.now_ns(), tenant("a", *chain(7, 8))))
    assert rig.executor.next() == ("compile", 7)
    rig.submit(1)
    assert rig.launched() == [1]


def test_events_with_earlier_times_than_the_last_turn_are_moved_to_it(rig):
    rig.runtime.call(lambda: None).result(WAIT_S)
    rig.runtime.post(Submitted(1, RequestId(1), "a", 1, 0, 1 << 62, 0, 0))
    assert rig.launched() == [1]


def test_a_bug_ends_the_thread_through_on_crash(rig):
    rig.runtime.post(LaunchDone(rig.clock.now_ns(), LaunchId(99), 1))
    assert "one answer per launch" in rig.crashes.get(timeout=WAIT_S)
    with pytest.raises(RuntimeStoppedError):
        rig.runtime.call(lambda: None).result(WAIT_S)


def test_stop_refuses_calls_that_wait_and_ends_after_the_launch():
    rig = Rig()
    rig.submit(1)
    rig.launched()
    stopped: SimpleQueue = SimpleQueue()
    stopper = threading.Thread(target=lambda: stopped.put(rig.runtime.stop(WAIT_S)))
    stopper.start()
    rig.executor.words.put(1)
    assert stopped.get(timeout=WAIT_S)
    stopper.join()
    with pytest.raises(RuntimeStoppedError):
        rig.runtime.call(lambda: None).result(WAIT_S)


def test_many_threads_may_post(rig):
    for _ in range(400):
        rig.executor.words.put(1)
    threads = [
        threading.Thread(target=lambda base=base: [rig.submit(base + i) for i in range(25)])
        for base in (100, 200, 300, 400)
    ]
    for thread in threads:
        thread.start()
    outcomes = {}
    while len(outcomes) < 100:
        command = rig.executor.next()
        if isinstance(command, Complete):
            outcomes[command.request] = command.outcome
    for thread in threads:
        thread.join()
    assert set(outcomes.values()) == {Outcome.COMPLETED}


def test_slots_run_beside_each_other():
    """Both launches of two slots are on the way before either is let go."""
    core = Core(CoreLimits(slots=2, hold_ns=0), "space_only", COST, None)
    executor = FakeExecutor()
    runtime = Runtime(core, executor, MonotonicClock())
    runtime.start()
    now_ns = MonotonicClock().now_ns()
    runtime.post(Attached(now_ns, tenant("a", kernel(1))))
    runtime.post(Attached(now_ns, tenant("b", kernel(1))))
    for number, name in ((1, "a"), (2, "b")):
        runtime.post(
            Submitted(now_ns, RequestId(number), name, 1, 0, now_ns + 60_000_000_000, 0, 0)
        )
    both = [executor.next(), executor.next()]
    assert {type(each) for each in both} == {Launch}
    executor.words.put(1)
    executor.words.put(1)
    done = [executor.next() for _ in range(4)]
    assert sum(isinstance(each, Complete) for each in done) == 2
    assert runtime.stop()
