"""The metrics as users meet them: scraped by a real Prometheus, asked by the shipped dashboard."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from bisect import bisect_left
from collections import Counter
from functools import partial
from pathlib import Path

import promql_parser
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from coissue.deployments.channel.frames import TIME_BOUNDS
from coissue.deployments.metrics import HistogramTally, Levels, SchedulerMetrics
from coissue.scheduler.messages import Outcome, Reason
from coissue.scheduler.trace import LaunchRecord, RequestRecord
from load_tests import dashboards

ROOT = Path(__file__).parents[2]
MS = 1_000_000
OVERVIEW = ROOT / "configs/grafana/dashboards/overview.json"


def list_queries() -> list[tuple[str, str]]:
    """(panel title, query) of every target, with Grafana's variables filled in."""
    panels = json.loads(OVERVIEW.read_text())["panels"]
    return [
        (
            panel["title"],
            target["expr"].replace("$__rate_interval", "10s").replace("$tenant", ".*"),
        )
        for panel in panels
        if panel["type"] != "row"
        for target in panel["targets"]
    ]


#: Ten times between 30 and 50 ms.
TOOK = tuple(10 * (bound == 0.05) for bound in (*TIME_BOUNDS, math.inf))


def make_metrics() -> SchedulerMetrics:
    levels = Levels(
        window_requests=3, weight_bytes_held=1000, weight_bytes_saved=500,
        tenants_by_state={"ready": 2, "failed": 1},
    )  # fmt: skip
    metrics = SchedulerMetrics("test device", lambda: levels)
    metrics.name_tenant("a", "fast")
    metrics.name_tenant("b", "slow")
    return metrics


def make_request(number, tenant, outcome, reason=None, late_ns=0) -> RequestRecord:
    return RequestRecord(
        number, tenant, rows=1, tokens=0, submitted_ns=0, first_launch_ns=2 * MS,
        last_done_ns=5 * MS, completed_ns=6 * MS + late_ns, deadline_ns=10 * MS,
        device_ns=3 * MS, outcome=outcome, reason=reason,
    )  # fmt: skip


def feed(metrics: SchedulerMetrics) -> None:
    launch = LaunchRecord(1, 1, 0, 4 * MS, 3 * MS, (("a", 1, 0, 8), ("b", 2, 0, 4)))
    metrics.observe(
        [launch],
        [
            make_request(1, "a", Outcome.COMPLETED),
            make_request(2, "b", Outcome.COMPLETED, late_ns=20 * MS),
            make_request(3, "b", Outcome.REJECTED, Reason.DEADLINE),
            make_request(4, "a", Outcome.CANCELLED, Reason.CLIENT_GONE),
        ],
    )
    metrics.observe_times("http", "a", TOOK, 0.5)
    metrics.observe_times("lag", "", TOOK, 0.5)


