"""Ops that look along dims: sums, means, extrema, softmax, cumulative sums and the norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from coissue.kernels.ir import Type
from coissue.kernels.optable import base
from coissue.kernels.optable.base import DIM, DIMS, FLAG, FLOAT, Array, Attr, Call, Ints, OpDef

Maybe = Array | None


def _var(x: Array, dims: Ints, keepdim: bool, correction: int) -> Array:
    """Fewer elements than `correction` give nan or inf, as torch has it."""
    count = np.prod([x.shape[d] for d in dims])
    squares = np.square(x - x.mean(axis=dims, keepdims=True))
    return np.asarray(squares.sum(axis=dims, keepdims=keepdim) / np.maximum(count - correction, 0))


def _exact(x: Array) -> Array:
    """Integers and bools are summed in i64."""
    return x if x.dtype.kind == "f" else x.astype(np.int64)


#: name -> (kind of dtype, dtype of the output or "same" or "sum", numpy function)
REDUCE: Final[dict[str, tuple[str, str, Callable[..., Array]]]] = {
    "sum": ("any", "sum", lambda x, **along: np.sum(_exact(x), **along)),
    "prod": ("any", "sum", lambda x, **along: np.prod(_exact(x), **along)),
    "mean": ("float", "same", np.mean),
    "amax": ("any", "same", np.max),
    "amin": ("any", "same", np.min),
    "any": ("any", "bool", np.any),
    "all": ("any", "bool", np.all),
}


def _infer_reduced(call: Call, dims: Ints, dtype: str) -> tuple[Type, ...]:
    shape, keepdim = call.shape(0), call.attrs["keepdim"]
    base.require_dims(shape, dims)
    kept = [(base.ONE if d in dims else extent) for d, extent in enumerate(shape)]
    left = [extent for d, extent in enumerate(shape) if d not in dims]
    return (Type(tuple(kept if keepdim else left), dtype),)


def _summed(dtype: str) -> str:
    return dtype if dtype in base.KINDS["float"] else "i64"


def _reduce(kind: str, result: str, fn: Callable[..., Array]) -> OpDef:
    def infer(call: Call) -> tuple[Type, ...]:
        dtype = call.dtype(kind)
        found = {"same": dtype, "sum": _summed(dtype)}.get(result, result)
        return _infer_reduced(call, call.attrs["dims"], found)

    def run(x: Array, dims: Ints, keepdim: bool) -> Array:
        return fn(x, axis=dims, keepdims=keepdim)

    return OpDef(infer, run, attrs=_DIMS)


def _infer_var(call: Call) -> tuple[Type, ...]:
    return _infer_reduced(call, call.attrs["dims"], call.dtype("float"))


def _arg(fn: Callable[..., Array]) -> OpDef:
    """The first place of the extremum; a nan counts as the extremum, as torch has it."""

    def infer(call: Call) -> tuple[Type, ...]:
        call.dtype("number")
        return _infer_reduced(call, (call.attrs["dim"],), "i64")

    def run(x: Array, dim: int, keepdim: bool) -> Array:
        return fn(x, axis=dim, keepdims=keepdim)

    return OpDef(infer, run, attrs={"dim": DIM, "keepdim": FLAG})


def _infer_along(call: Call) -> tuple[Type, ...]:
    call.extent(0, call.attrs["dim"])
    return call.like("float")


def _infer_cumsum(call: Call) -> tuple[Type, ...]:
    call.extent(0, call.attrs["dim"])
    return call.like("any", _summed(call.dtype("any")))


def _cumsum(x: Array, dim: int) -> Array:
    return np.cumsum(_exact(x), axis=dim)


def softmax(x: Array, dim: int) -> Array:
    raised = np.exp(x - x.max(axis=dim, keepdims=True))
    return np.asarray(raised / raised.sum(axis=dim, keepdims=True))


def _log_softmax(x: Array, dim: int) -> Array:
    shifted = x - x.max(axis=dim, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=dim, keepdims=True)))


def _infer_layer_norm(call: Call) -> tuple[Type, ...]:
    axes = call.attrs["axes"]
    shape = call.shape(0, range(axes, 64))
    for index in range(1, len(call.inputs)):
        call.expect(index, shape[len(shape) - axes :])
    return call.like("float")


def _infer_channels(call: Call) -> tuple[Type, ...]:
    """Norms along axis 1: every further input is one vector over the channels."""
    shape = call.shape(0, range(2, 64))
    for index in range(1, len(call.inputs)):
        call.expect(index, shape[1:2])
    return call.like("float")


def _infer_group_norm(call: Call) -> tuple[Type, ...]:
    channels, groups = call.extent(0, 1), call.attrs["groups"]
    even = channels.is_fixed and channels.scale % groups == 0
    base.require(even, f"{groups} groups do not divide {base.render_dim(channels)} channels")
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


_DIMS: Final = {"dims": DIMS, "keepdim": FLAG}
_VAR: Final = {**_DIMS, "correction": Attr("int", 0, 2**31)}
_AXES: Final = {"axes": Attr("int", 1, 63), "eps": FLOAT}
_GROUPS: Final = {"groups": base.POSITIVE, "eps": FLOAT}

OPS: Final[dict[str, OpDef]] = {
    **{name: _reduce(*row) for name, row in REDUCE.items()},
    "var": OpDef(_infer_var, _var, attrs=_VAR),
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "cumsum": OpDef(_infer_cumsum, _cumsum, attrs={"dim": DIM}),
    "softmax": OpDef(_infer_along, softmax, attrs={"dim": DIM}),
    "log_softmax": OpDef(_infer_along, _log_softmax, attrs={"dim": DIM}),
    "layer_norm": OpDef(_infer_layer_norm, _layer_norm, 1, 2, _AXES),
    "rms_norm": OpDef(_infer_layer_norm, _rms_norm, 1, 1, _AXES),
    "batch_norm": OpDef(_infer_channels, _batch_norm, 3, 2, {"eps": FLOAT}),
    "group_norm": OpDef(_infer_group_norm, _group_norm, 1, 2, _GROUPS),
}
