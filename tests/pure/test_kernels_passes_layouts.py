"""The row-axis proof, rule by rule: what is packed, what is ragged, what is run per request."""

from __future__ import annotations

import pytest
from programs import MODELS, ONE, RT, Builder, batch_statistics, below

from coissue.kernels.ir import ABSENT, Dim, R, T, Type, fixed
from coissue.kernels.lowered import Layout, Mode
from coissue.kernels.passes.layouts import layout_of, prove
from coissue.kernels.passes.pipeline import lower


@pytest.mark.parametrize(
    ("dims", "layout"),
    [
        ((R,), "rows"), ((R, Dim(3)), "rows"), ((Dim(4, 1), Dim(3)), "rows"),
        ((R, T), "tokens"), ((R, T, Dim(3), Dim(2)), "tokens"), ((Dim(2, 1, 1), Dim(3)), "tokens"),
        ((), "each"), (fixed(3), "each"), ((T,), "each"), ((ONE, T, Dim(3)), "each"),
        ((T, R), "each"), ((R, Dim(3), T), "each"), ((R, T, T), "each"), ((Dim(2), R), "each"),
        ((Dim(2, 1), T), "each"), ((R, R), "each"), ((Dim(1, 2), Dim(3)), "each"),
    ],
)  # fmt: skip
def test_a_layout_follows_from_the_type(dims, layout):
    assert layout_of(Type(dims, "f32")) is Layout(layout)


class Case(Builder):
    """Inputs of every layout, ready for one op."""

    def __init__(self):
        super().__init__()
        self.x = self.input("x", R, 4)
        self.t = self.input("t", R, T, 4)
        self.ids = self.input("ids", R, T, dtype="i64", fill=below(4))
        self.flat = self.op("reshape", self.t, out=(RT, 4))
        self.image = self.input("image", R, 4, 6, 6)
        self.table = self.op("reshape", self.arange(T), out=(ONE, T))
        self.w = self.weight(4, 4)


WINDOW = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
ATTENTION = {"causal": False, "scale": 1.0, "layout": "bshd", "mask": "none"}
PACKED = {
    "linear": lambda b: b.op("linear", b.t, b.w, ABSENT, layout="kn"),
    "linear_flat": lambda b: b.op("linear", b.flat, b.w, ABSENT, layout="kn"),
    "norm": lambda b: b.op("layer_norm", b.t, ABSENT, ABSENT, axes=1, eps=0.1),
    "softmax": lambda b: b.op("softmax", b.x, dim=1),
    "softmax_tokens": lambda b: b.op("softmax", b.t, dim=2),
    "sum": lambda b: b.op("sum", b.t, dims=(2,), keepdim=False),
    "bias": lambda b: b.op("add", b.t, b.weight(1, 1, 4)),
    "merge": lambda b: b.op("reshape", b.t, out=(RT, 2, 2)),
    "split_rows": lambda b: b.op("reshape", b.x, out=(Dim(2, 1), 2)),
    "heads": lambda b: b.op("permute", b.op("reshape", b.t, out=(R, T, 2, 2)), dims=(0, 1, 3, 2)),
    "conv": lambda b: b.op("conv", b.image, b.weight(4, 4, 3, 3), ABSENT, groups=1, **WINDOW),
    "embedding": lambda b: b.op("embedding", b.w, b.ids),
    "batch": lambda b: b.op("matmul", b.image, b.image),
    "spread": lambda b: b.op("expand", b.weight(1, 1, 4), out=(R, T, 4)),
    "features": lambda b: b.op("index", b.t, b.weight(array=[1, 0], dtype="i64"), dims=(2,)),
}
SEGMENTS = {
    "mean_pool": lambda b: b.op("mean", b.t, dims=(1,), keepdim=False),
    "first": lambda b: b.op("select", b.t, dim=1, index=0),
    "last": lambda b: b.op("select", b.t, dim=1, index=-1),
    "bag": lambda b: b.op("embedding_bag", b.w, b.ids, mode="sum"),
    "attention": lambda b: b.op(
        "attention", *[b.op("reshape", b.t, out=(R, T, 2, 2))] * 3, ABSENT, **ATTENTION
    ),
    "row_to_tokens": lambda b: b.op("expand", b.op("reshape", b.x, out=(R, 1, 4)), out=(R, T, 4)),
}
EACH = {
    "mean_rows": lambda b: b.op("mean", b.x, dims=(0,), keepdim=True),
    "mean_rows_of_tokens": lambda b: b.op("mean", b.t, dims=(0,), keepdim=True),
    "mean_all_tokens": lambda b: b.op("mean", b.flat, dims=(0,), keepdim=True),
    "softmax_rows": lambda b: b.op("softmax", b.x, dim=0),
    "softmax_over_tokens": lambda b: b.op("softmax", b.t, dim=1),
    "norm_over_tokens": lambda b: b.op("layer_norm", b.t, ABSENT, ABSENT, axes=2, eps=0.1),
    "flip_rows": lambda b: b.op("flip", b.x, dims=(0,)),
    "flip_tokens": lambda b: b.op("flip", b.t, dims=(1,)),
    "row_number": lambda b: b.arange(R),
    "first_row": lambda b: b.op("select", b.x, dim=0, index=0),
    "row_products": lambda b: b.op("matmul", b.x, b.op("permute", b.x, dims=(1, 0))),
    "cross": lambda b: b.op("sub", b.op("reshape", b.x, out=(R, 1, 4)), b.x),
    "row_values": lambda b: b.op("add", b.t, b.op("reshape", b.x, out=(R, 1, 4))),
    "positions": lambda b: b.op("add", b.ids, b.table),
    "all_rows": lambda b: b.op("index", b.x, b.arange(R), dims=(0,)),
    "by_token": lambda b: b.op("gather", b.t, b.op("cast", b.t, dtype="i64"), dim=1),
    "cumsum": lambda b: b.op("cumsum", b.ids, dim=1),
    "tokens_first": lambda b: b.op("permute", b.t, dims=(1, 0, 2)),
    "dynamic_table": lambda b: b.op("embedding", b.x, b.ids),
    "dynamic_weight": lambda b: b.op(
        "linear", b.x, b.op("matmul", b.op("permute", b.x, dims=(1, 0)), b.x), layout="kn"
    ),
    "rows_joined": lambda b: b.op("concat", b.x, b.x, dim=0),
    "rows_weighted": lambda b: b.op("linear", b.op("permute", b.x, dims=(1, 0)), b.x, layout="kn"),
    "channels": lambda b: b.op(
        "batch_norm", b.x, b.op("mean", b.x, dims=(0,), keepdim=False), b.weight(4), eps=0.1
    ),
}


