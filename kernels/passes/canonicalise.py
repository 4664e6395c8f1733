"""One form for what can be written in many: fewer ops, and forms that the row-axis proof can use.

- ops that do nothing go; reshapes and permutes that follow one another become one;
- attention between transposes becomes attention in layout "bshd", so that all stays TOKENS;
- an operand that lacks the packed axes of an elementwise op (positions (1, T, H), row values (R, 1,
  H)) is expanded before it, and an expand of an embedding becomes an embedding of expanded
  indices, so that only `expand` crosses layouts, and as early and as narrow as it can;
- the last layer's last state of a recurrence is read from its y;
- GELU written out as arithmetic becomes `gelu`; zero pads become the padding of convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from coissue.kernels.ir import Dim, Op, Program, Type
from coissue.kernels.passes.layouts import POINTWISE, lead
from coissue.kernels.passes.rewrite import Graph, Rule, integer, integers, rewrite

#: (R, T, heads, size) <-> (R, heads, T, size).
SWAP_HEADS: Final = (0, 2, 1, 3)


def canonicalise(program: Program) -> Program:
    """`program` in canonical form; same inputs, outputs and meaning."""
    return rewrite(program, _rule)


def _rule(graph: Graph, op: Op) -> int | None:
    if op.name in NO_OPS and graph.types[op.inputs[0]] == graph.types[op.outputs[0]]:
        return op.inputs[0] if NO_OPS[op.name](op) else None
    for rule in RULES.get(op.name, ()):
        value = rule(graph, op)
        if value is not None:
            return value
    if op.name in POINTWISE and len(op.inputs) > 1:
        return _spread_operands(graph, op)
    return None


#: Ops that do nothing if their output has the input's type, under this condition.
NO_OPS: Final[dict[str, Callable[[Op], bool]]] = {
    "identity": lambda op: True,
    "cast": lambda op: True,
    "reshape": lambda op: True,
    "expand": lambda op: True,
    "slice": lambda op: True,
    "permute": lambda op: list(integers(op, "dims")) == sorted(integers(op, "dims")),
}


def _merge_reshapes(graph: Graph, op: Op) -> int | None:
    before = graph.maker(op.inputs[0], "reshape")
    if before is None:
        return None
    if graph.types[before.inputs[0]] == graph.types[op.outputs[0]]:
        return before.inputs[0]
    return graph.emit("reshape", before.inputs, graph.types[op.outputs[0]])


def _merge_permutes(graph: Graph, op: Op) -> int | None:
    before = graph.maker(op.inputs[0], "permute")
    if before is None:
        return None
    first = integers(before, "dims")
    dims = tuple(first[dim] for dim in integers(op, "dims"))
    if list(dims) == sorted(dims):
        return before.inputs[0]
    return graph.emit("permute", before.inputs, graph.types[op.outputs[0]], dims=dims)


def _attention_by_tokens(graph: Graph, op: Op) -> int | None:
    makers = [graph.maker(value, "permute") for value in op.inputs[:3]]
    swapped = [m.inputs[0] for m in makers if m is not None and m.attrs["dims"] == SWAP_HEADS]
    if op.attrs["layout"] != "bhsd" or len(swapped) < 3:
        return None
    out = graph.types[op.outputs[0]]
    by_tokens = Type(tuple(out.shape[axis] for axis in SWAP_HEADS), out.dtype)
    attrs = {**op.attrs, "layout": "bshd"}
    value = graph.emit("attention", (*swapped, *op.inputs[3:]), by_tokens, **attrs)
    return graph.emit("permute", (value,), out, dims=SWAP_HEADS)


def _add_nothing(graph: Graph, op: Op) -> int | None:
    """Integers only: with floats, -0.0 + 0 is 0."""
    out = graph.types[op.outputs[0]]
    same = out.dtype == "i64" and graph.types[op.inputs[0]] == out
    return op.inputs[0] if same and graph.scalar(op.inputs[1]) == 0 else None


def _first_token(graph: Graph, op: Op) -> int | None:
    """x[:, 0:1] is a select, which has a ragged form."""
    out = graph.types[op.outputs[0]]
    index = integer(op, "start")
    if lead(graph.types[op.inputs[0]]) < 2 or out.shape[1] != Dim(1) or index not in (0, -1):
        return None
    picked = Type((out.shape[0], *out.shape[2:]), out.dtype)
    value = graph.emit("select", op.inputs, picked, dim=1, index=index)
    return graph.emit("reshape", (value,), out)


def _short_pad(graph: Graph, op: Op) -> int | None:
    """Zero pads of leading dims are left out."""
    pads = integers(op, "pads")
    kept = pads
    while kept and kept[-2:] == (0, 0):
        kept = kept[:-2]
    if kept == pads != ():
        return None
    out, value = graph.types[op.outputs[0]], op.attrs["value"]
    return graph.emit("pad", op.inputs, out, pads=kept, value=value) if kept else op.inputs[0]


def _padded_conv(graph: Graph, op: Op) -> int | None:
    """An even zero pad before a convolution becomes its padding."""
    pad = graph.maker(op.inputs[0], "pad")
    if pad is None or pad.attrs["value"] != 0:
        return None
    pads, padding = integers(pad, "pads"), integers(op, "padding")
    before = pads[::2][::-1]
    if before != pads[1::2][::-1] or min(pads) < 0 or len(before) > len(padding):
        return None
    more = (0,) * (len(padding) - len(before)) + before
    attrs = op.attrs | {"padding": tuple(a + b for a, b in zip(padding, more, strict=True))}
    inputs = (pad.inputs[0], *op.inputs[1:])
    return graph.emit("conv", inputs, graph.types[op.outputs[0]], **attrs)


# --- packed axes of operands ----------------------------------------------------------------------


def _spread_operands(graph: Graph, op: Op) -> int | None:
    out = graph.types[op.outputs[0]]
    axes, rank = lead(out), len(out.shape)
    if not axes:
        return None
    inputs = []
    for value in op.inputs:
        shape = graph.types[value].shape
        own = (Dim(1),) * (rank - len(shape)) + shape
        target = out.shape[:axes] + own[axes:]
        inputs.append(value if value in graph.fixed else _spread(graph, value, target))
    if tuple(inputs) == op.inputs:
        return None
    return graph.emit(op.name, inputs, out, **op.attrs)


def _spread(graph: Graph, value: int, shape: tuple[Dim, ...]) -> int:
    """`value` expanded to `shape`, by expanding what it was looked up with if that is known."""
    type_ = graph.types[value]
    if type_.shape == shape:
        return value
    lookup = graph.maker(value, "embedding")
    if lookup is not None and lookup.inputs[0] in graph.fixed and type_.shape[-1] == shape[-1]:
        table, index = lookup.inputs
        index = _spread(graph, index, shape[:-1])
        return graph.emit("embedding", (table, index), Type(shape, type_.dtype))
    source = graph.maker(value, "reshape") or graph.maker(value, "expand")
    if source is not None:
        inner = graph.types[source.inputs[0]].shape
        units = (Dim(1),) * (len(type_.shape) - len(inner))
        if source.name == "expand" or type_.shape == units + inner:
            return _spread(graph, source.inputs[0], shape)
    return graph.emit("expand", (value,), Type(shape, type_.dtype))


def _expand_early(graph: Graph, op: Op) -> int | None:
    out = graph.types[op.outputs[0]]
    if op.inputs[0] in graph.fixed or not lead(out):
        return None
    return _spread(graph, op.inputs[0], out.shape)


# --- recurrences ----------------------------------------------------------------------------------


def _last_state(graph: Graph, op: Op) -> int | None:
    """h_n[k] of the last layer is y at the last token (backwards: at the first)."""
    cell = graph.makers.get(op.inputs[0])
    if cell is None or cell.name not in ("lstm", "gru", "rnn") or op.inputs[0] != cell.outputs[1]:
        return None
    directions = 2 if cell.attrs["bidirectional"] else 1
    cells, rows, hidden = graph.types[op.inputs[0]].shape
    out = graph.types[op.outputs[0]]
    if out.shape != (rows, hidden) or (op.name == "select" and integer(op, "dim") != 0):
        return None
    index = integer(op, "index") % cells.scale if op.name == "select" else 0
    direction = index - (cells.scale - directions)
    if direction < 0:
        return None
    wide = Type((rows, Dim(directions * hidden.scale)), out.dtype)
    token = 0 if direction else -1
    value = graph.emit("select", cell.outputs[:1], wide, dim=1, index=token)
    if directions == 1:
        return value
    start, stop = direction * hidden.scale, (direction + 1) * hidden.scale
    return graph.emit("slice", (value,), out, dim=1, start=start, stop=stop, step=1)


# --- GELU -----------------------------------------------------------------------------------------


def _gelu(graph: Graph, op: Op) -> int | None:
    scale, factors = _product(graph, op.inputs)
    if len(factors) != 2 or not math.isclose(scale, 0.5):
        return None
    for x, gate in (factors, factors[::-1]):
        form = _gate_form(graph, x, gate)
        if form is not None and graph.types[x] == graph.types[op.outputs[0]]:
            return graph.emit("gelu", (x,), graph.types[x], approximate=form)
    return None


def _gate_form(graph: Graph, x: int, gate: int) -> str | None:
    """Which GELU has `gate` = 1 + tanh(...) or 1 + erf(...) of x."""
    inner = _other_addend(graph, gate, lambda value: graph.scalar(value) == 1)
    if inner is None:
        return None
    op = graph.makers.get(inner)
    if op is None or op.name not in ("tanh", "erf"):
        return None
    scale, factors = _product(graph, op.inputs)
    if op.name == "erf":
        is_erf = factors == [x] and math.isclose(scale, math.sqrt(0.5), rel_tol=1e-6)
        return "none" if is_erf else None
    cube = _other_addend(graph, factors[0], lambda value: value == x) if factors else None
    if cube is None or not math.isclose(scale, math.sqrt(2 / math.pi), rel_tol=1e-6):
        return None
    scale, factors = _product(graph, (cube,))
    power = graph.maker(factors[0], "pow") if len(factors) == 1 else None
    is_cube = power is not None and power.inputs[0] == x and graph.scalar(power.inputs[1]) == 3
    return "tanh" if is_cube and math.isclose(scale, 0.044715, rel_tol=1e-6) else None


def _other_addend(graph: Graph, value: int, is_one: Callable[[int], bool]) -> int | None:
    op = graph.maker(value, "add")
    if op is None:
        return None
    left, right = op.inputs
    return right if is_one(left) else left if is_one(right) else None


def _product(graph: Graph, values: Sequence[int]) -> tuple[float, list[int]]:
    """The product of `values` as a scalar and other factors, looking one product deep."""
    scale = 1.0
    factors: list[int] = []
    for value in values:
        product, quotient = graph.maker(value, "mul"), graph.maker(value, "div")
        inner = [value]
        if quotient is not None and (divisor := graph.scalar(quotient.inputs[1])):
            scale, inner = scale / divisor, [quotient.inputs[0]]
        elif product is not None and (len(values) == 1 or any(map(graph.scalar, product.inputs))):
            inner = list(product.inputs)
        for factor in inner:
            number = graph.scalar(factor)
            scale, factors = (
                (scale, [*factors, factor]) if number is None else (scale * number, factors)
            )
    return scale, factors


RULES: Final[dict[str, tuple[Rule, ...]]] = {
    "reshape": (_last_state, _merge_reshapes),
    "permute": (_merge_permutes,),
    "attention": (_attention_by_tokens,),
    "add": (_add_nothing,),
    "slice": (_first_token,),
    "pad": (_short_pad,),
    "conv": (_padded_conv,),
    "expand": (_expand_early,),
    "select": (_last_state,),
    "mul": (_gelu,),
}
