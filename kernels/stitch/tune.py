"""From a kernel's nodes to the kernel: schedules of the roots, memory, price (F8, F10, F11)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coissue.kernels.stitch.graph import Graph, Kind
from coissue.kernels.stitch.plan import Schedule, StitchedKernel
from coissue.kernels.stitch.price import Machine, Measured, choose_rows, estimate_ns
from coissue.kernels.stitch.schedules import Needs, list_schedules, propagate
from coissue.kernels.stitch.shared import Draft, Memory, cheap_buffers, plan_memory
from coissue.kernels.stitch.spans import close_over, find_readers, find_work, span_of

#: Ways of cutting several roots into one number of blocks that are tried.
COMBINATIONS_LIMIT: Final = 16
#: Blocks, and the schedules of a kernel's roots that have as many.
Way = tuple[int, dict[int, Schedule]]


@dataclass(frozen=True, slots=True)
class Settings:
    #: Of shared memory per block.
    budget_bytes: int
    #: Per block.
    threads: int
    machine: Machine
    measured: Measured | None = None
    #: That a launch has.
    units: int = 1


@dataclass(frozen=True, slots=True)
class Tuned:
    kernel: StitchedKernel
    price_ns: float
    #: Nodes that are computed again for want of shared memory.
    shrunk: tuple[int, ...]


class Tuner:
    """The best kernel of any set of nodes of one graph; each set is tuned once."""

    def __init__(self, graph: Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.work = tuple(find_work(graph))
        self.readers = find_readers(graph, frozenset(self.work))
        self.spans = span_of(graph)
        self._places = frozenset(self.work)
        self._known: dict[frozenset[int], Tuned | None] = {}
        self._needs: Needs = {}
        #: Nodes -> how their roots can be cut.
        self._ways: dict[frozenset[int], list[Way]] = {}

    def tune(self, members: Collection[int], base: Collection[int] = ()) -> Tuned | None:
        """None if they cannot be one kernel within the budget.

        `base`: some of them, tuned before. What its roots could not be, they cannot be here."""
        key = frozenset(members)
        if key not in self._known:
            found = self.candidates(key, self._ways.get(frozenset(base)))
            self._known[key] = min(found, key=lambda tuned: tuned.price_ns, default=None)
        return self._known[key]

    def price(self, members: Collection[int], base: Collection[int] = ()) -> float:
        found = self.tune(members, base)
        return float("inf") if found is None else found.price_ns

    def outputs(self, members: Collection[int]) -> tuple[int, ...]:
        """Members that the graph hands out or others read."""
        return tuple(
            index
            for index in sorted(members)
            if index in self.graph.outputs or any(r not in members for r in self.readers[index])
        )

    def candidates(
        self, members: frozenset[int], base: Sequence[Way] | None = None
    ) -> Iterator[Tuned]:
        """Every kernel of these nodes that is legal and within the budget."""
        nodes = close_over(self.graph, members, self._places)
        outputs = self.outputs(members)
        read = {operand for index in nodes for operand in self.graph.nodes[index].operands}
        sinks = [index for index in outputs if index not in read]
        if base is None or any(list(roots) != sinks for _, roots in base[:1]):
            shapes = {index: self.graph.nodes[index].shape for index in sinks}
            base = list(combine(shapes))
        ways = self._ways[members] = []
        for blocks, roots in base:
            schedules = propagate(self.graph, nodes, roots, outputs, blocks, self._needs)
            if schedules is not None:
                ways.append((blocks, roots))
                yield from self._settle(Draft(self.graph, nodes, outputs, blocks, schedules))

    def _settle(self, draft: Draft) -> Iterator[Tuned]:
        """The kernel of a draft, with and without the buffers that only save cheap arithmetic."""
        cheap = tuple(cheap_buffers(draft))
        for given_up in ((), cheap) if cheap else ((),):
            memory = plan_memory(draft, self.spans, self.settings.budget_bytes, given_up)
            if memory is not None:
                yield finish(draft, memory, self.settings, len(given_up))


def finish(draft: Draft, memory: Memory, settings: Settings, dropped: int = 0) -> Tuned:
    """`dropped`: how many buffers were given up for speed, not for want of space."""
    nodes, inside, threads = draft.graph.nodes, set(draft.nodes), settings.threads
    read = dict.fromkeys(o for index in draft.nodes for o in nodes[index].operands)
    inputs = tuple(
        o for o in sorted(read) if o not in inside and nodes[o].kind is not Kind.CONSTANT
    )
    reduces = [index for index in draft.nodes if nodes[index].kind is Kind.REDUCE]
    kernel = StitchedKernel(
        nodes=draft.nodes,
        roots=draft.outputs,
        inputs=inputs,
        outputs=draft.outputs,
        blocks=draft.blocks,
        schedules={i: draft.schedules[i] for i in (*draft.nodes, *inputs)},
        homes=memory.homes,
        buffers=memory.buffers,
        shared_bytes=memory.shared_bytes,
        rows={index: choose_rows(draft, index, threads)[0] for index in reduces},
        threads=threads,
    )
    price_ns = estimate_ns(
        draft, memory, inputs, settings.machine, threads, settings.measured, settings.units
    )
    return Tuned(kernel, price_ns, memory.shrunk[dropped:])


def combine(shapes: Mapping[int, tuple[int, ...]]) -> Iterator[Way]:
    """F11, stage 1: for each number of blocks that all roots can have, their schedules."""
    by_blocks: dict[int, dict[int, list[Schedule]]] = {}
    for index, shape in shapes.items():
        for schedule in list_schedules(shape):
            found = by_blocks.setdefault(schedule.blocks(shape), {})
            found.setdefault(index, []).append(schedule)
    for blocks, found in sorted(by_blocks.items()):
        if len(found) == len(shapes):
            ways = itertools.product(*(found[index] for index in shapes))
            for way in itertools.islice(ways, COMBINATIONS_LIMIT):
                yield blocks, dict(zip(shapes, way, strict=True))
