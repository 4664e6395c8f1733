"""Is this program legal? The border that a tenant's data crosses before anything else reads it.

Rules: nothing is trusted and nothing is allocated by what the program claims. Every id, size and
text is bounded before it is used, and each op's output types must be what the op table infers. Any
fault is a `SpecError`: one sentence with the op, its place in the tenant's model, the value, and
what is allowed. Called by attach (on what capture made) and, in tests, after every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coissue.kernels.ir import (
    ABSENT,
    DTYPE_BYTES,
    PROGRAM_VERSION,
    Dim,
    Op,
    Port,
    Program,
    Type,
    Weight,
)
from coissue.kernels.optable.base import (
    INT_HIGH,
    INT_LOW,
    Attr,
    Call,
    Mismatch,
    OpDef,
    product,
    render_type,
)
from coissue.kernels.optable.table import OPS
from coissue.kernels.passes.rewrite import is_fixed_op

GIB: Final = 2**30


class SpecError(ValueError):
    """The program is not legal; the text is one sentence for the tenant's author."""


@dataclass(frozen=True, slots=True)
class SpecLimits:
    """Upper bounds, inclusive."""

    ops: int = 20_000
    values: int = 100_000
    #: Ops on weights and constants alone, counted once for each op that needs their results: each
    #: kernel repeats those it needs.
    repeats: int = 1_000_000
    #: Named inputs, and named outputs.
    ports: int = 64
    #: Inputs, outputs and attrs of one op, and entries of one attr.
    op_items: int = 4096
    rank: int = 8
    #: Powers of R and of T in one extent.
    power: int = 4
    rows: int = 65_536
    tokens: int = 2**20
    #: One value at the program's own limits of rows and tokens.
    value_bytes: int = 16 * GIB
    #: All weights, each distinct digest once.
    weight_bytes: int = 64 * GIB
    #: Characters of a name, a module path or a string attr.
    text: int = 4096


DEFAULT: Final = SpecLimits()


def check_program(program: Program, limits: SpecLimits = DEFAULT) -> None:
    """Returns nothing if the program is legal. Raises `SpecError` otherwise, and nothing else."""
    _check_sizes(program, limits)
    for value, type_ in enumerate(program.types):
        _check_type(value, type_, program, limits)
    defined = [False] * len(program.types)
    for port in program.inputs:
        _define(port.value, defined, f"input {port.name[:80]!r}")
    _check_weights(program, defined, limits)
    for index, op in enumerate(program.ops):
        _check_op(index, op, program, defined, limits)
    if not all(defined):
        raise SpecError(f"value {defined.index(False)} is declared but never defined")
    for port in program.outputs:
        _bound(f"the value of output {port.name[:80]!r}", port.value, len(defined) - 1)
    _check_sizes_known(program)
    _check_repeats(program, limits)


