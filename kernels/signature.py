"""Signatures: all that must be equal for two kernels to share a launch, as a hex digest.

In it: the ops in order with attributes, modes and wiring, the dtype and logical shape of every
value (R and T symbolic, so every other extent counts), layouts, which values are inputs, weights
(the same weight read twice is not two weights) and outputs, exact mode. Not in it: what the weights
hold, names, module paths, limits. Values are numbered by first use, as are `Kernel.inputs` and its
other values: kernels of one signature correspond position by position.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence

from coissue.kernels.ir import ABSENT, Op, Type
from coissue.kernels.lowered import Layout, Mode
from coissue.kernels.passes.rewrite import freeze_attrs


def sign(
    ops: Sequence[Op],
    modes: Sequence[Mode],
    outputs: Collection[int],
    weights: Collection[int],
    types: Sequence[Type],
    layouts: Sequence[Layout],
    exact: bool,
) -> str:
    """The signature of the kernel of `ops`, which hands out `outputs`."""
    number: dict[int, int] = {ABSENT: ABSENT}
    values: list[object] = []
    lines: list[object] = []
    for op, mode in zip(ops, modes, strict=True):
        for value in (*op.inputs, *op.outputs):
            if value in number:
                continue
            number[value] = len(values)
            type_ = types[value]
            shape = [[dim.scale, dim.rows, dim.tokens] for dim in type_.shape]
            role = "weight" if value in weights else "out" if value in outputs else ""
            values.append([type_.dtype, shape, layouts[value].value, role])
        wiring = [[number[value] for value in side] for side in (op.inputs, op.outputs)]
        lines.append([op.name, mode.value, *wiring, freeze_attrs(op.attrs)])
    told = [values, lines, "exact"] if exact else [values, lines]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
