"""Ops of the IR -> a `Graph` of one unit.

Composite ops are written with the op table's formulas. Floats of 16 bits are computed in f32, with
a cast before and after every op, so that each op rounds once, as everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from coissue.kernels.ir import ABSENT, Op
from coissue.kernels.lowered import Layout, Lowered, Mode
from coissue.kernels.optable.base import INT_RANGE, KINDS
from coissue.kernels.passes.rewrite import integer, integers
from coissue.kernels.stitch.graph import Graph
from coissue.kernels.stitch.lowering import Lowering

#: Most multiply-adds per matrix of a product inside a stitched kernel (F18).
DOT_LIMIT: Final = 2**15


def can_lower(op: Op, mode: Mode, lowered: Lowered) -> bool:
    """Whether `op` may be in a run: PACKED, in `RULES`, and it never raises at a launch."""
    if mode is not Mode.PACKED or op.name not in RULES:
        return False
    types = lowered.program.types
    operands = [value for value in op.inputs if value != ABSENT]
    if op.name in ("remainder", "floor_div", "pow"):  # whole numbers may raise
        return types[operands[0]].dtype in KINDS["float"]
    if op.name == "matmul":
        return _is_small_product(op, lowered)
    if op.name == "index":  # places that inputs choose may be outside, which raises
        return all(lowered.layouts[value] is Layout.FIXED for value in op.inputs[1:])
    return True


def _is_small_product(op: Op, lowered: Lowered) -> bool:
    left, right = (lowered.program.types[value] for value in op.inputs)
    if any(lowered.layouts[value] is Layout.FIXED for value in op.inputs):
        return False  # a weight: the library's product over all rows
    if left.dtype not in KINDS["float"] or min(len(left.shape), len(right.shape)) < 2:
        return False
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    return m.scale * k.scale * n.scale <= DOT_LIMIT


def lower(lowered: Lowered, ops: Sequence[Op]) -> Graph:
    """The graph of a run of ops that `can_lower` and that share one unit (see `runs`).

    Its parameters and outputs have the IR value they are as `source`; outputs are the values made
    here that any other op, or the program's user, reads."""
    lowering = Lowering(lowered)
    for op in ops:
        lowering.nodes[op.outputs[0]] = RULES[op.name](lowering, op)
    made = list(dict.fromkeys(op.outputs[0] for op in ops))
    handed = handed_out(lowered, ops)
    outputs = [
        (lowering.node(value), value, lowering.shape(value)) for value in made if value in handed
    ]
    return lowering.builder.finish(outputs)


def handed_out(lowered: Lowered, ops: Sequence[Op]) -> set[int]:
    """Values read by ops other than `ops`, or outputs of the program."""
    inside = {op.outputs for op in ops}
    found = {port.value for port in lowered.program.outputs}
    for op in lowered.program.ops:
        if op.outputs not in inside:
            found.update(op.inputs)
    return found


Rule = Callable[[Lowering, Op], int]
#: A formula on nodes that are ready for arithmetic.
Formula = Callable[[Lowering, Op, int], int]


# --- element by element -------------------------------------------------------------------------


def _same(name: str) -> Rule:
    """One scalar function of operands that broadcast."""

    def rule(c: Lowering, op: Op) -> int:
        out = op.outputs[0]
        operands = [c.wide(c.spread(value, out)) for value in op.inputs]
        return c.cast(c.call(name, *operands), c.types[out].dtype)

    return rule


def _formula(formula: Formula) -> Rule:
    """A function of the first input alone."""

    def rule(c: Lowering, op: Op) -> int:
        made = formula(c, op, c.wide(c.node(op.inputs[0])))
        return c.cast(made, c.types[op.outputs[0]].dtype)

    return rule


def _number(op: Op, name: str) -> float:
    found = op.attrs[name]
    assert isinstance(found, int | float)
    return float(found)


def _silu(c: Lowering, op: Op, x: int) -> int:
    return c.call("mul", x, c.call("sigmoid", x))


def _gelu(c: Lowering, op: Op, x: int) -> int:
    if op.attrs["approximate"] == "none":
        bent = c.call("erf", c.call("mul", x, math.sqrt(0.5)))
    else:
        cube = c.call("mul", c.call("mul", x, x), x)
        inner = c.call("add", x, c.call("mul", cube, 0.044715))
        bent = c.call("tanh", c.call("mul", inner, math.sqrt(2 / math.pi)))
    return c.call("mul", c.call("mul", x, 0.5), c.call("add", bent, 1.0))


def _softplus(c: Lowering, op: Op, x: int) -> int:
    small = c.call("log1p", c.call("exp", c.call("minimum", x, 20.0)))
    return c.call("where", c.call("gt", x, 20.0), x, small)


def _mish(c: Lowering, op: Op, x: int) -> int:
    return c.call("mul", x, c.call("tanh", _softplus(c, op, x)))


