"""Random events against the core: every invariant after every turn, every kernel move in its table,
one outcome per request, and a drain at the end."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from coissue.scheduler import window as window_module
from coissue.scheduler.core import Core
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
    KernelSpec,
    Launch,
    LaunchDone,
    LaunchFailed,
    Outcome,
    PlanReady,
    PolicyChosen,
    Reason,
    RequestId,
    SignatureId,
    Submitted,
    TenantSpec,
    WakeAt,
    WeightsId,
    Woke,
)
from coissue.scheduler.null_device import LinearCost
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.ports import CoreLimits
from coissue.scheduler.states import KERNEL_EDGES

NAMES = st.sampled_from(["a", "b", "c"])
SIGNATURES = st.integers(0, 3).map(SignatureId)


class CheckedStates(list):
    """The states of a request's kernels, which move along the table only."""

    def __setitem__(self, index, state):
        assert state in KERNEL_EDGES[self[index]], f"{self[index]!r} -> {state!r}"
        super().__setitem__(index, state)


class CheckedRequest(window_module.Request):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.states = CheckedStates(self.states)


@pytest.fixture(autouse=True, scope="module")
def _checked_moves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coissue.scheduler.admission.Request", CheckedRequest)
        yield


#: One number draws a whole tenant or request: a longer run of events costs fewer choices so.
SEEDS = st.integers(0, 9999)


