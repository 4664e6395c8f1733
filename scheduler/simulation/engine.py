"""The run: one core and one null device per GPU, a queue of what is to come, simulated time.

    simulate(scenario, seed) -> Report

The same scenario and seed give the same run, event for event, in any process. With `check` every
invariant is checked after every turn, and the digest of all records tells two runs apart. After the
last arrival everything must drain within `drain_bound_ns`, with every request ended once and no
launch or byte left: else InvariantViolation.

A node (core and device) may be deaf until some time: while its clock jumps, and while a launch runs
if the scenario is `blocking`, as the live runtime is. What comes meanwhile is kept, with its
stamps, for one turn at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from typing import Final, final

from coissue.scheduler.core import Core
from coissue.scheduler.messages import (
    Attached,
    Cancelled,
    Command,
    Compile,
    CompileFailed,
    Complete,
    DeviceBack,
    DeviceLost,
    Event,
    Launch,
    Outcome,
    PlanReady,
    RequestId,
    Submitted,
    WakeAt,
    WeightsId,
    Woke,
)
from coissue.scheduler.null_device import NullDevice
from coissue.scheduler.ports import MS, CostView, InvariantViolation
from coissue.scheduler.simulation.arrivals import draw_requests, make_request
from coissue.scheduler.simulation.cluster import Placement
from coissue.scheduler.simulation.report import BINS, DeviceReport, Report, TenantReport
from coissue.scheduler.simulation.scenario import Scenario, SimTenant
from coissue.scheduler.trace import RequestRecord, describe

#: A lost plan is compiled for, and a lost device gone for.
COMPILE_NS: Final = 5 * MS
AWAY_NS: Final = 10 * MS
#: Turns of a node between two looks at its records.
COUNT_EVERY: Final = 64
#: Turns between two calls of `progress`.
TELL_EVERY: Final = 4096

Record = Callable[[Sequence[Event], Sequence[Command]], None]


def simulate(
    scenario: Scenario,
    seed: int,
    *,
    cost: CostView | None = None,
    true_cost: CostView | None = None,
    placement: Placement | None = None,
    progress: Callable[[int], None] | None = None,
    record: Record | None = None,
) -> Report:
    """One run. Raises InvariantViolation.

    `cost` replaces the scenario's (a measured table); `true_cost` is the device's where it is not
    what the core believes. `placement`: tenants to devices; without it
    every tenant is served by every device. `progress` is told the simulated time in ns. `record`
    is given each turn's events and commands; for one device.
    """
    cost = cost or scenario.cost
    return _Run(scenario, seed, cost, true_cost or cost, placement, progress, record).run()


def drain_bound_ns(scenario: Scenario, longest_ns: int) -> int:
    """By when all is over: each request ends at its deadline, or with the launch that holds all it
    lacks, which may be slow and share the device; and a node may be deaf or its device away then.
    `longest_ns`: the longest launch, as predicted."""
    model = scenario.device
    deadlines = [tenant.deadline_ns for tenant in scenario.tenants]
    last_ns = max([scenario.duration_ns + max(deadlines, default=0)] + [
        event.deadline_ns for event in scenario.given
    ])  # fmt: skip
    slow = max([1.0, *(tenant.slowdown for tenant in scenario.tenants)])
    slow *= max((1 + model.noise), *model.ratios, 1) * (model.slow_factor if model.slow_rate else 1)
    launch_ns = (
        longest_ns * slow + max(model.overhead_ns, *model.overheads_ns, 0)
    ) * model.slowdown(scenario.limits.slots)
    away_ns = AWAY_NS + scenario.faults.jump_ns * scenario.faults.clock_jumps
    return last_ns + away_ns + 2 * round(launch_ns) + MS


@final
class _Node:
    """One device with its scheduler."""

    __slots__ = (
        "alone", "awaited", "core", "deaf_until_ns", "device", "inbox", "open_count", "report",
        "turn_count",
    )  # fmt: skip

    def __init__(self, core: Core, device: NullDevice, report: DeviceReport) -> None:
        self.core = core
        self.device = device
        self.report = report
        #: The device's version whose next end is in the queue.
        self.awaited = 0
        #: Nothing is seen before.
        self.deaf_until_ns = 0
        #: What came while deaf.
        self.inbox: list[Event] = []
        #: Requests sent to it that have no outcome.
        self.open_count = 0
        self.turn_count = 0
        self.alone: tuple[str, ...] = ()


#: (time, sequence, where to (None: a tenant's next request), what). A number instead of an event
#: is the device's version whose next end falls on this time.
_Coming = tuple[int, int, _Node | None, "Event | int | _Source"]


@final
class _Source:
    """Where a tenant's requests come from and may go to."""

    __slots__ = ("next", "nodes", "requests")

    def __init__(self, requests: Iterator[Submitted], nodes: tuple[_Node, ...]) -> None:
        self.requests = requests
        self.nodes = nodes
        self.next: Submitted | None = None


