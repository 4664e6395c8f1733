"""The parts of the simulator: the shared device, arrivals, placement, capacity, plain data."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coissue.scheduler.messages import (
    KernelIndex,
    Launch,
    LaunchDone,
    LaunchId,
    RequestId,
    Segment,
    SignatureId,
    WeightsId,
)
from coissue.scheduler.null_device import DeviceModel, LinearCost, NullDevice
from coissue.scheduler.plain import PlainError, from_plain, to_plain
from coissue.scheduler.ports import MS, CoreLimits
from coissue.scheduler.simulation import Scenario, SimTenant, Traffic, simulate
from coissue.scheduler.simulation.arrivals import draw_times
from coissue.scheduler.simulation.cluster import capacity_hz, place, request_costs
from coissue.scheduler.simulation.scenario import SECOND
from load_tests.sim.drawn import draw_scenario, make_spec

# --- the device ---------------------------------------------------------------------------------


def make_launch(number: int, units: int) -> Launch:
    segment = Segment(RequestId(number), KernelIndex(0), WeightsId(0), units)
    return Launch(LaunchId(number), SignatureId(0), (segment,), 0, units, 0, 0)


def run_device(launches: list[tuple[int, int]], contention: float) -> dict[int, int]:
    """Ends by number, of launches given as (start, time alone)."""
    device = NullDevice(LinearCost(0, 1, 0), Random(0), DeviceModel(contention=contention))
    coming = sorted((at_ns, number, work) for number, (at_ns, work) in enumerate(launches, 1))
    ends: dict[int, int] = {}
    while coming or device.next_ns() is not None:
        end_ns = device.next_ns()
        if coming and (end_ns is None or coming[0][0] < end_ns):
            at_ns, number, work = coming.pop(0)
            device.start(make_launch(number, work), at_ns)
        else:
            for event in device.finish(end_ns):
                assert isinstance(event, LaunchDone)
                assert event.measured_ns == max(1, end_ns - launches[event.launch - 1][0])
                ends[event.launch] = end_ns
    return ends


def share_fluidly(launches: list[tuple[int, int]], contention: float) -> dict[int, float]:
    """The same, from the definition: between two events all that fly run at one speed."""
    left = {number: float(work) for number, (_, work) in enumerate(launches, 1)}
    starts = {number: at_ns for number, (at_ns, _) in enumerate(launches, 1)}
    now, ends = 0.0, {}
    while left:
        flying = [n for n in left if starts[n] <= now]
        speed = 1 / (1 + max(0, len(flying) - 1) * contention)
        coming = [starts[n] for n in left if starts[n] > now]
        steps = [at - now for at in coming] + [left[n] / speed for n in flying]
        step = min(steps)
        for n in flying:
            left[n] -= step * speed
        now += step
        for n in [n for n in flying if left[n] < 1e-6]:
            ends[n] = now
            del left[n]
    return ends


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(10, 3000)), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.4, 1.0, 1.7]),
)
@settings(deadline=None)
def test_launches_share_the_device_as_a_fluid(launches, contention):
    ends, wanted = run_device(launches, contention), share_fluidly(launches, contention)
    assert ends.keys() == wanted.keys()
    for number, end_ns in ends.items():
        assert end_ns == pytest.approx(wanted[number], abs=3 * len(launches))


def test_launches_of_pure_sharing_take_as_long_as_one_after_the_other():
    assert run_device([(0, 1000), (0, 1000)], 1.0) == {1: 2000, 2: 2000}
    assert run_device([(0, 1000), (1000, 500)], 1.0) == {1: 1000, 2: 1500}


def test_a_lost_device_forgets_its_launches():
    device = NullDevice(LinearCost(0, 1, 0), Random(0), DeviceModel())
    device.start(make_launch(1, 100), 0)
    device.lose(50)
    assert device.next_ns() is None
    device.start(make_launch(2, 100), 60)
    assert device.next_ns() == 160


def test_overhead_delays_a_launch_and_is_not_measured():
    device = NullDevice(LinearCost(0, 1, 0), Random(0), DeviceModel(overhead_ns=30))
    device.start(make_launch(1, 100), 10)
    assert device.next_ns() == 140
    assert device.finish(140) == [LaunchDone(140, LaunchId(1), 100)]


# --- arrivals -----------------------------------------------------------------------------------


def draw_all(traffic: Traffic, rate_hz: float, seconds: float, seed=0) -> list[int]:
    return list(draw_times(traffic, rate_hz, round(seconds * SECOND), Random(seed)))


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(cv):
    times = draw_all(Traffic(cv=cv), 500, 200)
    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) == pytest.approx(100_000, rel=0.08)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.08)


def test_bursts_keep_the_mean_rate_and_are_silent_between():
    times = draw_all(Traffic(on_ns=20 * MS, off_ns=80 * MS), 500, 100)
    assert len(times) == pytest.approx(50_000, rel=0.1)
    busy = {at_ns // MS for at_ns in times}
    assert len(busy) < 0.35 * 100_000  # of 1 ms slots; Poisson would fill 39 %


def test_a_trace_is_scaled_begun_anywhere_and_repeated():
    trace_ns = (0, 10, 20, 21, 22, 100)
    times = draw_all(Traffic(trace_ns=trace_ns), 1000, 1)
    assert len(times) == pytest.approx(1000, abs=5)
    gaps = [after - before for before, after in pairwise(times)]
    scale = SECOND * 5 / 100 / 1000
    wanted = [round(gap * scale) for gap in (10, 10, 1, 1, 78)]
    start = next(i for i, gap in enumerate(gaps[:5]) if abs(gap - wanted[-1]) < 3) + 1
    for index, gap in enumerate(gaps[start : start + 50]):
        assert abs(gap - wanted[index % 5]) <= 2
    starts = {draw_all(Traffic(trace_ns=trace_ns), 1000, 0.01, seed)[0] for seed in range(5)}
    assert len(starts) > 1


@given(
    st.sampled_from(
        [Traffic(), Traffic(cv=6.0), Traffic(on_ns=MS, off_ns=3 * MS), Traffic(trace_ns=(0, 5, 6))]
    ),
    st.just(0.0) | st.floats(0.01, 2000),
    st.integers(1, 200),
    st.integers(0, 99),
)
@settings(deadline=None)
def test_times_rise_and_stay_inside(traffic, rate_hz, duration_ms, seed):
    times = draw_all(traffic, rate_hz, duration_ms / 1000, seed)
    assert times == sorted(times)
    assert all(0 <= at_ns <= duration_ms * MS for at_ns in times)


@pytest.mark.parametrize(
    "wrong", [{"cv": 0.0}, {"on_ns": -1}, {"trace_ns": (5,)}, {"trace_ns": (5, 5)}]
)
def test_impossible_traffic_is_refused(wrong):
    with pytest.raises(ValueError, match=r"cv|on_ns|trace"):
        Traffic(**wrong)


# --- capacity and placement ---------------------------------------------------------------------

COST = LinearCost(100_000, 10_000, 0)


def make_tenants(*loads: tuple[int, float]) -> list[SimTenant]:
    """One tenant for each (program, rate)."""
    return [
        SimTenant(spec=make_spec(f"t{i}", [program], i), rate_hz=rate, deadline_ns=MS)
        for i, (program, rate) in enumerate(loads)
    ]


def test_capacity_is_that_of_the_cheapest_launch_within_the_bound():
    tenants = make_tenants((0, 1.0), (0, 1.0))
    # 64 of 10 us and 100 us once: 11.6 us a request.
    limits = CoreLimits(segments=64)
    assert capacity_hz(tenants, 1, limits, COST) == pytest.approx(SECOND / 11_562.5)
    assert capacity_hz(tenants, 8, limits, COST) == pytest.approx(8 * SECOND / 11_562.5)
    # A bound of 300 us allows 20: 15 us a request.
    limits = CoreLimits(preemption_bound_ns=300_000)
    assert capacity_hz(tenants, 1, limits, COST) == pytest.approx(SECOND / 15_000, rel=0.05)


def test_capacity_counts_the_weight_sets_that_the_rates_bring():
    cost = LinearCost(100_000, 10_000, 20_000)
    even = make_tenants(*[(0, 1.0)] * 100)
    skewed = make_tenants((0, 1e6), *[(0, 1e-3)] * 99)
    limits = CoreLimits(segments=16)
    assert capacity_hz(even, 1, limits, cost) < 0.6 * capacity_hz(skewed, 1, limits, cost)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_placement_serves_everyone_and_is_near_the_best_by_brute_force(data):
    devices = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(devices, 6))
    loads = [(i, data.draw(st.floats(1, 100))) for i in range(count)]
    tenants = make_tenants(*loads)
    limits = CoreLimits()
    placed = place(tenants, devices, limits, COST)
    costs = request_costs(tenants, limits, COST)
    assert placed.keys() == {tenant.spec.name for tenant in tenants}
    held = [0.0] * devices
    for tenant in tenants:
        where = placed[tenant.spec.name]
        assert where
        assert all(0 <= device < devices for device in where)
        for device in where:
            held[device] += tenant.rate_hz * costs[tenant.spec.name] / len(where)
    whole = [tenant.rate_hz * costs[tenant.spec.name] for tenant in tenants]
    best = min(
        max(sum(load for load, at in zip(whole, where, strict=True) if at == d) for d in where)
        for where in itertools.product(range(devices), repeat=count)
    )
    # What longest first is proved to reach. Larger tenants than this may be split: see below.
    if max(whole) <= sum(whole) / devices:
        assert max(held) <= (4 / 3 - 1 / (3 * devices)) * best + 1e-6


def test_equal_programs_go_together_where_they_fit():
    tenants = make_tenants(*[(i % 4, 1.0) for i in range(40)])
    placed = place(tenants, 4, CoreLimits(), COST)
    for program in range(4):
        homes = {placed[f"t{i}"] for i in range(40) if i % 4 == program}
        assert len(homes) == 1


def test_shared_weights_stay_together_when_a_program_is_cut():
    tenants = [
        replace(tenant, spec=make_spec(tenant.spec.name, [0], i % 2))
        for i, tenant in enumerate(make_tenants(*[(0, 1.0)] * 20))
    ]
    placed = place(tenants, 2, CoreLimits(), COST)
    assert {placed[f"t{i}"] for i in range(0, 20, 2)} == {placed["t0"]}
    assert placed["t0"] != placed["t1"]


def test_a_tenant_beyond_a_fair_load_is_served_by_several_devices():
    placed = place(make_tenants((0, 60.0), (1, 20.0), (2, 20.0)), 4, CoreLimits(), COST)
    assert len(placed["t0"]) >= 2
    spread = place(make_tenants(*[(i, 1.0) for i in range(8)]), 4, CoreLimits(), COST, spread=3)
    assert all(len(where) == 3 for where in spread.values())
    with pytest.raises(ValueError, match="spread"):
        place(make_tenants((0, 1.0)), 2, CoreLimits(), COST, spread=3)


def test_only_the_devices_of_the_placement_serve():
    tenants = tuple(make_tenants((0, 200.0), (1, 200.0)))
    tenants = tuple(replace(tenant, deadline_ns=50 * MS) for tenant in tenants)
    scenario = Scenario(tenants=tenants, duration_ns=SECOND, devices=3, cost=COST)
    report = simulate(scenario, 0, placement={"t0": (1,), "t1": (1,)})
    assert [device.launch_count > 0 for device in report.devices] == [False, True, False]
    assert report.attainment == 1


# --- plain data ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_scenarios_survive_json(seed):
    scenario = draw_scenario(seed)
    assert from_plain(Scenario, json.loads(json.dumps(to_plain(scenario)))) == scenario


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["policy"], "fastest", "policy must be one of"),
        (["polcy"], "fifo", "polcy: unknown"),
        (["duration_ns"], 1.5, "duration_ns: wanted int"),
        (["tenants", 0, "rate_hz"], "many", r"tenants\.0\.rate_hz: wanted float"),
        (["tenants", 0, "rate_hz"], float("nan"), r"tenants\.0\.rate_hz: wanted float"),
        (["tenants", 0, "traffic", "cv"], -1, r"tenants\.0\.traffic: cv must be"),
        (["tenants", 0, "rows"], [1], r"tenants\.0\.rows: wanted 2 items"),
        (["limits"], 3, "limits: wanted a mapping"),
        (["check"], 1, "check: wanted bool"),
    ],
)
def test_wrong_data_is_refused_with_its_path(path, value, message):
    data = json.loads(json.dumps(to_plain(draw_scenario(3))))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlainError, match=message):
        from_plain(Scenario, data)


def test_a_missing_key_is_named():
    with pytest.raises(PlainError, match="duration_ns: is missing"):
        from_plain(Scenario, {"tenants": []})
