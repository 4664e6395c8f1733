"""Which batch norms go into the weights of the convolution before them, and which products of one
value may be one product of their weights side by side.

Asked by the devices, which fold once per weight set, and by whoever looks for the ops that are left
to stitch. Not for exact kernels, whose rounding is that of the ops as they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import groupby

from coissue.kernels.ir import ABSENT, Op
from coissue.kernels.lowered import Kernel, Layout, Lowered, Mode
from coissue.kernels.passes.fuse import ANCHORS


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


def find_siblings(
    lowered: Lowered, kernel: Kernel, pays: Callable[[int, list[int], bool], bool]
) -> dict[int, list[int]]:
    """Place in `Kernel.ops` of a product -> of others of its input, with no other heavy op between.

    `pays`: whether one product of that K and all these N is faster than one of each, for tokens.
    """
    ops, types, weights = kernel.ops, lowered.program.types, {ABSENT, *kernel.weights}

    def key(place: int) -> tuple[object, ...]:
        op, is_packed = ops[place], kernel.modes[place] is Mode.PACKED
        if op.name == "linear" and is_packed and weights.issuperset(op.inputs[1:]):
            return op.inputs[0], op.attrs["layout"], [v != ABSENT for v in op.inputs[1:]]
        return (place,)

    found = {}
    for _, group in groupby((i for i, op in enumerate(ops) if op.name in ANCHORS), key):
        first, *others = group
        if others and types[ops[first].inputs[0]].dtype == "f32":
            values = ops[first].inputs[0], *(ops[place].outputs[0] for place in (first, *others))
            k, *widths = (types[value].shape[-1].scale for value in values)
            if pays(k, widths, lowered.layouts[values[0]] is Layout.TOKENS):
                found[first] = others
    return found
