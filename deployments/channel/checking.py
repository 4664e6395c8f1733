"""Checks of a request against its tenant: the same for HTTP, the channel's client and its server.

Pure functions. Every error names the field, its value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from coissue.deployments.channel.frames import DTYPE_NAMES, SIZES_LIMIT, PortInfo, TenantInfo
from coissue.kernels.ir import Dim

MALFORMED: Final = "malformed"
TOO_LARGE: Final = "too_large"
#: The tenant has a new version that the client has not seen when it encoded the request.
STALE: Final = "stale"
#: Of a client's text, so much comes back in a sentence.
SHOWN_CHARS: Final = 100
#: Exponent bits of bf16, all ones in Inf and NaN.
_BF16_EXPONENT: Final = 0x7F80


class InferError(Exception):
    """A request did not succeed. `reason` is the value of a `scheduler.messages.Reason`, or one of
    malformed, too_large, cancelled, internal, loading, failed (the tenant's state), restarting."""

    def __init__(self, reason: str, message: str, retry_after_ns: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_ns = retry_after_ns
        #: Answered by the scheduler, which then counted it.
        self.is_counted = False


def show(text: str) -> str:
    """Quoted, and cut where it is long."""
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}...")


def check_inputs(info: TenantInfo, inputs: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """(R, T) of a request with these inputs; T is 0 without a token axis. Raises `InferError`."""
    arrays = [inputs[port.name] for port in info.inputs if port.name in inputs]
    if len(arrays) != len(info.inputs) or len(inputs) != len(arrays):
        raise _names_differ(info, inputs)
    return check_types(
        info, [(DTYPE_NAMES.get(array.dtype) or str(array.dtype), array.shape) for array in arrays]
    )


def _names_differ(info: TenantInfo, inputs: Mapping[str, np.ndarray]) -> InferError:
    names = [port.name for port in info.inputs]
    for name in inputs:
        if name not in names:
            allowed = ", ".join(map(repr, names))
            return InferError(MALFORMED, f"input {show(name)} is unknown, allowed: {allowed}")
    missing = next(name for name in names if name not in inputs)
    return InferError(MALFORMED, f"input {missing!r} is missing")


def check_types(info: TenantInfo, given: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, int]:
    """Like `check_inputs`, from (dtype, shape) of each input in the tenant's order.

    Most requests of a tenant look alike, so what was in order once is remembered.
    """
    key = tuple(given)
    found = info.sizes.get(key)
    if found is None:
        found = _check_types(info, given)
        if len(info.sizes) >= SIZES_LIMIT:
            info.sizes.clear()
        info.sizes[key] = found
    return found


def _check_types(info: TenantInfo, given: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, int]:
    if len(given) != len(info.inputs):
        raise InferError(MALFORMED, f"{len(given)} inputs, allowed: {len(info.inputs)}")
    for port, (dtype, shape) in zip(info.inputs, given, strict=True):
        if dtype != port.dtype:
            raise InferError(
                MALFORMED,
                f"input {port.name!r}: dtype {dtype[:SHOWN_CHARS]}, allowed: {port.dtype}",
            )
        if len(shape) != len(port.shape):
            raise InferError(
                MALFORMED,
                f"input {port.name!r}: shape {list(shape)}, allowed: {render_shape(port.shape)}",
            )
    rows, tokens = _solve(info, given)
    for port, (_, shape) in zip(info.inputs, given, strict=True):
        for dim, extent in zip(port.shape, shape, strict=True):
            if extent != dim.scale * rows**dim.rows * tokens**dim.tokens:
                raise InferError(MALFORMED, _mismatch(port, shape, rows, tokens))
    _check_limit("rows", rows, info.rows_limit)
    if info.tokens_limit:
        _check_limit("tokens per row", tokens, info.tokens_limit)
    return rows, tokens


def check_values(info: TenantInfo, arrays: Sequence[np.ndarray]) -> None:
    """Refuses in the inputs (in the tenant's order) an index beyond its table, which would make a
    launch be repeated, and NaN and Inf if the tenant wants that."""
    for port, array in zip(info.inputs, arrays, strict=True):
        if not port.below:
            continue
        # As an unsigned number a negative one is huge.
        over = np.flatnonzero(array.view(f"u{array.itemsize}") >= port.below)
        if len(over):
            given = f"index {array.flat[over[0]]}, allowed: 0 to {port.below - 1}"
            raise InferError(MALFORMED, f"input {port.name!r}: {given}")
    if info.nan == "allow":
        return
    for port, array in zip(info.inputs, arrays, strict=True):
        if port.dtype == "bf16":
            finite = ((array & _BF16_EXPONENT) != _BF16_EXPONENT).all()
        else:
            finite = port.dtype not in ("f16", "f32", "f64") or np.isfinite(array).all()
        if not finite:
            raise InferError(
                MALFORMED, f"input {port.name!r}: has NaN or Inf, allowed: finite values"
            )


def render_shape(shape: Sequence[Dim]) -> str:
    """A shape for people: `[R, 2*T, 16]`."""
    return f"[{', '.join(_render_dim(dim) for dim in shape)}]"


def _render_dim(dim: Dim) -> str:
    letters = [
        letter if power == 1 else f"{letter}**{power}"
        for letter, power in (("R", dim.rows), ("T", dim.tokens))
        if power
    ]
    if dim.scale != 1 or not letters:
        letters.insert(0, str(dim.scale))
    return "*".join(letters)


def _solve(info: TenantInfo, given: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, int]:
    """R and T from the axes that are a multiple of one of them, then from those of R*T."""
    rows = tokens = -1
    products: list[tuple[Dim, int]] = []
    for port, (_, shape) in zip(info.inputs, given, strict=True):
        for dim, extent in zip(port.shape, shape, strict=True):
            if dim.rows and dim.tokens:
                products.append((dim, extent))
            elif dim.rows == 1 and rows < 0:
                rows = extent // dim.scale
            elif dim.tokens == 1 and tokens < 0:
                tokens = extent // dim.scale
    for dim, extent in products:
        if rows < 0 < tokens:
            rows = extent // (dim.scale * tokens)
        elif tokens < 0 < rows:
            tokens = extent // (dim.scale * rows)
    return 1 if rows < 0 else rows, max(tokens, 0)


def _mismatch(port: PortInfo, shape: tuple[int, ...], rows: int, tokens: int) -> str:
    """Names the first axis that differs from what R and T, as the axes before it say, make it."""
    want = port.at(rows, tokens)
    axis = next(axis for axis, extent in enumerate(shape) if extent != want[axis])
    found = f"input {port.name!r}: shape {list(shape)}, allowed: {render_shape(port.shape)}"
    of = f" with R={rows}" + (f", T={tokens}" if tokens else "")
    fixed = port.shape[axis].is_fixed
    return f"{found}{'' if fixed else of}: axis {axis} is {shape[axis]}, not {want[axis]}"


def _check_limit(field: str, value: int, limit: int) -> None:
    if value < 1:
        raise InferError(MALFORMED, f"{field}: {value}, allowed: 1 to {limit}")
    if value > limit:
        raise InferError(TOO_LARGE, f"{field}: {value}, allowed: 1 to {limit}")
