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
from coissue.kernels.optable.base import (
    ANY,
    INDICES,
    Array,
    Attr,
    Call,
    Ints,
    OpDef,
    Out,
    broadcast,
    like,
    product,
    render_dim,
    render_shape,
    require,
    require_dim,
    require_dims,
    require_dtypes,
    require_rank,
    require_shape,
    require_value,
)

DIM: Final = Attr("int", low=0, high=63)


def _infer_reshape(call: Call) -> tuple[Type, ...]:
    old, new = call.shape(0), call.outputs[0].shape
    require(
        product(old) == product(new),
        f"{render_shape(old)} cannot become {render_shape(new)}: the number of elements differs",
    )
    return (Type(new, call.type(0).dtype),)


def _infer_expand(call: Call) -> tuple[Type, ...]:
    new = call.outputs[0].shape
    require_shape(broadcast(call.shape(0), new), new, "the expanded value")
    return (Type(new, call.type(0).dtype),)


def _infer_permute(call: Call) -> tuple[Type, ...]:
    shape, dims = call.shape(0), call.attrs["dims"]
    require(
        sorted(dims) == list(range(len(shape))),
        f"dims {dims} are not a permutation of the {len(shape)} dims",
    )
    return (Type(tuple(shape[d] for d in dims), call.type(0).dtype),)


def _infer_slice(call: Call) -> tuple[Type, ...]:
    shape, dim = call.shape(0), call.attrs["dim"]
    extent, start, stop = require_dim(shape, dim), call.attrs["start"], call.attrs["stop"]
    if stop is None:
        length = require_dim(call.outputs[0].shape, dim)
        _require_inside(call, extent, start, length, call.attrs["step"])
    elif extent.is_fixed:
        length = Dim(len(range(extent.scale)[start : stop : call.attrs["step"]]))
    else:
        require(
            -extent.scale <= start <= stop <= extent.scale and (start < 0) == (stop < 0),
            f"{start}:{stop} of {render_dim(extent)} is not inside it for every R and T",
        )
        length = Dim(len(range(start, stop, call.attrs["step"])))
    require(length.scale > 0, f"slice {start}:{stop} of {render_dim(extent)} is empty")
    return (Type((*shape[:dim], length, *shape[dim + 1 :]), call.type(0).dtype),)


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
        f"{render_dim(length)} elements from {start} by {step} are not inside "
        f"{render_dim(extent)} for every R and T",
    )


def _infer_select(call: Call) -> tuple[Type, ...]:
    shape, dim, index = call.shape(0), call.attrs["dim"], call.attrs["index"]
    extent = require_dim(shape, dim)
    require(
        -extent.scale <= index < extent.scale,
        f"index {index} is outside {render_dim(extent)} for some R and T",
    )
    return (Type(shape[:dim] + shape[dim + 1 :], call.type(0).dtype),)


def _infer_concat(call: Call) -> tuple[Type, ...]:
    dtype, dim = require_dtypes(call, ANY), call.attrs["dim"]
    first = call.shape(0)
    extents = [require_dim(first, dim)]
    for index in range(1, len(call.inputs)):
        shape = call.shape(index)
        extents.append(require_dim(shape, dim))
        wanted = (*first[:dim], shape[dim], *first[dim + 1 :])
        require_shape(shape, wanted, f"input {index}")
    powers = {(extent.rows, extent.tokens) for extent in extents}
    text = " + ".join(map(render_dim, extents))
    require(len(powers) == 1, f"the joined extent {text} is not a product of R, T and a number")
    total = Dim(sum(extent.scale for extent in extents), *powers.pop())
    return (Type((*first[:dim], total, *first[dim + 1 :]), dtype),)


def _infer_flip(call: Call) -> tuple[Type, ...]:
    require_dims(call.shape(0), call.attrs["dims"])
    return like(call)


