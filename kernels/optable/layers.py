"""The large ops: linear, matmul, convolution, pooling and attention.

Spatial extents are mostly fixed; one with R or T passes through a window whose output is again a
product of R, T and a number, such as a "same" convolution or a pooling with kernel = stride.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from coissue.kernels.ir import Dim, Type
from coissue.kernels.optable import base
from coissue.kernels.optable.base import FLAG, Array, Attr, Call, Ints, OpDef, Out, Shape, require
from coissue.kernels.optable.reductions import softmax

#: Bound on kernel, stride, padding and dilation, far above any model's.
WINDOW_LIMIT: Final = 4096


def _infer_linear(call: Call) -> tuple[Type, ...]:
    shape, weight = call.shape(0, range(1, 64)), call.shape(1, [2])
    n, k = weight if call.attrs["layout"] == "nk" else weight[::-1]
    base.require_shape(shape[-1:], (k,), "the last dim of input 0")
    call.expect(2, (n,))
    return (Type((*shape[:-1], n), call.dtype("number")),)


def _linear(x: Array, weight: Array, bias: Array | None, layout: str) -> Array:
    y: Array = np.matmul(x, weight.T if layout == "nk" else weight)
    return y if bias is None else y + bias


def _infer_matmul(call: Call) -> tuple[Type, ...]:
    a, b = (call.shape(index, range(1, 64)) for index in range(2))
    left = a if len(a) > 1 else (base.ONE, *a)
    right = b if len(b) > 1 else (*b, base.ONE)
    base.require_shape(right[-2:-1], left[-1:], "the dim summed over in input 1")
    ends = (left[-2:-1] if len(a) > 1 else ()) + (right[-1:] if len(b) > 1 else ())
    return (Type(base.broadcast(left[:-2], right[:-2]) + ends, call.dtype("number")),)


# --- windows: convolution and pooling -----------------------------------------------------------


def window_extent(
    extent: Dim, kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> Dim:
    """How many places a window has along `extent`, for every R and T."""
    text = f"a window of {kernel} (stride {stride}, padding {padding}, dilation {dilation})"
    spare = 2 * padding - dilation * (kernel - 1) - 1
    fixed = extent.scale if extent.is_fixed else 0
    places = (-(-(fixed + spare) // stride) if ceil else (fixed + spare) // stride) + 1
    # torch drops a last window that would start in the right padding.
    if ceil and (places - 1) * stride >= fixed + padding:
        places -= 1
    if extent.is_fixed:
        require(places > 0, f"{text} does not fit {extent.scale}")
        return Dim(places)
    require(
        places == 0 and extent.scale % stride == 0,
        f"{text} over {base.render_dim(extent)} does not give a product of R, T and a number",
    )
    return Dim(extent.scale // stride, extent.rows, extent.tokens)


def _require_spatial(call: Call, *names: str) -> None:
    """Every window attr has one entry per spatial dim, of which there are 1 or 2."""
    lengths = {len(call.attrs[name]) for name in names}
    text = f"{', '.join(names)} must have one entry per spatial dim, of which there are 1 or 2"
    require(lengths in ({1}, {2}), text)
    call.shape(0, [2 + lengths.pop()])


def _slide(call: Call, kernel: Sequence[int]) -> Shape:
    """The spatial dims of the output."""
    attrs, ones = call.attrs, (1,) * len(kernel)
    windows = zip(
        kernel, attrs["stride"], attrs["padding"], attrs.get("dilation", ones), strict=True
    )
    ceil = attrs.get("ceil", False)
    return tuple(
        window_extent(extent, *window, ceil)
        for extent, window in zip(call.shape(0)[2:], windows, strict=True)
    )


def _infer_conv(call: Call) -> tuple[Type, ...]:
    _require_spatial(call, "stride", "padding", "dilation")
    shape, groups = call.shape(0), call.attrs["groups"]
    weight = call.shape(1, [len(shape)])
    fits = all(dim.is_fixed for dim in (*weight, shape[1])) and weight[0].scale % groups == 0
    require(
        fits and shape[1].scale == weight[1].scale * groups,
        f"the weight {base.render_shape(weight)} in {groups} groups does not fit "
        f"{base.render_shape(shape)}",
    )
    call.expect(2, weight[:1])
    spots = _slide(call, [dim.scale for dim in weight[2:]])
    return (Type((shape[0], weight[0], *spots), call.dtype("float")),)


def _infer_pool(call: Call) -> tuple[Type, ...]:
    attrs, ones = call.attrs, (1,) * len(call.attrs["kernel"])
    is_max = "dilation" in attrs
    dtype = call.dtype("number" if is_max else "float")
    _require_spatial(call, "kernel", "stride", "padding", *["dilation"] * is_max)
    windows = zip(attrs["kernel"], attrs["padding"], attrs.get("dilation", ones), strict=True)
    for kernel, padding, dilation in windows:
        reach = dilation * (kernel - 1) + 1
        require(2 * padding <= reach, f"padding {padding} is over half of the window {reach}")
    return (Type((*call.shape(0)[:2], *_slide(call, attrs["kernel"])), dtype),)


def _infer_adaptive(call: Call) -> tuple[Type, ...]:
    _require_spatial(call, "size")
    return (Type((*call.shape(0)[:2], *map(Dim, call.attrs["size"])), call.dtype("float")),)


def _taps(
    x: Array, fill: Any, spots: Ints, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> list[Array]:
    """For each place in the kernel, the elements of x that it meets: (batch, channels, *spots)."""
    columns = list(zip(spots, kernel, stride, padding, dilation, x.shape[2:], strict=True))
    needed = [(n - 1) * s + d * (k - 1) + 1 for n, k, s, _, d, _ in columns]
    grown = [(p, max(n - p - c[-1], p)) for n, p, c in zip(needed, padding, columns, strict=True)]
    x = np.pad(x, [(0, 0), (0, 0), *grown], constant_values=fill)
    taps = []
    for place in itertools.product(*map(range, kernel)):
        spans = [
            (i * d, (n - 1) * s, s) for i, (n, _, s, _, d, _) in zip(place, columns, strict=True)
        ]
        cut = tuple(slice(first, first + length + 1, step) for first, length, step in spans)
        taps.append(x[(slice(None), slice(None), *cut)])
    return taps


def _conv(
    x: Array, weight: Array, bias: Array | None,
    stride: Ints, padding: Ints, dilation: Ints, groups: int, out: Out,
) -> Array:  # fmt: skip
    (rows, channels, *spots), deep = out[0], weight.shape[1]
    taps = _taps(x, 0, tuple(spots), weight.shape[2:], stride, padding, dilation)
    flat = weight.reshape(groups, channels // groups, deep, -1)
    columns = (tap.reshape(rows, groups, deep, -1) for tap in taps)
    y = sum(flat[..., i] @ column for i, column in enumerate(columns))
    y = np.asarray(y).reshape(out[0])
    return y if bias is None else y + bias.reshape(-1, *(1,) * len(spots))


def _max_pool(
    x: Array, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil: bool, out: Out
) -> Array:
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    taps = _taps(x, lowest, out[0][2:], kernel, stride, padding, dilation)
    return np.asarray(np.maximum.reduce(taps))


def _avg_pool(
    x: Array, kernel: Ints, stride: Ints, padding: Ints,
    ceil: bool, include_pad: bool, divisor: int | None, out: Out,
) -> Array:  # fmt: skip
    """A window counts what lies inside x, or inside x and its padding if `include_pad`."""
    spots = out[0][2:]
    taps = _taps(x, 0, spots, kernel, stride, padding, (1,) * len(kernel))
    total = np.asarray(np.add.reduce(taps))
    if divisor is not None:
        return total / divisor
    for axis, (n, k, s, p, size) in enumerate(
        zip(spots, kernel, stride, padding, x.shape[2:], strict=True), start=2
    ):
        edge = p if include_pad else 0
        start = np.arange(n) * s - p
        counts = np.minimum(np.minimum(start + k, size + p), size + edge) - np.maximum(start, -edge)
        total = total / counts.reshape(-1, *(1,) * (x.ndim - 1 - axis))
    return total


def _adaptive(x: Array, size: Ints) -> Array:
    """Means over windows from floor(i L / n) to ceil((i + 1) L / n), one dim after the other."""
    for axis, count in enumerate(size, start=2):
        length = x.shape[axis]
        windows = [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]
        means = [x.take(range(low, high), axis=axis).mean(axis=axis) for low, high in windows]
        x = np.stack(means, axis=axis)
    return x


# --- attention ----------------------------------------------------------------------------------


def _as_bhsd(shape: Shape, layout: str) -> Shape:
    return shape if layout == "bhsd" else (shape[0], shape[2], shape[1], shape[3])


def _infer_attention(call: Call) -> tuple[Type, ...]:
    dtype, layout = call.dtype("float", 0, 1, 2), call.attrs["layout"]
    q, k, v = (_as_bhsd(call.shape(index, [4]), layout) for index in range(3))
    base.require_shape(k, (*q[:2], k[2], q[3]), "the key (batch, heads, tokens, size)")
    base.require_shape(v, (*k[:3], v[3]), "the value (batch, heads, tokens, size)")
    _check_mask(call, (*q[:3], k[2]), dtype)
    return (Type(_as_bhsd((*q[:3], v[3]), layout), dtype),)


def _check_mask(call: Call, scores: Shape, dtype: str) -> None:
    kind, mask = call.attrs["mask"], call.inputs[3]
    require((mask is None) == (kind == "none"), f"mask {kind!r} and the mask input do not agree")
    if mask is None:
        return
    if kind == "key":
        call.dtype("bool", 3)
        call.expect(3, (scores[0], scores[3]))
        return
    require(mask.dtype in ("bool", dtype), f"the mask is {mask.dtype}; allowed: bool, {dtype}")
    base.require_shape(base.broadcast(mask.shape, scores), scores, "the mask with the scores")


def _attention(
    q: Array, k: Array, v: Array, seen: Array | None, /,
    causal: bool, scale: float, layout: str, mask: str,
) -> Array:  # fmt: skip
    """softmax(scale q k^T + mask) v; a query that may see no key gives 0, as torch has it."""
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = scale * (q @ k.swapaxes(2, 3))
    if seen is not None:
        spread = seen[:, None, None, :] if mask == "key" else seen
        is_bool = seen.dtype == np.bool_
        scores = np.where(spread, scores, -np.inf) if is_bool else scores + spread
    if causal:
        scores = np.where(np.tri(*scores.shape[2:], dtype=np.bool_), scores, -np.inf)
    blind = (scores == -np.inf).all(axis=3, keepdims=True)
    y: Array = (softmax(np.where(blind, 0.0, scores), 3) * ~blind) @ v
    return y.swapaxes(1, 2) if layout == "bshd" else y


def _ints(low: int) -> Attr:
    return Attr("ints", low, WINDOW_LIMIT)


_LINEAR: Final = {"layout": base.one_of("nk", "kn")}
_WINDOW: Final = {"stride": _ints(1), "padding": _ints(0)}
_CONV: Final = {**_WINDOW, "dilation": _ints(1), "groups": base.POSITIVE}
_POOL: Final = {**_WINDOW, "kernel": _ints(1), "ceil": FLAG}
_AVG: Final = {**_POOL, "include_pad": FLAG, "divisor": Attr("int", 1, optional=True)}
_ATTENTION: Final = {
    "causal": FLAG, "scale": base.FLOAT, "layout": base.one_of("bhsd", "bshd"),
    "mask": base.one_of("none", "full", "key"),
}  # fmt: skip

OPS: Final[dict[str, OpDef]] = {
    "linear": OpDef(_infer_linear, _linear, 2, 1, _LINEAR),
    "matmul": OpDef(_infer_matmul, np.matmul, 2),
    "conv": OpDef(_infer_conv, _conv, 2, 1, _CONV, typed=True),
    "max_pool": OpDef(_infer_pool, _max_pool, attrs={**_POOL, "dilation": _ints(1)}, typed=True),
    "avg_pool": OpDef(_infer_pool, _avg_pool, attrs=_AVG, typed=True),
    "adaptive_avg_pool": OpDef(_infer_adaptive, _adaptive, attrs={"size": Attr("ints", 1, 2**31)}),
    "attention": OpDef(_infer_attention, _attention, 3, 1, _ATTENTION),
}
