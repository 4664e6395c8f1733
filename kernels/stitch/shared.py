"""What a block keeps in shared memory, and where (F14, F15, F16).

NOTE the one idea: a stitched kernel is a row of *loops*, one per node that is kept (SHARED or
OUTPUT); all others are computed inside the loops that read them. A buffer lives from its own loop
to the last loop that reads it. The paper shares by dominance; liveness finds all that dominance
does and more: a buffer may lie where another did whose last loop is over, or exactly on one whose
last reader is the new loop itself, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.stitch.graph import Graph, Kind
from coissue.kernels.stitch.plan import Buffer, Home, Order, Schedule
from coissue.kernels.stitch.schedules import WHOLE
from coissue.kernels.stitch.spans import HEAVY, VIEWS, is_expensive


@dataclass(frozen=True, slots=True)
class Draft:
    """A kernel with schedules, before it is decided what is kept."""

    graph: Graph
    nodes: tuple[int, ...]
    outputs: tuple[int, ...]
    blocks: int
    schedules: Mapping[int, Schedule]

    def elements(self, index: int) -> int:
        """What one block makes."""
        size = self.graph.nodes[index].size
        return size if self.schedules[index] == WHOLE else size // self.blocks

    def length(self, index: int) -> int:
        """How many elements become one of the node's."""
        node = self.graph.nodes[index]
        if node.kind not in HEAVY:
            return 1
        shape = self.graph.nodes[node.operands[0]].shape
        return shape[-1] if node.kind is Kind.DOT else math.prod(shape[axis] for axis in node.axes)

    def num_bytes(self, index: int) -> int:
        return self.elements(index) * DTYPE_BYTES[self.graph.nodes[index].dtype]


def find_homes(
    draft: Draft, given_up: Collection[int] = ()
) -> tuple[dict[int, Home], dict[int, int]]:
    """F14: (where each node is, the rank of each buffer that recomputation could replace).

    Ranks in the order in which buffers are given up: 1 cheap and read by several loops, 2
    expensive, and read by several or by one that has more turns than it has elements, 3 expensive
    and a factor of a DOT.
    Whoever is in `given_up` is computed again."""
    homes: dict[int, Home] = {}
    ranks: dict[int, int] = {}
    #: Node -> the loops that read it.
    loops: dict[int, dict[int, None]] = {index: {} for index in draft.nodes}
    #: Nodes that a DOT reads, through views.
    factors: set[int] = set()
    for index in reversed(draft.nodes):
        node = draft.graph.nodes[index]
        if index in draft.outputs:
            homes[index] = Home.OUTPUT
        elif node.kind in HEAVY:
            homes[index] = Home.SHARED
        else:
            homes[index] = Home.INLINE
            rank = _rank(draft, index, loops[index], index in factors)
            if rank and index not in given_up:
                homes[index], ranks[index] = Home.SHARED, rank
        readers = loops[index] if homes[index] is Home.INLINE else {index: None}
        for operand in node.operands:
            if operand in loops:
                loops[operand].update(readers)
        if node.kind is Kind.DOT or (index in factors and node.kind in VIEWS):
            factors.update(node.operands)
    return homes, ranks


def _rank(draft: Draft, index: int, loops: Collection[int], is_factor: bool) -> int:
    node = draft.graph.nodes[index]
    is_cut = draft.blocks == 1 or draft.schedules[index] != WHOLE
    if node.kind in VIEWS or not is_cut or not node.operands:
        return 0
    if is_expensive(node):
        turns = [draft.elements(loop) * draft.length(loop) for loop in loops]
        is_again = len(turns) > 1 or max(turns, default=0) > draft.elements(index)
        return 3 if is_factor else 2 if is_again else 0
    return 1 if len(loops) > 1 and node.kind is Kind.POINTWISE else 0


#: Loop, in order -> what is read in it: `walk_loop`.
Reads = Mapping[int, Mapping[int, bool]]


@dataclass(frozen=True, slots=True)
class Memory:
    homes: Mapping[int, Home]
    buffers: Mapping[int, Buffer]
    shared_bytes: int
    #: Nodes that lost their buffer (F15).
    shrunk: tuple[int, ...]
    reads: Reads


