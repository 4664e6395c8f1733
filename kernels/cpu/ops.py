"""The op table in torch: what one op does to whole tensors.

`resolve(op, ...)` answers with a function of tensors, made once per plan; all that can be decided
from types is decided then. The same table serves an op run per request, on logical shapes, and an
op run on packed tensors (see `lowered`): there the leading R and T axes are one axis, so dims count
from a `shift` lower and output shapes start with a count taken from the launch.

Rules: nothing here knows segments, weight sets or buffers; no function writes to its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from coissue.kernels.cpu import attention, recurrent
from coissue.kernels.ir import Op, Type
from coissue.kernels.optable.table import OPAQUE_TARGETS, parse_opaque_args

Tensor = torch.Tensor
#: (rows, tokens) -> the output's shape; for packed values, of the whole launch.
ShapeOf = Callable[[int, int], Sequence[int]]
#: The tensors an op reads (None: not given) -> what it makes: a tensor, or several.
OpFunction = Callable[..., Any]

DTYPES = {
    "bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16,
    "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip

_OF_ONE_NAME = """
    neg abs relu sigmoid tanh exp log log1p sqrt rsqrt erf sin cos floor ceil round sign reciprocal
    add sub mul div pow maximum minimum eq ne lt le gt ge logical_and logical_or logical_not
    remainder where matmul
"""
#: Ops without attrs.
_PLAIN: dict[str, OpFunction] = {
    **{name: getattr(torch, name) for name in _OF_ONE_NAME.split()},
    "identity": lambda x: x, "silu": F.silu, "hardsigmoid": F.hardsigmoid, "mish": F.mish,
    "hardswish": F.hardswish, "softplus": F.softplus, "floor_div": torch.floor_divide,
}  # fmt: skip

#: Element by element on an input nothing else needs, of the same dtype: writes its answer there.
IN_PLACE: dict[str, Callable[[Mapping[str, Any], torch.dtype], OpFunction]] = {
    "relu": lambda a, dtype: torch.relu_,
    "sigmoid": lambda a, dtype: torch.sigmoid_,
    "tanh": lambda a, dtype: torch.tanh_,
    "silu": lambda a, dtype: partial(F.silu, inplace=True),
    "hardswish": lambda a, dtype: partial(F.hardswish, inplace=True),
    "gelu": lambda a, dtype: partial(torch.ops.aten.gelu_.default, approximate=a["approximate"]),
    "clamp": lambda a, dtype: _clamp_by(torch.clamp_, a, dtype),
}


def resolve(
    op: Op, types: Sequence[Type | None], out: Type, shape: ShapeOf, shift: int
) -> tuple[OpFunction, bool]:
    """(function, wants_sizes): the op as a function of its input tensors.

    `types`: of the inputs, logical. `shape` and `shift`: see the module. A function that
    `wants_sizes` takes rows and tokens before the tensors.
    """
    if op.name in _PLAIN:
        return _PLAIN[op.name], False
    if op.name in _SIZED:
        return _SIZED[op.name](op.attrs, DTYPES[out.dtype], shape, shift), True
    return _MAKERS[op.name](_Context(op, tuple(types), out, shift)), False


class _Context:
    """What a maker may look at."""

    __slots__ = ("attrs", "dtype", "op", "out", "shift", "types")

    def __init__(self, op: Op, types: tuple[Type | None, ...], out: Type, shift: int) -> None:
        self.op, self.types, self.out, self.shift = op, types, out, shift
        self.attrs: Mapping[str, Any] = op.attrs
        self.dtype = DTYPES[out.dtype]

    def dim(self, name: str = "dim") -> int:
        return int(self.attrs[name]) - self.shift

    def dims(self, name: str = "dims") -> tuple[int, ...]:
        return tuple(dim - self.shift for dim in self.attrs[name])

    def rank(self, index: int = 0) -> int:
        found = self.types[index]
        assert found is not None
        return len(found.shape)


def _held(value: Any, dtype: torch.dtype) -> Any:
    """`value` as `dtype` holds it: inf beyond the largest float, where most of torch raises."""
    wide = torch.float64 if isinstance(value, float) else None
    return torch.tensor(value, dtype=wide).to(dtype).item()


def _reduce(c: _Context) -> OpFunction:
    fn, dims, keepdim = getattr(torch, c.op.name), c.dims(), c.attrs["keepdim"]
    if c.dtype is torch.bool:  # of u8, torch's `any` and `all` are u8
        return lambda x: fn(x.bool(), dims, keepdim)
    return lambda x: fn(x, dims, keepdim)


def _prod(c: _Context) -> OpFunction:
    dims, keepdim, dtype = c.dims()[::-1], c.attrs["keepdim"], c.dtype

    def run(x: Tensor) -> Tensor:
        for dim in dims:
            x = torch.prod(x, dim, keepdim, dtype=dtype)
        return x

    return run


def _norm(c: _Context) -> OpFunction:
    fn: Any = F.layer_norm if c.op.name == "layer_norm" else F.rms_norm
    axes, eps = c.attrs["axes"], c.attrs["eps"]
    return lambda x, *affine: fn(x, x.shape[-axes:], *affine, eps=eps)


def _batch_norm(c: _Context) -> OpFunction:
    eps = c.attrs["eps"]
    return lambda x, mean, var, w=None, b=None: F.batch_norm(x, mean, var, w, b, False, 0.0, eps)


def _group_norm(c: _Context) -> OpFunction:
    """Not `F.group_norm`, which refuses one element per group, though the answer is the bias."""
    groups, eps = c.attrs["groups"], c.attrs["eps"]
    return lambda x, w=None, b=None: torch.group_norm(x, groups, w, b, eps)


def _linear(c: _Context) -> OpFunction:
    if c.attrs["layout"] == "nk":
        return lambda x, w, b=None: F.linear(x, w, b)
    return lambda x, w, b=None: torch.matmul(x, w) if b is None else torch.matmul(x, w) + b


def _conv(c: _Context) -> OpFunction:
    fn = (F.conv1d, F.conv2d)[c.rank() - 3]
    window = [c.attrs[name] for name in ("stride", "padding", "dilation", "groups")]
    return lambda x, w, b=None: fn(x, w, b, *window)


def _pool(c: _Context) -> OpFunction:
    """One spatial dim goes through two: torch's 1d pools take no whole numbers and no divisor."""
    a, one = c.attrs, c.rank() == 3
    is_max = c.op.name == "max_pool"
    names = {"kernel": 1, "stride": 1, "padding": 0, **({"dilation": 1} if is_max else {})}
    window = [(plain, *a[name]) if one else a[name] for name, plain in names.items()]
    rest = () if is_max else (a["include_pad"], a.get("divisor"))
    fn: Any = F.max_pool2d if is_max else F.avg_pool2d
    if one:
        return lambda x: fn(x.unsqueeze(2), *window, a["ceil"], *rest).squeeze(2)
    return lambda x: fn(x, *window, a["ceil"], *rest)


