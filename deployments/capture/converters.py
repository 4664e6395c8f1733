"""ATen ops as IR ops: element by element, constants, views and reads by index.

One small function per op or family; `a` holds the ATen arguments by schema name. The inputs of one
IR op share one dtype and dims count from 0: casts and signs are settled here. See `lower`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from coissue.deployments.capture.lower import Args, Builder, Result, as_kind, converts
from coissue.deployments.capture.shapes import DTYPES, broadcast
from coissue.kernels.ir import Dim, Type
from coissue.kernels.optable.base import ONE

UNARY = (
    "abs ceil cos erf exp floor hardsigmoid hardswish log log1p logical_not mish neg reciprocal "
    "relu round rsqrt sigmoid sign silu sin sqrt tanh"
)
#: ATen name -> IR name.
ARITHMETIC = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "pow": "pow", "maximum": "maximum",
    "minimum": "minimum", "remainder": "remainder", "floor_divide": "floor_div",
}  # fmt: skip
LOGICAL = {
    "logical_and": "logical_and", "__and__": "logical_and", "bitwise_and": "logical_and",
    "logical_or": "logical_or", "__or__": "logical_or", "bitwise_or": "logical_or",
    "logical_xor": "ne", "__xor__": "ne", "bitwise_xor": "ne",
}  # fmt: skip
#: ATen name -> the number it fills with; None: an argument says it.
FILLS = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1,
    "full": None, "full_like": None, "new_full": None, "fill": None, "scalar_tensor": None,
}  # fmt: skip


def axis(b: Builder, value: int, dim: int) -> int:
    """`dim` counted from 0."""
    return dim % max(len(b.shape(value)), 1)


def replaced(shape: Sequence[Dim], dim: int, *extents: Dim) -> tuple[Dim, ...]:
    return (*shape[:dim], *extents, *shape[dim + 1 :])


def binary(b: Builder, op: str, left: int, right: int, dtype: str = "") -> int:
    """`op` of two values of one dtype; `dtype` is the result's, if another."""
    shape = broadcast(b.shape(left), b.shape(right))
    return b.emit(op, (left, right), Type(shape, dtype or b.type(left).dtype))


# --- element by element -------------------------------------------------------------------------


@converts(*UNARY.split())
def _unary(b: Builder, a: Args) -> Result:
    if a.get("decimals"):
        raise b.error("rounding to decimals is not served")
    name = b.aten_name
    dtype = b.type(b.value(a["self"])).dtype if name == "logical_not" else b.out().dtype
    return b.emit(name, (b.value(a["self"], dtype),), b.out())


@converts(*ARITHMETIC)
def _arithmetic(b: Builder, a: Args) -> Result:
    dtype, op = b.out().dtype, ARITHMETIC[b.aten_name]
    left = b.value(a["self"], dtype)
    right = b.value(a["exponent"] if "exponent" in a else a["other"], dtype)
    if a.get("alpha", 1) != 1:
        right = binary(b, "mul", right, b.constant(a["alpha"], dtype))
    if a.get("rounding_mode"):
        if a["rounding_mode"] != "floor":
            raise b.error("division rounded towards zero is not served")
        op = "floor_div"
    return binary(b, op, left, right)


@converts("rsub")
def _rsub(b: Builder, a: Args) -> Result:
    if a["alpha"] != 1:
        raise b.error("a factor inside a subtraction is not served")
    dtype = b.out().dtype
    return binary(b, "sub", b.value(a["other"], dtype), b.value(a["self"], dtype))


@converts("eq", "ne", "lt", "le", "gt", "ge", *LOGICAL)
def _compare(b: Builder, a: Args) -> Result:
    name = b.aten_name
    dtype = _common_dtype(a["self"], a["other"])
    if name in LOGICAL and dtype != "bool":
        if "logical" not in name:
            raise b.error("bit by bit logic on integers is not served")
        dtype = "bool"
    operands = (b.value(a["self"], dtype), b.value(a["other"], dtype))
    return binary(b, LOGICAL.get(name, name), *operands, "bool")