def _hardsigmoid(c: Lowering, op: Op, x: int) -> int:
    lifted = c.call("maximum", c.call("add", x, 3.0), 0.0)
    return c.call("mul", c.call("minimum", lifted, 6.0), 1.0 / 6.0)


def _hardswish(c: Lowering, op: Op, x: int) -> int:
    return c.call("mul", x, _hardsigmoid(c, op, x))


def _leaky_relu(c: Lowering, op: Op, x: int) -> int:
    return c.call("where", c.call("gt", x, 0.0), x, c.call("mul", x, _number(op, "slope")))


def _elu(c: Lowering, op: Op, x: int) -> int:
    below = c.call("expm1", c.call("minimum", x, 0.0))
    return c.call("where", c.call("gt", x, 0.0), x, c.call("mul", below, _number(op, "alpha")))


def _clamp(c: Lowering, op: Op, x: int) -> int:
    for name, bound in (("maximum", op.attrs.get("min")), ("minimum", op.attrs.get("max"))):
        if isinstance(bound, int | float):
            x = c.builder.pointwise(name, x, c.builder.constant(bound, c.builder.dtype(x)))
    return x


def _relu(c: Lowering, op: Op, x: int) -> int:
    return c.builder.pointwise("maximum", x, c.builder.constant(0, c.builder.dtype(x)))


def _div(c: Lowering, op: Op) -> int:
    """Whole numbers divide as f64, rounded once."""
    out = op.outputs[0]
    a, b = (c.wide(c.spread(value, out)) for value in op.inputs)
    if c.builder.dtype(a) in INT_RANGE:
        a, b = c.cast(a, "f64"), c.cast(b, "f64")
    return c.cast(c.call("div", a, b), c.types[out].dtype)


def _where(c: Lowering, op: Op) -> int:
    return c.call("where", *(c.spread(value, op.outputs[0]) for value in op.inputs))


def _cast(c: Lowering, op: Op) -> int:
    return c.cast(c.node(op.inputs[0]), c.types[op.outputs[0]].dtype)


def _full(c: Lowering, op: Op) -> int:
    value, out = op.attrs["value"], op.outputs[0]
    assert isinstance(value, int | float)
    return c.builder.broadcast(c.builder.constant(value, c.types[out].dtype), (), c.shape(out))


# --- along dims ---------------------------------------------------------------------------------


def _reduce(c: Lowering, op: Op) -> int:
    source, out = op.inputs[0], c.types[op.outputs[0]].dtype
    x, axes = c.wide(c.node(source)), c.axes_of(source, integers(op, "dims"))
    if op.name == "mean":
        return c.cast(c.mean(x, axes), out)
    if out not in KINDS["float"]:  # sums of whole numbers in i64, any and all of bools
        x = c.cast(x, out)
    return c.cast(c.builder.reduce(op.name, x, axes), out)


def _var(c: Lowering, op: Op, x: int) -> int:
    axes = c.axes_of(op.inputs[0], integers(op, "dims"))
    centred = _centre(c, x, axes)
    return c.mean(c.call("mul", centred, centred), axes, integer(op, "correction"))


def _centre(c: Lowering, x: int, axes: Sequence[int]) -> int:
    return c.call("sub", x, _back(c, c.mean(x, axes), x, axes))


def _back(c: Lowering, reduced: int, x: int, axes: Sequence[int]) -> int:
    """A value per reduced row, as large as `x` again."""
    kept = tuple(axis for axis in range(len(c.builder.shape(x))) if axis not in axes)
    return c.builder.broadcast(reduced, kept, c.builder.shape(x))


def _softmax(c: Lowering, op: Op, x: int) -> int:
    axes = c.axes_of(op.inputs[0], (integer(op, "dim"),))
    shifted = c.call("sub", x, c.along("amax", x, axes))
    raised = c.call("exp", shifted)
    if op.name == "softmax":
        return c.call("div", raised, c.along("sum", raised, axes))
    total = c.builder.reduce("sum", raised, axes)
    return c.call("sub", shifted, _back(c, c.call("log", total), x, axes))


def _normed(c: Lowering, op: Op, x: int, axes: Sequence[int]) -> int:
    """`x` by its root mean square along `axes`."""
    power = c.mean(c.call("mul", x, x), axes)
    scale = c.call("rsqrt", c.call("add", power, _number(op, "eps")))
    return c.call("mul", x, _back(c, scale, x, axes))


def _affine(c: Lowering, op: Op, x: int, spread: Callable[[int], int]) -> int:
    """`x` times input 1 plus input 2, where they are given."""
    for name, value in zip(("mul", "add"), op.inputs[1:], strict=False):
        if value != ABSENT:
            x = c.call(name, x, c.wide(spread(value)))
    return x