def mode_of(make) -> Mode:
    b = Case()
    model = b.build(y=make(b))
    _, modes = prove(model.program)
    return modes[-1]


@pytest.mark.parametrize("name", PACKED)
def test_is_packed(name):
    assert mode_of(PACKED[name]) is Mode.PACKED


@pytest.mark.parametrize("name", SEGMENTS)
def test_is_ragged(name):
    assert mode_of(SEGMENTS[name]) is Mode.SEGMENTS


@pytest.mark.parametrize("name", EACH)
def test_is_run_per_request(name):
    assert mode_of(EACH[name]) is Mode.EACH


def test_statistics_over_rows_are_never_packed():
    modes = {
        op.name: mode
        for kernel in lower(batch_statistics().program).kernels
        for op, mode in zip(kernel.ops, kernel.modes, strict=True)
    }
    for name in ("mean", "arange", "sum", "flip", "cumsum"):
        assert modes[name] is Mode.EACH
    assert modes["linear"] is Mode.PACKED


#: Those that mix a request's rows, and one made of views of weights, are no real models.
UNREAL = {"statistics", "gram", "turned"}


@pytest.mark.parametrize("name", [n for n in MODELS if n not in UNREAL])
def test_only_positions_are_run_per_request_in_real_models(name):
    lowered = lower(MODELS[name]().program)
    each = {
        op.name
        for kernel in lowered.kernels
        for op, mode in zip(kernel.ops, kernel.modes, strict=True)
        if mode is Mode.EACH
    }
    assert each <= {"slice", "gather", "expand", "arange"}
    for kernel in lowered.kernels:
        for op in kernel.ops:
            assert op.name != "expand" or lowered.program.types[op.outputs[0]].dtype == "i64"


def test_broadcast_operands_are_expanded_before_the_op():
    b = Case()
    centred = b.op("sub", b.t, b.op("mean", b.t, dims=(1,), keepdim=True))
    places = b.op("cast", b.op("reshape", b.arange(T), out=(1, T, 1)), dtype="f32")
    lowered = lower(b.build(y=b.op("mul", centred, places)).program)
    modes = [
        (op.name, mode.value)
        for kernel in lowered.kernels
        for op, mode in zip(kernel.ops, kernel.modes, strict=True)
    ]
    assert ("sub", "packed") in modes
    assert ("mul", "packed") in modes
    assert ("expand", "segments") in modes
    assert ("expand", "each") in modes
