"""Moving data: reshapes, slices, joins, and reads by index.

`reshape`, `expand` and `slice` without `stop` take extents from the output's declared type,
because an attr cannot hold R or T. A negative `start` counts from the end; along an extent with R
or T, only what is there for every R and T >= 1 may be named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from coissue.kernels.ir import Dim, Type
from coissue.kernels.optable import base
from coissue.kernels.optable.base import DIM, DIMS, Array, Attr, Call, Ints, OpDef, Out, require


def _typed(call: Call, *shape: Dim) -> tuple[Type, ...]:
    """Moved, not computed: the output has the dtype of input 0."""
    return (Type(shape, call.type(0).dtype),)


def _infer_reshape(call: Call) -> tuple[Type, ...]:
    old, new = call.shape(0), call.outputs[0].shape
    require(
        base.product(old) == base.product(new),
        f"{base.render_shape(old)} cannot become {base.render_shape(new)}: "
        "the number of elements differs",
    )
    return _typed(call, *new)


def _infer_expand(call: Call) -> tuple[Type, ...]:
    new = call.outputs[0].shape
    base.require_shape(base.broadcast(call.shape(0), new), new, "the expanded value")
    return _typed(call, *new)


def _infer_permute(call: Call) -> tuple[Type, ...]:
    shape, dims = call.shape(0), call.attrs["dims"]
    good = sorted(dims) == list(range(len(shape)))
    require(good, f"dims {dims} are not a permutation of the {len(shape)} dims")
    return _typed(call, *(shape[d] for d in dims))


def _infer_slice(call: Call) -> tuple[Type, ...]:
    dim, start, stop, step = (call.attrs[name] for name in ("dim", "start", "stop", "step"))
    shape, extent = call.shape(0), call.extent(0, dim)
    if stop is None:
        require(dim < len(call.outputs[0].shape), f"the output has no dim {dim}")
        length = call.outputs[0].shape[dim]
        _require_inside(call, extent, start, length, step)
    elif extent.is_fixed:
        length = Dim(len(range(extent.scale)[start:stop:step]))
    else:
        inside = -extent.scale <= start <= stop <= extent.scale and (start < 0) == (stop < 0)
        text = f"{start}:{stop} of {base.render_dim(extent)} is not inside it for every R and T"
        require(inside, text)
        length = Dim(len(range(start, stop, step)))
    require(length.scale > 0, f"slice {start}:{stop} of {base.render_dim(extent)} is empty")
    return _typed(call, *shape[:dim], length, *shape[dim + 1 :])


def _require_inside(call: Call, extent: Dim, start: int, length: Dim, step: int) -> None:
    """`length` elements from `start` on must exist for every R and T up to the limits."""
    fits, count = True, length.scale
    if extent.is_fixed:  # tight where the length is largest
        count = length.at(call.rows_limit, call.tokens_limit)
    elif not length.is_fixed:  # both grow alike; like a fixed length, tight at R = T = 1
        powers = (length.rows, length.tokens) == (extent.rows, extent.tokens)
        fits = powers and start >= 0 and length.scale * step <= extent.scale
    first = start + extent.scale if start < 0 else start
    require(
        fits and first >= 0 and first + (count - 1) * step < extent.scale,
        f"{base.render_dim(length)} elements from {start} by {step} are not inside "
        f"{base.render_dim(extent)} for every R and T",
    )


def _infer_select(call: Call) -> tuple[Type, ...]:
    shape, dim, index = call.shape(0), call.attrs["dim"], call.attrs["index"]
    extent = call.extent(0, dim)
    inside = -extent.scale <= index < extent.scale
    require(inside, f"index {index} is outside {base.render_dim(extent)} for some R and T")
    return _typed(call, *shape[:dim], *shape[dim + 1 :])


def _infer_concat(call: Call) -> tuple[Type, ...]:
    call.dtype("any")
    dim, first = call.attrs["dim"], call.shape(0)
    extents = [call.extent(index, dim) for index in range(len(call.inputs))]
    for index, extent in enumerate(extents):
        call.expect(index, (*first[:dim], extent, *first[dim + 1 :]))
    powers = {(extent.rows, extent.tokens) for extent in extents}
    text = " + ".join(map(base.render_dim, extents))
    require(len(powers) == 1, f"the joined extent {text} is not a product of R, T and a number")
    total = Dim(sum(extent.scale for extent in extents), *powers.pop())
    return _typed(call, *first[:dim], total, *first[dim + 1 :])


def _infer_flip(call: Call) -> tuple[Type, ...]:
    base.require_dims(call.shape(0), call.attrs["dims"])
    return call.like("any")


def _infer_pad(call: Call) -> tuple[Type, ...]:
    shape, pads = list(call.shape(0)), call.attrs["pads"]
    text = (
        f"pads {pads} do not fit {base.render_shape(shape)}; allowed: two per dim, last dim first"
    )
    require(len(pads) % 2 == 0 and len(pads) <= 2 * len(shape), text)
    base.require_value(call.attrs["value"], call.type(0).dtype, "value")
    for dim, low, high in zip(range(len(shape))[::-1], pads[::2], pads[1::2], strict=False):
        extent = shape[dim]
        good = extent.is_fixed and extent.scale + min(low, 0) + min(high, 0) > 0
        text = f"dim {dim}, {base.render_dim(extent)}, cannot be padded by {low} and {high}"
        require(good or (low, high) == (0, 0), text)
        shape[dim] = Dim(extent.scale + low + high, extent.rows, extent.tokens)
    return _typed(call, *shape)


def _infer_index(call: Call) -> tuple[Type, ...]:
    shape, dims, count = call.shape(0), call.attrs["dims"], len(call.inputs) - 1
    base.require_dims(shape, dims)
    good = count == len(dims) == dims[-1] - dims[0] + 1
    require(good, f"dims {dims} must be adjacent, one for each of the {count} index tensors")
    indices = range(1, count + 1)
    call.dtype("index", *indices)
    picked = base.broadcast(*map(call.shape, indices))
    return _typed(call, *shape[: dims[0]], *picked, *shape[dims[-1] + 1 :])


def _infer_gather(call: Call) -> tuple[Type, ...]:
    shape, dim = call.shape(0), call.attrs["dim"]
    call.dtype("index", 1)
    call.extent(0, dim)
    index = call.shape(1, [len(shape)])
    for d, (mine, its) in enumerate(zip(index, shape, strict=True)):
        inside = mine == its or (mine.is_fixed and its.is_fixed and mine.scale <= its.scale)
        text = f"the index {base.render_shape(index)} is larger than {base.render_shape(shape)}"
        require(inside or d == dim, text)
    return _typed(call, *index)


def _infer_embedding(call: Call) -> tuple[Type, ...]:
    call.dtype("index", 1)
    return _typed(call, *call.shape(1), call.shape(0, [2])[1])


def _infer_embedding_bag(call: Call) -> tuple[Type, ...]:
    call.dtype("float", 0)
    call.dtype("index", 1)
    return _typed(call, *call.shape(1, range(1, 64))[:-1], call.shape(0, [2])[1])


def _select(x: Array, dim: int, index: int) -> Array:
    return x[(slice(None),) * dim + (index,)]


def _concat(*xs: Array, dim: int) -> Array:
    return np.concatenate(xs, axis=dim)


def _slice(x: Array, dim: int, start: int, stop: int | None, step: int, out: Out) -> Array:
    if stop is None:
        first = start + x.shape[dim] if start < 0 else start
        stop, start = first + (out[0][dim] - 1) * step + 1, first
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


def _pad(x: Array, pads: Sequence[int], value: float) -> Array:
    before = [(0, 0)] * (x.ndim - len(pads) // 2)
    pairs = before + [(pads[i], pads[i + 1]) for i in range(len(pads) - 2, -1, -2)]
    cut = tuple(
        slice(max(-low, 0), size - max(-high, 0))
        for (low, high), size in zip(pairs, x.shape, strict=True)
    )
    grown = [(max(low, 0), max(high, 0)) for low, high in pairs]
    return np.pad(x[cut], grown, constant_values=value)


def _require_indices(index: Array, extent: int, low: int = 0) -> Array:
    bad = index[(index < low) | (index >= extent)]
    if bad.size:
        raise ValueError(f"index {bad.flat[0]} is outside {low}..{extent - 1}")
    return index


def _index(x: Array, *indices: Array, dims: Ints) -> Array:
    picks = [
        _require_indices(i, x.shape[d], -x.shape[d]) for i, d in zip(indices, dims, strict=True)
    ]
    return x[(slice(None),) * dims[0] + tuple(picks)]


def _gather(x: Array, index: Array, dim: int) -> Array:
    _require_indices(index, x.shape[dim])
    cut = tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(index.shape))
    return np.take_along_axis(x[cut], index, axis=dim)


def _embedding(table: Array, index: Array) -> Array:
    return table[_require_indices(index, len(table))]


def _embedding_bag(table: Array, index: Array, mode: str) -> Array:
    found = _embedding(table, index)
    if mode == "max":
        return np.asarray(found.max(axis=-2))
    return np.asarray(found.sum(axis=-2) / (found.shape[-2] if mode == "mean" else 1))


_INT: Final = Attr("int")
_DIM: Final = {"dim": DIM}
_DIMS: Final = {"dims": DIMS}
_SLICE: Final = {
    "dim": DIM, "start": _INT, "stop": Attr("int", optional=True), "step": base.POSITIVE,
}  # fmt: skip
_PAD: Final = {"pads": Attr("ints", -(2**31), 2**31), "value": base.SCALAR}
_BAG: Final = {"mode": base.one_of("sum", "mean", "max")}

OPS: Final[dict[str, OpDef]] = {
    "reshape": OpDef(_infer_reshape, lambda x, out: x.reshape(out[0]), typed=True, widen=False),
    "expand": OpDef(
        _infer_expand, lambda x, out: np.broadcast_to(x, out[0]), typed=True, widen=False
    ),
    "permute": OpDef(_infer_permute, lambda x, dims: x.transpose(dims), attrs=_DIMS, widen=False),
    "slice": OpDef(_infer_slice, _slice, attrs=_SLICE, typed=True, widen=False),
    "select": OpDef(_infer_select, _select, attrs={**_DIM, "index": _INT}, widen=False),
    "concat": OpDef(_infer_concat, _concat, attrs=_DIM, variadic=True, widen=False),
    "flip": OpDef(_infer_flip, lambda x, dims: np.flip(x, dims), attrs=_DIMS, widen=False),
    "pad": OpDef(_infer_pad, _pad, attrs=_PAD, widen=False),
    "index": OpDef(_infer_index, _index, 2, attrs=_DIMS, variadic=True, widen=False),
    "gather": OpDef(_infer_gather, _gather, 2, attrs=_DIM, widen=False),
    "embedding": OpDef(_infer_embedding, _embedding, 2, widen=False),
    "embedding_bag": OpDef(_infer_embedding_bag, _embedding_bag, 2, attrs=_BAG),
}