def test_a_port_in_use_is_replaced_by_a_free_one_and_said(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = make_metrics().serve(port)
        try:
            assert server.server_port not in (0, port)
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            with urllib.request.urlopen(url) as answer:
                assert b"coissue_launches_total" in answer.read()
        finally:
            server.shutdown()
            server.server_close()
    (line,) = caplog.messages
    assert line.startswith(f"scheduler.metrics_port={port} cannot be used: ")
    assert line.endswith(f"taken instead: {server.server_port}")


def test_records_become_the_right_numbers():
    metrics = make_metrics()
    feed(metrics)
    value = metrics.registry.get_sample_value
    slo = {"slo_class": "fast", "tenant": "a"}
    assert value("coissue_slo_requests_total", {**slo, "outcome": "good"}) == 1
    late = {"slo_class": "slow", "tenant": "b", "outcome": "late"}
    assert value("coissue_slo_requests_total", late) == 1
    assert value("coissue_rejections_total", {"tenant": "b", "reason": "deadline"}) == 1
    assert value("coissue_device_busy_seconds_total") == pytest.approx(0.004)
    assert value("coissue_tenant_device_seconds_total", {"tenant": "a"}) == pytest.approx(0.006)
    assert value("coissue_launch_rows_sum") == 12
    assert value("coissue_launch_tenants_sum") == 2
    assert value("coissue_request_stage_seconds_sum", {"stage": "run"}) == pytest.approx(0.006)
    assert value("coissue_http_request_seconds_bucket", {"tenant": "a", "le": "0.03"}) == 0
    assert value("coissue_http_request_seconds_bucket", {"tenant": "a", "le": "0.05"}) == 10
    assert value("coissue_replica_lag_seconds_sum") == 0.5
    assert value("coissue_weight_saved_bytes") == 500
    assert value("coissue_tenants", {"state": "failed"}) == 1


def test_figures_for_the_status():
    metrics = make_metrics()
    feed(metrics)
    metrics.name_tenant("c", "fast")
    p99 = pytest.approx(30 + 0.99 * 20)  # between the bounds of its bucket
    assert metrics.summarize() == {
        "a": {"requests": 2, "in_time": 0.5, "p99_ms": p99},
        "b": {"requests": 2, "in_time": 0.0, "p99_ms": None},
        "c": {"requests": 0, "in_time": None, "p99_ms": None},
    }


@given(values=st.lists(st.floats(0, 4), min_size=1, max_size=50), share=st.floats(0.01, 1))
def test_a_quantile_is_in_the_bucket_of_the_value_with_that_rank(values, share):
    bounds = (0.5, 1.0, 2.0, 3.0)
    tally = HistogramTally("x", "", bounds)
    for value in values:
        tally.observe(value)
    ranked = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    index = bisect_left(bounds, ranked)
    low, high = ((0.0, *bounds)[index], bounds[index]) if index < 4 else (3.0, 3.0)
    assert low <= tally.quantile(share) <= high + 1e-9


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [("expired", "late"), ("replica_full", "rejected"), ("restarting", "rejected"),
     ("handler_failed", "failed"), ("malformed", None), ("too_large", None)],
)  # fmt: skip
def test_what_a_replica_refuses_counts_for_the_objective_unless_the_client_is_to_blame(
    reason, outcome
):
    metrics = make_metrics()
    value = metrics.registry.get_sample_value
    outcomes = {"tenant": "a", "slo_class": "fast"}
    metrics.count_refusals("a", reason, 3)
    metrics.count_refusals("", reason, 2)  # of no tenant
    counts = {
        name: value("coissue_slo_requests_total", {**outcomes, "outcome": name})
        for name in ("good", "late", "rejected", "failed", "cancelled")
    }
    assert {name: n for name, n in counts.items() if n} == ({outcome: 3} if outcome else {})
    assert value("coissue_rejections_total", {"tenant": "a", "reason": reason}) == 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("good", "late")), st.sampled_from(("ok", "expired", "handler_failed"))
        )
    ),
    st.randoms(),
)
def test_each_request_counts_once_by_what_the_client_got(ended, random):
    """Done in time or late, and then answered or not; what replicas report comes when it likes."""
    metrics = make_metrics()
    wanted = Counter()
    events = []
    for number, (done, answer) in enumerate(ended):
        if done == "late":  # then it is late for the client too
            answer = "expired"
        late_ns = 9 * MS if done == "late" else 0
        events.append(
            partial(
                metrics.observe, [], [make_request(number, "a", Outcome.COMPLETED, late_ns=late_ns)]
            )
        )
        if answer != "ok":
            events.append(partial(metrics.count_refusals, "a", answer, 1, is_done=True))
        wanted[{"ok": "good", "expired": "late", "handler_failed": "failed"}[answer]] += 1
    random.shuffle(events)
    for event in events:
        event()
    for number in range(len(ended)):  # good ones after it, of which some are not counted
        metrics.observe([], [make_request(number, "a", Outcome.COMPLETED)])
    wanted["good"] += len(ended)
    value = metrics.registry.get_sample_value
    slo = {"tenant": "a", "slo_class": "fast"}
    for outcome in ("good", "late", "failed"):
        found = value("coissue_slo_requests_total", {**slo, "outcome": outcome})
        assert found == wanted[outcome]


@pytest.mark.parametrize(
    ("kind", "counts", "seconds"),
    [("other", TOOK, 1.0), ("lag", TOOK[1:], 1.0), ("lag", (), 1.0), ("lag", TOOK, math.nan),
     ("lag", TOOK, math.inf), ("lag", TOOK, -1.0), ("lag", (-1, *TOOK[1:]), 1.0)],
)  # fmt: skip
def test_times_that_no_replica_of_ours_reports_are_left_out(kind, counts, seconds):
    metrics = make_metrics()
    before = metrics.render()
    metrics.observe_times(kind, "", counts, seconds)
    assert metrics.render() == before


