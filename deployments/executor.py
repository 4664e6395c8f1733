"""Carries out the core's launches on the device, and answers the requests.

The core speaks of ids; here they become a tenant's bound kernels and a request's buffers. All
methods but `admit` run on the runtime's thread, and only they touch buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch

from coissue.deployments.channel.server import Answer
from coissue.kernels.cost_table import CostTable
from coissue.kernels.cpu.device import (
    BoundKernel,
    Buffers,
    CpuDevice,
    DeviceSegment,
    place_inputs,
    read_outputs,
)
from coissue.kernels.lowered import Lowered
from coissue.scheduler.messages import (
    Complete,
    Launch,
    Outcome,
    RequestId,
    SignatureId,
    TenantSpec,
)

Reply = Callable[[Answer], None]
#: What a client is told when the core says no more than the reason.
SENTENCES = {
    "deadline": "predicted to finish after its deadline: not queued",
    "tenant_quota": "the tenant has as many requests in flight as its limits.in_flight allows",
    "window_full": "the scheduler's window is full",
    "memory": "the device has no memory for the request now",
    "draining": "the scheduler is draining",
    "expired": "the deadline passed before the request was done",
    "client_gone": "the client is gone",
}


@final
class Costs:
    """The core's view of the cost table: signatures by number."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        #: By `SignatureId`.
        self._names: list[str] = []
        self._ids: dict[str, SignatureId] = {}

    def intern(self, signature: str) -> SignatureId:
        found = self._ids.get(signature)
        if found is None:
            found = self._ids[signature] = SignatureId(len(self._names))
            self._names.append(signature)
        return found

    def predict_ns(
        self, signature: SignatureId, units: int, segments: int, weight_sets: int
    ) -> int:
        return self.table.predict_ns(self._names[signature], units, segments, weight_sets)

    def observe_ns(
        self, signature: SignatureId, units: int, segments: int, weight_sets: int, measured_ns: int
    ) -> None:
        self.table.observe_ns(self._names[signature], units, segments, weight_sets, measured_ns)


@dataclass(frozen=True, slots=True)
class ServedProgram:
    """One version of one tenant on the device."""

    spec: TenantSpec
    version: int
    lowered: Lowered
    kernels: tuple[BoundKernel, ...]
    #: (rows, tokens) -> bytes a request of that size needs, as far as asked.
    peaks: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class Running:
    """A request between admission and its answer."""

    program: ServedProgram
    rows: int
    tokens: int
    inputs: Mapping[str, np.ndarray]
    reply: Reply
    submitted_ns: int
    buffers: Buffers | None = None
    first_launch_ns: int = 0
    device_ns: int = 0
    launches: int = 0


@final
class DeviceExecutor:
    """The runtime's executor over the CPU device."""

    def __init__(self, device: CpuDevice) -> None:
        self._device = device
        #: Every request that has no answer yet.
        self._running: dict[RequestId, Running] = {}

    def admit(self, request: RequestId, running: Running) -> None:
        """Before the request is posted to the core; from any thread."""
        self._running[request] = running

    def launch(self, launch: Launch) -> int:
        now_ns = time.monotonic_ns()
        segments = [self._segment(part.request, part.kernel, now_ns) for part in launch.segments]
        self._device.run(segments)
        measured_ns = time.monotonic_ns() - now_ns
        total = max(1, sum(part.units for part in launch.segments))
        for part in launch.segments:
            running = self._running[part.request]
            running.device_ns += measured_ns * part.units // total
            running.launches += 1
        return measured_ns

    def _segment(self, request: RequestId, kernel: int, now_ns: int) -> DeviceSegment:
        running = self._running[request]
        if running.buffers is None:
            running.first_launch_ns = now_ns
            running.buffers = place(running)
            running.inputs = {}
        bound = running.program.kernels[kernel]
        return DeviceSegment(bound, running.rows, running.tokens, running.buffers)

    def compile(self, signature: SignatureId) -> None:
        """Plans are made when a tenant is attached, so there is nothing left to do."""

    def complete(self, complete: Complete) -> None:
        running = self._running[complete.request]
        if complete.outcome is Outcome.COMPLETED:
            running.reply(self._read(running))
        else:
            running.reply(refuse(complete))
        if complete.outcome is Outcome.REJECTED:  # never admitted: no `free` follows
            del self._running[complete.request]

    def _read(self, running: Running) -> Answer:
        # A program without kernels was never launched: its outputs are its inputs.
        buffers = place(running) if running.buffers is None else running.buffers
        found = read_outputs(running.program.lowered, buffers, running.rows, running.tokens)
        return Answer(
            outputs=[to_wire(tensor) for tensor in found.values()],
            queue_ns=max(0, running.first_launch_ns - running.submitted_ns),
            device_ns=running.device_ns,
            launches=running.launches,
        )

    def free(self, request: RequestId) -> None:
        self._running.pop(request, None)


def place(running: Running) -> Buffers:
    """The request's inputs as the device wants them."""
    lowered = running.program.lowered
    arrays = {name: from_wire(array) for name, array in running.inputs.items()}
    return place_inputs(lowered, arrays, running.rows, running.tokens)


def from_wire(array: np.ndarray) -> torch.Tensor:
    """bf16 travels as the bits in uint16, which no other dtype uses."""
    own = array if array.flags.writeable else array.copy()
    tensor = torch.from_numpy(own)
    return tensor.view(torch.bfloat16) if own.dtype == np.uint16 else tensor


def to_wire(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: np.ndarray = tensor.contiguous().numpy()
    return array


def refuse(complete: Complete) -> Answer:
    """The answer of a request that did not complete, with a reason that deployments know."""
    expired = complete.outcome is Outcome.EXPIRED
    reason = complete.outcome.value
    if complete.reason is not None and not expired:
        reason = complete.reason.value
    message = complete.message or SENTENCES.get(reason, f"the request was {reason}")
    return Answer(reason=reason, message=message, retry_after_ns=complete.retry_after_ns)
