"""A mix: a simulation in few words, as a person writes it (YAML or JSON), made into a `Scenario`.

Groups of tenants with one program each; popularity over all tenants by Zipf's law, ranks drawn from
the seed; the load as a share of what perfect packing could do (`scheduler/simulation/cluster.py`
says what that is). Default costs and contention follow arXiv 1901.00041, Fig. 7 (one SGEMM on a
V100): alone 159 us, twenty in a launch 424 us, ten in launches of their own 1640 us.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from coissue.scheduler.messages import KernelIndex, KernelSpec, SignatureId, TenantSpec, WeightsId
from coissue.scheduler.null_device import DeviceModel, LinearCost
from coissue.scheduler.ports import MS, CoreLimits, CostView
from coissue.scheduler.simulation import Faults, Scenario, SimTenant, Traffic
from coissue.scheduler.simulation.cluster import capacity_hz

US = 1000
SECOND = 1000 * MS
#: A signature's number by its name.
Find = Callable[[str], SignatureId]


def _need(of: object, names: str, holds: bool, allowed: str, under: str = "") -> None:
    if not holds:
        given = ", ".join(str(getattr(of, name)) for name in names.split(", "))
        raise ValueError(f"{under}{names}: {given}, allowed: {allowed}")


#: Of the parts of a mix that are the scheduler's own: least and most.
BOUNDS = {
    "limits": {
        "window": (1, 1 << 20), "slots": (1, 64), "segments": (1, 1 << 16), "bytes": (1, 1 << 62),
        "preemption_bound_ns": (1, 1 << 40), "hold_ns": (0, 1 << 40),
        "fair_window_ns": (1, 1 << 50), "records": (1, 1 << 24),
    },
    "device": {
        "noise": (0, 100), "contention": (0, 100), "overhead_ns": (0, 1 << 40),
        "fail_rate": (0, 1), "slow_rate": (0, 1), "slow_factor": (1, 1_000_000),
    },
    "faults": {
        "cancel_rate": (0, 1), "compile_failures": (0, 100_000), "device_losses": (0, 100_000),
        "bursts": (0, 100_000), "burst_requests": (0, 100_000), "clock_jumps": (0, 100_000),
        "jump_ns": (0, 1 << 40),
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tenants with one program: a chain of kernels."""

    name: str = "group"
    tenants: int = 12
    kernels: int = 6
    #: Names of signatures in a measured table (their beginnings do) instead of `kernels`.
    signatures: tuple[str, ...] = ()
    #: How many of the first kernels have the same weights for all tenants of the group.
    shared: int = 0
    #: Time of a launch: fixed, and for each unit (row, or token if `tokens` is given).
    fixed_us: float = 145
    unit_us: float = 14
    deadline_ms: float = 50
    #: Smallest and largest, drawn evenly.
    rows: tuple[int, int] = (1, 1)
    tokens: tuple[int, int] | None = None
    priority: int = 1
    share: float = 1.0
    in_flight: int = 256
    #: Launches with these tenants' own weights take so many times longer than predicted.
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        _need(self, "tenants", 1 <= self.tenants <= 100_000, "from 1 to 100000")
        _need(self, "kernels", 1 <= self.kernels <= 1000, "from 1 to 1000")
        least, most = sorted((self.fixed_us, self.unit_us))
        _need(self, "fixed_us, unit_us", least >= 0 and most <= 1e9, "from 0 to 1e9")
        _need(self, "fixed_us, unit_us", self.fixed_us + self.unit_us >= 1, "together at least 1")
        _need(self, "deadline_ms", 0.001 <= self.deadline_ms <= 600_000, "from 0.001 to 600000")
        for name in ("rows", "tokens"):
            low, high = getattr(self, name) or (1, 1)
            _need(self, name, 1 <= low <= high <= 131_072, "[low, high] from 1 to 131072")
        _need(self, "name", bool(self.name), "some name")
        _need(self, "priority", 1 <= self.priority <= 16, "from 1 to 16")
        _need(self, "share", 0.001 <= self.share <= 1000, "from 0.001 to 1000")
        _need(self, "in_flight", 1 <= self.in_flight <= 1 << 20, "from 1 to 1048576")
        count = len(self.signatures) or self.kernels
        _need(self, "shared", 0 <= self.shared <= count, "from 0 to the number of kernels")
        _need(self, "slowdown", 0.1 <= self.slowdown <= 100, "from 0.1 to 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    policy: str = "space_time"
    duration_s: float = 5
    devices: int = 1
    #: Devices that each group of tenants is put on at least.
    spread: int = 1
    #: Share of what perfect packing could do; `rate_hz`, requests/s of all, goes before it.
    load: float = 0.8
    rate_hz: float | None = None
    #: Exponent of the tenants' popularity; 0: all alike.
    zipf: float = 1.0
    #: Time of a launch for each set of weights beyond the first.
    set_us: float = 2
    groups: tuple[Group, ...] = (Group(),)
    traffic: Traffic = field(default_factory=Traffic)
    #: A CSV file with a column of times instead of `traffic`: their pattern, at each tenant's rate,
    #: repeated, and begun anywhere; the number of requests is by `load` or `rate_hz`.
    trace: str | None = None
    trace_column: str = "TIMESTAMP"
    limits: CoreLimits = field(default_factory=CoreLimits)
    device: DeviceModel = field(default_factory=lambda: DeviceModel(noise=0.05, contention=0.4))
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        _need(self, "duration_s", 0.001 <= self.duration_s <= 86_400, "from 0.001 to 86400")
        _need(self, "devices", 1 <= self.devices <= 1024, "from 1 to 1024")
        _need(self, "spread", 1 <= self.spread <= self.devices, "from 1 to devices")
        _need(self, "load", 0 < self.load <= 100, "above 0, at most 100")
        is_rate = self.rate_hz is None or 0.001 <= self.rate_hz <= 1e9
        _need(self, "rate_hz", is_rate, "from 0.001 to 1e9")
        _need(self, "zipf", 0 <= self.zipf <= 10, "from 0 to 10")
        _need(self, "set_us", 0 <= self.set_us <= 1e9, "from 0 to 1e9")
        on_ns = self.traffic.on_ns
        holds = on_ns == 0 or on_ns >= MS // 10
        _need(self.traffic, "on_ns", holds, "0, or from 100000", under="traffic.")
        _need(self, "groups", bool(self.groups), "at least one")
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError(f"groups: {', '.join(names)}, allowed: each name once")
        for part, bounds in BOUNDS.items():
            for name, (low, high) in bounds.items():
                of = getattr(self, part)
                holds = low <= getattr(of, name) <= high
                _need(of, name, holds, f"from {low} to {high}", under=f"{part}.")


def make_scenario(
    mix: Mix, seed: int, *, cost: CostView | None = None, find: Find | None = None
) -> Scenario:
    """`cost` and `find`: a measured table instead of the mix's costs.

    Raises ValueError and OSError for a trace, and what `find` raises.
    """
    tenants, own = _make_tenants(mix, find)
    ranks = Random(f"{seed}/ranks").sample(range(1, len(tenants) + 1), len(tenants))
    traffic = mix.traffic
    if mix.trace is not None:
        traffic = Traffic(trace_ns=read_trace(Path(mix.trace), mix.trace_column))
    tenants = [
        replace(tenant, rate_hz=rank**-mix.zipf, traffic=traffic)
        for tenant, rank in zip(tenants, ranks, strict=True)
    ]
    costs = LinearCost(set_ns=round(mix.set_us * US), own=own)
    best_hz = capacity_hz(tenants, mix.devices, mix.limits, cost or costs)
    factor = (mix.rate_hz or mix.load * best_hz) / sum(tenant.rate_hz for tenant in tenants)
    return Scenario(
        tenants=tuple(replace(tenant, rate_hz=tenant.rate_hz * factor) for tenant in tenants),
        duration_ns=round(mix.duration_s * SECOND),
        policy=mix.policy,
        limits=mix.limits,
        devices=mix.devices,
        cost=costs,
        device=mix.device,
        faults=mix.faults,
        check=False,
    )


def _make_tenants(
    mix: Mix, find: Find | None
) -> tuple[list[SimTenant], dict[SignatureId, tuple[int, int]]]:
    """All tenants, and the costs of their kernels (fixed, per unit)."""
    tenants: list[SimTenant] = []
    own: dict[SignatureId, tuple[int, int]] = {}
    for group in mix.groups:
        if bool(group.signatures) is not (find is not None):
            said = "with --costs it needs `signatures` (beginnings of names in it), else `kernels`"
            raise ValueError(f"group {group.name}: {said}")
        if find is not None:
            signatures = [find(name) for name in group.signatures]
        else:
            signatures = [SignatureId(len(own) + index) for index in range(group.kernels)]
            cost_ns = round(group.fixed_us * US), round(group.unit_us * US)
            own |= dict.fromkeys(signatures, cost_ns)
        first = len(tenants)
        for number in range(group.tenants):
            tenants.append(_make_tenant(group, number, signatures, first))
    return tenants, own


def _make_tenant(group: Group, number: int, signatures: list[SignatureId], first: int) -> SimTenant:
    """`first`: tenants in the groups before."""
    kernels = tuple(
        KernelSpec(
            signature,
            # Weights matter within a signature only, so a tenant needs but one number.
            WeightsId(-1 - first if index < group.shared else first + number),
            (KernelIndex(index - 1),) if index else (),
            group.tokens is not None,
        )
        for index, signature in enumerate(signatures)
    )
    name = f"{group.name}-{number}"
    return SimTenant(
        spec=TenantSpec(name, kernels, group.share, group.in_flight, group.priority),
        rate_hz=1.0,
        deadline_ns=round(group.deadline_ms * MS),
        rows=group.rows,
        tokens=group.tokens or (0, 0),
        slowdown=group.slowdown,
    )


def read_trace(path: Path, column: str = "TIMESTAMP") -> tuple[int, ...]:
    """Times of a CSV trace in ns from its first on, sorted.

    The column holds seconds, or ISO dates and times with up to nine decimals, as in the Azure LLM
    inference traces (github.com/Azure/AzurePublicDataset, CC-BY 4.0). Raises ValueError, OSError.
    """
    names, *rows = path.read_text(encoding="utf-8-sig").splitlines() or [""]
    if column not in names.split(","):
        raise ValueError(f"{path}: no column {column!r}, there are: {names}")
    place, times = names.split(",").index(column), []
    for number, row in enumerate(rows, 2):
        try:
            times.append(_read_time(row.split(",")[place].strip()))
        except (ValueError, IndexError):
            raise ValueError(f"{path}:{number}: no time in column {column!r}: {row!r}") from None
    times.sort()
    return tuple(at_ns - times[0] for at_ns in times)


def _read_time(text: str) -> int:
    try:
        return round(float(text) * SECOND)
    except ValueError:
        whole, _, decimals = text.partition(".")
    at = datetime.fromisoformat(whole).replace(tzinfo=UTC)
    return round(at.timestamp()) * SECOND + int(f"{decimals[:9]:0<9}")
