"""Layers of a graph (F1), and who reads a node once moves of data are looked through."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from coissue.kernels.stitch.graph import Graph, Kind, Node

#: Kinds that only say where elements are. Whoever reads one takes it along: they are in as many
#: kernels as read them, and never cost a launch.
VIEWS: Final = (Kind.BROADCAST, Kind.RESHAPE, Kind.TRANSPOSE, Kind.SLICE)
#: What a kernel finds, rather than makes.
GIVEN: Final = (Kind.PARAMETER, Kind.CONSTANT)
#: Made once and kept by whoever needs it again (F14).
HEAVY: Final = (Kind.REDUCE, Kind.DOT)
_NAMES: Final = """
    exp expm1 log log1p sqrt rsqrt reciprocal div pow tanh erf sin cos sigmoid remainder floor_div
"""
#: Scalar functions worth a buffer rather than a second computation.
EXPENSIVE: Final = frozenset(_NAMES.split())


def is_expensive(node: Node) -> bool:
    """A CONCAT asks each of its operands whether an element is its own."""
    return node.kind in (*HEAVY, Kind.CONCAT) or node.name in EXPENSIVE


def span_of(graph: Graph) -> list[int]:
    """F1: the longest way from each node to what reads it last, which is in layer 0.

    Parameters and constants are pinned to the layer after all others."""
    spans = [0] * len(graph.nodes)
    for index in range(len(graph.nodes) - 1, -1, -1):
        for operand in graph.nodes[index].operands:
            spans[operand] = max(spans[operand], spans[index] + 1)
    made = [spans[i] for i, node in enumerate(graph.nodes) if node.kind not in GIVEN]
    last = max(made, default=-1) + 1
    return [last if node.kind in GIVEN else spans[i] for i, node in enumerate(graph.nodes)]


def find_work(graph: Graph) -> list[int]:
    """The nodes that some kernel has to make: all but what is given and views nobody asks for."""
    return [
        index
        for index, node in enumerate(graph.nodes)
        if node.kind not in GIVEN and (node.kind not in VIEWS or index in graph.outputs)
    ]


def find_readers(graph: Graph, work: Collection[int]) -> dict[int, list[int]]:
    """Per node of `work`: the nodes of `work` that read it, directly or through views."""
    found: dict[int, list[int]] = {index: [] for index in work}
    for index in work:
        for operand in find_operands(graph, index, work):
            found[operand].append(index)
    return found


def find_operands(graph: Graph, index: int, work: Collection[int]) -> list[int]:
    """What node `index` reads of `work`, looking through views that are not in it."""
    found: dict[int, None] = {}
    todo = list(graph.nodes[index].operands)
    while todo:
        operand = todo.pop()
        if operand in work:
            found[operand] = None
        elif graph.nodes[operand].kind in VIEWS:
            todo += graph.nodes[operand].operands
    return list(found)


def close_over(graph: Graph, members: Collection[int], work: Collection[int]) -> tuple[int, ...]:
    """`members` and the views between them and what they read, in topological order."""
    found = set(members)
    todo: Sequence[int] = tuple(members)
    while todo:
        operands = {operand for index in todo for operand in graph.nodes[index].operands}
        todo = [
            operand
            for operand in operands - found
            if graph.nodes[operand].kind in VIEWS and operand not in work
        ]
        found.update(todo)
    return tuple(sorted(found))
