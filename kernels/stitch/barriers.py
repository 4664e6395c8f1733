"""Where threads of a block must wait for each other (F13): as few barriers as the loops need.

NOTE the one idea: a loop that is spread over threads gives turn n to thread n modulo the threads.
If a turn touches element n of an array, the element belongs to that thread; two loops that both
touch each element by its owner need no barrier between them, even if one buffer lies on the other.
Any other pair of accesses to the same bytes, one of them a write, needs one: it is placed as late
as possible, so that it serves as many pairs as possible. A reduction over the block contains one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.stitch.affine import INDEX, of
from coissue.kernels.stitch.loops import (
    Array,
    Barrier,
    Call,
    Const,
    Expr,
    Load,
    ParallelLoop,
    Reduce,
    Space,
    Stmt,
    Store,
)
from coissue.kernels.stitch.merge import expressions


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
    """What the loop touches: in or before its last reduction over the block, and after that."""
    flat = of(_index(loop.vars, loop.extents))
    before: list[Access] = []
    after: list[Access] = []
    for statement in loop.body:
        if isinstance(statement, Reduce) and loop.spread == "block":
            before, after = [*before, *after], []
            inner = of(_index(statement.vars, statement.extents))
            before += _touched(statement, arrays, inner, threads)
        else:
            owner = flat if loop.spread == "thread" else None
            after += _touched(statement, arrays, owner, threads)
    return before, after


def _index(vars_: Sequence[Expr], extents: Sequence[int]) -> Expr:
    found: Expr = Const(0, INDEX)
    for var, extent in zip(vars_, extents, strict=True):
        product = Call("mul", (found, Const(extent, INDEX)), INDEX)
        found = Call("add", (product, var), INDEX)
    return found


def _touched(
    statement: Stmt, arrays: Mapping[str, Array], owner: Mapping[Expr, int] | None, threads: int
) -> Iterator[Access]:
    if isinstance(statement, Store):
        yield from _access(statement.array, statement.index, True, arrays, owner, threads)
    if isinstance(statement, Reduce):
        for inner in statement.body:
            yield from _touched(inner, arrays, owner, threads)
    for expr in expressions(statement):
        for load in _loads(expr):
            yield from _access(load.array, load.index, False, arrays, owner, threads)


def _loads(expr: Expr) -> Iterator[Load]:
    if isinstance(expr, Load):
        yield expr
        yield from _loads(expr.index)
    elif isinstance(expr, Call):
        for arg in expr.args:
            yield from _loads(arg)


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
