"""Where threads of a block must wait for each other (F13): as few barriers as the loops need.

NOTE the one idea: a loop that is spread over threads gives turn n to thread n modulo the threads.
If a turn touches element n of an array, the element belongs to that thread; two loops that both
touch each element by its owner need no barrier between them, even if one buffer lies on the other.
Any other pair of accesses to the same bytes, one of them a write, needs one: it is placed as late
as possible, so that it serves as many pairs as possible. A reduction over the block contains one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.stitch.affine import INDEX, of
from coissue.kernels.stitch.loops import (
    Array,
    Barrier,
    Call,
    Const,
    Expr,
    ParallelLoop,
    Reduce,
    Space,
    Stmt,
    Store,
)
from coissue.kernels.stitch.merge import loads_of, substitute

#: Threads that shuffle together.
WARP: Final = 32
_ZERO: Final = Const(0, INDEX)


@dataclass(frozen=True, slots=True)
class Access:
    array: str
    #: An output's name, or "" for shared memory.
    memory: str
    first: int
    last: int
    element_bytes: int
    writes: bool
    #: Each element is touched by the thread that owns it.
    owned: bool

    def meets(self, other: Access) -> bool:
        """Whether another thread may touch the same bytes, and it matters who is first."""
        if self.memory != other.memory or not (self.writes or other.writes):
            return False
        if self.last <= other.first or other.last <= self.first:
            return False
        if self.array == other.array and self.writes and other.writes:  # each element once
            return False
        alike = (self.first, self.element_bytes) == (other.first, other.element_bytes)
        return not (alike and self.owned and other.owned)


def place_barriers(
    loops: Sequence[ParallelLoop], arrays: Sequence[Array], threads: int
) -> list[Stmt]:
    """The loops with the barriers they need between them."""
    found: list[Stmt] = []
    known = {array.name: array for array in arrays}
    open_: list[Access] = []
    for loop in loops:
        before, after = _accesses(loop, known, threads)
        early = before if loop.spread == "block" else (*before, *after)
        if any(old.meets(new) for old in open_ for new in early):
            found.append(Barrier())
            open_ = []
        if loop.spread == "block":  # the reduction waits for all that came before it
            open_ = list(after)
        else:
            open_ += [*before, *after]
        found.append(loop)
    return found


def _accesses(
    loop: ParallelLoop, arrays: Mapping[str, Array], threads: int
) -> tuple[list[Access], list[Access]]:
    """What the loop touches: before its first reduction over the block, and after its last.

    The first turn alone comes before any of those: what other turns read is waited for in it."""
    turn = _index(loop.vars, loop.extents)
    before: list[Access] = []
    after: list[Access] = []
    for statement in loop.body:
        if isinstance(statement, Reduce) and loop.spread == "block":
            first = substitute(statement, dict.fromkeys(loop.vars, _ZERO))
            owner = _index(statement.vars, statement.extents)
            before, after = [*before, *after, *_touched(first, arrays, of(owner), threads)], []
        else:
            after += _touched(statement, arrays, _owner(loop, statement, turn, threads), threads)
    return before, after


def _owner(
    loop: ParallelLoop, statement: Stmt, turn: Expr, threads: int
) -> Mapping[Expr, int] | None:
    """The number of the thread that runs the statement, modulo the threads; None: no such sum."""
    if loop.spread == "thread":
        return of(turn)
    if isinstance(statement, Reduce):  # of a warp's loop: a lane takes every 32nd
        lane = _index(statement.vars, statement.extents)
        short = math.prod(statement.extents) <= WARP or threads == WARP
        return of(_sum(turn, WARP, lane)) if short else None
    if isinstance(statement, Store):  # by the first thread of the warp, or of the block
        return of(_sum(turn, WARP, _ZERO)) if loop.spread == "warp" else {}
    return None


def _sum(factor: Expr, number: int, rest: Expr) -> Expr:
    return Call("add", (Call("mul", (factor, Const(number, INDEX)), INDEX), rest), INDEX)


def _index(vars_: Sequence[Expr], extents: Sequence[int]) -> Expr:
    found: Expr = _ZERO
    for var, extent in zip(vars_, extents, strict=True):
        found = _sum(found, extent, var)
    return found


def _touched(
    statement: Stmt, arrays: Mapping[str, Array], owner: Mapping[Expr, int] | None, threads: int
) -> Iterator[Access]:
    if isinstance(statement, Store):
        yield from _access(statement.array, statement.index, True, arrays, owner, threads)
    for load in loads_of(statement):
        yield from _access(load.array, load.index, False, arrays, owner, threads)


def _access(
    name: str,
    index: Expr,
    writes: bool,
    arrays: Mapping[str, Array],
    owner: Mapping[Expr, int] | None,
    threads: int,
) -> Iterator[Access]:
    array = arrays[name]
    width = DTYPE_BYTES[array.dtype]
    if array.space is Space.SHARED:
        first, memory = array.offset_bytes, ""
    elif array.is_output:
        first, memory = 0, name
    else:
        return
    owned = owner is not None and _same_thread(of(index), owner, threads)
    yield Access(name, memory, first, first + width * array.elements, width, writes, owned)


def _same_thread(index: Mapping[Expr, int], owner: Mapping[Expr, int], threads: int) -> bool:
    atoms = {*index, *owner}
    return all((index.get(a, 0) - owner.get(a, 0)) % threads == 0 for a in atoms)
