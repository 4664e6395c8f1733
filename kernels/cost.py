"""What a run of ops costs, from the IR alone: FLOPs, bytes moved, bytes alive at once.

Rules: exact integers of (rows, tokens); no device, no measurement. Attach reserves memory by
`bytes_peak`; the first prediction of a plan, and what a debug line compares with the measured time,
come from the other two. A multiply-add is 2 FLOPs; any other function of one element counts as 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from coissue.kernels.ir import ABSENT, Op, Program
from coissue.kernels.optable import views
from coissue.kernels.optable.reductions import REDUCE

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one request."""

    flops: int
    #: Everything read from outside the run (weights too; of a table what is looked up, at most all
    #: of it) and every result that leaves it, once.
    bytes_moved: int
    #: The most bytes of values alive at once, without weights. Views count as copies.
    bytes_peak: int


def estimate_program(program: Program, rows: int, tokens: int) -> Cost:
    """The cost of the whole program for `rows` rows of `tokens` tokens."""
    return estimate(program, program.ops, [port.value for port in program.outputs], rows, tokens)


def estimate(
    program: Program, ops: Sequence[Op], outputs: Sequence[int], rows: int, tokens: int
) -> Cost:
    """The cost of `ops`, a kernel's or all, of which `outputs` are needed after them."""
    sizes = [type_.num_bytes(rows, tokens) for type_ in program.types]
    made = {value for op in ops for value in op.outputs}
    used = {value for op in ops for value in op.inputs if value != ABSENT}
    weights = {weight.value for weight in program.weights}
    read = (used | set(outputs)) - made
    shapes = [type_.at(rows, tokens) for type_ in program.types]
    looked_up = _looked_up(ops, shapes)
    moved = sum(sizes[value] for value in set(outputs) & made)
    for value in read:
        share = looked_up.get(value, 1.0)
        moved += round(sizes[value] * share) if share < 1 else sizes[value]
    return Cost(
        flops=sum(count_flops(op, shapes) for op in ops),
        bytes_moved=moved,
        bytes_peak=_peak(ops, sizes, (read - weights) | set(outputs), set(outputs), weights),
    )


def _looked_up(ops: Sequence[Op], shapes: Sequence[Shape]) -> dict[int, float]:
    """Of the values that are only read as tables, the share that the lookups read."""
    found: dict[int, float] = {}
    for op in ops:
        is_lookup = op.name in ("embedding", "embedding_bag")
        for place, value in enumerate(op.inputs):
            if value == ABSENT:
                continue
            rows = math.prod(shapes[op.inputs[1]]) if is_lookup and place == 0 else math.inf
            found[value] = found.get(value, 0.0) + rows / max(1, (*shapes[value], 1)[0])
    return found


def _peak(
    ops: Sequence[Op], sizes: Sequence[int], alive: set[int], kept: set[int], weights: set[int]
) -> int:
    """The largest sum of `sizes` alive at once; values die after the op that reads them last."""
    last = {value: index for index, op in enumerate(ops) for value in (*op.outputs, *op.inputs)}
    made = {value for op in ops for value in op.outputs}
    alive = alive - made - weights
    now = peak = sum(sizes[value] for value in alive)
    for index, op in enumerate(ops):
        now += sum(sizes[value] for value in op.outputs)
        peak = max(peak, now)
        ended = {v for v in (*op.inputs, *op.outputs) if v != ABSENT and last[v] == index}
        now -= sum(sizes[value] for value in ended - kept - weights)
    return peak


def count_flops(op: Op, shapes: Sequence[Shape]) -> int:
    """FLOPs of one op; `shapes[v]` is the concrete shape of value v."""
    inputs = [shapes[value] for value in op.inputs if value != ABSENT]
    count = FLOPS.get(op.name)
    out = shapes[op.outputs[0]]
    return math.prod(out) if count is None else count(inputs, out, op)


Count = Callable[[Sequence[Shape], Shape, Op], int]


def _nothing(inputs: Sequence[Shape], out: Shape, op: Op) -> int:
    return 0


def _per_input(factor: int) -> Count:
    return lambda inputs, out, op: factor * math.prod(inputs[0])


def _product(inputs: Sequence[Shape], out: Shape, op: Op) -> int:
    return 2 * math.prod(out) * inputs[0][-1]


def _conv(inputs: Sequence[Shape], out: Shape, op: Op) -> int:
    return 2 * math.prod(out) * math.prod(inputs[1][1:])


def _pool(inputs: Sequence[Shape], out: Shape, op: Op) -> int:
    kernel = op.attrs["kernel"]
    return math.prod(out) * (math.prod(kernel) if isinstance(kernel, tuple) else 1)


def _attention(inputs: Sequence[Shape], out: Shape, op: Op) -> int:
    (batch, a, b, size), key = inputs[0], inputs[1]
    heads, queries, keys = (a, b, key[2]) if op.attrs["layout"] == "bhsd" else (b, a, key[1])
    return batch * heads * queries * keys * (2 * size + 2 * out[3] + 5)


def _recurrent(inputs: Sequence[Shape], out: Shape, op: Op) -> int:
    """Every weight matrix once per token, and about ten functions of each new h."""
    matrices = sum(math.prod(shape) for shape in inputs[1:] if len(shape) == 2)
    return out[0] * out[1] * 2 * matrices + 10 * math.prod(out)


def _bag(inputs: Sequence[Shape], out: Shape, op: Op) -> int:
    return math.prod(inputs[1]) * inputs[0][1]


#: Ops that do not cost one FLOP per element of their first output.
FLOPS: Final[dict[str, Count]] = {
    **dict.fromkeys((*views.OPS, "identity", "constant", "full", "arange"), _nothing),
    **dict.fromkeys((*REDUCE, "argmax", "argmin", "cumsum", "adaptive_avg_pool"), _per_input(1)),
    **dict.fromkeys(("var", "softmax", "log_softmax"), _per_input(5)),
    **dict.fromkeys(("layer_norm", "rms_norm", "batch_norm", "group_norm"), _per_input(8)),
    **dict.fromkeys(("linear", "matmul"), _product),
    **dict.fromkeys(("max_pool", "avg_pool"), _pool),
    **dict.fromkeys(("lstm", "gru", "rnn"), _recurrent),
    "conv": _conv,
    "attention": _attention,
    "embedding_bag": _bag,
}