def _common_dtype(left: Any, right: Any) -> str:
    sides = [side.meta["val"] if isinstance(side, Node) else side for side in (left, right)]
    plain = [1 if isinstance(side, torch.SymInt) else side for side in sides]
    return DTYPES[torch.result_type(*plain)]


@converts("isnan")
def _isnan(b: Builder, a: Args) -> Result:
    return binary(b, "ne", b.value(a["self"]), b.value(a["self"]), "bool")


@converts("bitwise_not")
def _not(b: Builder, a: Args) -> Result:
    if b.out().dtype != "bool":
        raise b.error("bit by bit logic on integers is not served")
    return b.emit("logical_not", (b.value(a["self"]),), b.out())


@converts("gelu")
def _gelu(b: Builder, a: Args) -> Result:
    return b.emit("gelu", (b.value(a["self"]),), b.out(), approximate=a["approximate"])


@converts("leaky_relu")
def _leaky_relu(b: Builder, a: Args) -> Result:
    return b.emit("leaky_relu", (b.value(a["self"]),), b.out(), slope=float(a["negative_slope"]))


@converts("elu")
def _elu(b: Builder, a: Args) -> Result:
    if a["input_scale"] != 1:
        raise b.error("elu with an input scale is not served")
    value = b.emit("elu", (b.value(a["self"]),), b.out(), alpha=float(a["alpha"]))
    if a["scale"] == 1:
        return value
    return binary(b, "mul", value, b.constant(a["scale"], b.out().dtype))


@converts("softplus")
def _softplus(b: Builder, a: Args) -> Result:
    if a["beta"] != 1 or a["threshold"] != 20:
        raise b.error("softplus is served with beta 1 and threshold 20")
    return b.emit("softplus", (b.value(a["self"]),), b.out())


@converts("clamp", "clamp_min", "clamp_max", "hardtanh", "relu6")
def _clamp(b: Builder, a: Args) -> Result:
    value, kind = b.value(a["self"], b.out().dtype), b.out()
    low, high = a.get("min", a.get("min_val")), a.get("max", a.get("max_val"))
    if b.aten_name == "relu6":
        low, high = 0, 6
    if isinstance(low, Node) or isinstance(high, Node):
        for op, bound in (("maximum", low), ("minimum", high)):
            value = value if bound is None else binary(b, op, value, b.value(bound, kind.dtype))
        return value
    bounds = [None if bound is None else as_kind(bound, kind.dtype) for bound in (low, high)]
    return b.emit("clamp", (value,), kind, min=bounds[0], max=bounds[1])


@converts("where", "masked_fill")
def _choose(b: Builder, a: Args) -> Result:
    if "value" in a:
        a = {"condition": a["mask"], "self": a["value"], "other": a["self"]}
    if "self" not in a:
        raise b.error("a shape that depends on values cannot be served")
    sides = [b.value(a[name], b.out().dtype) for name in ("self", "other")]
    return where(b, b.value(a["condition"], "bool"), *sides)


def where(b: Builder, condition: int, left: int, right: int) -> int:
    shape = broadcast(*(b.shape(value) for value in (condition, left, right)))
    return b.emit("where", (condition, left, right), Type(shape, b.type(left).dtype))


@converts("clone", "contiguous", "detach", "alias", "lift_fresh_copy", "_to_copy", "to", "type_as")
def _same(b: Builder, a: Args) -> Result:
    return b.value(a["self"], b.out().dtype)


@converts("dropout")
def _dropout(b: Builder, a: Args) -> Result:
    if a["train"] and a["p"] > 0:
        raise b.error("dropout in training mode is random: the module must be in eval mode")
    return b.value(a["input"])


# --- constants ----------------------------------------------------------------------------------


@converts(*FILLS)
def _fill(b: Builder, a: Args) -> Result:
    number = FILLS[b.aten_name]
    if number is None:
        number = next(a[key] for key in ("fill_value", "value", "s") if key in a)
    if isinstance(number, Node):
        return b.expand(b.value(number, b.out().dtype), b.out().shape)
    return b.fill(number, b.out())


