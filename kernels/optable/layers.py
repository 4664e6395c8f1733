"""The large ops: linear, matmul, convolution, pooling and attention.

Spatial extents are mostly fixed; one with R or T passes through a window whose output is again a
product of R, T and a number, such as a "same" convolution or a pooling with kernel = stride.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from coissue.kernels.ir import Dim, Type
from coissue.kernels.optable.base import (
    BOOL,
    FLOATS,
    NUMBERS,
    Attr,
    Call,
    OpDef,
    Shape,
    broadcast,
    render_dim,
    render_shape,
    require,
    require_dtypes,
    require_present,
    require_rank,
    require_shape,
)
from coissue.kernels.optable.reductions import softmax

Array = npt.NDArray[Any]
#: Bound on kernel, stride, padding and dilation, far above any model's.
WINDOW_LIMIT: Final = 4096


def _infer_linear(call: Call) -> tuple[Type, ...]:
    dtype = require_dtypes(call, NUMBERS)
    shape, weight = call.shape(0), call.shape(1)
    require_rank(shape, 1, 63, "input 0")
    require_rank(weight, 2, 2, "the weight")
    n, k = weight if call.attrs["layout"] == "nk" else weight[::-1]
    require_shape(shape[-1:], (k,), "the last dim of input 0")
    require_present(call, 2, (n,), "the bias")
    return (Type((*shape[:-1], n), dtype),)


def _linear(x: Array, weight: Array, bias: Array | None, layout: str) -> Array:
    y: Array = np.matmul(x, weight.T if layout == "nk" else weight)
    return y if bias is None else y + bias


def _infer_matmul(call: Call) -> tuple[Type, ...]:
    dtype = require_dtypes(call, NUMBERS)
    a, b = call.shape(0), call.shape(1)
    require(bool(a) and bool(b), "an input is a scalar; allowed: at least one dim")
    left = a if len(a) > 1 else (Dim(1), *a)
    right = b if len(b) > 1 else (*b, Dim(1))
    require_shape(right[-2:-1], left[-1:], "the dim summed over in input 1")
    ends = (left[-2:-1] if len(a) > 1 else ()) + (right[-1:] if len(b) > 1 else ())
    return (Type(broadcast(left[:-2], right[:-2]) + ends, dtype),)


# --- windows: convolution and pooling -----------------------------------------------------------


def _ints(low: int) -> Attr:
    return Attr("ints", low=low, high=WINDOW_LIMIT)


def window_extent(
    extent: Dim, kernel: int, stride: int, padding: int, dilation: int = 1, ceil: bool = False
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
        f"{text} over {render_dim(extent)} does not give a product of R, T and a number",
    )
    return Dim(extent.scale // stride, extent.rows, extent.tokens)


def _spatial(call: Call, *names: str) -> int:
    """The number of spatial dims (1 or 2): the length of every window attr."""
    lengths = {len(call.attrs[name]) for name in names}
    dims = lengths.pop()
    require(
        not lengths and dims in (1, 2),
        f"{', '.join(names)} must have one entry per spatial dim, of which there are 1 or 2",
    )
    require_rank(call.shape(0), dims + 2, dims + 2, "input 0")
    return dims


def _infer_conv(call: Call) -> tuple[Type, ...]:
    dtype = require_dtypes(call, FLOATS)
    dims = _spatial(call, "stride", "padding", "dilation")
    shape, weight, groups = call.shape(0), call.shape(1), call.attrs["groups"]
    require_rank(weight, dims + 2, dims + 2, "the weight")
    fixed = all(dim.is_fixed for dim in (*weight, shape[1]))
    require(
        fixed and weight[0].scale % groups == 0 and shape[1].scale == weight[1].scale * groups,
        f"the weight {render_shape(weight)} in {groups} groups does not fit {render_shape(shape)}",
    )
    require_present(call, 2, weight[:1], "the bias")
    spots = tuple(
        window_extent(extent, kernel.scale, *window)
        for extent, kernel, *window in zip(
            shape[2:],
            weight[2:],
            *(call.attrs[name] for name in ("stride", "padding", "dilation")),
            strict=True,
        )
    )
    return (Type((shape[0], weight[0], *spots), dtype),)


def _infer_pool(call: Call) -> tuple[Type, ...]:
    names = [name for name in ("kernel", "stride", "padding", "dilation") if name in call.attrs]
    dtype = require_dtypes(call, NUMBERS if "dilation" in call.attrs else FLOATS)
    _spatial(call, *names)
    shape, attrs = call.shape(0), call.attrs
    for kernel, padding, dilation in zip(
        attrs["kernel"], attrs["padding"], attrs.get("dilation", attrs["kernel"]), strict=True
    ):
        reach = dilation * (kernel - 1) + 1 if "dilation" in attrs else kernel
        require(2 * padding <= reach, f"padding {padding} is over half of the window {reach}")
    spots = tuple(
        window_extent(extent, *window, ceil=attrs["ceil"])
        for extent, *window in zip(shape[2:], *(attrs[name] for name in names), strict=True)
    )
    return (Type((*shape[:2], *spots), dtype),)


def _infer_adaptive(call: Call) -> tuple[Type, ...]:
    dtype = require_dtypes(call, FLOATS)
    dims = _spatial(call, "size")
    shape = call.shape(0)
    return (Type((*shape[: len(shape) - dims], *map(Dim, call.attrs["size"])), dtype),)


def _taps(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    spots: Sequence[int],
) -> list[Array]:
    """For each place in the kernel, the elements of x it meets: (batch, channels, *spots) each."""
    taps = []
    for place in itertools.product(*map(range, kernel)):
        cut = tuple(
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, n, s in zip(place, dilation, spots, stride, strict=True)
        )
        taps.append(x[(slice(None), slice(None), *cut)])
    return taps


def _padded(x: Array, value: Any, padding: Sequence[int], needed: Sequence[int]) -> Array:
    """x with `padding` in front and at least `needed` elements in all, along the spatial dims."""
    grown = [
        (p, max(n - p - size, p)) for p, n, size in zip(padding, needed, x.shape[2:], strict=True)
    ]
    return np.pad(x, [(0, 0), (0, 0), *grown], constant_values=value)


def _needed(
    spots: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    columns = zip(spots, kernel, stride, dilation, strict=True)
    return [(n - 1) * s + d * (k - 1) + 1 for n, k, s, d in columns]


def _conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    out: tuple[tuple[int, ...], Any],
) -> Array:
    (rows, channels, *spots), kernel = out[0], weight.shape[2:]
    grown = _padded(x, 0, padding, _needed(spots, kernel, stride, dilation))
    taps = _taps(grown, kernel, stride, dilation, spots)
    flat = weight.reshape(groups, channels // groups, weight.shape[1], -1)
    y = sum(
        flat[None, ..., i] @ tap.reshape(rows, groups, weight.shape[1], -1)
        for i, tap in enumerate(taps)
    )
    y = np.asarray(y).reshape(out[0])
    return y if bias is None else y + bias.reshape(-1, *(1,) * len(spots))


def _lowest(dtype: np.dtype[Any]) -> Any:
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _max_pool(
    x: Array,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil: bool,
    out: tuple[tuple[int, ...], Any],
) -> Array:
    spots = out[0][2:]
    grown = _padded(x, _lowest(x.dtype), padding, _needed(spots, kernel, stride, dilation))
    return np.maximum.reduce(_taps(grown, kernel, stride, dilation, spots))


def _avg_pool(
    x: Array,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    ceil: bool,
    include_pad: bool,
    divisor: int | None,
    out: tuple[tuple[int, ...], Any],
) -> Array:
    spots, unit = out[0][2:], (1,) * len(kernel)
    grown = _padded(x, 0, padding, _needed(spots, kernel, stride, unit))
    total = np.add.reduce(_taps(grown, kernel, stride, unit, spots))
    if divisor is not None:
        return total / divisor
    for axis, (k, s, p, size) in enumerate(zip(kernel, stride, padding, x.shape[2:], strict=True)):
        start = np.arange(spots[axis]) * s - p
        end = np.minimum(start + k, size + p)
        counts = end - start if include_pad else np.minimum(end, size) - np.maximum(start, 0)
        total = total / counts.reshape(-1, *(1,) * (len(kernel) - 1 - axis))
    return total


def _adaptive(x: Array, size: tuple[int, ...]) -> Array:
    """Means over windows from floor(i L / n) to ceil((i + 1) L / n), one dim after the other."""
    for axis, count in enumerate(size, start=x.ndim - len(size)):
        length = x.shape[axis]
        windows = [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]
        means = [x.take(range(low, high), axis=axis).mean(axis=axis) for low, high in windows]
        x = np.stack(means, axis=axis)
    return x


# --- attention ----------------------------------------------------------------------------------


def _as_bhsd(shape: Shape, layout: str) -> Shape:
    return shape if layout == "bhsd" else (shape[0], shape[2], shape[1], shape[3])


def _infer_attention(call: Call) -> tuple[Type, ...]:
    dtype = require_dtypes(call, FLOATS, 0, 1, 2)
    for index in range(3):
        require_rank(call.shape(index), 4, 4, f"input {index}")
    layout = call.attrs["layout"]
    q, k, v = (_as_bhsd(call.shape(index), layout) for index in range(3))
    require_shape(k, (*q[:2], k[2], q[3]), "the key (batch, heads, tokens, size)")
    require_shape(v, (*k[:3], v[3]), "the value (batch, heads, tokens, size)")
    _check_mask(call, (*q[:3], k[2]), dtype)
    return (Type(_as_bhsd((*q[:3], v[3]), layout), dtype),)


def _check_mask(call: Call, scores: Shape, dtype: str) -> None:
    kind, mask = call.attrs["mask"], call.inputs[3]
    require((mask is None) == (kind == "none"), f"mask {kind!r} and the mask input do not agree")
    if mask is None:
        return
    if kind == "key":
        require_dtypes(call, BOOL, 3)
        require_shape(mask.shape, (scores[0], scores[3]), "the key mask")
        return
    require_dtypes(call, BOOL | {dtype}, 3)
    require_shape(broadcast(mask.shape, scores), scores, "the mask with the scores")


def _attention(
    q: Array,
    k: Array,
    v: Array,
    seen: Array | None,
    /,
    causal: bool,
    scale: float,
    layout: str,
    mask: str,
) -> Array:
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


_WINDOW: Final = {"stride": _ints(1), "padding": _ints(0)}

OPS: Final[dict[str, OpDef]] = {
    "linear": OpDef(
        _infer_linear,
        _linear,
        required=2,
        optional=1,
        attrs={"layout": Attr("str", choices=("nk", "kn"))},
    ),
    "matmul": OpDef(_infer_matmul, np.matmul, required=2),
    "conv": OpDef(
        _infer_conv,
        _conv,
        required=2,
        optional=1,
        attrs={**_WINDOW, "dilation": _ints(1), "groups": Attr("int", low=1)},
        typed=True,
    ),
    "max_pool": OpDef(
        _infer_pool,
        _max_pool,
        attrs={"kernel": _ints(1), **_WINDOW, "dilation": _ints(1), "ceil": Attr("bool")},
        typed=True,
    ),
    "avg_pool": OpDef(
        _infer_pool,
        _avg_pool,
        attrs={
            "kernel": _ints(1),
            **_WINDOW,
            "ceil": Attr("bool"),
            "include_pad": Attr("bool"),
            "divisor": Attr("int", optional=True, low=1),
        },
        typed=True,
    ),
    "adaptive_avg_pool": OpDef(
        _infer_adaptive, _adaptive, attrs={"size": Attr("ints", low=1, high=2**31)}
    ),
    "attention": OpDef(
        _infer_attention,
        _attention,
        required=3,
        optional=1,
        attrs={
            "causal": Attr("bool"),
            "scale": Attr("float"),
            "layout": Attr("str", choices=("bhsd", "bshd")),
            "mask": Attr("str", choices=("none", "full", "key")),
        },
    ),
}
