"""`coissue simulate`: runs of a mix under policies and loads; a table, JSON and SVG plots."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from coissue.deployments.cli.mix import Mix, make_scenario
from coissue.deployments.cli.plot import render_chart
from coissue.deployments.costs import Costs
from coissue.kernels.cost_table import CostTable
from coissue.scheduler.messages import SignatureId
from coissue.scheduler.plain import from_plain
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.ports import MS, CostView
from coissue.scheduler.simulation import simulate
from coissue.scheduler.simulation.cluster import place
from coissue.scheduler.simulation.report import BINS

#: What the table shows of a run: heading, key of the summary, format.
COLUMNS = (
    ("requests", "requests", "{:,}"), ("in time", "attainment", "{:.2%}"),
    ("worst", "worst_tenant", "{:.1%}"), ("good/s", "goodput_hz", "{:,.0f}"),
    ("p50 ms", "p50_ms", "{:.1f}"), ("p99 ms", "p99_ms", "{:.1f}"), ("busy", "busy", "{:.0%}"),
    ("members", "members_per_launch", "{:.1f}"),
)  # fmt: skip


def load_mix(path: Path | None) -> Mix:
    """Raises OSError, and ValueError with the path of the key that is wrong."""
    if path is None:
        return Mix()
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    try:
        return from_plain(Mix, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def vary(mix: Mix, policies: list[str], loads: list[float]) -> list[Mix]:
    """One mix for each policy and load. Raises ValueError."""
    if policies == ["all"]:
        policies = list(POLICIES)
    for policy in policies:
        if policy not in POLICIES:
            raise ValueError(f"policy: one of {', '.join(POLICIES)}, not {policy!r}")
    return [
        replace(mix, policy=policy, load=load, rate_hz=None if loads else mix.rate_hz)
        for policy in policies or [mix.policy]
        for load in loads or [mix.load]
    ]


class MeasuredCosts:
    """A cost table as a file: what it says of signatures named by their beginnings."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError."""
        table = CostTable()
        try:
            stored = json.loads(path.read_text())
            table.load(path, stored["device"])
            self._names = list(stored["points"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a cost table: {error!r}") from None
        self.costs = Costs(table, learns=False)

    def find(self, name: str) -> SignatureId:
        """Raises ValueError unless just one signature begins so."""
        found = [known for known in self._names if known.startswith(name)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} signatures of the cost table begin with {name!r}")
        return self.costs.intern(found[0])


def run_mix(
    mix: Mix,
    seed: int,
    *,
    measured: MeasuredCosts | None = None,
    check: bool = False,
    progress: Any = None,
) -> dict[str, Any]:
    """One run, as JSON data. Raises ValueError, OSError, InvariantViolation."""
    cost: CostView | None = measured.costs if measured else None
    find = measured.find if measured else None
    scenario = replace(make_scenario(mix, seed, cost=cost, find=find), check=check)
    placement = place(scenario.tenants, mix.devices, mix.limits, cost or scenario.cost, mix.spread)
    # A policy may ask for a slot of its own for every tenant of a device.
    if getattr(POLICIES[mix.policy], "slot_per_tenant", False):
        most = max(Counter(device for where in placement.values() for device in where).values())
        scenario = replace(scenario, limits=replace(scenario.limits, slots=most))
    report = simulate(scenario, seed, cost=cost, placement=placement, progress=progress)
    return {"policy": mix.policy, "load": mix.load, "seed": seed, **report.to_plain()}


def run_all(
    mixes: list[Mix], seed: int, measured: MeasuredCosts | None, console: Console, *, check: bool
) -> list[dict[str, Any]]:
    """All runs, with a progress bar on a terminal."""
    runs = []
    with Progress(console=console, transient=True) as bar:
        for mix in mixes:
            total_ns = mix.duration_s * 1000 * MS
            task = bar.add_task(f"{mix.policy} at load {mix.load:g}", total=total_ns)
            runs.append(
                run_mix(
                    mix, seed, measured=measured, check=check,
                    progress=lambda now_ns, task=task: bar.update(task, completed=now_ns),
                )
            )  # fmt: skip
            bar.update(task, completed=total_ns)
    return runs


def render_table(runs: list[dict[str, Any]]) -> Table:
    """`worst`: in time, of the worst tenant. `members`: per launch."""
    table = Table(box=None)
    table.add_column("policy", no_wrap=True)
    table.add_column("load")
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for run in runs:
        cells = (form.format(run["summary"][key]) for _, key, form in COLUMNS)
        table.add_row(run["policy"], f"{run['load']:g}", *cells)
    return table


def write_plots(runs: list[dict[str, Any]], folder: Path) -> None:
    """latency.svg, timeline.svg and, over several loads, goodput.svg and attainment.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    several = len({run["load"] for run in runs}) > 1
    names = [f"{run['policy']}, {run['load']:g}" if several else run["policy"] for run in runs]
    curves = {
        name: [(ms, percent) for percent, ms in run["latency_curve"]]
        for name, run in zip(names, runs, strict=True)
    }
    chart = render_chart("Latency of completed requests", "ms", "% within", curves)
    (folder / "latency.svg").write_text(chart)
    timelines = {
        name: [
            ((place + 0.5) * run["duration_ms"] / 1000 / BINS, 100 * good / asked)
            for place, (good, asked) in enumerate(
                zip(run["good_bins"], run["asked_bins"], strict=True)
            )
            if asked
        ]
        for name, run in zip(names, runs, strict=True)
    }
    chart = render_chart("In time, by time of submission", "s", "% of requests", timelines)
    (folder / "timeline.svg").write_text(chart)
    for key, title, factor in (("goodput_hz", "requests/s in time", 1), ("attainment", "%", 100)):
        by_policy: dict[str, list[tuple[float, float]]] = {}
        for run in runs:
            point = run["load"], factor * run["summary"][key]
            by_policy.setdefault(run["policy"], []).append(point)
        if several:
            chart = render_chart("In time by load", "load of perfect packing", title, by_policy)
            (folder / f"{key.removesuffix('_hz')}.svg").write_text(chart)