def test_every_objective_is_a_bucket_boundary():
    settings = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())
    classes = settings["applications"][0]["args"]["slo_classes"].values()
    buckets = make_metrics().latency.bounds
    assert all(entry["deadline_ms"] / 1000 in buckets for entry in classes)


def test_dashboard_is_in_step_with_its_source():
    assert OVERVIEW.read_text() == dashboards.render_overview()


def test_dashboard_panels_are_complete():
    for panel in json.loads(OVERVIEW.read_text())["panels"]:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize(("title", "query"), list_queries())
def test_queries_parse_and_ask_for_metrics_that_exist(title, query):
    promql_parser.parse(query)
    exposed = set(re.findall(r"^# TYPE (\w+)", make_metrics().render().decode(), re.MULTILINE))
    asked = set(re.findall(r"coissue_\w+", query))
    assert asked
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} <= exposed


@pytest.fixture
def prometheus(tool, tmp_path):
    """(URL, metrics) of a Prometheus with the shipped configuration, scraping fast."""
    binary = tool("prometheus")
    metrics = make_metrics()
    server = metrics.serve(0)
    config = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    (job,) = [job for job in config["scrape_configs"] if job["job_name"] == "coissue"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{server.server_port}"]}]
    config["scrape_configs"] = [job]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = subprocess.Popen(
        [
            binary, f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield f"http://127.0.0.1:{port}", metrics
    child.terminate()
    child.wait()
    server.shutdown()
    server.server_close()


def ask(url: str, query: str) -> list:
    target = f"{url}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(target, timeout=10) as answer:
        return json.load(answer)["data"]["result"]


def wait_for(url: str, query: str, attempts: int = 300) -> list:
    """The first answer that is not empty; Prometheus takes a few scrapes."""
    for _ in range(attempts):
        try:
            if found := ask(url, query):
                return found
        except OSError:
            pass
        time.sleep(0.1)
    pytest.fail(f"no answer to {query}")


def test_every_panel_has_data_in_a_real_prometheus(prometheus):
    url, metrics = prometheus
    wait_for(url, "coissue_scheduler_info")
    feed(metrics)
    wait_for(url, "coissue_launches_total > 0")
    # Rates need two scrapes that differ.
    feed(metrics)
    wait_for(url, "rate(coissue_launches_total[10s]) > 0")
    for title, query in list_queries():
        assert wait_for(url, query), title
    attainment = next(query for title, query in list_queries() if title.startswith("Attainment"))
    by_tenant = {r["metric"]["tenant"]: float(r["value"][1]) for r in ask(url, attainment)}
    assert by_tenant == {"a": 1.0, "b": 0.0}


def test_shipped_configuration_is_valid(tool, tmp_path):
    promtool = Path(tool("prometheus")).with_name("promtool")
    run = subprocess.run(
        [promtool, "check", "config", ROOT / "configs/prometheus/prometheus.yml"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def test_alerts_fire_when_they_should(tool, tmp_path):
    rules = ROOT / "configs/prometheus/alerts.yml"
    cases = Path(__file__).with_name("alerts_test.yml").read_text().replace("RULES", str(rules))
    (tmp_path / "cases.yml").write_text(cases)
    run = subprocess.run(
        [Path(tool("prometheus")).with_name("promtool"), "test", "rules", tmp_path / "cases.yml"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def list_alert_queries():
    (group,) = yaml.safe_load((ROOT / "configs/prometheus/alerts.yml").read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


@pytest.mark.parametrize("query", list_alert_queries())
def test_alerts_ask_for_metrics_that_exist(query):
    exposed = set(re.findall(r"^# TYPE (\w+)", make_metrics().render().decode(), re.MULTILINE))
    asked = {re.sub("_(bucket|sum|count)$", "", n) for n in re.findall(r"coissue_\w+", query)}
    assert asked <= exposed
    assert asked or "haproxy" in query or "coissue:slo_burn" in query


def test_objectives_are_shown_for_alerts():
    metrics = make_metrics()
    metrics.set_objectives({"fast": 0.99})
    metrics.set_objectives({"fast": 0.95, "slow": 0.5})
    text = metrics.render().decode()
    assert 'coissue_slo_objective_ratio{slo_class="fast"} 0.95' in text
    assert 'coissue_slo_objective_ratio{slo_class="slow"} 0.5' in text
