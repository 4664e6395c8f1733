"""The range that lookups leave to a program's inputs: the channel refuses an index beyond it.

Where the index is computed from inputs, only the launch shows the mistake (see `executor`).
"""

from coissue.kernels.ir import Program

#: Ops that keep all values of their first input.
KEEPING = ("cast", "expand", "flip", "permute", "reshape")


def find_bounds(program: Program) -> dict[int, int]:
    """Input's value -> rows of the smallest table that it is an index of."""
    makers = {value: op for op in program.ops for value in op.outputs}
    inputs = {p.value for p in program.inputs if program.types[p.value].dtype[0] in "ui"}
    bounds: dict[int, int] = {}
    for op in program.ops:
        if op.name in ("embedding", "embedding_bag"):
            table, value = op.inputs[:2]
            while value in makers and makers[value].name in KEEPING:
                value = makers[value].inputs[0]
            extent = program.types[table].shape[0]
            if value in inputs and extent.is_fixed:
                bounds[value] = min(extent.scale, bounds.get(value, extent.scale))
    return bounds