def bind_sizes(types: Sequence[Type], shapes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """R and T of a request from the shapes of its inputs; 1 and 0 where no input tells.

    Raises `SpecError` if the shapes do not fit the types with one R and one T, both at least 1.
    """
    sizes = {"R": 1, "T": 0}
    for type_, shape in zip(types, shapes, strict=True):
        for dim, extent in zip(type_.shape, shape, strict=False):
            letter = _letter(dim)
            if letter:
                sizes[letter] = extent // dim.scale
    for type_, shape in zip(types, shapes, strict=True):
        wanted = type_.at(sizes["R"], sizes["T"])
        if wanted != tuple(shape) or min(wanted, default=1) < 1:
            raise SpecError(
                f"an input has shape {list(shape)}; allowed: {render_type(type_)} "
                f"with the same R and T in every input (here R = {sizes['R']}, T = {sizes['T']})"
            )
    return sizes["R"], sizes["T"]


def _letter(dim: Dim) -> str:
    """R or T if the extent is a multiple of just that, else nothing."""
    return {(1, 0): "R", (0, 1): "T"}.get((dim.rows, dim.tokens), "")


def _bound(what: str, found: int, high: int, low: int = 0) -> None:
    if not low <= found <= high:
        raise SpecError(f"{what} is {found}; allowed: {low} to {high}")


def _check_text(what: str, text: str, limits: SpecLimits, low: int = 1) -> None:
    _bound(f"the length of {what}", len(text), limits.text, low)
    if not text.isprintable():
        raise SpecError(f"{what} {text[:80]!r} has characters that cannot be printed")


def _check_sizes(program: Program, limits: SpecLimits) -> None:
    if program.version != PROGRAM_VERSION:
        raise SpecError(
            f"the program has version {program.version}; this build reads {PROGRAM_VERSION}"
        )
    _check_text("the program's name", program.name, limits)
    _bound("the number of values", len(program.types), limits.values, 1)
    _bound("the number of ops", len(program.ops), limits.ops)
    _bound("the number of weights", len(program.weights), limits.values)
    _bound("rows_limit", program.rows_limit, limits.rows, 1)
    _bound("tokens_limit", program.tokens_limit, limits.tokens)
    for kind, ports in (("inputs", program.inputs), ("outputs", program.outputs)):
        _bound(f"the number of {kind}", len(ports), limits.ports, 1)
        _check_names(kind, ports, limits)
    _check_names("weights", program.weights, limits)


def _check_names(kind: str, ports: Sequence[Port | Weight], limits: SpecLimits) -> None:
    seen: set[str] = set()
    for port in ports:
        _check_text(f"the name of one of the {kind}", port.name, limits)
        if port.name in seen:
            raise SpecError(f"two of the {kind} are named {port.name[:80]!r}")
        seen.add(port.name)


def _check_type(value: int, type_: Type, program: Program, limits: SpecLimits) -> None:
    if type_.dtype not in DTYPE_BYTES:
        raise SpecError(
            f"value {value} has dtype {type_.dtype[:80]!r}; allowed: {', '.join(DTYPE_BYTES)}"
        )
    _bound(f"the rank of value {value}", len(type_.shape), limits.rank)
    tokens_power = limits.power if program.tokens_limit else 0
    for dim in type_.shape:
        _bound(f"an extent of value {value}", dim.scale, limits.value_bytes, 1)
        _bound(f"the power of R in value {value}", dim.rows, limits.power)
        _bound(f"the power of T in value {value}", dim.tokens, tokens_power)
    num_bytes = type_.num_bytes(program.rows_limit, program.tokens_limit)
    _bound(f"the bytes of value {value} at rows_limit", num_bytes, limits.value_bytes)


def _define(value: int, defined: list[bool], what: str) -> None:
    if not 0 <= value < len(defined):
        raise SpecError(f"{what} is value {value}; allowed: 0 to {len(defined) - 1}")
    if defined[value]:
        raise SpecError(f"{what} is value {value}, which is already defined")
    defined[value] = True


def _check_weights(program: Program, defined: list[bool], limits: SpecLimits) -> None:
    by_digest: dict[str, Type] = {}
    for weight in program.weights:
        what = f"weight {weight.name[:80]!r}"
        _define(weight.value, defined, what)
        type_ = program.types[weight.value]
        if not type_.is_fixed:
            raise SpecError(f"{what} is {render_type(type_)}; allowed: no R, no T")
        if len(weight.digest) != 64 or set(weight.digest) - set("0123456789abcdef"):
            raise SpecError(f"{what} has a digest that is not 64 hex digits")
        if by_digest.setdefault(weight.digest, type_) != type_:
            raise SpecError(f"{what} has another type than one of equal digest")
    total = sum(type_.num_bytes(1, 1) for type_ in by_digest.values())
    _bound("the bytes of all weights", total, limits.weight_bytes)


def _check_op(
    index: int, op: Op, program: Program, defined: list[bool], limits: SpecLimits
) -> None:
    place = f"op {index} {op.name[:80]!r} at {op.where[:200]!r}"
    try:
        _check_text("where", op.where, limits, low=0)
        definition = OPS.get(op.name)
        if definition is None:
            raise Mismatch("is not in the op table")
        for what, items in (("inputs", op.inputs), ("outputs", op.outputs), ("attrs", op.attrs)):
            _bound(f"the number of {what}", len(items), limits.op_items)
        inputs = _check_inputs(op, definition, program, defined)
        attrs = _check_attrs(op, definition, limits)
        _check_outputs(op, definition, program, defined)
        declared = tuple(program.types[value] for value in op.outputs)
        call = Call(inputs, attrs, declared, program.rows_limit, program.tokens_limit)
        _compare(op, definition.infer(call), declared)
    except (Mismatch, SpecError) as error:
        raise SpecError(f"{place}: {str(error)[:1000]}") from None


def _check_inputs(
    op: Op, definition: OpDef, program: Program, defined: list[bool]
) -> tuple[Type | None, ...]:
    low, count = definition.required, len(op.inputs)
    high = low + definition.optional
    if count < low or (count > high and not definition.variadic):
        wanted = f"{low} or more" if definition.variadic else f"{low} to {high}"
        raise Mismatch(f"has {count} inputs; allowed: {wanted}")
    types: list[Type | None] = []
    for position, value in enumerate(op.inputs):
        if value == ABSENT and low <= position < high:
            types.append(None)
        elif 0 <= value < len(defined) and defined[value]:
            types.append(program.types[value])
        else:
            raise Mismatch(f"input {position} is value {value}, which is not defined before it")
    return (*types, *(None,) * (high - count))


def _check_attrs(op: Op, definition: OpDef, limits: SpecLimits) -> dict[str, Any]:
    unknown = sorted(op.attrs.keys() - definition.attrs.keys())
    if unknown:
        allowed = ", ".join(definition.attrs) or "none"
        raise Mismatch(f"has an attr {unknown[0][:80]!r}; allowed: {allowed}")
    attrs = {}
    for name, attr in definition.attrs.items():
        value = attrs[name] = op.attrs.get(name)
        if not (value is None and attr.optional) and not _is_legal(value, attr, limits):
            raise Mismatch(f"attr {name} is {str(value)[:80]!r}; allowed: {_render_attr(attr)}")
    return attrs


def _is_legal(value: Any, attr: Attr, limits: SpecLimits) -> bool:
    kind = type(value)
    match attr.kind:
        case "int":
            return kind is int and attr.low <= value <= attr.high
        case "ints":
            inside = kind is tuple and len(value) <= limits.op_items
            return inside and all(type(v) is int and attr.low <= v <= attr.high for v in value)
        case "str":
            inside = kind is str and len(value) <= limits.text
            return inside and (not attr.choices or value in attr.choices)
        case "bool":
            return kind is bool
    return (
        kind is float
        or (kind is int and INT_LOW <= value <= INT_HIGH)
        or (kind is bool and attr.kind == "scalar")
    )


def _render_attr(attr: Attr) -> str:
    """The kind and range of an attr, in words."""
    text = {"ints": "a list of int"}.get(attr.kind, attr.kind)
    if attr.choices:
        return " or ".join(map(repr, attr.choices))
    if attr.kind in ("int", "ints") and (attr.low, attr.high) != (INT_LOW, INT_HIGH):
        text += f" from {attr.low}" + (f" to {attr.high}" if attr.high < INT_HIGH else "")
    return text + (" or None" if attr.optional else "")


def _check_outputs(op: Op, definition: OpDef, program: Program, defined: list[bool]) -> None:
    count, wanted = len(op.outputs), definition.outputs
    if count < 1 or (wanted and count != wanted):
        raise Mismatch(f"has {count} outputs; allowed: {wanted or '1 or more'}")
    for position, value in enumerate(op.outputs):
        _define(value, defined, f"output {position}")


def _compare(op: Op, inferred: Sequence[Type], declared: Sequence[Type]) -> None:
    for value, found, said in zip(op.outputs, inferred, declared, strict=True):
        if found != said:
            raise Mismatch(
                f"value {value} is declared {render_type(said)}, but is {render_type(found)}"
            )


def _check_sizes_known(program: Program) -> None:
    """If the program speaks of R or T, some input's shape must tell how large it is."""
    told = {_letter(dim) for port in program.inputs for dim in program.types[port.value].shape}
    for value, type_ in enumerate(program.types):
        whole = product(type_.shape)
        for letter, power in (("R", whole.rows), ("T", whole.tokens)):
            if power and letter not in told:
                raise SpecError(
                    f"value {value} is {render_type(type_)}, but no input has an extent "
                    f"that is a multiple of {letter} alone"
                )


def _check_repeats(program: Program, limits: SpecLimits) -> None:
    """A chain of FIXED ops read by many others would grow to the product of both in lowering."""
    #: FIXED value -> the ops it needs, one bit each.
    needs = {weight.value: 0 for weight in program.weights}
    repeats = fixed_count = 0
    for op in program.ops:
        needed = 0
        for value in op.inputs:
            needed |= needs.get(value, 0)
        if is_fixed_op(op, program.types, needs):
            needs |= dict.fromkeys(op.outputs, needed | 1 << fixed_count)
            fixed_count += 1
        else:
            repeats += needed.bit_count()
    _bound("the number of ops on weights alone, repeated where needed,", repeats, limits.repeats)