def draw_spec(seed: int) -> TenantSpec:
    """A tenant with a random DAG over few signatures."""
    rng = Random(seed)
    kernels = tuple(
        KernelSpec(
            SignatureId(rng.randrange(4)),
            WeightsId(rng.randrange(3)),
            tuple(KernelIndex(p) for p in range(index) if rng.random() < 0.5),
            rng.random() < 0.5,
            rng.random() < 0.5,
        )
        for index in range(rng.randrange(6))
    )
    name, share = rng.choice("abc"), rng.choice((0.5, 1.0, 3.0))
    return TenantSpec(name, kernels, share, rng.randint(1, 6), rng.randint(1, 3))


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 3),
        window=st.integers(1, 10),
        admission=st.booleans(),
        fair_window=st.sampled_from((0, 30, 100_000)),
        segments=st.integers(1, 5),
        policy=st.sampled_from(sorted(POLICIES)),
        tenants=st.lists(SEEDS, min_size=3, max_size=5),
    )
    def start(self, slots, window, admission, fair_window, segments, policy, tenants):
        limits = CoreLimits(
            window=window,
            slots=slots,
            segments=segments,
            bytes=500,
            preemption_bound_ns=60,
            fair_window_ns=fair_window,
            admission=admission,
        )
        self.core = Core(limits, policy, LinearCost(10, 5, 3), Random(0))
        self.now_ns = 1
        self.next_id = 0
        self.launches: dict[int, Launch] = {}
        self.outcomes: dict[int, Complete] = {}
        self.submitted: set[int] = set()
        self.admitted: set[int] = set()
        self.freed: set[int] = set()
        self.compiling: set[int] = set()
        self.wake_ns: int | None = None
        self.pending: list = [Attached(self.now_ns, draw_spec(seed)) for seed in tenants]
        self.submit(5, tenants[0], now=False)

    def turn(self, *events):
        commands = self.core.handle(*self.pending, *events)
        self.pending = []
        for command in commands:
            self.take(command)
        self.core.check()
        self.admitted |= set(self.core.window.open)
        waiting = [r for r in self.core.window.open.values() if r.left > r.in_flight]
        deadlines = [request.deadline_ns for request in waiting]
        if deadlines:
            assert self.now_ns < min(deadlines), "past its deadline and not expired"
            assert self.wake_ns is not None
            assert self.wake_ns <= min(deadlines)

    def take(self, command):
        match command:
            case Launch():
                assert command.launch not in self.launches
                assert command.earliest_ns == self.now_ns <= command.latest_ns
                if len(command.segments) > 1 and self.core.policy.is_fair:
                    assert command.predicted_ns <= self.core.limits.preemption_bound_ns
                self.launches[command.launch] = command
                assert self.core.device_up, "launched on a lost device"
                assert command.signature not in self.core.window.plans, "launched without a plan"
                running = {s.request for s in command.segments}
                assert not running & self.outcomes.keys(), "launched after its outcome"
                assert not running & self.freed
                self.admitted |= running
            case Complete():
                assert command.request in self.submitted
                assert command.request not in self.outcomes, "two outcomes"
                assert (command.reason is None) == (command.outcome is Outcome.COMPLETED)
                gave_way = command.reason is Reason.OVER_SHARE
                if command.outcome is not Outcome.REJECTED or gave_way:
                    self.admitted.add(command.request)
                self.outcomes[command.request] = command
            case Free():
                assert command.request in self.outcomes
                assert command.request not in self.freed
                self.freed.add(command.request)
            case WakeAt():
                assert command.at_ns > self.now_ns
                self.wake_ns = command.at_ns
            case Compile():
                self.compiling.add(command.signature)

    @rule(count=st.integers(1, 5), seed=SEEDS, times=st.integers(0, 4))
    def submit_and_serve(self, count, seed, times):
        """Both in one rule, as Hypothesis leaves out some rules in each run."""
        self.submit(count, seed, now=True)
        self.serve(seed % 20, times)

    @rule(seed=SEEDS)
    def attach(self, seed):
        self.turn(Attached(self.now_ns, draw_spec(seed)))

    @rule(name=NAMES)
    def detach(self, name):
        self.turn(Detached(self.now_ns, name))

    @rule(count=st.integers(1, 5), seed=SEEDS, now=st.booleans())
    def submit(self, count, seed, now):
        rng = Random(seed)
        for _ in range(count):
            self.next_id += 1
            self.submitted.add(self.next_id)
            self.pending.append(
                Submitted(
                    self.now_ns, RequestId(self.next_id), rng.choice("abc"), rng.randint(1, 3),
                    rng.randint(0, 9), self.now_ns + rng.randint(10, 900), rng.randint(0, 3),
                    rng.randint(0, 200),
                )
            )  # fmt: skip
        if now:
            self.turn()

    @rule(step=st.integers(0, 20), times=st.integers(1, 6))
    def serve(self, step, times):
        """What happens most: the oldest launch comes back a little later."""
        for _ in range(times):
            self.pass_time(step)
            if self.launches:
                launch = self.launches.pop(min(self.launches))
                self.turn(LaunchDone(self.now_ns, launch.launch, launch.predicted_ns))

    @rule(data=st.data())
    def land(self, data):
        if self.launches:
            launch = self.launches.pop(data.draw(st.sampled_from(sorted(self.launches))))
            self.turn(LaunchDone(self.now_ns, launch.launch, launch.predicted_ns))

    @rule(data=st.data())
    def fail(self, data):
        if self.launches:
            launch = self.launches.pop(data.draw(st.sampled_from(sorted(self.launches))))
            self.turn(LaunchFailed(self.now_ns, launch.launch, "drawn"))

    @rule(step=st.integers(0, 80))
    def pass_time(self, step):
        if self.wake_ns is not None and self.wake_ns > self.now_ns:
            step = min(step, self.wake_ns - self.now_ns)
        self.now_ns += step
        self.turn(Woke(self.now_ns))

    @rule(data=st.data())
    def cancel(self, data):
        if self.next_id:
            request = data.draw(st.integers(1, self.next_id))
            self.turn(Cancelled(self.now_ns, RequestId(request)))

    @precondition(lambda self: len(self.submitted) > 6)
    @rule(signature=SIGNATURES)
    def lose_plan(self, signature):
        self.compiling.discard(signature)
        self.turn(CompileFailed(self.now_ns, signature, "drawn"))

    @rule(signature=SIGNATURES)
    def plan(self, signature):
        self.compiling.discard(signature)
        self.turn(PlanReady(self.now_ns, signature))

    @precondition(lambda self: len(self.submitted) > 6)
    @rule(back=st.integers(0, 3))
    def lose_device(self, back):
        self.turn(DeviceLost(self.now_ns, "drawn"))
        if back:
            self.turn(DeviceBack(self.now_ns))

    @rule()
    def regain_device(self):
        self.turn(DeviceBack(self.now_ns))

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def choose(self, policy):
        self.turn(PolicyChosen(self.now_ns, policy))

    def teardown(self):
        """Whatever happened: time, device and plans let everything end."""
        if not hasattr(self, "core"):
            return
        self.turn(Drain(self.now_ns), DeviceBack(self.now_ns))
        for signature in range(4):
            self.turn(PlanReady(self.now_ns, SignatureId(signature)))
        for _ in range(1000):
            if not self.launches and not self.core.window.open:
                break
            if self.launches:
                launch = self.launches.pop(min(self.launches))
                self.turn(LaunchDone(self.now_ns, launch.launch, 1))
            else:
                self.now_ns = self.wake_ns
                self.turn(Woke(self.now_ns))
        stats = self.core.stats()
        assert self.outcomes.keys() == self.submitted
        assert self.freed == self.admitted
        assert (stats.requests_open, stats.bytes_reserved, stats.backlog_ns) == (0, 0, 0)
        assert not self.core.admission.backlog._waiting


CoreMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestCoreMachine = CoreMachine.TestCase
