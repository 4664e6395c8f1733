"""Element by element: unary, binary, `where`, and values out of nothing (`constant`, `arange`).

Every op of a kind is one line in a table: the dtypes it takes, its numpy function, its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.polynomial import Chebyshev

from coissue.kernels.ir import Type
from coissue.kernels.optable.base import (
    ANY,
    BOOL,
    FLOATS,
    NUMBERS,
    Array,
    Attr,
    Call,
    OpDef,
    Out,
    broadcast,
    like,
    require,
    require_dtypes,
    require_rank,
    require_value,
)

#: erf(x) / x on [0, 6], within 2e-13 of itself; from 6 on erf is 1 in f64.
_ERF_OVER_X: Final = Chebyshev.interpolate(
    lambda xs: np.array([math.erf(x) / x for x in xs]), 60, domain=[0, 6]
)


def erf(x: Array) -> Array:
    inside = np.minimum(np.abs(x), 6.0)
    return np.where(np.abs(x) < 6.0, x * _ERF_OVER_X(inside), np.sign(x))


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _gelu(x: Array, approximate: str) -> Array:
    if approximate == "none":
        return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _softplus(x: Array) -> Array:
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def _hardsigmoid(x: Array) -> Array:
    return np.clip(x + 3.0, 0.0, 6.0) / 6.0


def _clamp(x: Array, min: float | None, max: float | None) -> Array:
    lifted = x if min is None else np.maximum(x, min)
    return lifted if max is None else np.minimum(lifted, max)


def _pow(a: Array, b: Array) -> Array:
    """Integers to a negative power give 0 (or 1 and -1 for those bases), as torch has it."""
    if a.dtype.kind == "f":
        return np.power(a, b)
    inverse = np.where(np.abs(a) == 1, np.where(b % 2 == 0, 1, a), 0).astype(a.dtype)
    return np.where(b < 0, inverse, np.power(a, np.maximum(b, 0)))


def _floor_divider(fn: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Division by an integer zero is an error, as torch has it on the CPU."""

    def divide(a: Array, b: Array) -> Array:
        if b.dtype.kind in "iu" and not b.all():
            raise ValueError("integer division by zero")
        return fn(a, b)

    return divide


#: name -> (dtypes taken, numpy function, attrs); the output has the input's type.
UNARY: Final[dict[str, tuple[frozenset[str], Callable[..., Array], Mapping[str, Attr]]]] = {
    "identity": (ANY, lambda x: x, {}),
    "neg": (NUMBERS, np.negative, {}),
    "abs": (NUMBERS, np.abs, {}),
    "sign": (NUMBERS, lambda x: np.where(x > 0, 1, np.where(x < 0, -1, 0)), {}),  # nan: 0
    "relu": (NUMBERS, lambda x: np.maximum(x, 0), {}),
    "floor": (NUMBERS, np.floor, {}),
    "ceil": (NUMBERS, np.ceil, {}),
    "round": (NUMBERS, np.round, {}),
    "sigmoid": (FLOATS, _sigmoid, {}),
    "tanh": (FLOATS, np.tanh, {}),
    "exp": (FLOATS, np.exp, {}),
    "log": (FLOATS, np.log, {}),
    "log1p": (FLOATS, np.log1p, {}),
    "sqrt": (FLOATS, np.sqrt, {}),
    "rsqrt": (FLOATS, lambda x: 1.0 / np.sqrt(x), {}),
    "reciprocal": (FLOATS, lambda x: 1.0 / x, {}),
    "erf": (FLOATS, erf, {}),
    "sin": (FLOATS, np.sin, {}),
    "cos": (FLOATS, np.cos, {}),
    "silu": (FLOATS, lambda x: x * _sigmoid(x), {}),
    "hardsigmoid": (FLOATS, _hardsigmoid, {}),
    "hardswish": (FLOATS, lambda x: x * _hardsigmoid(x), {}),
    "softplus": (FLOATS, _softplus, {}),
    "mish": (FLOATS, lambda x: x * np.tanh(_softplus(x)), {}),
    "gelu": (FLOATS, _gelu, {"approximate": Attr("str", choices=("none", "tanh"))}),
    "leaky_relu": (
        FLOATS,
        lambda x, slope: np.where(x > 0, x, slope * x),
        {"slope": Attr("float")},
    ),
    "elu": (
        FLOATS,
        lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
        {"alpha": Attr("float")},
    ),
}

