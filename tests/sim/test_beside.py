"""Requests of 2 ms with 20 ms to be answered, beside requests of 300 ms, in simulated noise: what
`load_tests.beside` measures on a real device, at the default preemption bound."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from coissue.scheduler.messages import (
    KernelIndex,
    KernelSpec,
    Outcome,
    SignatureId,
    TenantSpec,
    WeightsId,
)
from coissue.scheduler.null_device import DeviceModel, LinearCost
from coissue.scheduler.ports import MS
from coissue.scheduler.simulation import Faults, Report, Scenario, SimTenant, simulate

SHORT_NS, LONG_NS = 2_100_000, 300 * MS
SHORT_KERNELS, LONG_KERNELS, LONG_ROWS = 16, 64, 128
#: Spread of launch times, and how many take twice as long.
NOISE = {"quiet": (0.1, 0.0), "usual": (0.15, 0.01), "wild": (0.3, 0.03)}


def make_spec(name: str, signature: int, kernels: int, priority: int) -> TenantSpec:
    chain = tuple(
        KernelSpec(
            SignatureId(signature), WeightsId(1000 * signature + index),
            (KernelIndex(index - 1),) if index else (), False, True,
        )
        for index in range(kernels)
    )  # fmt: skip
    return TenantSpec(name, chain, 1.0, 256, priority)


def make_beside(noise: str, *, load: float = 0.9, long_priority: int = 1, **given) -> Scenario:
    """`load` of the device is asked for, a third of it by the short ones."""
    rng, (spread, outliers) = Random(noise), NOISE[noise]
    ratios = tuple(
        max(0.6, rng.gauss(1, spread)) * (2 if rng.random() < outliers else 1) for _ in range(4000)
    )
    short, long = SHORT_NS // SHORT_KERNELS, LONG_NS // LONG_KERNELS
    own = {
        SignatureId(1): (short // 2, short // 2),
        SignatureId(2): (long // 20, long * 19 // 20 // LONG_ROWS),
    }
    tenants = (
        SimTenant(
            spec=make_spec("short", 1, SHORT_KERNELS, 1),
            rate_hz=load / 3 * 1000 * MS / SHORT_NS,
            deadline_ns=20 * MS,
        ),
        SimTenant(
            spec=make_spec("long", 2, LONG_KERNELS, long_priority),
            rate_hz=load * 2 / 3 * 1000 * MS / LONG_NS,
            deadline_ns=60_000 * MS,
            rows=(LONG_ROWS, LONG_ROWS),
        ),
    )
    scenario = Scenario(
        tenants=tenants,
        duration_ns=10_000 * MS,
        cost=LinearCost(0, 0, 0, own=own),
        device=DeviceModel(ratios=ratios, overhead_ns=100_000),
        blocking=True,
        check=False,
    )
    return replace(scenario, **given)


def attained(scenario: Scenario, seeds=(0, 1, 2)) -> float:
    short = [simulate(scenario, seed).tenants["short"] for seed in seeds]
    return sum(own.good_count for own in short) / sum(own.asked_count for own in short)


@pytest.mark.parametrize("long_priority", [1, 2])
@pytest.mark.parametrize("noise", NOISE)
def test_the_short_ones_are_in_time_beside_long_ones(noise, long_priority):
    scenario = make_beside(noise, long_priority=long_priority)
    assert attained(scenario) >= 0.998
    longs = simulate(scenario, 0).tenants["long"]
    assert longs.outcomes[Outcome.COMPLETED] == longs.asked_count


@pytest.mark.parametrize("noise", ["usual", "wild"])
def test_misses_that_waiting_did_not_cause_refuse_nobody(noise):
    """The process stands still for 15 ms five times a second: who comes then cannot be in time, but
    admission must not refuse others for it. Without admission none is refused."""
    scenario = make_beside(noise, faults=Faults(clock_jumps=50, jump_ns=15 * MS))
    without = replace(scenario, limits=replace(scenario.limits, admission=False))
    assert attained(scenario) >= attained(without) - 0.01


def test_what_cannot_be_met_is_still_refused():
    """Three times what the device carries, all of it short: few of those let in miss."""

    def run(load: float) -> Report:
        scenario = make_beside("usual", load=load)
        return simulate(replace(scenario, tenants=scenario.tenants[:1]), 1)

    over, at_peak = run(9.0), run(3.0)
    outcomes = over.tenants["short"].outcomes
    assert outcomes[Outcome.REJECTED] > 0
    late = over.tenants["short"].asked_count - over.tenants["short"].good_count
    late -= outcomes[Outcome.REJECTED]
    print(f"late {late} of {outcomes}")
    assert late <= 0.03 * outcomes[Outcome.COMPLETED]
    assert over.goodput_hz >= 0.9 * at_peak.goodput_hz
