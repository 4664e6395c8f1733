"""The memory-bound ops of a kernel as a static graph: what the stitching compiler works on.

NOTE the one idea: an op that the row-axis proof found PACKED never mixes *units* (a unit is one
row, or one token where values are kept by token). So a run of such ops is one static program,
repeated once per unit: every extent in a `Graph` is a number, and how many units a launch has is an
argument of the generated function. A unit's elements of a packed value lie together: unit u of a
value with s elements per unit has elements [u*s, (u+1)*s).

A node is primitive: what the op table has as one op (softmax, layer_norm, gelu) is several nodes
here, so that rules speak of seven kinds only. Nodes are in topological order; a node names its
operands by index. What `lower` makes has no axis of extent 1, but where a kind needs one (matrices,
slices, joined parts), and no arithmetic in f16 or bf16: only casts, moves, `where` and `identity`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field


class Kind(enum.Enum):
    """What a node does with the coordinates of its operands."""

    #: A tensor from outside. `per_unit`: one per unit; else the same for all (weights, constants).
    PARAMETER = "parameter"
    #: One number; shape ().
    CONSTANT = "constant"
    #: `name` is a scalar function; operands have the node's shape or are of shape ().
    POINTWISE = "pointwise"
    #: `name` is sum, prod, amax, amin, any or all over `axes` of the operand; those axes are gone.
    REDUCE = "reduce"
    #: Operand axis i becomes axis `axes[i]`; where the extents differ, the operand's is 1.
    BROADCAST = "broadcast"
    #: Same elements in the same order, other extents.
    RESHAPE = "reshape"
    #: Axis i of the result is axis `axes[i]` of the operand.
    TRANSPOSE = "transpose"
    #: Axis `axes[0]` of the operand from `axes[1]` on in steps of `axes[2]`.
    SLICE = "slice"
    #: Operands one after the other along `axes[0]`.
    CONCAT = "concat"
    #: Batched matrix product (..., M, K) x (..., K, N); all leading axes equal.
    DOT = "dot"
    #: Operand 0 (a parameter) read along axis `axes[0]` at the integers of operand 1, whose axes
    #: take the place of that axis.
    GATHER = "gather"


@dataclass(frozen=True, slots=True)
class Node:
    kind: Kind
    #: The scalar function or the reduction; else "".
    name: str
    operands: tuple[int, ...]
    shape: tuple[int, ...]
    #: Of the IR (`ir.DTYPE_BYTES`).
    dtype: str
    axes: tuple[int, ...] = ()
    #: Of a CONSTANT.
    value: float | int | bool | None = None
    #: Of a PARAMETER; of any other node whether it is an output or depends on one that is. Where
    #: no output of a kernel is, one unit makes them for all.
    per_unit: bool = True
    #: The IR value that this node is, or -1: parameters, outputs, and what explains itself by it.
    source: int = -1

    @property
    def size(self) -> int:
        """Elements per unit."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Graph:
    nodes: tuple[Node, ...]
    #: The nodes that others outside need, in the order of the IR values they are.
    outputs: tuple[int, ...]
    #: By node: the elements of it that kernels read per unit; of a table those that are looked up,
    #: and of what is only sliced the slices.
    read_sizes: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        looked_up, whole = [0] * len(self.nodes), set(self.outputs)
        for node in self.nodes:
            in_part = node.kind in (Kind.GATHER, Kind.SLICE)
            whole.update(node.operands[1:] if in_part else node.operands)
            if in_part:
                looked_up[node.operands[0]] += node.size
        sizes = tuple(
            node.size
            if index in whole or not looked_up[index]
            else min(node.size, looked_up[index])
            for index, node in enumerate(self.nodes)
        )
        object.__setattr__(self, "read_sizes", sizes)
