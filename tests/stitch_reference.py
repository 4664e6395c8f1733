"""What a `Graph` means, by numpy, and stitched kernels made by hand: the oracle of the renderers.

Floats of 32 and 64 bits are rounded after every node, as kernels do; bf16 and f16 stay f32 until
they leave, because kernels keep them so in registers.
"""

from __future__ import annotations

import math

import numpy as np

from coissue.kernels.interpreter import NUMPY_DTYPES, store
from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.optable.pointwise import OPS
from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.plan import Buffer, Home, Rows, Schedule, StitchedKernel

REDUCE = {"sum": np.sum, "prod": np.prod, "amax": np.max, "amin": np.min, "any": np.any,
          "all": np.all}  # fmt: skip
#: Names of the graph's scalar functions that the op table has only with attrs.
EXTRA = {
    "where": np.where,
    "expm1": np.expm1,
    "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "gelu": lambda x: OPS["gelu"].run(x, approximate="none"),
}


def evaluate(graph: Graph, parameters: dict[int, np.ndarray], units: int) -> dict[int, np.ndarray]:
    """Every node for all units: per-unit nodes have a leading axis of `units`, others have not."""
    values: dict[int, np.ndarray] = {}
    for index, node in enumerate(graph.nodes):
        with np.errstate(all="ignore"):
            if node.kind is Kind.PARAMETER:
                values[index] = parameters[index]
            elif not node.per_unit:
                values[index] = _hold(_one(graph, node, values, None), node)
            else:
                made = [_one(graph, node, values, unit) for unit in range(units)]
                shape = (units, *node.shape)
                values[index] = _hold(np.array(made).reshape(shape), node)
    return values


def _hold(array: np.ndarray, node: Node) -> np.ndarray:
    if node.dtype in ("f16", "bf16"):
        return array.astype(np.float32)
    return array.astype(NUMPY_DTYPES[node.dtype])


def _one(graph: Graph, node: Node, values, unit: int | None) -> np.ndarray:
    each = [(values[operand], graph.nodes[operand].per_unit) for operand in node.operands]
    return compute(node, [value[unit] if per_unit else value for value, per_unit in each])


def compute(node: Node, operands: list[np.ndarray]) -> np.ndarray:
    """The node's array from its operands', not yet rounded to its dtype: what each kind means."""
    wide = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in operands]
    match node.kind:
        case Kind.CONSTANT:
            return store(np.asarray(node.value), node.dtype)
        case Kind.POINTWISE if node.name == "cast":
            return store(operands[0], node.dtype)
        case Kind.POINTWISE:
            fn = EXTRA.get(node.name) or OPS[node.name].run
            return np.broadcast_to(np.asarray(fn(*wide)), node.shape)
        case Kind.REDUCE:
            return np.asarray(REDUCE[node.name](wide[0], axis=node.axes))
        case Kind.DOT:
            return np.matmul(*wide)
        case Kind.GATHER:
            extent = operands[0].shape[node.axes[0]]
            picks = np.where(operands[1] < 0, operands[1] + extent, operands[1])
            return np.take(operands[0], np.clip(picks, 0, extent - 1), axis=node.axes[0])
    return move(node, operands)


def move(node: Node, operands: list[np.ndarray]) -> np.ndarray:
    """The kinds that only say where elements are."""
    x = operands[0]
    match node.kind:
        case Kind.BROADCAST:
            shape = [1] * len(node.shape)
            for extent, axis in zip(x.shape, node.axes, strict=True):
                shape[axis] = extent
            return np.broadcast_to(x.reshape(shape), node.shape)
        case Kind.RESHAPE:
            return x.reshape(node.shape)
        case Kind.TRANSPOSE:
            return x.transpose(node.axes)
        case Kind.SLICE:
            axis, start, step = node.axes
            return np.take(x, start + step * np.arange(node.shape[axis]), axis=axis)
        case Kind.CONCAT:
            return np.concatenate(operands, axis=node.axes[0])
    raise AssertionError(node.kind)


