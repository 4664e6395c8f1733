"""Making a `Graph` node by node. Equal nodes are one node, constants are computed, and moves of
data that cancel out or follow each other are joined on the way.

Rules: a node's operands are given with the shapes that its kind asks for; arithmetic is never in
f16 or bf16, which whoever calls this casts to f32 before and from f32 after.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from coissue.kernels.optable.base import INT_RANGE
from coissue.kernels.stitch.graph import Graph, Kind, Node

Number = float | int | bool
Shape = tuple[int, ...]

_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
                       "logical_not")  # fmt: skip
_FOLDED: Final[dict[str, Callable[..., Number]]] = {
    "cast": lambda a: a,
    "neg": lambda a: -a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "logical_not": lambda a: not a,
}


def hold(value: Number, dtype: str) -> Number | None:
    """`value` as `dtype` holds it; None if that has no one answer (nan to a whole number)."""
    if dtype == "bool":
        return bool(value)
    if dtype in INT_RANGE:
        low, high = INT_RANGE[dtype]
        if value != value or abs(value) > 2**63:
            return None
        return (int(value) - low) % (high - low + 1) + low
    code = {"f16": "<e", "f32": "<f", "bf16": "<f"}.get(dtype)
    if code is None:
        return float(value)
    try:
        raw = struct.pack(code, float(value))
    except OverflowError:
        return math.copysign(math.inf, value)
    if dtype == "bf16" and value == value:
        (bits,) = struct.unpack("<I", raw)
        raw = struct.pack("<I", (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000)
    (held,) = struct.unpack(code, raw)
    return float(held)


class GraphBuilder:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        #: What tells a node from others -> its index.
        self._seen: dict[object, int] = {}

    def shape(self, node: int) -> Shape:
        return self.nodes[node].shape

    def dtype(self, node: int) -> str:
        return self.nodes[node].dtype

    def parameter(self, shape: Shape, dtype: str, source: int, per_unit: bool) -> int:
        node = Node(Kind.PARAMETER, "", (), shape, dtype, per_unit=per_unit, source=source)
        return self._add(node)

    def constant(self, value: Number, dtype: str) -> int:
        held = hold(value, dtype)
        assert held is not None, f"{value} is no {dtype}"
        return self._add(Node(Kind.CONSTANT, "", (), (), dtype, value=held, per_unit=False))

    def pointwise(self, name: str, *operands: int, dtype: str | None = None) -> int:
        """Operands of one shape, or of shape (); the result's dtype is the last operand's, or bool
        for a comparison, unless given."""
        found = dtype or ("bool" if name in _COMPARISONS else self.dtype(operands[-1]))
        shape = max((self.shape(operand) for operand in operands), key=len)
        bare = tuple(map(self._without_spread, operands))
        if not any(map(self.shape, bare)):
            scalar = self._fold(name, bare, found)
            return self.broadcast(scalar, (), shape)
        return self._make(Kind.POINTWISE, name, bare, shape, found)

    def reduce(self, name: str, x: int, axes: Sequence[int]) -> int:
        shape = self.shape(x)
        if not axes:
            return x
        kept = tuple(extent for axis, extent in enumerate(shape) if axis not in axes)
        return self._make(Kind.REDUCE, name, (x,), kept, self.dtype(x), tuple(axes))

    def broadcast(self, x: int, axes: Sequence[int], shape: Shape) -> int:
        if self.shape(x) == shape:
            return x
        node = self.nodes[x]
        if node.kind is Kind.BROADCAST:
            axes = tuple(axes[axis] for axis in node.axes)
            (x,) = node.operands
        return self._make(Kind.BROADCAST, "", (x,), shape, node.dtype, tuple(axes))

    def reshape(self, x: int, shape: Shape) -> int:
        node = self.nodes[x]
        if node.kind is Kind.RESHAPE:
            (x,) = node.operands
        if self.shape(x) == shape:
            return x
        if node.kind is Kind.BROADCAST and not node.axes:
            return self.broadcast(node.operands[0], (), shape)
        return self._make(Kind.RESHAPE, "", (x,), shape, node.dtype)

    def transpose(self, x: int, axes: Sequence[int]) -> int:
        node = self.nodes[x]
        if node.kind is Kind.TRANSPOSE:
            (x,) = node.operands
            axes = tuple(node.axes[axis] for axis in axes)
        if list(axes) == list(range(len(axes))):
            return x
        shape = tuple(self.shape(x)[axis] for axis in axes)
        return self._make(Kind.TRANSPOSE, "", (x,), shape, node.dtype, tuple(axes))

    def slice(self, x: int, axis: int, start: int, step: int, length: int) -> int:
        old = self.shape(x)
        if length == old[axis]:
            return x
        shape = (*old[:axis], length, *old[axis + 1 :])
        return self._make(Kind.SLICE, "", (x,), shape, self.dtype(x), (axis, start, step))

    def concat(self, operands: Sequence[int], axis: int) -> int:
        if len(operands) == 1:
            return operands[0]
        total = sum(self.shape(operand)[axis] for operand in operands)
        first = self.shape(operands[0])
        shape = (*first[:axis], total, *first[axis + 1 :])
        dtype = self.dtype(operands[0])
        return self._make(Kind.CONCAT, "", tuple(operands), shape, dtype, (axis,))

    def dot(self, left: int, right: int) -> int:
        shape = (*self.shape(left)[:-1], self.shape(right)[-1])
        return self._make(Kind.DOT, "", (left, right), shape, self.dtype(left))

    def gather(self, table: int, index: int, axis: int) -> int:
        old = self.shape(table)
        shape = (*old[:axis], *self.shape(index), *old[axis + 1 :])
        return self._make(Kind.GATHER, "", (table, index), shape, self.dtype(table), (axis,))

    def finish(self, outputs: Sequence[tuple[int, int, Shape]]) -> Graph:
        """The graph of `outputs`: (node, IR value, shape per unit). Nodes they do not need are
        gone. Two values of one node, and values that are no node's work, get a copy each."""
        results: list[int] = []
        for node, source, shape in outputs:
            made = node
            if self.nodes[node].kind in (Kind.PARAMETER, Kind.CONSTANT) or node in results:
                copy = Node(Kind.POINTWISE, "identity", (node,), shape, self.dtype(node),
                            per_unit=self.nodes[node].per_unit)  # fmt: skip
                self.nodes.append(copy)
                made = len(self.nodes) - 1
            self.nodes[made] = replace(self.nodes[made], source=source)
            results.append(made)
        return _live(self.nodes, results)

    def _without_spread(self, x: int) -> int:
        """The number that `x` is everywhere, if it is one number."""
        node = self.nodes[x]
        return node.operands[0] if node.kind is Kind.BROADCAST and not node.axes else x

    def _fold(self, name: str, operands: tuple[int, ...], dtype: str) -> int:
        values = [self.nodes[operand].value for operand in operands]
        if name in _FOLDED and None not in values:
            try:
                held = hold(_FOLDED[name](*values), dtype)
            except (ArithmeticError, ValueError):
                held = None
            if held is not None:
                return self.constant(held, dtype)
        return self._make(Kind.POINTWISE, name, operands, (), dtype)

    def _make(
        self, kind: Kind, name: str, operands: tuple[int, ...], shape: Shape, dtype: str,
        axes: tuple[int, ...] = (),
    ) -> int:  # fmt: skip
        per_unit = any(self.nodes[operand].per_unit for operand in operands)
        return self._add(Node(kind, name, operands, shape, dtype, axes, per_unit=per_unit))

    def _add(self, node: Node) -> int:
        key = (node.kind, node.name, node.operands, node.shape, node.dtype, node.axes,
               repr(node.value), node.source)  # fmt: skip
        if key not in self._seen:
            self._seen[key] = len(self.nodes)
            self.nodes.append(node)
        return self._seen[key]


def _live(nodes: Sequence[Node], outputs: Sequence[int]) -> Graph:
    needed = set(outputs)
    for index in range(len(nodes) - 1, -1, -1):
        if index in needed:
            needed.update(nodes[index].operands)
    kept = sorted(needed)
    number = {old: new for new, old in enumerate(kept)}
    moved = tuple(
        replace(nodes[old], operands=tuple(number[o] for o in nodes[old].operands)) for old in kept
    )
    return Graph(moved, tuple(number[output] for output in outputs))
