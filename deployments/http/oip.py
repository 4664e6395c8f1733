"""Open Inference Protocol v2 over HTTP, with Triton's binary extension: pure parse and format.

Bytes in, arrays out and back; no I/O. The JSON part is decoded by typed structures, so an error
names its field; unknown keys are ignored, as the protocol asks. BYTES tensors, shared memory and
sequences are not supported and are refused with a sentence. NaN and Inf in a JSON output are
written as null (JSON has no other form); binary outputs carry them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from coissue.deployments.channel.checking import show
from coissue.deployments.http import tensors
from coissue.deployments.http.bodies import (
    Call,
    InferBody,
    InputParameters,
    InputTensor,
    OutputParameters,
)
from coissue.deployments.http.errors import JSON, RAW, Answer, Headers, explain, malformed

if TYPE_CHECKING:
    from coissue.deployments.channel.frames import PortInfo, TenantInfo

SERVER: Final = {
    "name": "coissue",
    "version": "2",
    "extensions": ["binary_tensor_data", "schedule_policy", "model_configuration"],
}
LENGTH_HEADER: Final = b"inference-header-content-length"

_BODY: Final = msgspec.json.Decoder(InferBody)


def parse_infer(info: TenantInfo, body: bytes, header_length: bytes | None) -> Call:
    """The call in `body`. `header_length` is the value of Inference-Header-Content-Length."""
    if header_length is None:
        head, tail = body, memoryview(b"")
    else:
        split = _header_length(header_length, len(body))
        if split == 0:
            # Nothing but the one input's data: all outputs come back binary.
            outputs = [(port, True) for port in info.outputs]
            return Call(tensors.from_raw(info, body), outputs)
        head, tail = body[:split], memoryview(body)[split:]
    try:
        request = _BODY.decode(head)
    except tensors.DECODE_ERRORS as error:
        raise explain(error, given=head) from None
    if request.parameters.sequence_id not in (None, 0, ""):
        raise malformed("parameters.sequence_id: sequences are not supported")
    return Call(
        inputs=_inputs(info, request.inputs, tail, header_length is not None),
        outputs=_outputs(info, request),
        id=request.id,
        budget_ns=request.parameters.timeout * 1000 or None,
        priority=request.parameters.priority,
    )


def _header_length(value: bytes, body_length: int) -> int:
    if not value.isdigit() or len(value) > 18:
        raise malformed("header Inference-Header-Content-Length: not a number of bytes")
    length = int(value)
    if length > body_length:
        raise malformed(
            f"header Inference-Header-Content-Length: says {length} bytes of JSON, "
            f"the body has {body_length}"
        )
    return length


def _inputs(
    info: TenantInfo, given: list[InputTensor], tail: memoryview, binary: bool
) -> dict[str, np.ndarray]:
    ports = {port.name: port for port in info.inputs}
    result: dict[str, np.ndarray] = {}
    for index, tensor in enumerate(given):
        path = f"inputs[{index}]"
        port = ports.get(tensor.name)
        if port is None or tensor.name in result:
            what = "is given twice" if port else f"is no input, there are: {', '.join(ports)}"
            raise malformed(f"{path}.name: {show(tensor.name)} {what}")
        _check_datatype(port, tensor.datatype, path)
        _check_in_body(tensor.parameters, path)
        size = tensor.parameters.binary_data_size
        if size is None:
            result[port.name] = _json_input(info, port, tensor, path)
            continue
        if tensor.data or not binary:
            raise malformed(
                f"{path}.parameters.binary_data_size: "
                + ("data is given too" if tensor.data else "needs Inference-Header-Content-Length")
            )
        if size > len(tail):
            raise malformed(
                f"{path}.parameters.binary_data_size: says {size} bytes, {len(tail)} are left"
            )
        result[port.name] = tensors.from_bytes(port, tail[:size], path, tensor.shape)
        tail = tail[size:]
    if len(tail):
        raise malformed(f"body: {len(tail)} bytes more than the inputs' binary_data_size say")
    return result


def _check_in_body(given: InputParameters | OutputParameters, path: str) -> None:
    if given.shared_memory_region is not None:
        raise malformed(f"{path}.parameters.shared_memory_region: shared memory is not supported")


def _check_datatype(port: PortInfo, datatype: str, path: str) -> None:
    wanted = tensors.DATATYPES[port.dtype]
    if datatype == wanted:
        return
    if datatype == "BYTES":
        raise malformed(f"{path}.datatype: BYTES tensors are not supported, {wanted} is needed")
    raise malformed(f"{path}.datatype: {show(datatype)} where {wanted} is needed")


def _json_input(info: TenantInfo, port: PortInfo, tensor: InputTensor, path: str) -> np.ndarray:
    data = bytes(tensor.data)
    if not data:
        raise malformed(f"{path}: neither data nor parameters.binary_data_size is given")
    count = math.prod(tensor.shape)
    if count == 0:
        raise malformed(f"{path}.shape: {tensor.shape} is empty")
    return tensors.from_json(port, data, f"{path}.data", count, tensor.shape)


def _outputs(info: TenantInfo, request: InferBody) -> list[tuple[PortInfo, bool]]:
    default = request.parameters.binary_data_output
    if not request.outputs:
        chosen = [(port, default) for port in info.outputs]
    else:
        ports = {port.name: port for port in info.outputs}
        chosen = []
        for index, output in enumerate(request.outputs):
            port = ports.pop(output.name, None)
            if port is None:
                names = ", ".join(port.name for port in info.outputs)
                raise malformed(
                    f"outputs[{index}].name: {show(output.name)} is no output or given twice, "
                    f"there are: {names}"
                )
            if output.parameters.classification:
                raise malformed(f"outputs[{index}].parameters.classification: not supported")
            _check_in_body(output.parameters, f"outputs[{index}]")
            binary = output.parameters.binary_data
            chosen.append((port, default if binary is None else binary))
    for port, binary in chosen:
        if not binary:
            tensors.check_has_json(port, f"outputs.{port.name}")
    return chosen


def format_infer(
    info: TenantInfo,
    call: Call,
    outputs: Mapping[str, np.ndarray],
    large: Mapping[str, msgspec.Raw] | None = None,
) -> Answer:
    """`large`: outputs whose JSON is there already, see `tensors.encode_large`."""
    described: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for port, binary in call.outputs:
        array = outputs[port.name]
        item: dict[str, Any] = {
            "name": port.name,
            "datatype": tensors.DATATYPES[port.dtype],
            "shape": array.shape,
        }
        if binary:
            tail.append(array.tobytes())
            item["parameters"] = {"binary_data_size": array.nbytes}
        else:
            item["data"] = (large or {}).get(port.name) or array.ravel().tolist()
        described.append(item)
    answer = {"model_name": info.name, "model_version": str(info.version), "outputs": described}
    if call.id is not None:
        answer["id"] = call.id
    head = msgspec.json.encode(answer)
    if not tail:
        return 200, [JSON], head
    headers: Headers = [RAW, (LENGTH_HEADER, b"%d" % len(head))]
    return 200, headers, b"".join((head, *tail))


def model_metadata(info: TenantInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "versions": [str(info.version)],
        "platform": "coissue_program",
        "inputs": [_port_metadata(port) for port in info.inputs],
        "outputs": [_port_metadata(port) for port in info.outputs],
    }


def _extents(port: PortInfo) -> list[int]:
    return [dim.scale if dim.is_fixed else -1 for dim in port.shape]


def _port_metadata(port: PortInfo) -> dict[str, Any]:
    datatype = tensors.DATATYPES[port.dtype]
    return {"name": port.name, "datatype": datatype, "shape": _extents(port)}


def model_config(info: TenantInfo) -> dict[str, Any]:
    """Triton's ModelConfig, as far as perf_analyzer reads it."""
    ports = (*info.inputs, *info.outputs)
    batched = all(port.shape and port.shape[0].rows == 1 for port in ports)

    def describe(port: PortInfo) -> dict[str, Any]:
        name = tensors.DATATYPES[port.dtype]
        dims = _extents(port)[1:] if batched else _extents(port)
        return {"name": port.name, "data_type": f"TYPE_{name}", "dims": dims}

    return {
        "name": info.name,
        "platform": "coissue_program",
        "backend": "coissue",
        "max_batch_size": info.rows_limit if batched else 0,
        "input": [describe(port) for port in info.inputs],
        "output": [describe(port) for port in info.outputs],
        "model_transaction_policy": {"decoupled": False},
    }
