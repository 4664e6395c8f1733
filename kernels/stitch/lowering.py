"""What the rules of `lower` share: the values of a run as nodes of a graph of one unit.

NOTE the one idea: no node has an axis of extent 1. The packed axes of a value with k elements per
unit become one of extent k, then all axes of extent 1 go. Broadcasting, `keepdim`, and FIXED
operands with leading ones are then all the same question: which axis of the result is this one?
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from coissue.kernels.ir import Type
from coissue.kernels.lowered import Layout, Lowered
from coissue.kernels.passes.layouts import lead
from coissue.kernels.stitch.builder import GraphBuilder, Number, Shape

_NARROW: Final = ("f16", "bf16")


class Lowering:
    """What the rules of one run share."""

    def __init__(self, lowered: Lowered) -> None:
        self.builder = GraphBuilder()
        self.types: Sequence[Type] = lowered.program.types
        self.layouts = lowered.layouts
        #: IR value -> node.
        self.nodes: dict[int, int] = {}
        self._constants = _constants(lowered)

    def node(self, value: int) -> int:
        if value not in self.nodes:
            self.nodes[value] = self._outside(value)
        return self.nodes[value]

    def _outside(self, value: int) -> int:
        """A value that no op of the run makes."""
        dtype, shape = self.types[value].dtype, self.shape(value)
        if value in self._constants:
            number = self.builder.constant(self._constants[value], dtype)
            return self.builder.broadcast(number, (), shape)
        per_unit = self.layouts[value] is not Layout.FIXED
        return self.builder.parameter(shape, dtype, value, per_unit)

    def axes(self, value: int) -> list[tuple[int, int]]:
        """(logical dim, extent) of each axis of the value's node; the packed axes count as one."""
        dims = self.types[value].shape
        packed = 0 if self.layouts[value] is Layout.FIXED else lead(self.types[value])
        first = max(packed - 1, 0)
        return [(d, dims[d].scale) for d in range(first, len(dims)) if dims[d].scale != 1]

    def shape(self, value: int) -> Shape:
        return tuple(extent for _, extent in self.axes(value))

    def axis(self, value: int, dim: int) -> int | None:
        """Where a logical dim is in the node; None if its extent is 1."""
        return next((i for i, (d, _) in enumerate(self.axes(value)) if d == dim), None)

    def axes_of(self, value: int, dims: Collection[int]) -> tuple[int, ...]:
        return tuple(i for i, (d, _) in enumerate(self.axes(value)) if d in dims)

    def spread(self, value: int, out: int, x: int | None = None) -> int:
        """The value (or `x` in its place) aligned from the right with `out`, with all its axes."""
        shift = len(self.types[out].shape) - len(self.types[value].shape)
        places = [self.axis(out, d + shift) for d, _ in self.axes(value)]
        axes = tuple(place for place in places if place is not None)
        node = self.node(value) if x is None else x
        return self.builder.broadcast(node, axes, self.shape(out))

    def wide(self, x: int) -> int:
        """`x` in a dtype for arithmetic."""
        return self.cast(x, "f32") if self.builder.dtype(x) in _NARROW else x

    def cast(self, x: int, dtype: str) -> int:
        if self.builder.dtype(x) == dtype:
            return x
        return self.builder.pointwise("cast", x, dtype=dtype)

    def call(self, name: str, *args: int | float, dtype: str | None = None) -> int:
        """A scalar function of nodes; a float is a constant of the first node's dtype.

        Operands without axes go with any; else shapes are equal."""
        first = next(arg for arg in args if isinstance(arg, int))
        like = self.builder.dtype(first)
        nodes = [a if isinstance(a, int) else self.builder.constant(a, like) for a in args]
        return self.builder.pointwise(name, *nodes, dtype=dtype)

    def along(self, name: str, x: int, axes: Sequence[int]) -> int:
        """A reduction that keeps its axes, by spreading its result over them again."""
        shape = self.builder.shape(x)
        kept = tuple(axis for axis in range(len(shape)) if axis not in axes)
        return self.builder.broadcast(self.builder.reduce(name, x, axes), kept, shape)

    def mean(self, x: int, axes: Sequence[int], correction: int = 0) -> int:
        """Over `axes`, which are gone; the sum is divided by the count less `correction`."""
        count = math.prod(self.builder.shape(x)[axis] for axis in axes) - correction
        share = 1.0 / count if count > 0 else math.inf
        total = self.builder.reduce("sum", x, axes)
        return total if share == 1.0 else self.call("mul", total, share)


def _constants(lowered: Lowered) -> dict[int, Number]:
    """FIXED values that are one number everywhere."""
    found: dict[int, Number] = {}
    for op in lowered.program.ops:
        value = op.outputs[0]
        if op.name in ("constant", "full") and lowered.layouts[value] is Layout.FIXED:
            number = op.attrs["value"]
            assert isinstance(number, int | float)
            found[value] = number
        elif op.name in ("expand", "reshape") and op.inputs[0] in found:
            found[value] = found[op.inputs[0]]
    return found
