"""ATen ops as IR ops: reductions, norms, matrix products, convolution, attention, recurrences.

See `converters` for the conventions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from coissue.deployments.capture.converters import axis, binary, replaced
from coissue.deployments.capture.lower import Args, Builder, Result, converts
from coissue.kernels.ir import ABSENT, Dim, Type
from coissue.kernels.optable.base import ONE, product

#: What `torch.zeros` and its kin look like in the graph.
ZEROS = ("aten.zeros", "aten.new_zeros", "aten.zeros_like")


# --- reductions ---------------------------------------------------------------------------------


def find_dims(b: Builder, value: int, dims: Any) -> tuple[int, ...]:
    """Increasing dims; None and [] mean all."""
    if isinstance(dims, int):
        dims = [dims]
    return tuple(sorted({axis(b, value, d) for d in dims or range(len(b.shape(value)))}))


def reduce(
    b: Builder, name: str, value: int, dims: Any, keepdim: bool, dtype: str = "", **attrs: Any
) -> int:
    found = find_dims(b, value, dims)
    kept = [
        ONE if d in found else extent
        for d, extent in enumerate(b.shape(value))
        if keepdim or d not in found
    ]
    if not found:
        return value
    kind = Type(tuple(kept), dtype or b.type(value).dtype)
    return b.emit(name, (value,), kind, dims=found, keepdim=keepdim, **attrs)


@converts("sum", "prod", "mean")
def _sum(b: Builder, a: Args) -> Result:
    """Whole numbers are added up in i64."""
    is_float = torch.is_floating_point(b.meta())
    value = b.value(a["self"], b.out().dtype if is_float else None)
    dtype = b.out().dtype if is_float else "i64"
    if not b.shape(value):
        return b.cast(value, b.out().dtype)
    found = reduce(b, b.aten_name, value, a.get("dim"), a.get("keepdim", False), dtype)
    return b.cast(found, b.out().dtype)


@converts("amax", "amin")
def _extremum(b: Builder, a: Args) -> Result:
    return reduce(b, b.aten_name, b.value(a["self"]), a["dim"], a["keepdim"])


@converts("any", "all")
def _truth(b: Builder, a: Args) -> Result:
    value = b.value(a["self"], "bool")
    found = reduce(b, b.aten_name, value, a.get("dim"), a.get("keepdim", False))
    return b.cast(found, b.out().dtype)  # of u8, torch makes u8


@converts("max", "min")
def _max(b: Builder, a: Args) -> Result:
    name, value = b.aten_name, b.value(a["self"])
    if "other" in a:
        return binary(b, name + "imum", value, b.value(a["other"]))
    if "dim" not in a:
        return reduce(b, "a" + name, value, None, False)
    where = b.emit(
        "arg" + name, (value,), b.out(1), dim=axis(b, value, a["dim"]), keepdim=a["keepdim"]
    )
    return reduce(b, "a" + name, value, a["dim"], a["keepdim"]), where


@converts("argmax", "argmin")
def _argmax(b: Builder, a: Args) -> Result:
    value, dim = b.value(a["self"]), a["dim"]
    if dim is None:
        value, dim = b.reshape(value, [product(b.shape(value))]), 0
    return b.emit(b.aten_name, (value,), b.out(), dim=axis(b, value, dim), keepdim=a["keepdim"])


@converts("var", "std", "var_mean", "std_mean")
def _var(b: Builder, a: Args) -> Result:
    value = b.value(a["self"])
    correction = a.get("correction", int(a.get("unbiased", True)))
    correction = 1 if correction is None else int(correction)
    dims, keepdim = a.get("dim"), a.get("keepdim", False)
    found = reduce(b, "var", value, dims, keepdim, correction=correction)
    if "std" in b.aten_name:
        found = b.emit("sqrt", (found,), b.type(found))
    return (found, reduce(b, "mean", value, dims, keepdim)) if "mean" in b.aten_name else found


@converts("linalg_vector_norm")
def _vector_norm(b: Builder, a: Args) -> Result:
    value, order = b.value(a["self"], b.out().dtype), a["ord"]
    if order not in (1, 2):
        raise b.error(f"the {order}-norm is not served")
    if order == 1:
        sizes = b.emit("abs", (value,), b.type(value))
        return reduce(b, "sum", sizes, a["dim"], a["keepdim"])
    total = reduce(b, "sum", binary(b, "mul", value, value), a["dim"], a["keepdim"])
    return b.emit("sqrt", (total,), b.out())


@converts("cumsum")
def _cumsum(b: Builder, a: Args) -> Result:
    is_float = torch.is_floating_point(b.meta())
    value = b.value(a["self"], b.out().dtype if is_float else None)
    kind = b.out() if is_float else Type(b.shape(value), "i64")
    return b.cast(b.emit("cumsum", (value,), kind, dim=axis(b, value, a["dim"])), b.out().dtype)


@converts("softmax", "_softmax", "log_softmax", "_log_softmax")
def _softmax(b: Builder, a: Args) -> Result:
    value = b.value(a["self"], b.out().dtype)
    return b.emit(b.aten_name.lstrip("_"), (value,), b.out(), dim=axis(b, value, a["dim"]))


# --- norms --------------------------------------------------------------------------------------


@converts("layer_norm", "native_layer_norm")
def _layer_norm(b: Builder, a: Args) -> Result:
    inputs = (b.value(a["input"]), b.value(a["weight"]), b.value(a["bias"]))
    kind = b.type(inputs[0])
    axes, eps = len(a["normalized_shape"]), float(a["eps"])
    found = b.emit("layer_norm", inputs, kind, axes=axes, eps=eps)
    return found if b.aten_name == "layer_norm" else (found, None, None)


@converts("rms_norm")
def _rms_norm(b: Builder, a: Args) -> Result:
    eps = a["eps"] if a["eps"] is not None else torch.finfo(b.meta().dtype).eps
    inputs = (b.value(a["input"]), b.value(a["weight"]))
    return b.emit("rms_norm", inputs, b.out(), axes=len(a["normalized_shape"]), eps=float(eps))


@converts("group_norm")
def _group_norm(b: Builder, a: Args) -> Result:
    inputs = (b.value(a["input"]), b.value(a["weight"]), b.value(a["bias"]))
    return b.emit("group_norm", inputs, b.out(), groups=a["num_groups"], eps=float(a["eps"]))


@converts("instance_norm")
def _instance_norm(b: Builder, a: Args) -> Result:
    """Statistics of one request's row and channel: a group norm with a group for each channel."""
    eps, affine = float(a["eps"]), (b.value(a["weight"]), b.value(a["bias"]))
    value = b.value(a["input"])
    if a["use_input_stats"]:
        channels = int(b.meta().shape[1])
        return b.emit("group_norm", (value, *affine), b.out(), groups=channels, eps=eps)
    running = (b.value(a["running_mean"]), b.value(a["running_var"]))
    return b.emit("batch_norm", (value, *running, *affine), b.out(), eps=eps)