def plan_memory(
    draft: Draft, spans: Sequence[int], budget_bytes: int, given_up: Collection[int] = ()
) -> Memory | None:
    """Homes and buffers within the budget, or None if what must be kept is too large (F15)."""
    lost = list(given_up)
    while True:
        homes, ranks = find_homes(draft, lost)
        reads = find_reads(draft, homes)
        buffers, total = place_buffers(draft, homes, reads)
        if total <= budget_bytes:
            return Memory(homes, buffers, total, tuple(lost), reads)
        if not ranks:
            return None
        lost.append(min(ranks, key=lambda index: (ranks[index], spans[index], index)))


def cheap_buffers(draft: Draft) -> list[int]:
    """The buffers that save nothing but cheap arithmetic."""
    return [index for index, rank in find_homes(draft)[1].items() if rank == 1]


def list_loops(draft: Draft, homes: Mapping[int, Home]) -> list[int]:
    return [index for index in draft.nodes if homes[index] is not Home.INLINE]


def walk_loop(draft: Draft, homes: Mapping[int, Home], loop: int) -> Iterator[tuple[int, bool]]:
    """What is read in a node's loop, each once: (node, whether only at the loop's own element)."""
    seen: dict[int, bool] = {}
    todo = [(operand, _keeps_place(draft, loop)) for operand in draft.graph.nodes[loop].operands]
    while todo:
        index, alike = todo.pop()
        if index in seen and (alike or not seen[index]):
            continue
        seen[index] = alike
        if homes.get(index) is Home.INLINE:
            here = alike and _keeps_place(draft, index)
            todo += [(operand, here) for operand in draft.graph.nodes[index].operands]
    yield from seen.items()


def _keeps_place(draft: Draft, index: int) -> bool:
    """Whether the node's element n in a block is made of element n of its operands."""
    node = draft.graph.nodes[index]
    if node.kind is Kind.RESHAPE:
        pair = (draft.schedules[index], draft.schedules[node.operands[0]])
        return all(schedule.order is Order.ROW for schedule in pair)
    return node.kind is Kind.POINTWISE


def find_reads(draft: Draft, homes: Mapping[int, Home]) -> Reads:
    return {loop: dict(walk_loop(draft, homes, loop)) for loop in list_loops(draft, homes)}


def place_buffers(
    draft: Draft, homes: Mapping[int, Home], reads: Reads
) -> tuple[dict[int, Buffer], int]:
    """F16: a place for each SHARED node, and the bytes up to the end of the last one."""
    last = {index: place for place, found in enumerate(reads.values()) for index in found}
    live: dict[int, Buffer] = {}
    buffers: dict[int, Buffer] = {}
    total = 0
    for place, index in enumerate(reads):
        live = {i: buffer for i, buffer in live.items() if last[i] >= place}
        if homes[index] is not Home.SHARED:
            continue
        offset = None
        for other in [i for i in live if last[i] == place and reads[index].get(i)]:
            if _same_size(draft, index, other):
                offset = live.pop(other).offset_bytes
                break
        if offset is None:
            offset = _first_gap(draft, index, live)
        live[index] = buffers[index] = Buffer(offset, draft.elements(index))
        total = max(total, offset + draft.num_bytes(index))
    return buffers, total


def _same_size(draft: Draft, one: int, other: int) -> bool:
    nodes = draft.graph.nodes
    widths = {DTYPE_BYTES[nodes[one].dtype], DTYPE_BYTES[nodes[other].dtype]}
    return len(widths) == 1 and draft.elements(one) == draft.elements(other)


def _first_gap(draft: Draft, index: int, live: Mapping[int, Buffer]) -> int:
    """The lowest aligned offset where the buffer meets no living one."""
    align = DTYPE_BYTES[draft.graph.nodes[index].dtype]
    size = draft.num_bytes(index)
    offset = 0
    for start, end in sorted((b.offset_bytes, b.offset_bytes + draft.num_bytes(i))
                             for i, b in live.items()):  # fmt: skip
        if offset + size <= start:
            break
        offset = max(offset, math.ceil(end / align) * align)
    return offset
