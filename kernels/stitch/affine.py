"""Coordinates as sums of loop variables: index arithmetic that mostly disappears.

NOTE the one idea: an index is a constant plus products of *atoms* (loop variables, or divisions that
could not be resolved) with numbers, and the greatest value of each atom is known. Then a division
by a number is exact for the terms it divides, and the rest vanishes if it stays below the number.
Where a loop variable itself is what cannot be divided, `Split` says so: the caller runs it as two
nested loops instead, and the division is gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coissue.kernels.stitch.loops import Call, Const, Expr, Var

INDEX = "i64"
#: The variable of the grid; the only one that is no loop of the body.
BLOCK = Var("block")


class Split(Exception):
    """A loop over `var` should be two: its variable is outer * `inner` + inner's variable."""

    def __init__(self, var: Var, inner: int) -> None:
        super().__init__(var.name, inner)
        self.var, self.inner = var, inner


@dataclass(frozen=True, slots=True)
class Affine:
    """Never negative. `terms`: (atom, factor, greatest value of the atom), no atom twice."""

    terms: tuple[tuple[Expr, int, int], ...] = ()
    constant: int = 0

    @property
    def greatest(self) -> int:
        return self.constant + sum(factor * most for _, factor, most in self.terms)

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.constant + other)
        found = {atom: (factor, most) for atom, factor, most in self.terms}
        for atom, factor, most in other.terms:
            found[atom] = (found.get(atom, (0, 0))[0] + factor, most)
        terms = tuple((atom, factor, most) for atom, (factor, most) in found.items())
        return Affine(terms, self.constant + other.constant)

    def __mul__(self, number: int) -> Affine:
        if number == 0:
            return ZERO
        terms = tuple((atom, factor * number, most) for atom, factor, most in self.terms)
        return Affine(terms, self.constant * number)

    def split(self, number: int) -> tuple[Affine, Affine]:
        """Quotient and remainder by `number`. Raises `Split` where a loop can be cut in two."""
        whole = tuple((a, f // number, most) for a, f, most in self.terms if f % number == 0)
        rest = Affine(tuple(t for t in self.terms if t[1] % number), self.constant % number)
        quotient = Affine(whole, self.constant // number)
        if rest.greatest < number:
            return quotient, rest
        for atom, factor, most in rest.terms:
            inner = number // factor
            if isinstance(atom, Var) and atom != BLOCK and number % factor == 0:
                if (most + 1) % inner == 0 and most + 1 > inner:
                    raise Split(atom, inner)
        over = Call("floordiv", (rest.expr(), _number(number)), INDEX)
        under = Call("mod", (rest.expr(), _number(number)), INDEX)
        quotient = quotient + Affine(((over, 1, rest.greatest // number),))
        return quotient, Affine(((under, 1, number - 1),))

    def expr(self) -> Expr:
        found: Expr | None = None
        for atom, factor, _ in self.terms:
            term = atom if factor == 1 else Call("mul", (atom, _number(factor)), INDEX)
            found = term if found is None else Call("add", (found, term), INDEX)
        if found is None:
            return _number(self.constant)
        return Call("add", (found, _number(self.constant)), INDEX) if self.constant else found


ZERO = Affine()
Coords = tuple[Affine, ...]


def _number(value: int) -> Const:
    return Const(value, INDEX)


def variable(var: Var, extent: int) -> Affine:
    return Affine(((var, 1, extent - 1),)) if extent > 1 else ZERO


def ravel(coords: Coords, shape: Sequence[int]) -> Affine:
    """The place in row-major order."""
    found = ZERO
    for coord, extent in zip(coords, shape, strict=True):
        found = found * extent + coord
    return found


def unravel(flat: Affine, shape: Sequence[int]) -> Coords:
    found: list[Affine] = []
    for extent in reversed(shape[1:]):
        flat, rest = flat.split(extent)
        found.append(rest)
    return (*([flat] if shape else []), *reversed(found))


def regroup(coords: Coords, shape: Sequence[int], wanted: Sequence[int]) -> Coords:
    """The same element's coordinates in `wanted`, which has as many elements in the same order.

    Runs of extents with equal products are handled apart, so that only real splits divide."""
    found: list[Affine] = []
    i = j = 0
    while i < len(shape) or j < len(wanted):
        i_end, j_end = min(i + 1, len(shape)), min(j + 1, len(wanted))
        while math.prod(shape[i:i_end]) != math.prod(wanted[j:j_end]):
            if math.prod(shape[i:i_end]) < math.prod(wanted[j:j_end]):
                i_end += 1
            else:
                j_end += 1
        found += unravel(ravel(coords[i:i_end], shape[i:i_end]), wanted[j:j_end])
        i, j = i_end, j_end
    return tuple(found)


def of(expr: Expr) -> Mapping[Expr, int]:
    """An index expression as atom -> factor; the constant has the key `Const(1)`."""
    one = _number(1)
    match expr:
        case Const(value=value):
            return {one: int(value)}
        case Call(name="mul", args=(left, Const(value=value)), dtype="i64"):
            return {atom: factor * int(value) for atom, factor in of(left).items()}
        case Call(name="add", args=(left, right), dtype="i64"):
            found = dict(of(left))
            for atom, factor in of(right).items():
                found[atom] = found.get(atom, 0) + factor
            return found
        case _:
            return {expr: 1}