def _infer_pad(call: Call) -> tuple[Type, ...]:
    shape, pads = list(call.shape(0)), call.attrs["pads"]
    require(
        len(pads) % 2 == 0 and len(pads) <= 2 * len(shape),
        f"{len(pads)} pads do not fit {render_shape(shape)}; allowed: two per dim, last dim first",
    )
    require_value(call.attrs["value"], call.type(0).dtype, "value")
    for pair in range(len(pads) // 2):
        dim, change = len(shape) - 1 - pair, pads[2 * pair] + pads[2 * pair + 1]
        if pads[2 * pair] or pads[2 * pair + 1]:
            extent = shape[dim].scale + min(pads[2 * pair], 0) + min(pads[2 * pair + 1], 0)
            require(
                shape[dim].is_fixed and extent > 0,
                f"dim {dim} of {render_shape(call.shape(0))} cannot be padded by {change}",
            )
            shape[dim] = Dim(shape[dim].scale + change)
    return (Type(tuple(shape), call.type(0).dtype),)


def _infer_index(call: Call) -> tuple[Type, ...]:
    shape, dims = call.shape(0), call.attrs["dims"]
    require_dims(shape, dims)
    count = len(call.inputs) - 1
    require(
        count == len(dims) == dims[-1] - dims[0] + 1,
        f"dims {dims} must be adjacent, one for each of the {count} index tensors",
    )
    require_dtypes(call, INDICES, *range(1, count + 1))
    picked = broadcast(*(call.shape(i) for i in range(1, count + 1)))
    return (Type(shape[: dims[0]] + picked + shape[dims[-1] + 1 :], call.type(0).dtype),)


def _infer_gather(call: Call) -> tuple[Type, ...]:
    shape, index, dim = call.shape(0), call.shape(1), call.attrs["dim"]
    require_dtypes(call, INDICES, 1)
    require_dim(shape, dim)
    require_rank(index, len(shape), len(shape), "the index")
    for d, (mine, its) in enumerate(zip(index, shape, strict=True)):
        inside = mine == its or (mine.is_fixed and its.is_fixed and mine.scale <= its.scale)
        require(inside or d == dim, f"the index {render_shape(index)} is larger than the value")
    return (Type(index, call.type(0).dtype),)


def _infer_embedding(call: Call) -> tuple[Type, ...]:
    require_rank(call.shape(0), 2, 2, "the table")
    require_dtypes(call, INDICES, 1)
    return (Type((*call.shape(1), call.shape(0)[1]), call.type(0).dtype),)


def _infer_embedding_bag(call: Call) -> tuple[Type, ...]:
    require_rank(call.shape(1), 1, 63, "the index")
    (looked_up,) = _infer_embedding(call)
    return (Type((*looked_up.shape[:-2], looked_up.shape[-1]), looked_up.dtype),)


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


def _flip(x: Array, dims: Ints) -> Array:
    return np.flip(x, dims)


OPS: Final[dict[str, OpDef]] = {
    "reshape": OpDef(_infer_reshape, lambda x, out: x.reshape(out[0]), typed=True, widen=False),
    "expand": OpDef(
        _infer_expand, lambda x, out: np.broadcast_to(x, out[0]), typed=True, widen=False
    ),
    "permute": OpDef(
        _infer_permute,
        lambda x, dims: x.transpose(dims),
        attrs={"dims": Attr("ints", low=0, high=63)},
        widen=False,
    ),
    "slice": OpDef(
        _infer_slice,
        _slice,
        attrs={
            "dim": DIM,
            "start": Attr("int"),
            "stop": Attr("int", optional=True),
            "step": Attr("int", low=1),
        },
        typed=True,
        widen=False,
    ),
    "select": OpDef(
        _infer_select,
        lambda x, dim, index: x.take(index, axis=dim),
        attrs={"dim": DIM, "index": Attr("int")},
        widen=False,
    ),
    "concat": OpDef(
        _infer_concat,
        lambda *xs, dim: np.concatenate(xs, axis=dim),
        variadic=True,
        attrs={"dim": DIM},
        widen=False,
    ),
    "flip": OpDef(_infer_flip, _flip, attrs={"dims": Attr("ints", low=0, high=63)}, widen=False),
    "pad": OpDef(
        _infer_pad, _pad, attrs={"pads": Attr("ints"), "value": Attr("scalar")}, widen=False
    ),
    "index": OpDef(
        _infer_index,
        _index,
        required=2,
        variadic=True,
        attrs={"dims": Attr("ints", low=0, high=63)},
        widen=False,
    ),
    "gather": OpDef(_infer_gather, _gather, required=2, attrs={"dim": DIM}, widen=False),
    "embedding": OpDef(_infer_embedding, _embedding, required=2, widen=False),
    "embedding_bag": OpDef(
        _infer_embedding_bag,
        _embedding_bag,
        required=2,
        attrs={"mode": Attr("str", choices=("sum", "mean", "max"))},
    ),
}
