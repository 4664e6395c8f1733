"""For random programs and any mix of segments: together is as each alone, bit for bit.

The programs are made of integer ops (exact in any order of summation) and mix rows, tokens and
features freely, so most of what the row-axis proof must not pack occurs in them.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import run_packed
from programs import ONE, RT, Builder, below

from coissue.kernels.interpreter import InterpretError, interpret
from coissue.kernels.ir import R, T
from coissue.kernels.passes.link import cut
from coissue.kernels.passes.pipeline import REWRITES, lower
from coissue.kernels.spec import check_program

BINARY = ("add", "sub", "mul", "maximum", "minimum", "eq", "lt", "ge")
REDUCE = ("sum", "amax", "amin", "prod", "any", "all")
FIRST = {"start": 0, "stop": 1, "step": 1}


def grow(b: Builder, pool: list[int], kind: int, x: int, y: int, pick: int) -> int | None:
    """One op on `x` (and `y`), if it fits."""
    dims = b.types[x].shape
    rank = len(dims)
    axis = pick % max(rank, 1)
    if kind == 0:
        return b.try_op(BINARY[pick % len(BINARY)], x, y)
    if kind == 1 and rank:
        axes = tuple(d for d in range(rank) if pick >> d & 1) or (axis,)
        return b.try_op(REDUCE[pick % len(REDUCE)], x, dims=axes, keepdim=bool(pick & 8))
    if kind == 2 and rank:
        order = tuple(np.random.default_rng(pick).permutation(rank).tolist())
        return b.try_op("permute", x, dims=order)
    if kind == 3:
        flat = [(R, ONE, *dims[1:]), (RT, *dims[2:]), (R, T, *dims[1:]), (*dims, ONE), (ONE, *dims)]
        return b.try_op("reshape", x, out=flat[pick % len(flat)])
    if kind == 4:
        wide = [(R, T, 3), (R, 3), (R, T, *dims[2:]), (R, *dims[1:]), (2, *dims)]
        return b.try_op("expand", x, out=wide[pick % len(wide)])
    if kind == 5 and rank:
        return b.try_op("select", x, dim=axis, index=-(pick & 1))
    if kind == 6 and rank:
        name = ("cumsum", "argmax", "flip", "concat", "slice", "gather")[pick % 6]
        extra = {"flip": {"dims": (axis,)}, "argmax": {"dim": axis, "keepdim": False}}
        attrs = extra.get(name, {"dim": axis} | (FIRST if name == "slice" else {}))
        if name == "gather":
            y = b.op("mul", y, b.constant(0, b.types[y].dtype))
        return b.try_op(name, x, *((y,) if name in ("concat", "gather") else ()), **attrs)
    if kind == 7 and rank and dims[-1].is_fixed:
        return b.try_op("linear", x, b.weight(3, dims[-1].scale, dtype="i64", scale=3), layout="nk")
    if kind == 8:
        return b.try_op("matmul", x, y)
    if kind == 9 and rank:
        place = b.op(
            "reshape", b.arange((R, T)[pick & 1]), out=((R, T)[pick & 1], *[1] * (pick % 3))
        )
        return b.try_op("index", x, place, dims=(axis,))
    if kind == 10:
        return b.try_op("where", b.op("gt", x, b.constant(0, b.types[x].dtype)), x, y)
    if kind == 11:
        low = b.op("clamp", x, min=0, max=10) if b.types[x].dtype == "i64" else x
        return b.try_op("embedding", b.weight(11, 3, dtype="i64", scale=3), low)
    return None


def build(steps):
    b = Builder("random", tokens_limit=8)
    pool = [
        b.input("rows", R, 3, dtype="i64", fill=below(5)),
        b.input("tokens", R, T, 3, dtype="i64", fill=below(5)),
        b.input("ids", R, T, dtype="i64", fill=below(5)),
        b.arange(T),
        b.op("reshape", b.arange(R), out=(R, 1)),
        b.weight(3, dtype="i64", scale=3),
    ]
    for kind, first, second, pick in steps:
        x, y = pool[-1 - first % len(pool)], pool[-1 - second % len(pool)]
        value = grow(b, pool, kind, x, y, pick)
        if value is None or len(b.types[value].shape) > 4:
            continue
        if max((d.rows + d.tokens for d in b.types[value].shape), default=0) > 3:
            continue
        pool.append(value if b.types[value].dtype == "i64" else b.op("cast", value, dtype="i64"))
    return b.build(y=pool[-1], z=pool[len(pool) // 2])


STEPS = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 7), st.integers(0, 7), st.integers(0, 63)),
    min_size=1,
    max_size=14,
)
SIZES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, sizes=SIZES, seed=st.integers(0, 999))
def test_together_is_as_each_alone(steps, sizes, seed):
    model = build(steps)
    rng = np.random.default_rng(seed)
    requests = [model.request(*size, rng) for size in sizes]
    try:
        wanted = [interpret(model.program, request, model.weights) for request in requests]
    except InterpretError:  # an index that exists for some sizes only
        return
    program = model.program
    for rewrite in REWRITES:
        program = rewrite(program)
        check_program(program)
    lowered = lower(model.program)
    joined = cut({"a": lowered}, lambda kernel: seed, 1500)["a"]
    for form in (lowered, joined):
        for found, alone in zip(
            run_packed(form, requests, model.weights, seed), wanted, strict=True
        ):
            for name in alone:
                np.testing.assert_array_equal(found[name], alone[name])


def test_random_programs_have_packed_and_unpacked_ops():
    """The property above would be empty if the random programs were all one or the other."""
    rng = np.random.default_rng(0)
    ops, packed = 0, 0
    for _ in range(60):
        steps = [tuple(map(int, rng.integers(0, (12, 8, 8, 64)))) for _ in range(12)]
        for kernel in lower(build(steps).program).kernels:
            modes = [mode.value for mode in kernel.modes]
            ops += len(modes)
            packed += modes.count("packed")
    assert 0.2 < packed / ops < 0.9