def simple_kernel(
    graph: Graph, rows: Rows = Rows.BLOCK, threads: int = 64, shared: bool = True
) -> StitchedKernel:
    """The whole graph as one kernel with one block per unit.

    SHARED: what reduces, and what several nodes or a reducing node read. Without `shared` all that
    is not handed out is INLINE."""
    consumers: list[list[int]] = [[] for _ in graph.nodes]
    for index, node in enumerate(graph.nodes):
        for operand in set(node.operands):
            consumers[operand].append(index)
    nodes = [i for i, n in enumerate(graph.nodes) if n.kind not in (Kind.PARAMETER, Kind.CONSTANT)]
    heavy = (Kind.REDUCE, Kind.DOT)
    homes, buffers, place = {}, {}, 0
    for index in nodes:
        node = graph.nodes[index]
        kept = node.kind in heavy or len(consumers[index]) > 1
        kept = kept or any(graph.nodes[reader].kind in heavy for reader in consumers[index])
        homes[index] = Home.INLINE
        if index in graph.outputs:
            homes[index] = Home.OUTPUT
        elif kept and shared:
            homes[index] = Home.SHARED
            buffers[index] = Buffer(place, node.size)
            place += -(-node.size * DTYPE_BYTES[node.dtype] // 16) * 64
    used = {operand for index in nodes for operand in graph.nodes[index].operands}
    inputs = [i for i in sorted(used) if graph.nodes[i].kind is Kind.PARAMETER]
    return StitchedKernel(
        nodes=tuple(nodes), roots=graph.outputs, inputs=tuple(inputs), outputs=graph.outputs,
        blocks=1, schedules={i: Schedule(0, 1) for i in (*nodes, *inputs)}, homes=homes,
        buffers=buffers, shared_bytes=place,
        rows={i: rows for i in nodes if graph.nodes[i].kind is Kind.REDUCE}, threads=threads,
    )  # fmt: skip


class Builder:
    """Writes graphs down shortly: each method adds a node and gives its index."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, kind, name, operands, shape, dtype, axes=(), **more) -> int:
        per_unit = any(self.nodes[o].per_unit for o in operands)
        more.setdefault("per_unit", per_unit)
        self.nodes.append(Node(kind, name, tuple(operands), tuple(shape), dtype, axes, **more))
        return len(self.nodes) - 1

    def parameter(self, *shape, dtype="f32", per_unit=True) -> int:
        return self.add(Kind.PARAMETER, "", (), shape, dtype, per_unit=per_unit)

    def constant(self, value, dtype="f32") -> int:
        return self.add(Kind.CONSTANT, "", (), (), dtype, value=value, per_unit=False)

    def call(self, name, *operands, dtype=None) -> int:
        shape = max((self.nodes[o].shape for o in operands), key=len)
        return self.add(
            Kind.POINTWISE, name, operands, shape, dtype or self.nodes[operands[0]].dtype
        )

    def reduce(self, name, x, *axes, dtype=None) -> int:
        shape = [e for a, e in enumerate(self.nodes[x].shape) if a not in axes]
        return self.add(Kind.REDUCE, name, (x,), shape, dtype or self.nodes[x].dtype, axes)

    def broadcast(self, x, shape, axes) -> int:
        return self.add(Kind.BROADCAST, "", (x,), shape, self.nodes[x].dtype, tuple(axes))

    def reshape(self, x, *shape) -> int:
        return self.add(Kind.RESHAPE, "", (x,), shape, self.nodes[x].dtype)

    def transpose(self, x, *axes) -> int:
        shape = [self.nodes[x].shape[a] for a in axes]
        return self.add(Kind.TRANSPOSE, "", (x,), shape, self.nodes[x].dtype, axes)

    def slice(self, x, axis, start, step, count) -> int:
        shape = list(self.nodes[x].shape)
        shape[axis] = count
        return self.add(Kind.SLICE, "", (x,), shape, self.nodes[x].dtype, (axis, start, step))

    def concat(self, axis, *xs) -> int:
        shape = list(self.nodes[xs[0]].shape)
        shape[axis] = sum(self.nodes[x].shape[axis] for x in xs)
        return self.add(Kind.CONCAT, "", xs, shape, self.nodes[xs[0]].dtype, (axis,))

    def dot(self, a, b) -> int:
        shape = (*self.nodes[a].shape[:-1], self.nodes[b].shape[-1])
        return self.add(Kind.DOT, "", (a, b), shape, self.nodes[a].dtype)

    def gather(self, table, picks, axis) -> int:
        old, new = self.nodes[table].shape, self.nodes[picks].shape
        shape = (*old[:axis], *new, *old[axis + 1 :])
        return self.add(Kind.GATHER, "", (table, picks), shape, self.nodes[table].dtype, (axis,))

    def graph(self, *outputs) -> Graph:
        return Graph(tuple(self.nodes), tuple(outputs))


def layer_norm(rows: int, width: int, dtype: str = "f32") -> Graph:
    b = Builder()
    x = b.parameter(rows, width, dtype=dtype)
    scale = b.parameter(width, dtype=dtype, per_unit=False)
    shift = b.parameter(width, dtype=dtype, per_unit=False)
    shape = (rows, width)
    count = b.constant(1.0 / width, dtype)
    mean = b.call("mul", b.reduce("sum", x, 1), count)
    centred = b.call("sub", x, b.broadcast(mean, shape, (0,)))
    squares = b.call("mul", centred, centred)
    variance = b.call("mul", b.reduce("sum", squares, 1), count)
    rstd = b.call("rsqrt", b.call("add", variance, b.constant(1e-5, dtype)))
    normal = b.call("mul", centred, b.broadcast(rstd, shape, (0,)))
    scaled = b.call("mul", normal, b.broadcast(scale, shape, (1,)))
    return b.graph(b.call("add", scaled, b.broadcast(shift, shape, (1,))))


def softmax(rows: int, width: int, dtype: str = "f32") -> Graph:
    b = Builder()
    x, shape = b.parameter(rows, width, dtype=dtype), (rows, width)
    centred = b.call("sub", x, b.broadcast(b.reduce("amax", x, 1), shape, (0,)))
    e = b.call("exp", centred)
    return b.graph(b.call("div", e, b.broadcast(b.reduce("sum", e, 1), shape, (0,))))


def gelu(*shape: int, dtype: str = "f32") -> Graph:
    b = Builder()
    x = b.parameter(*shape, dtype=dtype)
    half = b.call("mul", x, b.constant(0.5, dtype))
    inner = b.call("erf", b.call("mul", x, b.constant(math.sqrt(0.5), dtype)))
    return b.graph(b.call("mul", half, b.call("add", inner, b.constant(1.0, dtype))))


def batch_norm_relu(channels: int, pixels: int) -> Graph:
    """Batch norm as scale and shift, plus a residual, then relu."""
    b, shape = Builder(), (channels, pixels)
    x, other = b.parameter(*shape), b.parameter(*shape)
    scale, shift = (b.parameter(channels, per_unit=False) for _ in range(2))
    scaled = b.call("mul", x, b.broadcast(scale, shape, (0,)))
    moved = b.call("add", scaled, b.broadcast(shift, shape, (0,)))
    return b.graph(b.call("relu", b.call("add", moved, other)))


def attention(heads: int, tokens: int, width: int) -> Graph:
    """The paper's running example: softmax of scores, times values."""
    b = Builder()
    scores = b.parameter(heads * tokens, tokens)
    values = b.parameter(heads, tokens, width)
    shape = (heads * tokens, tokens)
    top = b.broadcast(b.reduce("amax", scores, 1), shape, (0,))
    e = b.call("exp", b.call("sub", scores, top))
    p = b.call("div", e, b.broadcast(b.reduce("sum", e, 1), shape, (0,)))
    return b.graph(b.dot(b.reshape(p, heads, tokens, tokens), values))


def to_memory(array: np.ndarray, dtype: str) -> np.ndarray:
    """As a device holds it: bf16 as its upper 16 bits."""
    kept = store(array, dtype)
    if dtype == "bf16":
        kept = np.asarray(kept.view(np.uint32) >> 16).astype(np.uint16)
    return np.array(kept, order="C")


def from_memory(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def memory_dtype(dtype: str) -> np.dtype:
    return np.dtype(np.uint16) if dtype == "bf16" else NUMPY_DTYPES[dtype]
