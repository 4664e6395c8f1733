"""Masks are recognised when they are what they seem, and left alone when not."""

from __future__ import annotations

import numpy as np
import pytest
from programs import Builder, below, bert_mask, gpt_mask, key_mask

from coissue.kernels.interpreter import interpret
from coissue.kernels.ir import ABSENT, R, T
from coissue.kernels.passes.masks import recognise_masks
from coissue.kernels.passes.pipeline import lower
from coissue.kernels.spec import check_program


def attend(make_mask, causal=False):
    """A program of one attention under the mask that `make_mask(builder, key mask)` gives."""
    b = Builder("mask")
    x = b.input("x", R, T, 4)
    keys = b.input("keys", R, T, dtype="bool", fill=key_mask)
    mask = make_mask(b, keys)
    return b.build(y=b.attend(x, mask, causal=causal and mask == ABSENT))


def places(b):
    queries = b.op("reshape", b.arange(T), out=(T, 1))
    return queries, b.op("reshape", b.arange(T), out=(1, T))


def causal(b, keys, op="le"):
    queries, along = places(b)
    return b.op(op, along, queries)


def with_keys(b, keys):
    return b.op("logical_and", causal(b, keys), b.op("reshape", keys, out=(R, 1, 1, T)))


def not_later(b, keys):
    return b.op("logical_not", causal(b, keys, "gt"))


def shifted(b, keys):
    """Also the next token: causal but for one place."""
    queries, along = places(b)
    return b.op("le", along, b.op("add", queries, b.constant(1, "i64")))


def window(b, keys):
    queries, along = places(b)
    near = b.op("lt", b.op("sub", queries, along), b.constant(3, "i64"))
    return b.op("logical_and", causal(b, keys), near)


def all_but_first(b, keys):
    """True everywhere but at key 0: an edge that the inner case does not see."""
    _, along = places(b)
    return b.op("ge", along, b.constant(1, "i64"))


def queries_masked(b, keys):
    return b.op("reshape", keys, out=(R, 1, T, 1))


def other_rows(b, keys):
    return b.op("reshape", b.op("flip", keys, dims=(0,)), out=(R, 1, 1, T))


def wrapped(b, keys):
    """Index -1 - j reads from the end; it must not be followed as a place."""
    back = b.op("sub", b.constant(-1, "i64"), b.arange(T))
    rows = b.op("reshape", b.arange(R), out=(R, 1, 1, 1))
    return b.op("index", keys, rows, b.op("reshape", back, out=(1, 1, 1, T)), dims=(0, 1))


def last_only(b, keys):
    """T - 1 - j < 1, read with negative indices: without T - 1 it would always hold."""
    back = b.op("sub", b.constant(-1, "i64"), b.arange(T))
    turned = b.op("index", b.arange(T), b.op("reshape", back, out=(1, T)), dims=(0,))
    return b.op("lt", turned, b.constant(1, "i64"))


def not_nan(b, keys):
    """x == x does not always hold for floats."""
    x = b.op("cast", b.op("reshape", keys, out=(R, 1, 1, T)), dtype="f32")
    x = b.op("div", x, x)
    return b.op("eq", x, x)


def either(b, keys):
    return b.op("logical_or", causal(b, keys), b.op("reshape", keys, out=(R, 1, 1, T)))


def float_positions(b, keys):
    queries, along = (b.op("cast", v, dtype="f32") for v in places(b))
    return b.op("le", along, queries)


def narrow(b, keys):
    """u8 wraps at 256: not followed."""
    queries, along = (b.op("cast", v, dtype="u8") for v in places(b))
    return b.op("le", along, queries)


def segments(b, keys):
    """Two packed sequences: the cumulative sum is not the same at every place."""
    starts = b.op("cast", b.op("eq", b.arange(T), b.constant(2, "i64")), dtype="i64")
    number = b.op("cumsum", starts, dim=0)
    a, c = b.op("reshape", number, out=(T, 1)), b.op("reshape", number, out=(1, T))
    return b.op("eq", a, c)


