"""Groups of ops in an order that can be run; for kernels of a program and for steps of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush


def in_order(needs: Mapping[int, Collection[int]]) -> list[int]:
    """The groups, each after all that it needs, as near to their numbers' order as can be.

    Raises `ValueError` if there is no such order.
    """
    sorter = TopologicalSorter(needs)
    try:
        sorter.prepare()
    except CycleError:
        raise ValueError("groups of ops depend on each other in a circle") from None
    ready: list[int] = []
    order = []
    while sorter.is_active():
        for group in sorter.get_ready():
            heappush(ready, group)
        order.append(heappop(ready))
        sorter.done(order[-1])
    return order