def _adaptive(c: _Context) -> OpFunction:
    fn = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[c.rank() - 3]
    return partial(fn, output_size=c.attrs["size"])


def _clamp(c: _Context) -> OpFunction:
    return _clamp_by(torch.clamp, c.attrs, c.dtype)


def _clamp_by(fn: OpFunction, attrs: Mapping[str, Any], dtype: torch.dtype) -> OpFunction:
    bounds = [attrs.get("min"), attrs.get("max")]
    low, high = (None if bound is None else _held(bound, dtype) for bound in bounds)
    return lambda x: fn(x, low, high)


def _pad(c: _Context) -> OpFunction:
    """Not `F.pad`, whose value is a float."""
    pads, value = c.attrs["pads"], _held(c.attrs["value"], c.dtype)
    return lambda x: torch.constant_pad_nd(x, pads, value)


def _index(c: _Context) -> OpFunction:
    lead = (slice(None),) * c.dims()[0]
    return lambda x, *indices: x[(*lead, *indices)]


def _permute(c: _Context) -> OpFunction:
    dims = tuple(range(1 if c.shift else 0)) + c.dims()[1 + c.shift if c.shift else 0 :]
    return lambda x: x.permute(dims)


def _look_up(found: Callable[[], Tensor], table: Tensor, dim: int, index: Tensor) -> Tensor:
    """What torch says of an index outside of the table differs by op, mode and size: here it is an
    `IndexError`."""
    try:
        return found()
    except RuntimeError as error:
        size = table.shape[dim]
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise IndexError(f"an index is outside of a table of {size}") from error
        raise


def _gather(c: _Context) -> OpFunction:
    dim = c.dim()
    return lambda x, i: _look_up(lambda: torch.gather(x, dim, i.long()), x, dim, i)


def _embedding_bag(c: _Context) -> OpFunction:
    mode, fold = c.attrs["mode"], c.rank(1) != 2

    def run(table: Tensor, index: Tensor) -> Tensor:
        bags = index.reshape(-1, index.shape[-1]) if fold else index
        flat = _look_up(lambda: F.embedding_bag(bags, table, mode=mode), table, 0, index)
        return flat.reshape(*index.shape[:-1], table.shape[1]) if fold else flat

    return run


