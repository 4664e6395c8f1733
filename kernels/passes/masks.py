"""Recognises attention masks, so that "full" masks become causal, key masks or none.

NOTE the one idea: a mask element is evaluated as a function of its place (b, h, i, j), through the
ops that made it: row, head, query position, key position. Integers become linear forms over the
places; a bool becomes a conjunction of facts. What is not understood becomes an atom ("element
(b, j) of value 7"), never a guess, so an unrecognised mask stays "full", which is always right.

Edge elements (diff with a prepended value, clamped positions) need cases: i and j are replaced by 0
and by i + 1 and j + 1. What the last case gives, moved back by one, must give the three others too.

Sound by: places are >= 0 and nothing else is known of them; only i64 arithmetic is followed, and
only with factors far from overflow; indexes that may be negative are not followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coissue.kernels.ir import ABSENT, Dim, Op, Program, Type
from coissue.kernels.passes.rewrite import Graph, integer, integers, rewrite


@dataclass(frozen=True, slots=True)
class Elem:
    """The element of a value at a place."""

    value: int
    place: tuple[Linear, ...]


@dataclass(frozen=True, slots=True)
class Linear:
    """`const + sum of factor * term`; a term is the name of a place, or an element."""

    const: int
    terms: tuple[tuple[str | Elem, int], ...] = ()

    @property
    def at_least(self) -> int | None:
        """A lower bound, if there is one: places are >= 0, elements unknown."""
        good = all(isinstance(term, str) and factor > 0 for term, factor in self.terms)
        return self.const if good else None

    @property
    def is_place(self) -> bool:
        """Whether this can be followed as an index: no elements in it, never negative."""
        return self.at_least is not None and self.const >= 0

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        sums = dict(self.terms)
        for term, count in other.terms:
            sums[term] = sums.get(term, 0) + factor * count
        terms = tuple((t, n) for t, n in sorted(sums.items(), key=lambda x: repr(x[0])) if n)
        return Linear(self.const + factor * other.const, terms)

    def times(self, factor: int) -> Linear:
        return Linear(0).plus(self, factor)

    def shift(self, moves: dict[str, Linear]) -> Linear:
        """This with places replaced."""
        result = Linear(self.const)
        for term, factor in self.terms:
            if isinstance(term, Elem):
                moved = tuple(part.shift(moves) for part in term.place)
                result = result.plus(Linear(0, ((Elem(term.value, moved), 1),)), factor)
            else:
                result = result.plus(moves.get(term, Linear(0, ((term, 1),))), factor)
        return result


#: A conjunction: linear forms that are >= 0, and bool elements that are true. TRUE has none.
Facts = frozenset[Linear | Elem]
Meaning = Linear | Facts
TRUE: Final[Facts] = frozenset()
FALSE: Final[Facts] = frozenset({Linear(-1)})
ONE: Final = Linear(1)
#: Bounds on the work for one program: depth of ops followed, elements evaluated.
DEPTH_LIMIT: Final = 80
ELEMENTS_LIMIT: Final = 20_000


def place(name: str) -> Linear:
    return Linear(0, ((name, 1),))


def at_least_zero(form: Linear) -> Facts:
    """The fact `form >= 0`, decided where it can be."""
    if form.at_least is not None and form.const >= 0:
        return TRUE
    highest = form.times(-1).at_least
    if highest is not None and highest > 0:
        return FALSE
    return frozenset({form})


def both(a: Facts, b: Facts) -> Facts:
    return FALSE if FALSE in (a, b) else a | b


class Elements:
    """Evaluates elements of one graph's values; layers that share a mask share the work."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[Elem, Meaning] = {}
        self._depth = 0

    def at(self, value: int, spot: tuple[Linear, ...]) -> Meaning:
        """What the element of `value` at `spot` is."""
        key = Elem(value, spot)
        op = self._graph.makers.get(value)
        rule = None if op is None else RULES.get(op.name)
        if op is None or rule is None or self._depth >= DEPTH_LIMIT:
            return self._atom(key)
        if key not in self._known and len(self._known) < ELEMENTS_LIMIT:
            self._depth += 1
            self._known[key] = self._atom(key)
            found = rule(self, op, spot)
            if found is not None:
                self._known[key] = found
            self._depth -= 1
        return self._known.get(key, self._atom(key))

    def _atom(self, key: Elem) -> Meaning:
        if self.type(key.value).dtype == "bool":
            return frozenset({key})
        return Linear(0, ((key, 1),))

    def type(self, value: int) -> Type:
        return self._graph.types[value]

    def operands(self, op: Op, spot: tuple[Linear, ...]) -> list[Meaning]:
        """The operands of a broadcasting op at the output's `spot`."""
        return [self.at(value, self.align(value, spot)) for value in op.inputs]

    def align(self, value: int, spot: tuple[Linear, ...]) -> tuple[Linear, ...]:
        shape = self.type(value).shape
        own = spot[len(spot) - len(shape) :]
        pairs = zip(shape, own, strict=True)
        return tuple(Linear(0) if extent == Dim(1) else part for extent, part in pairs)

    def integers(self, op: Op, spot: tuple[Linear, ...]) -> list[Linear] | None:
        """The operands, if they are i64."""
        if any(self.type(value).dtype != "i64" for value in op.inputs):
            return None
        return [found for found in self.operands(op, spot) if isinstance(found, Linear)]


