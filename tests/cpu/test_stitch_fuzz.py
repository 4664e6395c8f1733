"""Random graphs: the C++ and the CUDA source both give what numpy gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import stitch_random
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from stitch_blocks import move_parameters
from stitch_graphs import graphs, lift, random_values, share_buffers
from stitch_reference import Builder, evaluate, simple_kernel
from stitch_run import run_cpp, run_emulated

from coissue.kernels.stitch.graph import Graph, Kind
from coissue.kernels.stitch.plan import Rows
from coissue.kernels.stitch.search import plan

SLOW = settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
#: By the coarsest float of the graph: kernels keep 16-bit floats wide in registers only.
TOLERANCE = {"bf16": 0.06, "f16": 0.01, "f32": 3e-5, "f64": 1e-10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stitched")


def check(graph: Graph, want, got) -> None:
    dtypes = {node.dtype for node in graph.nodes}
    tolerance = next((t for dtype, t in TOLERANCE.items() if dtype in dtypes), 0.0)
    for index, array in got.items():
        expected = want[index]
        if array.dtype.kind in "fV":
            scale = 1.0 + float(np.abs(expected).max(initial=0.0))
            np.testing.assert_allclose(array, expected, rtol=0, atol=tolerance * scale)
        else:
            np.testing.assert_array_equal(array, expected)


@SLOW
@given(
    graph=graphs(),
    rows=st.sampled_from(list(Rows)),
    threads=st.sampled_from((32, 64, 128)),
    shared=st.booleans(),
    units=st.sampled_from((0, 1, 3)),
    seed=st.integers(0, 99),
)
def test_both_dialects_give_what_numpy_gives(folder, graph, rows, threads, shared, units, seed):
    kernel = simple_kernel(graph, rows, threads, shared)
    if seed % 2:
        kernel = share_buffers(graph, kernel)
    values = random_values(graph, units, seed)
    want = evaluate(graph, values, units)
    for got in (
        run_cpp(graph, kernel, values, units, folder),
        run_emulated(graph, kernel, values, units, folder, seed),
    ):
        # Without units nothing runs, not even for what all units share.
        check(graph, want, {i: got[i] for i in got if units or graph.nodes[i].per_unit})


@SLOW
@given(graph=graphs(steps=8), rows=st.integers(2, 5), seed=st.integers(0, 99))
def test_a_grid_of_blocks_gives_the_same(folder, graph, rows, seed):
    kinds = {node.kind for node in graph.nodes}
    if Kind.GATHER in kinds or not all(graph.nodes[i].per_unit for i in graph.outputs):
        return
    kernel = simple_kernel(graph, list(Rows)[seed % 3])
    graph, kernel = lift(graph, kernel, rows)
    values = random_values(graph, 2, seed)
    want = evaluate(graph, values, 2)
    check(graph, want, run_cpp(graph, kernel, values, 2, folder))
    check(graph, want, run_emulated(graph, kernel, values, 2, folder, seed))


#: (threads, bytes of shared memory): C++ is planned for one thread, CUDA for a block.
MACHINES = st.sampled_from([(1, 0), (1, 2**15), (32, 2**10), (64, 2**15), (128, 0)])


@SLOW
@given(
    graph=stitch_random.graphs(steps=10),
    machine=MACHINES,
    units=st.sampled_from((1, 3)),
    seed=st.integers(0, 99),
)
def test_planned_kernels_give_what_numpy_gives(folder, graph, machine, units, seed):
    """The plan's schedules, buffers and grids, not one block per unit."""
    threads, budget_bytes = machine
    values = random_values(graph, units, seed)
    want = evaluate(graph, values, units)
    # What rounding may do: how far the answer goes when the inputs are a little different.
    near = {i: _nudge(value, seed) for i, value in values.items()}
    moved = evaluate(graph, near, units)
    assume(all(np.isfinite(want[i]).all() for i in want))
    found = plan(graph, budget_bytes=budget_bytes, threads=threads)
    made = move_parameters(values, graph, found.graph)
    for kernel in found.kernels:
        if threads == 1:
            made |= run_cpp(found.graph, kernel, made, units, folder)
        else:
            made |= run_emulated(found.graph, kernel, made, units, folder, seed)
    for index, end in zip(graph.outputs, found.graph.outputs, strict=True):
        far = np.abs(moved[index] - want[index]).max(initial=0.0)
        scale = 1.0 + np.abs(want[index]).max(initial=0.0)
        np.testing.assert_allclose(made[end], want[index], rtol=0, atol=1e-4 * scale + 30 * far)


def _nudge(value: np.ndarray, seed: int) -> np.ndarray:
    if value.dtype.kind != "f":
        return value
    noise = np.random.default_rng(seed).normal(size=value.shape)
    return (value * (1 + 1e-6 * noise) + 1e-7 * noise).astype(value.dtype)


def test_no_units_touch_nothing(folder):
    b = Builder()
    graph = b.graph(b.call("exp", b.parameter(3)))
    kernel = replace(simple_kernel(graph), threads=32)
    got = run_cpp(graph, kernel, random_values(graph, 0, 0), 0, folder)
    assert got[1].shape == (0, 3)
