"""A stitched kernel as loops: what the one renderer writes in each dialect. Data only.

Made from a `StitchedKernel` by `emit`; both renderers and the reference executor of the tests read
it. Integer arithmetic on indices is in C's `int64_t` (`floordiv` and `mod` of numbers >= 0).

                  C++                                CUDA
    grid          two outer loops: unit, block       blockIdx, through the table of segments
    ParallelLoop  nested loops, the last one SIMD    one flat loop, strided by the threads
    Barrier       nothing                            __syncthreads
    SHARED        an array on the stack              __shared__
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Space(enum.Enum):
    #: An input or output in global memory; `per_unit` says whether it starts at unit * elements.
    GLOBAL = "global"
    #: One per block.
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Array:
    name: str
    dtype: str
    #: Per unit, per block, or in all (GLOBAL and not `per_unit`).
    elements: int
    space: Space
    per_unit: bool = True
    is_output: bool = False
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Const:
    value: float | int | bool
    dtype: str


@dataclass(frozen=True, slots=True)
class Var:
    """A loop variable, `block`, or a value bound by `Let` or `Reduce`."""

    name: str
    dtype: str = "i64"


@dataclass(frozen=True, slots=True)
class Load:
    array: str
    index: Expr
    dtype: str


@dataclass(frozen=True, slots=True)
class Call:
    """`name` is a scalar function of the op table's meaning, `expm1`, `one_plus_erf`, `cast`,
    `select`, or on indices add, mul, floordiv, mod, lt, `bounded` (see `co_bounded`)."""

    name: str
    args: tuple[Expr, ...]
    dtype: str


Expr = Const | Var | Load | Call


@dataclass(frozen=True, slots=True)
class Let:
    var: Var
    value: Expr


@dataclass(frozen=True, slots=True)
class Store:
    array: str
    index: Expr
    value: Expr


@dataclass(frozen=True, slots=True)
class Reduce:
    """`into` = `value` combined by `name` over all of `extents`, from its neutral element.
    `body` runs before `value` in each turn. `spread`: over thread, warp or block (see `plan.Rows`);
    all threads know the result."""

    into: Var
    name: str
    vars: tuple[Var, ...]
    extents: tuple[int, ...]
    body: tuple[Stmt, ...]
    value: Expr
    spread: str = "thread"


@dataclass(frozen=True, slots=True)
class ParallelLoop:
    """Turns that do not depend on each other, over the product of `extents`. `spread` "warp" or
    "block": the turns are taken one by one by all threads of a warp or of the block, because a
    `Reduce` inside is spread over them."""

    vars: tuple[Var, ...]
    extents: tuple[int, ...]
    body: tuple[Stmt, ...]
    spread: str = "thread"


@dataclass(frozen=True, slots=True)
class Barrier:
    """What any thread of the block wrote before, all read after."""


Stmt = Let | Store | Reduce | ParallelLoop | Barrier


@dataclass(frozen=True, slots=True)
class LoopKernel:
    """Arguments of the generated function: GLOBAL arrays in order, then the units."""

    name: str
    arrays: tuple[Array, ...]
    #: Blocks per unit; the variable `block` runs over them.
    blocks: int
    threads: int
    shared_bytes: int
    body: Sequence[Stmt]
