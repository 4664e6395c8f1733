"""Ops that look along dims: sums, means, extrema, softmax, cumulative sums and the norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from coissue.kernels.ir import Type
from coissue.kernels.optable.base import (
    ANY,
    FLOATS,
    NUMBERS,
    ONE,
    Array,
    Attr,
    Call,
    Ints,
    OpDef,
    Shape,
    like,
    render_shape,
    require,
    require_dim,
    require_dims,
    require_dtypes,
    require_present,
    require_rank,
)

Maybe = Array | None
DIM: Final = Attr("int", low=0, high=63)
DIMS: Final = {"dims": Attr("ints", low=0, high=63), "keepdim": Attr("bool")}
EPS: Final = {"eps": Attr("float")}


def _var(x: Array, dims: Ints, keepdim: bool, correction: int) -> Array:
    """Fewer elements than `correction` give nan or inf, as torch has it."""
    count = np.prod([x.shape[d] for d in dims])
    squares = np.square(x - x.mean(axis=dims, keepdims=True))
    return np.asarray(squares.sum(axis=dims, keepdims=keepdim) / np.maximum(count - correction, 0))


def _exact(x: Array) -> Array:
    """Integers and bools are summed in i64."""
    return x if x.dtype.kind == "f" else x.astype(np.int64)


#: name -> (dtypes taken, dtype of the output or "same" or "sum", numpy function of (x, axis))
REDUCE: Final[dict[str, tuple[frozenset[str], str, Callable[..., Array]]]] = {
    "sum": (ANY, "sum", lambda x, **at: np.sum(_exact(x), **at)),
    "prod": (ANY, "sum", lambda x, **at: np.prod(_exact(x), **at)),
    "mean": (FLOATS, "same", np.mean),
    "amax": (ANY, "same", np.max),
    "amin": (ANY, "same", np.min),
    "any": (ANY, "bool", np.any),
    "all": (ANY, "bool", np.all),
}


def _reduced(shape: Shape, dims: Ints, keepdim: bool) -> Shape:
    require_dims(shape, dims)
    if keepdim:
        return tuple(ONE if d in dims else extent for d, extent in enumerate(shape))
    return tuple(extent for d, extent in enumerate(shape) if d not in dims)


def _reduce(allowed: frozenset[str], result: str, fn: Callable[..., Array]) -> OpDef:
    def infer(call: Call) -> tuple[Type, ...]:
        dtype = require_dtypes(call, allowed)
        shape = _reduced(call.shape(0), call.attrs["dims"], call.attrs["keepdim"])
        if result == "sum":
            return (Type(shape, dtype if dtype in FLOATS else "i64"),)
        return (Type(shape, dtype if result == "same" else result),)

    def run(x: Array, dims: Ints, keepdim: bool) -> Array:
        return fn(x, axis=dims, keepdims=keepdim)

    return OpDef(infer, run, attrs=DIMS)


def _infer_var(call: Call) -> tuple[Type, ...]:
    dtype = require_dtypes(call, FLOATS)
    return (Type(_reduced(call.shape(0), call.attrs["dims"], call.attrs["keepdim"]), dtype),)


def _arg(fn: Callable[..., Array]) -> OpDef:
    """The first place of the extremum; a nan counts as the extremum, as torch has it."""

    def infer(call: Call) -> tuple[Type, ...]:
        require_dtypes(call, NUMBERS)
        shape = _reduced(call.shape(0), (call.attrs["dim"],), call.attrs["keepdim"])
        return (Type(shape, "i64"),)

    def run(x: Array, dim: int, keepdim: bool) -> Array:
        return fn(x, axis=dim, keepdims=keepdim)

    return OpDef(infer, run, attrs={"dim": DIM, "keepdim": Attr("bool")})


def _infer_along(call: Call) -> tuple[Type, ...]:
    require_dtypes(call, FLOATS)
    require_dim(call.shape(0), call.attrs["dim"])
    return like(call)


def _infer_cumsum(call: Call) -> tuple[Type, ...]:
    dtype = require_dtypes(call, ANY)
    require_dim(call.shape(0), call.attrs["dim"])
    return like(call, dtype=dtype if dtype in FLOATS else "i64")


def softmax(x: Array, dim: int) -> Array:
    raised = np.exp(x - x.max(axis=dim, keepdims=True))
    found: Array = raised / raised.sum(axis=dim, keepdims=True)
    return found


def _log_softmax(x: Array, dim: int) -> Array:
    shifted = x - x.max(axis=dim, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(axis=dim, keepdims=True))
    return found


def _infer_layer_norm(call: Call) -> tuple[Type, ...]:
    require_dtypes(call, FLOATS)
    shape, axes = call.shape(0), call.attrs["axes"]
    require(axes <= len(shape), f"{axes} axes are more than {render_shape(shape)} has")
    for index in range(1, len(call.inputs)):
        require_present(call, index, shape[len(shape) - axes :], f"input {index}")
    return like(call)


def _infer_channels(call: Call) -> tuple[Type, ...]:
    """Norms along axis 1: every further input is one vector over the channels."""
    require_dtypes(call, FLOATS)
    shape = call.shape(0)
    require_rank(shape, 2, 63, "input 0")
    for index in range(1, len(call.inputs)):
        require_present(call, index, (shape[1],), f"input {index}")
    return like(call)


def _infer_group_norm(call: Call) -> tuple[Type, ...]:
    shape, groups = call.shape(0), call.attrs["groups"]
    require_rank(shape, 2, 63, "input 0")
    require(
        shape[1].is_fixed and shape[1].scale % groups == 0,
        f"{groups} groups do not divide the channels of {render_shape(shape)}",
    )
    return _infer_channels(call)


def _affine(x: Array, weight: Maybe, bias: Maybe) -> Array:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def _layer_norm(x: Array, weight: Maybe, bias: Maybe, axes: int, eps: float) -> Array:
    last = tuple(range(x.ndim - axes, x.ndim))
    centred = x - x.mean(axis=last, keepdims=True)
    spread = np.square(centred).mean(axis=last, keepdims=True)
    return _affine(centred / np.sqrt(spread + eps), weight, bias)


def _rms_norm(x: Array, weight: Maybe, axes: int, eps: float) -> Array:
    last = tuple(range(x.ndim - axes, x.ndim))
    return _affine(x / np.sqrt(np.square(x).mean(axis=last, keepdims=True) + eps), weight, None)


def _batch_norm(x: Array, mean: Array, var: Array, weight: Maybe, bias: Maybe, eps: float) -> Array:
    swapped = np.swapaxes(x, 1, -1)
    normed = _affine((swapped - mean) / np.sqrt(var + eps), weight, bias)
    return np.swapaxes(normed, 1, -1)


def _group_norm(x: Array, weight: Maybe, bias: Maybe, groups: int, eps: float) -> Array:
    grouped = x.reshape(x.shape[0], groups, -1)
    normed = _layer_norm(grouped, None, None, 1, eps).reshape(x.shape)
    return np.swapaxes(_affine(np.swapaxes(normed, 1, -1), weight, bias), 1, -1)


_AXES: Final = {"axes": Attr("int", low=1, high=63), **EPS}

OPS: Final[dict[str, OpDef]] = {
    **{name: _reduce(*row) for name, row in REDUCE.items()},
    "var": OpDef(_infer_var, _var, attrs={**DIMS, "correction": Attr("int", low=0)}),
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "cumsum": OpDef(
        _infer_cumsum, lambda x, dim: np.cumsum(_exact(x), axis=dim), attrs={"dim": DIM}
    ),
    "softmax": OpDef(_infer_along, softmax, attrs={"dim": DIM}),
    "log_softmax": OpDef(_infer_along, _log_softmax, attrs={"dim": DIM}),
    "layer_norm": OpDef(_infer_layer_norm, _layer_norm, optional=2, attrs=_AXES),
    "rms_norm": OpDef(_infer_layer_norm, _rms_norm, optional=1, attrs=_AXES),
    "batch_norm": OpDef(_infer_channels, _batch_norm, required=3, optional=2, attrs=EPS),
    "group_norm": OpDef(
        _infer_group_norm,
        _group_norm,
        optional=2,
        attrs={"groups": Attr("int", low=1), **EPS},
    ),
}
