"""IR ops as graphs of one unit: equal to the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from op_cases import CASES
from stitch_graphs import evaluate

from coissue.kernels.interpreter import interpret, store
from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.lowered import Layout
from coissue.kernels.passes.fuse import fuse
from coissue.kernels.passes.layouts import lead, prove
from coissue.kernels.stitch.graph import Kind
from coissue.kernels.stitch.lower import RULES, can_lower, lower

TAKEN = {}
for _case in CASES:
    _lowered = fuse(_case.program(), *prove(_case.program()))
    _modes = {op.outputs: m for k in _lowered.kernels for op, m in zip(k.ops, k.modes, strict=True)}
    (_op,) = _case.program().ops
    if can_lower(_op, _modes[_op.outputs], _lowered):
        TAKEN[_case.label] = (_case, _lowered)


def units_of(lowered, value, array, rows, tokens):
    """The packed value, cut into its units."""
    type_ = lowered.program.types[value]
    if lowered.layouts[value] is Layout.FIXED:
        return None
    units = rows * tokens if lowered.layouts[value] is Layout.TOKENS else rows
    assert lead(type_)
    return array.reshape(units, -1)


def run_units(lowered, graph, values, rows, tokens):
    """Each output of the graph, unit by unit."""
    found = {}
    arrays = {
        index: (units_of(lowered, node.source, values[node.source], rows, tokens), node)
        for index, node in enumerate(graph.nodes) if node.kind is Kind.PARAMETER
    }  # fmt: skip
    out = lowered.layouts[graph.nodes[graph.outputs[0]].source]
    for unit in range(rows * tokens if out is Layout.TOKENS else rows):
        parameters = {
            index: (values[node.source] if cut is None else cut[unit]).reshape(node.shape)
            for index, (cut, node) in arrays.items()
        }
        made = evaluate(graph, parameters)
        for index in graph.outputs:
            found.setdefault(graph.nodes[index].source, []).append(made[index].reshape(-1))
    return {value: np.concatenate(parts) for value, parts in found.items()}


@pytest.mark.parametrize("label", TAKEN)
def test_a_lowered_op_means_what_the_interpreter_says(label):
    case, lowered = TAKEN[label]
    (op,) = lowered.program.ops
    graph = lower(lowered, [op])
    assert all(1 not in graph.nodes[i].shape for i in graph.outputs)
    for rows, tokens in case.sizes:
        arrays = case.arrays(rows, tokens)
        wanted = interpret(case.program(), *case.feed(arrays, rows, tokens))["y0"]
        given = zip(op.inputs, arrays, strict=True)
        values = {v: store(a, lowered.program.types[v].dtype) for v, a in given if a is not None}
        found = run_units(lowered, graph, values, rows, tokens)[op.outputs[0]]
        narrow = lowered.program.types[op.outputs[0]].dtype in ("f16", "bf16")
        tolerance = 2e-2 if narrow else max(case.tolerance, 2e-6)
        np.testing.assert_allclose(
            found.astype(np.float64), wanted.reshape(-1).astype(np.float64), tolerance, tolerance
        )


def test_most_ops_are_taken():
    assert len(TAKEN) > 150
    assert {case.op for case, _ in TAKEN.values()} == set(RULES)


@pytest.mark.parametrize("label", TAKEN)
def test_arithmetic_is_never_in_16_bits(label):
    _, lowered = TAKEN[label]
    graph = lower(lowered, lowered.program.ops)
    for node in graph.nodes:
        if node.kind in (Kind.POINTWISE, Kind.REDUCE, Kind.DOT) and node.name not in (
            "cast", "where", "identity",
        ):  # fmt: skip
            assert node.dtype not in ("f16", "bf16"), node
        assert node.dtype in DTYPE_BYTES
