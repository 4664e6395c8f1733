"""Few rows, long ones: reduced in two steps, so that several blocks share a row (H5).

NOTE the one idea: a piece of a row is a row of a tensor that has more of them. So a split is a
rewrite of the graph (30,000 -> 100 x 300, reduced to 100, reduced to one), of which planner, memory
and renderers know nothing. Between the two steps the partial results lie in global memory; the
paper adds them up by atomics, in an order that differs from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.price import Machine

#: A row that is not longer stays with one block.
LONG: Final = 1024


def split_long_rows(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """The graph with its long rows in pieces; nothing if it has none worth it on this machine."""
    nodes: list[Node] = []
    moved: list[int] = []
    for node in graph.nodes:
        node = replace(node, operands=tuple(moved[operand] for operand in node.operands))
        pieces = _count_pieces(node, nodes, machine)
        if pieces > 1:
            nodes += _in_pieces(node, nodes[node.operands[0]], pieces, len(nodes))
            node = replace(node, operands=(len(nodes) - 1,), axes=(min(node.axes),))
        moved.append(len(nodes))
        nodes.append(node)
    if len(nodes) > len(graph.nodes):
        yield Graph(tuple(nodes), tuple(moved[output] for output in graph.outputs))


def _count_pieces(node: Node, nodes: list[Node], machine: Machine) -> int:
    """The most blocks that a row can be cut into such that all run at once and are kept busy."""
    if node.kind is not Kind.REDUCE or not node.size or node.size >= machine.slots:
        return 1
    shape = nodes[node.operands[0]].shape
    length = math.prod(shape[axis] for axis in node.axes)
    most = min(machine.slots // node.size, length // machine.lanes)
    if length <= LONG or most < 2:
        return 1
    extent = shape[min(node.axes)]
    return max(count for count in range(1, most + 1) if extent % count == 0)


def _in_pieces(node: Node, operand: Node, pieces: int, at: int) -> list[Node]:
    """What is reduced before the pieces are; `at`: the place of the first of these nodes.

    The first axis reduced becomes two, of which the outer one stays."""
    first, shape = min(node.axes), operand.shape
    inner = shape[first] // pieces
    cut = (*shape[:first], pieces, *[inner] * (inner > 1), *shape[first + 1 :])
    gone = tuple(axis + (inner > 1) for axis in node.axes if inner > 1 or axis != first)
    kept = tuple(extent for axis, extent in enumerate(cut) if axis not in gone)
    per_unit, dtype = operand.per_unit, node.dtype
    found, source = [], node.operands
    if cut != shape:
        found = [Node(Kind.RESHAPE, "", source, cut, dtype, per_unit=per_unit)]
        source = (at,)
    return [*found, Node(Kind.REDUCE, node.name, source, kept, dtype, gone, per_unit=per_unit)]
