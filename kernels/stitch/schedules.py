"""Schedules and how they pass from a node to its operands (F7, F8, F9).

NOTE the one idea: a Row schedule is nothing but its number of blocks, because it cuts the row-major
elements into equal pieces; so it passes through a node whenever each piece is a number of whole
entries of the leading axes that the node leaves alone. A Column schedule is the same from the
other end. What the paper's table words by split_dim, with exceptions, is this one test: a reduce
numbered by its input, and a batched product cut at its first matrix axis with sword 1, need no
special case.

Where an operand cannot be cut alike, every block needs it `WHOLE`: no harm if it comes from outside
or is cheap to compute again; else the schedule is not legal (`propagate`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Final

from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.plan import Order, Schedule
from coissue.kernels.stitch.spans import HEAVY

Shape = tuple[int, ...]
#: Node and its schedule -> what it needs of its operands.
Needs = dict[tuple[int, Schedule], list[Schedule] | None]
#: F8, legal for everything: one block; in a grid of several, each of them makes all.
WHOLE: Final = Schedule(0, 1)


def row(shape: Shape, blocks: int) -> Schedule | None:
    """The Row schedule of so many blocks, with the smallest sword that says it."""
    before = 1
    for dim, extent in enumerate(shape):
        sword, rest = divmod(blocks, before)
        if rest:
            return None
        if sword < extent or dim == len(shape) - 1:
            return Schedule(dim, sword) if extent % sword == 0 else None
        before *= extent
    return WHOLE if blocks == 1 else None


def column(shape: Shape, dim: int, sword: int) -> Schedule | None:
    """The Column schedule, or the Row schedule that gives the same blocks."""
    while dim and sword == shape[dim]:
        dim, sword = dim - 1, 1
    found = Schedule(dim, sword, Order.COLUMN)
    blocks, size = found.blocks(shape), math.prod(shape)
    outside = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    if blocks in (1, size) or outside == 1:
        return row(shape, blocks)
    return found


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@lru_cache(4096)
def list_schedules(shape: Shape) -> tuple[Schedule, ...]:
    """Every schedule of a root, each set of blocks once."""
    found: dict[Schedule, None] = {WHOLE: None}
    for dim, extent in enumerate(shape):
        for sword in divisors(extent):
            blocks = Schedule(dim, sword).blocks(shape)
            for schedule in (row(shape, blocks), column(shape, dim, sword)):
                if schedule is not None:
                    found[schedule] = None
    return tuple(found)


def needs(node: Node, shapes: Sequence[Shape], schedule: Schedule) -> list[Schedule] | None:
    """What a block needs of each operand (with these shapes) to make its part of `node`.

    None if a block cannot make such a part at all."""
    blocks = schedule.blocks(node.shape)
    if blocks == 1:
        return [WHOLE] * len(shapes)
    answers = []
    for form in _forms(node.shape, schedule):
        rule = _row_needs if form.order is Order.ROW else _column_needs
        found = [rule(node, slot, shape, form) for slot, shape in enumerate(shapes)]
        if node.kind is not Kind.CONCAT or None not in found:
            answers.append([WHOLE if answer is None else answer for answer in found])
    return min(answers, key=lambda found: found.count(WHOLE), default=None)


def _forms(shape: Shape, schedule: Schedule) -> list[Schedule]:
    """A Row schedule on the only axis there is, is a Column schedule too."""
    dim = schedule.split_dim
    if schedule.order is Order.ROW and math.prod(shape) == shape[dim]:
        return [schedule, Schedule(dim, schedule.sword, Order.COLUMN)]
    return [schedule]


def _row_needs(node: Node, slot: int, shape: Shape, schedule: Schedule) -> Schedule | None:
    blocks = schedule.blocks(node.shape)
    if node.kind is Kind.POINTWISE:
        return schedule if shape == node.shape else None
    if node.kind is Kind.RESHAPE:
        return row(shape, blocks)
    kept = _leading(node, slot, shape)
    if kept is None or math.prod(node.shape[:kept]) % blocks:
        return None
    return row(shape, blocks)


def _leading(node: Node, slot: int, shape: Shape) -> int | None:
    """How many leading axes of `node` are the leading axes of the operand as well."""
    match node.kind:
        case Kind.REDUCE:
            return min(node.axes)
        case Kind.SLICE | Kind.CONCAT:
            return node.axes[0]
        case Kind.TRANSPOSE:
            moved = [i for i, axis in enumerate(node.axes) if i != axis]
            return min(moved, default=len(node.axes))
        case Kind.DOT:  # the rows of the left factor are the product's rows
            return len(shape) - (1 if slot == 0 else 2)
        case Kind.GATHER:
            return len(shape) if slot == 1 and node.axes[0] == 0 else None
        case Kind.BROADCAST:
            return _matching(node.shape, shape, node.axes)
    raise AssertionError(node.kind)


def _matching(shape: Shape, operand: Shape, axes: Sequence[int]) -> int:
    """How many leading axes a broadcast keeps; axes of extent 1 do not matter."""
    place = 0
    for axis, extent in enumerate(shape):
        if place < len(axes) and axes[place] == axis and operand[place] == extent:
            place += 1
        elif extent != 1:
            return axis
    return len(shape)


def _column_needs(node: Node, slot: int, shape: Shape, schedule: Schedule) -> Schedule | None:
    if node.kind is Kind.POINTWISE:
        return schedule if shape == node.shape else None
    if node.kind is Kind.RESHAPE:
        return _column_reshaped(node.shape, shape, schedule)
    kept = _trailing(node, shape)
    if kept is None:
        return None
    first, dim = len(node.shape) - kept, schedule.split_dim
    if dim >= first:
        return column(shape, dim - len(node.shape) + len(shape), schedule.sword)
    if dim == first - 1 and schedule.sword == 1:
        if len(shape) == kept:
            return row(shape, math.prod(shape))
        return column(shape, len(shape) - kept - 1, 1)
    return None


def _trailing(node: Node, shape: Shape) -> int | None:
    """How many trailing axes of `node` are the trailing axes of the operand as well."""
    match node.kind:
        case Kind.REDUCE:
            return len(shape) - 1 - max(node.axes)
        case Kind.SLICE | Kind.CONCAT:
            return len(shape) - 1 - node.axes[0]
        case Kind.TRANSPOSE:
            moved = [i for i, axis in enumerate(node.axes) if i != axis]
            return len(shape) - 1 - max(moved, default=-1)
        case Kind.BROADCAST:
            kept = 0
            for place, axis in zip(range(len(shape))[::-1], node.axes[::-1], strict=True):
                same = shape[place] == node.shape[axis] and axis == len(node.shape) - 1 - kept
                if not same:
                    break
                kept += 1
            return kept
    return None


def _column_reshaped(old: Shape, new: Shape, schedule: Schedule) -> Schedule | None:
    """The axis with as much behind it; cut further only if it is as long as before."""
    behind = math.prod(old[schedule.split_dim + 1 :])
    for dim, extent in enumerate(new):
        if math.prod(new[dim + 1 :]) == behind and (
            schedule.sword == 1 or extent == old[schedule.split_dim]
        ):
            return column(new, dim, schedule.sword)
    return None


def propagate(
    graph: Graph,
    nodes: Sequence[int],
    roots: Mapping[int, Schedule],
    outputs: Collection[int],
    blocks: int,
    known: Needs,
) -> dict[int, Schedule] | None:
    """F9: schedules from the roots of a kernel of `nodes` to all it touches; None if not legal.

    What two readers need differently, every block needs whole. Nothing that is handed out, reduced
    or multiplied may be made more than once. `known`: needs found before, for other kernels too."""
    found: dict[int, Schedule] = dict(roots)
    for index in reversed(nodes):
        node, schedule = graph.nodes[index], found.get(index, WHOLE)
        if schedule == WHOLE and blocks > 1 and (node.kind in HEAVY or index in outputs):
            return None
        if (index, schedule) not in known:
            shapes = [graph.nodes[o].shape for o in node.operands]
            known[index, schedule] = needs(node, shapes, schedule)
        wanted = known[index, schedule]
        if wanted is None:
            return None
        for operand, need in zip(node.operands, wanted, strict=True):
            if found.setdefault(operand, need) != need:
                found[operand] = WHOLE
    return found
