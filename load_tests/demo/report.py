"""The demo's figures: collected as plain data from a run, and shown as one table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import yaml
from rich.console import Console
from rich.table import Table

from load_tests.client import summarise_answers
from load_tests.demo import data, traffic, train
from load_tests.hosted import Hosted

if TYPE_CHECKING:
    from load_tests.demo.run import PolicyRun

MIB = 1024 * 1024
#: The table is wider than a pipe's default 80 columns.
WIDTH = 148

#: Beyond it a reader is told that the times are not the scheduler's alone.
LAG_MS_MAX: Final = 20.0


def read_deadlines() -> dict[str, float]:
    """Tenant -> deadline in ms, of configs/demo.yaml."""
    document = yaml.safe_load((data.ROOT / "configs" / "demo.yaml").read_text())
    args = document["applications"][0]["args"]
    return {t["name"]: args["slo_classes"][t["slo"]]["deadline_ms"] for t in args["tenants"]}


def mean_tenants(launches: Sequence[Mapping[str, Any]], tenant: str = "") -> float:
    """Mean number of tenants per launch, of the launches that `tenant` took part in (all: "")."""
    counts = [
        len(launch["args"]["tenants"])
        for launch in launches
        if not tenant or tenant in launch["args"]["tenants"]
    ]
    return sum(counts) / len(counts) if counts else float("nan")


def collect(hosted: Hosted, runs: Mapping[str, PolicyRun], seconds: float) -> dict[str, Any]:
    """All that is shown, as JSON data."""
    eager = json.loads(train.EAGER.read_text())
    deadlines = read_deadlines()
    policies = {policy: collect_policy(run, deadlines, seconds) for policy, run in runs.items()}
    everything = [answer for run in runs.values() for answer in run.answers]
    accuracies = {
        task: traffic.judge_answers(
            task, [a for a in everything if a.shot.tenant == task], eager[task]
        )
        for task in deadlines
    }
    metrics, resident = hosted.read_metrics(), hosted.resident_bytes()
    return {
        "seconds": seconds,
        "deadline_ms": deadlines,
        "policies": policies,
        "accuracy": {task: asdict(accuracy) for task, accuracy in accuracies.items()},
        "differing": sum(accuracy.differing for accuracy in accuracies.values()),
        "memory": {
            "weights_held_mib": metrics.get("coissue_weight_bytes", 0) / MIB,
            "weights_saved_mib": metrics.get("coissue_weight_saved_bytes", 0) / MIB,
            "resident_mib": {name: size / MIB for name, size in resident.items()},
        },
    }


def collect_policy(
    run: PolicyRun, deadlines: Mapping[str, float], seconds: float
) -> dict[str, Any]:
    tenants = {}
    for task, deadline_ms in deadlines.items():
        answers = [answer for answer in run.answers if answer.shot.tenant == task]
        summary = summarise_answers(task, answers, deadline_ms)
        tenants[task] = {
            "requests": summary.requests,
            "outcomes": summary.outcomes,
            "p50_ms": summary.p50_ms,
            "p99_ms": summary.p99_ms,
            "attainment": summary.attainment,
            "tenants_per_launch": mean_tenants(run.launches, task),
            "device_ms": run.device_seconds[task] * 1e3 / max(summary.outcomes.get(200, 0), 1),
        }
    total = summarise_answers("all", run.answers, max(deadlines.values()))
    good = sum(a.is_ok and a.latency_ns <= deadlines[a.shot.tenant] * 1e6 for a in run.answers)
    return {
        "tenants": tenants,
        "requests": total.requests,
        "outcomes": total.outcomes,
        "p50_ms": total.p50_ms,
        "p99_ms": total.p99_ms,
        "attainment": good / max(total.requests, 1),
        "goodput_rps": good / seconds,
        "launches": len(run.launches),
        "tenants_per_launch": mean_tenants(run.launches),
        "device_ms": sum(run.device_seconds.values()) * 1e3 / max(total.outcomes.get(200, 0), 1),
        "lag_ms_p99": run.lag_ms_p99,
    }


INVALID: Final = (
    "[bold yellow]This is no valid comparison[/]: other work on this machine kept the load "
    "generator from sending in time. Run it again on a quiet one."
)


def pair(values: Sequence[float], form: str) -> str:
    return " / ".join("-" if value != value else format(value, form) for value in values)


def show(console: Console, facts: Mapping[str, Any]) -> None:
    wide = Console(width=max(console.width, WIDTH), file=console.file)
    policies = list(facts["policies"])
    table = Table(title=f"{' / '.join(policies)}, the same {facts['seconds']:.0f} s of requests")
    table.add_column("tenant", no_wrap=True)
    for head in ("SLO ms", "requests", "p50 ms", "p99 ms", "attainment", "accuracy (eager)",
                 "tenants/launch", "device ms"):  # fmt: skip
        table.add_column(head, justify="right", no_wrap=True)
    for task, deadline in facts["deadline_ms"].items():
        rows = [facts["policies"][policy]["tenants"][task] for policy in policies]
        accuracy = facts["accuracy"][task]
        table.add_row(
            task, f"{deadline:.0f}", *figures(rows[0]["requests"], rows),
            f"{accuracy['answers']:.3f} ({accuracy['eager']:.3f})", *costs(rows),
        )  # fmt: skip
    totals = [facts["policies"][policy] for policy in policies]
    table.add_section()
    table.add_row("all", "", *figures(totals[0]["requests"], totals), "", *costs(totals))
    is_valid = max(total["lag_ms_p99"] for total in totals) <= LAG_MS_MAX
    if not is_valid:
        wide.print(INVALID, highlight=False)
    wide.print(table)
    wide.print(
        "p50 and p99 are of answers with status 200; attainment is the share of all requests "
        "answered in time; accuracy is against the labels; device ms are per answer."
    )
    show_summary(wide, facts, totals)
    if not is_valid:
        wide.print(INVALID, highlight=False)


def figures(requests: int, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        str(requests),
        pair([row["p50_ms"] for row in rows], ".1f"),
        pair([row["p99_ms"] for row in rows], ".0f"),
        pair([row["attainment"] * 100 for row in rows], ".1f") + " %",
    ]


def costs(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        pair([row["tenants_per_launch"] for row in rows], ".2f"),
        pair([row["device_ms"] for row in rows], ".2f"),
    ]


def show_summary(
    console: Console, facts: Mapping[str, Any], totals: Sequence[Mapping[str, Any]]
) -> None:
    ours, other = totals
    lag_ms = max(ours["lag_ms_p99"], other["lag_ms_p99"])
    busy = " [yellow]requests left late, for other work on this machine: all times contain it[/]"
    lines = {
        "goodput": f"{ours['goodput_rps']:.0f} / {other['goodput_rps']:.0f} requests/s in time, "
        f"ratio [bold]{ratio(ours['goodput_rps'], other['goodput_rps'])}[/bold]",
        "p99": f"{ours['p99_ms']:.0f} / {other['p99_ms']:.0f} ms, "
        f"ratio {ratio(other['p99_ms'], ours['p99_ms'])}",
        "device time": f"{ours['device_ms']:.2f} / {other['device_ms']:.2f} ms per answer, "
        f"ratio {ratio(other['device_ms'], ours['device_ms'])}",
        "launches": f"{ours['launches']} / {other['launches']}",
        "refused or late": " / ".join(
            str({k: v for k, v in total["outcomes"].items() if k != 200}) for total in totals
        ),
        "answers": f"{facts['differing']} differ in class from the eager modules",
        "generator lag": f"p99 {lag_ms:.1f} ms{busy if lag_ms > LAG_MS_MAX else ''}",
    }
    memory = facts["memory"]
    sizes = {name.split(":")[-1] or name: mib for name, mib in memory["resident_mib"].items()}
    lines["memory"] = (
        f"weights {memory['weights_held_mib']:.0f} MiB held, {memory['weights_saved_mib']:.0f} MiB "
        "saved by sharing; resident MiB: "
        + ", ".join(f"{name} {mib:.0f}" for name, mib in sizes.items())
    )
    for head, text in lines.items():
        console.print(f"{head:>16}  {text}", highlight=False)


def ratio(above: float, below: float) -> str:
    return f"{above / below:.2f}" if below else "-"
