"""The op table of tests: sample cases of every op, for the interpreter and for each device.

A case is one op with typed inputs, some of which are weights, and the values to fill them with.
Sizes are odd, one, or a single row on purpose. `tolerance` is relative and absolute, `why` its
reason.

    case.program()             a one-op Program; inputs are named x0, x1, ...; checked by `spec`
    case.arrays(rows, tokens)  an array per input of the op, None where it is absent
    case.feed(arrays)          (inputs by name, weights by digest) for `interpret` or a device
"""

from __future__ import annotations

import hashlib
import math
import zlib
from dataclasses import dataclass

import numpy as np

from coissue.kernels.interpreter import store
from coissue.kernels.ir import ABSENT, Dim, Op, Port, Program, Type, Weight
from coissue.kernels.optable.base import Call
from coissue.kernels.optable.table import OPS

#: (rows, tokens) every case runs with.
SIZES = ((1, 1), (3, 5), (2, 7))
ROWS_LIMIT, TOKENS_LIMIT = 16, 16
SPECIALS = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, 30.0, -30.0, 1e-30]


@dataclass(frozen=True)
class Arg:
    """One input: its type, how it is filled, and whether it is a weight of the program."""

    type: Type
    fill: str = "normal"
    is_weight: bool = False


@dataclass(frozen=True)
class OpCase:
    label: str
    op: str
    args: tuple[Arg | None, ...]
    attrs: dict
    outputs: tuple[Type, ...]
    tolerance: float
    why: str
    sizes: tuple[tuple[int, int], ...] = SIZES

    def program(self) -> Program:
        given = [arg for arg in self.args if arg is not None]
        places = iter(range(len(given)))
        ids = tuple(ABSENT if arg is None else next(places) for arg in self.args)
        outs = tuple(range(len(given), len(given) + len(self.outputs)))
        named = [(f"x{i}", ids[i], arg) for i, arg in enumerate(self.args) if arg is not None]
        inputs = [Port(name, value) for name, value, arg in named if not arg.is_weight]
        types = [arg.type for arg in given] + list(self.outputs)
        dims = [dim for port in inputs for dim in types[port.value].shape]
        told = {(d.rows, d.tokens) for d in dims}
        if not inputs or _sizes_in(types) - told:
            inputs.append(Port("sizes", len(types)))  # tells R and T where no input of the op does
            types.append(Type((Dim(1, rows=1), Dim(1, tokens=1)), "bool"))
        return Program(
            name=self.label,
            types=tuple(types),
            inputs=tuple(inputs),
            weights=tuple(
                Weight(name, value, digest_of(name)) for name, value, arg in named if arg.is_weight
            ),
            ops=(Op(self.op, ids, outs, self.attrs, f"case.{self.label}"),),
            outputs=tuple(Port(f"y{i}", value) for i, value in enumerate(outs)),
            rows_limit=ROWS_LIMIT,
            tokens_limit=TOKENS_LIMIT,
        )

    def arrays(self, rows: int, tokens: int) -> list[np.ndarray | None]:
        """Same seed, same arrays; weights do not depend on rows or tokens."""
        seed = zlib.crc32(self.label.encode())
        return [
            None
            if arg is None
            else fill(arg, rows, tokens, np.random.default_rng([seed, i, rows, tokens]))
            if not arg.is_weight
            else fill(arg, rows, tokens, np.random.default_rng([seed, i]))
            for i, arg in enumerate(self.args)
        ]

    def feed(self, arrays, rows: int, tokens: int) -> tuple[dict, dict]:
        inputs, weights = {}, {}
        for i, (arg, array) in enumerate(zip(self.args, arrays, strict=True)):
            if arg is not None and arg.is_weight:
                weights[digest_of(f"x{i}")] = array
            elif arg is not None:
                inputs[f"x{i}"] = array
        if any(port.name == "sizes" for port in self.program().inputs):
            inputs["sizes"] = np.zeros((rows, tokens), bool)
        return inputs, weights


