"""Tensors at the HTTP border: bytes or JSON to numpy arrays and back, by the tenant's ports.

Rules: no array is larger than what the body can back, so a lying shape allocates nothing; the
number of elements is known before JSON is decoded. Binary tensors are little-endian, row-major and
not copied unless misaligned. bf16 has no numpy type and travels as its 16 bits (u2). f16 and bf16
have no portable JSON form: they are binary only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from coissue.deployments.channel.checking import show
from coissue.deployments.channel.frames import NUMPY_DTYPES
from coissue.deployments.http.errors import HttpError, explain, malformed

if TYPE_CHECKING:
    from coissue.deployments.channel.frames import PortInfo, TenantInfo
    from coissue.deployments.handlers import Arrays

#: IR dtype -> datatype of the Open Inference Protocol.
DATATYPES: Final = {
    "bool": "BOOL", "u8": "UINT8", "i8": "INT8", "i16": "INT16", "i32": "INT32", "i64": "INT64",
    "f16": "FP16", "bf16": "BF16", "f32": "FP32", "f64": "FP64",
}  # fmt: skip
BINARY_ONLY: Final = frozenset({"f16", "bf16"})
DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
#: Encoding so many numbers takes 1 to 3 ms: a loop has something else to do after that.
VALUES_AT_ONCE: Final = 16_384
_SCALARS: Final[dict[str, type]] = {"b": bool, "i": int, "u": int, "f": float}


@cache
def _decoder(scalar: type, depth: int) -> msgspec.json.Decoder[Any]:
    form: Any = scalar
    for _ in range(depth):
        form = list[form]
    return msgspec.json.Decoder(form)


def check_has_json(port: PortInfo, path: str) -> None:
    if port.dtype in BINARY_ONLY:
        raise malformed(f"{path}: {DATATYPES[port.dtype]} has no JSON form, use binary data")


def _leading_brackets(data: bytes) -> int:
    head = data[:1024].translate(None, b" \t\r\n")
    return len(head) - len(head.lstrip(b"["))


def from_json(
    port: PortInfo, data: bytes, path: str, count: int, shape: Sequence[int] | None = None
) -> np.ndarray:
    """The nested or flat list `data`.

    With `shape`, the list must hold exactly `count` elements; without, at most `count`, nested as
    deep as the port has dimensions.
    """
    check_has_json(port, path)
    # Commas separate elements at every depth: one less than elements, whatever the nesting.
    given = data.count(b",") + 1
    if shape is not None and given != count:
        raise malformed(f"{path}: {given} values where the shape needs {count}")
    if given > count:
        has_tokens = any(dim.tokens for dim in port.shape)
        limits = "limits.rows and limits.tokens allow" if has_tokens else "limits.rows allows"
        raise HttpError("too_large", f"{path}: {given} values, {limits} {count}")
    rank = len(port.shape if shape is None else shape)
    depth = _leading_brackets(data)
    if shape is None and 0 < depth < rank and not data.strip(b"[] \t\r\n"):
        what = "rows" if depth == 1 else "tokens" if port.shape[depth - 1].tokens else "values"
        raise malformed(f"{path}: {what}: 0, at least one is needed")
    if depth not in ((1, rank) if shape is not None else (rank,)):
        raise malformed(f"{path}: a list nested {rank} deep is needed, not {depth}")
    dtype = NUMPY_DTYPES[port.dtype]
    try:
        with np.errstate(over="ignore"):
            array = np.array(_decoder(_SCALARS[dtype.kind], depth).decode(data), dtype)
    except DECODE_ERRORS as error:
        raise explain(error, path) from None
    except OverflowError:
        raise malformed(f"{path}: a value is out of range for {DATATYPES[port.dtype]}") from None
    except ValueError:
        raise malformed(f"{path}: lists of different lengths at one depth") from None
    if dtype.kind == "f" and not np.isfinite(array).all():
        # JSON itself cannot say NaN or Inf: the value was larger than the type.
        raise malformed(f"{path}: a value is out of range for {DATATYPES[port.dtype]}")
    if shape is None:
        return array
    if array.size != count or (depth > 1 and array.shape != tuple(shape)):
        raise malformed(f"{path}: nested as {list(array.shape)}, but shape is {list(shape)}")
    return array.reshape(shape)


def from_bytes(port: PortInfo, data: memoryview, path: str, shape: Sequence[int]) -> np.ndarray:
    """The tensor in `data`, whose length has to fit `shape`. No copy where alignment allows."""
    dtype = NUMPY_DTYPES[port.dtype]
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise malformed(
            f"{path}: {len(data)} bytes where {DATATYPES[port.dtype]} {list(shape)} needs {needed}"
        )
    array = np.frombuffer(data, dtype).reshape(shape)
    if not array.flags.aligned:
        array = array.copy()
    if dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise malformed(f"{path}: a byte of a BOOL tensor must be 0 or 1")
    return array


def from_raw(info: TenantInfo, body: bytes) -> dict[str, np.ndarray]:
    """The one input of a model, as nothing but its data: at most one dimension may be open.

    With an open token dimension the data are one row of tokens.
    """
    if len(info.inputs) != 1:
        raise malformed(
            f"body: raw data need a model with one input, {info.name!r} has {len(info.inputs)}"
        )
    (port,) = info.inputs
    path = f"inputs.{port.name}"
    unit = NUMPY_DTYPES[port.dtype].itemsize * math.prod(dim.scale for dim in port.shape)
    size, rest = divmod(len(body), unit)
    has_tokens = any(dim.tokens for dim in port.shape)
    rows, tokens = (1, size) if has_tokens else (size, 1)
    if rest:
        one = "token" if has_tokens else "row"
        raise malformed(f"{path}: {len(body)} bytes are not a whole number of {one}s of {unit}")
    shape = [dim.at(rows, tokens) for dim in port.shape]
    return {port.name: from_bytes(port, memoryview(body), path, shape)}


async def encode_large(
    arrays: Mapping[str, np.ndarray], *, is_flat: bool = False
) -> dict[str, msgspec.Raw]:
    """The JSON of those arrays that are too large to be encoded in one go, with turns for others
    between. A thread would not do: both `tolist` and the encoder keep the interpreter's lock."""
    made = {}
    for name, array in arrays.items():
        if array.size > VALUES_AT_ONCE:
            text = bytearray()
            for part in _encode_parts(array.ravel() if is_flat else array):
                text += part
                await asyncio.sleep(0)
            made[name] = msgspec.Raw(text)
    return made


