"""Prometheus metrics of one scheduler, fed with the core's records. One registry per scheduler.

Rules: names follow `coissue_<what>_<unit>[_total]`; seconds and bytes; `tenant` is the only label
with many values. The histogram boundaries contain every SLO deadline in use, so that attainment can
be read from buckets exactly. Nothing here runs on the device's path: `observe` takes the records
that the runtime drained.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from coissue.deployments.channel.frames import TIME_BOUNDS
from coissue.deployments.http.errors import STATUS
from coissue.kernels.cpu.native import STATES as KERNEL_STATES
from coissue.scheduler.messages import Outcome, RequestId
from coissue.scheduler.trace import LaunchRecord, RequestRecord

logger = logging.getLogger("coissue.metrics")
#: As Prometheus writes a float; the package has no types for it.
_go_string: Callable[[float], str] = floatToGoString
NS = 1e-9
#: States of a tenant in the directory.
STATES = ("ready", "loading", "failed", "draining")
COUNT_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)
#: Outcomes that count against a tenant's objective, by the name used in `coissue_slo_requests`.
SLO_BAD = {
    Outcome.EXPIRED: "late",
    Outcome.REJECTED: "rejected",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "cancelled",
}
#: The same for what a replica answered before or after the scheduler, by HTTP status.
SLO_BAD_STATUS = {429: "rejected", 500: "failed", 503: "rejected", 504: "late"}


@dataclass(frozen=True, slots=True)
class Levels:
    """What is true now, read at scrape time."""

    window_requests: int
    weight_bytes_held: int
    weight_bytes_saved: int
    tenants_by_state: Mapping[str, int]
    native_kernels: Mapping[str, int] = field(default_factory=dict)
    tenants_alone: int = 0
    longest_launch_ns: int = 0


class CounterTally(Collector):
    """A counter family as a dict: one addition per event, everything else at scrape time."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._family = (f"coissue_{name}", text)
        self._labels = tuple(labels)
        #: Label values -> count.
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, amount: float = 1.0) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(*self._family, labels=self._labels)
        for labels, value in list(self.values.items()):
            family.add_metric(labels, value)
        yield family


