"""Rewriting programs: the frame that every Program -> Program pass is written in.

A pass is a rule called once per op, in order, with its inputs already replaced. It returns the
value that stands for the op's output from now on, or None to keep the op. New ops are emitted
before it. Equal ops are merged and unused ones removed on the way, so a rule only has to make the
old ones useless. Values are renumbered at the end: each is defined exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from coissue.kernels.ir import ABSENT, AttrValue, Op, Port, Program, Type, Weight

Rule = Callable[["Graph", Op], int | None]


class Graph:
    """A program being rewritten."""

    __slots__ = ("_replaced", "_seen", "fixed", "makers", "ops", "types", "where")

    def __init__(self, program: Program) -> None:
        #: By value; grows.
        self.types: list[Type] = list(program.types)
        #: The new ops so far, in order.
        self.ops: list[Op] = []
        #: Value -> the new op that makes it; inputs and weights have none.
        self.makers: dict[int, Op] = {}
        #: Values that depend on neither R, T nor an input.
        self.fixed: set[int] = {weight.value for weight in program.weights}
        #: Module path given to emitted ops.
        self.where: str = ""
        #: Old value -> new value.
        self._replaced: dict[int, int] = {}
        #: Structure of an op -> its outputs, to merge equal ones.
        self._seen: dict[object, tuple[int, ...]] = {}

    def resolve(self, value: int) -> int:
        return self._replaced.get(value, value)

    def replace(self, old: int, new: int) -> None:
        self._replaced[old] = new

    def add(self, op: Op) -> tuple[int, ...]:
        """Appends `op`, or finds an equal one; the outputs that stand for its outputs."""
        types = tuple(self.types[value] for value in op.outputs)
        key = (op.name, op.inputs, freeze_attrs(op.attrs), types)
        if key in self._seen:
            return self._seen[key]
        self._seen[key] = op.outputs
        self.ops.append(op)
        self.makers.update(dict.fromkeys(op.outputs, op))
        if is_fixed_op(op, self.types, self.fixed):
            self.fixed.update(op.outputs)
        return op.outputs

    def emit(self, name: str, inputs: Iterable[int], type_: Type, **attrs: AttrValue) -> int:
        """A new op with one output; its value."""
        self.types.append(type_)
        op = Op(name, tuple(inputs), (len(self.types) - 1,), attrs, self.where)
        return self.add(op)[0]

    def maker(self, value: int, name: str) -> Op | None:
        """The op that makes `value`, if it is a `name`."""
        op = self.makers.get(value)
        return op if op is not None and op.name == name else None

    def scalar(self, value: int) -> float | None:
        """The number that `value` is everywhere, if it is a constant."""
        op = self.makers.get(value)
        if op is None or op.name not in ("constant", "full"):
            return None
        number = op.attrs["value"]
        return float(number) if isinstance(number, int | float) else None


def rewrite(program: Program, rule: Rule) -> Program:
    """`program` with `rule` applied to each op, equal ops merged, unused ones removed."""
    graph = Graph(program)
    for old in program.ops:
        inputs = tuple(graph.resolve(value) for value in old.inputs)
        op = Op(old.name, inputs, old.outputs, old.attrs, old.where)
        graph.where = old.where
        value = rule(graph, op)
        new = graph.add(op) if value is None else (value,)
        for before, after in zip(op.outputs, new, strict=True):
            graph.replace(before, after)
    return _compact(program, graph)


def _compact(program: Program, graph: Graph) -> Program:
    """The live part of `graph`, renumbered: inputs, weights, then op outputs."""
    given = {weight.value for weight in program.weights}
    ports = [(port, graph.resolve(port.value)) for port in program.outputs]
    ports = [  # a device hands out what ops make
        (port, graph.emit("identity", (value,), graph.types[value]) if value in given else value)
        for port, value in ports
    ]
    kept, live = keep_live(graph.ops, [value for _, value in ports])
    weights = [weight for weight in program.weights if weight.value in live]
    order = [port.value for port in program.inputs] + [weight.value for weight in weights]
    order += [value for op in kept for value in op.outputs]
    number = {value: index for index, value in enumerate(order)} | {ABSENT: ABSENT}
    return Program(
        name=program.name,
        types=tuple(graph.types[value] for value in order),
        inputs=tuple(Port(port.name, number[port.value]) for port in program.inputs),
        weights=tuple(Weight(w.name, number[w.value], w.digest) for w in weights),
        ops=tuple(renumber(op, number) for op in kept),
        outputs=tuple(Port(port.name, number[value]) for port, value in ports),
        rows_limit=program.rows_limit,
        tokens_limit=program.tokens_limit,
        version=program.version,
    )


def keep_live(ops: Sequence[Op], outputs: Iterable[int]) -> tuple[list[Op], set[int]]:
    """The ops that `outputs` need, in order, and the values these read or are."""
    live, kept = set(outputs), []
    for op in reversed(ops):
        if live.intersection(op.outputs):
            live.update(op.inputs)
            kept.append(op)
    return kept[::-1], live


def renumber(op: Op, number: Mapping[int, int]) -> Op:
    """`op` on other value ids; `number` knows ABSENT too."""
    inputs = tuple(number[value] for value in op.inputs)
    outputs = tuple(number[value] for value in op.outputs)
    return Op(op.name, inputs, outputs, op.attrs, op.where)


def is_fixed_op(op: Op, types: Sequence[Type], fixed: Container[int]) -> bool:
    """Whether the outputs of `op` are FIXED, given the FIXED values before it."""
    return all(value == ABSENT or value in fixed for value in op.inputs) and all(
        types[value].is_fixed for value in op.outputs
    )


def freeze_attrs(attrs: Mapping[str, AttrValue]) -> tuple[tuple[str, str], ...]:
    """Attributes as a key that tells True from 1 and 1 from 1.0."""
    return tuple(sorted((name, repr(value)) for name, value in attrs.items()))


def integer(op: Op, name: str) -> int:
    """An int attribute, as the op table promises it."""
    number = op.attrs[name]
    assert isinstance(number, int)
    return number


def integers(op: Op, name: str) -> tuple[int, ...]:
    """A tuple attribute, as the op table promises it."""
    numbers = op.attrs[name]
    assert isinstance(numbers, tuple)
    return numbers
