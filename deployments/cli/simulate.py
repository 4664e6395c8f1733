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

#: As many as `scheduler.slots` allows.
STREAMS_LIMIT = 64
#: What the table shows of a run: heading, key of the summary, format.
COLUMNS = (
    ("asked", "requests", "{:,}"), ("in time", "attainment", "{:.2%}"),
    ("worst", "worst_tenant", "{:.1%}"), ("good/s", "goodput_hz", "{:,.0f}"),
    ("p50 ms", "p50_ms", "{:.1f}"), ("p99 ms", "p99_ms", "{:.1f}"), ("busy", "busy", "{:.0%}"),
    ("members", "members_per_launch", "{:.1f}"),
)  # fmt: skip


def load_mix(path: Path | None) -> Mix:
    """Raises OSError, and ValueError with the path of the key that is wrong."""
    if path is None:
        return Mix()
    try:
        text = path.read_text()
        # YAML takes 1e-05 for a word.
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not YAML or JSON: {' '.join(str(error).split())}") from None
    if isinstance(data, dict) and "applications" in data:
        raise ValueError(f"{path}: a Serve config, not a mix (an example is configs/mix.yaml)")
    try:
        return from_plain(Mix, data)
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('here: ')}") from None


def vary(mix: Mix, policies: list[str], loads: list[float]) -> list[Mix]:
    """One mix for each policy (`all`: every one) and load."""
    chosen = list(POLICIES) if policies == ["all"] else policies or [mix.policy]
    return [
        replace(mix, policy=policy, load=load, rate_hz=None if loads else mix.rate_hz)
        for policy in chosen
        for load in loads or [mix.load]
    ]


class MeasuredCosts:
    """A cost table as a file: what it says of signatures named by their beginnings."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError, OSError."""
        table = CostTable()
        try:
            stored = json.loads(path.read_text())
            if not table.load(path, stored["device"]):
                raise ValueError("points that none of ours could be")
            self._names = list(dict.fromkeys(size[0] for size in stored["points"]))
        except OSError:
            raise
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: not a cost table, as a device's cache has one") from None
        self.costs = Costs(table, learns=False)

    def find(self, name: str) -> SignatureId:
        """Raises ValueError unless just one signature begins so."""
        found = [known for known in self._names if known.startswith(name)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} signatures of the cost table begin with {name!r}")
        return self.costs.intern(found[0])


def run_mix(
    mix: Mix, seed: int, measured: MeasuredCosts | None = None, *, check: bool = False,
    progress: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """One run, as JSON data. Raises ValueError, OSError, InvariantViolation."""
    cost: CostView | None = measured.costs if measured else None
    find = measured.find if measured else None
    scenario = replace(make_scenario(mix, seed, cost=cost, find=find), check=check)
    placement = place(scenario.tenants, mix.devices, mix.limits, cost or scenario.cost, mix.spread)
    if mix.policy == "space_only":  # a stream for every tenant of a device
        most = max(Counter(device for where in placement.values() for device in where).values())
        limits = replace(scenario.limits, slots=min(most, STREAMS_LIMIT))
        scenario = replace(scenario, limits=limits)
    report = simulate(scenario, seed, cost=cost, placement=placement, progress=progress)
    return {"policy": mix.policy, "load": mix.load, "seed": seed, **report.to_plain()}


def run_all(
    mixes: list[Mix], seed: int, measured: MeasuredCosts | None, console: Console, *, check: bool
) -> list[dict[str, Any]]:
    """All runs, with a progress bar on a terminal, else a line for each on stderr."""
    runs = []
    lines = Console(stderr=True, quiet=console.is_terminal)
    with Progress(console=console, transient=True) as bar:
        for mix in mixes:
            total_ns = mix.duration_s * 1000 * MS
            task = bar.add_task(f"{mix.policy} at load {mix.load:g}", total=total_ns)

            def tell(now_ns: int, task: Any = task) -> None:
                bar.update(task, completed=now_ns)

            runs.append(run_mix(mix, seed, measured, check=check, progress=tell))
            bar.update(task, completed=total_ns)
            lines.print(f"{mix.policy} at load {mix.load:g}: done, {len(runs)} of {len(mixes)}")
    return runs


def render_table(runs: list[dict[str, Any]]) -> Table:
    """`worst`: in time, of the worst tenant. `members`: per launch."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    table.add_column("load", no_wrap=True)
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        cells = (form.format(run["summary"][key]) for _, key, form in COLUMNS)
        table.add_row(run["policy"], f"{run['load']:g}", *cells)
    return table


def write_plots(runs: list[dict[str, Any]], folder: Path) -> None:
    """latency.svg, timeline.svg and, over several loads, goodput.svg and attainment.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    several = len({run["load"] for run in runs}) > 1
    curves: dict[str, list[tuple[float, float]]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    by_load: dict[str, dict[str, list[tuple[float, float]]]] = {"goodput_hz": {}, "attainment": {}}
    for run in runs:
        name = f"{run['policy']}, {run['load']:g}" if several else run["policy"]
        curves[name] = [(ms, percent) for percent, ms in run["latency_curve"]]
        bin_s = run["duration_ms"] / 1000 / BINS
        bins = zip(run["good_bins"], run["asked_bins"], strict=True)
        times[name] = [
            ((i + 0.5) * bin_s, 100 * good / asked) for i, (good, asked) in enumerate(bins) if asked
        ]
        for key, lines in by_load.items():
            lines.setdefault(run["policy"], []).append((run["load"], run["summary"][key]))
    charts = {
        "latency": ("Latency of completed requests", "ms", "% within", curves),
        "timeline": ("In time, by time of submission", "s", "% of requests", times),
    }
    if several:
        x = "load, of perfect packing"
        charts["goodput"] = ("Requests in time", x, "per second", by_load["goodput_hz"])
        charts["attainment"] = ("Requests in time", x, "of those asked", by_load["attainment"])
    for name, chart in charts.items():
        (folder / f"{name}.svg").write_text(render_chart(*chart))
