"""The goodput search, the reading of wrk's report, and the result files."""

import itertools
import json
import math
from collections import Counter

import pytest

from load_tests import goodput, results, wrk
from load_tests.client import Answer, LoadResult, Shot
from load_tests.goodput import Probe, Target

WRK_REPORT = """Running 4s test @ http://127.0.0.1:8100/a
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency    21.94ms    5.03ms  72.11ms   86.55%
    Req/Sec     2.93k   335.16     3.33k    77.50%
  Latency Distribution
     50%  950.00us
     75%   23.08ms
     90%   26.14ms
     99%    1.20s
  11673 requests in 4.01s, 1.41MB read
  Socket errors: connect 0, read 2, write 0, timeout 1
  Non-2xx or 3xx responses: 7
Requests/sec:   2911.50
Transfer/sec:    361.06KB
"""


def drive(capacity, start, limit=6000.0):
    steps = goodput.search(start, limit)
    rate, probed = next(steps), []
    try:
        while True:
            probed.append(rate)
            rate = steps.send(rate <= capacity)
    except StopIteration as done:
        return done.value, probed


@pytest.mark.parametrize("start", [50.0, 300.0, 1000.0])
@pytest.mark.parametrize("capacity", [5.0, 99.0, 300.0, 1234.5, 5999.0])
def test_search_comes_within_a_step_of_the_capacity(capacity, start):
    found, probed = drive(capacity, start)
    assert capacity / goodput.STEP <= found <= capacity
    assert len(probed) <= goodput.PROBES_LIMIT


def test_search_ends_at_its_limits():
    assert drive(math.inf, 300.0) == (6000.0, [300.0, 600.0, 1200.0, 2400.0, 4800.0, 6000.0])
    assert drive(0.0, 300.0)[0] == 0.0


def probe_of(rate, p99_ms):
    return Probe(rate, p99_ms / 2, p99_ms, 1.0, 0.1)


def test_compare_takes_turns():
    capacities, order = {"a": 800.0, "b": 100.0}, []

    def probe(target, rate):
        order.append(target.name)
        return probe_of(rate, 10.0 if rate <= capacities[target.name] else 90.0)

    targets = [Target(name, 1, {}) for name in capacities]
    found = goodput.compare(targets, {"a": 500.0, "b": 300.0}, 6000.0, probe)
    for name, capacity in capacities.items():
        rate, probes = found[name]
        assert capacity / goodput.STEP <= rate <= capacity
        assert rate == max(probe.rate for probe in probes if probe.passed)
    turns = [name for name, _ in itertools.groupby(order)]
    assert turns[:4] == ["a", "b", "a", "b"]


def test_one_hiccup_does_not_decide():
    seen = Counter()

    def probe(target, rate):
        seen[rate] += 1
        return probe_of(rate, 10.0 if rate <= 800 and seen[rate] == 2 else 90.0)

    rate, _ = goodput.compare([Target("a", 1, {})], {"a": 500.0}, 6000.0, probe)["a"]
    assert 800 / goodput.STEP <= rate <= 800


def test_an_answer_that_failed_is_endlessly_late():
    def answers(bad):
        return tuple(
            Answer(
                Shot(i * 1_000_000, "a", 0), 429 if i < bad else 200, done_ns=(i + 5) * 1_000_000
            )
            for i in range(200)
        )

    assert goodput.judge(LoadResult(answers(2), 1, 0, 0), 1.0, warm_ns=0).p99_ms == 5.0
    bad = goodput.judge(LoadResult(answers(3), 1, 0, 0), 1.0, warm_ns=0)
    assert bad.p99_ms == math.inf
    assert not bad.passed
    assert goodput.judge(LoadResult(answers(3), 1, 0, 0), 1.0, warm_ns=3_000_000).passed


def test_wrk_report_is_read():
    report = wrk.read_wrk(WRK_REPORT)
    assert (report.rps, report.p99_ms, report.errors) == (2911.5, 1200.0, 10)
    assert report.p50_ms == pytest.approx(0.95)
    with pytest.raises(ValueError, match="not a report"):
        wrk.read_wrk("unable to connect")


def test_result_files_tell_where_they_come_from(tmp_path):
    found = {"ratio": 5.25, "rates": {"median": 900.0}, "probes": list(range(50))}
    path = results.write(tmp_path, "goodput", found, seconds=1.0)
    document = json.loads(path.read_text())
    assert document["result"] == found
    assert {"python", "torch", "ray", "commit"} <= set(document["versions"])
    assert document["machine"]["cores"] >= 1
    text = path.with_suffix(".md").read_text()
    assert "| ratio | 5.25 |" in text
    assert "| rates.median | 900 |" in text
    assert "probes" not in text
