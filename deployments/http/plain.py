"""The plain route, `POST /tenants/{name}`: JSON lists or raw bytes in and out. Pure functions.

JSON is `{"inputs": {name: nested lists}}` -> `{"outputs": {name: nested lists}}`. Raw bytes are for
models with one input and one output: the body is the tensor, the answer too, and header `x-shape`
gives its shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from coissue.deployments.channel.checking import show
from coissue.deployments.http import tensors
from coissue.deployments.http.bodies import PlainBody
from coissue.deployments.http.errors import JSON, RAW, Answer, HttpError, explain, malformed

if TYPE_CHECKING:
    from coissue.deployments.channel.frames import TenantInfo


_BODY: Final = msgspec.json.Decoder(PlainBody)
#: Decoding makes an object of 50 to 100 bytes from as little as 3 bytes of JSON, so the number of
#: objects is bounded before: names in a plain body, values in a handler's payload.
NAMES_LIMIT: Final = 512
VALUES_LIMIT: Final = 1_000_000


def parse_json(info: TenantInfo, body: bytes) -> dict[str, np.ndarray]:
    for port in info.outputs:
        if port.dtype in tensors.BINARY_ONLY:
            raise malformed(
                f"outputs.{port.name}: {tensors.DATATYPES[port.dtype]} has no JSON form: ask "
                f"/v2/models/{info.name}/infer for it, with parameters.binary_data_output: true"
            )
    if body.count(b'"') > 2 * NAMES_LIMIT:
        raise malformed(f"body: more than {NAMES_LIMIT} names")
    try:
        given = _BODY.decode(body).inputs
    except tensors.DECODE_ERRORS as error:
        raise explain(error, given=body) from None
    ports = {port.name: port for port in info.inputs}
    for name in given:
        if name not in ports:
            raise malformed(f"inputs: {show(name)} is no input, there are: {', '.join(ports)}")
    return {
        name: tensors.from_json(
            ports[name], bytes(data), f"inputs.{name}", tensors.largest_count(ports[name], info)
        )
        for name, data in given.items()
    }


def parse_raw(info: TenantInfo, body: bytes) -> dict[str, np.ndarray]:
    if len(info.outputs) != 1:
        raise malformed(
            f"body: raw data need a model with one output, {info.name!r} has {len(info.outputs)}"
        )
    return tensors.from_raw(info, body)


def parse_payload(body: bytes) -> Any:
    """The JSON that a handler takes."""
    if sum(map(body.count, (b",", b"[", b"{"))) > VALUES_LIMIT:
        raise HttpError("too_large", f"body: more than {VALUES_LIMIT} values")
    try:
        return msgspec.json.decode(body)
    except tensors.DECODE_ERRORS as error:
        raise explain(error, given=body) from None


def format_json(
    outputs: Mapping[str, np.ndarray], large: Mapping[str, msgspec.Raw] | None = None
) -> Answer:
    """`large`: outputs whose JSON is there already, see `tensors.encode_large`."""
    given = large or {}
    lists = {name: given.get(name) or array.tolist() for name, array in outputs.items()}
    return 200, [JSON], msgspec.json.encode({"outputs": lists})


def format_raw(outputs: Mapping[str, np.ndarray]) -> Answer:
    (array,) = outputs.values()
    shape = ",".join(map(str, array.shape)).encode()
    return 200, [RAW, (b"x-shape", shape)], array.tobytes()


async def encode_arrays(payload: Any) -> Any:
    """The payload with the JSON of its large arrays in their place."""
    if not isinstance(payload, dict):
        return payload
    arrays = {key: value for key, value in payload.items() if isinstance(value, np.ndarray)}
    return {**payload, **await tensors.encode_large(arrays)}


def format_payload(payload: Any) -> Answer:
    """What a handler made of the outputs. Raises `HttpError` when it is not JSON."""
    try:
        return 200, [JSON], msgspec.json.encode(payload, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise HttpError("handler_failed", f"the handler's answer is not JSON: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")
