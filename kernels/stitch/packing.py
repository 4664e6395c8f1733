"""Many units, short ones: several become one, so that all threads of a block have work (H5).

NOTE the one idea: like a split (`split`), packing is a rewrite of the graph. What is one per unit
gets a first axis of several units, and lies in memory as before; so planner, memory and renderers
know nothing of it. The units that are left over are segments of the plan for one (`cuda`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.price import Machine


def pack_units(graph: Graph, machine: Machine, units: int) -> Iterator[tuple[Graph, int]]:
    """The graph of as many units as fill a block, and their number.

    Nothing if one fills it, and where a unit looks things up in a table of its own."""
    largest = max((node.size for node in graph.nodes if node.per_unit), default=0)
    most = min(units, machine.lanes // max(1, largest))
    if machine.slots > 1 and most > 1 and all(_can_pack(graph, node) for node in graph.nodes):
        count = 1 << (most.bit_length() - 1)
        yield _Packer(graph, count).graph(), count


def _can_pack(graph: Graph, node: Node) -> bool:
    """A lookup's axes take the place of the axis looked up: it must be the first."""
    if node.kind is not Kind.GATHER:
        return True
    return not graph.nodes[node.operands[0]].per_unit and node.axes[0] == 0


class _Packer:
    """Makes `count` units one."""

    def __init__(self, graph: Graph, count: int) -> None:
        self._old, self._count = graph, count
        self._nodes: list[Node] = []
        self._moved: list[int] = []

    def graph(self) -> Graph:
        for node in self._old.nodes:
            packed = self._packed(node) if node.per_unit else self._moved_only(node)
            self._nodes.append(packed)
            self._moved.append(len(self._nodes) - 1)
        outputs = tuple(self._moved[output] for output in self._old.outputs)
        return Graph(tuple(self._nodes), outputs)

    def _moved_only(self, node: Node) -> Node:
        return replace(node, operands=tuple(self._moved[operand] for operand in node.operands))

    def _packed(self, node: Node) -> Node:
        axes = node.axes
        match node.kind:
            case Kind.REDUCE:
                axes = tuple(axis + 1 for axis in axes)
            case Kind.BROADCAST | Kind.TRANSPOSE:
                axes = (0, *(axis + 1 for axis in axes))
            case Kind.SLICE | Kind.CONCAT:
                axes = (axes[0] + 1, *axes[1:])
        operands = tuple(self._operand(node, operand) for operand in node.operands)
        return replace(node, operands=operands, shape=(self._count, *node.shape), axes=axes)

    def _operand(self, node: Node, operand: int) -> int:
        """With the axis of the units, but for tables and numbers."""
        had, moved = self._old.nodes[operand], self._moved[operand]
        is_number = node.kind is Kind.POINTWISE and not had.shape
        if had.per_unit and is_number and node.shape:
            return self._spread(moved, (0,), node.shape)
        if had.per_unit or is_number or (node.kind is Kind.GATHER and operand == node.operands[0]):
            return moved
        return self._spread(moved, tuple(range(1, 1 + len(had.shape))), had.shape)

    def _spread(self, operand: int, axes: tuple[int, ...], shape: tuple[int, ...]) -> int:
        dtype = self._nodes[operand].dtype
        self._nodes.append(Node(Kind.BROADCAST, "", (operand,), (self._count, *shape), dtype, axes))
        return len(self._nodes) - 1
