"""Stragglers leave the groups and come back; a tenant that always fails is put out; the others keep
their service."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from pure.scheduler_fakes import Bench, chain, tenant

from coissue.scheduler import health
from coissue.scheduler.messages import (
    Attached,
    Cancelled,
    Complete,
    Launch,
    LaunchDone,
    LaunchFailed,
    Outcome,
    PutOut,
    Reason,
    RequestId,
    Submitted,
)
from coissue.scheduler.ports import MS

SECOND = 1000 * MS
NAMES = [f"t{i}" for i in range(8)]


class Rounds:
    """Rounds of requests from random tenants of one signature on a bench with a made-up device."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = Random(seed)
        self.bench = Bench(*[tenant(name, *chain(1)) for name in NAMES])
        self.owner: dict[int, str] = {}
        self.outcomes: Counter = Counter()
        self.members: list[set[str]] = []

    def run(self, rounds: int, factor, fails=lambda names: False, gap_ns: int = MS) -> None:
        """`factor(names)`: how much longer than predicted a launch of these tenants takes."""
        for _ in range(rounds):
            events: list = []
            for name in self.rng.sample(NAMES, 3):
                number = len(self.owner) + 1
                self.owner[number] = name
                events.append(
                    Submitted(
                        self.bench.now_ns, RequestId(number), name, 1, 0,
                        self.bench.now_ns + SECOND, 0, 0,
                    )
                )  # fmt: skip
            commands = self.bench.send(*events)
            while commands:
                commands = self._carry_out(commands, factor, fails)
            self.bench.now_ns += gap_ns

    def _carry_out(self, commands, factor, fails):
        events: list = []
        for command in commands:
            if isinstance(command, Launch):
                names = {self.owner[segment.request] for segment in command.segments}
                self.members.append(names)
                took_ns = round(command.predicted_ns * factor(names))
                self.bench.now_ns += took_ns
                now_ns = self.bench.now_ns
                if fails(names):
                    events.append(LaunchFailed(now_ns, command.launch, "broken"))
                else:
                    events.append(LaunchDone(now_ns, command.launch, took_ns))
            elif isinstance(command, Complete):
                key = self.owner[command.request], command.outcome, command.reason
                self.outcomes[key] += 1
            elif isinstance(command, PutOut):
                self.outcomes["out", command.tenant] += 1
        return self.bench.send(*events) if events else []

    @property
    def alone(self) -> tuple[str, ...]:
        return self.bench.core.stats().alone


def slow_with(name: str, factor: float):
    return lambda names: factor if name in names else 1.0


def test_a_straggler_leaves_the_groups_and_the_others_stay():
    rounds = Rounds()
    rounds.run(400, slow_with("t3", 2.0), gap_ns=0)
    assert rounds.alone == ("t3",)
    later = rounds.members[-100:]
    assert all(names == {"t3"} for names in later if "t3" in names)
    assert any(len(names) > 1 for names in later)


def test_it_comes_back_on_probation_and_goes_for_longer_if_it_is_still_slow():
    rounds = Rounds()
    rounds.run(400, slow_with("t3", 2.0), gap_ns=0)
    first_ns = rounds.bench.core.health._records["t3"].alone_until_ns
    rounds.bench.now_ns = first_ns + 1
    rounds.run(2, slow_with("t3", 2.0), gap_ns=0)
    assert rounds.alone == ()
    rounds.run(400, slow_with("t3", 2.0), gap_ns=0)
    assert rounds.alone == ("t3",)
    again = rounds.bench.core.health._records["t3"]
    assert again.strikes == 2
    assert again.alone_until_ns - rounds.bench.now_ns > health.ALONE_NS


def test_one_that_has_mended_gets_a_clean_sheet():
    rounds = Rounds()
    rounds.run(400, slow_with("t3", 2.0), gap_ns=0)
    rounds.bench.now_ns += 10 * SECOND
    rounds.run(1500, slow_with("t3", 1.0), gap_ns=0)
    assert rounds.alone == ()
    assert rounds.bench.core.health._records["t3"].strikes == 0


@pytest.mark.parametrize("before", [0, 200])
@pytest.mark.parametrize("factor", [1.4, 3.0, 8.0])
def test_a_slow_device_takes_no_tenant_out(factor, before):
    """From the start, or from one launch to the next: nobody explains what all suffer from."""
    rounds = Rounds()
    rounds.run(before, lambda names: 1.0, gap_ns=0)
    for _ in range(20):
        rounds.run(30, lambda names: factor, gap_ns=0)
        assert rounds.alone == ()


