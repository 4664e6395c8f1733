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

FLOATS: Final = frozenset({"f16", "bf16", "f32", "f64"})
INTS: Final = frozenset({"u8", "i8", "i16", "i32", "i64"})
NUMBERS: Final = FLOATS | INTS
ANY: Final = NUMBERS | {"bool"}
#: dtypes an index tensor may have.
INDICES: Final = frozenset({"i32", "i64"})
BOOL: Final = frozenset({"bool"})

INT_LOW: Final = -(2**63)
INT_HIGH: Final = 2**63 - 1
#: Smallest and largest value of each integer dtype.
INT_RANGE: Final = {
    "u8": (0, 255),
    **{f"i{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
}
ONE: Final = Dim(1)


class Mismatch(Exception):
    """The types do not fit the op; the text says which and what would be allowed."""


@dataclass(frozen=True, slots=True)
class Attr:
    """One attribute: its kind and bounds. `optional` means it may be missing or None.

    Kinds: int, float, bool, str, ints (a tuple), scalar (bool, int or float, by the dtype).
    """

    kind: str
    optional: bool = False
    low: int = INT_LOW
    high: int = INT_HIGH
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One op as inference sees it. Optional inputs not given are None; attrs are complete."""

    inputs: tuple[Type | None, ...]
    attrs: Mapping[str, Any]
    #: Types the program declares for the outputs: the truth for ops "to the output type".
    outputs: tuple[Type, ...]
    rows_limit: int
    tokens_limit: int

    def type(self, index: int) -> Type:
        """The type of an input that must be there."""
        found = self.inputs[index]
        require(found is not None, f"input {index} is missing")
        assert found is not None
        return found

    def shape(self, index: int) -> Shape:
        return self.type(index).shape


@dataclass(frozen=True, slots=True)
class OpDef:
    """One row of the op table."""

    infer: Callable[[Call], tuple[Type, ...]]
    #: numpy meaning: `run(*arrays, **attrs)`, plus `out=(shape, numpy dtype)` if `typed`.
    run: Callable[..., Any]
    #: Inputs that must be given.
    required: int = 1
    #: Inputs after those that may be ABSENT or left out.
    optional: int = 0
    #: True: any number of further inputs, none of them ABSENT.
    variadic: bool = False
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    #: Number of outputs; 0 means as many as the program declares.
    outputs: int = 1
    typed: bool = False
    #: True: floats are widened to f64 before `run` and rounded once after it.
    widen: bool = True


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise Mismatch(sentence)


def render_dim(dim: Dim) -> str:
    powers = (("R", dim.rows), ("T", dim.tokens))
    parts = [name if power == 1 else f"{name}^{power}" for name, power in powers if power]
    return "*".join(parts if parts and dim.scale == 1 else [str(dim.scale), *parts])


def render_shape(shape: Sequence[Dim]) -> str:
    return "[" + ", ".join(map(render_dim, shape)) + "]"


def render_type(type_: Type) -> str:
    return type_.dtype + render_shape(type_.shape)


def require_dtypes(call: Call, allowed: frozenset[str], *indices: int) -> str:
    """The one dtype shared by the given inputs (all that are present, if none are named)."""
    chosen = [call.inputs[i] for i in indices] if indices else list(call.inputs)
    dtypes = [t.dtype for t in chosen if t is not None]
    require(
        len(set(dtypes)) == 1 and dtypes[0] in allowed,
        f"inputs have dtypes {', '.join(dtypes)}; allowed: one of {', '.join(sorted(allowed))}",
    )
    return dtypes[0]


def require_rank(shape: Shape, low: int, high: int, what: str) -> None:
    wanted = f"rank {low}" if low == high else f"a rank of {low} to {high}"
    require(low <= len(shape) <= high, f"{what} has shape {render_shape(shape)}; needs {wanted}")


def require_dim(shape: Shape, dim: int) -> Dim:
    """The extent of `dim`, which must be counted from 0."""
    require(0 <= dim < len(shape), f"dim {dim} is not one of the {len(shape)} dims, from 0")
    return shape[dim]


def require_shape(found: Shape, wanted: Shape, what: str) -> None:
    require(
        found == wanted,
        f"{what} has shape {render_shape(found)}; needs {render_shape(wanted)}",
    )


def require_dims(shape: Shape, dims: Sequence[int]) -> None:
    """`dims` must be increasing and inside the rank."""
    require(
        bool(dims) and list(dims) == sorted(set(dims)) and dims[0] >= 0 and dims[-1] < len(shape),
        f"dims {tuple(dims)} must be increasing dims of {render_shape(shape)}",
    )


def require_present(call: Call, index: int, wanted: Shape, what: str) -> None:
    """Checks the shape of an optional input, if it is there."""
    found = call.inputs[index]
    if found is not None:
        require_shape(found.shape, wanted, what)


def require_value(value: Any, dtype: str, what: str) -> None:
    """A scalar attr must be exactly representable as the kind of number `dtype` is."""
    if dtype in INT_RANGE:
        low, high = INT_RANGE[dtype]
        good = type(value) is int and low <= value <= high
    elif dtype == "bool":
        good = type(value) is bool
    else:
        good = type(value) in (int, float)
    require(good, f"{what} {value!r} is not a value of {dtype}")


def broadcast(*shapes: Shape) -> Shape:
    """numpy's broadcasting; two extents fit if equal as monomials or if one is the fixed 1."""
    rank = max(map(len, shapes))
    padded = [(ONE,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(_join(column, shapes) for column in zip(*padded, strict=True))


def _join(column: Sequence[Dim], shapes: Sequence[Shape]) -> Dim:
    wide = {dim for dim in column if dim != ONE}
    if len(wide) > 1:
        raise Mismatch("shapes " + " and ".join(map(render_shape, shapes)) + " do not broadcast")
    return wide.pop() if wide else ONE


def product(shape: Sequence[Dim]) -> Dim:
    """The number of elements, as a monomial."""
    scale, rows, tokens = 1, 0, 0
    for dim in shape:
        scale, rows, tokens = scale * dim.scale, rows + dim.rows, tokens + dim.tokens
    return Dim(scale, rows, tokens)


def like(call: Call, index: int = 0, dtype: str | None = None) -> tuple[Type, ...]:
    """The output type equal to an input's, with another dtype if one is given."""
    found = call.type(index)
    return (Type(found.shape, dtype or found.dtype),)
