"""Signatures: equal for equal structure, different for any other."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from programs import MODELS, Builder, bert, mlp

from coissue.kernels.ir import Dim, R, T
from coissue.kernels.passes.pipeline import lower


def signatures(program):
    return [kernel.signature for kernel in lower(program).kernels]


@pytest.mark.parametrize("name", ["mlp", "bert", "gpt", "cnn", "dlrm"])
def test_weights_limits_and_names_do_not_matter(name):
    make = MODELS[name]
    program = make().program
    other = msgspec.structs.replace(make(seed=7).program, name="other", rows_limit=3)
    assert {w.digest for w in program.weights} != {w.digest for w in other.weights}
    ops = tuple(msgspec.structs.replace(op, where="elsewhere") for op in other.ops)
    assert signatures(program) == signatures(msgspec.structs.replace(other, ops=ops))


def block(width=4, inner=4, dtype="f32", axis=2, name="softmax", eps=1e-5, layout="nk", dims=(R, T),
          tied=False, keep=False):  # fmt: skip
    """One linear, norm and softmax, with everything a signature must see as an argument."""
    b = Builder("block")
    x = b.input("x", *dims, width, dtype=dtype)
    w = b.weight(*((inner, width) if layout == "nk" else (width, inner)), dtype=dtype)
    bias = b.weight(inner, dtype=dtype)
    y = b.op("linear", x, w, bias, layout=layout)
    gain, shift = (b.weight(inner, dtype=dtype) for _ in range(2))
    z = b.op("layer_norm", y, gain, gain if tied else shift, axes=1, eps=eps)
    z = b.op(name, z, dim=axis)
    return b.build(z=z, **({"y": y} if keep else {})).program


@pytest.mark.parametrize(
    "change",
    [
        {"width": 5}, {"inner": 5}, {"dtype": "f64"}, {"axis": 1}, {"name": "log_softmax"},
        {"eps": 1e-6}, {"layout": "kn"}, {"dims": (R, Dim(7))}, {"dims": (T, R)}, {"tied": True},
        {"dims": (Dim(2, 1), T)},
    ],
    ids=str,
)  # fmt: skip
def test_any_other_structure_has_another_signature(change):
    plain, changed = signatures(block()), signatures(block(**change))
    assert signatures(block()) == plain
    assert plain[-1] != changed[-1] or plain[0] != changed[0]
    if set(change) <= {"width", "inner", "dtype", "dims", "layout"}:
        assert plain[0] != changed[0]


def test_true_is_not_one_and_one_is_not_a_float():
    def program(value, dtype):
        b = Builder("value", tokens_limit=0)
        x = b.input("x", R, 2, dtype=dtype)
        return b.build(y=b.op("clamp", x, min=value, max=None)).program

    assert signatures(program(1, "f32")) != signatures(program(1.0, "f32"))


def test_what_is_handed_out_matters():
    def program(*names):
        b = Builder("handed", tokens_limit=0)
        x = b.op("exp", b.input("x", R, 2))
        values = {"x": x, "y": b.op("relu", x)}
        return b.build(**{name: values[name] for name in names}).program

    assert signatures(program("y")) != signatures(program("x", "y"))


def test_rows_are_not_tokens():
    """Also where both are run per request."""

    def program(dim):
        b = Builder("letters")
        b.input("sizes", R, T)
        return b.build(y=b.op("relu", b.input("x", 2, dim))).program

    assert len({signatures(program(dim))[0] for dim in (R, T, Dim(1), Dim(1, 1, 1))}) == 4


def test_equal_kernels_of_one_program_share_a_signature():
    found = [k.signature for k in lower(bert(layers=2).program).kernels]
    assert len(found) - len(set(found)) >= 8


def test_kernels_of_one_signature_correspond_by_position():
    """Also when the values have other numbers, as in the second layer."""
    lowered = lower(mlp((4, 4, 4, 4)).program)
    by_signature = {}
    for kernel in lowered.kernels:
        first = by_signature.setdefault(kernel.signature, kernel)
        for field in ("inputs", "outputs", "weights"):
            pairs = zip(getattr(first, field), getattr(kernel, field), strict=True)
            assert all(lowered.program.types[a] == lowered.program.types[b] for a, b in pairs)
        assert dataclasses.replace(first, signature="").kind is kernel.kind
    assert len(by_signature) == 2
