"""From the ATen graph to a `Program`: walks the nodes and lets the converter table emit IR ops.

Called by `pipeline` after `export`; `converters` and `converters_nn` hold one small function per
ATen op. What is neither in their table nor on the allow-list `OPAQUE_TARGETS` and does not come
from constants alone is a `CaptureError` with op and module path. Ops nobody needs are dropped and
the values numbered anew: inputs, then weights, then outputs of ops in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from coissue.deployments.capture.artifact import CaptureError, compute_digest
from coissue.deployments.capture.export import shorten_path
from coissue.deployments.capture.shapes import DTYPES, TORCH_DTYPES, Symbols
from coissue.kernels.ir import ABSENT, AttrValue, Dim, Op, Port, Program, Type, Weight
from coissue.kernels.optable.table import OPAQUE_TARGETS
from coissue.kernels.passes.rewrite import keep_live, renumber

#: What a converter returns: one value id, several (for `getitem`), or None for a check.
Result = int | tuple[int | None, ...] | None
Args = dict[str, Any]
Converter = Callable[["Builder", Args], Result]
#: ATen name without overload -> converter. Filled by `converters` and `converters_nn`.
TABLE: dict[str, Converter] = {}
#: Functional on the outside, yet not to be served.
RANDOM = torch.Tag.nondeterministic_seeded
#: On the allow-list, yet made of IR ops by torch's own decomposition.
COMPOSED = {
    "addcmul", "celu", "glu", "isinf", "logit", "logsumexp", "prelu", "selu", "softshrink",
}  # fmt: skip
#: Constants made of nothing but sizes are folded up to this many elements.
FOLDED_ELEMENTS_MAX = 1 << 24


def converts(*names: str) -> Callable[[Converter], Converter]:
    """Registers a converter for ATen ops, all overloads of each."""

    def register(function: Converter) -> Converter:
        TABLE.update(dict.fromkeys(names, function))
        return function

    return register


def is_converted(target: torch._ops.OpOverload) -> bool:
    """Whether `export` need not decompose the op. Some of the allow-list are better off if it does:
    composed of IR ops, they run on the rows of all requests at once."""
    name = find_name(target)
    return name in TABLE or (find_opaque(target) is not None and name not in COMPOSED)


def find_opaque(target: torch._ops.OpOverload) -> str | None:
    """The op's name on the allow-list; what decomposition calls `prims.x` is ATen's x."""
    if target.namespace != "prims":
        return str(target) if str(target) in OPAQUE_TARGETS else None
    name = f"aten.{find_name(target)}.default"
    return name if name in OPAQUE_TARGETS else None


def find_name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.split("::")[1]


def as_kind(number: bool | int | float, dtype: str) -> bool | int | float:
    """`number` as the kind of Python number that an attribute for `dtype` holds."""
    kind = TORCH_DTYPES[dtype]
    return (float if kind.is_floating_point else bool if kind == torch.bool else int)(number)


class Builder:
    """The program under construction, and what converters may ask."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols
        self.types: list[Type] = []
        self.ops: list[Op] = []
        #: Value -> (name, content) of weights.
        self.weights: dict[int, tuple[str, torch.Tensor]] = {}
        #: Graph node -> its value or values.
        self.values: dict[Node, Result] = {}
        #: Graph nodes whose content is known: parameters, buffers, constants, folded ops.
        self.constants: dict[Node, torch.Tensor] = {}
        #: Graph node -> the name of its weight, where the module has one.
        self.labels: dict[Node, str] = {}
        #: Value -> the op that makes it.
        self.makers: dict[int, Op] = {}
        #: The node being converted.
        self.node: Node | None = None

    # --- what a converter reads -----------------------------------------------------------------

    def type(self, value: int) -> Type:
        return self.types[value]

    def shape(self, value: int) -> tuple[Dim, ...]:
        return self.types[value].shape

    @property
    def aten_name(self) -> str:
        """Name of the op being converted, without namespace and overload."""
        assert self.node is not None
        assert isinstance(self.node.target, torch._ops.OpOverload)
        return find_name(self.node.target)

    def meta(self) -> Any:
        """The fake tensor, or tensors, that the node stands for."""
        assert self.node is not None
        return self.node.meta["val"]

    def out(self, index: int | None = None) -> Type:
        """Type of the node's output, or of the `index`th of several."""
        return self.type_of(self.meta() if index is None else self.meta()[index])

    def type_of(self, what: Any) -> Type:
        return self.symbols.type_of(what.meta["val"] if isinstance(what, Node) else what)

    def dim(self, size: Any) -> Dim:
        """The extent behind an int or a symbolic size of the graph."""
        return self.symbols.dim(size.meta["val"] if isinstance(size, Node) else size)

    def is_size(self, what: Any) -> bool:
        return isinstance(what, Node) and isinstance(what.meta.get("val"), torch.SymInt)

    def value(self, arg: Any, dtype: str | None = None) -> int:
        """The value of a tensor argument, a number or a symbolic size, cast to `dtype` if given."""
        if arg is None:
            return ABSENT
        if isinstance(arg, bool | int | float):
            return self.constant(arg, dtype or self.out().dtype)
        found = self.extent(self.dim(arg)) if self.is_size(arg) else self._value_of_node(arg)
        return found if dtype is None else self.cast(found, dtype)

    def _value_of_node(self, node: Node) -> int:
        if node not in self.values and node in self.constants:
            label = self.labels.get(node, f"constant.{node.name}")
            self.types.append(self.type_of(self.constants[node]))
            self.values[node] = len(self.types) - 1
            self.weights[len(self.types) - 1] = (label, self.constants[node])
        found = self.values.get(node)
        if not isinstance(found, int):
            raise self.error(f"an operand ({node.target}) is not a tensor that can be served")
        return found

    def is_constant(self, arg: Any) -> bool:
        return isinstance(arg, Node) and arg in self.constants

    def error(self, message: str) -> CaptureError:
        node = self.node
        if node is None or node.op == "placeholder":
            return CaptureError(message)
        stack = node.meta.get("nn_module_stack") or {}
        path = [str(entry[0]) for entry in stack.values()]
        return CaptureError(
            message, op=str(node.target), where=shorten_path(path[-1] if path else "")
        )

    # --- what a converter emits -----------------------------------------------------------------

    def emit_many(
        self, name: str, inputs: Sequence[int], types: Sequence[Type], **attrs: AttrValue
    ) -> tuple[int, ...]:
        outputs = tuple(range(len(self.types), len(self.types) + len(types)))
        self.types += types
        where = self.error("").where
        op = Op(name, tuple(inputs), outputs, attrs, where)
        self.ops.append(op)
        self.makers |= dict.fromkeys(outputs, op)
        return outputs

    def emit(self, name: str, inputs: Sequence[int], type_: Type, **attrs: AttrValue) -> int:
        return self.emit_many(name, inputs, [type_], **attrs)[0]

    def constant(self, number: bool | int | float, dtype: str) -> int:
        return self.fill(number, Type((), dtype))

    def fill(self, number: bool | int | float, type_: Type) -> int:
        """`number`, as a scalar or over a whole shape."""
        value = as_kind(number, type_.dtype)
        return self.emit("full" if type_.shape else "constant", (), type_, value=value)

    def extent(self, dim: Dim) -> int:
        """A symbolic size as an i64 scalar: the sum of that many ones."""
        if dim.is_fixed:
            return self.constant(dim.scale, "i64")
        ones = self.fill(1, Type((dim,), "i64"))
        return self.emit("sum", (ones,), Type((), "i64"), dims=(0,), keepdim=False)

    def cast(self, value: int, dtype: str) -> int:
        if self.type(value).dtype == dtype:
            return value
        return self.emit("cast", (value,), Type(self.shape(value), dtype))

    def reshape(self, value: int, shape: Sequence[Dim]) -> int:
        """Reshapes of reshapes are one reshape, or none."""
        shape = tuple(shape)
        while (maker := self.makers.get(value)) is not None and maker.name == "reshape":
            value = maker.inputs[0]
        if self.shape(value) == shape:
            return value
        return self.emit("reshape", (value,), Type(shape, self.type(value).dtype))

    def expand(self, value: int, shape: Sequence[Dim]) -> int:
        if self.shape(value) == tuple(shape):
            return value
        return self.emit("expand", (value,), Type(tuple(shape), self.type(value).dtype))

    def permute(self, value: int, dims: Sequence[int]) -> int:
        """Permutes of permutes are one, or none."""
        if (maker := self.makers.get(value)) is not None and maker.name == "permute":
            first: Any = maker.attrs["dims"]
            value, dims = maker.inputs[0], [first[dim] for dim in dims]
        if list(dims) == list(range(len(dims))):
            return value
        shape = self.shape(value)
        kind = Type(tuple(shape[dim] for dim in dims), self.type(value).dtype)
        return self.emit("permute", (value,), kind, dims=tuple(dims))


