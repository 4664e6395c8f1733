"""From a source to one functional ATen graph with symbolic rows and tokens, or a refusal.

`export` runs `torch.export` (non-strict), decomposes what has no converter of its own and refuses
what the graph's signature gives away: writes to inputs, parameters or buffers. Called by
`pipeline`; the graph goes to `lower`.

NOTE: `torch.export` keeps LSTM, GRU and RNN whole but fixes their token count, because their shape
function loops over the tokens. While it runs, the calls that `nn.LSTM` and its kin make
(`torch._VF.lstm`, ...) go to ops of ours with the same arguments and a shape function without loop.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _VF
from torch._decomp import get_decompositions
from torch._export.utils import _get_decomp_for_cia
from torch.export import Dim, ExportedProgram

from coissue.deployments.capture.artifact import CaptureError
from coissue.deployments.capture.sources import Axes, Flat, Source
from coissue.deployments.settings import Limits

RECURRENT_ARGS = (
    "(Tensor input, {hx} hx, Tensor[] params, bool has_biases, int num_layers, float dropout,"
    " bool train, bool bidirectional, bool batch_first) -> ({returns})"
)
#: Name of the call -> whether its state is a pair (h, c).
RECURRENT_CALLS = {"lstm": True, "gru": False, "rnn_tanh": False, "rnn_relu": False}
#: Rounds of decomposing what has no converter; each may bring up new ops.
ROUNDS = 4


def _define_recurrent(name: str, has_pair: bool) -> None:
    returns = ", ".join(["Tensor"] * (3 if has_pair else 2))
    schema = RECURRENT_ARGS.format(hx="Tensor[]" if has_pair else "Tensor", returns=returns)
    eager = getattr(_VF, name)

    def fake(
        x: torch.Tensor, hx: Any, params: Any, biases: bool, layers: int, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        states = list(hx) if has_pair else [hx]
        width = states[0].shape[-1] * (2 if rest[2] else 1)
        return (x.new_empty(*x.shape[:-1], width), *(torch.empty_like(s) for s in states))

    torch.library.define(f"coissue::{name}", schema)
    torch.library.impl(f"coissue::{name}", "CPU", lambda *args: tuple(eager(*args)))
    torch.library.register_fake(f"coissue::{name}", fake)


for _name, _has_pair in RECURRENT_CALLS.items():
    _define_recurrent(_name, _has_pair)


@contextlib.contextmanager
def lifted_recurrences() -> Iterator[None]:
    """`nn.LSTM`, `nn.GRU` and `nn.RNN` call our ops inside; restored after."""
    lifted = {name: getattr(torch.ops.coissue, name) for name in RECURRENT_CALLS}
    lifted["_pack_padded_sequence"] = _refuse_packing
    for name, call in lifted.items():
        setattr(_VF, name, call)
    try:
        yield
    finally:
        for name in lifted:
            delattr(_VF, name)


def _refuse_packing(*_: Any) -> None:
    raise CaptureError("packed sequences cannot be served: rows of one request have equal tokens")


def export(source: Source, limits: Limits, converted: Callable[[Any], bool]) -> ExportedProgram:
    """`converted` says for an ATen overload whether `lower` knows it. Raises `CaptureError`."""
    program = source.exported or _trace(source, limits)
    program = _decompose(program, {}, source.module)
    for _ in range(ROUNDS):
        wanted = {node.target for node in _calls(program) if not converted(node.target)}
        table = {op: rule for op in wanted if (rule := _find_rule(op)) is not None}
        if not table:
            break
        program = _decompose(program, table, source.module)
    _check_writes(program, list(source.samples))
    return program


def _calls(program: ExportedProgram) -> list[torch.fx.Node]:
    """Calls of ATen ops that compute tensors."""
    return [
        node
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"
        and isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    ]


def _trace(source: Source, limits: Limits) -> ExportedProgram:
    assert source.module is not None
    rows = next(iter(source.samples.values())).shape[0]
    tokens = [source.samples[n].shape[1] for n, axes in source.dynamic.items() if len(axes) == 2]
    dims = {
        "rows": Dim("rows", min=1, max=max(limits.rows, rows)),
        "tokens": Dim("tokens", min=1, max=max(limits.tokens, *tokens, 2)),
    }
    shapes = tuple(_name_dims(source.dynamic[name], dims) for name in source.samples)
    try:
        with lifted_recurrences(), _plain_attention():
            return torch.export.export(
                source.module,
                tuple(source.samples.values()),
                dynamic_shapes={"tensors": shapes},
                strict=False,
            )
    except CaptureError as error:
        raise CaptureError(
            error.args[0], op=error.op, where=_find_module(error, source.module)
        ) from error
    except Exception as error:
        raise _explain(error, source.module) from error


def _name_dims(axes: Axes, dims: dict[str, Any]) -> dict[int, Any]:
    return {index: dims[axis] for index, axis in enumerate(axes)}


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` as plain ops."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _decompose(
    program: ExportedProgram, table: dict[Any, Callable[..., Any]], module: Flat | None
) -> ExportedProgram:
    try:
        decomposed: ExportedProgram = program.run_decompositions(table)
        return decomposed
    except Exception as error:
        raise _explain(error, module) from error


def _find_rule(op: Any) -> Any:
    """The function that writes an op by simpler ones, or None if torch has none."""
    if op._can_decompose():
        return _get_decomp_for_cia(op)
    return get_decompositions([op]).get(op)


def _explain(error: Exception, module: Flat | None) -> CaptureError:
    """One sentence of what `torch.export` says in pages."""
    where, kind = _find_module(error, module), type(error).__name__
    if kind.startswith("GuardOnDataDependent"):
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if not re.search("/torch/|/capture/[a-z]+.py", f.filename)]
        at = "".join(f": {f.line!r}, line {f.lineno} of {f.filename}" for f in theirs[-1:])
        return CaptureError(f"control flow on values cannot be served{at}", where=where)
    lines = [line.strip(" -\t") for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith(("Not all values", "You marked"))]
    text = re.sub(
        r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]",
        _name_size(module),
        (reasons or lines or [kind])[0],
    )
    return CaptureError(
        f"torch.export refused the module: {text.split('. ')[0][:400]}", where=where
    )


def _name_size(module: Flat | None) -> Callable[[re.Match[str]], str]:
    """torch's name of an input's size, as the tenant knows it."""
    names = module.names if module is not None else []
    return lambda match: f"dim {match[2]} of {names[int(match[1])]!r}"


def _find_module(error: BaseException, module: Flat | None) -> str:
    """The path of the innermost module whose method is in the error's traceback."""
    if module is None:
        return ""
    names = {id(part): name for name, part in module.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    return shorten_path(found)


def shorten_path(path: str) -> str:
    """A module path as the tenant knows it, without our wrapper."""
    return "" if path == "inner" else path.removeprefix("inner.")


def _check_writes(program: ExportedProgram, inputs: list[str]) -> None:
    signature = program.graph_signature
    written = {
        "buffer": signature.buffers_to_mutate,
        "parameter": getattr(signature, "parameters_to_mutate", {}),
        "input": signature.user_inputs_to_mutate,
    }
    nodes = {node.name: node for node in program.graph.nodes}
    shown = dict(zip(signature.user_inputs, inputs, strict=True))
    for what, outputs in written.items():
        for output, name in outputs.items():
            path, _, leaf = shorten_path(shown.get(name, name)).rpartition(".")
            raise CaptureError(
                f"the module writes to its {what} {leaf!r}: a request may not leave a trace",
                op=str(getattr(nodes.get(output), "target", "")),
                where=path,
            )
