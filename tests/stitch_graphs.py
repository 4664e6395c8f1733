"""Random graphs of all kinds for hypothesis, and the ways to make kernels of a graph by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from stitch_reference import Builder

from coissue.kernels.interpreter import store
from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.plan import Buffer, Home, Schedule, StitchedKernel

FLOATS = ("f16", "bf16", "f32", "f64")
INTS = ("u8", "i8", "i16", "i32", "i64")
EXTENTS = st.sampled_from((1, 1, 2, 3, 5, 7, 17))
SIZE_MAX = 700
#: Keep an exact value exact; no rounding can turn what they give.
EXACT_UNARY = ("neg", "abs", "relu", "identity")
SMOOTH_UNARY = ("tanh", "sigmoid", "erf", "silu", "hardswish", "softplus", "gelu", "exp", "sin")
STEPS = ("floor", "ceil", "round", "sign")
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or")


class _Drawn(Builder):
    """`exact` nodes hold numbers that every rounding keeps, so comparing them is safe."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.draw = draw
        self.exact: set[int] = set()

    def pick(self, *dtypes, exact=False, rank=0) -> int | None:
        found = [
            i
            for i, n in enumerate(self.nodes)
            if n.dtype in (dtypes or (*FLOATS, *INTS, "bool"))
            and (i in self.exact or not exact)
            and len(n.shape) >= rank
            and n.kind is not Kind.CONSTANT
        ]
        return self.draw(st.sampled_from(found)) if found else None

    def like(self, index: int, exact=False) -> int | None:
        """Another node of the same type, or a constant."""
        node = self.nodes[index]
        found = [
            i
            for i, n in enumerate(self.nodes)
            if (n.shape, n.dtype) == (node.shape, node.dtype) and (i in self.exact or not exact)
        ]
        found = [i for i in found if self.nodes[i].kind is not Kind.CONSTANT]
        if self.draw(st.integers(0, 3)) == 0:
            self.exact.add(self.constant(self.value(node.dtype), node.dtype))
            return len(self.nodes) - 1
        return self.draw(st.sampled_from(found))

    def value(self, dtype: str):
        if dtype == "bool":
            return self.draw(st.booleans())
        return self.draw(st.sampled_from((1, 2, 3)))


def _step(b: _Drawn) -> None:
    """Adds one node, or none if what was drawn does not fit."""
    kind = b.draw(st.sampled_from(sorted(_STEPS)))
    before = len(b.nodes)
    _STEPS[kind](b)
    if len(b.nodes) > before and b.nodes[-1].size > SIZE_MAX:
        b.exact -= set(range(before, len(b.nodes)))
        del b.nodes[before:]


def _unary(b: _Drawn) -> None:
    x = b.pick(*FLOATS)
    if x is None:
        return
    if b.draw(st.booleans()):
        made = b.call(b.draw(st.sampled_from(EXACT_UNARY)), x)
        if x in b.exact:
            b.exact.add(made)
    else:
        # Bounded first: nothing may grow without end.
        b.call(b.draw(st.sampled_from(SMOOTH_UNARY)), b.call("tanh", x))


def _stepped(b: _Drawn) -> None:
    x = b.pick(*FLOATS, *INTS, exact=True)
    if x is not None:
        b.exact.add(b.call(b.draw(st.sampled_from(STEPS)), x))


def _binary(b: _Drawn) -> None:
    x = b.pick()
    if x is None:
        return
    other = b.like(x)
    dtype = b.nodes[x].dtype
    names = ("maximum", "minimum", "mul", "add") + (() if dtype == "bool" else ("sub",))
    name = b.draw(st.sampled_from(names))
    made = b.call(name, x, other)
    if dtype not in FLOATS or (x in b.exact and other in b.exact and "imum" in name):
        b.exact.add(made)


def _compare(b: _Drawn) -> None:
    x = b.pick(exact=True)
    if x is not None:
        other = b.like(x, exact=True)
        name = b.draw(st.sampled_from(COMPARE))
        b.exact.add(b.call(name, x, other, dtype="bool"))