def lower(
    exported: ExportedProgram, name: str, inputs: Sequence[str], outputs: Sequence[str],
    limits: tuple[int, int],
) -> tuple[Program, dict[str, np.ndarray]]:  # fmt: skip
    """The program and its weights by digest. `limits` are R and T. Raises `CaptureError`."""
    builder = Builder(Symbols())
    ports = _take_inputs(builder, exported, inputs)
    for node in exported.graph.nodes:
        if node.op == "call_function":
            builder.node = node
            _convert_node(builder, node)
    builder.node = None
    results = _find_outputs(builder, exported, outputs)
    tokens = limits[1] if "tokens" in builder.symbols.names.values() else 0
    return _finish(builder, name, ports, results, (limits[0], tokens))


def _take_inputs(builder: Builder, exported: ExportedProgram, names: Sequence[str]) -> list[Port]:
    """Inputs become values now, weights when an op asks for them."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    specs = exported.graph_signature.input_specs
    users = [nodes[s.arg.name] for s in specs if s.kind == InputKind.USER_INPUT]
    for name, node in zip(names, users, strict=True):
        builder.symbols.learn(name, node.meta["val"].shape)
    for node in users:
        builder.values[node] = len(builder.types)
        builder.types.append(builder.type_of(node))
    for spec in specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            # Unsaved buffers and plain tensors are in `constants` only.
            pool = exported.state_dict
            content = pool[spec.target] if spec.target in pool else exported.constants[spec.target]
            builder.constants[nodes[spec.arg.name]] = content.detach()
            builder.labels[nodes[spec.arg.name]] = shorten_path(str(spec.target))
    return [Port(name, index) for index, name in enumerate(names)]


def _convert_node(builder: Builder, node: Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
        if str(node.target).startswith(("aten.item", "aten._local_scalar")):
            raise builder.error("a number taken out of a tensor cannot be served")
        return  # sizes are read from the metadata where they are used
    try:
        builder.values[node] = _convert_call(builder, node)
    except CaptureError as error:
        if error.op:
            raise
        raise builder.error(error.args[0]) from error
    except ValueError as error:
        raise builder.error(
            f"a size is {error}, which is not a product of a number, rows and tokens"
        ) from error


def _convert_call(builder: Builder, node: Node) -> Result:
    target = node.target
    if getattr(target, "__name__", "") == "getitem":
        return _pick(builder, node)
    if not isinstance(target, torch._ops.OpOverload):
        raise builder.error("control flow and other operators of higher order cannot be served")
    name = find_name(target)
    if RANDOM in target.tags and name not in TABLE:  # those check their own dropout
        raise builder.error("random numbers cannot be served: the same request must get one answer")
    if node.meta.get("val") is None and ("assert" in name or "constrain" in name):
        return None
    args = bind(target, node)
    if name in TABLE and target.namespace != "prims":
        return TABLE[name](builder, args)
    opaque = find_opaque(target)
    if opaque is not None:
        return _convert_opaque(builder, node, opaque)
    _fold(builder, node, target)
    return None


def bind(target: torch._ops.OpOverload, node: Node) -> Args:
    """The arguments by the names in the op's schema, defaults filled in."""
    bound = {}
    for place, argument in enumerate(target._schema.arguments):
        given = node.args[place] if place < len(node.args) else argument.default_value
        bound[argument.name] = node.kwargs.get(argument.name, given)
    return bound


