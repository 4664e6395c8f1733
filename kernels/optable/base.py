"""What an op is, and the arithmetic of shapes that type inference needs.

Rules: pure functions of types; nothing here looks at data. An inference function gets a `Call` and
returns the output types, or raises `Mismatch` with one sentence; `spec` adds the op, its place in
the tenant's model, and raises `SpecError`. By the time it runs, `spec` has checked the number of
inputs, every attr (kind and range) and every declared type, so sizes are bounded.

Two conventions keep programs canonical: dims are counted from 0 (never negative), and the inputs of
one op share one dtype (capture inserts `cast`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy.typing as npt

from coissue.kernels.ir import Dim, Type

Array = npt.NDArray[Any]
Ints = tuple[int, ...]
#: What a `typed` op is told of its output: the shape and the numpy dtype that holds it.
Out = tuple[Ints, Any]
Shape = tuple[Dim, ...]

INT_LOW: Final = -(2**63)
INT_HIGH: Final = 2**63 - 1
#: Smallest and largest value of each integer dtype.
INT_RANGE: Final = {
    "u8": (0, 255), "i8": (-128, 127), "i16": (-(2**15), 2**15 - 1),
    "i32": (-(2**31), 2**31 - 1), "i64": (INT_LOW, INT_HIGH),
}  # fmt: skip
_FLOATS: Final = ("f16", "bf16", "f32", "f64")
#: The dtypes an input may have, by the word used in the op table.
KINDS: Final[dict[str, tuple[str, ...]]] = {
    "float": _FLOATS,
    "number": (*_FLOATS, *INT_RANGE),
    "any": (*_FLOATS, *INT_RANGE, "bool"),
    "index": ("i32", "i64"),
    "bool": ("bool",),
}
ONE: Final = Dim(1)


class Mismatch(Exception):
    """The types do not fit the op; the text says which and what would be allowed."""


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise Mismatch(sentence)


@dataclass(frozen=True, slots=True)
class Attr:
    """One attribute: its kind and bounds. `optional` means it may be missing or None.

    Kinds: int, float, bool, str, ints (a tuple), scalar (bool, int or float, by the dtype).
    """

    kind: str
    low: int = INT_LOW
    high: int = INT_HIGH
    optional: bool = False
    choices: tuple[str, ...] = ()


FLAG: Final = Attr("bool")
FLOAT: Final = Attr("float")
SCALAR: Final = Attr("scalar")
POSITIVE: Final = Attr("int", 1, 2**31)
#: Dims are counted from 0.
DIM: Final = Attr("int", 0, 63)
DIMS: Final = Attr("ints", 0, 63)


def one_of(*choices: str) -> Attr:
    return Attr("str", choices=choices)


@dataclass(frozen=True, slots=True)
class Call:
    """One op as inference sees it. Optional inputs not given are None; attrs are complete.

    Methods answer about an input, or raise `Mismatch` if it is not as asked.
    """

    inputs: tuple[Type | None, ...]
    attrs: Mapping[str, Any]
    #: Types the program declares for the outputs: the truth for ops "to the output type".
    outputs: tuple[Type, ...]
    rows_limit: int
    tokens_limit: int

    def type(self, index: int) -> Type:
        found = self.inputs[index]
        if found is None:
            raise Mismatch(f"input {index} is missing")
        return found

    def shape(self, index: int, rank: Sequence[int] = range(64)) -> Shape:
        """The shape of an input that must have one of the given ranks."""
        shape = self.type(index).shape
        text = f"{rank[0]}" if len(rank) == 1 else f"{rank[0]} to {rank[-1]}"
        require(
            len(shape) in rank, f"input {index} has shape {render_shape(shape)}; needs rank {text}"
        )
        return shape

    def dtype(self, kind: str, *indices: int) -> str:
        """The one dtype, of the given kind, that the inputs share (all inputs, if none named)."""
        chosen = [self.inputs[i] for i in indices] if indices else list(self.inputs)
        dtypes = [t.dtype for t in chosen if t is not None]
        require(
            len(set(dtypes)) == 1 and dtypes[0] in KINDS[kind],
            f"inputs have dtypes {', '.join(dtypes)}; allowed: one of {', '.join(KINDS[kind])}",
        )
        return dtypes[0]

    def extent(self, index: int, dim: int) -> Dim:
        shape = self.shape(index)
        require(dim < len(shape), f"dim {dim} is not one of the {len(shape)} dims, from 0")
        return shape[dim]

    def expect(self, index: int, wanted: Shape) -> None:
        """If the input is there, it must have the shape `wanted`."""
        found = self.inputs[index]
        if found is not None:
            require_shape(found.shape, wanted, f"input {index}")

    def like(self, kind: str, dtype: str | None = None) -> tuple[Type, ...]:
        """Inputs share a dtype of that kind; the output is as input 0, or of another dtype."""
        found = self.dtype(kind)
        return (Type(self.shape(0), dtype or found),)


@dataclass(frozen=True, slots=True)
class OpDef:
    """One row of the op table."""

    infer: Callable[[Call], tuple[Type, ...]]
    #: numpy meaning: `run(*arrays, **attrs)`, plus `out=Out` if `typed`.
    run: Callable[..., Any]
    #: Inputs that must be given.
    required: int = 1
    #: Inputs after those that may be ABSENT or left out.
    optional: int = 0
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    #: True: any number of further inputs, none of them ABSENT.
    variadic: bool = False
    #: Number of outputs; 0 means as many as the program declares.
    outputs: int = 1
    typed: bool = False
    #: True: floats are widened to f64 before `run` and rounded once after it.
    widen: bool = True


def render_dim(dim: Dim) -> str:
    powers = (("R", dim.rows), ("T", dim.tokens))
    parts = [name if power == 1 else f"{name}^{power}" for name, power in powers if power]
    return "*".join(parts if parts and dim.scale == 1 else [str(dim.scale), *parts])


def render_shape(shape: Sequence[Dim]) -> str:
    return "[" + ", ".join(map(render_dim, shape)) + "]"


def render_type(type_: Type) -> str:
    return type_.dtype + render_shape(type_.shape)


def require_shape(found: Shape, wanted: Shape, what: str) -> None:
    text = f"{what} has shape {render_shape(found)}; needs {render_shape(wanted)}"
    require(found == wanted, text)


def require_dims(shape: Shape, dims: Ints) -> None:
    """`dims` must be increasing and inside the rank."""
    good = bool(dims) and list(dims) == sorted(set(dims)) and dims[-1] < len(shape)
    require(good, f"dims {dims} must be increasing dims of {render_shape(shape)}")


def require_value(value: Any, dtype: str, what: str) -> None:
    """A scalar attr must be the kind of number `dtype` holds, and inside its range."""
    kinds: dict[str, tuple[type, ...]] = {"bool": (bool,), **dict.fromkeys(INT_RANGE, (int,))}
    low, high = INT_RANGE.get(dtype, (value, value))
    good = type(value) in kinds.get(dtype, (int, float)) and (
        value != value or low <= value <= high
    )
    require(good, f"{what} {value!r} is not a value of {dtype}")


def broadcast(*shapes: Shape) -> Shape:
    """numpy's broadcasting; two extents fit if equal as monomials or if one is the fixed 1."""
    rank = max(map(len, shapes))
    padded = [(ONE,) * (rank - len(shape)) + shape for shape in shapes]
    joined = []
    for column in zip(*padded, strict=True):
        wide = {dim for dim in column if dim != ONE} or {ONE}
        require(len(wide) == 1, " and ".join(map(render_shape, shapes)) + " do not broadcast")
        joined.append(wide.pop())
    return tuple(joined)


def product(shape: Sequence[Dim]) -> Dim:
    """The number of elements, as a monomial."""
    scale, rows, tokens = 1, 0, 0
    for dim in shape:
        scale, rows, tokens = scale * dim.scale, rows + dim.rows, tokens + dim.tokens
    return Dim(scale, rows, tokens)