def _where(b: _Drawn) -> None:
    condition = b.pick("bool")
    if condition is None:
        return
    shape = b.nodes[condition].shape
    same = [i for i, n in enumerate(b.nodes) if n.shape == shape and n.kind is not Kind.CONSTANT]
    x = b.draw(st.sampled_from(same))
    b.call("where", condition, x, b.like(x), dtype=b.nodes[x].dtype)


def _cast(b: _Drawn) -> None:
    x = b.pick()
    if x is None:
        return
    wanted = FLOATS if x not in b.exact else (*FLOATS, *INTS, "bool")
    made = b.call("cast", x, dtype=b.draw(st.sampled_from(wanted)))
    if x in b.exact and b.nodes[made].dtype not in ("f16", "bf16", "u8", "i8"):
        b.exact.add(made)


def _divide(b: _Drawn) -> None:
    x = b.pick(*INTS)
    if x is not None:
        by = b.constant(b.draw(st.sampled_from((1, 2, 3, 5))), b.nodes[x].dtype)
        b.exact.add(b.call(b.draw(st.sampled_from(("floor_div", "remainder"))), x, by))


def _reduce(b: _Drawn) -> None:
    x = b.pick(rank=1)
    if x is None:
        return
    node = b.nodes[x]
    rank = range(len(node.shape))
    axes = tuple(a for a in rank if b.draw(st.booleans())) or (b.draw(st.sampled_from(rank)),)
    name = b.draw(st.sampled_from(("sum", "amax", "amin", "any", "all", "sum")))
    if name in ("any", "all") and x not in b.exact:
        return
    dtype = {"any": "bool", "all": "bool"}.get(name, node.dtype)
    if name == "sum" and node.dtype not in FLOATS:
        dtype = "i64"
    made = b.reduce(name, x, *axes, dtype=dtype)
    if dtype not in FLOATS or (x in b.exact and name != "sum"):
        b.exact.add(made)


def _moved(b: _Drawn, x: int, made: int) -> None:
    if x in b.exact:
        b.exact.add(made)


def _broadcast(b: _Drawn) -> None:
    x = b.pick()
    if x is None or len(b.nodes[x].shape) > 3:
        return
    shape, axes = list(b.nodes[x].shape), list(range(len(b.nodes[x].shape)))
    for place, extent in enumerate(shape):
        if extent == 1 and b.draw(st.booleans()):
            shape[place] = b.draw(EXTENTS)
    at = b.draw(st.integers(0, len(shape)))
    shape.insert(at, b.draw(EXTENTS))
    axes = [a + (a >= at) for a in axes]
    _moved(b, x, b.broadcast(x, shape, axes))


def _reshape(b: _Drawn) -> None:
    x = b.pick(rank=1)
    if x is None:
        return
    left, shape = b.nodes[x].size, []
    while left > 1 and len(shape) < 3:
        factors = [d for d in range(1, left + 1) if left % d == 0]
        shape.append(b.draw(st.sampled_from(factors)))
        left //= shape[-1]
    _moved(b, x, b.reshape(x, *shape, left))


def _transpose(b: _Drawn) -> None:
    x = b.pick(rank=2)
    if x is not None:
        axes = b.draw(st.permutations(range(len(b.nodes[x].shape))))
        _moved(b, x, b.transpose(x, *axes))


def _slice(b: _Drawn) -> None:
    x = b.pick(rank=1)
    if x is None:
        return
    axis = b.draw(st.integers(0, len(b.nodes[x].shape) - 1))
    extent = b.nodes[x].shape[axis]
    start, step = b.draw(st.integers(0, extent - 1)), b.draw(st.integers(1, 3))
    most = 1 + (extent - 1 - start) // step
    _moved(b, x, b.slice(x, axis, start, step, b.draw(st.integers(1, most))))


