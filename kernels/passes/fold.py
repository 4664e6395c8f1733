"""Which batch norms go into the weights of the convolution before them.

Asked by the devices, which fold once per weight set, and by whoever looks for the ops that are left
to stitch. Never in exact kernels, whose rounding is that of the ops as they are written.
"""

from __future__ import annotations

from collections import Counter

from coissue.kernels.ir import ABSENT, Op
from coissue.kernels.lowered import Kernel, Lowered, Mode


def find_folds(lowered: Lowered, kernel: Kernel) -> dict[int, int]:
    """Place in `Kernel.ops` of each convolution that takes a batch norm along -> of that norm.

    Both have weights of the program for all but their input, and nothing else reads what is
    between them.
    """
    if kernel.exact:
        return {}
    weights = {ABSENT, *kernel.weights}
    uses = Counter(value for op in kernel.ops for value in op.inputs)
    packed = [
        (place, op)
        for place, (op, mode) in enumerate(zip(kernel.ops, kernel.modes, strict=True))
        if mode is Mode.PACKED and weights.issuperset(op.inputs[1:])
    ]
    maker = {op.outputs[0]: place for place, op in packed if _can_take(lowered, op)}
    return {
        maker[op.inputs[0]]: place
        for place, op in packed
        if op.name == "batch_norm"
        and op.inputs[0] in maker
        and uses[op.inputs[0]] == 1
        and op.inputs[0] not in kernel.outputs
    }


def _can_take(lowered: Lowered, op: Op) -> bool:
    type_ = lowered.program.types[op.outputs[0]]
    return op.name == "conv" and type_.dtype == "f32" and len(type_.shape) == 4
