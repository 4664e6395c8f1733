"""What a run came to: counts by tenant and device, latencies, and a timeline, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from coissue.scheduler.messages import Outcome
from coissue.scheduler.ports import MS
from coissue.scheduler.simulation.scenario import SECOND

#: Parts of the run that the timeline tells apart.
BINS: Final = 100
#: Points of a latency curve in the JSON form.
CURVE_PERCENTS: Final = (*range(1, 100), 99.5, 99.9, 100)


def percentile_ns(latencies_ns: list[int], percent: float) -> int:
    """Latency that `percent` of a sorted list stayed within; 0 for an empty one."""
    last = len(latencies_ns) - 1
    return latencies_ns[round(percent / 100 * last)] if last >= 0 else 0


@dataclass(slots=True)
class TenantReport:
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    #: Completed within the deadline.
    good_count: int = 0
    device_ns: int = 0
    #: Of completed requests, from submission; sorted in the finished report.
    latencies_ns: list[int] = field(default_factory=list)

    @property
    def asked_count(self) -> int:
        """Requests that the client did not cancel."""
        return self.outcomes.total() - self.outcomes[Outcome.CANCELLED]

    @property
    def attainment(self) -> float:
        """Good among all asked; 1 if none were."""
        return self.good_count / self.asked_count if self.asked_count else 1.0

    def percentile_ns(self, percent: float) -> int:
        """Latency that `percent` of the completed requests stayed within; 0 if none completed."""
        return percentile_ns(self.latencies_ns, percent)


@dataclass(slots=True)
class DeviceReport:
    tenants: int = 0
    #: With at least one launch in flight.
    busy_ns: int = 0
    launch_count: int = 0
    segment_count: int = 0


@dataclass(slots=True)
class Report:
    policy: str
    duration_ns: int
    tenants: dict[str, TenantReport]
    devices: list[DeviceReport]
    #: When the last event was done.
    end_ns: int = 0
    #: Sum over launches of the different tenants in each.
    tenant_count: int = 0
    #: Longest launch of several members, as predicted.
    longest_ns: int = 0
    #: Turns of all cores.
    turn_count: int = 0
    #: By time of submission: requests asked, and those of them that were good.
    asked_bins: list[int] = field(default_factory=lambda: [0] * BINS)
    good_bins: list[int] = field(default_factory=lambda: [0] * BINS)
    #: (when, who): tenants out of a device's groups, whenever that changed.
    alone: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    #: Tells two runs apart; only when the scenario has `check`.
    digest: str = ""

    @property
    def launch_count(self) -> int:
        return sum(device.launch_count for device in self.devices)

    @property
    def segment_count(self) -> int:
        return sum(device.segment_count for device in self.devices)

    @property
    def busy_ns(self) -> int:
        return sum(device.busy_ns for device in self.devices)

    @property
    def goodput_hz(self) -> float:
        """Completed within their deadlines, per second in which requests came."""
        return sum(own.good_count for own in self.tenants.values()) * SECOND / self.duration_ns

    @property
    def attainment(self) -> float:
        return sum_up(self.tenants.values()).attainment

    def summarise(self) -> dict[str, float | int | str]:
        """The run in one row; times in ms."""
        whole = sum_up(self.tenants.values())
        ended = max(self.end_ns, self.duration_ns) * len(self.devices)
        return {
            "policy": self.policy,
            "requests": whole.outcomes.total(),
            "attainment": whole.attainment,
            "goodput_hz": self.goodput_hz,
            "p50_ms": whole.percentile_ns(50) / MS,
            "p99_ms": whole.percentile_ns(99) / MS,
            **{outcome.value: whole.outcomes[outcome] for outcome in Outcome},
            "worst_tenant": min(own.attainment for own in self.tenants.values()),
            "busy": self.busy_ns / ended,
            "launches": self.launch_count,
            "members_per_launch": self.segment_count / max(1, self.launch_count),
            "tenants_per_launch": self.tenant_count / max(1, self.launch_count),
        }

    def to_plain(self) -> dict[str, object]:
        """All figures as JSON data; latencies as curves of (percent, ms)."""
        whole = sum_up(self.tenants.values())
        return {
            "summary": self.summarise(),
            "duration_ms": self.duration_ns / MS,
            "latency_curve": [[p, whole.percentile_ns(p) / MS] for p in CURVE_PERCENTS],
            "asked_bins": self.asked_bins,
            "good_bins": self.good_bins,
            "devices": [
                {
                    "tenants": own.tenants,
                    "busy": own.busy_ns / max(self.end_ns, self.duration_ns),
                    "launches": own.launch_count,
                    "members": own.segment_count,
                }
                for own in self.devices
            ],
            "tenants": {
                name: {
                    "asked": own.asked_count,
                    "attainment": own.attainment,
                    "p50_ms": own.percentile_ns(50) / MS,
                    "p99_ms": own.percentile_ns(99) / MS,
                    "device_ms": own.device_ns / MS,
                    **{o.value: count for o, count in own.outcomes.items()},
                }
                for name, own in self.tenants.items()
            },
        }


def sum_up(parts: Iterable[TenantReport]) -> TenantReport:
    """All as one."""
    whole = TenantReport()
    for part in parts:
        whole.outcomes += part.outcomes
        whole.good_count += part.good_count
        whole.device_ns += part.device_ns
        whole.latencies_ns += part.latencies_ns
    whole.latencies_ns.sort()
    return whole