def _pick(builder: Builder, node: Node) -> Result:
    """`getitem`: one of the outputs of an op that has several."""
    arguments: Any = node.args
    source, index = arguments
    if source in builder.constants:
        builder.constants[node] = builder.constants[source][index]
        return None
    parts = builder.values.get(source)
    if not isinstance(parts, tuple) or parts[index] is None:
        builder.node = source
        raise builder.error(f"output {index} of this op is not served")
    found: int = parts[index]
    return found


def _fold(builder: Builder, node: Node, target: torch._ops.OpOverload) -> None:
    """An op over constants and fixed sizes is run now; its answer is a constant."""
    outputs: Any = node.meta.get("val")
    is_fixed = isinstance(outputs, torch.Tensor) and all(isinstance(n, int) for n in outputs.shape)
    if not is_fixed or not builder.constants.keys() >= set(node.all_input_nodes):
        raise builder.error("this op is not served")
    if outputs.numel() > FOLDED_ELEMENTS_MAX:
        raise builder.error("a constant this large must be a parameter or a buffer")
    args, kwargs = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda leaf: builder.constants[leaf]
    )
    builder.constants[node] = target(*args, **kwargs)


def _convert_opaque(builder: Builder, node: Node, target: str) -> Result:
    """An op of the allow-list, with its tensors as inputs and everything else as JSON."""
    inputs: list[int] = []

    def as_json(arg: Any) -> Any:
        if builder.is_size(arg):
            raise builder.error("sizes of a request cannot be arguments of this op")
        if isinstance(arg, Node):
            inputs.append(builder.value(arg))
            return {"input": len(inputs) - 1}
        if isinstance(arg, list | tuple):
            return [as_json(part) for part in arg]
        if isinstance(arg, torch.dtype):
            return {"dtype": DTYPES[arg]}
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        raise builder.error(f"argument {arg} of this op is not served")

    keywords = {name: as_json(arg) for name, arg in node.kwargs.items()}
    text = json.dumps([[as_json(arg) for arg in node.args], keywords])
    several = not isinstance(node.meta["val"], torch.Tensor)
    types = [builder.out(i) for i in range(len(node.meta["val"]))] if several else [builder.out()]
    found = builder.emit_many("opaque", inputs, types, target=target, args=text)
    return found if several else found[0]