def _opaque(c: _Context) -> OpFunction:
    """A functional ATen op of the allow-list; its outputs are compared with the declared types."""
    target = c.attrs["target"]
    if target not in OPAQUE_TARGETS:
        raise ValueError(f"{target} is not on the list of allowed ATen ops.")
    _, name, overload = target.split(".")
    fn = getattr(getattr(torch.ops.aten, name), overload)
    positional, keywords = parse_opaque_args(c.attrs["args"], len(c.op.inputs))

    def fill(value: Any, tensors: Sequence[Tensor]) -> Any:
        if isinstance(value, list):
            return [fill(item, tensors) for item in value]
        if isinstance(value, dict):
            return DTYPES[value["dtype"]] if "dtype" in value else tensors[value["input"]]
        return value

    def run(*tensors: Tensor) -> Any:
        made = fn(*fill(positional, tensors), **{k: fill(v, tensors) for k, v in keywords.items()})
        return tuple(made) if isinstance(made, tuple | list) else made

    return run


_MAKERS: dict[str, Callable[[_Context], OpFunction]] = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all"), _reduce),
    "prod": _prod,
    "var": lambda c: partial(
        torch.var, dim=c.dims(), correction=c.attrs["correction"], keepdim=c.attrs["keepdim"]
    ),
    "argmax": lambda c: partial(torch.argmax, dim=c.dim(), keepdim=c.attrs["keepdim"]),
    "argmin": lambda c: partial(torch.argmin, dim=c.dim(), keepdim=c.attrs["keepdim"]),
    "cumsum": lambda c: partial(torch.cumsum, dim=c.dim(), dtype=c.dtype),
    "softmax": lambda c: partial(torch.softmax, dim=c.dim()),
    "log_softmax": lambda c: partial(torch.log_softmax, dim=c.dim()),
    "cast": lambda c: partial(Tensor.to, dtype=c.dtype),
    "clamp": _clamp,
    "gelu": lambda c: partial(F.gelu, approximate=c.attrs["approximate"]),
    "leaky_relu": lambda c: partial(F.leaky_relu, negative_slope=c.attrs["slope"]),
    "elu": lambda c: partial(F.elu, alpha=c.attrs["alpha"]),
    "layer_norm": _norm,
    "rms_norm": _norm,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "linear": _linear,
    "conv": _conv,
    "max_pool": _pool,
    "avg_pool": _pool,
    "adaptive_avg_pool": _adaptive,
    "pad": _pad,
    "permute": _permute,
    "select": lambda c: partial(torch.select, dim=c.dim(), index=c.attrs["index"]),
    "concat": lambda c: lambda *xs: torch.cat(xs, c.dim()),
    "flip": lambda c: partial(torch.flip, dims=c.dims()),
    "index": _index,
    "gather": _gather,
    "embedding": lambda c: lambda table, index: F.embedding(index, table),
    "embedding_bag": _embedding_bag,
    "attention": lambda c: attention.make(c.attrs),
    **dict.fromkeys(("lstm", "gru", "rnn"), lambda c: recurrent.make(c.op.name, c.attrs)),
    "opaque": _opaque,
}


# --- ops whose output extents are known at the launch only ----------------------------------------


def _sized_slice(attrs: Mapping[str, Any], dtype: torch.dtype, shape: ShapeOf, shift: int) -> Any:
    dim, start, stop, step = attrs["dim"] - shift, attrs["start"], attrs.get("stop"), attrs["step"]
    lead = (slice(None),) * dim

    def run(rows: int, tokens: int, x: Tensor) -> Tensor:
        if stop is not None:
            return x[(*lead, slice(start, stop, step))]
        first = start + x.shape[dim] if start < 0 else start
        return x[(*lead, slice(first, first + (shape(rows, tokens)[dim] - 1) * step + 1, step))]

    return run


def _sized_arange(attrs: Mapping[str, Any], dtype: torch.dtype, shape: ShapeOf, shift: int) -> Any:
    """Not by torch's own start and step: a step of 0 raises there, and the end can overflow."""
    start, step = attrs["start"], attrs["step"]
    return lambda r, t: torch.arange(shape(r, t)[0], dtype=dtype).mul_(step).add_(start)


def _sized_full(attrs: Mapping[str, Any], dtype: torch.dtype, shape: ShapeOf, shift: int) -> Any:
    value = _held(attrs["value"], dtype)
    return lambda r, t: torch.full(shape(r, t), value, dtype=dtype)


_SIZED: dict[str, Callable[[Mapping[str, Any], torch.dtype, ShapeOf, int], OpFunction]] = {
    "reshape": lambda a, dtype, shape, s: lambda r, t, x: x.reshape(shape(r, t)),
    "expand": lambda a, dtype, shape, s: lambda r, t, x: x.expand(shape(r, t)),
    "constant": _sized_full,
    "full": _sized_full,
    "arange": _sized_arange,
    "slice": _sized_slice,
}


def run_opaque(op: Op, arrays: Sequence[Any]) -> list[Any]:
    """An opaque op on numpy arrays, for the interpreter."""
    made = _opaque(_Context(op, (), Type((), "f32"), 0))(*map(torch.as_tensor, arrays))
    return [tensor.numpy() for tensor in (made if isinstance(made, tuple) else (made,))]
