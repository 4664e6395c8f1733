"""Whole runs from seeds: the same run every time, everything drains, and coalescing pays."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
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
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.ports import MS, CoreLimits
from coissue.scheduler.simulation import Faults, Report, Scenario, SimTenant, Traffic, simulate

#: Seeds that once failed; replayed for ever.
FAILED_SEEDS: tuple[int, ...] = ()


def make_spec(name: str, signatures, weights: int, *, priority=1, limit=256) -> TenantSpec:
    kernels = tuple(
        KernelSpec(
            SignatureId(signature),
            WeightsId(100 * weights + index),
            (KernelIndex(index - 1),) if index else (),
            False,
        )
        for index, signature in enumerate(signatures)
    )
    return TenantSpec(name, kernels, 1.0, limit, priority)


def make_backbones(rate_hz: float, policy: str, **given) -> Scenario:
    """Twelve tenants on three backbones of six kernels."""
    tenants = tuple(
        SimTenant(
            spec=make_spec(f"t{i}", range(10 * (i % 3), 10 * (i % 3) + 6), i),
            rate_hz=rate_hz,
            deadline_ns=50 * MS,
            rows=(1, 4),
        )
        for i in range(12)
    )
    scenario = Scenario(
        tenants=tenants,
        duration_ns=400 * MS,
        policy=policy,
        cost=LinearCost(200_000, 20_000, 20_000),
        device=DeviceModel(noise=0.1),
        check=False,
    )
    return replace(scenario, **given)


def draw_scenario(seed: int) -> Scenario:
    """Sizes, traffic, limits and faults, all from the seed."""
    rng = Random(f"scenario {seed}")
    tenants = tuple(
        SimTenant(
            spec=make_spec(
                f"t{index}",
                [rng.randrange(6) for _ in range(rng.randint(0, 6))],
                rng.randrange(4),
                priority=rng.randint(1, 3),
                limit=rng.choice((2, 8, 64)),
            ),
            rate_hz=rng.uniform(10, 400),
            deadline_ns=rng.randint(2, 80) * MS,
            traffic=Traffic(cv=rng.choice((0.5, 1, 4))),
            rows=(1, rng.randint(1, 8)),
            bytes_needed=rng.randrange(1000),
        )
        for index in range(rng.randint(1, 8))
    )
    return Scenario(
        tenants=tenants,
        duration_ns=150 * MS,
        policy=rng.choice(sorted(POLICIES)),
        limits=CoreLimits(
            window=rng.choice((4, 32, 256)),
            slots=rng.choice((1, 1, 3)),
            segments=rng.choice((1, 4, 64)),
            bytes=rng.choice((3000, 1 << 30)),
            preemption_bound_ns=rng.choice((1, 10)) * MS,
            admission=rng.random() < 0.7,
        ),
        cost=LinearCost(rng.randint(10, 500) * 1000, rng.randint(1, 50) * 1000, 5000),
        device=DeviceModel(
            noise=rng.uniform(0, 0.5),
            fail_rate=rng.choice((0, 0.02, 0.3)),
            slow_rate=rng.choice((0, 0.05)),
        ),
        faults=Faults(
            cancel_rate=rng.choice((0, 0.1)),
            compile_failures=rng.randrange(3),
            device_losses=rng.randrange(3),
        ),
    )


def count(report: Report, outcome: Outcome) -> int:
    return sum(tenant.outcomes[outcome] for tenant in report.tenants.values())


@pytest.mark.parametrize("seed", [*range(30), *FAILED_SEEDS])
def test_every_seed_keeps_the_invariants_and_drains(seed):
    scenario = draw_scenario(seed)
    print(f"seed {seed}: {scenario}")
    report = simulate(scenario, seed)  # raises InvariantViolation otherwise
    last_ns = scenario.duration_ns + max(tenant.deadline_ns for tenant in scenario.tenants)
    # A request in its last kernel at its deadline may take one slow launch more, tried twice.
    assert report.end_ns <= last_ns + 500 * MS
    assert report.longest_ns <= scenario.limits.preemption_bound_ns


def test_the_drawn_seeds_see_every_outcome():
    reports = [simulate(draw_scenario(seed), seed) for seed in range(12)]
    for outcome in Outcome:
        assert sum(count(report, outcome) for report in reports) > 0, outcome


def test_the_same_seed_gives_the_same_run_ten_times():
    runs = {simulate(draw_scenario(7), 7).digest for _ in range(10)}
    assert len(runs) == 1
    assert simulate(draw_scenario(7), 8).digest not in runs


def test_the_run_does_not_depend_on_the_hash_seed():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_scheduler_sim import draw_scenario, simulate\n"
        "print([simulate(draw_scenario(seed), seed).digest for seed in range(4)])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] != ""


def test_coalescing_gives_at_least_three_times_the_goodput_under_load():
    ours = simulate(make_backbones(200, "space_time"), 1)
    theirs = simulate(make_backbones(200, "time_only"), 1)
    assert ours.goodput_hz >= 3 * theirs.goodput_hz
    assert ours.tenant_count / ours.launch_count > 2


def test_goodput_stays_within_a_tenth_of_its_peak_at_twice_the_load_and_more():
    goodput = {
        rate: simulate(make_backbones(rate, "space_time", duration_ns=1000 * MS), 1).goodput_hz
        for rate in (150, 200, 240, 480)
    }
    assert goodput[480] >= 0.9 * max(goodput.values()), goodput


def test_a_light_load_is_served_without_a_miss():
    report = simulate(make_backbones(20, "space_time"), 3)
    assert all(tenant.attainment == 1 for tenant in report.tenants.values())
    assert max(t.percentile_ns(99) for t in report.tenants.values()) < 10 * MS


def test_a_short_request_waits_at_most_one_launch_for_a_long_one():
    """A tenant of 1 ms beside one whose requests take 100 ms in kernels of 5 ms."""
    cost = LinearCost(own={SignatureId(1): (1 * MS, 0), SignatureId(2): (5 * MS, 0)})
    short = SimTenant(spec=make_spec("short", [1], 0), rate_hz=50, deadline_ns=20 * MS)
    long = SimTenant(spec=make_spec("long", [2] * 20, 1), rate_hz=7, deadline_ns=5000 * MS)
    scenario = Scenario(tenants=(short, long), duration_ns=2000 * MS, cost=cost, check=False)
    report = simulate(scenario, 1)
    assert report.tenants["short"].attainment == 1
    assert report.tenants["short"].percentile_ns(99) <= 1.2 * MS + 5 * MS + 2 * MS


def test_a_tenant_whose_launches_fail_takes_no_request_of_others():
    """Every launch fails at a rate of 10 %: only requests that fail twice alone are failed."""
    device = DeviceModel(fail_rate=0.1)
    report = simulate(make_backbones(20, "space_time", device=device), 2)
    done, failed = count(report, Outcome.COMPLETED), count(report, Outcome.FAILED)
    # A request of six kernels fails with about 6 * 0.1 * 0.1 (in group or alone, then alone).
    assert failed / (done + failed) < 0.15