@converts("_native_batch_norm_legit_no_training")
def _batch_norm(b: Builder, a: Args) -> Result:
    names = ("input", "running_mean", "running_var", "weight", "bias")
    inputs = [b.value(a[name]) for name in names]
    return b.emit("batch_norm", inputs, b.out(0), eps=float(a["eps"])), None, None


@converts("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "native_batch_norm")
def _batch_norm_training(b: Builder, a: Args) -> Result:
    raise b.error(
        "batch norm over the statistics of the batch would mix requests: "
        "it needs running statistics and eval mode"
    )


# --- matrix products ----------------------------------------------------------------------------


@converts("linear")
def _linear(b: Builder, a: Args) -> Result:
    inputs = (b.value(a["input"]), b.value(a["weight"]), b.value(a["bias"]))
    return b.emit("linear", inputs, b.out(), layout="nk")


@converts("addmm")
def _addmm(b: Builder, a: Args) -> Result:
    if a["beta"] != 1 or a["alpha"] != 1:
        raise b.error("addmm is served with alpha and beta 1")
    bias = b.value(a["self"])
    if b.is_constant(a["mat2"]) and len(b.shape(bias)) == 1:
        inputs = (b.value(a["mat1"]), b.value(a["mat2"]), bias)
        return b.emit("linear", inputs, b.out(), layout="kn")
    found = b.emit("matmul", (b.value(a["mat1"]), b.value(a["mat2"])), b.out())
    return binary(b, "add", found, bias)


@converts("mm", "bmm", "matmul")
def _matmul(b: Builder, a: Args) -> Result:
    right = a["mat2"] if "mat2" in a else a["other"]
    inputs = (b.value(a["self"]), b.value(right))
    if b.is_constant(right) and len(b.shape(inputs[1])) == 2:
        return b.emit("linear", (*inputs, ABSENT), b.out(), layout="kn")
    return b.emit("matmul", inputs, b.out())


# --- windows ------------------------------------------------------------------------------------


def spread(given: Any, count: int) -> tuple[int, ...]:
    """One number per spatial dim."""
    numbers = [given] if isinstance(given, int) else list(given)
    return tuple(numbers * count if len(numbers) == 1 else numbers)


@converts("conv1d", "conv2d", "convolution")
def _conv(b: Builder, a: Args) -> Result:
    if a.get("transposed"):
        raise b.error("a transposed convolution is not served")
    inputs = (b.value(a["input"]), b.value(a["weight"]), b.value(a["bias"]))
    kernel = [dim.scale for dim in b.shape(inputs[1])[2:]]
    count, padding = len(kernel), a["padding"]
    dilation = spread(a["dilation"], count)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        whole = [(size - 1) * step for size, step in zip(kernel, dilation, strict=True)]
        if any(pad % 2 for pad in whole):
            raise b.error("padding 'same' around a window of even size is not served")
        padding = [pad // 2 for pad in whole]
    return b.emit(
        "conv", inputs, b.out(), stride=spread(a["stride"], count), dilation=dilation,
        padding=spread(padding, count), groups=a["groups"],
    )  # fmt: skip


def _window(a: Args, count: int) -> dict[str, Any]:
    kernel = spread(a["kernel_size"], count)
    stride = spread(a["stride"], count) if a["stride"] else kernel
    padding, ceil = spread(a["padding"], count), a["ceil_mode"]
    return {"kernel": kernel, "stride": stride, "padding": padding, "ceil": ceil}


@converts("max_pool1d", "max_pool2d", "max_pool2d_with_indices")
def _max_pool(b: Builder, a: Args) -> Result:
    count, several = (1 if "1d" in b.aten_name else 2), "indices" in b.aten_name
    window = {**_window(a, count), "dilation": spread(a["dilation"], count)}
    kind = b.out(0 if several else None)
    found = b.emit("max_pool", (b.value(a["self"]),), kind, **window)
    return (found, None) if several else found


@converts("avg_pool1d", "avg_pool2d")
def _avg_pool(b: Builder, a: Args) -> Result:
    window = {**_window(a, 1 if "1d" in b.aten_name else 2), "include_pad": a["count_include_pad"]}
    divisor = a.get("divisor_override")
    return b.emit("avg_pool", (b.value(a["self"]),), b.out(), **window, divisor=divisor)


@converts("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d")
def _adaptive_avg_pool(b: Builder, a: Args) -> Result:
    size = tuple(a["output_size"])
    return b.emit("adaptive_avg_pool", (b.value(a["self"]),), b.out(), size=size)


# --- attention and recurrences ------------------------------------------------------------------


@converts("scaled_dot_product_attention")
def _attention(b: Builder, a: Args) -> Result:
    if a["dropout_p"] > 0:
        raise b.error("dropout in attention is random: the module must be in eval mode")
    if len(b.out().shape) not in (3, 4):
        raise b.error("attention is served with three or four dims")
    query, key, value = (_with_heads(b, b.value(a[name])) for name in ("query", "key", "value"))
    if a["enable_gqa"]:
        heads = b.shape(query)[1]
        key, value = _repeat_heads(b, key, heads), _repeat_heads(b, value, heads)
    mask = b.value(a["attn_mask"])
    if mask != ABSENT and len(b.out().shape) == 3 and len(b.shape(mask)) == 3:
        mask = _with_heads(b, mask)
    scale = a["scale"] if a["scale"] is not None else 1 / math.sqrt(b.shape(query)[-1].scale)
    kind = Type((*b.shape(query)[:-1], b.shape(value)[-1]), b.out().dtype)
    found = b.emit(
        "attention", (query, key, value, mask), kind, causal=a["is_causal"], scale=float(scale),
        layout="bhsd", mask="none" if mask == ABSENT else "full",
    )  # fmt: skip
    return b.reshape(found, b.out().shape)


def _with_heads(b: Builder, value: int) -> int:
    """(R, S, D) as one head of (R, 1, S, D)."""
    shape = b.shape(value)
    return value if len(shape) == 4 else b.reshape(value, (shape[0], ONE, *shape[1:]))


def _repeat_heads(b: Builder, value: int, heads: Dim) -> int:
    shape = b.shape(value)
    group = Dim(heads.scale // shape[1].scale)
    wide = b.expand(
        b.reshape(value, (*shape[:2], ONE, *shape[2:])), (*shape[:2], group, *shape[2:])
    )
    return b.reshape(wide, replaced(shape, 1, heads))


@converts("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(b: Builder, a: Args) -> Result:
    """The ops of `export`, and what saved programs have; both take ATen's arguments."""
    if "batch_sizes" in a:
        raise b.error("packed sequences cannot be captured")
    states = a["hx"] if isinstance(a["hx"], list | tuple) else [a["hx"]]
    if not all(_is_zeros(state) for state in states):
        raise b.error("a recurrence is served from an initial state of zeros only")
    per_cell = 4 if a["has_biases"] else 2
    cells = a["num_layers"] * (2 if a["bidirectional"] else 1)
    if len(a["params"]) != per_cell * cells:
        raise b.error("a recurrence with projections is not served")
    order = (0, 1, 2) if a["batch_first"] else (1, 0, 2)
    x = b.permute(b.value(a["input"]), order)
    first, *rest = (b.out(index) for index in range(len(b.meta())))
    y_type = Type(tuple(first.shape[dim] for dim in order), first.dtype)
    name, _, nonlinearity = b.aten_name.partition("_")
    attrs: dict[str, Any] = {"nonlinearity": nonlinearity} if nonlinearity else {}
    y, *last = b.emit_many(
        name, (x, *(b.value(part) for part in a["params"])), [y_type, *rest],
        hidden=rest[0].shape[-1].scale, layers=a["num_layers"],
        bidirectional=bool(a["bidirectional"]), bias=bool(a["has_biases"]), **attrs,
    )  # fmt: skip
    return (b.permute(y, order), *last)


def _is_zeros(node: Any) -> bool:
    while isinstance(node, Node):
        if str(node.target).startswith(ZEROS):
            return True
        if str(node.target).startswith(("aten.full", "aten.new_full")):
            return bool(node.args[-1] == 0)
        if not str(node.target).startswith(("aten.expand", "aten.view", "aten._to_copy")):
            return False
        node = node.args[0]
    return False
