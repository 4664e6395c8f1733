"""Carries out the core's launches on the device, and answers the requests.

The core speaks of ids; here they become a tenant's bound kernels and a request's buffers. All
methods but `admit` run on the runtime's thread, and only they touch buffers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np

from coissue.deployments.channel.backend import Answer
from coissue.deployments.channel.frames import printable
from coissue.kernels.cost import estimate_program
from coissue.kernels.cpu.border import Arrival, Border, Reader, enter
from coissue.kernels.cpu.device import BoundKernel, Buffers, CpuDevice, DeviceSegment
from coissue.kernels.lowered import Lowered
from coissue.scheduler.messages import Complete, Launch, Outcome, RequestId, SignatureId, TenantSpec
from coissue.scheduler.ports import LaunchError

Reply = Callable[[Answer], None]
#: Request sizes whose memory is remembered, per program.
PEAKS_LIMIT: Final = 4096
BAD_INDEX = "an input leads to an index that is outside of the table it looks up"
#: How torch says so where it does not raise an `IndexError`.
_OUTSIDE: Final = re.compile(r"is out of bounds for dimension|is not in the valid range")
#: What a client is told when the core says no more than the reason.
SENTENCES = {
    "deadline": "predicted to finish after its deadline: not queued",
    "tenant_quota": "the tenant has as many requests in flight as its limits.in_flight allows",
    "window_full": "the scheduler's window is full",
    "memory": "the device has no memory for the request now",
    "over_share": "the device is busy: a request of a tenant with less than its share went first",
    "draining": "the scheduler is draining",
    "expired": "the deadline passed before the request was done",
    "client_gone": "the client is gone",
}


@dataclass(frozen=True, slots=True)
class ServedProgram:
    """One version of one tenant on the device."""

    spec: TenantSpec
    version: int
    lowered: Lowered
    kernels: tuple[BoundKernel, ...]
    border: Border
    #: (rows, tokens) -> bytes a request of that size needs, as far as asked.
    peaks: dict[tuple[int, int], int] = field(default_factory=dict)

    def bytes_needed(self, rows: int, tokens: int) -> int:
        """Device bytes a request of this size reserves while it runs."""
        found = self.peaks.get((rows, tokens))
        if found is None:
            if len(self.peaks) >= PEAKS_LIMIT:
                self.peaks.clear()
            found = estimate_program(self.lowered.program, rows, tokens).bytes_peak
            self.peaks[rows, tokens] = found
        return found


@final
class Running:
    """A request between admission and its answer."""

    def __init__(
        self,
        program: ServedProgram,
        rows: int,
        tokens: int,
        inputs: Mapping[str, np.ndarray],
        reply: Reply,
        submitted_ns: int,
    ) -> None:
        self.program = program
        self.rows = rows
        self.tokens = tokens
        self.inputs = inputs
        self.reply = reply
        self.submitted_ns = submitted_ns
        self.buffers: Buffers | None = None
        self.first_launch_ns = 0
        self.device_ns = 0
        self.launches = 0

    def entered(self) -> Buffers:
        assert self.buffers is not None, "it entered with its first launch"
        return self.buffers


@final
class DeviceExecutor:
    """The runtime's executor over the CPU device."""

    def __init__(self, device: CpuDevice, put_out: Callable[[str, str], None]) -> None:
        self._device = device
        self._put_out = put_out
        #: Every request that has no answer yet.
        self._running: dict[RequestId, Running] = {}
        #: Failed by the client's mistake; whoever takes their records removes them (`metrics`).
        self.malformed: set[RequestId] = set()
        self._reader = Reader()

    def admit(self, request: RequestId, running: Running) -> None:
        """Before the request is posted to the core; from any thread."""
        self._running[request] = running

    def launch(self, launch: Launch) -> int:
        now_ns = time.monotonic_ns()
        self._reader.forget()
        members = [self._running[part.request] for part in launch.segments]
        self._enter([running for running in members if running.buffers is None], now_ns)
        self._run(
            [
                DeviceSegment(
                    own.program.kernels[p.kernel], own.rows, own.tokens, own.entered(), p.part
                )
                for p, own in zip(launch.segments, members, strict=True)
            ]
        )
        measured_ns = time.monotonic_ns() - now_ns
        total = max(1, sum(part.units for part in launch.segments))
        for part, running in zip(launch.segments, members, strict=True):
            running.device_ns += measured_ns * part.units // total
            running.launches += 1
        return measured_ns

    def _run(self, segments: list[DeviceSegment]) -> None:
        try:
            self._device.run(segments)
        except (IndexError, RuntimeError) as error:
            if isinstance(error, IndexError) or _OUTSIDE.search(str(error)):
                raise LaunchError(BAD_INDEX, by_input=True) from error  # the client's mistake
            raise

    @staticmethod
    def _enter(starting: list[Running], now_ns: int) -> None:
        arrivals = [Arrival(r.program.border, r.inputs, r.rows, r.tokens) for r in starting]
        for running, buffers in zip(starting, enter(arrivals), strict=True):
            running.first_launch_ns = now_ns
            running.buffers = buffers
            running.inputs = {}

    def compile(self, signature: SignatureId) -> None:
        """Plans are made when a tenant is attached, so there is nothing left to do."""

    def complete(self, complete: Complete) -> None:
        running = self._running[complete.request]
        if complete.outcome is Outcome.COMPLETED:
            running.reply(self._read(complete.request, running))
        else:
            if complete.message == BAD_INDEX:
                self.malformed.add(complete.request)
            running.reply(refuse(complete))
        if complete.outcome is Outcome.REJECTED:  # no `free` follows unless it had been admitted
            del self._running[complete.request]

    def _read(self, request: RequestId, running: Running) -> Answer:
        if running.buffers is None:  # without kernels: the outputs are the inputs
            self._enter([running], running.submitted_ns)
        return Answer(
            outputs=self._reader.read(
                running.program.border, running.entered(), running.rows, running.tokens
            ),
            queue_ns=max(0, running.first_launch_ns - running.submitted_ns),
            device_ns=running.device_ns,
            launches=running.launches,
            request=request,
        )

    def put_out(self, tenant: str, message: str) -> None:
        self._put_out(tenant, message)

    def free(self, request: RequestId) -> None:
        self._running.pop(request, None)


def refuse(complete: Complete) -> Answer:
    """The answer of a request that did not complete, with a reason that deployments know."""
    expired = complete.outcome is Outcome.EXPIRED
    reason = complete.outcome.value
    if complete.reason is not None and not expired:
        reason = complete.reason.value
    if complete.message == BAD_INDEX:
        reason = "malformed"
    message = complete.message or SENTENCES.get(reason, f"the request was {reason}")
    return Answer(reason=reason, message=printable(message), retry_after_ns=complete.retry_after_ns)
