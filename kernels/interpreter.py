"""The numpy interpreter: what a program means, for one request. The oracle of all tests.

Rules: slow and plain; no torch. Floats of every width are computed in f64 and rounded once per op,
so a device may differ from this by its own rounding and no more. Integers wrap. numpy has no bf16:
such a value is an f32 array that holds only bf16 numbers, here and for whoever passes one in.

What is an error in torch is an `InterpretError` here: an index out of range, an integer divided
by zero. A fully masked attention row gives 0. An `opaque` op is run by `run_opaque`, which a
device with torch provides; without it, such a program has no meaning here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from coissue.kernels.ir import ABSENT, Op, Program, Type
from coissue.kernels.optable.table import OPS
from coissue.kernels.spec import bind_sizes

Array = npt.NDArray[Any]
#: Runs one opaque op on its inputs.
RunOpaque = Callable[[Op, Sequence[Array | None]], Sequence[Array]]

#: The numpy dtype that holds each dtype of the IR.
NUMPY_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "bool": np.dtype(np.bool_), "u8": np.dtype(np.uint8), "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
    "f16": np.dtype(np.float16), "bf16": np.dtype(np.float32), "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}  # fmt: skip


class InterpretError(ValueError):
    """The op has no result for these inputs; the text names the op, its place and the reason."""


def interpret(
    program: Program,
    inputs: Mapping[str, Array],
    weights: Mapping[str, Array],
    run_opaque: RunOpaque | None = None,
) -> dict[str, Array]:
    """The outputs by name of one request. `weights` by digest; `program` must have passed `spec`.

    Raises `SpecError` for inputs that do not fit, `InterpretError` for an op without a result.
    """
    types = [program.types[port.value] for port in program.inputs]
    given = [np.asarray(inputs[port.name]) for port in program.inputs]
    rows, tokens = bind_sizes(types, [array.shape for array in given])
    values: dict[int, Array] = {}
    for port, type_, array in zip(program.inputs, types, given, strict=True):
        values[port.value] = store(array, type_.dtype)
    for weight in program.weights:
        values[weight.value] = store(weights[weight.digest], program.types[weight.value].dtype)
    for op in program.ops:
        arrays = [None if value == ABSENT else values[value] for value in op.inputs]
        out = [program.types[value] for value in op.outputs]
        values.update(
            zip(op.outputs, run_op(op, arrays, out, rows, tokens, run_opaque), strict=True)
        )
    return {port.name: values[port.value] for port in program.outputs}


def run_op(
    op: Op,
    inputs: Sequence[Array | None],
    outputs: Sequence[Type],
    rows: int,
    tokens: int,
    run_opaque: RunOpaque | None = None,
) -> list[Array]:
    """One op on arrays: its outputs, in the dtypes and shapes of `outputs`."""
    try:
        with np.errstate(all="ignore"):
            found = (
                run_opaque(op, inputs)
                if op.name == "opaque" and run_opaque is not None
                else _call(op, inputs, outputs[0], rows, tokens)
            )
            arrays = [
                store(array, type_.dtype) for array, type_ in zip(found, outputs, strict=True)
            ]
    except (ValueError, IndexError) as error:
        raise InterpretError(f"{op.name} at {op.where!r}: {error}") from error
    for array, type_ in zip(arrays, outputs, strict=True):
        if array.shape != type_.at(rows, tokens):
            raise InterpretError(f"{op.name} at {op.where!r} gave the shape {array.shape}")
    return arrays


def _call(
    op: Op, inputs: Sequence[Array | None], out: Type, rows: int, tokens: int
) -> Sequence[Array]:
    definition = OPS[op.name]
    attrs: dict[str, Any] = {name: op.attrs.get(name) for name in definition.attrs}
    if definition.typed:
        attrs["out"] = (out.at(rows, tokens), NUMPY_DTYPES[out.dtype])
    missing = definition.required + definition.optional - len(inputs)
    arrays = [*inputs, *[None] * missing]
    if definition.widen:
        arrays = [
            x.astype(np.float64) if x is not None and x.dtype.kind == "f" else x for x in arrays
        ]
    found = definition.run(*arrays, **attrs)
    return found if isinstance(found, tuple) else (found,)


def store(array: Array, dtype: str) -> Array:
    """`array` rounded to what a value of `dtype` can hold."""
    kept = np.asarray(array).astype(NUMPY_DTYPES[dtype])
    return round_bf16(kept) if dtype == "bf16" else kept


def round_bf16(x: Array) -> Array:
    """f32 to the nearest bf16, ties to even, still as f32."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))
