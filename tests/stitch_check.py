"""Is this plan legal? What renderers rely on, checked on the plan alone."""

from __future__ import annotations

from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.stitch.graph import Graph, Kind
from coissue.kernels.stitch.plan import Home, StitchedKernel, StitchPlan
from coissue.kernels.stitch.schedules import WHOLE, needs
from coissue.kernels.stitch.shared import Draft, list_loops, walk_loop
from coissue.kernels.stitch.spans import GIVEN, HEAVY


class PlanFault(AssertionError):
    """The plan breaks a rule; the text says which."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise PlanFault(text)


def check_plan(plan: StitchPlan, budget_bytes: int) -> None:
    """Returns nothing if the plan is legal. Raises `PlanFault` otherwise."""
    made = {index for index, node in enumerate(plan.graph.nodes) if node.kind is Kind.PARAMETER}
    for number, kernel in enumerate(plan.kernels):
        missing = set(kernel.inputs) - made
        require(not missing, f"kernel {number} reads {missing} before any kernel makes it")
        twice = made.intersection(kernel.outputs)
        require(not twice, f"kernel {number} makes {twice} again")
        made.update(kernel.outputs)
        check_kernel(plan.graph, kernel, budget_bytes)
    missing = set(plan.graph.outputs) - made
    require(not missing, f"no kernel hands out {missing}")


def check_kernel(graph: Graph, kernel: StitchedKernel, budget_bytes: int) -> None:
    _check_nodes(graph, kernel)
    for index in kernel.nodes:
        _check_schedule(graph, kernel, index)
    for index in kernel.inputs:
        blocks = kernel.schedules[index].blocks(graph.nodes[index].shape)
        require(blocks in (1, kernel.blocks), f"input {index} is cut into {blocks} blocks")
    draft = Draft(graph, kernel.nodes, kernel.outputs, kernel.blocks, kernel.schedules)
    _check_buffers(draft, kernel)
    require(kernel.shared_bytes <= budget_bytes, f"{kernel.shared_bytes} bytes are over the budget")


def _check_nodes(graph: Graph, kernel: StitchedKernel) -> None:
    require(list(kernel.nodes) == sorted(set(kernel.nodes)), "nodes are not in order")
    known = {*kernel.nodes, *kernel.inputs}
    for index in kernel.nodes:
        node = graph.nodes[index]
        require(node.kind not in GIVEN, f"node {index} is given, not made")
        for operand in node.operands:
            is_there = operand in known or graph.nodes[operand].kind is Kind.CONSTANT
            require(is_there, f"node {index} reads {operand}, which is nowhere")
        home = kernel.homes[index]
        require((home is Home.OUTPUT) == (index in kernel.outputs), f"node {index} is {home}")
        require((home is Home.SHARED) == (index in kernel.buffers), f"buffer of node {index}")
        is_kept = node.kind not in HEAVY or home is not Home.INLINE
        require(is_kept, f"node {index} reduces and has no place")
        is_spread = node.kind is not Kind.REDUCE or index in kernel.rows
        require(is_spread, f"nothing says how node {index} is reduced")
    require(set(kernel.roots) <= set(kernel.outputs), "a root is not handed out")


def _check_schedule(graph: Graph, kernel: StitchedKernel, index: int) -> None:
    """The node is cut by the grid or whole, and so is what it reads, as its part needs it."""
    node, schedule = graph.nodes[index], kernel.schedules[index]
    if node.shape and schedule != WHOLE:
        extent = node.shape[schedule.split_dim]
        require(extent % schedule.sword == 0, f"{schedule} does not divide {extent}")
    blocks = schedule.blocks(node.shape)
    require(blocks in (1, kernel.blocks), f"node {index} is cut into {blocks} blocks")
    if blocks == 1 and kernel.blocks > 1:
        is_inline = kernel.homes[index] is Home.INLINE
        require(is_inline, f"every block makes all of node {index}")
    wanted = needs(node, [graph.nodes[o].shape for o in node.operands], schedule)
    require(wanted is not None, f"a block cannot make its part of node {index}")
    for operand, need in zip(node.operands, wanted or (), strict=True):
        if graph.nodes[operand].kind is not Kind.CONSTANT:
            found = kernel.schedules[operand]
            fits = found in (need, WHOLE)
            require(fits, f"node {index} needs {need} of node {operand}, which has {found}")


def _check_buffers(draft: Draft, kernel: StitchedKernel) -> None:
    """What a buffer overwrites is not read after; not even by its own loop, but in place."""
    loops = list_loops(draft, kernel.homes)
    reads = [dict(walk_loop(draft, kernel.homes, loop)) for loop in loops]
    for place, writer in enumerate(loops):
        if writer not in kernel.buffers:
            continue
        low, high = _bytes(draft, kernel, writer)
        require(high <= kernel.shared_bytes, f"the buffer of node {writer} ends too far out")
        fits = kernel.buffers[writer].elements == draft.elements(writer)
        require(fits, f"the buffer of node {writer} has another size than its part")
        for other in loops[:place]:
            if other not in kernel.buffers:
                continue
            start, end = _bytes(draft, kernel, other)
            if start >= high or low >= end:
                continue
            later = [loop for loop, found in zip(loops, reads, strict=True) if other in found]
            after = [loop for loop in later if loop > writer]
            require(not after, f"node {writer} overwrites {other}, which {after} read")
            if writer in later:
                is_exact = (start, end) == (low, high) and reads[place][other]
                require(is_exact, f"node {writer} overwrites {other} while it reads it")


def _bytes(draft: Draft, kernel: StitchedKernel, index: int) -> tuple[int, int]:
    buffer = kernel.buffers[index]
    size = buffer.elements * DTYPE_BYTES[draft.graph.nodes[index].dtype]
    return buffer.offset_bytes, buffer.offset_bytes + size