@converts("arange")
def _arange(b: Builder, a: Args) -> Result:
    start, step = a.get("start", 0), a.get("step", 1)
    (extent,), dtype = b.out().shape, b.out().dtype
    if all(isinstance(number, int) for number in (start, step)):
        return b.cast(counting(b, extent, start, step), dtype)
    scaled = binary(b, "mul", b.cast(counting(b, extent), dtype), b.value(step, dtype))
    return binary(b, "add", scaled, b.value(start, dtype))


def counting(b: Builder, extent: Dim, start: int = 0, step: int = 1) -> int:
    return b.emit("arange", (), Type((extent,), "i64"), start=start, step=step)


@converts("tril", "triu")
def _triangle(b: Builder, a: Args) -> Result:
    value, (height, width) = b.value(a["self"]), b.out().shape[-2:]
    down = b.reshape(counting(b, height, int(a["diagonal"])), (height, ONE))
    inside = binary(b, "le" if b.aten_name == "tril" else "ge", counting(b, width), down, "bool")
    if b.out().dtype == "bool":
        return binary(b, "logical_and", inside, value)
    return where(b, inside, value, b.constant(0, b.out().dtype))


# --- views --------------------------------------------------------------------------------------


@converts("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshape(b: Builder, a: Args) -> Result:
    if "dtype" in a:
        raise b.error("the bits of one dtype read as another are not served")
    return b.reshape(b.value(a["self"]), b.out().shape)


@converts("expand", "expand_as", "broadcast_to")
def _expand(b: Builder, a: Args) -> Result:
    return b.expand(b.value(a["self"]), b.out().shape)


@converts("repeat")
def _repeat(b: Builder, a: Args) -> Result:
    """(a, b) repeated (m, n) times: (1, a, 1, b) -> (m, a, n, b) -> (m a, n b)."""
    value, counts = b.value(a["self"]), [b.dim(count) for count in a["repeats"]]
    shape = (ONE,) * (len(counts) - len(b.shape(value))) + b.shape(value)
    split = b.reshape(value, [d for extent in shape for d in (ONE, extent)])
    wide = [d for count, extent in zip(counts, shape, strict=True) for d in (count, extent)]
    return b.reshape(b.expand(split, wide), b.out().shape)


@converts("permute", "transpose", "t", "numpy_T", "mT", "swapaxes")
def _permute(b: Builder, a: Args) -> Result:
    value = b.value(a["self"])
    dims = list(range(len(b.shape(value))))
    if "dims" in a:
        dims = [axis(b, value, dim) for dim in a["dims"]]
    elif "dim0" in a:
        left, right = axis(b, value, a["dim0"]), axis(b, value, a["dim1"])
        dims[left], dims[right] = right, left
    else:
        dims = [*dims[:-2], *dims[-2:][::-1]] if b.aten_name == "mT" else dims[::-1]
    return b.permute(value, dims)


@converts("slice")
def _slice(b: Builder, a: Args) -> Result:
    start = a["start"] or 0
    if not isinstance(start, int):
        raise b.error("a slice that starts at a size of the request is not served")
    value = b.value(a["self"])
    dim = axis(b, value, a["dim"])
    extent = b.shape(value)[dim]
    if extent.is_fixed:
        start = min(max(start + extent.scale if start < 0 else start, 0), extent.scale)
    return piece(b, value, dim, start, b.out().shape[dim], a["step"])


def piece(b: Builder, value: int, dim: int, start: int, extent: Dim, step: int = 1) -> int:
    old = b.type(value)
    if extent == old.shape[dim] and step == 1:
        return value
    whole = old.shape[dim].is_fixed and extent.is_fixed
    stop = start + (extent.scale - 1) * step + 1 if whole else None
    kind = Type(replaced(old.shape, dim, extent), old.dtype)
    return b.emit("slice", (value,), kind, dim=dim, start=start, stop=stop, step=step)


@converts("split", "split_with_sizes", "chunk")
def _split(b: Builder, a: Args) -> Result:
    """An extent of 2 T is split as one of 2, before one of T."""
    value = b.value(a["self"])
    dim, start, pieces = axis(b, value, a["dim"]), 0, []
    shape, whole = b.shape(value), b.shape(value)[dim]
    if not whole.is_fixed:
        unit = Dim(1, whole.rows, whole.tokens)
        value = b.reshape(value, replaced(shape, dim, Dim(whole.scale), unit))
    for part in b.meta():
        extent = b.dim(part.shape[dim])
        found = piece(b, value, dim, start, Dim(extent.scale))
        pieces.append(b.reshape(found, replaced(shape, dim, extent)))
        start += extent.scale
    return tuple(pieces)


def pick(b: Builder, value: int, dim: int, index: int) -> int:
    old = b.type(value)
    kind = Type(replaced(old.shape, dim), old.dtype)
    return b.emit("select", (value,), kind, dim=dim, index=index)


@converts("select")
def _select(b: Builder, a: Args) -> Result:
    value = b.value(a["self"])
    dim, index = axis(b, value, a["dim"]), a["index"]
    if not isinstance(index, int):
        raise b.error("an index that is a size of the request is not served")
    extent = b.shape(value)[dim]
    return pick(b, value, dim, index % extent.scale if extent.is_fixed else index)


@converts("unbind")
def _unbind(b: Builder, a: Args) -> Result:
    value = b.value(a["self"])
    dim = axis(b, value, a["dim"])
    return tuple(pick(b, value, dim, index) for index in range(len(b.meta())))


@converts("cat", "concatenate")
def _concat(b: Builder, a: Args) -> Result:
    values = [b.value(part, b.out().dtype) for part in a["tensors"]]
    present = [value for value in values if Dim(0) not in b.shape(value)]
    return b.emit("concat", present, b.out(), dim=axis(b, present[0], a["dim"]))


@converts("stack")
def _stack(b: Builder, a: Args) -> Result:
    dim = a["dim"] % len(b.out().shape)
    shape = replaced(b.out().shape, dim, ONE)
    values = [b.reshape(b.value(part, b.out().dtype), shape) for part in a["tensors"]]
    return b.emit("concat", values, b.out(), dim=dim)


@converts("flip")
def _flip(b: Builder, a: Args) -> Result:
    value = b.value(a["self"])
    dims = tuple(sorted(axis(b, value, dim) for dim in a["dims"]))
    return b.emit("flip", (value,), b.out(), dims=dims)


@converts("constant_pad_nd")
def _pad(b: Builder, a: Args) -> Result:
    value = as_kind(a["value"] or 0, b.out().dtype)
    return b.emit("pad", (b.value(a["self"]),), b.out(), pads=tuple(a["pad"]), value=value)


@converts("diff")
def _diff(b: Builder, a: Args) -> Result:
    """x[..., i] - x[..., i - 1], with `prepend` (of extent 1) before x: one size for all T."""
    prepend, value = a["prepend"], b.value(a["self"])
    dim = axis(b, value, a["dim"])
    extent, kept = b.shape(value)[dim], b.out().shape[dim]
    if a["append"] is not None or a["n"] != 1 or (prepend is not None and kept != extent):
        raise b.error("diff is served once, with at most one prepended element")
    if prepend is None:
        after = piece(b, value, dim, extent.scale - kept.scale, kept)
        return binary(b, "sub", after, piece(b, value, dim, 0, kept))
    if _is_counting(a["self"], dim) and _is_step_before(prepend, a["self"]):
        return b.fill(1, b.out())  # so that masks over default positions are seen to be all true
    column = (extent, *(ONE,) * (len(b.shape(value)) - dim - 1))
    before = counting(b, extent, start=-1)
    place = b.emit("clamp", (before,), b.type(before), min=0, max=None)
    shifted = b.emit("index", (value, place), b.type(value), dims=(dim,))
    is_first = binary(b, "lt", before, b.constant(0, "i64"), "bool")
    previous = where(b, b.reshape(is_first, column), b.value(prepend, b.out().dtype), shifted)
    return binary(b, "sub", value, previous)


def _is_counting(node: Any, dim: int) -> bool:
    """Whether the last dim of the node is 0, 1, 2, ..., by what models do to `arange`."""
    if dim != len(node.meta["val"].shape) - 1:
        return False
    while isinstance(node, Node):
        name = getattr(node.target, "__name__", "")
        if name in ("arange.default", "arange.start"):
            return True
        shifts = name == "add.Tensor" and isinstance(node.args[1], int)
        grows = name == "unsqueeze.default" and node.args[1] == 0
        if not (shifts or grows or name == "expand.default"):
            return False
        node = node.args[0]
    return False


def _is_step_before(node: Node, source: Node) -> bool:
    """Whether the node is `source[..., :1] - 1`."""
    first = node.args[0] if node.args[1:] == (1,) and "sub" in str(node.target) else None
    return (
        isinstance(first, Node) and "slice" in str(first.target) and first.args[0] is source
        and first.args[2:] == (0, 1)
    )  # fmt: skip


# --- reads by index -----------------------------------------------------------------------------


@converts("index")
def _index(b: Builder, a: Args) -> Result:
    value = b.value(a["self"])
    given = [(dim, index) for dim, index in enumerate(a["indices"]) if index is not None]
    if any(index.meta["val"].dtype == torch.bool for _, index in given):
        raise b.error("a shape that depends on values cannot be served")
    dims = [dim for dim, _ in given]
    if dims != list(range(dims[0], dims[-1] + 1)):  # torch then puts the result's dims in front
        rest = [dim for dim in range(len(b.shape(value))) if dim not in dims]
        value, dims = b.permute(value, [*dims, *rest]), list(range(len(dims)))
    places = [b.value(index, "i64") for _, index in given]
    return b.emit("index", (value, *places), b.out(), dims=tuple(dims))


@converts("index_select")
def _index_select(b: Builder, a: Args) -> Result:
    value = b.value(a["self"])
    dims = (axis(b, value, a["dim"]),)
    return b.emit("index", (value, b.value(a["index"], "i64")), b.out(), dims=dims)


@converts("gather")
def _gather(b: Builder, a: Args) -> Result:
    value = b.value(a["self"])
    places = b.value(a["index"], "i64")
    return b.emit("gather", (value, places), b.out(), dim=axis(b, value, a["dim"]))


@converts("embedding")
def _embedding(b: Builder, a: Args) -> Result:
    return b.emit("embedding", (b.value(a["weight"]), b.value(a["indices"])), b.out())


@converts("embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(b: Builder, a: Args) -> Result:
    """2-D indices reach ATen flat, with offsets 0, n, 2n, ...: back to (bags, n)."""
    offsets, padding = a["offsets"], a.get("padding_idx")
    bag = _bag_size(b, offsets)
    if bag is None or a["include_last_offset"]:
        raise b.error("bags of unequal sizes are not served: pass two-dimensional indices")
    if padding is not None and padding >= 0:
        raise b.error("padding_idx in an embedding bag is not served")
    bags, width = b.out(0).shape
    places = b.reshape(b.value(a["indices"]), (bags, bag))
    if a["per_sample_weights"] is not None:
        kind = Type((bags, bag, width), b.out(0).dtype)
        rows = b.emit("embedding", (b.value(a["weight"]), places), kind)
        factors = b.reshape(b.value(a["per_sample_weights"]), (bags, bag, ONE))
        scaled = binary(b, "mul", rows, factors)
        return (b.emit("sum", (scaled,), b.out(0), dims=(1,), keepdim=False), None, None, None)
    mode = ("sum", "mean", "max")[a["mode"]]
    found = b.emit("embedding_bag", (b.value(a["weight"]), places), b.out(0), mode=mode)
    return found, None, None, None


def _bag_size(b: Builder, offsets: Node) -> Dim | None:
    """n, if the offsets are arange(0, ..., n)."""
    if "arange.start_step" not in str(offsets.target) or offsets.args[0] != 0:
        return None
    return b.dim(offsets.args[2] if len(offsets.args) > 2 else 1)
