"""Kernels that tests and golden files share: name -> (graph, kernel)."""

from __future__ import annotations

from dataclasses import replace

from stitch_graphs import share_buffers
from stitch_reference import (
    Builder,
    attention,
    batch_norm_relu,
    gelu,
    layer_norm,
    simple_kernel,
    softmax,
)

from coissue.kernels.stitch.graph import Graph, Kind
from coissue.kernels.stitch.plan import Buffer, Home, Order, Rows, Schedule, StitchedKernel


def paper_attention(heads: int, tokens: int, width: int) -> tuple[Graph, StitchedKernel]:
    """The running example as the paper plans it: a block per head, two buffers for four nodes."""
    graph = attention(heads, tokens, width)
    kinds = [node.kind for node in graph.nodes]
    top, total = (i for i, kind in enumerate(kinds) if kind is Kind.REDUCE)
    e, quotient = total - 1, kinds.index(Kind.RESHAPE) - 1
    dot = graph.outputs[0]
    made = [i for i, kind in enumerate(kinds) if kind not in (Kind.PARAMETER, Kind.CONSTANT)]
    schedules = {i: Schedule(0, heads) for i in (0, 1, *made)}
    squares, rows = 4 * tokens * tokens, tokens
    places = {top: squares, total: squares, e: 0, quotient: 0}
    sizes = {top: rows, total: rows, e: tokens * tokens, quotient: tokens * tokens}
    kernel = StitchedKernel(
        nodes=tuple(made), roots=(dot,), inputs=(0, 1), outputs=(dot,), blocks=heads,
        schedules=schedules,
        homes=dict.fromkeys(made, Home.INLINE) | dict.fromkeys(places, Home.SHARED)
        | {dot: Home.OUTPUT},
        buffers={i: Buffer(places[i], sizes[i]) for i in places}, shared_bytes=squares + 4 * rows,
        rows=dict.fromkeys((top, total), Rows.THREAD), threads=64,
    )  # fmt: skip
    return graph, kernel


def column_softmax(rows: int, columns: int) -> tuple[Graph, StitchedKernel]:
    """Softmax down the columns, a block per column."""
    b, shape = Builder(), (rows, columns)
    x = b.parameter(*shape)
    top = b.broadcast(b.reduce("amax", x, 0), shape, (1,))
    e = b.call("exp", b.call("sub", x, top))
    graph = b.graph(b.call("div", e, b.broadcast(b.reduce("sum", e, 0), shape, (1,))))
    kernel = simple_kernel(graph, Rows.WARP)
    made = (*kernel.nodes, *kernel.inputs)
    return graph, replace(
        kernel,
        blocks=columns,
        schedules={
            i: Schedule(0, 1, Order.COLUMN) if len(graph.nodes[i].shape) > 1 else
            Schedule(0, columns) for i in made
        },
        buffers={
            i: Buffer(place.offset_bytes, place.elements // columns)
            for i, place in kernel.buffers.items()
        },
    )  # fmt: skip


def head_merge(heads: int, tokens: int, width: int) -> Graph:
    """What follows attention: heads side by side again, then a residual."""
    b = Builder()
    x, other = b.parameter(heads, tokens, width), b.parameter(tokens, heads * width)
    merged = b.reshape(b.transpose(x, 1, 0, 2), tokens, heads * width)
    return b.graph(b.call("add", merged, other))


def _shared(graph: Graph, rows: Rows, threads: int) -> tuple[Graph, StitchedKernel]:
    return graph, share_buffers(graph, simple_kernel(graph, rows, threads))


KERNELS = {
    "layer_norm_block": _shared(layer_norm(1, 384), Rows.BLOCK, 128),
    "layer_norm_warp": _shared(layer_norm(6, 96), Rows.WARP, 128),
    "softmax_bf16": _shared(softmax(3, 70, "bf16"), Rows.WARP, 64),
    "softmax_f64": _shared(softmax(2, 33, "f64"), Rows.BLOCK, 64),
    "gelu": (gelu(1536), simple_kernel(gelu(1536), threads=256)),
    "batch_norm_relu": (
        batch_norm_relu(5, 49), simple_kernel(batch_norm_relu(5, 49), threads=128),
    ),
    "paper_attention": paper_attention(3, 17, 32),
    "column_softmax": column_softmax(20, 3),
    "head_merge": (head_merge(3, 4, 8), simple_kernel(head_merge(3, 4, 8))),
}  # fmt: skip