def _encode_parts(array: np.ndarray) -> Iterator[bytes]:
    """JSON of the nested list, in pieces of up to `VALUES_AT_ONCE` values."""
    rows = max(1, VALUES_AT_ONCE // max(1, math.prod(array.shape[1:])))
    if array.size <= VALUES_AT_ONCE or array.ndim == 0:
        yield msgspec.json.encode(array.tolist())
        return
    glue = b"["
    for start in range(0, len(array), rows):
        yield glue
        glue = b","
        if rows > 1 or array.ndim == 1:
            yield msgspec.json.encode(array[start : start + rows].tolist())[1:-1]
        else:
            yield from _encode_parts(array[start])
    yield b"]"


def largest_count(port: PortInfo, info: TenantInfo) -> int:
    """Most elements the port takes under the tenant's limits."""
    return math.prod(dim.at(info.rows_limit, max(1, info.tokens_limit)) for dim in port.shape)


def conform(info: TenantInfo, arrays: Arrays, *, is_clients: bool) -> dict[str, np.ndarray]:
    """A handler's arrays in the dtypes of the tenant's ports; only harmless casts are made. Wrong
    names and types are the handler's fault (500), unless it passes on what is the client's."""
    dtypes = {port.name: NUMPY_DTYPES[port.dtype] for port in info.inputs}
    reason, giver = ("malformed", "body") if is_clients else ("handler_failed", "the handler")
    result = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        dtype = dtypes.get(name)
        if dtype is None:
            said = f"inputs: {show(name)}, given by {giver}, is no input, there are: "
            raise HttpError(reason, said + ", ".join(dtypes))
        integers = array.dtype.kind in "iu" and dtype.kind in "iu"
        if not integers and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise HttpError(reason, f"inputs.{name}: {giver} gave {array.dtype}, not {dtype}")
        with np.errstate(over="ignore"):
            cast = np.ascontiguousarray(array, dtype)
        if integers and (cast != array).any():
            raise malformed(f"inputs.{name}: a value is out of range for {dtype}")
        result[name] = cast
    return result