def _concat(b: _Drawn) -> None:
    x = b.pick(rank=1)
    if x is None:
        return
    axis = b.draw(st.integers(0, len(b.nodes[x].shape) - 1))

    def rest(node: Node):
        return node.dtype, node.shape[:axis], node.shape[axis + 1 :], len(node.shape)

    mine = rest(b.nodes[x])
    fit = [i for i, n in enumerate(b.nodes) if n.kind is not Kind.CONSTANT and rest(n) == mine]
    others = b.draw(st.lists(st.sampled_from(fit), min_size=1, max_size=2))
    made = b.concat(axis, x, *others)
    if all(i in b.exact for i in (x, *others)):
        b.exact.add(made)


def _dot(b: _Drawn) -> None:
    x = b.pick(*FLOATS, rank=2)
    if x is None:
        return
    *batch, _, k = b.nodes[x].shape
    right = b.parameter(*batch, k, b.draw(EXTENTS), dtype=b.nodes[x].dtype)
    b.dot(b.call("tanh", x), right)


def _gather(b: _Drawn) -> None:
    picks = b.pick("i32", "i64")
    if picks is None:
        return
    shape = [b.draw(EXTENTS) for _ in range(b.draw(st.integers(1, 2)))]
    table = b.parameter(*shape, dtype=b.draw(st.sampled_from(("f32", "bf16"))), per_unit=False)
    b.exact |= {table, b.gather(table, picks, b.draw(st.integers(0, len(shape) - 1)))}


_STEPS = {
    "unary": _unary, "step": _stepped, "binary": _binary, "compare": _compare, "where": _where,
    "cast": _cast, "divide": _divide, "reduce": _reduce, "reduce2": _reduce,
    "broadcast": _broadcast, "broadcast2": _broadcast, "reshape": _reshape,
    "transpose": _transpose, "slice": _slice, "concat": _concat, "dot": _dot, "gather": _gather,
}  # fmt: skip


@st.composite
def graphs(draw, steps: int = 12) -> Graph:
    b = _Drawn(draw)
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from((*FLOATS, "f32", "f32", "i32", *INTS, "bool")))
        shape = [draw(EXTENTS) for _ in range(draw(st.integers(0, 3)))]
        b.exact.add(b.parameter(*shape, dtype=dtype, per_unit=draw(st.integers(0, 3)) > 0))
    for _ in range(draw(st.integers(2, steps))):
        _step(b)
    if all(n.kind in (Kind.PARAMETER, Kind.CONSTANT) for n in b.nodes):
        b.call("identity", 0)
    read = {operand for node in b.nodes for operand in node.operands}
    makes = [i for i, n in enumerate(b.nodes) if n.kind not in (Kind.PARAMETER, Kind.CONSTANT)]
    ends = [i for i in makes if i not in read]
    extra = draw(st.lists(st.sampled_from(makes), max_size=2))
    return b.graph(*sorted({*ends, *extra}))


def random_values(graph: Graph, units: int, seed: int) -> dict[int, np.ndarray]:
    """For every parameter: quarters between -2 and 2, small whole numbers."""
    rng = np.random.default_rng(seed)
    found = {}
    for index, node in enumerate(graph.nodes):
        if node.kind is Kind.PARAMETER:
            shape = ((units,) if node.per_unit else ()) + node.shape
            numbers = rng.integers(0 if node.dtype == "u8" else -8, 9, shape)
            if node.dtype == "bool":
                numbers = numbers > 2
            found[index] = store(numbers / 4 if node.dtype in FLOATS else numbers, node.dtype)
    return found


