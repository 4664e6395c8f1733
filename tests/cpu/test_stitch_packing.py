"""Short units in one block (H5): which are packed, how many, and what that computes."""

from __future__ import annotations

import numpy as np
import pytest
import stitch_random
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stitch_check import check_plan
from stitch_graphs import random_values
from stitch_reference import Builder, evaluate, from_memory, layer_norm
from stitch_run import Emulated, make_arrays

from coissue.kernels.stitch.emit import emit
from coissue.kernels.stitch.graph import Kind
from coissue.kernels.stitch.packing import pack_units
from coissue.kernels.stitch.price import cpu, gpu
from coissue.kernels.stitch.search import plan

GPU = gpu(256)


def counts(graph, units, machine=GPU):
    return [count for _, count in pack_units(graph, machine, units)]


def test_as_many_units_as_fill_a_block():
    graph = layer_norm(1, 32)
    assert counts(graph, 4096) == [8]
    assert counts(graph, 5) == [4], "a launch has no more than five"
    assert counts(graph, 1) == []
    assert counts(layer_norm(4, 64), 4096) == [], "one unit fills a block"
    assert counts(graph, 4096, cpu()) == []


def test_lookups_in_shared_tables_are_packed_along_the_first_axis_only():
    for axis, per_unit, wanted in ((0, False, [32]), (1, False, []), (0, True, [])):
        b = Builder()
        table = b.parameter(6, 2, per_unit=per_unit)
        picks = b.parameter(4, dtype="i64")
        graph = b.graph(b.gather(table, picks, axis))
        assert counts(graph, 4096) == (wanted or []), (axis, per_unit)


@settings(
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(graph=stitch_random.graphs(steps=8), seed=st.integers(0, 99))
def test_a_packed_graph_means_the_same(graph, seed):
    for packed, count in pack_units(graph, gpu(2048), 64):
        values = random_values(graph, 2 * count, seed)
        want = evaluate(graph, values, 2 * count)
        places = (i for i, node in enumerate(packed.nodes) if node.kind is Kind.PARAMETER)
        given_ = (i for i, node in enumerate(graph.nodes) if node.kind is Kind.PARAMETER)
        moved = {
            new: values[old].reshape(2, *packed.nodes[new].shape)
            if graph.nodes[old].per_unit
            else values[old]
            for new, old in zip(places, given_, strict=True)
        }
        got = evaluate(packed, moved, 2)
        for new, old in zip(packed.outputs, graph.outputs, strict=True):
            np.testing.assert_array_equal(got[new].reshape(want[old].shape), want[old])


@pytest.mark.parametrize("units", [1, 7, 8, 29])
def test_packed_and_left_over_units_share_a_launch(tmp_path, units):
    """One table of segments: whole packs by the packed kernel, the rest by that of one unit."""
    graph = layer_norm(1, 32)
    packs, single = plan(graph, units=4096), plan(graph)
    check_plan(packs, 48 * 1024)
    assert packs.units == 8
    assert [kernel.blocks for kernel in packs.kernels] == [1], "eight units, one block"
    values = random_values(graph, units, 3)
    (output,) = graph.outputs
    want = evaluate(graph, values, units)[output]
    kernels = [packs.kernels[0], single.kernels[0]]
    graphs = [packs.graph, graph]
    names = ("packed", "single")
    triples = zip(graphs, kernels, names, strict=True)
    emulated = Emulated([emit(*triple) for triple in triples], tmp_path)
    inputs, outputs = make_arrays(graph, single.kernels[0], values, units)
    whole = units // packs.units
    first = whole * packs.units
    per_unit = [graph.nodes[i].per_unit for i in single.kernels[0].inputs]
    rest = [x[first:] if one else x for x, one in zip(inputs, per_unit, strict=True)]
    parts = [(0, whole, inputs, outputs), (1, units - first, rest, [y[first:] for y in outputs])]
    assert emulated.launch([part for part in parts if part[1]], seed=units) == 0
    found = from_memory(outputs[0], graph.nodes[output].dtype)
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("size", "units", "blocks", "packed"), [(4, 64, 1, 64), (32, 1, 1, 1), (1536, 9, 6, 1)]
)
def test_a_block_has_work_for_its_threads(size, units, blocks, packed):
    """A block has no more of the memory's speed than its busy threads ask for."""
    b = Builder()
    made = plan(b.graph(b.call("tanh", b.parameter(size))), units=units)
    assert ([kernel.blocks for kernel in made.kernels], made.units) == ([blocks], packed)
