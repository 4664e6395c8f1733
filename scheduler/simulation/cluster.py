"""Several devices: what they could carry at best, and which tenants are served where.

NOTE on capacity. *Perfect packing* gives every kernel to a launch of the size that costs least per
member: among all sizes within `segments` and `preemption_bound` the one where predicted time /
members is smallest (the knee, where waiting for more would gain nothing). Its members are drawn by
the tenants' rates, so it has as many weight sets as that many draws have on average. The capacity
is the rate of requests, in the tenants' proportions, at which all devices do only that, without a
gap. It is a bound: deadlines, bursts and the end of queues keep any scheduler below it.

NOTE on placement. Equal programs coalesce, and equal weights coalesce for less, so tenants are
sorted by program and weights and cut into parts of at most a device's fair load, which are placed
longest first on the least loaded device. A tenant that alone is more than a fair load is served by
several devices. `spread` puts each part on that many devices, for bursts that one cannot carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from coissue.scheduler.messages import KernelSpec, SignatureId, WeightsId
from coissue.scheduler.ports import CoreLimits, CostView
from coissue.scheduler.simulation.scenario import SECOND, SimTenant

#: tenant -> the devices that serve it, each an equal part of its requests.
Placement = Mapping[str, tuple[int, ...]]


def mean_units(tenant: SimTenant, kernel: KernelSpec) -> int:
    """Rows or tokens of a mean request."""
    rows = sum(tenant.rows) / 2
    return max(1, round(rows * sum(tenant.tokens) / 2 if kernel.per_token else rows))


def member_ns(
    kernel: KernelSpec,
    units: int,
    rates: Mapping[WeightsId, float],
    limits: CoreLimits,
    cost: CostView,
) -> float:
    """Least time per member over the sizes that a launch may have. `rates`: of the signature."""
    total = sum(rates.values()) or 1.0
    best, size = float(cost.predict_ns(kernel.signature, units, 1, 1)), 2
    while size <= limits.segments:
        missing = sum((1 - rate / total) ** size for rate in rates.values())
        sets = max(1, round(len(rates) - missing))
        time_ns = cost.predict_ns(kernel.signature, units * size, size, sets)
        if time_ns > limits.preemption_bound_ns:
            break
        best = min(best, time_ns / size)
        size += max(1, size // 8)
    return best


def request_costs(
    tenants: Sequence[SimTenant], limits: CoreLimits, cost: CostView
) -> dict[str, float]:
    """Device time in ns of a request under perfect packing, by tenant."""
    rates: dict[SignatureId, dict[WeightsId, float]] = {}
    for tenant in tenants:
        for kernel in tenant.spec.kernels:
            by_weights = rates.setdefault(kernel.signature, {})
            by_weights[kernel.weights] = by_weights.get(kernel.weights, 0.0) + tenant.rate_hz
    known: dict[tuple[SignatureId, int], float] = {}
    costs = {}
    for tenant in tenants:
        whole = 0.0
        for kernel in tenant.spec.kernels:
            key = kernel.signature, mean_units(tenant, kernel)
            if key not in known:
                known[key] = member_ns(kernel, key[1], rates[key[0]], limits, cost)
            whole += known[key]
        costs[tenant.spec.name] = whole
    return costs


def capacity_hz(
    tenants: Sequence[SimTenant], devices: int, limits: CoreLimits, cost: CostView
) -> float:
    """Requests/s of all tenants together that `devices` carry under perfect packing."""
    costs = request_costs(tenants, limits, cost)
    busy = sum(tenant.rate_hz * costs[tenant.spec.name] for tenant in tenants) / SECOND
    rate_hz = sum(tenant.rate_hz for tenant in tenants)
    return rate_hz * devices / busy if busy else float("inf")


@dataclass(slots=True)
class _Part:
    """Tenants that go together; a tenant may have a piece of its load in each of several parts."""

    load: float
    names: list[str]


def place(
    tenants: Sequence[SimTenant],
    devices: int,
    limits: CoreLimits,
    cost: CostView,
    spread: int = 1,
) -> Placement:
    """Which devices serve each tenant. Raises ValueError when `spread` is not in 1 to `devices`."""
    if not 1 <= spread <= devices:
        raise ValueError(f"spread must be from 1 to {devices} devices, not {spread}")
    costs = request_costs(tenants, limits, cost)
    loads = {t.spec.name: t.rate_hz * costs[t.spec.name] / SECOND for t in tenants}
    fair = sum(loads.values()) / devices
    parts = [part for group in _group(tenants) for part in _cut(group, loads, fair)]
    held = [0.0] * devices
    placed: dict[str, dict[int, None]] = {tenant.spec.name: {} for tenant in tenants}
    for part in sorted(parts, key=lambda part: -part.load):
        order = sorted(range(devices), key=lambda device: (held[device], device))
        for device in order[:spread]:
            held[device] += part.load / spread
            for name in part.names:
                placed[name][device] = None
    return {name: tuple(sorted(found)) for name, found in placed.items()}


def _group(tenants: Sequence[SimTenant]) -> list[list[str]]:
    """Names by program, those with equal weights beside each other."""
    groups: dict[tuple[SignatureId, ...], list[SimTenant]] = {}
    for tenant in tenants:
        key = tuple(kernel.signature for kernel in tenant.spec.kernels)
        groups.setdefault(key, []).append(tenant)
    for group in groups.values():
        group.sort(key=lambda tenant: [kernel.weights for kernel in tenant.spec.kernels])
    return [[tenant.spec.name for tenant in group] for group in groups.values()]


def _cut(names: Sequence[str], loads: Mapping[str, float], fair: float) -> list[_Part]:
    """The group in parts of at most about `fair`: of equal size, and cut where tenants meet unless
    one alone is larger."""
    total = sum(loads[name] for name in names)
    count = max(1, ceil(total / fair - 1e-9)) if fair else 1
    parts = [_Part(0.0, [])]
    for name in names:
        pieces = max(1, ceil(loads[name] / fair - 1e-9)) if fair else 1
        for _ in range(pieces):
            load = loads[name] / pieces
            if parts[-1].names and parts[-1].load + load / 2 > total / count:
                parts.append(_Part(0.0, []))
            parts[-1].load += load
            parts[-1].names.append(name)
    return parts
