"""`make demo`: twelve tenants served and measured under two policies, in one table.

Trains what is missing, starts the application of configs/demo.yaml, finds how fast one text request
is answered alone, sends one open-loop schedule twice what one request at a time can carry,
in turns under `space_time` and `time_only`, and prints what coalescing gained. Everything started
here is stopped again, also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from load_tests.client import Answer, LoadResult, Schedule, Shot, percentile, run_load
from load_tests.demo import data, report, traffic, train
from load_tests.hosted import Hosted, HostFailed, interrupt_on_signals, wait_ready

CONFIG = data.ROOT / "configs" / "demo.yaml"
OUT = data.ROOT / "out"
TIMELINE = OUT / "demo-timeline.json"
POLICIES = ("space_time", "time_only")
READY_SECONDS_MAX = 420.0
#: For generated code, built in the background while everything serves; the first time only.
BUILT_SECONDS_MAX = 180.0
WAITING = 'coissue_native_kernels{state="waiting"}'
#: Seconds of each turn; two turns per policy.
TURN_SECONDS = 7.0
TURNS = 2
#: Text load as a multiple of what one request at a time can carry.
LOAD = 2.0
CALIBRATION_REQUESTS = 30


@dataclass(slots=True)
class PolicyRun:
    """What one policy did with the schedule, over its turns."""

    answers: list[Answer] = field(default_factory=list)
    lag_ms_p99: float = 0.0
    launches: list[dict[str, Any]] = field(default_factory=list)
    device_seconds: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        result: LoadResult,
        launches: Iterable[dict[str, Any]],
        before: Mapping[str, float],
        after: Mapping[str, float],
    ) -> None:
        self.answers += result.answers
        self.lag_ms_p99 = max(self.lag_ms_p99, result.lag_ms_p99)
        self.launches += launches
        for task in data.TASKS:
            name = f'coissue_tenant_device_seconds_total{{tenant="{task}"}}'
            spent = after.get(name, 0.0) - before.get(name, 0.0)
            self.device_seconds[task] = self.device_seconds.get(task, 0.0) + spent


@dataclass(slots=True)
class Demo:
    """One run against a started application."""

    hosted: Hosted
    console: Console
    tenants: list[str]
    last_launch: int = -1

    def send(self, schedule: Schedule) -> LoadResult:
        payloads = traffic.build_payloads()
        return uvloop.run(run_load(schedule, payloads, port=self.hosted.port))

    def calibrate(self) -> float:
        """Seconds of a text request served alone; spaced out, so that nothing queues.

        The lower quartile: what else the machine does must not make the load lighter.
        """
        texts = [task for task in data.TEXT_TASKS if task in self.tenants]
        self.hosted.ask("policy", policy="time_only")
        shots = [
            Shot(index * 60_000_000, task, index % 20)
            for index, task in enumerate(islice(cycle(texts), CALIBRATION_REQUESTS))
        ]
        answers = self.send(tuple(shots)).answers
        spent = [answer.done_ns - answer.sent_ns for answer in answers if answer.is_ok]
        if not spent:
            raise HostFailed(f"no text request was answered: {answers[0].body[:200]!r}")
        return percentile(spent, 25) / 1e9

    def take_launches(self) -> list[dict[str, Any]]:
        """The launches since the last call, from the timeline; leaves the newest file in place."""
        self.hosted.ask("timeline", path=str(TIMELINE))
        events = json.loads(TIMELINE.read_bytes())["traceEvents"]
        launches = [
            event
            for event in events
            if event["ph"] == "X" and event["args"]["launch"] > self.last_launch
        ]
        self.last_launch = max([self.last_launch, *(e["args"]["launch"] for e in launches)])
        return launches

    def measure(self, text_rps: float, seconds: float) -> dict[str, PolicyRun]:
        """The same schedule under both policies, in turns."""
        runs = {policy: PolicyRun() for policy in POLICIES}
        with progress_bar(self.console) as progress:
            bar = progress.add_task("load", total=TURNS * len(POLICIES))
            for part in range(TURNS):
                schedule = traffic.plan(text_rps, seconds, part, self.tenants)
                for policy in POLICIES:
                    progress.update(bar, description=f"{len(schedule)} requests under {policy}")
                    self.hosted.ask("policy", policy=policy)
                    self.take_launches()
                    before = self.hosted.read_metrics()
                    result = self.send(schedule)
                    after = self.hosted.read_metrics()
                    runs[policy].add(result, self.take_launches(), before, after)
                    progress.advance(bar)
        return runs


def progress_bar(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, refresh_per_second=2)


def start_tenants(hosted: Hosted, console: Console) -> list[str]:
    """Wait until every tenant is ready or failed; the names of those that are ready."""
    states: Mapping[str, tuple[str, str]] = {}
    with progress_bar(console) as progress:
        bar = progress.add_task("starting Ray", total=len(data.TASKS))
        for states in wait_ready(hosted, len(data.TASKS), READY_SECONDS_MAX):
            ready = sum(state == "ready" for state, _ in states.values())
            if states:
                progress.update(bar, completed=ready, description=f"{ready} of 12 tenants ready")
    for name, (state, reason) in states.items():
        if state == "failed":
            console.print(f"{name} failed: {reason}", markup=False, highlight=False, style="red")
    return [task for task in data.TASKS if states.get(task, ("", ""))[0] == "ready"]


def await_kernels(hosted: Hosted, console: Console) -> None:
    """Until the generated code of all kernels is there: building it takes what is measured."""
    until = time.monotonic() + BUILT_SECONDS_MAX
    with progress_bar(console) as progress:
        bar = progress.add_task("compiling kernels", total=None)
        while (left := hosted.read_metrics().get(WAITING, 0.0)) and time.monotonic() < until:
            text = f"compiling kernels (the first time only): {left:.0f} left"
            progress.update(bar, description=text)
            time.sleep(1.0)  # between looks: the scheduler's process tells nobody when it is done


def run(console: Console, args: argparse.Namespace) -> int:
    started = time.monotonic()
    train.train(console)
    with Hosted(OUT / "demo-serve.log", config=CONFIG, port=args.port) as hosted:
        console.print(
            f"starting {CONFIG.relative_to(data.ROOT)} on http://127.0.0.1:{args.port} "
            "(HAProxy listens on all interfaces while the demo runs)",
            highlight=False,
        )
        demo = Demo(hosted, console, start_tenants(hosted, console))
        await_kernels(hosted, console)
        alone_s = demo.calibrate()
        text_rps = args.load / alone_s
        console.print(
            f"a text request alone takes {alone_s * 1e3:.1f} ms; sending {text_rps:.0f} text "
            f"requests/s and {sum(traffic.SMALL_RPS.values()):.0f} others, open loop, "
            f"the same schedule under {' and '.join(POLICIES)}",
            highlight=False,
        )
        runs = demo.measure(text_rps, args.seconds)
        facts = report.collect(hosted, runs, TURNS * args.seconds)
        console.print("stopping")
    report.show(console, facts)
    (OUT / "demo.json").write_text(json.dumps(facts, indent=1) + "\n")
    place = TIMELINE.relative_to(data.ROOT)
    console.print(f"timeline: {place} (open it in https://ui.perfetto.dev)", highlight=False)
    console.print(f"took {time.monotonic() - started:.0f} s", highlight=False)
    return 0 if len(demo.tenants) == len(data.TASKS) and not facts["differing"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--load", type=float, default=LOAD, help="multiple of one at a time")
    parser.add_argument("--seconds", type=float, default=TURN_SECONDS, help="of each of the turns")
    console = Console()
    args = parser.parse_args()
    interrupt_on_signals()
    try:
        return run(console, args)
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped")
        return 130
    except HostFailed as error:
        console.print(str(error), markup=False, highlight=False, style="red")
        return 1


if __name__ == "__main__":
    sys.exit(main())
