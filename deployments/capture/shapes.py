"""From torch's symbolic sizes and dtypes to the IR's `Dim`s and dtype names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._sympy.functions import FloorDiv

from coissue.deployments.capture.artifact import CaptureError
from coissue.kernels.ir import Dim, Type
from coissue.kernels.optable.base import ONE

DTYPES: dict[torch.dtype, str] = {
    torch.bool: "bool", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.float32: "f32", torch.float64: "f64",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Symbols:
    """Which of torch's symbols are R and T."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}

    def learn(self, name: str, shape: Sequence[Any]) -> None:
        """Takes the symbols of an input: dim 0 is R, any other symbol is T."""
        if not isinstance(shape[0] if shape else 1, torch.SymInt):
            raise CaptureError(
                f"input {name!r} has a fixed number of rows in dim 0: export it with "
                "dynamic_shapes that name dim 0"
            )
        for index, size in enumerate(shape):
            if not isinstance(size, torch.SymInt):
                continue
            expr, axis = size.node.expr, "rows" if index == 0 else "tokens"
            known = [symbol for symbol, other in self.names.items() if other == axis]
            if (
                not expr.is_Symbol
                or self.names.get(expr, axis) != axis
                or known not in ([], [expr])
            ):
                raise CaptureError(
                    f"input {name!r}: dim {index} must be the same number of {axis} "
                    f"in every input, not {expr}"
                )
            self.names[expr] = axis

    def dim(self, size: int | torch.SymInt) -> Dim:
        """Raises `ValueError` with the expression if it is not scale * R**i * T**j."""
        if isinstance(size, int):
            return Dim(size)
        expr, powers, scale = _divided_up(size.node.expr), {"rows": 0, "tokens": 0}, 1
        for factor, power in expr.as_powers_dict().items():
            if factor.is_Integer and power.is_Integer and power > 0:
                scale *= int(factor) ** int(power)
            elif factor in self.names and power.is_Integer and power > 0:
                powers[self.names[factor]] += int(power)
            else:
                raise ValueError(self.describe(expr))
        return Dim(scale, **powers)

    def describe(self, expr: Any) -> str:
        letters = {symbol: symbol.func(axis) for symbol, axis in self.names.items()}
        return str(expr.subs(letters))

    def type_of(self, tensor: torch.Tensor) -> Type:
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise CaptureError(f"tensors of {tensor.dtype} in {tensor.layout} form are not served")
        return Type(tuple(self.dim(size) for size in tensor.shape), DTYPES[tensor.dtype])


def _divided_up(expr: Any) -> Any:
    """(q d + d - 1) // d, which is how torch sizes a range of step d, is q."""
    if not isinstance(expr, FloorDiv):
        return expr
    top, divisor = expr.args
    quotient = ((top - divisor + 1) / divisor).cancel()
    return quotient if quotient.is_polynomial() else expr


def broadcast(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """NumPy's rule; the shapes are known to fit."""
    rank = max(len(shape) for shape in shapes)
    padded = [(ONE,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((d for d in dims if d != ONE), ONE) for dims in zip(*padded, strict=True))