#: name -> (dtypes taken, numpy function); the output has the inputs' dtype.
BINARY: Final[dict[str, tuple[frozenset[str], Callable[..., Array]]]] = {
    "add": (ANY, np.add),
    "sub": (NUMBERS, np.subtract),
    "mul": (ANY, np.multiply),
    "div": (NUMBERS, np.true_divide),
    "pow": (NUMBERS, _pow),
    "maximum": (ANY, np.maximum),
    "minimum": (ANY, np.minimum),
    "remainder": (NUMBERS, _floor_divider(np.remainder)),
    "floor_div": (NUMBERS, _floor_divider(np.floor_divide)),
}

#: Binary ops whose output is bool.
COMPARE: Final[dict[str, Callable[..., Array]]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or,
}  # fmt: skip


def _unary(allowed: frozenset[str], fn: Callable[..., Array], attrs: Mapping[str, Attr]) -> OpDef:
    def infer(call: Call) -> tuple[Type, ...]:
        require_dtypes(call, allowed)
        return like(call)

    return OpDef(infer, fn, attrs=attrs)


def _binary(allowed: frozenset[str], fn: Callable[..., Array], result: str = "same") -> OpDef:
    """`result`: "same", "bool", or "float": integers divide to f32."""

    def infer(call: Call) -> tuple[Type, ...]:
        dtype = require_dtypes(call, allowed)
        if result == "bool":
            dtype = "bool"
        elif result == "float" and dtype not in FLOATS:
            dtype = "f32"
        return (Type(broadcast(call.shape(0), call.shape(1)), dtype),)

    return OpDef(infer, fn, required=2)


def _infer_clamp(call: Call) -> tuple[Type, ...]:
    dtype = require_dtypes(call, NUMBERS)
    for bound in ("min", "max"):
        if call.attrs[bound] is not None:
            require_value(call.attrs[bound], dtype, bound)
    return like(call)


def _infer_where(call: Call) -> tuple[Type, ...]:
    require_dtypes(call, BOOL, 0)
    dtype = require_dtypes(call, ANY, 1, 2)
    return (Type(broadcast(*(call.shape(i) for i in range(3))), dtype),)


def _infer_value(call: Call) -> tuple[Type, ...]:
    require_value(call.attrs["value"], call.outputs[0].dtype, "value")
    return call.outputs


def _infer_constant(call: Call) -> tuple[Type, ...]:
    require_rank(call.outputs[0].shape, 0, 0, "a constant")
    return _infer_value(call)


def _infer_arange(call: Call) -> tuple[Type, ...]:
    (out,) = call.outputs
    require_rank(out.shape, 1, 1, "arange")
    last = call.attrs["start"] + call.attrs["step"] * out.shape[0].at(
        call.rows_limit, call.tokens_limit
    )
    require(-(2**63) <= last < 2**63, "arange leaves the range of i64")
    return (Type(out.shape, "i64"),)


def _fill(value: float, out: Out) -> Array:
    return np.full(out[0], value, out[1])


def _arange(start: int, step: int, out: Out) -> Array:
    return start + step * np.arange(out[0][0], dtype=np.int64)


OPS: Final[dict[str, OpDef]] = {
    **{name: _unary(*row) for name, row in UNARY.items()},
    **{
        name: _binary(allowed, fn, "float" if name == "div" else "same")
        for name, (allowed, fn) in BINARY.items()
    },
    **{name: _binary(ANY, fn, "bool") for name, fn in COMPARE.items()},
    "logical_not": OpDef(lambda call: like(call, dtype="bool"), np.logical_not),
    "cast": OpDef(
        lambda call: like(call, dtype=call.outputs[0].dtype),
        lambda x, out: x.astype(out[1]),
        typed=True,
        widen=False,
    ),
    "clamp": OpDef(
        _infer_clamp,
        _clamp,
        attrs={"min": Attr("scalar", optional=True), "max": Attr("scalar", optional=True)},
    ),
    "where": OpDef(_infer_where, np.where, required=3, widen=False),
    "constant": OpDef(
        _infer_constant, _fill, required=0, attrs={"value": Attr("scalar")}, typed=True
    ),
    "full": OpDef(_infer_value, _fill, required=0, attrs={"value": Attr("scalar")}, typed=True),
    "arange": OpDef(
        _infer_arange,
        _arange,
        required=0,
        attrs={"start": Attr("int"), "step": Attr("int")},
        typed=True,
    ),
}