def share_buffers(graph: Graph, kernel: StitchedKernel) -> StitchedKernel:
    """The same kernel with buffers used again once nobody reads what they hold (F16)."""
    reads = {index: _reads(graph, kernel, index) for index in kernel.nodes}
    last = {m: max((n for n in reads if m in reads[n]), default=m) for m in kernel.buffers}
    free: list[list[int]] = []  # [free after node, offset, bytes]
    buffers, end = {}, 0
    for index in sorted(kernel.buffers):
        elements = kernel.buffers[index].elements
        size = elements * DTYPE_BYTES[graph.nodes[index].dtype]
        place = next((f for f in free if f[0] < index and f[2] >= size), None)
        if place is None:
            place = [0, end, -(-size // 16) * 16]
            free.append(place)
            end += place[2]
        place[0] = last[index]
        buffers[index] = Buffer(place[1], elements)
    return replace(kernel, buffers=buffers, shared_bytes=end)


def _reads(graph: Graph, kernel: StitchedKernel, index: int) -> set[int]:
    """The nodes in memory that the loop of a node reads."""
    found: set[int] = set()
    for operand in graph.nodes[index].operands:
        home = kernel.homes.get(operand)
        found |= _reads(graph, kernel, operand) if home is Home.INLINE else {operand}
    return found if kernel.homes[index] is not Home.INLINE else set()


def lift(graph: Graph, kernel: StitchedKernel, rows: int) -> tuple[Graph, StitchedKernel]:
    """`rows` units as one unit of `rows` blocks: a new first axis, split in single rows.

    What is the same for all units stays outside of the grid: every block makes it whole."""
    nodes: list[Node] = []
    place: dict[int, int] = {}

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    for index, node in enumerate(graph.nodes):
        operands = [place[o] for o in node.operands]
        if not node.per_unit:
            place[index] = add(replace(node, operands=tuple(operands)))
            continue
        axes, shape = node.axes, (rows, *node.shape)
        if node.kind in (Kind.REDUCE, Kind.BROADCAST, Kind.TRANSPOSE):
            axes = tuple(a + 1 for a in axes)
        if node.kind is Kind.TRANSPOSE:
            axes = (0, *axes)
        if node.kind in (Kind.SLICE, Kind.CONCAT):
            axes = (axes[0] + 1, *axes[1:])
        if node.kind is Kind.BROADCAST:
            axes = (0, *axes)
        for slot, operand in enumerate(operands):
            had = nodes[operand]
            constant = had.kind is Kind.CONSTANT and node.kind is Kind.POINTWISE
            if had.per_unit and had.shape[1:] == () and node.kind is Kind.POINTWISE:
                operands[slot] = add(_spread(operand, had, shape, (0,)))
            elif not had.per_unit and node.kind is not Kind.GATHER and not constant:
                inner = range(1, 1 + len(had.shape))
                operands[slot] = add(_spread(operand, had, (rows, *had.shape), inner))
        assert node.kind is not Kind.GATHER, "the picked axes would have to stay first"
        place[index] = add(replace(node, operands=tuple(operands), shape=shape, axes=axes))
    lifted = Graph(tuple(nodes), tuple(place[o] for o in graph.outputs))
    back = {new: old for old, new in place.items()}
    return lifted, _lifted_kernel(lifted, kernel, back, place, rows)


def _spread(operand: int, had: Node, shape, axes) -> Node:
    return Node(Kind.BROADCAST, "", (operand,), tuple(shape), had.dtype, tuple(axes))


def _lifted_kernel(graph: Graph, kernel: StitchedKernel, back, place, rows: int) -> StitchedKernel:
    made = [i for i, n in enumerate(graph.nodes) if n.kind not in (Kind.PARAMETER, Kind.CONSTANT)]
    inputs = tuple(place[i] for i in kernel.inputs)

    def schedule(index: int) -> Schedule:
        return Schedule(0, rows) if graph.nodes[index].per_unit else Schedule(0, 1)

    return replace(
        kernel, nodes=tuple(made), roots=graph.outputs, inputs=inputs, outputs=graph.outputs,
        blocks=rows, schedules={i: schedule(i) for i in (*made, *inputs)},
        homes={i: kernel.homes[back[i]] if i in back else Home.INLINE for i in made},
        buffers={place[i]: buffer for i, buffer in kernel.buffers.items()},
        rows={place[i]: how for i, how in kernel.rows.items()},
    )  # fmt: skip
