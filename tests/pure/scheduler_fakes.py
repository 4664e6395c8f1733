"""What the scheduler's tests share: small cores, tenants and events in few words."""

from __future__ import annotations

from random import Random

from coissue.scheduler.core import Core
from coissue.scheduler.messages import (
    Attached,
    Command,
    Complete,
    Event,
    Free,
    KernelIndex,
    KernelSpec,
    Launch,
    LaunchDone,
    Outcome,
    Reason,
    RequestId,
    SignatureId,
    Submitted,
    TenantSpec,
    WakeAt,
    WeightsId,
)
from coissue.scheduler.null_device import LinearCost
from coissue.scheduler.ports import CoreLimits
from coissue.scheduler.trace import LaunchRecord, RequestRecord, describe

#: A launch of n units with one set of weights takes 100 + 10 n.
COST = LinearCost(100, 10, 0)
#: Far away.
LATER = 1_000_000


def kernel(signature: int, weights: int = 0, *producers: int, per_token=False, splittable=False):
    waits = tuple(KernelIndex(p) for p in producers)
    return KernelSpec(SignatureId(signature), WeightsId(weights), waits, per_token, splittable)


def chain(*signatures: int, weights: int = 0) -> tuple[KernelSpec, ...]:
    return tuple(
        kernel(signature, weights, *([index - 1] if index else []))
        for index, signature in enumerate(signatures)
    )


def tenant(name: str, *kernels: KernelSpec, limit: int = 100, priority: int = 1) -> TenantSpec:
    return TenantSpec(name, kernels, 1.0, limit, priority)


class Bench:
    """A core that is checked after every turn, and the clock of the test."""

    def __init__(self, *tenants: TenantSpec, policy="space_time", cost=COST, **limits) -> None:
        # Without holding, what is ready and most urgent goes first: easier to say what to expect.
        limits = {"preemption_bound_ns": 100_000, "hold_ns": 0} | limits
        self.core = Core(CoreLimits(**limits), policy, cost, Random(0))
        self.now_ns = 1
        self.send(*[Attached(1, spec) for spec in tenants])

    def send(self, *events: Event) -> list[Command]:
        commands = self.core.handle(*events)
        self.core.check()
        return commands

    def submit(self, id: int, name: str = "a", deadline_ns: int = LATER, **given) -> Submitted:
        given = {"rows": 1, "tokens": 0, "priority": 0, "bytes_needed": 0} | given
        return Submitted(
            self.now_ns, RequestId(id), name, given["rows"], given["tokens"], deadline_ns,
            given["priority"], given["bytes_needed"],
        )  # fmt: skip

    def land(self, launch: Launch, after_ns: int | None = None) -> list[Command]:
        took_ns = launch.predicted_ns if after_ns is None else after_ns
        self.now_ns += took_ns
        return self.send(LaunchDone(self.now_ns, launch.launch, took_ns))


def take_records(core: Core) -> tuple[list[LaunchRecord], list[RequestRecord]]:
    """Records since the last call, each once."""
    flights, requests = core.trace.take()
    return [describe(flight) for flight in flights], requests


def launches(commands: list[Command]) -> list[Launch]:
    return [command for command in commands if isinstance(command, Launch)]


def launched(commands: list[Command]) -> list[list[tuple[int, int]]]:
    """(request, kernel) of every segment, by launch."""
    return [[(s.request, s.kernel) for s in launch.segments] for launch in launches(commands)]


def without_wakes(commands: list[Command]) -> list[Command]:
    return [command for command in commands if not isinstance(command, WakeAt)]


def completed(*ids: int) -> list[Command]:
    return [
        command
        for id in ids
        for command in (Complete(RequestId(id), Outcome.COMPLETED), Free(RequestId(id)))
    ]


def ended(id: int, outcome: Outcome, reason: Reason, message: str = "") -> list[Command]:
    return [Complete(RequestId(id), outcome, reason, message), Free(RequestId(id))]
