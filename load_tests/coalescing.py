"""What coalescing across tenants pays on the CPU device, shape by shape.

    python -m load_tests.coalescing --data FOLDER [--quick | --only SHAPES]

FOLDER holds `seed_gemm.csv`, `deepbench_inf_server_gemm.csv` and `deepbench_inf_server_rnn.csv`
(columns M, N, K, or step_gemm_M, step_gemm_N, step_gemm_K): N rows of one request times a weight
of K x M. Of DeepBench the shapes with one row are taken. One request of each tenant is there at
once, and all are computed in three ways, in turns in one run, on one core with one thread:

    time_only   one launch after the other, one request each
    space_only  a thread per tenant, each with a launch of its own
    space_time  the launches that the scheduler's core makes of them, by the costs that are measured
                when a tenant is attached, and with its bound on a launch of several (--bound-ms)

with shared weights (one set) and with own weights (a set per tenant). Inputs come as separate
arrays; bringing them in is timed with each way. A ratio is the time of the other way over that of
space_time, the median of `ROUNDS` rounds. What comes out below `AGAIN_BELOW` is measured once more,
over `ROUNDS_AGAIN` rounds, and both are in the file. How far chance reaches is told by the cases in
which nothing was joined: there time_only and space_time are the same code.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from rich.console import Console

from coissue.deployments.costs import Costs
from coissue.kernels.cost_table import CostTable
from coissue.kernels.cpu.border import Arrival, Border, enter
from coissue.kernels.cpu.device import BoundKernel, CpuDevice, DeviceSegment
from coissue.kernels.cpu.measure import measure
from coissue.kernels.ir import Dim, Op, Port, Program, R, Type, Weight, fixed
from coissue.kernels.passes.pipeline import lower
from coissue.scheduler.core import Core
from coissue.scheduler.messages import (
    Attached,
    Event,
    KernelSpec,
    Launch,
    LaunchDone,
    RequestId,
    Submitted,
    TenantSpec,
    WeightsId,
)
from coissue.scheduler.ports import MS, CoreLimits
from load_tests import results
from load_tests.demo.data import ROOT

TENANTS = (2, 4, 8, 16, 32)
ROUNDS = 9
AGAIN_BELOW = 0.97
ROUNDS_AGAIN = 45
#: Seconds of one way in one round, about; at least one repetition.
ROUND_SECONDS = 0.05
#: Weights of all tenants together; larger cases are left out and listed.
WEIGHT_BYTES_MAX = 3 << 30
CORE = 0
FAR_NS = 1 << 60


#: A tenant's kernel, its border and its request.
Member = tuple[BoundKernel, Border, np.ndarray]


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    rows: int
    width_in: int
    width_out: int

    @property
    def size(self) -> str:
        return f"{self.rows}x{self.width_in}x{self.width_out}"


def read_shapes(folder: Path) -> list[Shape]:
    """The shapes of the three files, each once."""
    found: dict[tuple[int, int, int], Shape] = {}
    for file, prefix, label, only_one in (
        ("seed_gemm.csv", "", "id", False),
        ("deepbench_inf_server_gemm.csv", "", "app", True),
        ("deepbench_inf_server_rnn.csv", "step_gemm_", "app", True),
    ):
        with (folder / file).open(newline="") as lines:
            for row in csv.DictReader(lines):
                m, n, k = (int(row[f"{prefix}{letter}"]) for letter in "MNK")
                if n == 1 or not only_one:
                    found.setdefault((m, n, k), Shape(row[label], n, k, m))
    return list(found.values())


def make_program(shape: Shape, seed: int) -> tuple[Program, dict[str, np.ndarray]]:
    """One linear layer without bias; weights by their content."""
    rng = np.random.default_rng(seed)
    size = (shape.width_out, shape.width_in)
    weight = rng.standard_normal(size, np.float32) / np.float32(shape.width_in**0.5)
    digest = hashlib.sha256(weight.tobytes()).hexdigest()
    types = (
        Type((R, Dim(shape.width_in)), "f32"),
        Type(fixed(*size), "f32"),
        Type((R, Dim(shape.width_out)), "f32"),
    )
    op = Op("linear", (0, 1), (2,), {"layout": "nk"})
    weights = (Weight("weight", 1, digest),)
    return (
        Program("linear", types, (Port("x", 0),), weights, (op,), (Port("y", 2),), 1024),
        {digest: weight},
    )


class Case:
    """`tenants` requests of one shape, and the three ways to compute them."""

    def __init__(
        self, device: CpuDevice, table: CostTable, shape: Shape, tenants: int, *, shared: bool,
        bound_ns: int,
    ) -> None:  # fmt: skip
        self._device = device
        self._held: list[str] = []
        self.members: list[Member] = []
        rng = np.random.default_rng(1)
        for number in range(1 if shared else tenants):
            program, arrays = make_program(shape, number)
            device.load_weights(arrays)
            self._held += arrays
            lowered = lower(program)
            bound = device.bind(lowered, 0)
            for _ in range(tenants if shared else 1):
                x = rng.standard_normal((shape.rows, shape.width_in), np.float32)
                self.members.append((bound, Border(lowered), x))
        self._lowered = lowered
        self._rows = shape.rows
        self._sets = 1 if shared else tenants
        self._pool = ThreadPoolExecutor(tenants)
        if self._lowered.kernels[0].signature not in table:
            for _ in measure(device, table, self._lowered, 0):
                pass
        self.launches = self._plan(Costs(table), bound_ns)

    def _plan(self, costs: Costs, bound_ns: int) -> list[list[Member]]:
        """The launches that the core makes of one request of each, all there at once."""
        core = Core(CoreLimits(preemption_bound_ns=bound_ns), "space_time", costs, Random(0))
        signature = costs.intern(self._lowered.kernels[0].signature)
        events: list[Event] = []
        for number in range(len(self.members)):
            name, weights = str(number), WeightsId(number % self._sets)
            kernel = KernelSpec(signature, weights, producers=(), per_token=False)
            events += [
                Attached(0, TenantSpec(name, (kernel,), share=1.0, in_flight_limit=1, priority=1)),
                Submitted(0, RequestId(number), name, self._rows, 0, FAR_NS, 0, 0),
            ]
        now_ns, launches = 0, list[list[Member]]()
        while events:
            made = [c for c in core.handle(*events) if isinstance(c, Launch)]
            launches += [[self.members[s.request] for s in launch.segments] for launch in made]
            now_ns += sum(launch.predicted_ns for launch in made)
            events = [LaunchDone(now_ns, each.launch, each.predicted_ns) for each in made]
        assert sum(map(len, launches)) == len(self.members)
        return launches

    def close(self) -> None:
        self._pool.shutdown()
        self._device.drop_weights(self._held)

    def _segments(self, members: list[Member]) -> list[DeviceSegment]:
        arrivals = [Arrival(border, {"x": x}, len(x), 0) for _, border, x in members]
        return [
            DeviceSegment(bound, len(x), 0, buffers)
            for (bound, _, x), buffers in zip(members, enter(arrivals), strict=True)
        ]

    def _launch(self, members: list[Member]) -> None:
        self._device.run(self._segments(members))

    def time_only(self) -> None:
        for member in self.members:
            self._launch([member])

    def space_only(self) -> None:
        list(self._pool.map(lambda member: self._launch([member]), self.members))

    def space_time(self) -> None:
        for members in self.launches:
            self._launch(members)


def measure_best(call: Any, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(case: Case, rounds: int) -> dict[str, float]:
    """Median ratios of the rounds."""
    ways = ("time_only", "space_only", "space_time")
    inner = {way: max(1, int(ROUND_SECONDS / measure_best(getattr(case, way), 2))) for way in ways}
    ratios: dict[str, list[float]] = {"time_only": [], "space_only": []}
    for number in range(rounds):
        order = ways[number % 3 :] + ways[: number % 3]
        took = {}
        for way in order:
            call = getattr(case, way)
            start = time.perf_counter()
            for _ in range(inner[way]):
                call()
            took[way] = (time.perf_counter() - start) / inner[way]
        for way, found in ratios.items():
            found.append(took[way] / took["space_time"])
    return {way: round(statistics.median(found), 3) for way, found in ratios.items()}


def geometric_mean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")


def run(shapes: list[Shape], console: Console, bound_ns: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        device = CpuDevice(
            threads=1, memory_bytes=WEIGHT_BYTES_MAX + (1 << 30), cache_dir=Path(folder)
        )
        for shape in shapes:
            table = CostTable()
            for shared in (True, False):
                for tenants in TENANTS:
                    size = 4 * shape.width_in * shape.width_out * (1 if shared else tenants)
                    weights = "shared" if shared else "own"
                    if size > WEIGHT_BYTES_MAX:
                        skipped.append(f"{shape.size}, {tenants} tenants, {weights}")
                        continue
                    case = Case(device, table, shape, tenants, shared=shared, bound_ns=bound_ns)
                    found: dict[str, Any] = compare(case, ROUNDS)
                    if min(found.values()) < AGAIN_BELOW:
                        found = {**compare(case, ROUNDS_AGAIN), "first": found}
                    rows.append({
                        "shape": shape.size, "from": shape.name, "weights": weights,
                        "tenants": tenants, "launches": len(case.launches), **found,
                    })  # fmt: skip
                    case.close()
                    console.print(f"  {rows[-1]}", highlight=False)
    return {"rows": rows, "left_out": skipped, **summarise(rows)}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for weights in ("shared", "own"):
        for tenants in TENANTS:
            chosen = [r for r in rows if r["weights"] == weights and r["tenants"] == tenants]
            means[f"{weights}, {tenants} tenants"] = ", ".join(
                f"{way} {geometric_mean([row[way] for row in chosen]):.2f}"
                for way in ("time_only", "space_only")
            )
    worst = min(rows, key=lambda row: min(row["time_only"], row["space_only"]))
    sixteen = [r["time_only"] for r in rows if r["weights"] == "shared" and r["tenants"] == 16]
    same = [row["time_only"] for row in rows if row["launches"] == row["tenants"]]
    return {
        "geometric_means": means,
        "same_code_twice": f"{min(same, default=1)} to {max(same, default=1)}",
        "shared_at_16_against_time_only": geometric_mean(sixteen),
        "worst": min(worst["time_only"], worst["space_only"]),
        "worst_case": f"{worst['shape']}, {worst['weights']}, {worst['tenants']} tenants",
        "wanted": "shared_at_16_against_time_only >= 3, worst >= 0.97",
    }


def tabulate(rows: list[dict[str, Any]]) -> str:
    """Shape by shape: time_only over space_time / space_only over space_time; (nothing joined)."""
    lines = ["", "| shape | weights | " + " | ".join(f"{n} tenants" for n in TENANTS) + " |"]
    lines.append("|---" * (2 + len(TENANTS)) + "|")
    found: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        text = f"{row['time_only']:.2f} / {row['space_only']:.2f}"
        key = row["shape"], row["weights"]
        is_same = row["launches"] == row["tenants"]
        found.setdefault(key, {})[row["tenants"]] = f"({text})" if is_same else text
    for (shape, weights), ratios in found.items():
        cells = " | ".join(ratios.get(n, "") for n in TENANTS)
        lines.append(f"| {shape} | {weights} | {cells} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the CSV files")
    parser.add_argument("--quick", action="store_true", help="three shapes, no result file")
    parser.add_argument("--only", default="", help="shapes like 128x1152x256,...; no result file")
    parser.add_argument("--bound-ms", type=float, default=10.0, help="scheduler's default: 10")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {CORE})
    torch.set_num_threads(1)
    console, started = Console(), time.monotonic()
    shapes = read_shapes(arguments.data)
    only = list(filter(None, arguments.only.split(",")))
    if arguments.quick or only:
        shapes = [shape for shape in shapes if shape.size in only] if only else shapes[:3]
    found = run(shapes, console, round(arguments.bound_ms * MS))
    console.print(results.summarise(found), highlight=False)
    if not arguments.quick and not only:
        seconds = time.monotonic() - started
        path = results.write(ROOT / "docs" / "results", "coalescing", found, seconds=seconds)
        with path.with_suffix(".md").open("a") as text:
            text.write(tabulate(found["rows"]))
        console.print(f"-> {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
