"""Known kernels in both dialects: numbers, barriers, many tenants in a launch, SIMD loops."""

from __future__ import annotations

import random
import subprocess

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from stitch_graphs import graphs, random_values, share_buffers
from stitch_kernels import KERNELS, replace
from stitch_reference import Builder, evaluate, from_memory, gelu, layer_norm, simple_kernel
from stitch_run import Emulated, make_arrays, run_cpp, run_emulated

from coissue.kernels.stitch.cpp import FLAGS, render_cpp
from coissue.kernels.stitch.emit import PlanError, emit
from coissue.kernels.stitch.plan import Rows, Schedule

SEEDS = 12
TOLERANCE = {"bf16": 0.02, "f32": 2e-5, "f64": 1e-12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def normal_values(graph, units: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    values = random_values(graph, units, seed)
    return {
        i: x + rng.standard_normal(x.shape).round(2).astype(x.dtype) if x.dtype.kind == "f" else x
        for i, x in values.items()
    }


def is_near(graph, want, got) -> bool:
    return all(
        np.allclose(array, want[i], rtol=0, atol=TOLERANCE[graph.nodes[i].dtype])
        for i, array in got.items()
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("run", [run_cpp, run_emulated])
def test_known_kernels_give_what_numpy_gives(folder, name, run):
    graph, kernel = KERNELS[name]
    values = normal_values(graph, 3)
    assert is_near(graph, evaluate(graph, values, 3), run(graph, kernel, values, 3, folder))


def test_the_papers_example_has_its_blocks_and_bytes():
    _, kernel = KERNELS["paper_attention"]
    assert kernel.shared_bytes == 4 * 306


class Mutant:
    """A kernel under the emulation that can be run without one of its barriers."""

    def __init__(self, graph, kernel, values, units, folder):
        self.graph, self.kernel, self.values, self.units = graph, kernel, values, units
        self.want = evaluate(graph, values, units)
        self.emulated = Emulated([emit(graph, kernel, "stitched")], folder)
        self.barriers = self.emulated.source.count("__syncthreads();")

    def is_right(self, seed: int, skip: int = -1) -> bool:
        inputs, outputs = make_arrays(self.graph, self.kernel, self.values, self.units)
        if self.emulated.launch([(0, self.units, inputs, outputs)], seed, skip):
            return False  # threads wait for each other for ever
        pairs = zip(self.kernel.outputs, outputs, strict=True)
        got = {i: from_memory(out, self.graph.nodes[i].dtype) for i, out in pairs}
        tolerance = 0.02 if {"bf16", "f16"} & {n.dtype for n in self.graph.nodes} else 2e-5
        return all(
            np.allclose(out, self.want[i], rtol=0, atol=tolerance, equal_nan=True)
            if out.dtype.kind == "f"
            else np.array_equal(out, self.want[i])
            for i, out in got.items()
        )

    def check(self) -> None:
        assert all(self.is_right(seed) for seed in range(SEEDS)), self.emulated.source
        for barrier in range(self.barriers):
            fails = any(not self.is_right(seed, barrier) for seed in range(SEEDS))
            assert fails, f"barrier {barrier} is not needed in\n{self.emulated.source}"


@pytest.mark.parametrize("rows", Rows)
@pytest.mark.parametrize("name", KERNELS)
def test_each_barrier_is_needed(folder, name, rows):
    graph, kernel = KERNELS[name]
    kernel = replace(kernel, rows=dict.fromkeys(kernel.rows, rows))
    mutant = Mutant(graph, kernel, normal_values(graph, 2), 2, folder)
    mutant.check()
    assert mutant.barriers or not kernel.buffers


@settings(deadline=None, max_examples=15, phases=[Phase.generate], derandomize=True,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(graph=graphs())
def test_no_order_of_threads_changes_a_random_kernel(folder, graph):
    seed = len(graph.nodes)
    kernel = simple_kernel(graph, random.Random(seed).choice(list(Rows)), 64)
    kernel = share_buffers(graph, kernel)
    mutant = Mutant(graph, kernel, random_values(graph, 2, seed), 2, folder)
    want = mutant.is_right(0)
    assert all(mutant.is_right(other) == want for other in range(1, SEEDS))


def test_tenants_share_a_launch(folder):
    """Three tenants' layer norms, with other weights and other numbers of units."""
    graph, kernel = KERNELS["layer_norm_warp"]
    emulated = Emulated([emit(graph, kernel, "stitched")], folder)
    parts, wants = [], []
    for tenant, units in enumerate((2, 0, 5)):
        values = normal_values(graph, units, tenant)
        parts.append((0, units, *make_arrays(graph, kernel, values, units)))
        wants.append(evaluate(graph, values, units)[graph.outputs[0]])
    # A segment without units has no blocks: it begins where the next one does.
    assert emulated.launch([part for part in parts if part[1]], 7) == 0
    for (_, _, _, (got,)), want in zip(parts, wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_different_kernels_share_a_launch(folder):
    """Blocks with different numbers of threads, one of them with barriers."""
    names = ("layer_norm_block", "gelu", "paper_attention")
    loops = [emit(*KERNELS[name], name) for name in names]
    emulated = Emulated(loops, folder)
    parts, wants = [], []
    for place, units in ((2, 2), (0, 3), (1, 1), (0, 1)):
        graph, kernel = KERNELS[names[place]]
        values = normal_values(graph, units, units)
        parts.append((place, units, *make_arrays(graph, kernel, values, units)))
        wants.append(evaluate(graph, values, units)[graph.outputs[0]])
    for seed in range(4):
        assert emulated.launch(parts, seed) == 0
        for (_, _, _, (got,)), want in zip(parts, wants, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
            got[...] = 0


LOOPS = {"gelu": 1, "batch_norm_relu": 1, "layer_norm_block": 4, "head_merge": 1}


@pytest.mark.parametrize(("name", "loops"), LOOPS.items())
def test_the_inner_loops_vectorise(folder, tool, name, loops):
    """As the compiler says; lanes of reductions are counted by their first loop only."""
    source = folder / f"{name}.cpp"
    source.write_text(render_cpp([emit(*KERNELS[name], "stitched")]))
    first = source.read_text().splitlines().index(
        next(line for line in source.read_text().splitlines() if line.startswith('extern "C"'))
    )  # fmt: skip
    run = subprocess.run(
        ["g++", *FLAGS, "-fopt-info-vec-optimized", "-o", str(folder / "v.so"), str(source)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = {
        int(line.split(":")[1]) for line in run.stderr.splitlines() if "loop vectorized" in line
    }
    assert len([line for line in found if line > first]) >= loops, run.stderr


def test_tiny_units_are_one_flat_loop():
    source = render_cpp([emit(gelu(1), simple_kernel(gelu(1)), "tiny")])
    body = source[source.index('extern "C"') :]
    assert body.count("for (") == 1
    graph = gelu(4, 4)
    source = render_cpp([emit(graph, simple_kernel(graph), "small")])
    assert "first_unit * 16" in source


def test_a_block_that_reads_what_it_did_not_make_is_refused():
    graph = layer_norm(4, 8)
    kernel = simple_kernel(graph)
    wrong = {i: Schedule(0, 4) for i in kernel.schedules}
    wrong[graph.outputs[0]] = Schedule(1, 4)
    with pytest.raises(PlanError):
        emit(graph, replace(kernel, blocks=4, schedules=wrong), "wrong")


def test_a_reduction_over_a_part_of_an_axis_is_refused():
    b = Builder()
    x = b.parameter(8)
    graph = b.graph(b.reduce("sum", b.call("exp", x), 0))
    kernel = simple_kernel(graph)
    schedules = {0: Schedule(0, 2), 1: Schedule(0, 2), 2: Schedule(0, 1)}
    with pytest.raises(PlanError):
        emit(graph, replace(kernel, blocks=2, schedules=schedules), "wrong")
