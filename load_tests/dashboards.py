"""The Grafana dashboards as code: `python -m load_tests.dashboards` rewrites configs/grafana.

A table of panels is all there is to edit. A test checks that the JSON is in step with it, and
runs every query against a real Prometheus that scraped a live scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)

FOLDER = Path(__file__).parents[1] / "configs" / "grafana" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
PICK = 'tenant=~"$tenant"'


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    unit: str
    #: (query, legend) pairs; rates use $__rate_interval.
    queries: tuple[tuple[str, str], ...]
    span: int = 12


def rate(metric: str, by: str = "", where: str = "") -> str:
    inner = f"rate({metric}{{{where}}}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(q: float, metric: str, by: str, where: str = "") -> str:
    return f"histogram_quantile({q}, {rate(metric + '_bucket', f'le, {by}', where)})"


def mean(metric: str) -> str:
    return f"{rate(metric + '_sum')} / {rate(metric + '_count')}"


SERVICE = (
    Panel(
        "Attainment by tenant",
        "Share of requests answered in time; late, rejected and failed ones count against it",
        "percentunit",
        (
            (
                rate("coissue_slo_requests_total", "tenant", PICK + ', outcome="good"')
                + " / "
                + rate("coissue_slo_requests_total", "tenant", PICK + ', outcome!="cancelled"'),
                "{{tenant}}",
            ),
        ),
    ),
    Panel(
        "p99 latency by tenant",
        "Submit to answer inside the scheduler, completed requests",
        "s",
        ((quantile(0.99, "coissue_request_seconds", "tenant", PICK), "{{tenant}}"),),
    ),
    Panel(
        "Requests by tenant and outcome",
        "Requests ended per second",
        "reqps",
        ((rate("coissue_requests_total", "tenant, outcome", PICK), "{{tenant}} {{outcome}}"),),
    ),
    Panel(
        "Rejections by reason",
        "Requests refused, expired or failed per second, with the reason the client was told",
        "reqps",
        ((rate("coissue_rejections_total", "tenant, reason", PICK), "{{tenant}} {{reason}}"),),
    ),
    Panel(
        "p99 by stage",
        "Where time goes in the scheduler: queue (until first launch), run (first launch to last)",
        "s",
        ((quantile(0.99, "coissue_request_stage_seconds", "stage"), "{{stage}}"),),
    ),
    Panel(
        "p99 around the scheduler",
        "Arrival in a replica to answer, and how late the replicas' event loops are: about what a "
        "request waits before a replica sees it, which no deadline counts",
        "s",
        (
            (
                quantile(0.99, "coissue_http_request_seconds", "tenant", PICK),
                "{{tenant}}: replica to answer",
            ),
            (
                f"histogram_quantile(0.99, {rate('coissue_replica_lag_seconds_bucket', 'le')})",
                "before the replica",
            ),
        ),
    ),
    Panel(
        "SLO good and bad",
        "Requests per second that count for the objective, by verdict",
        "reqps",
        ((rate("coissue_slo_requests_total", "slo_class, outcome"), "{{slo_class}} {{outcome}}"),),
    ),
)
DEVICE = (
    Panel(
        "Device busy",
        "Share of time the device ran launches",
        "percentunit",
        ((rate("coissue_device_busy_seconds_total", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Device time by tenant",
        "Device seconds charged per second: who uses the device",
        "percentunit",
        ((rate("coissue_tenant_device_seconds_total", "tenant", PICK), "{{tenant}}"),),
    ),
    Panel(
        "Tenants and requests per launch",
        "Mean number of distinct tenants and of requests coalesced in a launch",
        "short",
        (
            (mean("coissue_launch_tenants"), "tenants"),
            (mean("coissue_launch_segments"), "requests"),
        ),
    ),
    Panel(
        "Rows per launch",
        "Median and 90th percentile of rows (tokens for token-wise kernels) per launch",
        "short",
        (
            (f"histogram_quantile(0.5, {rate('coissue_launch_rows_bucket', 'le')})", "median"),
            (f"histogram_quantile(0.9, {rate('coissue_launch_rows_bucket', 'le')})", "p90"),
        ),
    ),
    Panel(
        "Weights held and saved",
        "Weight bytes on the device, and bytes not held because tenants share them",
        "bytes",
        (
            ("sum(coissue_weight_bytes)", "held"),
            ("sum(coissue_weight_saved_bytes)", "saved by sharing"),
        ),
    ),
    Panel(
        "Prediction error",
        "Median relative error of predicted launch times",
        "percentunit",
        (
            (
                "histogram_quantile(0.5, "
                + rate("coissue_launch_prediction_error_ratio_bucket", "le")
                + ")",
                "median",
            ),
        ),
    ),
    Panel(
        "Window",
        "Admitted requests not yet ended",
        "short",
        (("sum by (instance) (coissue_window_requests)", "{{instance}}"),),
    ),
    Panel(
        "Tenants by state",
        "Attached tenants: ready, loading, failed",
        "short",
        (("sum by (state) (coissue_tenants)", "{{state}}"),),
    ),
    Panel(
        "Native kernels",
        "Kernels with generated code, by what became of it: ready, failed, waiting",
        "short",
        (("sum by (state) (coissue_native_kernels)", "{{state}}"),),
    ),
)


def build_panel(panel: Panel) -> timeseries.Panel:
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .unit(panel.unit)
        .datasource(SOURCE)
        .span(panel.span)
        .height(8)
        .min(0)
    )
    for index, (query, legend) in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query).legend_format(legend)
        built = built.with_target(target.ref_id(chr(ord("A") + index)).datasource(SOURCE))
    return built


def build_overview() -> dashboard.Dashboard:
    tenants = (
        dashboard.QueryVariable("tenant")
        .label("Tenant")
        .datasource(SOURCE)
        .query("label_values(coissue_requests_total, tenant)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )
    built = (
        dashboard.Dashboard("coissue: tenants and device")
        .uid("coissue-overview")
        .tags(["coissue"])
        .readonly()
        .refresh("10s")
        .time("now-15m", "now")
        .with_variable(
            dashboard.DatasourceVariable("datasource").type("prometheus").label("Source")
        )
        .with_variable(tenants)
    )
    for title, panels in (("Service", SERVICE), ("Device", DEVICE)):
        built = built.with_row(dashboard.Row(title))
        for panel in panels:
            built = built.with_panel(build_panel(panel))
    return built


def render_overview() -> str:
    return JSONEncoder(sort_keys=True, indent=1).encode(build_overview().build()) + "\n"


if __name__ == "__main__":
    (FOLDER / "overview.json").write_text(render_overview())
