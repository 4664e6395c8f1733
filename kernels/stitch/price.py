"""What a stitched kernel costs, estimated from its plan (G3), and how it reduces (H5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.plan import Home, Rows, Schedule
from coissue.kernels.stitch.shared import Draft, Memory
from coissue.kernels.stitch.spans import EXPENSIVE, GIVEN, VIEWS

#: ns of one block of one node under a schedule; None where nobody has measured it (`library`).
Measured = Callable[[Graph, int, Schedule], float | None]


@dataclass(frozen=True, slots=True)
class Machine:
    """The device as the estimate sees it."""

    #: ns to start a kernel.
    launch_ns: float
    #: ns to start one of many blocks.
    block_ns: float
    #: Bytes of global memory per ns, of all blocks together and of one of them.
    bytes_per_ns: float
    block_bytes_per_ns: float
    #: ns of a simple function on as many elements as a block handles at once.
    step_ns: float
    #: ns of a loop with nothing in it, its barrier included.
    loop_ns: float
    #: Elements that one block handles at once.
    lanes: int
    #: Blocks that run at once.
    slots: int


WARP: Final = 32


def cpu() -> Machine:
    return Machine(
        launch_ns=200, block_ns=0, bytes_per_ns=8, block_bytes_per_ns=8,
        step_ns=0.2, loop_ns=5, lanes=8, slots=1,
    )  # fmt: skip


def gpu(threads: int) -> Machine:
    """About an A100; eight blocks of 256 threads on each multiprocessor.

    A thread has about four loads of 4 bytes on their way, which take half a microsecond."""
    slots = 108 * max(1, 2048 // threads)
    return Machine(
        launch_ns=3000, block_ns=0.05, bytes_per_ns=1500, block_bytes_per_ns=threads * 16 / 500,
        step_ns=1, loop_ns=40, lanes=threads, slots=slots,
    )  # fmt: skip


def weigh(node: Node) -> float:
    """How many simple functions the node is worth, per element."""
    if node.kind in GIVEN:
        return 0.5 if node.kind is Kind.PARAMETER else 0.0
    if node.kind in VIEWS:
        return 0.25
    return 8.0 if node.name in EXPENSIVE else 2.0 if node.kind is Kind.GATHER else 1.0


def bytes_moved(graph: Graph, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> int:
    """Per unit; what all units share counts once per unit too, as the cache sees it."""
    read = sum(graph.read_sizes[i] * DTYPE_BYTES[graph.nodes[i].dtype] for i in inputs)
    return read + sum(graph.nodes[i].size * DTYPE_BYTES[graph.nodes[i].dtype] for i in outputs)


def choose_rows(draft: Draft, index: int, threads: int) -> tuple[Rows, int]:
    """H5: how a REDUCE is spread over threads, and how many turns that takes.

    Short rows are packed, one per thread or per warp; long ones take the whole block."""
    rows = draft.elements(index)
    length = draft.length(index)
    if threads < 2 * WARP:
        return Rows.THREAD, math.ceil(rows * length / max(1, min(threads, rows)))
    turns = {
        Rows.THREAD: math.ceil(rows / threads) * length,
        Rows.WARP: math.ceil(rows * WARP / threads) * (math.ceil(length / WARP) + 5),
        Rows.BLOCK: rows * (math.ceil(length / threads) + 12),
    }
    best = min(turns, key=lambda kind: turns[kind])
    return best, turns[best]


def estimate_ns(
    draft: Draft,
    memory: Memory,
    inputs: tuple[int, ...],
    machine: Machine,
    threads: int,
    measured: Measured | None = None,
    units: int = 1,
) -> float:
    """Of one launch: start, memory, and the blocks' loops in waves (F10, F11)."""
    block_ns = 0.0
    for loop in memory.reads:
        block_ns += machine.loop_ns + _loop_ns(draft, memory, loop, machine, threads, measured)
    blocks = units * draft.blocks
    # A block has no more on its way than its busy threads have.
    most = max((draft.elements(loop) * draft.length(loop) for loop in memory.reads), default=1)
    busy = min(1.0, most / threads)
    speed = min(machine.bytes_per_ns, blocks * busy * machine.block_bytes_per_ns)
    moved_ns = units * bytes_moved(draft.graph, inputs, draft.outputs) / speed
    start_ns = machine.launch_ns + blocks * machine.block_ns
    return start_ns + moved_ns + block_ns * max(1.0, blocks / machine.slots)


def _loop_ns(
    draft: Draft,
    memory: Memory,
    loop: int,
    machine: Machine,
    threads: int,
    measured: Measured | None,
) -> float:
    nodes = draft.graph.nodes
    homes, read = memory.homes, memory.reads[loop]
    inline = [index for index in (loop, *read) if homes.get(index) is Home.INLINE or index == loop]
    if measured is not None:
        busy = [index for index in inline if nodes[index].kind not in VIEWS]
        times = [measured(draft.graph, index, draft.schedules[index]) for index in busy]
        if None not in times:
            return sum(time for time in times if time is not None)
    kept = sum(0.5 for index in read if index in homes and index not in inline)
    given = sum(weigh(nodes[index]) for index in read if index not in homes)
    weight = kept + given + sum(weigh(nodes[index]) for index in inline)
    return _turns(draft, loop, machine, threads) * weight * machine.step_ns


def _turns(draft: Draft, loop: int, machine: Machine, threads: int) -> int:
    """How often a block goes through a loop, all its lanes together."""
    kind = draft.graph.nodes[loop].kind
    if kind is Kind.REDUCE and machine.slots > 1:
        return choose_rows(draft, loop, threads)[1]
    length = draft.length(loop)
    if machine.slots > 1:
        return math.ceil(draft.elements(loop) / machine.lanes) * length
    return math.ceil(draft.elements(loop) * length / machine.lanes)
