"""Which inputs of a program are looked up in tables, and what range that leaves them.

An index beyond its table is the client's mistake. Where an input itself is the index, the channel
refuses it by this range before it is scheduled; where the index is computed from inputs, only the
launch shows it (`executor`).
"""

from __future__ import annotations

from typing import Final

from coissue.kernels.ir import Program

LOOKUPS: Final = frozenset({"embedding", "embedding_bag"})
#: Ops that keep all values of their first input.
KEEPING: Final = frozenset({"cast", "expand", "flip", "permute", "reshape"})
INTEGERS: Final = frozenset({"u8", "i8", "i16", "i32", "i64"})


def find_bounds(program: Program) -> dict[int, int]:
    """Input's value -> rows of the smallest table that it is an index of."""
    makers = {value: op for op in program.ops for value in op.outputs}
    inputs = {port.value for port in program.inputs}
    bounds: dict[int, int] = {}
    for op in program.ops:
        if op.name not in LOOKUPS:
            continue
        table, value = op.inputs[:2]
        while value in makers and makers[value].name in KEEPING:
            value = makers[value].inputs[0]
        extent = program.types[table].shape[0]
        if value in inputs and program.types[value].dtype in INTEGERS and extent.is_fixed:
            bounds[value] = min(extent.scale, bounds.get(value, extent.scale))
    return bounds
