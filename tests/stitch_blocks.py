"""Graphs of the stitching compiler in numpy: what they mean, and plans run block by block.

evaluate(graph, parameters)   every node's array for one unit
move_parameters(...)          parameters for a plan's graph, whose long rows may be split
PlanRun(plan, parameters)     the same through a plan's kernels: a block sees only what its kernel
                              reads from outside and what the block itself has made; what lies in
                              shared memory where another buffer is written is gone
"""

from __future__ import annotations

import math

import numpy as np
from stitch_reference import compute, move

from coissue.kernels.interpreter import NUMPY_DTYPES, store
from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.plan import Home, Order, StitchedKernel, StitchPlan


def apply(node: Node, operands: list[np.ndarray]) -> np.ndarray:
    """The node's array from its operands'."""
    with np.errstate(all="ignore"):
        return store(compute(node, operands), node.dtype)


def known(node: Node, masks: list[np.ndarray]) -> np.ndarray:
    """Which elements of the node follow from the elements of its operands that are known."""
    if node.kind is Kind.CONSTANT:
        return np.ones((), bool)
    if node.kind is Kind.POINTWISE:
        return np.broadcast_to(np.logical_and.reduce(np.broadcast_arrays(*masks)), node.shape)
    if node.kind is Kind.REDUCE:
        return np.asarray(masks[0].all(axis=node.axes))
    if node.kind is Kind.DOT:
        left, right = masks[0].all(axis=-1), masks[1].all(axis=-2)
        return left[..., :, None] & right[..., None, :]
    if node.kind is Kind.GATHER:
        (axis,), rank = node.axes, masks[1].ndim
        picks = np.asarray(masks[1]).reshape(
            (*masks[1].shape, *[1] * (len(node.shape) - axis - rank))
        )
        return np.broadcast_to(picks, node.shape) & masks[0].all()
    return move(node, masks)


def evaluate(graph: Graph, parameters: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    values = {}
    for index, node in enumerate(graph.nodes):
        if node.kind is Kind.PARAMETER:
            values[index] = store(parameters[index], node.dtype)
        else:
            values[index] = apply(node, [values[operand] for operand in node.operands])
            assert values[index].shape == node.shape, (index, node)
    return values


def fill(graph: Graph, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Arrays for the parameters; whole numbers stay below every gathered axis."""
    limit = min((graph.nodes[n.operands[0]].shape[n.axes[0]] for n in graph.nodes
                 if n.kind is Kind.GATHER), default=4)  # fmt: skip
    found = {}
    for index, node in enumerate(graph.nodes):
        if node.kind is Kind.PARAMETER:
            is_float = node.dtype in ("f16", "bf16", "f32", "f64")
            array = rng.normal(size=node.shape) if is_float else rng.integers(0, limit, node.shape)
            found[index] = np.asarray(array).astype(NUMPY_DTYPES[node.dtype])
    return found


def move_parameters(
    arrays: dict[int, np.ndarray], before: Graph, after: Graph
) -> dict[int, np.ndarray]:
    """Arrays by the places that the parameters of `before` have in `after`."""
    old, new = (
        [i for i, node in enumerate(graph.nodes) if node.kind is Kind.PARAMETER]
        for graph in (before, after)
    )
    return {there: arrays[here] for here, there in zip(old, new, strict=True)}


def block_mask(node: Node, kernel: StitchedKernel, index: int, block: int) -> np.ndarray:
    """Which elements of the node a block makes; all, where no grid cuts it."""
    schedule = kernel.schedules.get(index)
    if schedule is None or schedule.blocks(node.shape) == 1:
        return np.ones(node.shape, bool)
    mask = np.zeros(node.shape, bool)
    if schedule.order is Order.ROW:
        chunk = node.size // kernel.blocks
        mask.reshape(-1)[block * chunk : (block + 1) * chunk] = True
        return mask
    at = schedule.split_dim
    after = node.shape[at + 1 :]
    part, inner = divmod(block, math.prod(after))
    chunk = node.shape[at] // schedule.sword
    cut = (slice(None),) * at + (slice(part * chunk, (part + 1) * chunk),)
    mask[(*cut, *np.unravel_index(inner, after))] = True
    return mask


class PlanRun:
    def __init__(self, plan: StitchPlan, parameters: dict[int, np.ndarray]):
        self.graph = plan.graph
        self.outside = {i: store(a, self.graph.nodes[i].dtype) for i, a in parameters.items()}
        for kernel in plan.kernels:
            self._kernel(kernel)

    def outputs(self) -> list[np.ndarray]:
        return [self.outside[index] for index in self.graph.outputs]

    def _kernel(self, kernel: StitchedKernel) -> None:
        made = {i: np.zeros(self.graph.nodes[i].shape, NUMPY_DTYPES[self.graph.nodes[i].dtype])
                for i in kernel.outputs}  # fmt: skip
        written = {i: np.zeros(self.graph.nodes[i].shape, int) for i in kernel.outputs}
        for block in range(kernel.blocks):
            run = BlockRun(self.graph, kernel, block, self.outside)
            for index in kernel.outputs:
                array, mask = run.stored[index]
                made[index] = np.where(mask, array, made[index])
                written[index] += mask
        for index, counts in written.items():
            assert (counts == 1).all(), f"node {index} is not written once"
        self.outside |= made


class BlockRun:
    def __init__(self, graph: Graph, kernel: StitchedKernel, block: int, outside):
        self.graph, self.kernel, self.block, self.outside = graph, kernel, block, outside
        #: Materialised node -> (array, which elements this block has of it now).
        self.stored = {}
        for index in kernel.nodes:
            if kernel.homes[index] is Home.INLINE:
                continue
            wanted = block_mask(graph.nodes[index], kernel, index, block)
            array, mask = self._compute(index)
            assert mask[wanted].all(), f"block {block} has not all that node {index} reads"
            self._clobber(index)
            self.stored[index] = (array, wanted)

    def _read(self, index: int):
        if index in self.stored:
            return self.stored[index]
        node = self.graph.nodes[index]
        if index in self.kernel.homes:
            assert self.kernel.homes[index] is Home.INLINE, f"node {index} is read too early"
            return self._compute(index)
        if node.kind is Kind.CONSTANT:
            return self._compute(index)
        assert index in self.kernel.inputs, f"node {index} is no input"
        return self.outside[index], block_mask(node, self.kernel, index, self.block)

    def _compute(self, index: int):
        node = self.graph.nodes[index]
        pairs = [self._read(operand) for operand in node.operands]
        array = apply(node, [array for array, _ in pairs])
        return array, known(node, [mask for _, mask in pairs])

    def _clobber(self, index: int) -> None:
        """Forgets what lies where node `index` is written now."""
        buffers, nodes = self.kernel.buffers, self.graph.nodes

        def span(node):
            start = buffers[node].offset_bytes
            return start, start + buffers[node].elements * DTYPE_BYTES[nodes[node].dtype]

        if index not in buffers:
            return
        low, high = span(index)
        for other in [node for node in self.stored if node in buffers]:
            start, end = span(other)
            if start < high and low < end:
                del self.stored[other]
                self.stored[other] = (None, np.zeros(nodes[other].shape, bool))
