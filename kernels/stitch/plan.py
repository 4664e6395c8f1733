"""What the planner decided for a graph, and all that the renderers need to know: data only.

A stitched kernel is a grid of *blocks*. Each node has a `Schedule` that says which of its elements
a block makes; propagation from the roots guarantees that what a block reads of a node inside the
kernel was made by the same block. Blocks never talk to each other.

    Row      elements [b*c, (b+1)*c) of the node, c = size / blocks: contiguous
    Column   axes before `split_dim` whole; of `split_dim` the chunk b // inner, and of the axes
             after it the one index b % inner, inner = product of the extents after it

A launch has units * blocks blocks (see `graph`): the grid of one unit, repeated. In a kernel of
several blocks, a node or input whose own schedule has one block is not cut: each block reads all of
an input, and makes again what it needs of a node, which therefore is INLINE.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from coissue.kernels.stitch.graph import Graph


class Order(enum.StrEnum):
    ROW = "row"
    COLUMN = "column"


class Schedule(NamedTuple):
    """F7: `sword` divides the extent of `split_dim`. A tuple, for the planner compares millions."""

    split_dim: int
    sword: int
    order: Order = Order.ROW

    def blocks(self, shape: tuple[int, ...]) -> int:
        if not shape:
            return 1
        if self.order is Order.ROW:
            return self.sword * math.prod(shape[: self.split_dim])
        return self.sword * math.prod(shape[self.split_dim + 1 :])


class Home(enum.Enum):
    """Where a node's elements are."""

    #: Nowhere: computed again by whoever reads it (thread composition, registers).
    INLINE = "inline"
    #: In the block's shared memory: `StitchedKernel.buffers` has its place (block composition).
    SHARED = "shared"
    #: In the output tensor; also read from there by the block that wrote it.
    OUTPUT = "output"


class Rows(enum.Enum):
    """How a REDUCE is spread over the threads of a block (CUDA; on the CPU it is a loop)."""

    THREAD = "thread"
    WARP = "warp"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A place in a block's shared memory; buffers of nodes that never live together may overlap."""

    offset_bytes: int
    #: Elements per block.
    elements: int


@dataclass(frozen=True, slots=True)
class StitchedKernel:
    """One kernel: nodes of the graph by index."""

    #: In topological order; without parameters and constants. A node that only moves data may be
    #: in several kernels.
    nodes: tuple[int, ...]
    #: The same as `outputs`; schedules start at those that no node of this kernel reads.
    roots: tuple[int, ...]
    #: Nodes read from outside: parameters, and outputs of other kernels.
    inputs: tuple[int, ...]
    #: Nodes handed out.
    outputs: tuple[int, ...]
    #: Blocks per unit.
    blocks: int
    #: Of every node in `nodes` and every input inside the grid.
    schedules: Mapping[int, Schedule]
    homes: Mapping[int, Home]
    #: Of the nodes with home SHARED.
    buffers: Mapping[int, Buffer]
    shared_bytes: int
    #: Of every REDUCE.
    rows: Mapping[int, Rows]
    threads: int


@dataclass(frozen=True, slots=True)
class StitchPlan:
    """Kernels in an order that can be run; each output of the graph is made by one of them."""

    graph: Graph
    kernels: tuple[StitchedKernel, ...]
    #: Units of a launch that are one unit of `graph` (`packing`); what is left over of them is for
    #: the plan of one.
    units: int = 1
