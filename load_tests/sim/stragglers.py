"""Runs with slow tenants: who is taken out of the groups, when, and what it does to the others.

`draw_stragglers` draws a run in which some tenants' launches take two to four times longer than the
core was told, until they recover. `judge` runs it, and once more without stragglers, and says what
is wrong:

- a tenant that is not slow is taken out (by noise, outliers, its partners, or a device that is slow
  as a whole);
- more than a quarter of the tenants (at least one) are out at a time;
- one of the slow ones, of whom there are no more than that, is still in after `LAUNCHES_EACH`
  launches for each tenant of the device;
- one that has recovered is out at the end of the run;
- fewer of the others' requests are in time than without stragglers, by more than `ATTAINED_LESS`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final

from coissue.scheduler.messages import Command, Event, Launch
from coissue.scheduler.null_device import DeviceModel, LinearCost
from coissue.scheduler.ports import MS
from coissue.scheduler.simulation import Report, Scenario, SimTenant, simulate
from load_tests.sim.drawn import make_spec

LAUNCHES_EACH: Final = 120
ATTAINED_LESS: Final = 0.01
#: Long enough for all to be found; who is out for the second time then (for two seconds) is back
#: before the run ends.
SLOW_UNTIL_NS: Final = 1500 * MS
DURATION_NS: Final = 4000 * MS


def draw_stragglers(seed: int) -> Scenario:
    """Eight to 24 tenants of one program, none to one more slow than may be out, and noise."""
    rng = Random(f"stragglers {seed}")
    count = rng.choice((8, 12, 16, 24))
    slow = rng.sample(range(count), rng.randint(0, count // 4 + 1))
    tenants = tuple(
        SimTenant(
            spec=make_spec(f"t{index}", [0, 1, 2], index),
            rate_hz=rng.uniform(0.8, 1.2) * 1100 / count,
            deadline_ns=rng.randint(20, 50) * MS,
            slowdown=rng.uniform(2, 4) if index in slow else 1.0,
            slow_until_ns=SLOW_UNTIL_NS,
        )
        for index in range(count)
    )
    device = rng.choice(
        (
            DeviceModel(noise=rng.uniform(0, 0.3)),
            DeviceModel(noise=0.2, slow_rate=0.02, slow_factor=2),
            DeviceModel(ratios=tuple(rng.lognormvariate(0, 0.25) for _ in range(500))),
            DeviceModel(ratios=(rng.uniform(1.1, 1.4),)),  # slow as a whole
        )
    )
    cost = LinearCost(200_000, 20_000, 10_000)
    return Scenario(tenants=tenants, duration_ns=DURATION_NS, cost=cost, device=device, check=False)


def judge(scenario: Scenario, seed: int) -> list[str]:
    """What is wrong; empty: nothing."""
    launched_ns: list[int] = []

    def watch(events: Sequence[Event], commands: Sequence[Command]) -> None:
        launched_ns.extend(events[-1].at_ns for c in commands if isinstance(c, Launch))

    report = simulate(scenario, seed, record=watch)
    slow = {t.spec.name for t in scenario.tenants if t.slowdown > 1}
    most = max(1, len(scenario.tenants) // 4)
    left: dict[str, int] = {}
    for at_ns, alone in report.alone:
        for name in alone:
            left.setdefault(name, bisect_right(launched_ns, at_ns))
    wrong = [f"{name} is not slow and was out" for name in left.keys() - slow]
    wrong += [f"{len(alone)} out" for _, alone in report.alone if len(alone) > most]
    if len(slow) <= most:
        bound = LAUNCHES_EACH * len(scenario.tenants)
        late = sorted(name for name in slow if left.get(name, bound) >= bound)
        wrong += [f"{name} is slow and was in at {bound} launches" for name in late]
        if report.alone and report.alone[-1][1]:
            wrong.append(f"{report.alone[-1][1]} have recovered and are out at the end")
    usual = simulate(without_stragglers(scenario), seed)
    lost = attained(usual, slow) - attained(report, slow)
    if lost > ATTAINED_LESS:
        wrong.append(f"the others' attainment falls by {lost:.4f}")
    return wrong


def without_stragglers(scenario: Scenario) -> Scenario:
    return replace(scenario, tenants=tuple(replace(t, slowdown=1.0) for t in scenario.tenants))


def attained(report: Report, slow: set[str]) -> float:
    """Of the requests of tenants that are not slow."""
    healthy = [own for name, own in report.tenants.items() if name not in slow]
    return sum(own.good_count for own in healthy) / sum(own.asked_count for own in healthy)
