"""Nested loops that touch memory as one loop would become one loop.

Two adjacent variables can be one if every index has them as outer * extent + inner: then a
row-major tensor is walked as flat memory, and what is vectorised or spread over threads is long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from coissue.kernels.stitch.affine import INDEX, of
from coissue.kernels.stitch.loops import (
    Call,
    Const,
    Expr,
    Let,
    Load,
    ParallelLoop,
    Reduce,
    Stmt,
    Store,
    Var,
)


def merge_loops(loop: ParallelLoop) -> ParallelLoop:
    """The loop and the reductions in it with as few variables as their indices allow."""
    body = tuple(_merge_reduce(s) if isinstance(s, Reduce) else s for s in loop.body)
    vars_, extents, body = _merge(loop.vars, loop.extents, body)
    return replace(loop, vars=vars_, extents=extents, body=body)


def _merge_reduce(reduce: Reduce) -> Reduce:
    # The value is read as one more statement of the body.
    body = tuple(_merge_reduce(s) if isinstance(s, Reduce) else s for s in reduce.body)
    value = Let(reduce.into, reduce.value)
    vars_, extents, (*body, value) = _merge(reduce.vars, reduce.extents, (*body, value))
    assert isinstance(value, Let)
    return replace(reduce, vars=vars_, extents=extents, body=tuple(body), value=value.value)


def _merge(
    vars_: tuple[Var, ...], extents: tuple[int, ...], body: tuple[Stmt, ...]
) -> tuple[tuple[Var, ...], tuple[int, ...], tuple[Stmt, ...]]:
    at = len(vars_) - 2
    while at >= 0:
        outer, inner = vars_[at], vars_[at + 1]
        if all(runs_together(index, outer, inner, extents[at + 1]) for index in indices(body)):
            body = tuple(substitute(s, {outer: Const(0, INDEX)}) for s in body)
            vars_ = (*vars_[:at], *vars_[at + 1 :])
            extents = (*extents[:at], extents[at] * extents[at + 1], *extents[at + 2 :])
        at -= 1
    return vars_, extents, body


def runs_together(index: Expr, outer: Var, inner: Var, extent: int) -> bool:
    factors = of(index)
    return factors.get(outer, 0) == factors.get(inner, 0) * extent


def indices(body: Sequence[Stmt]) -> Iterator[Expr]:
    """Every sum of loop variables in these statements, also those inside a division."""
    for statement in body:
        for expr in expressions(statement):
            yield from _sums(expr)
        if isinstance(statement, Reduce | ParallelLoop):
            yield from indices(statement.body)


def _sums(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, Load):
        yield from _sums(expr.index)
    elif isinstance(expr, Call) and not (expr.dtype == INDEX and expr.name in ("add", "mul")):
        for arg in expr.args:
            yield from _sums(arg)
    elif expr.dtype == INDEX:
        yield expr
        for atom in of(expr):
            if not isinstance(atom, Const | Var):
                yield from _sums(atom) if atom != expr else ()


def expressions(statement: Stmt) -> tuple[Expr, ...]:
    """What the statement itself computes, without the statements inside it."""
    match statement:
        case Let(value=value) | Reduce(value=value):
            return (value,)
        case Store(index=index, value=value):
            return (index, value)
        case _:
            return ()


def substitute(statement: Stmt, known: dict[Var, Expr]) -> Stmt:
    def change(expr: Expr) -> Expr:
        return _rebuild(expr, known)

    return _each(statement, change)


def _each(statement: Stmt, change: Callable[[Expr], Expr]) -> Stmt:
    match statement:
        case Let():
            return replace(statement, value=change(statement.value))
        case Store():
            return replace(statement, index=change(statement.index), value=change(statement.value))
        case Reduce():
            body = tuple(_each(s, change) for s in statement.body)
            return replace(statement, body=body, value=change(statement.value))
        case ParallelLoop():
            return replace(statement, body=tuple(_each(s, change) for s in statement.body))
        case _:
            return statement


def _rebuild(expr: Expr, known: dict[Var, Expr]) -> Expr:
    match expr:
        case Var():
            return known.get(expr, expr)
        case Load(array=array, index=index, dtype=dtype):
            return Load(array, _rebuild(index, known), dtype)
        case Call(name=name, args=args, dtype=dtype):
            new = tuple(_rebuild(arg, known) for arg in args)
            return simplify(Call(name, new, dtype)) if dtype == INDEX else Call(name, new, dtype)
        case _:
            return expr


def simplify(call: Call) -> Expr:
    """Sums and products of an index without the zeros that a substitution left."""
    zero, (left, *rest) = Const(0, INDEX), call.args
    if call.name == "add":
        if left == zero:
            return rest[0]
        return left if rest[0] == zero else call
    return zero if call.name == "mul" and left == zero else call