def _norm(c: Lowering, op: Op, x: int) -> int:
    source, out = op.inputs[0], op.outputs[0]
    rank = len(c.types[source].shape)
    axes = c.axes_of(source, range(rank - integer(op, "axes"), rank))
    centred = _centre(c, x, axes) if op.name == "layer_norm" else x
    return _affine(c, op, _normed(c, op, centred, axes), lambda value: c.spread(value, out))


def _per_channel(c: Lowering, op: Op, x: int | None, value: int) -> int:
    """A vector over axis 1 (or `x` made of such) as large as the op's output."""
    out = op.outputs[0]
    node = c.node(value) if x is None else x
    place = c.axis(out, 1)
    return c.builder.broadcast(node, () if place is None else (place,), c.shape(out))


def _group_norm(c: Lowering, op: Op, x: int) -> int:
    source = op.inputs[0]
    whole, groups = c.shape(source), integer(op, "groups")
    rows = c.types[source].shape[0].scale
    parts = (rows, groups, math.prod(whole) // (rows * groups))
    shape = tuple(extent for extent in parts if extent != 1)
    axes = (len(shape) - 1,) if parts[2] != 1 else ()
    normed = _normed(c, op, _centre(c, c.builder.reshape(x, shape), axes), axes)
    y = c.builder.reshape(normed, whole)
    return _affine(c, op, y, lambda value: _per_channel(c, op, None, value))


def _batch_norm(c: Lowering, op: Op, x: int) -> int:
    """As x * scale + shift, with what depends on weights alone apart."""
    mean, var, *affine = op.inputs[1:]
    weight, bias = (*affine, ABSENT, ABSENT)[:2]
    scale = c.call("rsqrt", c.call("add", c.wide(c.node(var)), _number(op, "eps")))
    if weight != ABSENT:
        scale = c.call("mul", scale, c.wide(c.node(weight)))
    shift = c.call("neg", c.call("mul", c.wide(c.node(mean)), scale))
    if bias != ABSENT:
        shift = c.call("add", shift, c.wide(c.node(bias)))
    scaled = c.call("mul", x, _per_channel(c, op, scale, mean))
    return c.call("add", scaled, _per_channel(c, op, shift, mean))


# --- moves, products, reads ---------------------------------------------------------------------


def _reshape(c: Lowering, op: Op) -> int:
    return c.builder.reshape(c.node(op.inputs[0]), c.shape(op.outputs[0]))


def _expand(c: Lowering, op: Op) -> int:
    return c.spread(op.inputs[0], op.outputs[0])


def _permute(c: Lowering, op: Op) -> int:
    source, out = op.inputs[0], op.outputs[0]
    dims = integers(op, "dims")
    places = [c.axis(source, dims[d]) for d, _ in c.axes(out)]
    axes = tuple(place for place in places if place is not None)
    return c.builder.transpose(c.node(source), axes)


def _cut(c: Lowering, op: Op, start: int, step: int, length: int) -> int:
    source, dim = op.inputs[0], integer(op, "dim")
    axis, x = c.axis(source, dim), c.node(source)
    if axis is None:
        return x
    extent = c.types[source].shape[dim].scale
    first = start + extent if start < 0 else start
    return c.builder.reshape(c.builder.slice(x, axis, first, step, length), c.shape(op.outputs[0]))


def _slice(c: Lowering, op: Op) -> int:
    length = c.types[op.outputs[0]].shape[integer(op, "dim")].scale
    return _cut(c, op, integer(op, "start"), integer(op, "step"), length)


def _select(c: Lowering, op: Op) -> int:
    return _cut(c, op, integer(op, "index"), 1, 1)


def _concat(c: Lowering, op: Op) -> int:
    out, dim = op.outputs[0], integer(op, "dim")
    axis, shape = c.axis(out, dim), c.shape(out)
    if axis is None:
        return c.node(op.inputs[0])
    parts = []
    for value in op.inputs:
        extent = c.types[value].shape[dim].scale
        part = (*shape[:axis], extent, *shape[axis + 1 :])
        parts.append(c.builder.reshape(c.node(value), part))
    return c.builder.concat(parts, axis)


def _matmul(c: Lowering, op: Op) -> int:
    out = op.outputs[0]
    rank, dims = len(c.types[out].shape), c.types[out].shape
    batch = tuple((d, extent) for d, extent in c.axes(out) if d < rank - 2)
    lefts, rights = (c.types[value].shape[-2:] for value in op.inputs)
    ends = (tuple(d.scale for d in lefts), tuple(d.scale for d in rights))
    factors = [
        _as_matrices(c, value, rank, batch, end) for value, end in zip(op.inputs, ends, strict=True)
    ]
    product = c.builder.dot(*factors)
    assert c.builder.shape(product)[-2:] == (dims[-2].scale, dims[-1].scale)
    return c.cast(c.builder.reshape(product, c.shape(out)), c.types[out].dtype)


def _as_matrices(
    c: Lowering, value: int, rank: int, batch: Sequence[tuple[int, int]], end: tuple[int, ...]
) -> int:
    """A factor with all batch axes of the product and both matrix axes."""
    own = len(c.types[value].shape)
    places = {d: i for i, (d, _) in enumerate(batch)}
    kept = [d + rank - own for d, _ in c.axes(value)]
    last = {rank - 2: len(batch), rank - 1: len(batch) + (end[0] != 1)}
    shape = (*(extent for _, extent in batch), *(extent for extent in end if extent != 1))
    x = c.wide(c.node(value))
    x = c.builder.broadcast(x, tuple(places[d] if d in places else last[d] for d in kept), shape)
    return c.builder.reshape(x, (*(extent for _, extent in batch), *end))


def _embedding(c: Lowering, op: Op) -> int:
    table, index = op.inputs
    rows, size = c.types[table].shape[0].scale, c.types[table].shape[1].scale
    full = c.builder.reshape(c.node(table), (rows, size))
    return c.builder.reshape(c.builder.gather(full, c.node(index), 0), c.shape(op.outputs[0]))


def _index(c: Lowering, op: Op) -> int:
    """A lookup along the indexed dims as one."""
    source, out = op.inputs[0], op.outputs[0]
    dims, shape = integers(op, "dims"), c.types[source].shape
    rank = len(c.types[out].shape) - len(shape) + len(dims)
    picked = [(d, extent) for d, extent in c.axes(out) if 0 <= d - dims[0] < rank]
    places = []
    for value in op.inputs[1:]:
        shift = dims[0] + rank - len(c.types[value].shape)
        axes = tuple(picked.index((d + shift, extent)) for d, extent in c.axes(value))
        index = c.cast(c.node(value), "i64")
        places.append(c.builder.broadcast(index, axes, tuple(extent for _, extent in picked)))
    place = _join_places(c, places, [shape[dim].scale for dim in dims])
    before = tuple(extent for d, extent in c.axes(source) if d < dims[0])
    after = tuple(extent for d, extent in c.axes(source) if d > dims[-1])
    whole = math.prod(shape[dim].scale for dim in dims)
    table = c.builder.reshape(c.node(source), (*before, whole, *after))
    return c.builder.reshape(c.builder.gather(table, place, len(before)), c.shape(out))


def _join_places(c: Lowering, places: Sequence[int], extents: Sequence[int]) -> int:
    """One index for axes taken together; a lookup itself counts negative ones from the end."""
    if len(places) == 1:
        return places[0]
    joined = None
    for index, extent in zip(places, extents, strict=True):
        size, zero = (c.builder.constant(number, "i64") for number in (extent, 0))
        index = c.call("where", c.call("lt", index, zero), c.call("add", index, size), index)
        joined = index if joined is None else c.call("add", c.call("mul", joined, size), index)
    assert joined is not None
    return joined


_ONE_NAME: Final = """
    neg abs sign floor ceil round sigmoid tanh exp log log1p sqrt rsqrt reciprocal erf sin cos
    add sub mul pow maximum minimum remainder floor_div eq ne lt le gt ge logical_and logical_or
    logical_not
"""
_BY_FORMULA: Final[Mapping[str, Formula]] = {
    "silu": _silu, "gelu": _gelu, "softplus": _softplus, "mish": _mish, "elu": _elu,
    "hardsigmoid": _hardsigmoid, "hardswish": _hardswish, "leaky_relu": _leaky_relu,
    "clamp": _clamp, "relu": _relu, "var": _var, "softmax": _softmax, "log_softmax": _softmax,
    "layer_norm": _norm, "rms_norm": _norm, "batch_norm": _batch_norm, "group_norm": _group_norm,
}  # fmt: skip
#: Every op that can be lowered. Left out: what may raise at a launch, cumulative ops, windows.
RULES: Final[Mapping[str, Rule]] = {
    **{name: _same(name) for name in _ONE_NAME.split()},
    **{name: _formula(formula) for name, formula in _BY_FORMULA.items()},
    **dict.fromkeys(("sum", "prod", "mean", "amax", "amin", "any", "all"), _reduce),
    "identity": lambda c, op: c.node(op.inputs[0]),
    "div": _div, "where": _where, "cast": _cast, "full": _full, "reshape": _reshape,
    "expand": _expand, "permute": _permute, "slice": _slice, "select": _select,
    "concat": _concat, "matmul": _matmul, "embedding": _embedding, "index": _index,
}  # fmt: skip
#: Ops that only say where elements are: free as long as nothing is computed with them.
VIEWS: Final = frozenset({"identity", "reshape", "expand", "permute", "slice", "select"})
