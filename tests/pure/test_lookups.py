"""The range that lookups leave to the inputs of a program."""

from __future__ import annotations

import pytest

from coissue.deployments.lookups import find_bounds
from coissue.kernels.ir import Op, Port, Program, R, T, Type, Weight, fixed

IDS, TABLE = Type((R, T), "i64"), Type(fixed(50, 8), "f32")


def program(*ops, dtype="i64"):
    """Values: 0 the input, 1 a table of 50 rows, 2 one of 20, then one output per op."""
    types = (Type((R, T), dtype), TABLE, Type(fixed(20, 8), "f32"), *[IDS] * len(ops))
    made = tuple(Op(name, inputs, (3 + index,), {}) for index, (name, inputs) in enumerate(ops))
    weights = (Weight("big", 1, "a"), Weight("small", 2, "b"))
    ends = (Port("output", types.index(types[-1])),)
    return Program("m", types, (Port("ids", 0),), weights, made, ends, rows_limit=8)


@pytest.mark.parametrize(
    ("ops", "bounds"),
    [
        ([("embedding", (1, 0))], {0: 50}),
        ([("embedding_bag", (1, 0))], {0: 50}),
        ([("embedding", (1, 0)), ("embedding", (2, 0))], {0: 20}),
        ([("reshape", (0,)), ("cast", (3,)), ("embedding", (1, 4))], {0: 50}),
        # What is computed, or picked out, says nothing of the input as a whole.
        ([("add", (0, 0)), ("embedding", (1, 3))], {}),
        ([("slice", (0,)), ("embedding", (1, 3))], {}),
        ([("add", (0, 0))], {}),
    ],
)
def test_range_of_an_input(ops, bounds):
    assert find_bounds(program(*ops)) == bounds


def test_only_integers_are_indices():
    assert find_bounds(program(("cast", (0,)), ("embedding", (1, 3)), dtype="f32")) == {}