def _sizes_in(types) -> set[tuple[int, int]]:
    """Which of R and T the types speak of, as the powers (1, 0) and (0, 1)."""
    dims = [dim for type_ in types for dim in type_.shape]
    return {(1, 0) for dim in dims if dim.rows} | {(0, 1) for dim in dims if dim.tokens}


def digest_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def fill(arg: Arg, rows: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Values by name, which `ids` and `ints` follow with their bounds (`ids:<high>`)."""
    shape, (kind, *bounds) = arg.type.at(rows, tokens), arg.fill.split(":")
    if kind == "normal" and arg.type.dtype == "bool":
        kind = "bits"
    if kind == "normal" and arg.type.dtype[0] in "iu":
        kind, bounds = "ints", ["0" if arg.type.dtype == "u8" else "-5", "6"]
    match kind:
        case "normal":
            found = rng.standard_normal(shape)
        case "small":  # of a layer of width 5, so that what is carried on does not grow
            found = rng.standard_normal(shape) * 0.4
        case "positive":
            found = np.abs(rng.standard_normal(shape)) + 0.1
        case "special":
            found = np.resize(np.array(SPECIALS), shape)
        case "bits":
            found = rng.random(shape) < 0.6
        case "keys":  # a key mask whose first row is fully masked, as padding rows are
            found = rng.random(shape) < 0.6
            found[0] = False
        case "minus_inf":  # an additive mask
            found = np.where(rng.random(shape) < 0.4, -np.inf, 0.0)
        case "ints":
            found = rng.integers(int(bounds[0]), int(bounds[1]), shape)
        case "nonzero":
            found = rng.integers(1, 5, shape) * rng.choice([-1, 1], shape)
        case _:
            raise AssertionError(kind)
    return store(np.asarray(found), arg.type.dtype)


def dim(text: str | int) -> Dim:
    """Dim from "R", "T", "2*R", "R*T" or a number."""
    scale, rows, tokens = 1, 0, 0
    for part in str(text).split("*"):
        if part == "R":
            rows += 1
        elif part == "T":
            tokens += 1
        else:
            scale *= int(part)
    return Dim(scale, rows, tokens)


def shaped(dtype: str, *dims: str | int) -> Type:
    return Type(tuple(map(dim, dims)), dtype)


def x(*dims, dtype: str = "f32", fill: str = "normal") -> Arg:
    """A dynamic input."""
    return Arg(shaped(dtype, *dims), fill)


def w(*dims, dtype: str = "f32", fill: str = "normal") -> Arg:
    """A weight."""
    return Arg(shaped(dtype, *dims), fill, is_weight=True)


ROUNDING = {"f64": 1e-12, "f32": 1e-5, "bf16": 2e-2, "f16": 4e-3}
CASES: list[OpCase] = []


def case(op: str, *args: Arg | None, label="", out=None, tol=None, why=None, sizes=SIZES, **attrs):
    """Adds a case. Output types are inferred unless the op takes them from its declared type."""
    declared = (out,) if isinstance(out, Type) else tuple(out or ())
    types = [None if arg is None else arg.type for arg in args]
    definition = OPS[op]
    full = {name: attrs.get(name) for name in definition.attrs}
    missing = definition.required + definition.optional - len(types)
    call = Call((*types, *[None] * missing), full, declared, ROWS_LIMIT, TOKENS_LIMIT)
    outputs = definition.infer(call)
    floats = [t.dtype for t in (*types, *outputs) if t is not None and t.dtype in ROUNDING]
    if tol is None:
        tol = max((ROUNDING[dtype] for dtype in floats), default=0.0)
    why = why or (f"rounding of {', '.join(sorted(set(floats)))}" if floats else "exact")
    suffix = label or "-".join(str(arg.type.dtype) for arg in args if arg)
    name = f"{op}-{suffix}-{len(CASES)}"
    CASES.append(OpCase(name, op, args, attrs, outputs, tol, why, sizes))


# --- element by element -------------------------------------------------------------------------

for _op in ("neg", "abs", "sign", "relu", "identity"):
    for _dtype in ("f32", "i64", "i8"):
        case(_op, x("R", 3, dtype=_dtype))
for _op in ("floor", "ceil", "round"):
    case(_op, x("R", 29, fill="special"))
for _op in [
    "neg",
    "abs",
    "sign",
    "relu",
    "sigmoid",
    "tanh",
    "exp",
    "erf",
    "sin",
    "cos",
    "silu",
    "hardsigmoid",
    "hardswish",
    "softplus",
    "mish",
    "reciprocal",
    "identity",
]:
    case(_op, x("R", "T", 17), label="f32")
    case(_op, x("R", 29, fill="special"), label="special")
    case(_op, x("R", 5, dtype="f16"))
    case(_op, x("R", 5, dtype="bf16"))
for _op in ("log", "log1p", "sqrt", "rsqrt"):
    case(_op, x("R", 7, fill="positive"))
    case(_op, x("R", 29, fill="special"), label="special")
case("erf", x("R", 9, dtype="f64"))
for _form in ("none", "tanh"):
    case("gelu", x("R", "T", 13), approximate=_form, label=_form)
    case("gelu", x("R", 7, dtype="bf16"), approximate=_form, label=f"{_form}-bf16")
case("leaky_relu", x("R", 29, fill="special"), slope=0.1)
case("elu", x("R", 29, fill="special"), alpha=1.3)
case("clamp", x("R", 29, fill="special"), min=-0.5, max=0.7)
case("clamp", x("R", 5), min=0.2, max=-0.2, label="min-over-max")
case("clamp", x("R", 5, dtype="i32"), min=-1, max=None)
case("clamp", x("R", 5), max=0.5)
case("clamp", x("R", 5, dtype="f16"), min=-1e300, max=1e300, label="beyond")
for _dtype in ("f32", "i64", "bool"):
    case("logical_not", x("R", 5, dtype=_dtype))
for _from, _to in (
    ("f32", "i64"), ("f32", "f16"), ("f32", "bf16"), ("f32", "bool"), ("i64", "f32"),
    ("bool", "f32"), ("i64", "i8"), ("f64", "f32"), ("i32", "bf16"), ("bf16", "i32"), ("u8", "f16"),
):  # fmt: skip
    case("cast", x("R", "T", dtype=_from), out=shaped(_to, "R", "T"), label=f"{_from}-{_to}")

for _op in ("add", "mul", "maximum", "minimum", "sub"):
    case(_op, x("R", "T", 5), w(5))
    case(_op, x("R", 1, 5), x("R", "T", 1))
    case(_op, x("R", 29, fill="special"), x("R", 1), label="special")
    case(_op, x("R", 3, dtype="i32"), x("R", 3, dtype="i32"))
    case(_op, x("R", 3, dtype="f16"), x("R", 3, dtype="f16"))
    if _op != "sub":
        case(_op, x("R", 3, dtype="bool"), x("R", 3, dtype="bool"))
case("add", x(dtype="f32"), x("R"), label="scalar")
case("mul", x("R", 4, dtype="bf16"), w(4, dtype="bf16"))
case("add", x("R", 3, dtype="i8", fill="ints:100:127"), x("R", 3, dtype="i8", fill="ints:100:127"),
     label="wraps")  # fmt: skip
case("div", x("R", 5), x("R", 5))
case("div", x("R", 5, dtype="i64"), x("R", 5, dtype="i64", fill="nonzero"))
case("div", x("R", 29, fill="special"), x("R", 29, fill="special"), label="special")
for _op in ("remainder", "floor_div"):
    case(_op, x("R", 31), x("R", 31))
    for _dtype in ("i64", "i8"):
        case(_op, x("R", 31, dtype=_dtype), x("R", 31, dtype=_dtype, fill="nonzero"))
case("pow", x("R", 7, fill="positive"), x("R", 7))
case("pow", x("R", 7), x(fill="ints:3:4"), label="cube")
case("pow", x("R", 31, dtype="i64", fill="ints:-2:3"), x("R", 31, dtype="i64", fill="ints:-3:5"))
for _op in ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or"):
    case(_op, x("R", 29, fill="special"), x("R", 29, fill="special"), label="special")
    case(_op, x("R", 9, dtype="i64"), x("R", 9, dtype="i64"))
    case(_op, x("R", 9, dtype="bool"), x("R", 9, dtype="bool"))
case("where", x("R", "T", dtype="bool"), x("R", 1), x(1, 1))
case("where", x("R", 1, 3, dtype="bool"), x("R", 2, 3), w(2, 1), label="packed")
case("where", x("R", 3, dtype="bool"), x("R", 3, dtype="i64"), x(dtype="i64"))
case("constant", value=2.5, out=shaped("f32"), label="f32")
case("constant", value=7, out=shaped("i64"), label="i64")
case("constant", value=-math.inf, out=shaped("f32"), label="inf")
case("full", value=True, out=shaped("bool", "R", "T"), label="bool")
case("full", value=0.1, out=shaped("bf16", "R", 3), label="bf16")
case("arange", start=0, step=1, out=shaped("i64", "T"), label="tokens")
case("full", value=0.1, out=shaped("f64", "R"), label="f64")
case("constant", value=1e300, out=shaped("f32"), label="beyond")
case("full", value=-(10**6), out=shaped("f16", "R", 3), label="beyond-f16")
case("arange", start=7, step=-2, out=shaped("i64", 5), label="down")
case("arange", start=7, step=0, out=shaped("i64", "T"), label="still")
case("arange", start=-(2**63), step=2**62, out=shaped("i64", 3), label="wide")

# --- along dims ---------------------------------------------------------------------------------

for _op in ("sum", "mean", "prod", "amax", "amin"):
    case(_op, x("R", "T", 5), dims=(1,), keepdim=False)
    case(_op, x("R", "T", 5), dims=(1, 2), keepdim=True)
    case(_op, x("R", 5), dims=(0, 1), keepdim=False)
    case(_op, x("R", 13, fill="special"), dims=(1,), keepdim=False, label="special")
    case(_op, x("R", 7, dtype="f16"), dims=(1,), keepdim=False)
    if _op != "mean":
        case(_op, x("R", 6, dtype="i32"), dims=(1,), keepdim=False)
for _op in ("any", "all"):
    for _dtype in ("bool", "f32", "i64", "u8"):
        case(_op, x("R", "T", 3, dtype=_dtype), dims=(1,), keepdim=False)
for _op in ("any", "all"):
    case(_op, x("R", 2, 5, dtype="u8", fill="ints:0:2"), dims=(2,), keepdim=True, label="packed")
case("sum", x("R", 9, dtype="bool"), dims=(1,), keepdim=False)
for _correction in (0, 1):
    case("var", x("R", 9), dims=(1,), keepdim=True, correction=_correction)
case("var", x("R", 1, 3), dims=(1,), keepdim=False, correction=1, label="single")
for _op in ("argmax", "argmin"):
    case(_op, x("R", "T", 5), dim=1, keepdim=False)
    case(_op, x("R", 13, fill="special"), dim=1, keepdim=True, label="nan")
    case(_op, x("R", 9, dtype="i64", fill="ints:0:3"), dim=1, keepdim=False, label="ties")
case("cumsum", x("R", "T", 3), dim=1)
case("cumsum", x("R", "T", dtype="bool"), dim=1)
case("cumsum", x("R", 5, dtype="i32"), dim=1)
for _op in ("softmax", "log_softmax"):
    case(_op, x("R", "T", 7), dim=2)
    case(_op, x("R", "T", 3), dim=1)
    case(_op, x("R", 7, dtype="bf16"), dim=1)
    case(_op, x("R", 5, fill="minus_inf"), dim=1, label="masked")
case("layer_norm", x("R", "T", 12), w(12), w(12), axes=1, eps=1e-5)
case("layer_norm", x("R", 3, 4), w(3, 4), None, axes=2, eps=1e-12)
case("layer_norm", x("R", 3, 4), axes=1, eps=1e-5)
case(
    "layer_norm", x("R", 9, dtype="bf16"), w(9, dtype="bf16"), w(9, dtype="bf16"), axes=1, eps=1e-5
)
case("rms_norm", x("R", "T", 11), w(11), axes=1, eps=1e-6)
case("rms_norm", x("R", 11), axes=1, eps=1e-6)
for _dims in (("R", 5), ("R", 5, 3), ("R", 5, 3, 2), ("R", 5, "T")):
    case("batch_norm", x(*_dims), w(5), w(5, fill="positive"), w(5), w(5), eps=1e-5)
case("batch_norm", x("R", 5, 3), w(5), w(5, fill="positive"), eps=1e-3)
case("group_norm", x("R", 6, 5), w(6), w(6), groups=3, eps=1e-5)
case("group_norm", x("R", 6, 3, 3), groups=1, eps=1e-5)
case("group_norm", x("R", 6, "T"), w(6), None, groups=2, eps=1e-5)
case("group_norm", x("R", 4), w(4), w(4), groups=4, eps=1e-5, label="one-per-group", tol=1e-4,
     why="rounding of x times 1 / sqrt(eps), which the mean should take away")  # fmt: skip

# --- views and reads ----------------------------------------------------------------------------

case("reshape", x("R", "T", 6), out=shaped("f32", "R", "T", 2, 3))
case("reshape", x("R", "T", 6), out=shaped("f32", "R*T", 6))
case("reshape", x("2*R", 3), out=shaped("f32", "R", 6))
case("permute", x("R", "T", 2, 3), dims=(0, 2, 1, 3))
case("permute", x("R", 2, 1, 3, 4), dims=(0, 4, 2, 1, 3), label="packed")
case("expand", x("R", 1, 3), out=shaped("f32", "R", "T", 3))
case("expand", w(3), out=shaped("f32", "R", 3))
case("slice", x("R", 9), dim=1, start=1, stop=8, step=3, out=shaped("f32", "R", 3))
case("slice", x("R", 9), dim=1, start=-4, stop=-1, step=1, out=shaped("f32", "R", 3))
case("slice", x("R", 9), dim=1, start=2, stop=2**63 - 1, step=1, out=shaped("f32", "R", 7))
case("slice", x("R", "T", 2), dim=1, start=0, stop=1, step=1, out=shaped("f32", "R", 1, 2))
case("slice", x("R", "T", 2), dim=1, start=-1, step=1, out=shaped("f32", "R", 1, 2))
case("slice", w(1, 16), dim=1, start=0, step=1, out=shaped("f32", 1, "T"), label="positions")
case("slice", x("R", "2*T"), dim=1, start=1, step=2, out=shaped("f32", "R", "T"), label="every-2nd")
case("slice", x("R", "3*T"), dim=1, start=0, step=1, out=shaped("f32", "R", "2*T"), label="front")
case("select", x("R", "T", 3), dim=1, index=0)
case("select", x("R", "T", 3), dim=1, index=-1)
case("select", x("R", 4, dtype="i64"), dim=1, index=2)
case("concat", x("R", 3), x("R", 2), dim=1)
case("concat", x("R", "T", 3), x("R", "T", 2), dim=2)
case("concat", x("R", "T", 3), x("R", "T", 3), x("R", "T", 3), dim=1)
case("concat", x("R", 3, dtype="i64"), dim=0)
case("flip", x("R", "T", 3), dims=(1, 2))
case("pad", x("R", 3, 5), pads=(1, 2), value=0.5)
case("pad", x("R", 3, 5), pads=(0, 1, 2, 0), value=0)
case("pad", x("R", 3, 5), pads=(-1, 2), value=-math.inf, label="crop")
case("pad", x("R", 3, dtype="i64"), pads=(1, 1), value=2**53 + 1, label="odd")
case("pad", x("R", 3), pads=(1, 1), value=-1e300, label="beyond")
case("pad", x("R", "T", 3, dtype="bool"), pads=(1, 0), value=True)
case("index", w(7, 4), x("R", "T", dtype="i64", fill="ints:-7:7"), dims=(0,))
_ROW, _COLUMN = (
    x("R", 1, dtype="i64", fill="ints:0:5"),
    x("T", dtype="i64", fill="ints:0:6"),
)
case("index", x("R", 5, 6), _ROW, _COLUMN, dims=(1, 2))
case("index", x("R", 6, 3), w(4, dtype="i32", fill="ints:0:6"), dims=(1,))
_SPOTS = (w(3, 1, dtype="i64", fill="ints:-5:5"), w(4, dtype="i64", fill="ints:-6:6"))
case("index", x("R", 5, 6), *_SPOTS, dims=(1, 2), label="spots")
case("index", x("R", 3, 5, 6, 2), *_SPOTS, dims=(2, 3), label="spots-inside")
_ONE = w(1, dtype="i64", fill="ints:-1:1")
case("index", x("R", 1, 6), _ONE, _SPOTS[1], dims=(1, 2), label="spots-of-one")
case("gather", x("R", "T", 5), x("R", "T", 2, dtype="i64", fill="ints:0:5"), dim=2)
case("gather", x("R", 5, 4), x("R", 7, 2, dtype="i64", fill="ints:0:5"), dim=1)
case("embedding", w(9, 4), x("R", "T", dtype="i64", fill="ints:0:9"))
case("embedding", w(9, 4, dtype="bf16"), x("R", dtype="i32", fill="ints:0:9"))
for _mode in ("sum", "mean", "max"):
    case("embedding_bag", w(9, 4), x("R", "T", dtype="i64", fill="ints:0:9"), mode=_mode)
    case("embedding_bag", w(9, 4), x("R", 3, 2, dtype="i64", fill="ints:0:9"), mode=_mode)

# --- the large ops ------------------------------------------------------------------------------

case("linear", x("R", "T", 7), w(5, 7), w(5), layout="nk")
case("linear", x("R", 7), w(5, 7), layout="nk")
case("linear", x("R", 7), w(7, 5), w(5), layout="kn")
case("linear", x(7), w(5, 7), w(5), layout="nk", label="vector")
case("linear", x("R", 33, dtype="bf16"), w(5, 33, dtype="bf16"), w(5, dtype="bf16"), layout="nk",
     tol=5e-2, why="sum of 33 products, rounded to bf16")  # fmt: skip
case("linear", x("R", 1), w(1, 1), w(1), layout="nk", label="ones")
case("matmul", x("R", "T", 5), x("R", 5, "T"))
case("matmul", x("R", 2, "T", 5), w(5, 3))
case("matmul", x("R", 2, 3, 5), x("R", 1, 5, 4), label="packed")
case("matmul", x("R", 3, 1), x("R", 1, 4), label="outer")
case("matmul", x("R", "T", 1, 5), x("R", "T", 5, 1), label="inner")
case("matmul", x("R", 5), w(5), label="matrix-vector")
case("matmul", w(5), x("R", 5, 2), label="vector-matrix")
case("matmul", x(5), x(5), label="dot")
case("matmul", x("R", 2, 3, dtype="i64"), x(3, 4, dtype="i64"))

_IMAGE = x("R", 4, 9, 7)
for _conv in (
    {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1},
    {"stride": (2, 3), "padding": (1, 2), "dilation": (1, 1), "groups": 2},
    {"stride": (2, 1), "padding": (2, 1), "dilation": (2, 3), "groups": 1},
):
    case("conv", _IMAGE, w(6, 4 // _conv["groups"], 3, 2), w(6), **_conv)
case("conv", _IMAGE, w(4, 1, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=4,
     label="depthwise")  # fmt: skip
case("conv", _IMAGE, w(5, 4, 1, 1), w(5), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1,
     label="pointwise")  # fmt: skip
case("conv", x("R", 4, "T"), w(6, 4, 3), w(6), stride=(1,), padding=(1,), dilation=(1,), groups=1,
     label="same-1d")  # fmt: skip
case("conv", x("R", 4, "2*T"), w(6, 2, 2), stride=(2,), padding=(0,), dilation=(1,), groups=2,
     label="patches-1d")  # fmt: skip
case("conv", x("R", 3, 11), w(2, 3, 4), w(2), stride=(3,), padding=(2,), dilation=(2,), groups=1,
     label="1d")  # fmt: skip
for _ceil in (False, True):
    case(
        "max_pool",
        _IMAGE,
        kernel=(3, 2),
        stride=(2, 2),
        padding=(1, 1),
        dilation=(1, 1),
        ceil=_ceil,
    )
    case(
        "max_pool",
        _IMAGE,
        kernel=(2, 2),
        stride=(3, 3),
        padding=(0, 1),
        dilation=(3, 2),
        ceil=_ceil,
    )
    for _include in (False, True):
        case("avg_pool", _IMAGE, kernel=(3, 2), stride=(2, 2), padding=(1, 1), ceil=_ceil,
             include_pad=_include)  # fmt: skip
        case("avg_pool", x("R", 2, 8), kernel=(3,), stride=(2,), padding=(1,), ceil=_ceil,
             include_pad=_include)  # fmt: skip
case("max_pool", x("R", 2, 2), kernel=(3,), stride=(2,), padding=(0,), dilation=(1,), ceil=True,
     label="window-over-edge")  # fmt: skip
case("max_pool", x("R", 2, 9, dtype="i64"), kernel=(3,), stride=(2,), padding=(1,), dilation=(1,),
     ceil=True, label="whole-numbers")  # fmt: skip
case("max_pool", x("R", 2, "2*T", fill="special"), kernel=(2,), stride=(2,), padding=(0,),
     dilation=(1,), ceil=False, label="tokens")  # fmt: skip
case("avg_pool", _IMAGE, kernel=(2, 2), stride=(2, 2), padding=(0, 0), ceil=False, include_pad=True,
     divisor=3)  # fmt: skip
case("adaptive_avg_pool", _IMAGE, size=(1, 1))
case("adaptive_avg_pool", _IMAGE, size=(4, 5))
case("adaptive_avg_pool", x("R", 2, "T"), size=(3,))

_Q = x("R", 2, "T", 8)
_BSHD = x("R", "T", 2, 8)
_KEYS = x("R", "T", dtype="bool", fill="keys")


def attention(*args, causal=False, scale=0.35, layout="bhsd", mask="none", label=""):
    case("attention", *args, causal=causal, scale=scale, layout=layout, mask=mask, label=label)


for _causal in (False, True):
    attention(_Q, _Q, _Q, causal=_causal)
    attention(_Q, _Q, _Q, _KEYS, causal=_causal, mask="key", label="key-mask")
    attention(x("R", 2, 3, 8), _Q, _Q, causal=_causal, label="cross")
attention(_BSHD, _BSHD, x("R", "T", 2, 3), layout="bshd", label="bshd")
attention(_BSHD, _BSHD, _BSHD, _KEYS, layout="bshd", mask="key", label="bshd-key-mask")
attention(_Q, _Q, _Q, x("R", 1, "T", "T", dtype="bool"), mask="full", label="bool")
attention(_Q, _Q, _Q, x("T", "T", fill="minus_inf"), mask="full", label="float")

_CELLS = ((1, False, True), (2, True, True), (2, False, False), (1, True, False))
for _op, _gates in (("lstm", 4), ("gru", 3), ("rnn", 1)):
    for _layers, _both, _bias in _CELLS:
        _weights = []
        for _layer in range(_layers):
            for _ in range(1 + _both):
                _into = 3 if _layer == 0 else 5 * (1 + _both)
                _shapes = [(_gates * 5, _into), (_gates * 5, 5)] + [(_gates * 5,)] * 2 * _bias
                _weights += [w(*_shape, fill="small") for _shape in _shapes]
        for _kind in ({"nonlinearity": k} for k in ("tanh", "relu")) if _op == "rnn" else ({},):
            case(_op, x("R", "T", 3), *_weights, hidden=5, layers=_layers, bidirectional=_both,
                 bias=_bias, label=f"{_layers}-{_both}-{_bias}", tol=2e-5,
                 why="f32 rounding carried through 7 steps of 2 layers", **_kind)  # fmt: skip
