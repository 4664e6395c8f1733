"""Canonical forms and kernels: what becomes one launch, in which order, and what it frees."""

from __future__ import annotations

import numpy as np
import pytest
from programs import MODELS, Builder, bert, cnn, gelu_by_hand, gpt, lstm

from coissue.kernels.interpreter import interpret
from coissue.kernels.ir import ABSENT, R, T
from coissue.kernels.passes.canonicalise import canonicalise
from coissue.kernels.passes.link import cut
from coissue.kernels.passes.pipeline import lower
from coissue.kernels.spec import check_program


def steps(lowered):
    return [" ".join(op.name for op in kernel.ops) for kernel in lowered.kernels]


def test_convolution_batch_norm_and_activation_are_one_kernel():
    assert steps(lower(cnn().program)) == [
        "conv batch_norm relu",
        "conv batch_norm clamp",
        "conv batch_norm",
        "conv batch_norm add relu",
        "adaptive_avg_pool reshape",
        "linear",
    ]


def test_a_transformer_layer_stays_token_by_token():
    found = steps(lower(gpt().program))
    assert found[3:] == [
        "layer_norm",
        "linear reshape linear reshape linear reshape",
        "attention reshape",
        "linear add",
        "layer_norm reshape",
        "linear reshape gelu",
        "linear add",
        "layer_norm",
    ]


def test_a_layer_more_is_seven_kernels_more():
    one, two = (len(lower(bert(layers).program).kernels) for layers in (1, 2))
    assert two - one == 7


def test_the_last_state_is_read_from_the_tokens():
    lowered = lower(lstm().program)
    cell = lowered.kernels[0]
    assert cell.outputs == cell.ops[0].outputs[:1]


@pytest.mark.parametrize("index", range(4))
def test_each_state_is_what_it_was(index):
    """Only those of the last layer are in y."""
    b = Builder("states")
    x = b.input("x", R, T, 3)
    sizes = [(16, into) for layer in (3, 8) for _ in range(2) for into in (layer, 4)]
    attrs = {"hidden": 4, "layers": 2, "bidirectional": True, "bias": False}
    _, h, _ = b.op("lstm", x, *(b.weight(*size) for size in sizes), **attrs)
    model = b.build(y=b.op("select", h, dim=0, index=index))
    program = canonicalise(model.program)
    from_y = program.ops[0].outputs[1] not in [v for op in program.ops for v in op.inputs]
    assert from_y == (index >= 2)
    request = model.request(2, 5, np.random.default_rng(0))
    found, wanted = (interpret(p, request, model.weights)["y"] for p in (program, model.program))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("factor", [0.5, 0.044715])
def test_only_gelu_is_gelu(factor):
    b = Builder("gelu", tokens_limit=0)
    y = gelu_by_hand(b, b.input("x", R, 4), factor)
    names = [op.name for op in canonicalise(b.build(y=y).program).ops]
    assert (names == ["gelu"]) == (factor == 0.044715)


def test_position_lookups_are_of_indices_per_token():
    lowered = lower(bert().program)
    for kernel in lowered.kernels:
        for op in kernel.ops:
            if op.name == "embedding":
                assert lowered.program.types[op.outputs[0]].shape[:2] == (R, T)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_read_what_is_there_and_drop_it_once(name, joined):
    lowered = lower(MODELS[name]().program)
    if joined:
        lowered = cut({"a": lowered}, lambda kernel: 1, 3)["a"]
    live = {port.value for port in lowered.program.inputs}
    weights = {weight.value for weight in lowered.program.weights}
    seen_ops = []
    for index, kernel in enumerate(lowered.kernels):
        assert live.issuperset(kernel.inputs)
        assert weights.issuperset(kernel.weights)
        assert all(producer < index for producer in lowered.producers[index])
        made = {value for op in kernel.ops for value in op.outputs}
        assert made.issuperset(kernel.outputs)
        live |= set(kernel.outputs)
        assert live.issuperset(lowered.drops[index])
        live -= set(lowered.drops[index])
        seen_ops += [
            op.outputs for op, m in zip(kernel.ops, kernel.modes, strict=True) if m.value != "once"
        ]
    assert live == {port.value for port in lowered.program.outputs}
    assert len(seen_ops) == len(set(seen_ops))


