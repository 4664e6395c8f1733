"""What a request's JSON decodes to. Structures stay Python: msgspec reads their annotations, which
compiling erases (docs/decisions/012-compiled-core.md)."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import numpy as np

from coissue.deployments.channel.frames import PortInfo
from coissue.scheduler.ready import PRIORITIES

#: A day: longer deadlines mean nothing here and would not fit the clock when huge.
TIMEOUT_LIMIT_US: Final = 86_400_000_000

Extent = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class Parameters(msgspec.Struct, frozen=True):
    #: Microseconds; 0 says nothing.
    timeout: Annotated[int, msgspec.Meta(ge=0, le=TIMEOUT_LIMIT_US)] = 0
    #: 0: the tenant's own; 1 is served first.
    priority: Annotated[int, msgspec.Meta(ge=0, le=PRIORITIES)] = 0
    binary_data_output: bool = False
    sequence_id: int | str | None = None


class InputParameters(msgspec.Struct, frozen=True):
    binary_data_size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    shared_memory_region: str | None = None


class OutputParameters(msgspec.Struct, frozen=True):
    binary_data: bool | None = None
    classification: Annotated[int, msgspec.Meta(ge=0)] = 0
    shared_memory_region: str | None = None


class InputTensor(msgspec.Struct):
    name: str
    shape: Annotated[list[Extent], msgspec.Meta(max_length=16)]
    datatype: str
    data: msgspec.Raw = msgspec.Raw(b"")
    parameters: InputParameters = InputParameters()


class OutputTensor(msgspec.Struct):
    name: str
    parameters: OutputParameters = OutputParameters()


class InferBody(msgspec.Struct):
    inputs: Annotated[list[InputTensor], msgspec.Meta(min_length=1, max_length=256)]
    id: str | None = None
    parameters: Parameters = Parameters()
    outputs: Annotated[list[OutputTensor], msgspec.Meta(max_length=256)] | None = None


class Call(msgspec.Struct):
    """A parsed inference request."""

    inputs: dict[str, np.ndarray]
    #: (output port, as binary) in the order of the answer.
    outputs: list[tuple[PortInfo, bool]]
    id: str | None = None
    #: None: the tenant's own deadline.
    budget_ns: int | None = None
    #: 0: the tenant's own.
    priority: int = 0


class PlainBody(msgspec.Struct):
    inputs: dict[str, msgspec.Raw]
