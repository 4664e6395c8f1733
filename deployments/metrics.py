"""Prometheus metrics of one scheduler, fed with the core's records. One registry per scheduler.

Rules: names follow `coissue_<what>_<unit>[_total]`; seconds and bytes; `tenant` is the only label
with many values. The histogram boundaries contain every SLO deadline in use, so that attainment can
be read from buckets exactly. Nothing here runs on the device's path: `observe` takes the records
that the runtime drained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import start_http_server

from coissue.scheduler.messages import Outcome
from coissue.scheduler.trace import LaunchRecord, RequestRecord

logger = logging.getLogger("coissue.metrics")
NS = 1e-9
#: States of a tenant in the directory.
STATES = ("ready", "loading", "failed", "draining")
#: From 0.5 ms to 10 s; finer between 5 and 200 ms, where objectives live.
LATENCY_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0,
)  # fmt: skip
COUNT_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)
#: Outcomes that count against a tenant's objective, by the name used in `coissue_slo_requests`.
SLO_BAD = {
    Outcome.EXPIRED: "late",
    Outcome.REJECTED: "rejected",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class Levels:
    """What is true now, read at scrape time."""

    window_requests: int
    weight_bytes_held: int
    weight_bytes_saved: int
    tenants_by_state: Mapping[str, int]


class SchedulerMetrics:
    """All metrics of one scheduler."""

    def __init__(self, device: str, levels: Callable[[], Levels]) -> None:
        self.registry = CollectorRegistry()
        self._levels = levels
        self._slo_class: dict[str, str] = {}
        self._define_request_metrics()
        self._define_launch_metrics()
        info = self._gauge("scheduler_info", "Constant 1; labels name the scheduler", ["device"])
        info.labels(device).set(1)

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"coissue_{name}", text, list(labels), registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(f"coissue_{name}", text, list(labels), registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Iterable[float], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(
            f"coissue_{name}", text, list(labels), registry=self.registry, buckets=tuple(buckets)
        )

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
        self.latency = self._histogram(
            "request_seconds", "Submit to answer, in the scheduler", LATENCY_BUCKETS, ["tenant"]
        )
        self.stages = self._histogram(
            "request_stage_seconds",
            "Where requests spent their time: queue (until first launch), run (first launch to "
            "last), reply (until answered)",
            LATENCY_BUCKETS,
            ["stage"],
        )

    def _define_launch_metrics(self) -> None:
        self.launches = self._counter("launches", "Launches on the device")
        self.busy = self._counter("device_busy_seconds", "Time the device ran launches")
        self.tenant_device = self._counter(
            "tenant_device_seconds", "Device time charged to each tenant", ["tenant"]
        )
        self.launch_units = self._histogram(
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
        self.window = self._gauge("window_requests", "Admitted requests not yet ended")
        self.window.set_function(lambda: self._levels().window_requests)
        self.held = self._gauge("weight_bytes", "Weight bytes held on the device")
        self.held.set_function(lambda: self._levels().weight_bytes_held)
        self.saved = self._gauge("weight_saved_bytes", "Weight bytes not held, thanks to sharing")
        self.saved.set_function(lambda: self._levels().weight_bytes_saved)
        tenants = self._gauge("tenants", "Tenants, by state", ["state"])
        for state in STATES:
            of_state = tenants.labels(state)
            of_state.set_function(lambda s=state: self._levels().tenants_by_state.get(s, 0))

    def name_tenant(self, tenant: str, slo_class: str) -> None:
        """Make the tenant's series exist from the start, at zero."""
        self._slo_class[tenant] = slo_class
        for outcome in ("good", *SLO_BAD.values()):
            self.slo.labels(tenant, slo_class, outcome)
        for ended in Outcome:
            self.requests.labels(tenant, ended.value)
        self.tenant_device.labels(tenant)

    def count_refusals(self, tenant: str, reason: str, count: int) -> None:
        """Requests a replica refused before they reached the scheduler (malformed, too large)."""
        self.rejections.labels(tenant, reason).inc(count)

    def observe(self, launches: Iterable[LaunchRecord], requests: Iterable[RequestRecord]) -> None:
        for launch in launches:
            self._observe_launch(launch)
        for request in requests:
            self._observe_request(request)

    def _observe_launch(self, launch: LaunchRecord) -> None:
        measured = launch.end_ns - launch.start_ns
        self.launches.inc()
        self.busy.inc(measured * NS)
        self.launch_units.observe(sum(segment[3] for segment in launch.segments))
        self.launch_segments.observe(len(launch.segments))
        self.launch_tenants.observe(len({segment[0] for segment in launch.segments}))
        if measured > 0 and not launch.failure:
            self.error.observe(abs(measured - launch.predicted_ns) / measured)

    def _observe_request(self, request: RequestRecord) -> None:
        tenant = request.tenant
        self.requests.labels(tenant, request.outcome.value).inc()
        if request.reason is not None:
            self.rejections.labels(tenant, request.reason.value).inc()
        good = request.outcome is Outcome.COMPLETED and request.completed_ns <= request.deadline_ns
        verdict = "good" if good else SLO_BAD.get(request.outcome, "late")
        self.slo.labels(tenant, self._slo_class.get(tenant, ""), verdict).inc()
        if request.device_ns:
            self.tenant_device.labels(tenant).inc(request.device_ns * NS)
        if request.outcome is Outcome.COMPLETED:
            self._observe_latency(request)

    def _observe_latency(self, request: RequestRecord) -> None:
        self.latency.labels(request.tenant).observe(
            (request.completed_ns - request.submitted_ns) * NS
        )
        queue = request.first_launch_ns - request.submitted_ns
        run = request.last_done_ns - request.first_launch_ns
        reply = request.completed_ns - request.last_done_ns
        for stage, spent in (("queue", queue), ("run", run), ("reply", reply)):
            self.stages.labels(stage).observe(max(spent, 0) * NS)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def serve(self, port: int) -> WSGIServer | None:
        """Prometheus' endpoint on 127.0.0.1; port 0 takes a free one. None if it is in use."""
        try:
            server, _ = start_http_server(port, "127.0.0.1", self.registry)
        except OSError as error:
            logger.error("scheduler.metrics_port %d cannot be used: %s", port, error.strerror)
            return None
        return server