Handler = Callable[[Elements, Op, tuple[Linear, ...]], Meaning | None]


def _number(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    value, dtype = op.attrs["value"], elements.type(op.outputs[0]).dtype
    if dtype == "bool":
        return TRUE if value else FALSE
    return _small(Linear(value)) if dtype == "i64" and isinstance(value, int) else None


def _arange(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    return _small(Linear(integer(op, "start")).plus(spot[0], integer(op, "step")))


def _cast(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    old, new = (elements.type(value).dtype for value in (op.inputs[0], op.outputs[0]))
    found = elements.at(op.inputs[0], spot)
    if old == new:
        return found
    if new == "i64" and found in (TRUE, FALSE):
        return Linear(int(found == TRUE))
    if new == "bool" and old == "i64" and isinstance(found, Linear):
        return _differ(found)
    return None


def _differ(form: Linear) -> Facts | None:
    """`form != 0`, where it can be decided."""
    if at_least_zero(form.plus(ONE, -1)) == TRUE or at_least_zero(form) == FALSE:
        return TRUE
    return FALSE if form == Linear(0) else None


def _arithmetic(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    forms = elements.integers(op, spot)
    if forms is None:
        return None
    a, b = forms
    if op.name == "mul":
        a, b = (a, b) if not b.terms else (b, a)
        return None if b.terms else _small(a.times(b.const))
    return _small(a.plus(b, -1 if op.name == "sub" else 1))


def _small(form: Linear) -> Linear | None:
    """`form` unless its numbers are so large that i64 could wrap around."""
    numbers = (form.const, *(factor for _, factor in form.terms))
    return form if all(abs(number) < 2**31 for number in numbers) else None


def _clamp(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    forms, low = elements.integers(op, spot), op.attrs.get("min")
    if forms is None or not isinstance(low, int) or op.attrs.get("max") is not None:
        return None
    (form,) = forms
    if at_least_zero(form.plus(Linear(low), -1)) == TRUE:
        return form
    return Linear(low) if at_least_zero(Linear(low).plus(form, -1)) == TRUE else None


def _compare(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    forms = elements.integers(op, spot)
    if forms is None:
        return None
    gap = forms[0].plus(forms[1], -1)
    if op.name in ("eq", "ne"):
        differ = _differ(gap)
        return differ if op.name == "ne" or differ is None else _negate(differ)
    if op.name in ("le", "lt"):
        gap = gap.times(-1)
    return at_least_zero(gap.plus(ONE, -1) if op.name in ("lt", "gt") else gap)


def _negate(facts: Facts) -> Facts | None:
    if facts in (TRUE, FALSE):
        return TRUE if facts == FALSE else FALSE
    (fact, *rest) = facts
    if rest or isinstance(fact, Elem):
        return None
    return at_least_zero(fact.times(-1).plus(ONE, -1))


def _logical(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    a, *rest = elements.operands(op, spot)
    if isinstance(a, Linear) or any(isinstance(b, Linear) for b in rest):
        return None
    if op.name == "logical_not":
        return _negate(a)
    (b,) = rest
    assert not isinstance(b, Linear)
    if op.name == "logical_and":
        return both(a, b)
    if TRUE in (a, b):
        return TRUE
    if a == FALSE:
        return b
    return a if b in (FALSE, a) else None


def _where(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    condition, yes, no = elements.operands(op, spot)
    if condition in (TRUE, FALSE) or yes == no:
        return yes if condition != FALSE else no
    return None


def _through(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    (found,) = elements.operands(op, spot)
    return found


def _reshape(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    """Only axes of extent 1 may come and go."""
    old = elements.type(op.inputs[0]).shape
    new = elements.type(op.outputs[0]).shape
    wide = [part for extent, part in zip(new, spot, strict=True) if extent != Dim(1)]
    if [extent for extent in old if extent != Dim(1)] != [e for e in new if e != Dim(1)]:
        return None
    wide.reverse()
    own = tuple(Linear(0) if extent == Dim(1) else wide.pop() for extent in old)
    return elements.at(op.inputs[0], own)


def _permute(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    dims = integers(op, "dims")
    own = dict(zip(dims, spot, strict=True))
    return elements.at(op.inputs[0], tuple(own[dim] for dim in range(len(own))))


def _slice(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    dim, start = integer(op, "dim"), integer(op, "start")
    if start < 0:
        return None
    own = Linear(start).plus(spot[dim], integer(op, "step"))
    return elements.at(op.inputs[0], (*spot[:dim], own, *spot[dim + 1 :]))


def _select(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    dim, index = integer(op, "dim"), integer(op, "index")
    if index < 0:
        return None
    return elements.at(op.inputs[0], (*spot[:dim], Linear(index), *spot[dim:]))


def _index(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    dims = integers(op, "dims")
    value, *indices = op.inputs
    rank = max(len(elements.type(index).shape) for index in indices)
    first = dims[0]
    picks = [elements.at(i, elements.align(i, spot[first : first + rank])) for i in indices]
    followed = tuple(pick for pick in picks if isinstance(pick, Linear) and pick.is_place)
    if len(followed) < len(picks):
        return None
    return elements.at(value, (*spot[:first], *followed, *spot[first + rank :]))


def _gather(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    dim = integer(op, "dim")
    pick = elements.at(op.inputs[1], spot)
    if not isinstance(pick, Linear) or not pick.is_place:
        return None
    return elements.at(op.inputs[0], (*spot[:dim], pick, *spot[dim + 1 :]))


def _cumsum(elements: Elements, op: Op, spot: tuple[Linear, ...]) -> Meaning | None:
    """Only of what is the same number at every place of the axis."""
    dim = integer(op, "dim")
    spots = [(*spot[:dim], p, *spot[dim + 1 :]) for p in (Linear(0), place("n").plus(ONE))]
    first, later = (elements.at(op.inputs[0], s) for s in spots)
    numbers = {TRUE: Linear(1), FALSE: Linear(0)}
    if first != later or elements.type(op.outputs[0]).dtype != "i64":
        return None
    each = first if isinstance(first, Linear) else numbers.get(first)
    if each is None or each.terms:
        return None
    return _small(spot[dim].plus(ONE).times(each.const))


RULES: Final[dict[str, Handler]] = {
    "constant": _number, "full": _number, "arange": _arange, "cast": _cast, "clamp": _clamp,
    "add": _arithmetic, "sub": _arithmetic, "mul": _arithmetic,
    "ge": _compare, "gt": _compare, "le": _compare, "lt": _compare, "eq": _compare, "ne": _compare,
    "logical_and": _logical, "logical_or": _logical, "logical_not": _logical, "where": _where,
    "identity": _through, "expand": _through, "reshape": _reshape, "permute": _permute,
    "slice": _slice, "select": _select, "index": _index, "gather": _gather, "cumsum": _cumsum,
}  # fmt: skip


def mask_facts(elements: Elements, mask: int) -> Facts | None:
    """What makes an element of the bool value `mask` true, over places b, h, i and j; None: not
    understood at the edges."""

    def evaluate(i: Linear, j: Linear) -> Meaning:
        return elements.at(mask, elements.align(mask, (place("b"), place("h"), i, j)))

    def moved(facts: Facts, i: Linear, j: Linear) -> Facts:
        result = TRUE
        for fact in facts:
            if isinstance(fact, Linear):
                result = both(result, at_least_zero(fact.shift({"i": i, "j": j})))
            else:
                spot = tuple(part.shift({"i": i, "j": j}) for part in fact.place)
                result = both(result, frozenset({Elem(fact.value, spot)}))
        return result

    zero, i, j = Linear(0), place("i"), place("j")
    inner = evaluate(i.plus(ONE), j.plus(ONE))
    assert not isinstance(inner, Linear)
    facts = moved(inner, i.plus(ONE, -1), j.plus(ONE, -1))
    edges = [(zero, zero), (zero, j.plus(ONE)), (i.plus(ONE), zero)]
    return facts if all(evaluate(*edge) == moved(facts, *edge) for edge in edges) else None


def recognise_masks(program: Program) -> Program:
    """`program` with every recognised full mask replaced by attributes or a key mask."""
    found: list[Elements] = []

    def rule(graph: Graph, op: Op) -> int | None:
        found[:] = found or [Elements(graph)]
        return _recognise(graph, op, found[0])

    return rewrite(program, rule)


def _recognise(graph: Graph, op: Op, elements: Elements) -> int | None:
    if op.name != "attention" or op.attrs["mask"] != "full":
        return None
    query, key, value, mask = op.inputs
    if graph.types[mask].dtype != "bool" or len(graph.types[mask].shape) > 4:
        return None
    axis = 2 if op.attrs["layout"] == "bhsd" else 1
    rows, keys = graph.types[key].shape[0], graph.types[key].shape[axis]
    facts = mask_facts(elements, mask)
    if facts is None or facts == FALSE:
        return None
    causal_fact = place("i").plus(place("j"), -1)
    masks = [fact for fact in facts if isinstance(fact, Elem)]
    for fact in masks:
        shape = graph.types[fact.value].shape
        if fact.place != (place("b"), place("j")) or shape != (rows, keys):
            return None
    if not facts.issubset({causal_fact, *masks}):
        return None
    causal = bool(op.attrs["causal"]) or causal_fact in facts
    masked, *more = sorted(fact.value for fact in masks) or [ABSENT]
    for other in more:
        masked = graph.emit("logical_and", (masked, other), Type((rows, keys), "bool"))
    attrs = {**op.attrs, "causal": causal, "mask": "none" if masked == ABSENT else "key"}
    inputs = (query, key, value, masked)
    return graph.emit("attention", inputs, graph.types[op.outputs[0]], **attrs)