@final
class _Run:
    """The queue of what is to come, the nodes, and the report so far."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        cost: CostView,
        true_cost: CostView,
        placement: Placement | None,
        progress: Callable[[int], None] | None,
        record: Record | None,
    ) -> None:
        self._scenario = scenario
        self._seed = seed
        self._progress = progress
        self._record = record
        slow = find_slow_weights(scenario)
        self._nodes = [
            _Node(
                Core(scenario.limits, scenario.policy, cost, self._random(f"core{index or ''}")),
                NullDevice(true_cost, self._random(f"device{index or ''}"), scenario.device, slow),
                DeviceReport(),
            )
            for index in range(scenario.devices)
        ]
        everywhere = tuple(range(scenario.devices))
        #: The nodes of each tenant.
        self._places = {
            tenant.spec.name: tuple(
                self._nodes[index] for index in (placement or {}).get(tenant.spec.name, everywhere)
            )
            for tenant in scenario.tenants
        }
        self._cancels = self._random("cancels")
        self._request_count = 0
        self._sequence = 0
        self._coming: list[_Coming] = []
        self._longest_ns = 0
        self._digest = hashlib.sha256()
        self._report = Report(
            scenario.policy,
            scenario.duration_ns,
            {tenant.spec.name: TenantReport() for tenant in scenario.tenants},
            [node.report for node in self._nodes],
        )

    def _random(self, purpose: str) -> Random:
        """A stream of its own per purpose, so that one more draw here changes nothing there."""
        return Random(f"{self._seed}/{purpose}")

    def run(self) -> Report:
        self._attach()
        self._add_faults(self._random("faults"))
        moments = now_ns = 0
        while self._coming:
            now_ns = self._coming[0][0]
            for node in self._collect(now_ns):
                if node.inbox and now_ns >= node.deaf_until_ns:
                    self._turn(node, now_ns)
            moments += 1
            if self._progress is not None and moments % TELL_EVERY == 0:
                self._progress(now_ns)
        for node in self._nodes:
            self._count(node)
        self._finish(now_ns)
        return self._report

    def _collect(self, now_ns: int) -> dict[_Node, None]:
        """Puts all that happens at this moment into the inboxes; the nodes that it happens to."""
        coming = self._coming
        touched: dict[_Node, None] = {}
        while coming and coming[0][0] == now_ns:
            _, _, node, what = heappop(coming)
            if node is None:
                assert isinstance(what, _Source)
                node = self._submit(what, now_ns)
            else:
                self._take(node, now_ns, what)
            touched[node] = None
        return touched

    # --- what comes ----------------------------------------------------------------------------

    def _add(self, at_ns: int, node: _Node | None, what: Event | int | _Source) -> None:
        self._sequence += 1
        heappush(self._coming, (at_ns, self._sequence, node, what))

    def _attach(self) -> None:
        attached: dict[int, list[Event]] = {}
        for tenant in self._scenario.tenants:
            nodes = self._places[tenant.spec.name]
            for node in nodes:
                attached.setdefault(id(node), []).append(Attached(0, tenant.spec))
                node.report.tenants += 1
            rng = self._random(tenant.spec.name)
            self._draw_next(_Source(draw_requests(tenant, self._scenario.duration_ns, rng), nodes))
        for node in self._nodes:
            node.inbox = attached.get(id(node), [])
            if node.inbox:
                self._turn(node, 0)
        for event in self._scenario.given:
            self._draw_next(_Source(iter([replace(event)]), self._places[event.tenant]))

    def _draw_next(self, source: _Source) -> None:
        event = source.next = next(source.requests, None)
        if event is not None:
            self._add(event.at_ns, None, source)

    def _submit(self, source: _Source, now_ns: int) -> _Node:
        """Sends a request to the least loaded of its tenant's nodes."""
        event, nodes = source.next, source.nodes
        assert event is not None
        self._draw_next(source)
        node = nodes[0] if len(nodes) == 1 else min(nodes, key=_open_count)
        self._request_count += 1
        event.request = RequestId(self._request_count)
        node.open_count += 1
        node.inbox.append(event)
        rate = self._scenario.faults.cancel_rate
        if rate and self._cancels.random() < rate:
            at_ns = self._cancels.randint(now_ns, event.deadline_ns)
            self._add(at_ns, node, Cancelled(at_ns, event.request))
        return node

    def _add_faults(self, rng: Random) -> None:
        faults, duration_ns = self._scenario.faults, self._scenario.duration_ns
        tenants = [tenant for tenant in self._scenario.tenants if tenant.spec.kernels]
        for _ in range(faults.compile_failures if tenants else 0):
            at_ns, spec = rng.randrange(duration_ns), rng.choice(tenants).spec
            signature = rng.choice(spec.kernels).signature
            for node in self._places[spec.name]:
                self._add(at_ns, node, CompileFailed(at_ns, signature, "simulated"))
                self._add(at_ns + AWAY_NS, node, Attached(at_ns + AWAY_NS, spec))
        for _ in range(faults.device_losses):
            at_ns, node = rng.randrange(duration_ns), rng.choice(self._nodes)
            self._add(at_ns, node, DeviceLost(at_ns, "simulated"))
            self._add(at_ns + AWAY_NS, node, DeviceBack(at_ns + AWAY_NS))
        for _ in range(faults.bursts if tenants else 0):
            at_ns, tenant = rng.randrange(duration_ns), rng.choice(tenants)
            self._add_burst(tenant, at_ns, rng)
        for _ in range(faults.clock_jumps):
            at_ns, node = rng.randrange(duration_ns), rng.choice(self._nodes)
            self._add(at_ns, node, Woke(at_ns + faults.jump_ns))

    def _add_burst(self, tenant: SimTenant, at_ns: int, rng: Random) -> None:
        nodes = self._places[tenant.spec.name]
        for _ in range(self._scenario.faults.burst_requests):
            self._draw_next(_Source(iter([make_request(tenant, at_ns, rng)]), nodes))

    # --- turns ---------------------------------------------------------------------------------

    def _take(self, node: _Node, now_ns: int, what: Event | int | _Source) -> None:
        if isinstance(what, int):
            if what == node.device.version:
                node.inbox += node.device.finish(now_ns)
                if now_ns < node.deaf_until_ns:  # no turn will ask for the next end
                    self._await(node)
            return
        assert isinstance(what, Event)
        if isinstance(what, DeviceLost):
            node.device.lose(now_ns)
        elif isinstance(what, Woke) and what.at_ns > now_ns:  # the clock jumps
            node.deaf_until_ns = max(node.deaf_until_ns, what.at_ns)
            self._add(what.at_ns, node, what)
            return
        node.inbox.append(what)

    def _turn(self, node: _Node, now_ns: int) -> None:
        events, node.inbox = node.inbox, []
        if events[-1].at_ns < now_ns:
            events.append(Woke(now_ns))
        device, core = node.device, node.core
        commands = core.handle(*events)
        if self._record is not None:
            self._record(events, commands)
        for command in commands:
            kind = type(command)
            if kind is Complete:
                node.open_count -= 1
            elif kind is Launch:
                assert isinstance(command, Launch)
                device.start(command, now_ns)
                if command.predicted_ns > self._longest_ns:
                    self._longest_ns = command.predicted_ns
            elif kind is WakeAt:
                assert isinstance(command, WakeAt)
                self._add(command.at_ns, node, Woke(command.at_ns))
            elif kind is Compile:
                assert isinstance(command, Compile)
                at_ns = now_ns + COMPILE_NS
                self._add(at_ns, node, PlanReady(at_ns, command.signature))
            # Others (Free, Load, and what is to come) ask nothing of a device without memory.
        if device.version != node.awaited:
            self._await(node)
        if (alone := tuple(core.health.alone)) != node.alone:
            node.alone = alone
            self._report.alone.append((now_ns, alone))
        node.turn_count += 1
        if self._scenario.check:
            core.check()
            self._count(node)
        elif not node.turn_count % COUNT_EVERY:
            self._count(node)

    def _await(self, node: _Node) -> None:
        node.awaited = node.device.version
        end_ns = node.device.next_ns()
        if end_ns is not None:
            self._add(end_ns, node, node.device.version)
            if self._scenario.blocking:
                node.deaf_until_ns = max(node.deaf_until_ns, end_ns)

    # --- counting ------------------------------------------------------------------------------

    def _count(self, node: _Node) -> None:
        finished, requests = node.core.trace.take()
        own, report = node.report, self._report
        for flight in finished:
            own.launch_count += 1
            own.segment_count += len(flight.members)
            if len(flight.members) > 1:
                report.tenant_count += len({kernel.request.tenant for kernel in flight.members})
                report.longest_ns = max(report.longest_ns, flight.launch.predicted_ns)
            else:
                report.tenant_count += 1
        for record in requests:
            self._count_request(record)
        if self._scenario.check:
            for flight in finished:
                self._digest.update(repr(describe(flight)).encode())
            self._digest.update(repr(requests).encode())

    def _count_request(self, record: RequestRecord) -> None:
        report, outcome = self._report, record.outcome
        tenant = report.tenants[record.tenant]
        tenant.outcomes[outcome] += 1
        tenant.device_ns += record.device_ns
        place = min(record.submitted_ns * BINS // report.duration_ns, BINS - 1)
        if outcome is Outcome.COMPLETED:
            tenant.latencies_ns.append(record.completed_ns - record.submitted_ns)
            if record.completed_ns <= record.deadline_ns:
                tenant.good_count += 1
                report.good_bins[place] += 1
        if outcome is not Outcome.CANCELLED:
            report.asked_bins[place] += 1

    def _finish(self, now_ns: int) -> None:
        report = self._report
        report.end_ns = now_ns
        report.digest = self._digest.hexdigest() if self._scenario.check else ""
        for tenant in report.tenants.values():
            tenant.latencies_ns.sort()
        ended = 0
        for node in self._nodes:
            node.report.busy_ns = node.device.busy_ns
            report.turn_count += node.turn_count
            stats = node.core.stats()
            left = stats.requests_open, stats.launches_outstanding, stats.bytes_reserved
            if any(left):
                raise InvariantViolation("drain", f"{left} requests, launches, bytes left")
            ended += sum(stats.outcomes.values())
        if ended != self._request_count:
            raise InvariantViolation("drain", f"{ended} of {self._request_count} requests ended")
        bound_ns = drain_bound_ns(self._scenario, self._longest_ns)
        if now_ns > bound_ns:
            raise InvariantViolation("drain", f"over at {now_ns} ns, not by {bound_ns} ns")


def find_slow_weights(scenario: Scenario) -> dict[WeightsId, tuple[float, int]]:
    """Those of slow tenants; weights that are shared are as fast as the fastest tenant."""
    slow: dict[WeightsId, tuple[float, int]] = {}
    for tenant in scenario.tenants:
        own = tenant.slowdown, tenant.slow_until_ns
        for kernel in tenant.spec.kernels:
            slow[kernel.weights] = min(slow.get(kernel.weights, own), own)
    return {weights: own for weights, own in slow.items() if own[0] != 1}


def _open_count(node: _Node) -> int:
    return node.open_count