def gpt(b, keys):
    return gpt_mask(b, b.op("reshape", b.arange(T), out=(1, T)))


RECOGNISED = {
    "bert": (bert_mask, False, "key"),
    "gpt": (gpt, True, "none"),
    "causal": (causal, True, "none"),
    "not_later": (not_later, True, "none"),
    "keys": (lambda b, k: b.op("reshape", k, out=(R, 1, 1, T)), False, "key"),
    "keys_and_causal": (with_keys, True, "key"),
    "all": (lambda b, k: b.op("full", out=(T, T), dtype="bool", value=True), False, "none"),
    "two_key_masks": (
        lambda b, k: b.op("logical_and", bert_mask(b, k), bert_mask(b, b.op("logical_not", k))),
        False,
        "key",
    ),
    "flipped_keys": (other_rows, False, "key"),
}
LEFT = [
    shifted, window, all_but_first, queries_masked, wrapped, either, float_positions, narrow,
    segments, last_only, not_nan,
]  # fmt: skip


def attention_of(program):
    (op,) = [op for op in program.ops if op.name == "attention"]
    return op


def check_meaning(model, program):
    rng = np.random.default_rng(3)
    for size in ((3, 4), (1, 1), (2, 6)):
        request = model.request(*size, rng)
        found = interpret(program, request, model.weights)["y"]
        wanted = interpret(model.program, request, model.weights)["y"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RECOGNISED)
def test_is_recognised(name):
    make, is_causal, kind = RECOGNISED[name]
    model = attend(make)
    program = recognise_masks(model.program)
    check_program(program)
    op = attention_of(program)
    assert (op.attrs["causal"], op.attrs["mask"]) == (is_causal, kind)
    assert (op.inputs[3] == ABSENT) == (kind == "none")
    check_meaning(model, program)


@pytest.mark.parametrize("make", LEFT, ids=lambda make: make.__name__)
def test_is_left_alone(make):
    model = attend(make)
    program = recognise_masks(model.program)
    assert attention_of(program).attrs["mask"] == "full"
    check_meaning(model, program)


def test_a_recognised_mask_leaves_nothing_behind():
    names = {op.name for kernel in lower(attend(gpt).program).kernels for op in kernel.ops}
    assert names == {"linear", "reshape", "attention"}


def test_a_mask_over_a_lookup_of_positions_is_left_alone():
    """`index` by data is not a place, whatever the data is at capture."""
    b = Builder("lookup")
    x, keys = b.input("x", R, T, 4), b.input("keys", R, T, dtype="bool", fill=key_mask)
    spots = b.input("spots", R, T, dtype="i64", fill=below(1))
    picked = b.op("gather", keys, spots, dim=1)
    model = b.build(y=b.attend(x, b.op("reshape", picked, out=(R, 1, 1, T))))
    program = recognise_masks(model.program)
    op = attention_of(program)
    assert op.attrs["mask"] == "key"  # a key mask, but of the picked values
    assert program.ops[[o.name for o in program.ops].index("gather")].outputs[0] == op.inputs[3]
    check_meaning(model, program)


def test_long_chains_are_bounded():
    """A hostile program may be deep and wide: recognition gives up, it does not overflow."""

    def deep(b, keys):
        queries, along = places(b)
        for _ in range(3000):
            along = b.op("add", along, b.constant(0, "i64"))
        return b.op("le", along, queries)

    def wide(b, keys):
        x = b.op("logical_and", causal(b, keys), b.op("reshape", keys, out=(R, 1, 1, T)))
        for _ in range(60):
            x = b.op("logical_or", x, b.op("logical_not", x))
        return x

    assert attention_of(recognise_masks(attend(deep).program)).attrs["mask"] == "full"
    assert attention_of(recognise_masks(attend(wide).program)).attrs["mask"] == "full"
