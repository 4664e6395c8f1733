"""Long rows over several blocks (H5): which are split, into what, and what that computes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stitch_blocks import move_parameters
from stitch_check import check_plan
from stitch_graphs import random_values
from stitch_reference import Builder, evaluate
from stitch_run import run_emulated

from coissue.kernels.stitch.graph import Kind
from coissue.kernels.stitch.plan import Rows
from coissue.kernels.stitch.price import cpu, gpu
from coissue.kernels.stitch.search import plan
from coissue.kernels.stitch.split import LONG, split_long_rows

GPU = gpu(256)


def reduction(shape, axes, name="sum"):
    b = Builder()
    return b.graph(b.reduce(name, b.parameter(*shape), *axes))


def reduces(graph):
    return [node for node in graph.nodes if node.kind is Kind.REDUCE]


@pytest.mark.parametrize(
    ("shape", "axes", "parts"),
    [
        ((30000,), (0,), (100,)),  # 117 blocks would have 256 elements each; 100 divides
        ((64, 30000), (1,), (64, 12)),  # 864 blocks run at once
        ((30000, 64), (0,), (12, 64)),
        ((4, 8, 512), (1, 2), (4, 8)),  # the outer of the axes reduced
        ((3, 4096, 5), (1,), (3, 16, 5)),
    ],
)
def test_few_long_rows_are_split(shape, axes, parts):
    (graph,) = split_long_rows(reduction(shape, axes), GPU)
    first, second = reduces(graph)
    assert first.shape == parts
    assert second.shape == tuple(e for axis, e in enumerate(shape) if axis not in axes)
    assert graph.outputs == (len(graph.nodes) - 1,)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((LONG,), (0,)), ((1000, 4096), (1,)), ((4099,), (0,)), ((0, 4096), (1,)), ((3, 0), (1,))],
    ids=["short", "enough-rows", "prime", "no-rows", "empty-rows"],
)
def test_others_are_not(shape, axes):
    assert not list(split_long_rows(reduction(shape, axes), GPU))


def test_a_cpu_splits_none():
    assert not list(split_long_rows(reduction((30000,), (0,)), cpu()))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 6),
    length=st.integers(2, 40).map(lambda n: n * 120),
    behind=st.integers(1, 4),
    name=st.sampled_from(("sum", "amax", "amin")),
    seed=st.integers(0, 99),
)
def test_a_split_graph_means_the_same(rows, length, behind, name, seed):
    graph = reduction((rows, length, behind), (1,), name)
    values = random_values(graph, 2, seed)
    (want,) = (evaluate(graph, values, 2)[i] for i in graph.outputs)
    for split in split_long_rows(graph, GPU):
        (got,) = (evaluate(split, values, 2)[i] for i in split.outputs)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * math.sqrt(length))


def softmax(length):
    b = Builder()
    x = b.parameter(length)
    top = b.broadcast(b.reduce("amax", x, 0), (length,), ())
    raised = b.call("exp", b.call("sub", x, top))
    return b.graph(b.call("div", raised, b.broadcast(b.reduce("sum", raised, 0), (length,), ())))


def test_a_split_is_taken_where_it_is_cheaper():
    """One block reads 2 MB alone for a quarter of a millisecond; five launches take 15 us."""
    made, one = plan(softmax(2**19)), plan(softmax(2**11))
    check_plan(made, 48 * 1024)
    assert max(kernel.blocks for kernel in made.kernels) > 100
    assert [kernel.blocks for kernel in one.kernels] == [1]


@pytest.mark.parametrize("rows", [1, 3])
def test_planned_pieces_give_what_numpy_gives(tmp_path, rows):
    b = Builder()
    x = b.parameter(rows, 240_000)
    total = b.reduce("sum", b.call("mul", x, x), 1)
    graph = b.graph(b.call("add", total, b.parameter(rows)))
    values, (output,) = random_values(graph, 1, rows), graph.outputs
    want = evaluate(graph, values, 1)[output]
    made = plan(graph)
    assert len(made.kernels) == 2
    assert made.kernels[0].blocks > rows
    found = move_parameters(values, graph, made.graph)
    for kernel in made.kernels:
        assert Rows.THREAD not in kernel.rows.values() or kernel is not made.kernels[0]
        found |= run_emulated(made.graph, kernel, found, 1, tmp_path, rows)
    (output,) = made.graph.outputs
    np.testing.assert_allclose(found[output], want, rtol=1e-5)