class HistogramTally(Collector):
    """A histogram family as lists of counts per bucket; see `CounterTally`."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        self._family = (f"coissue_{name}", text)
        self._labels = tuple(labels)
        self.bounds = tuple(bounds)
        #: Label values -> (counts of each bucket and beyond the last, sum of values).
        self._tallies: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}
        if not labels:
            self._tallies[()] = self._empty()

    def _empty(self) -> tuple[list[int], list[float]]:
        return [0] * (len(self.bounds) + 1), [0.0]

    def observe(self, value: float, *labels: str) -> None:
        tally = self._tallies.get(labels)
        if tally is None:
            tally = self._tallies[labels] = self._empty()
        tally[0][bisect_left(self.bounds, value)] += 1
        tally[1][0] += value

    def merge(self, counts: Sequence[int], total: float, *labels: str) -> None:
        """Values that were counted elsewhere, with the same bounds."""
        tally = self._tallies.setdefault(labels, self._empty())
        tally[0][:] = map(int.__add__, tally[0], counts)
        tally[1][0] += total

    def quantile(self, share: float, *labels: str) -> float | None:
        """By interpolation in its bucket, as Prometheus does it; None: nothing was observed."""
        counts, _ = self._tallies.get(labels) or self._empty()
        rank, below = share * sum(counts), 0
        if not rank:
            return None
        for index, count in enumerate(counts[:-1]):
            if below + count >= rank:
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * (rank - below) / count
            below += count
        return self.bounds[-1]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._family, labels=self._labels)
        names = [*map(_go_string, self.bounds), "+Inf"]
        for labels, (counts, total) in list(self._tallies.items()):
            buckets = list(zip(names, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, total[0])
        yield family


class SchedulerMetrics:
    """All metrics of one scheduler."""

    def __init__(self, device: str, levels: Callable[[], Levels]) -> None:
        self.registry = CollectorRegistry()
        self._levels = levels
        self._slo_class: dict[str, str] = {}
        #: By tenant: requests done late, less those done that a replica told to be late, which
        #: tells of the former too, sooner or later.
        self._untold: Counter[str] = Counter()
        #: By tenant: done requests that counted as good and came to nothing in the replica.
        self._owed: Counter[str] = Counter()
        self._define_request_metrics()
        self._define_launch_metrics()
        self._define_levels(device)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> CounterTally:
        tally = CounterTally(name, text, labels)
        self.registry.register(tally)
        return tally

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> HistogramTally:
        tally = HistogramTally(name, text, bounds, labels)
        self.registry.register(tally)
        return tally

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"coissue_{name}", text, labels, registry=self.registry)

    def _define_request_metrics(self) -> None:
        self.requests = self._counter(
            "requests", "Requests ended, by outcome", ["tenant", "outcome"]
        )
        self.rejections = self._counter(
            "rejections", "Requests refused or dropped, by reason", ["tenant", "reason"]
        )
        self.slo = self._counter(
            "slo_requests",
            "Requests that count for the objective: good, late, rejected, failed, cancelled",
            ["tenant", "slo_class", "outcome"],
        )
        self.objective = self._gauge(
            "slo_objective_ratio", "Share of requests that are to be in time", ["slo_class"]
        )
        self.latency = self._histogram(
            "request_seconds", "Submit to answer, in the scheduler", TIME_BOUNDS, ["tenant"]
        )
        self.stages = self._histogram(
            "request_stage_seconds",
            "Where requests spent their time: queue (until first launch), run (until last done)",
            TIME_BOUNDS,
            ["stage"],
        )
        self.replica = {
            "http": self._histogram(
                "http_request_seconds",
                "Arrival in a replica to answer, of requests answered 200",
                TIME_BOUNDS,
                ["tenant"],
            ),
            "lag": self._histogram(
                "replica_lag_seconds",
                "How late the replicas' event loops were, sampled: about what requests wait before "
                "a replica sees them",
                TIME_BOUNDS,
            ),
        }

    def _define_launch_metrics(self) -> None:
        self.launches = self._counter("launches", "Launches on the device")
        self.busy = self._counter("device_busy_seconds", "Time the device ran launches")
        self.tenant_device = self._counter(
            "tenant_device_seconds", "Device time charged to each tenant", ["tenant"]
        )
        self.launch_rows = self._histogram(
            "launch_rows", "Rows (tokens for token-wise kernels) per launch", COUNT_BUCKETS
        )
        self.launch_segments = self._histogram(
            "launch_segments", "Requests coalesced per launch", COUNT_BUCKETS
        )
        self.launch_tenants = self._histogram(
            "launch_tenants", "Distinct tenants per launch", COUNT_BUCKETS
        )
        self.error = self._histogram(
            "launch_prediction_error_ratio",
            "Relative error of the predicted launch time, |measured - predicted| / measured",
            (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
        )

    def _define_levels(self, device: str) -> None:
        """Gauges read when somebody looks."""
        self._gauge("scheduler_info", "Constant 1; labels name the scheduler", ["device"]).labels(
            device
        ).set(1)
        window = self._gauge("window_requests", "Admitted requests not yet ended")
        window.set_function(lambda: self._levels().window_requests)
        held = self._gauge("weight_bytes", "Weight bytes held on the device")
        held.set_function(lambda: self._levels().weight_bytes_held)
        saved = self._gauge("weight_saved_bytes", "Weight bytes not held, thanks to sharing")
        saved.set_function(lambda: self._levels().weight_bytes_saved)
        alone = self._gauge("tenants_alone", "Tenants out of the groups: stragglers, failures")
        alone.set_function(lambda: self._levels().tenants_alone)
        longest = self._gauge("longest_launch_seconds", "Longest that one launch blocked others")
        longest.set_function(lambda: self._levels().longest_launch_ns * NS)
        kernels = self._gauge(
            "native_kernels", "Kernels with generated code: ready, failed, waiting", ["state"]
        )
        for state in KERNEL_STATES:
            kernels.labels(state).set_function(partial(self._count, "native_kernels", state))
        tenants = self._gauge("tenants", "Tenants, by state", ["state"])
        for state in STATES:
            tenants.labels(state).set_function(partial(self._count, "tenants_by_state", state))

    def _count(self, field: str, state: str) -> int:
        return int(getattr(self._levels(), field).get(state, 0))

    def set_objectives(self, objectives: Mapping[str, float]) -> None:
        """Those of all SLO classes; a class that is gone keeps its last."""
        for slo_class, objective in objectives.items():
            self.objective.labels(slo_class).set(objective)

    def name_tenant(self, tenant: str, slo_class: str) -> None:
        """Make the tenant's series exist from the start, at zero."""
        self._slo_class[tenant] = slo_class
        for outcome in ("good", *SLO_BAD.values()):
            self.slo.add(tenant, slo_class, outcome, amount=0)
        for ended in Outcome:
            self.requests.add(tenant, ended.value, amount=0)
        self.tenant_device.add(tenant, amount=0)

    def count_refusals(
        self, tenant: str, reason: str, count: int, *, is_done: bool = False
    ) -> None:
        """Requests that a replica refused. Those not refused for the client's mistake count for
        the objective too, each once: what was done, and so was counted already, stays late if it
        was; if it was good, one good request to come is not counted."""
        self.rejections.add(tenant, reason, amount=count)
        verdict = SLO_BAD_STATUS.get(STATUS.get(reason, 500))
        if verdict is None or tenant not in self._slo_class:
            return
        if is_done:
            known = 0
            if verdict == "late":
                known = min(count, max(0, self._untold[tenant]))
                self._untold[tenant] -= count
            count -= known
            self._owed[tenant] += count
        self.slo.add(tenant, self._slo_class[tenant], verdict, amount=count)

    def observe_times(self, kind: str, tenant: str, counts: Sequence[int], seconds: float) -> None:
        """What a replica measured; nothing, if it is not what a replica of ours would report."""
        family = self.replica.get(kind)
        fits = len(counts) == len(TIME_BOUNDS) + 1 and min(counts) >= 0 and 0 <= seconds < math.inf
        if family is not None and fits:
            family.merge(counts, seconds, *([tenant] if kind == "http" else []))

    def observe(
        self,
        launches: Iterable[LaunchRecord],
        requests: Iterable[RequestRecord],
        malformed: set[RequestId] | None = None,
    ) -> None:
        """One caller at a time; scrapes may run beside it. Requests found in `malformed` failed by
        the client's mistake, count as refused and not for the objective, and are removed there."""
        for launch in launches:
            self._observe_launch(launch)
        for request in requests:
            if malformed and request.request in malformed:
                malformed.remove(request.request)
                self.count_refusals(request.tenant, "malformed", 1)
                self.tenant_device.add(request.tenant, amount=request.device_ns * NS)
            else:
                self._observe_request(request)

    def _observe_launch(self, launch: LaunchRecord) -> None:
        measured = launch.end_ns - launch.start_ns
        self.launches.add()
        self.busy.add(amount=measured * NS)
        self.launch_rows.observe(sum(segment[3] for segment in launch.segments))
        self.launch_segments.observe(len(launch.segments))
        self.launch_tenants.observe(len({segment[0] for segment in launch.segments}))
        if measured > 0 and not launch.failure:
            self.error.observe(abs(measured - launch.predicted_ns) / measured)

    def _observe_request(self, request: RequestRecord) -> None:
        tenant = request.tenant
        self.requests.add(tenant, request.outcome.value)
        if request.reason is not None:
            self.rejections.add(tenant, request.reason.value)
        done = request.outcome is Outcome.COMPLETED
        good = done and request.completed_ns <= request.deadline_ns
        if done and not good:
            good = self._untold[tenant] < 0  # counted as late, and as owed, when it was told
            self._untold[tenant] += 1
        if good and self._owed[tenant]:
            self._owed[tenant] -= 1
        else:
            verdict = "good" if good else SLO_BAD.get(request.outcome, "late")
            self.slo.add(tenant, self._slo_class.get(tenant, ""), verdict)
        if request.device_ns:
            self.tenant_device.add(tenant, amount=request.device_ns * NS)
        if done:
            self._observe_latency(request)

    def _observe_latency(self, request: RequestRecord) -> None:
        spent = request.completed_ns - request.submitted_ns
        self.latency.observe(spent * NS, request.tenant)
        queue = request.first_launch_ns - request.submitted_ns
        run = request.last_done_ns - request.first_launch_ns
        for stage, part in (("queue", queue), ("run", run)):
            self.stages.observe(max(part, 0) * NS, stage)

    def summarize(self) -> dict[str, dict[str, float | None]]:
        """By tenant, since this scheduler began: requests that count for the objective, the share
        of them that was in time, and the p99 of answers from arrival in a replica, ms."""
        asked: Counter[str] = Counter()
        good: Counter[str] = Counter()
        for (tenant, _, outcome), count in list(self.slo.values.items()):
            asked[tenant] += int(count)
            good[tenant] += int(count) * (outcome == "good")
        found: dict[str, dict[str, float | None]] = {}
        for tenant, count in asked.items():
            p99 = self.replica["http"].quantile(0.99, tenant)
            found[tenant] = {
                "requests": count,
                "in_time": good[tenant] / count if count else None,
                "p99_ms": None if p99 is None else 1e3 * p99,
            }
        return found

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def serve(self, port: int) -> WSGIServer | None:
        """Prometheus' endpoint on 127.0.0.1; port 0, or one in use, takes a free one."""
        try:
            return start_http_server(port, "127.0.0.1", self.registry)[0]
        except OSError as error:
            server = self.serve(0) if port else None
            said = "scheduler.metrics_port=%d cannot be used: %s; taken instead: %s"
            logger.warning(said, port, error.strerror, server and server.server_port)
            return server
