"""What a recording says of the traffic and of the device, and the scenario that it makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from coissue.scheduler.messages import (
    Attached,
    Launch,
    LaunchDone,
    Outcome,
    RequestId,
    SignatureId,
    Submitted,
    TenantSpec,
)
from coissue.scheduler.null_device import DeviceModel
from coissue.scheduler.plain import from_plain
from coissue.scheduler.ports import CoreLimits, CostView
from coissue.scheduler.recording import Turn, read_turns
from coissue.scheduler.simulation import Scenario, SimTenant


@dataclass(slots=True)
class Flown:
    """A launch that came back."""

    launch: Launch
    #: Time of the turn that decided on it, of its end, and of the turn that saw the end.
    decided_ns: int
    done_ns: int
    seen_ns: int
    #: Device time.
    measured_ns: int
    #: Requests answered in the turn that decided, which go out before the launch.
    answered: int


@dataclass(slots=True)
class RecordedRun:
    policy: str
    limits: CoreLimits
    #: The last version of each tenant, and the names of signatures.
    specs: dict[str, TenantSpec] = field(default_factory=dict)
    names: dict[SignatureId, str] = field(default_factory=dict)
    #: Requests since the last tenant was attached, at the times of the turns that saw them.
    submitted: list[Submitted] = field(default_factory=list)
    #: From there to the turn of the answer, of those that completed.
    latencies_ns: dict[RequestId, int] = field(default_factory=dict)
    flown: list[Flown] = field(default_factory=list)


def read_run(lines: Iterable[str]) -> RecordedRun:
    """Raises ReplayError."""
    turns = read_turns(lines)
    policy, limits, _ = next(turns)
    run = RecordedRun(policy, limits)
    came_ns: dict[RequestId, int] = {}
    flying: dict[int, tuple[Launch, int, int]] = {}
    for turn in turns:
        read_turn(run, turn, came_ns, flying)
    return run


def read_turn(
    run: RecordedRun,
    turn: Turn,
    came_ns: dict[RequestId, int],
    flying: dict[int, tuple[Launch, int, int]],
) -> None:
    now_ns = turn.events[-1].at_ns
    run.names |= {SignatureId(int(number)): name for number, name in turn.names.items()}
    for event in turn.events:
        if isinstance(event, Submitted):
            # Requests that are read one after the other are seen in one turn: their time is its.
            run.submitted.append(replace(event, at_ns=now_ns))
            came_ns[event.request] = now_ns
        elif isinstance(event, Attached):
            run.specs[event.tenant.name] = event.tenant
            run.submitted.clear()
            run.latencies_ns.clear()
            run.flown.clear()
        elif isinstance(event, LaunchDone) and event.launch in flying:
            launch, at_ns, answered = flying.pop(event.launch)
            run.flown.append(Flown(launch, at_ns, event.at_ns, now_ns, event.measured_ns, answered))
    answered = sum(name == "Complete" for name, *_ in turn.commands)
    for name, *values in turn.commands:
        if name == "Complete" and values[1] == Outcome.COMPLETED.value:
            run.latencies_ns[values[0]] = now_ns - came_ns.pop(values[0])
        elif name == "Launch":
            keys = [own.name for own in fields(Launch)]
            launch = from_plain(Launch, dict(zip(keys, values, strict=True)))
            flying[launch.launch] = launch, now_ns, answered


def find_overheads(run: RecordedRun) -> tuple[int, ...]:
    """Per launch the time that the device did not work: answers, decoding, the loop."""
    return tuple(own.seen_ns - own.decided_ns - own.measured_ns for own in run.flown)


def find_ratios(run: RecordedRun, cost: CostView) -> tuple[float, ...]:
    """Per launch its measured over its predicted time."""
    return tuple(own.measured_ns / predict(own.launch, cost) for own in run.flown)


def predict(launch: Launch, cost: CostView) -> int:
    units = sum(segment.units for segment in launch.segments)
    sets = len({segment.weights for segment in launch.segments})
    return cost.predict_ns(launch.signature, units, len(launch.segments), sets, launch.joins)


def make_scenario(run: RecordedRun, known: RecordedRun, cost: CostView) -> Scenario:
    """The recorded requests at their times on a device that errs as in another run it did."""
    first_ns = run.submitted[0].at_ns
    given = [
        replace(event, at_ns=event.at_ns - first_ns, deadline_ns=event.deadline_ns - first_ns)
        for event in run.submitted
    ]
    tenants = tuple(SimTenant(spec=spec, rate_hz=0.0, deadline_ns=0) for spec in run.specs.values())
    return Scenario(
        tenants=tenants,
        duration_ns=given[-1].at_ns + 1,
        policy=run.policy,
        limits=run.limits,
        device=DeviceModel(ratios=find_ratios(known, cost), overheads_ns=find_overheads(known)),
        given=tuple(given),
        blocking=True,
        check=False,
    )
