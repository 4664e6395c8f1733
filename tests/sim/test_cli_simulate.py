"""`coissue simulate`: mixes from files, the table, JSON and plots, and one-line errors."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coissue.deployments.cli.main import app
from coissue.deployments.cli.mix import BOUNDS, Group, Mix, make_scenario, read_trace
from coissue.deployments.cli.plot import find_ticks, render_chart
from coissue.deployments.cli.simulate import load_mix, run_mix
from coissue.kernels.cost_table import CostTable
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.simulation.cluster import capacity_hz

ROOT = Path(__file__).parents[2]
SMALL = "duration_s: 0.1\n"


def run(*args: object, code: int = 0) -> str:
    made = CliRunner().invoke(app, ["simulate", *map(str, args)], env={"COLUMNS": "160"})
    assert made.exit_code == code, made.output
    return made.output


def write(folder: Path, text: str) -> Path:
    path = folder / "mix.yaml"
    path.write_text(text)
    return path


def test_every_policy_and_load_is_a_row_in_table_and_json(tmp_path):
    path, out = write(tmp_path, "duration_s: 0.03\n"), tmp_path / "runs.json"
    shown = run(path, "--policy", "all", "--load", 0.2, "--load", 0.9, "--json", out, "--check")
    runs = json.loads(out.read_text())
    assert [(r["policy"], r["load"]) for r in runs] == [
        (p, x) for p in POLICIES for x in (0.2, 0.9)
    ]
    assert all(policy in shown for policy in POLICIES)
    assert all(r["summary"]["requests"] == sum(r["asked_bins"]) for r in runs)
    assert all(len(r["tenants"]) == 12 for r in runs)


def test_the_same_seed_gives_the_same_figures_and_another_does_not(tmp_path):
    path, outs = write(tmp_path, SMALL), [tmp_path / f"{i}.json" for i in range(3)]
    for out, seed in zip(outs, (1, 1, 2), strict=True):
        run(path, "--seed", seed, "--json", out)
    texts = [out.read_text() for out in outs]
    assert texts[0] == texts[1] != texts[2]


def test_space_only_runs_a_stream_for_every_tenant():
    """Twelve streams share the device: more is done than one at a time."""
    runs = [
        run_mix(Mix(policy=policy, duration_s=0.5, load=0.15), 0)["summary"]
        for policy in ("space_only", "time_only")
    ]
    assert runs[0]["goodput_hz"] > 1.2 * runs[1]["goodput_hz"]


def test_plots_are_svg_with_a_line_for_each_run(tmp_path):
    run(
        write(tmp_path, SMALL), "--policy", "all", "--load", 0.2, "--load", 0.5, "--plots", tmp_path
    )
    counts = {}
    for path in tmp_path.glob("*.svg"):
        root = ET.fromstring(path.read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        counts[path.stem] = len(root.findall("{http://www.w3.org/2000/svg}polyline"))
    policies = len(POLICIES)
    assert counts == {
        "latency": 2 * policies, "timeline": 2 * policies, "goodput": policies,
        "attainment": policies,
    }  # fmt: skip


def test_the_shipped_mix_is_one():
    mix = load_mix(ROOT / "configs" / "mix.yaml")
    scenario = make_scenario(mix, 0)
    assert len(scenario.tenants) == 1000
    rate = sum(tenant.rate_hz for tenant in scenario.tenants)
    best = capacity_hz(scenario.tenants, mix.devices, mix.limits, scenario.cost)
    assert rate == pytest.approx(mix.load * best)


def test_popularity_follows_zipf_and_shared_kernels_have_one_set_of_weights():
    mix = Mix(groups=(Group(name="a", tenants=3, shared=2), Group(name="b", tenants=3)), zipf=1.0)
    tenants = make_scenario(mix, 0).tenants
    rates = sorted((tenant.rate_hz for tenant in tenants), reverse=True)
    assert [round(rates[0] / rate, 6) for rate in rates] == [1, 2, 3, 4, 5, 6]
    first = {tenant.spec.kernels[1].weights for tenant in tenants[:3]}
    last = {tenant.spec.kernels[2].weights for tenant in tenants[:3]}
    assert (len(first), len(last)) == (1, 3)
    signatures = [{k.signature for k in tenant.spec.kernels} for tenant in tenants]
    assert signatures[0] == signatures[2]
    assert not signatures[0] & signatures[3]


def test_a_trace_gives_the_times(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = ["TIMESTAMP,N", "2023-11-16 18:17:03.9799600,48", "2023-11-16 18:17:04.0319600,1"]
    trace.write_text("\r\n".join(rows))
    assert read_trace(trace) == (0, 52_000_000)
    trace.write_text("at\n2.5\n0.5\n1.5\n")
    assert read_trace(trace, "at") == (0, 1_000_000_000, 2_000_000_000)
    mix = write(tmp_path, f"{SMALL}trace: {trace}\ntrace_column: at\n")
    assert "space_time" in run(mix)
    trace.write_text("at\n1.5\nsoon\n")
    assert "trace.csv:3: no time in column 'at': 'soon'" in run(mix, code=1)


def test_measured_costs_name_signatures_by_their_beginnings(tmp_path):
    table = CostTable()
    for signature in ("abc1", "abd2"):
        for units in (1, 64):
            table.record(signature, units, 1, 1, 100_000 + 1000 * units)
    table.save(tmp_path / "costs.json", "some device")
    path = write(tmp_path, SMALL + "groups: [{tenants: 3, signatures: [abc, abd]}]\n")
    assert "space_time" in run(path, "--costs", tmp_path / "costs.json")
    path = write(tmp_path, SMALL + "groups: [{tenants: 3, signatures: [ab]}]\n")
    assert "2 signatures" in run(path, "--costs", tmp_path / "costs.json", code=1)
    assert "with --costs it needs `signatures`" in run(path, code=1)
    assert "not a cost table" in run(path, "--costs", path, code=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy: fifo", "polcy: unknown"),
        ("duration_s: -1", "mix.yaml: duration_s: -1.0, allowed: from 0.001"),
        ("groups: [{priority: 0}]", "groups.0: priority: 0, allowed: from 1 to 16"),
        ("groups: [{fixed_us: 1.0e+12}]", "allowed: from 0 to 1e9"),
        ("duration_s: .nan", "duration_s: wanted float"),
        ("groups: []", "groups: (), allowed: at least one"),
        ("groups: [{tenants: 0}]", "groups.0: tenants: 0, allowed: from 1"),
        ("groups: [{rows: [2, 1]}]", "groups.0: rows: (2, 1), allowed: [low"),
        ("limits: {windw: 3}", "limits.windw: unknown"),
        ("traffic: {cv: 0}", "traffic: cv must be"),
        ("spread: 2", "spread: 2, allowed: from 1"),
        ("groups: [{share: 0}]", "groups.0: share: 0.0, allowed: from 0.001"),
        ("groups: [{in_flight: 0}]", "groups.0: in_flight: 0, allowed: from 1"),
        ("groups: [{kernels: 3, shared: 4}]", "groups.0: shared: 4, allowed: from 0"),
        ("groups: [{name: a}, {name: a}]", "groups: a, a, allowed: each name once"),
        ("limits: {slots: 0}", "limits.slots: 0, allowed: from 1 to 64"),
        ("limits: {window: 0}", "limits.window: 0, allowed: from 1"),
        ("limits: {segments: 0}", "limits.segments: 0, allowed: from 1"),
        ("limits: {preemption_bound_ns: -1}", "limits.preemption_bound_ns: -1, allowed: from 1"),
        ("device: {noise: -3}", "device.noise: -3.0, allowed: from 0"),
        ("device: {contention: -5}", "device.contention: -5.0, allowed: from 0"),
        ("faults: {cancel_rate: 5}", "faults.cancel_rate: 5.0, allowed: from 0 to 1"),
        ("- 3", "wanted a mapping"),
        ("{", "not YAML"),
        ("policy: fastest", "policy must be one of"),
        ("trace: nowhere.csv", "nowhere.csv"),
    ],
)
def test_mistakes_are_one_line_with_the_key(tmp_path, text, message):
    shown = run(write(tmp_path, text), code=1)
    assert message in shown
    assert len(shown.strip().splitlines()) == 1


def test_every_number_of_the_schedulers_parts_has_bounds():
    for part, bounds in BOUNDS.items():
        own = getattr(Mix(), part)
        numbers = {f.name for f in fields(own) if isinstance(getattr(own, f.name), int | float)}
        assert numbers - {"admission"} == bounds.keys(), part


def test_a_cost_table_with_impossible_times_is_refused(tmp_path):
    for ns in ("null", "-5", "NaN", '"7"'):
        point = f'["s", 1, 1, 1, false, {ns}]'
        (tmp_path / "costs.json").write_text(f'{{"device": "d", "points": [{point}]}}')
        shown = run(write(tmp_path, "groups: [{signatures: [s]}]"), "--costs",
                    tmp_path / "costs.json", code=1)  # fmt: skip
        assert "not a cost table" in shown


def test_where_results_go_is_checked_before_the_runs(tmp_path):
    assert "is a folder, or in none" in run("--json", tmp_path / "no" / "x.json", code=1)
    (tmp_path / "file").write_text("")
    assert "File exists" in run("--plots", tmp_path / "file", code=1)


def test_unknown_policies_and_files_are_refused(tmp_path):
    assert "policy must be one of" in run("--policy", "fastest", code=1)
    assert "nothing.yaml" in run(tmp_path / "nothing.yaml", code=1)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0])],
)
def test_ticks_are_round(low, high, ticks):
    assert find_ticks(low, high) == ticks


def test_ticks_cover_what_they_are_for():
    for low, high in [(0.2, 1.2), (3, 3.0001), (0, 12345), (17, 18), (0, 1e-6)]:
        ticks = find_ticks(low, high)
        assert ticks[0] <= low
        assert ticks[-1] >= high
        assert 3 <= len(ticks) <= 9


def test_names_cannot_break_a_chart():
    ET.fromstring(render_chart("<&", "x", 'y"', {"</svg>": [(0, 0), (1, 2)], "empty": []}))
