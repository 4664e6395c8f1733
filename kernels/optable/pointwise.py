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
from coissue.kernels.optable import base
from coissue.kernels.optable.base import FLOAT, SCALAR, Array, Attr, Call, OpDef, Out, require

#: erf(x) / x on [0, 6], within 2e-13 of itself; from 6 on erf is 1 in f64.
_ERF_OVER_X: Final = Chebyshev.interpolate(
    lambda xs: np.array([math.erf(x) / x for x in xs]), 60, domain=[0, 6]
)


def erf(x: Array) -> Array:
    inside = np.minimum(np.abs(x), 6.0)
    return np.where(np.abs(x) < 6.0, x * _ERF_OVER_X(inside), np.sign(x))


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _gelu(x: Array, approximate: str) -> Array:
    if approximate == "none":
        return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _softplus(x: Array) -> Array:
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def _hardsigmoid(x: Array) -> Array:
    return np.clip(x + 3.0, 0.0, 6.0) / 6.0


def _elu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


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


#: name -> (kind of dtype, numpy function, attrs); the output has the input's type.
UNARY: Final[dict[str, tuple[str, Callable[..., Array], Mapping[str, Attr]]]] = {
    "identity": ("any", lambda x: x, {}),
    "neg": ("number", np.negative, {}),
    "abs": ("number", np.abs, {}),
    "sign": ("number", lambda x: np.where(x > 0, 1, np.where(x < 0, -1, 0)), {}),  # nan: 0
    "relu": ("number", lambda x: np.maximum(x, 0), {}),
    "floor": ("number", np.floor, {}),
    "ceil": ("number", np.ceil, {}),
    "round": ("number", np.round, {}),
    "sigmoid": ("float", sigmoid, {}),
    "tanh": ("float", np.tanh, {}),
    "exp": ("float", np.exp, {}),
    "log": ("float", np.log, {}),
    "log1p": ("float", np.log1p, {}),
    "sqrt": ("float", np.sqrt, {}),
    "rsqrt": ("float", lambda x: 1.0 / np.sqrt(x), {}),
    "reciprocal": ("float", lambda x: 1.0 / x, {}),
    "erf": ("float", erf, {}),
    "sin": ("float", np.sin, {}),
    "cos": ("float", np.cos, {}),
    "silu": ("float", lambda x: x * sigmoid(x), {}),
    "hardsigmoid": ("float", _hardsigmoid, {}),
    "hardswish": ("float", lambda x: x * _hardsigmoid(x), {}),
    "softplus": ("float", _softplus, {}),
    "mish": ("float", lambda x: x * np.tanh(_softplus(x)), {}),
    "gelu": ("float", _gelu, {"approximate": base.one_of("none", "tanh")}),
    "leaky_relu": ("float", lambda x, slope: np.where(x > 0, x, slope * x), {"slope": FLOAT}),
    "elu": ("float", _elu, {"alpha": FLOAT}),
}

#: name -> (kind of dtype, numpy function, dtype of the output if not the inputs').
BINARY: Final[dict[str, tuple[str, Callable[..., Array], str | None]]] = {
    "add": ("any", np.add, None),
    "sub": ("number", np.subtract, None),
    "mul": ("any", np.multiply, None),
    "div": ("number", np.true_divide, "float"),
    "pow": ("number", _pow, None),
    "maximum": ("any", np.maximum, None),
    "minimum": ("any", np.minimum, None),
    "remainder": ("number", _floor_divider(np.remainder), None),
    "floor_div": ("number", _floor_divider(np.floor_divide), None),
    "eq": ("any", np.equal, "bool"),
    "ne": ("any", np.not_equal, "bool"),
    "lt": ("any", np.less, "bool"),
    "le": ("any", np.less_equal, "bool"),
    "gt": ("any", np.greater, "bool"),
    "ge": ("any", np.greater_equal, "bool"),
    "logical_and": ("any", np.logical_and, "bool"),
    "logical_or": ("any", np.logical_or, "bool"),
}


def _unary(kind: str, fn: Callable[..., Array], attrs: Mapping[str, Attr]) -> OpDef:
    return OpDef(lambda call: call.like(kind), fn, attrs=attrs)


def _binary(kind: str, fn: Callable[..., Array], result: str | None) -> OpDef:
    def infer(call: Call) -> tuple[Type, ...]:
        dtype = call.dtype(kind)
        if result == "float":  # integers divide to f32
            dtype = dtype if dtype in base.KINDS["float"] else "f32"
        elif result is not None:
            dtype = result
        return (Type(base.broadcast(call.shape(0), call.shape(1)), dtype),)

    return OpDef(infer, fn, required=2)


def _infer_clamp(call: Call) -> tuple[Type, ...]:
    bounds = {name: call.attrs[name] for name in ("min", "max") if call.attrs[name] is not None}
    require(bool(bounds), "a clamp needs min, max or both")
    for name, bound in bounds.items():
        base.require_value(bound, call.type(0).dtype, name)
    return call.like("number")


def _infer_where(call: Call) -> tuple[Type, ...]:
    call.dtype("bool", 0)
    shapes = [call.shape(index) for index in range(3)]
    return (Type(base.broadcast(*shapes), call.dtype("any", 1, 2)),)


def _infer_full(call: Call) -> tuple[Type, ...]:
    base.require_value(call.attrs["value"], call.outputs[0].dtype, "value")
    return call.outputs


def _infer_constant(call: Call) -> tuple[Type, ...]:
    base.require_shape(call.outputs[0].shape, (), "a constant")
    return _infer_full(call)


def _infer_arange(call: Call) -> tuple[Type, ...]:
    (out,), start, step = call.outputs, call.attrs["start"], call.attrs["step"]
    require(len(out.shape) == 1, "the output must have one dim")
    last = start + step * out.shape[0].at(call.rows_limit, call.tokens_limit)
    require(base.INT_LOW <= last <= base.INT_HIGH, "arange leaves the range of i64")
    return (Type(out.shape, "i64"),)


def _fill(value: float, out: Out) -> Array:
    return np.full(out[0], value, out[1])


def _arange(start: int, step: int, out: Out) -> Array:
    return start + step * np.arange(out[0][0], dtype=np.int64)


def _cast(x: Array, out: Out) -> Array:
    return x.astype(out[1])


_BOUND: Final = Attr("scalar", optional=True)
_VALUE: Final = {"value": SCALAR}
_STEPS: Final = {"start": Attr("int"), "step": Attr("int")}

OPS: Final[dict[str, OpDef]] = {
    **{name: _unary(*row) for name, row in UNARY.items()},
    **{name: _binary(*row) for name, row in BINARY.items()},
    "logical_not": OpDef(lambda call: call.like("any", "bool"), np.logical_not),
    "cast": OpDef(
        lambda call: call.like("any", call.outputs[0].dtype), _cast, typed=True, widen=False
    ),
    "clamp": OpDef(_infer_clamp, _clamp, attrs={"min": _BOUND, "max": _BOUND}),
    "where": OpDef(_infer_where, np.where, required=3, widen=False),
    "constant": OpDef(_infer_constant, _fill, required=0, attrs=_VALUE, typed=True),
    "full": OpDef(_infer_full, _fill, required=0, attrs=_VALUE, typed=True),
    "arange": OpDef(_infer_arange, _arange, required=0, attrs=_STEPS, typed=True),
}