def _find_outputs(
    builder: Builder, exported: ExportedProgram, names: Sequence[str]
) -> list[tuple[str, int]]:
    (end,) = [node for node in exported.graph.nodes if node.op == "output"]
    specs = exported.graph_signature.output_specs
    found = [
        node
        for spec, node in zip(specs, end.args[0], strict=True)
        if spec.kind == OutputKind.USER_OUTPUT and node is not None
    ]
    if len(found) != len(names):
        raise CaptureError(f"the module has {len(found)} outputs, its names are {list(names)}")
    results: list[tuple[str, int]] = []
    for name, node in zip(names, found, strict=True):
        value = builder.value(node)
        if value in [result for _, result in results] or value not in builder.makers:
            value = builder.emit("identity", (value,), builder.type(value))
        results.append((name, value))
    return results


def _finish(
    builder: Builder, name: str, inputs: list[Port], outputs: list[tuple[str, int]],
    limits: tuple[int, int],
) -> tuple[Program, dict[str, np.ndarray]]:  # fmt: skip
    """Drops what no output needs and numbers the rest."""
    kept, needed = keep_live(builder.ops, [value for _, value in outputs])
    used = [value for value in builder.weights if value in needed]
    order = [port.value for port in inputs] + used
    order += [value for op in kept for value in op.outputs]
    renamed = {old: new for new, old in enumerate(order)} | {ABSENT: ABSENT}
    arrays: dict[str, np.ndarray] = {}
    weights = []
    for value in used:
        label, content = builder.weights[value]
        array = to_numpy(content)
        digest = compute_digest(array, builder.type(value).dtype)
        arrays.setdefault(digest, array)
        weights.append(Weight(label, renamed[value], digest))
    program = Program(
        name=name,
        types=tuple(builder.types[value] for value in order),
        inputs=tuple(Port(port.name, renamed[port.value]) for port in inputs),
        weights=tuple(weights),
        ops=tuple(renumber(op, renamed) for op in kept),
        outputs=tuple(Port(label, renamed[value]) for label, value in outputs),
        rows_limit=limits[0],
        tokens_limit=limits[1],
    )
    return program, arrays


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Row-major; bf16 as its bits (see `artifact`)."""
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise CaptureError(f"tensors of {tensor.dtype} in {tensor.layout} form are not served")
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.uint16)
    return np.ascontiguousarray(plain.numpy()).reshape(tuple(tensor.shape))
