"""The row-axis proof: how each value is kept and how each op is run.

NOTE the one idea: a value's layout follows from its type alone, and an op is PACKED only if
running it once on the packed tensors gives, for every segment, what it gives on that segment's part
alone. That is a local fact of one op, so it is proved op by op by the rules below, and what no rule
proves is run EACH: per request, on that request's part. So nothing can leak between requests:
statistics over the rows, the row's number or the row count are computed where only one request's
rows are in sight, and `index` with `arange(rows)` is as harmless there as any other op.

`lead` is the number of leading axes that packing flattens: 1 for (k*R, ...) and (k*R*T, ...), 2
for (R, T, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from coissue.kernels.ir import ABSENT, Dim, Op, Program, R, T, Type
from coissue.kernels.lowered import Layout, Mode
from coissue.kernels.optable.pointwise import BINARY, UNARY
from coissue.kernels.optable.reductions import REDUCE
from coissue.kernels.passes.rewrite import integer, integers, is_fixed_op


def lead(type_: Type) -> int:
    """The number of axes that packing flattens into one; 0 if the type cannot be packed."""
    shape = type_.shape
    for count in (1, 2):
        if len(shape) < count or not all(dim.is_fixed for dim in shape[count:]):
            continue
        if count == 2:
            return 2 if shape[:2] == (R, T) else 0
        return 1 if (shape[0].rows, shape[0].tokens) in ((1, 0), (1, 1)) else 0
    return 0


def layout_of(type_: Type) -> Layout:
    """The layout of a value of `type_` that is not FIXED."""
    count = lead(type_)
    if not count:
        return Layout.EACH
    return Layout.TOKENS if count == 2 or type_.shape[0].tokens else Layout.ROWS


def prove(program: Program) -> tuple[tuple[Layout, ...], tuple[Mode, ...]]:
    """The layout of every value and the mode of every op."""
    layouts = [layout_of(type_) for type_ in program.types]
    fixed = {weight.value for weight in program.weights}
    modes = []
    for op in program.ops:
        if is_fixed_op(op, program.types, fixed):
            fixed.update(op.outputs)
            modes.append(Mode.ONCE)
        else:
            modes.append(Proof(op, program.types, fixed).mode())
    for value in fixed:
        layouts[value] = Layout.FIXED
    return tuple(layouts), tuple(modes)


def is_splittable(
    steps: Sequence[tuple[Op, Mode]],
    crossing: Iterable[int],
    types: Sequence[Type],
    layouts: Sequence[Layout],
) -> bool:
    """Whether these ops may run on some rows of a request before its others.

    PACKED and SEGMENTS ops keep rows apart by what was proved. An op run EACH does so if nothing
    with rows goes into it and what comes out has none, or the same for every row. `crossing`: the
    values handed over from and to other kernels, which are cut by rows unless they have none.
    """

    def is_rowless(value: int) -> bool:
        return value == ABSENT or not any(dim.rows for dim in types[value].shape)

    for op, mode in steps:
        if mode is Mode.EACH:
            made = op.name == "expand" or all(map(is_rowless, op.outputs))
            if not (made and all(map(is_rowless, op.inputs))):
                return False
    return all(layouts[v] is not Layout.EACH or is_rowless(v) for v in crossing)


class Proof:
    """The proof for one op that is not FIXED."""

    __slots__ = ("fixed", "inputs", "lead", "op", "out", "types")

    def __init__(self, op: Op, types: tuple[Type, ...], fixed: set[int]) -> None:
        self.op = op
        self.types = types
        self.fixed = fixed
        #: The inputs that are given.
        self.inputs = tuple(value for value in op.inputs if value != ABSENT)
        self.out = types[op.outputs[0]]
        #: Of the first input that is not FIXED; of the output if there is none.
        packed = [types[value] for value in self.inputs if value not in fixed]
        self.lead = lead(packed[0] if packed else self.out)

    def mode(self) -> Mode:
        rule = RULES.get(self.op.name)
        return rule(self) if rule is not None and self.lead else Mode.EACH

    def packed_if(self, holds: bool) -> Mode:
        return Mode.PACKED if holds else Mode.EACH

    def shape(self, index: int) -> tuple[Dim, ...]:
        return self.types[self.op.inputs[index]].shape

    def is_fixed(self, *indices: int) -> bool:
        """Whether these inputs are FIXED or not given."""
        given = [self.op.inputs[i] for i in indices if i < len(self.op.inputs)]
        return all(value == ABSENT or value in self.fixed for value in given)

    def leads(self) -> tuple[Dim, ...]:
        """The packed axes of the output."""
        return self.out.shape[: lead(self.out)]

    def aligned(self, value: int, rank: int, spread: bool = True) -> bool:
        """Whether `value`, broadcast to `rank` axes, meets the packed axes in the right way:
        it has the same ones, or it is FIXED (whose axes there can only be 1) and `spread`."""
        shape = self.types[value].shape
        if value in self.fixed:
            return spread
        return len(shape) == rank and shape[: self.lead] == self.leads()

    def of_first(self, count: int) -> Proof:
        """This proof as if the op had only its first inputs."""
        op = Op(self.op.name, self.op.inputs[:count], self.op.outputs, self.op.attrs)
        return Proof(op, self.types, self.fixed)

    def keeps_lead(self) -> bool:
        return self.shape(0)[: self.lead] == self.leads()


def _pointwise(proof: Proof) -> Mode:
    rank = len(proof.out.shape)
    if lead(proof.out) != proof.lead:
        return Mode.EACH
    return proof.packed_if(all(proof.aligned(value, rank) for value in proof.inputs))


def _expand(proof: Proof) -> Mode:
    old, new = proof.shape(0), proof.out.shape
    if lead(proof.out) == 2 and len(old) == len(new) and old[:2] == (R, Dim(1)):
        return Mode.SEGMENTS
    return _pointwise(proof)


def _along(*names: str) -> Callable[[Proof], Mode]:
    """Ops that look along the axes in these attributes: none of them may be a packed one."""

    def rule(proof: Proof) -> Mode:
        dims: tuple[int, ...] = ()
        for name in names:
            dims += integers(proof.op, name) if name == "dims" else (integer(proof.op, name),)
        return proof.packed_if(min(dims) >= proof.lead and _all_packed(proof))

    return rule


def _all_packed(proof: Proof) -> bool:
    """Whether every input has the packed axes of the output."""
    leads = (lead(proof.types[value]) for value in (*proof.inputs, proof.op.outputs[0]))
    return all(count == proof.lead for count in leads) and all(
        proof.aligned(value, len(proof.types[value].shape), spread=False) for value in proof.inputs
    )


def _reduce(proof: Proof) -> Mode:
    """Over the tokens of each row, or along axes that are not packed."""
    if proof.lead == 2 and integers(proof.op, "dims") == (1,) and proof.op.name in RAGGED:
        return Mode.SEGMENTS
    return _along("dims")(proof)


def _select(proof: Proof) -> Mode:
    """The first and the last token exist in every request; others might not."""
    dim, index = integer(proof.op, "dim"), integer(proof.op, "index")
    if proof.lead == 2 and dim == 1 and index in (0, -1):
        return Mode.SEGMENTS
    return _along("dim")(proof)


def _norm(proof: Proof) -> Mode:
    axes = integer(proof.op, "axes")
    return proof.packed_if(
        proof.is_fixed(1, 2) and len(proof.shape(0)) - axes >= proof.lead and proof.keeps_lead()
    )


def _channels(proof: Proof) -> Mode:
    """Ops along axis 1 and the later ones, with FIXED data beside x."""
    others = range(1, len(proof.op.inputs))
    return proof.packed_if(proof.lead == 1 and proof.is_fixed(*others) and proof.keeps_lead())


def _linear(proof: Proof) -> Mode:
    return proof.packed_if(proof.is_fixed(1, 2) and len(proof.shape(0)) > proof.lead)


def _matmul(proof: Proof) -> Mode:
    """Each matrix is FIXED or lies whole behind the packed axes; batch axes as in `_pointwise`."""
    rank = len(proof.out.shape)
    left, right = proof.op.inputs
    if len(proof.shape(0)) < 2 or len(proof.shape(1)) < 2:
        return Mode.EACH
    if len(proof.shape(1)) == 2 and proof.is_fixed(1):
        return proof.packed_if(len(proof.shape(0)) > proof.lead)
    return proof.packed_if(proof.aligned(left, rank) and proof.aligned(right, rank))


def _windows(proof: Proof) -> Mode:
    """Windows over the last axes, which are 1 or 2 by the length of the attributes."""
    dims = len(integers(proof.op, "size" if "size" in proof.op.attrs else "kernel"))
    return proof.packed_if(proof.lead == 1 < len(proof.shape(0)) - dims and proof.keeps_lead())


def _pad(proof: Proof) -> Mode:
    axes = len(integers(proof.op, "pads")) // 2
    return proof.packed_if(len(proof.shape(0)) - axes >= proof.lead)


def _reshape(proof: Proof) -> Mode:
    """Row-major order is that of the packed tensor, so any reshape that stays packed is free."""
    return proof.packed_if(layout_of(proof.types[proof.op.inputs[0]]) == layout_of(proof.out))


def _permute(proof: Proof) -> Mode:
    first = tuple(range(proof.lead))
    return proof.packed_if(integers(proof.op, "dims")[: proof.lead] == first)


def _index(proof: Proof) -> Mode:
    """FIXED places behind the packed axes, or packed places in a FIXED table."""
    if proof.is_fixed(*range(1, len(proof.op.inputs))):
        return _along("dims")(proof.of_first(1))
    table = proof.is_fixed(0) and integers(proof.op, "dims") == (0,)
    return proof.packed_if(table and lead(proof.out) == proof.lead)


def _embedding(proof: Proof) -> Mode:
    return proof.packed_if(proof.is_fixed(0))


def _embedding_bag(proof: Proof) -> Mode:
    if not proof.is_fixed(0):
        return Mode.EACH
    if proof.lead == 2 and len(proof.shape(1)) == 2:
        return Mode.SEGMENTS
    return proof.packed_if(len(proof.shape(1)) > proof.lead)


def _attention(proof: Proof) -> Mode:
    """Ragged over (R, T, heads, size); or fixed lengths, where a row is a batch entry."""
    kind, mask = proof.op.attrs["mask"], proof.inputs[3:]
    if not _all_packed(proof.of_first(3)):
        return Mode.EACH
    if proof.lead == 2:
        ragged = kind != "full" and proof.op.attrs["layout"] == "bshd"
        return Mode.SEGMENTS if ragged else Mode.EACH
    return proof.packed_if(kind != "full" or proof.aligned(mask[0], 4))


def _recurrent(proof: Proof) -> Mode:
    ready = proof.is_fixed(*range(1, len(proof.op.inputs))) and proof.shape(0)[0] == R
    return Mode.SEGMENTS if ready else Mode.EACH


#: Reductions with a ragged form over the tokens of each row.
RAGGED: Final = frozenset({"sum", "mean", "amax", "amin"})
#: Ops that work element by element, with numpy's broadcasting.
POINTWISE: Final = frozenset((*UNARY, *BINARY, "logical_not", "cast", "clamp", "where"))
RULES: Final[dict[str, Callable[[Proof], Mode]]] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys((*REDUCE, "var"), _reduce),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "argmax", "argmin"), _along("dim")),
    **dict.fromkeys(("concat", "slice", "gather"), _along("dim")),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("batch_norm", "group_norm", "conv"), _channels),
    **dict.fromkeys(("max_pool", "avg_pool", "adaptive_avg_pool"), _windows),
    **dict.fromkeys(("lstm", "gru", "rnn"), _recurrent),
    "expand": _expand, "full": lambda proof: Mode.PACKED, "flip": _along("dims"), "select": _select,
    "linear": _linear, "matmul": _matmul, "pad": _pad, "reshape": _reshape, "permute": _permute,
    "index": _index, "embedding": _embedding, "embedding_bag": _embedding_bag,
    "attention": _attention,
}  # fmt: skip
