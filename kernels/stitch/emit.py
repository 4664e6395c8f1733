"""From a stitched kernel's plan to loops: the paper's emitter (F13, F17).

NOTE the one idea: everything is computed in coordinates *inside the block*. What a block makes of a
node is again a box, and every kind of node maps the box of its operand to its own exactly as it
maps the whole tensors; so the block's number is needed only where memory outside is touched. A
node with home INLINE becomes a `Let` in the loop that reads it; a SHARED or OUTPUT node gets a
loop of its own (a stitched loop), in the order of the graph.

A node whose schedule has one block in a kernel of several is made whole by every block.
Each value of an inner loop is bound once, by `Let`; renderers move those that do not change out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from coissue.kernels.stitch.affine import (
    BLOCK,
    INDEX,
    ZERO,
    Affine,
    Coords,
    Split,
    ravel,
    regroup,
    unravel,
    variable,
)
from coissue.kernels.stitch.barriers import WARP, place_barriers
from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.loops import (
    Array,
    Call,
    Const,
    Expr,
    Let,
    Load,
    LoopKernel,
    ParallelLoop,
    Reduce,
    Space,
    Stmt,
    Store,
    Var,
)
from coissue.kernels.stitch.merge import merge_loops
from coissue.kernels.stitch.plan import Home, Order, Rows, StitchedKernel

Shape = tuple[int, ...]


class PlanError(ValueError):
    """The plan lets a block read what it did not make; the text says which node reads what."""


def emit(graph: Graph, kernel: StitchedKernel, name: str) -> LoopKernel:
    """The loops of one kernel (F17). Its arrays: `kernel.inputs`, `kernel.outputs`, shared ones."""
    emitter = _Emitter(graph, kernel)
    loops: list[ParallelLoop] = []
    for index in kernel.nodes:
        if kernel.homes[index] is not Home.INLINE:
            loops += emitter.stitch(index)
    arrays = emitter.arrays()
    merged = [merge_loops(loop) for loop in loops]
    body = place_barriers(merged, arrays, kernel.threads)
    return LoopKernel(name, arrays, kernel.blocks, kernel.threads, kernel.shared_bytes, tuple(body))


class _Body:
    """Statements of one loop body, and what they have computed so far."""

    def __init__(self, outer: _Body | None = None) -> None:
        self.statements: list[Stmt] = []
        self._outer = outer
        self._known: dict[tuple[int, Coords], Expr] = {}

    def find(self, key: tuple[int, Coords]) -> Expr | None:
        found = self._known.get(key)
        return self._outer.find(key) if found is None and self._outer else found

    def learn(self, key: tuple[int, Coords], expr: Expr) -> Expr:
        self._known[key] = expr
        return expr


class _Emitter:
    def __init__(self, graph: Graph, kernel: StitchedKernel) -> None:
        self._nodes = graph.nodes
        self._kernel = kernel
        self._block = variable(BLOCK, kernel.blocks)
        #: How often a node was bound so far: names are unique in a kernel.
        self._bound: dict[int, int] = {}
        #: (prefix, node, axis) -> extents of the nested loops that run over the axis.
        self._pieces: dict[tuple[str, int, int], list[int]] = {}
        #: Loop variable -> the piece it runs over.
        self._owners: dict[Var, tuple[tuple[str, int, int], int]] = {}

    def arrays(self) -> tuple[Array, ...]:
        kernel, found = self._kernel, []
        for index in (*kernel.inputs, *kernel.outputs):
            node, out = self._nodes[index], index in kernel.outputs
            found.append(
                Array(self._name(index), node.dtype, node.size, Space.GLOBAL, node.per_unit, out)
            )
        for index, buffer in sorted(kernel.buffers.items()):
            dtype, elements = self._nodes[index].dtype, buffer.elements
            place = buffer.offset_bytes
            found.append(
                Array(self._name(index), dtype, elements, Space.SHARED, offset_bytes=place)
            )
        return tuple(found)

    def _name(self, index: int) -> str:
        home = self._kernel.homes.get(index)
        return {Home.SHARED: "s", Home.OUTPUT: "o", None: "a"}[home] + str(index)

    # What a block makes of a node, and where that is in the whole tensor.

    def _in_grid(self, index: int) -> bool:
        schedule = self._kernel.schedules.get(index)
        blocks = schedule.blocks(self._nodes[index].shape) if schedule else 1
        if blocks not in (1, self._kernel.blocks):
            raise PlanError(f"node {index} has {blocks} blocks, its kernel {self._kernel.blocks}")
        return blocks > 1

    def _box(self, index: int) -> Shape:
        """The extents of what one block makes (F7)."""
        shape = self._nodes[index].shape
        if not self._in_grid(index):
            return shape
        schedule = self._kernel.schedules[index]
        at, chunk = schedule.split_dim, shape[schedule.split_dim] // schedule.sword
        if schedule.order is Order.ROW:
            return (*[1] * at, chunk, *shape[at + 1 :])
        return (*shape[:at], chunk, *[1] * (len(shape) - at - 1))

    def _whole(self, index: int, coords: Coords) -> Coords:
        """Coordinates in the block's box -> in the whole tensor."""
        if not self._in_grid(index):
            return coords
        schedule, shape = self._kernel.schedules[index], self._nodes[index].shape
        at, chunk = schedule.split_dim, shape[schedule.split_dim] // schedule.sword
        if schedule.order is Order.ROW:
            outer, part = self._block.split(schedule.sword)
            return (*unravel(outer, shape[:at]), part * chunk + coords[at], *coords[at + 1 :])
        part, inner = self._block.split(math.prod(shape[at + 1 :]))
        return (*coords[:at], part * chunk + coords[at], *unravel(inner, shape[at + 1 :]))

    def _place(self, index: int, coords: Coords) -> Expr:
        """The element's place in the array that holds it."""
        box, shape = self._box(index), self._nodes[index].shape
        if self._kernel.homes.get(index) is Home.SHARED:
            return ravel(coords, box).expr()
        if self._in_grid(index) and self._kernel.schedules[index].order is Order.ROW:
            return (self._block * math.prod(box) + ravel(coords, box)).expr()
        return ravel(self._whole(index, coords), shape).expr()

    # Values.

    def _value(self, index: int, coords: Coords, body: _Body) -> Expr:
        """A constant, or the variable that holds the element; binds it first if need be."""
        node = self._nodes[index]
        if node.kind is Kind.CONSTANT and node.value is not None:
            return Const(node.value, node.dtype)
        if self._in_grid(index):
            pairs = zip(coords, self._box(index), strict=True)
            if any(coord.greatest >= extent for coord, extent in pairs):
                raise PlanError(f"a block reads of node {index} what it did not make")
        found = body.find((index, coords))
        if found is not None:
            return found
        if self._kernel.homes.get(index) is Home.INLINE:
            expr = self._compute(index, coords, body)
        else:
            expr = Load(self._name(index), self._place(index, coords), node.dtype)
        return body.learn((index, coords), self._bind(index, expr, body))

    def _bind(self, index: int, expr: Expr, body: _Body) -> Expr:
        if isinstance(expr, Const | Var):
            return expr
        var = Var(self._fresh(index), self._nodes[index].dtype)
        body.statements.append(Let(var, expr))
        return var

    def _fresh(self, index: int) -> str:
        count = self._bound[index] = self._bound.get(index, -1) + 1
        return f"v{index}" + (f"_{count}" if count else "")

    def _compute(self, index: int, coords: Coords, body: _Body) -> Expr:
        node = self._nodes[index]
        if (erf := self._erf_beside_one(node)) is not None:
            coords = self._cross(index, erf, coords)
            return Call("one_plus_erf", (self._read(erf, coords, 0, body),), node.dtype)
        if node.kind is Kind.POINTWISE:
            args = tuple(
                self._read(index, coords, slot, body) for slot in range(len(node.operands))
            )
            return Call("select" if node.name == "where" else node.name, args, node.dtype)
        if node.kind is Kind.REDUCE or node.kind is Kind.DOT:
            return self._reduce(index, coords, body, Rows.THREAD)
        if node.kind is Kind.CONCAT:
            return self._choose(index, coords, body)
        if node.kind is Kind.GATHER:
            return self._gather(index, coords, body)
        return self._read(index, coords, 0, body)

    def _erf_beside_one(self, node: Node) -> int | None:
        """The erf in 1 + erf(x), as in a GELU: for the sum alone there is a shorter formula."""
        if node.name != "add":
            return None
        for first, second in (node.operands, node.operands[::-1]):
            is_one = self._nodes[second].kind is Kind.CONSTANT and self._nodes[second].value == 1
            inlined = self._kernel.homes.get(first) is Home.INLINE
            if is_one and inlined and self._nodes[first].name == "erf":
                return first
        return None

    def _cross(self, index: int, operand: int, coords: Coords) -> Coords:
        """Coordinates of node `index` as its operand counts: in the box, or in the whole."""
        inside = self._in_grid(operand)
        if inside and not self._in_grid(index):
            raise PlanError(f"node {index} is made by every block, {operand} that it reads is not")
        return coords if inside else self._whole(index, coords)

    def _require_whole(self, index: int, axis: int) -> None:
        if self._box(index)[axis] != self._nodes[index].shape[axis]:
            raise PlanError(f"a block has only a part of axis {axis} of node {index}")

    def _read(self, index: int, coords: Coords, slot: int, body: _Body) -> Expr:
        """The element of operand `slot` that the element of node `index` at `coords` is made of."""
        node = self._nodes[index]
        operand = node.operands[slot]
        if node.kind is Kind.SLICE:
            self._require_whole(operand, node.axes[0])
        near = self._cross(index, operand, coords)
        shape = self._box(index) if self._in_grid(operand) else node.shape
        return self._value(operand, _pull(node, near, shape, self._box(operand)), body)

    def _reduce(self, index: int, coords: Coords, body: _Body, rows: Rows) -> Expr:
        """A REDUCE or a DOT: a loop that combines (F17: its own loop in every kernel)."""
        node = self._nodes[index]
        axes = node.axes if node.kind is Kind.REDUCE else (len(node.shape) - 1,)
        # The reduced axes of operand 0 are whole in each block.
        shape = self._nodes[node.operands[0]].shape
        extents = [shape[axis] for axis in axes]
        turns, vars_, counts = self._loop_over("r", index, extents)
        inner = _Body(body)
        if node.kind is Kind.REDUCE:
            value = self._read_reduced(index, coords, turns, inner)
            if node.name in ("any", "all", "sum", "prod"):
                value = self._converted(value, node.dtype)
        else:
            value = self._multiply(index, coords, turns[0], inner)
        name = "sum" if node.kind is Kind.DOT else node.name
        into = Var(self._fresh(index), node.dtype)
        body.statements.append(
            Reduce(into, name, vars_, counts, tuple(inner.statements), value, rows.value)
        )
        return into

    def _read_reduced(self, index: int, coords: Coords, turns: Coords, body: _Body) -> Expr:
        node = self._nodes[index]
        operand = node.operands[0]
        for axis in node.axes:
            self._require_whole(operand, axis)
        near = self._cross(index, operand, coords)
        return self._value(operand, _insert(near, node.axes, turns), body)

    def _multiply(self, index: int, coords: Coords, turn: Affine, body: _Body) -> Expr:
        left, right = self._nodes[index].operands
        at_left = self._cross(index, left, coords)
        at_right = self._cross(index, right, coords)
        factors = (
            self._value(left, (*at_left[:-1], turn), body),
            self._value(right, (*at_right[:-2], turn, at_right[-1]), body),
        )
        return Call("mul", factors, self._nodes[index].dtype)

    def _converted(self, value: Expr, dtype: str) -> Expr:
        return value if value.dtype == dtype else Call("cast", (value,), dtype)

    def _choose(self, index: int, coords: Coords, body: _Body) -> Expr:
        """A CONCAT read element by element: all operands are read, at places that exist."""
        node, (axis,) = self._nodes[index], self._nodes[index].axes
        total = start = node.shape[axis]
        self._require_whole(index, axis)
        found: Expr | None = None
        for operand in reversed(node.operands):
            extent = self._nodes[operand].shape[axis]
            start -= extent
            # Modulo the total the operand's own elements come first; others are sent to 0.
            _, near = (coords[axis] + (total - start)).split(total)
            inside = Call("lt", (near.expr(), Const(extent, INDEX)), "bool")
            safe = Call("select", (inside, near.expr(), Const(0, INDEX)), INDEX)
            at = (*coords[:axis], Affine(((safe, 1, extent - 1),)), *coords[axis + 1 :])
            value = self._value(operand, self._cross(index, operand, at), body)
            chosen = value if found is None else Call("select", (inside, value, found), node.dtype)
            found = self._bind(index, chosen, body)
        assert found is not None
        return found

    def _gather(self, index: int, coords: Coords, body: _Body) -> Expr:
        """Negative numbers count from the end; others outside are clamped: never read outside."""
        node, (axis,) = self._nodes[index], self._nodes[index].axes
        table, picks = node.operands
        end = axis + len(self._nodes[picks].shape)
        whole, extent = self._whole(index, coords), self._nodes[table].shape[axis]
        pick = self._value(picks, self._cross(index, picks, coords)[axis:end], body)
        bounded = Call("bounded", (pick, Const(extent, INDEX)), INDEX)
        at = (*whole[:axis], Affine(((bounded, 1, extent - 1),)), *whole[end:])
        return self._value(table, at, body)

    # Loops.

    def _loop_over(
        self, prefix: str, index: int, extents: Sequence[int]
    ) -> tuple[Coords, tuple[Var, ...], tuple[int, ...]]:
        """Coordinates that run over `extents`, and the nested loops that make them run."""
        coords, vars_, counts = [], [], []
        for axis, extent in enumerate(extents):
            key = (prefix, index, axis)
            pieces = self._pieces.setdefault(key, [extent])
            coord = ZERO
            for place, piece in enumerate(pieces):
                suffix = "abcdefghijkl"[place] if len(pieces) > 1 else ""
                var = Var(f"{prefix}{index}_{axis}{suffix}", INDEX)
                self._owners[var] = (key, place)
                coord = coord * piece + variable(var, piece)
                if piece > 1:
                    vars_.append(var)
                    counts.append(piece)
            coords.append(coord)
        return tuple(coords), tuple(vars_), tuple(counts)

    def stitch(self, index: int) -> list[ParallelLoop]:
        """The stitched loops of a SHARED or OUTPUT node; a CONCAT has one per operand."""
        bound = dict(self._bound)
        while True:
            try:
                if self._nodes[index].kind is Kind.CONCAT:
                    slots = range(len(self._nodes[index].operands))
                    return [self._stitch_part(index, slot) for slot in slots]
                return [self._stitch_all(index)]
            except Split as split:
                key, place = self._owners[split.var]
                pieces = self._pieces[key]
                pieces[place : place + 1] = [pieces[place] // split.inner, split.inner]
                self._bound = dict(bound)

    def _stitch_all(self, index: int) -> ParallelLoop:
        coords, vars_, extents = self._loop_over("i", index, self._box(index))
        body, node = _Body(), self._nodes[index]
        rows = self._kernel.rows[index] if node.kind is Kind.REDUCE else Rows.THREAD
        if rows is Rows.BLOCK and self._kernel.threads <= WARP:
            rows = Rows.WARP  # a block of one warp
        if node.kind is Kind.REDUCE:
            value = self._reduce(index, coords, body, rows)
        else:
            value = self._bind(index, self._compute(index, coords, body), body)
        store = Store(self._name(index), self._place(index, coords), value)
        return ParallelLoop(vars_, extents, (*body.statements, store), rows.value)

    def _stitch_part(self, index: int, slot: int) -> ParallelLoop:
        """The part of a CONCAT that operand `slot` is."""
        node, (axis,) = self._nodes[index], self._nodes[index].axes
        self._require_whole(index, axis)
        box = list(self._box(index))
        extents = [self._nodes[operand].shape[axis] for operand in node.operands]
        box[axis] = extents[slot]
        coords, vars_, counts = self._loop_over(f"p{slot}_", index, box)
        body, operand = _Body(), node.operands[slot]
        value = self._value(operand, self._cross(index, operand, coords), body)
        moved = (*coords[:axis], coords[axis] + sum(extents[:slot]), *coords[axis + 1 :])
        store = Store(self._name(index), self._place(index, moved), value)
        return ParallelLoop(vars_, counts, (*body.statements, store))


def _insert(coords: Coords, axes: Sequence[int], turns: Coords) -> Coords:
    """`turns` as the axes `axes`, with `coords` as the others."""
    rest, new = iter(coords), dict(zip(axes, turns, strict=True))
    return tuple(new[i] if i in new else next(rest) for i in range(len(coords) + len(axes)))


def _pull(node: Node, coords: Coords, shape: Shape, wanted: Shape) -> Coords:
    """Coordinates in an operand with extents `wanted` of what `node` has at `coords` of `shape`."""
    if node.kind is Kind.POINTWISE:
        return regroup(coords, shape, wanted) if wanted else ()
    if node.kind is Kind.BROADCAST:
        pairs = zip(wanted, node.axes, strict=True)
        return tuple(ZERO if extent == 1 else coords[axis] for extent, axis in pairs)
    if node.kind is Kind.RESHAPE:
        return regroup(coords, shape, wanted)
    if node.kind is Kind.TRANSPOSE:
        return tuple(coords[node.axes.index(axis)] for axis in range(len(wanted)))
    assert node.kind is Kind.SLICE, node.kind
    axis, start, step = node.axes
    return (*coords[:axis], coords[axis] * step + start, *coords[axis + 1 :])