def test_the_milder_of_two_is_found_too():
    rounds = Rounds()
    factors = {"t3": 4.0, "t5": 1.7}
    rounds.run(250, lambda names: max(factors.get(name, 1.0) for name in names), gap_ns=0)
    assert set(rounds.alone) == {"t3", "t5"}


@pytest.mark.parametrize("seed", [0, 7, 8])
def test_noise_takes_no_tenant_out(seed):
    rounds = Rounds(seed)
    noise = Random(seed)
    for _ in range(30):  # looked at often, as who is taken out comes back
        rounds.run(100, lambda names: noise.lognormvariate(0, 0.5), gap_ns=0)
        assert rounds.alone == ()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("sigma", "factor", "most"), [(0.25, 2.0, 200), (0.5, 1.7, 500)])
def test_noise_hides_no_straggler(sigma, factor, most, seed):
    """In rounds, each about one launch: these take up to 145 and 340 (seven seeds)."""
    rounds = Rounds(seed)
    noise = Random(seed + 1000)
    slow = slow_with("t3", factor)
    for _ in range(most // 10):
        rounds.run(10, lambda names: slow(names) * noise.lognormvariate(0, sigma), gap_ns=0)
        if rounds.alone:
            break
    assert rounds.alone == ("t3",)


def test_at_most_a_quarter_is_out():
    rounds = Rounds()
    rounds.run(1500, lambda names: 2.0 if names & {"t1", "t2", "t3", "t4"} else 1.0, gap_ns=0)
    assert len(rounds.alone) <= 2


def test_a_tenant_that_always_fails_is_put_out_and_takes_nobody_with_it():
    rounds = Rounds()
    rounds.run(300, lambda names: 1.0, fails=lambda names: "t3" in names)
    assert rounds.outcomes["out", "t3"] == 1
    failed = rounds.outcomes["t3", Outcome.FAILED, Reason.LAUNCH_FAILED]
    assert failed == health.FAILURES_OUT
    assert rounds.outcomes["t3", Outcome.REJECTED, Reason.TENANT_FAILED] > 0
    for name in set(NAMES) - {"t3"}:
        outcomes = {key[1] for key in rounds.outcomes if key[0] == name}
        assert outcomes == {Outcome.COMPLETED}
    # After the first few, its failures cost nobody a second launch.
    shared = [names for names in rounds.members if "t3" in names and len(names) > 1]
    assert len(shared) <= health.FAILURES_ALONE + 1


def test_attaching_it_anew_brings_it_back():
    rounds = Rounds()
    rounds.run(300, lambda names: 1.0, fails=lambda names: "t3" in names)
    rounds.bench.send(Attached(rounds.bench.now_ns, tenant("t3", *chain(1))))
    before = rounds.outcomes["t3", Outcome.COMPLETED, None]
    rounds.run(50, lambda names: 1.0)
    assert rounds.outcomes["t3", Outcome.COMPLETED, None] > before


def test_bad_inputs_are_no_failures_of_the_tenant():
    bench = Bench(tenant("a", *chain(1)))
    for number in range(1, 100):
        (launch,) = [c for c in bench.send(bench.submit(number)) if isinstance(c, Launch)]
        retry = bench.send(LaunchFailed(bench.now_ns, launch.launch, "index", by_input=True))
        (again,) = [c for c in retry if isinstance(c, Launch)]
        ended = bench.send(LaunchFailed(bench.now_ns, again.launch, "index", by_input=True))
        assert not [c for c in ended if isinstance(c, PutOut)]
    assert bench.core.stats().alone == ()


def test_open_requests_of_a_tenant_that_is_put_out_fail_at_once():
    bench = Bench(tenant("a", *chain(1, 2)), segments=1)
    for number in range(1, health.FAILURES_OUT + 5):
        bench.core.handle(bench.submit(number, deadline_ns=10**12))
    out: list = []
    commands: list = bench.send(Cancelled(bench.now_ns, RequestId(999)))
    launch = next(iter(bench.core.dispatch.flights.values())).launch
    while not any(isinstance(c, PutOut) for c in commands):
        commands = bench.send(LaunchFailed(bench.now_ns, launch.launch, "broken"))
        out += [c for c in commands if isinstance(c, Complete)]
        launch = next((c for c in commands if isinstance(c, Launch)), launch)
    assert not bench.core.window.open
    assert {c.reason for c in out} == {Reason.LAUNCH_FAILED, Reason.TENANT_FAILED}