def test_what_does_nothing_goes():
    b = Builder("nothing", tokens_limit=0)
    x = b.input("x", R, 2, 3)
    y = b.op("permute", b.op("permute", x, dims=(0, 2, 1)), dims=(0, 2, 1))
    y = b.op("reshape", b.op("reshape", b.op("identity", y), out=(R, 6)), out=(R, 2, 3))
    y = b.op("cast", b.op("expand", y, out=(R, 2, 3)), dtype="f32")
    y = b.op(
        "slice",
        b.op("pad", y, out=(), pads=(0, 0, 0, 0), value=0.0),
        dim=1,
        start=0,
        stop=2,
        step=1,
    )
    unused = b.op("exp", x)
    model = b.build(y=b.op("relu", y))
    assert unused in [op.outputs[0] for op in model.program.ops]
    assert [op.name for op in canonicalise(model.program).ops] == ["relu"]


@pytest.mark.parametrize(
    ("pads", "value", "folds"),
    [
        ((1, 1, 2, 2), 0.0, True),
        ((1, 1), 0.0, True),
        ((0, 1, 0, 1), 0.0, False),
        ((1, 1, 1, 1), 1.0, False),
        ((1, 1, 1, 1, 1, 1), 0.0, False),
    ],
)
def test_an_even_zero_pad_is_the_padding_of_the_convolution(pads, value, folds):
    b = Builder("pad", tokens_limit=0)
    y = b.op("pad", b.input("x", R, 2, 5, 6), out=(), pads=pads, value=value)
    channels = b.types[y].shape[1].scale
    window = {"stride": (1, 2), "padding": (1, 0), "dilation": (1, 1), "groups": 1}
    w = b.weight(3, channels, 3, 3)
    model = b.build(y=b.op("conv", y, w, ABSENT, out=(), **window))
    program = canonicalise(model.program)
    check_program(program)
    assert ("pad" not in [op.name for op in program.ops]) == folds
    request = model.request(2, 0, np.random.default_rng(0))
    found, wanted = (interpret(p, request, model.weights)["y"] for p in (program, model.program))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_negative_zero_survives_adding_zero():
    b = Builder("zero", tokens_limit=0)
    x = b.input("x", R, 2)
    program = b.build(y=b.op("add", x, b.constant(0.0))).program
    assert "add" in [op.name for op in canonicalise(program).ops]


def test_a_second_reader_ends_the_epilogue():
    b = Builder("shared", tokens_limit=0)
    h = b.linear(b.input("x", R, 4), 4)
    model = b.build(y=b.op("add", b.op("relu", h), b.op("exp", h)))
    assert steps(lower(model.program)) == ["linear", "relu exp add"]


def test_an_output_in_the_middle_is_handed_out():
    b = Builder("middle", tokens_limit=0)
    h = b.linear(b.input("x", R, 4), 4)
    lowered = lower(b.build(h=h, y=b.op("relu", h)).program)
    assert steps(lowered) == ["linear", "relu"]
    assert lowered.drops == ((0,), ())


def test_products_of_one_value_are_one_kernel_unless_one_waits_for_another():
    b = Builder("siblings", tokens_limit=0)
    x = b.input("x", R, 4)
    both = [b.op("relu", b.linear(x, 3)), b.linear(x, 5)]
    gated = b.op("mul", b.linear(x, 6), b.op("sigmoid", b.op("softmax", b.linear(x, 6), dim=1)))
    model = b.build(a=both[0], b=both[1], gated=gated, other=b.linear(b.op("exp", x), 4))
    found = steps(lower(model.program))
    assert sorted(found) == [
        "exp",
        "linear",
        "linear mul",
        "linear relu linear linear",
        "softmax sigmoid",
    ]


def test_a_chain_around_a_memory_bound_op_is_not_a_circle():
    """Stitching both ends together would make the kernel wait for itself."""
    b = Builder("circle", tokens_limit=0)
    x = b.op("exp", b.input("x", R, 4))
    y = b.op("softmax", b.linear(x, 4), dim=1)
    model = b.build(y=b.op("add", b.op("exp", x), y))
    assert steps(lower(model.program)) == ["exp exp", "linear", "softmax add"]


def test_constants_are_repeated_where_they_are_needed():
    b = Builder("constants", tokens_limit=0)
    two = b.constant(2.0)
    x = b.op("mul", b.input("x", R, 4), two)
    y = b.op("div", b.linear(x, 4), two)
    lowered = lower(b.build(y=y, two=two).program)
    two = lowered.program.outputs[1].value
    assert steps(lowered) == ["constant mul", "constant linear div", "constant"]
    assert all(two not in kernel.inputs for kernel in lowered.kernels)
    assert [two in kernel.outputs for kernel in lowered.kernels] == [False, False, True]
