"""Requests against their tenant: what is accepted, and what each refusal names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coissue.deployments.channel.checking import (
    InferError,
    check_inputs,
    check_types,
    check_values,
    render_shape,
)
from coissue.deployments.channel.frames import NUMPY_DTYPES, PortInfo, TenantInfo
from coissue.kernels.ir import Dim, R, T, fixed

TEXT = TenantInfo(
    "text",
    1,
    "ready",
    (PortInfo("ids", "i64", (R, T)), PortInfo("mask", "bool", (R, T))),
    rows_limit=8,
    tokens_limit=16,
)
TABLE = TenantInfo("table", 1, "ready", (PortInfo("x", "f32", (R, *fixed(4))),), rows_limit=8)


def text(rows=2, tokens=3, **changed):
    inputs = {"ids": np.zeros((rows, tokens), np.int64), "mask": np.zeros((rows, tokens), bool)}
    return {**inputs, **changed}


def refusal(info, inputs) -> InferError:
    with pytest.raises(InferError) as error:
        check_inputs(info, inputs)
    return error.value


@given(st.integers(1, 8), st.integers(1, 16))
def test_rows_and_tokens_are_found(rows, tokens):
    assert check_inputs(TEXT, text(rows, tokens)) == (rows, tokens)


def test_without_a_token_axis_tokens_are_zero():
    assert check_inputs(TABLE, {"x": np.zeros((8, 4), np.float32)}) == (8, 0)


@pytest.mark.parametrize(
    ("shape", "given_shape", "found"),
    [
        ((Dim(2, rows=1), *fixed(3)), (6, 3), (3, 0)),
        ((Dim(1, rows=1, tokens=1), T), (12, 4), (3, 4)),
        ((Dim(1, rows=1, tokens=1), R), (12, 4), (4, 3)),
        ((R, Dim(3, tokens=1)), (2, 12), (2, 4)),
        ((R, T, T), (2, 5, 5), (2, 5)),
    ],
)
def test_multiples_and_products(shape, given_shape, found):
    tokens_limit = 99 if found[1] else 0
    ports = (PortInfo("x", "f32", shape),)
    info = TenantInfo("m", 1, "ready", ports, rows_limit=99, tokens_limit=tokens_limit)
    assert check_types(info, [("f32", given_shape)]) == found


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (text(extra=np.zeros(1)), ["'extra'", "'ids', 'mask'"]),
        ({"ids": np.zeros((2, 3), np.int64)}, ["'mask'", "missing"]),
        ({}, ["'ids'", "missing"]),
        (text(ids=np.zeros((2, 3), np.int32)), ["'ids'", "i32", "i64"]),
        (text(ids=np.zeros((2, 3), ">i8")), ["'ids'", ">i8", "i64"]),
        (text(ids=np.array([["a"]])), ["'ids'", "<U1", "i64"]),
        (text(mask=np.zeros(2, bool)), ["'mask'", "[2]", "[R, T]"]),
        (text(mask=np.zeros((3, 3), bool)), ["'mask'", "axis 0", "3", "R=2"]),
        (text(mask=np.zeros((2, 4), bool)), ["'mask'", "axis 1", "4", "T=3"]),
        (text(rows=0), ["rows", "0", "1 to 8"]),
        (text(tokens=0), ["tokens", "0", "1 to 16"]),
    ],
)
def test_malformed_names_field_value_and_what_is_allowed(inputs, words):
    error = refusal(TEXT, inputs)
    assert error.reason == "malformed"
    for word in words:
        assert word in error.message


def test_wrong_fixed_axis():
    error = refusal(TABLE, {"x": np.zeros((2, 5), np.float32)})
    assert error.message == "input 'x': shape [2, 5], allowed: [R, 4]: axis 1 is 5, not 4"


def test_too_many_rows_or_tokens_are_too_large():
    assert refusal(TEXT, text(rows=9)).reason == "too_large"
    assert refusal(TEXT, text(tokens=17)).reason == "too_large"
    assert "17, allowed: 1 to 16" in refusal(TEXT, text(tokens=17)).message


def test_what_the_wire_may_claim():
    with pytest.raises(InferError, match="1 inputs, allowed: 2"):
        check_types(TEXT, [("i64", (2, 3))])
    for shape, match in (((2**62, 4), "rows"), ((0, 4), "rows"), ((-1, 4), "axis 0 is -1")):
        with pytest.raises(InferError, match=match):
            check_types(TABLE, [("f32", shape)])
    with pytest.raises(InferError, match=r"axis 0 is 5, not 4"):
        check_types(
            TenantInfo("m", 1, "ready", (PortInfo("x", "f32", (Dim(2, rows=1),)),), rows_limit=9),
            [("f32", (5,))],
        )


def test_rendered_shapes():
    assert render_shape((R, Dim(2, tokens=1), Dim(3, 2, 1), Dim(7))) == "[R, 2*T, 3*R**2*T, 7]"


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(dtype, value):
    def tensor(number: float) -> np.ndarray:
        if dtype == "bf16":
            return (np.full((2, 4), number, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return np.full((2, 4), number, {"f16": "f2", "f32": "f4", "f64": "f8"}[dtype])

    ports = (PortInfo("x", dtype, (R, *fixed(4))),)
    strict = TenantInfo("s", 1, "ready", ports, rows_limit=8, nan="reject")
    relaxed = TenantInfo("s", 1, "ready", ports, rows_limit=8)
    check_values(strict, [tensor(1.5)])
    check_values(relaxed, [tensor(value)])
    with pytest.raises(InferError, match="'x': has NaN or Inf") as error:
        check_values(strict, [tensor(value)])
    assert error.value.reason == "malformed"


@pytest.mark.parametrize("dtype", ["u8", "i8", "i32", "i64"])
def test_an_index_beyond_its_table_is_refused_with_the_range(dtype):
    info = TenantInfo("m", 1, "ready", (PortInfo("ids", dtype, (R, T), below=50),), rows_limit=8)
    numpy_dtype = NUMPY_DTYPES[dtype]
    check_values(info, [np.array([[0, 49]], numpy_dtype)])
    check_values(info, [np.zeros((0, 4), numpy_dtype)])
    for bad in (50, -1, 127):
        if bad < 0 and dtype == "u8":
            continue
        with pytest.raises(InferError) as error:
            check_values(info, [np.array([[3, bad], [60, 0]], numpy_dtype)])
        assert error.value.reason == "malformed"
        assert error.value.message == f"input 'ids': index {bad}, allowed: 0 to 49"
