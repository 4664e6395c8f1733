"""The rules that hold between any two turns of the core, one named function each.

Each raises InvariantViolation with its name and what it saw. Run after every event in tests and in
the simulator; a full check walks the whole window, so the live scheduler does not run it.
Two further rules are checked as things happen: event times never go back (`Core`), and a request
moves only along its table, so it gets one outcome (`Retire.end`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coissue.scheduler.ports import InvariantViolation
from coissue.scheduler.states import KernelState, RequestState
from coissue.scheduler.window import Request

if TYPE_CHECKING:
    from coissue.scheduler.core import Core

_S = KernelState


def check_all(core: Core) -> None:
    for check in (
        check_containers, check_producers, check_batches, check_bytes, check_quotas, check_window,
        check_slots, check_outcomes, check_backlog, check_never_idle,
    ):  # fmt: skip
        check(core)


def check_containers(core: Core) -> None:
    """Each kernel is in exactly the container of its state."""
    queued = [
        (entry[3].request.id, entry[3].index)
        for queue in core.window.ready.queues.values()
        for entry in queue.heap
        if entry[3].live
    ]
    flying = [(k.request.id, k.index) for f in core.dispatch.flights.values() for k in f.members]
    _require(len(queued) == len(set(queued)) == core.window.ready.count, core, "containers: queued")
    _require(len(flying) == len(set(flying)), core, "containers: in flight twice")
    wanted: dict[KernelState, list[tuple[int, int]]] = {state: [] for state in _S}
    for request in _requests(core):
        for index, state in enumerate(request.states):
            wanted[state].append((request.id, index))
        ready = [index for index, state in enumerate(request.states) if state is _S.READY]
        _require(sorted(request.ready) == ready, core, f"containers: ready of {request.id}")
        flights = request.states.count(_S.IN_FLIGHT)
        _require(request.in_flight == flights, core, f"containers: flights of {request.id}")
    _require(sorted(queued) == sorted(wanted[_S.READY]), core, "containers: READY")
    _require(sorted(flying) == sorted(wanted[_S.IN_FLIGHT]), core, "containers: IN_FLIGHT")
    _require(not wanted[_S.BATCHED], core, "containers: BATCHED outside a pump")


def check_producers(core: Core) -> None:
    """No kernel is past BLOCKED before all its producers are done."""
    for request in core.window.open.values():
        for index, kernel in enumerate(request.spec.kernels):
            waits = sum(request.states[p] is not _S.DONE for p in set(kernel.producers))
            _require(waits == request.waiting[index], core, f"producers: count of {request.id}")
            blocked = request.states[index] is _S.BLOCKED
            _require(blocked == (waits > 0), core, f"producers: {request.id} kernel {index}")


def check_batches(core: Core) -> None:
    """One signature per launch; each segment is a kernel of its own request and its own weights."""
    for flight in core.dispatch.flights.values():
        launch = flight.launch
        _require(len(launch.segments) <= core.limits.segments, core, "batches: segment limit")
        for kernel, segment in zip(flight.members, launch.segments, strict=True):
            spec = kernel.request.spec.kernels[kernel.index]
            seen = segment.request, segment.kernel, segment.weights, launch.signature
            own = kernel.request.id, kernel.index, spec.weights, spec.signature
            _require(seen == own, core, f"batches: {seen} for {own}")


def check_bytes(core: Core) -> None:
    """Reserved bytes = sum over live requests <= limit."""
    held = sum(request.bytes for request in _requests(core))
    _require(held == core.window.bytes_reserved <= core.limits.bytes, core, "bytes")


def check_quotas(core: Core) -> None:
    """In flight per tenant <= its quota. A smaller quota of a new version binds new requests."""
    for tenant in core.window.tenants.values():
        limits = [request.spec.in_flight_limit for request in tenant.open.values()]
        _require(len(limits) <= max(limits, default=0), core, f"quotas: {tenant.name}")


def check_window(core: Core) -> None:
    """Open requests <= limit, and the tenants' lists are the same requests."""
    window = core.window
    _require(len(window.open) <= core.limits.window, core, "window: limit")
    listed = [id for tenant in window.tenants.values() for id in tenant.open]
    _require(sorted(listed) == sorted(window.open), core, "window: tenants' requests")


def check_slots(core: Core) -> None:
    """Slots in use = launches outstanding, each in a slot of its own."""
    used = [flight.launch.slot for flight in core.dispatch.flights.values()]
    slots = sorted([*used, *core.dispatch.free_slots])
    _require(slots == list(range(core.limits.slots)), core, f"slots: {slots}")


def check_outcomes(core: Core) -> None:
    """Open requests have no outcome; ended ones have one and a kernel in flight."""
    for request in core.window.open.values():
        _require(request.state <= RequestState.RUNNING, core, f"outcomes: {request.id} is open")
        _require(request.left > 0, core, f"outcomes: {request.id} is done")
    for request in core.window.ended.values():
        _require(request.state > RequestState.RUNNING, core, f"outcomes: {request.id} has ended")
        _require(request.in_flight > 0, core, f"outcomes: {request.id} is not freed")


def check_backlog(core: Core) -> None:
    """The backlog is the sum of the charges of kernels that were never launched."""
    charged = sum(
        request.charges[index]
        for request in core.window.open.values()
        for index, state in enumerate(request.states)
        if (state <= _S.READY or index in request.cuts) and index not in request.retried
    )
    _require(core.admission.backlog.total_ns == charged, core, "backlog")


def check_never_idle(core: Core) -> None:
    """No slot is free while a kernel that may be launched is ready, unless the policy waits for a
    moment that it has named."""
    if core.device_up and core.dispatch.free_slots:
        busy = bool(core.dispatch.flights) and not core.policy.work_conserving
        busy |= core.policy.wake_ns > core.now_ns
        queues = core.window.ready.queues.values()
        ready = any(queue.head() is not None and not queue.gated for queue in queues)
        _require(busy or not ready, core, "never idle")


def _requests(core: Core) -> list[Request]:
    return [*core.window.open.values(), *core.window.ended.values()]


def _require(holds: bool, core: Core, name: str) -> None:
    if not holds:
        raise InvariantViolation(name, f"at {core.now_ns} ns: {core.stats()}")
