"""The performance library, and what is said about plans."""

from __future__ import annotations

import json
import logging
from xml.etree import ElementTree

import pytest
from stitch_check import check_kernel
from test_stitch_golden import AT, GRAPH

from coissue.kernels.stitch.explain import render_svg, render_text
from coissue.kernels.stitch.library import Library
from coissue.kernels.stitch.plan import Schedule
from coissue.kernels.stitch.price import cpu, gpu
from coissue.kernels.stitch.search import plan
from coissue.kernels.stitch.tune import Settings

CUT = Schedule(0, 512)


class Clock:
    now = 0

    def __call__(self):
        return self.now


def make(path, clock, times, budget_ns=100, cost_ns=30):
    def measure(graph, kernel):
        check_kernel(graph, kernel, 0)
        clock.now += cost_ns
        times.append(graph.nodes[-1].name)
        return 7.5

    return Library(path, 256, gpu(256), measure, budget_ns=budget_ns, now_ns=clock)


def test_a_miss_is_measured_once_and_kept(tmp_path):
    path, times, clock = tmp_path / "device.json", [], Clock()
    library = make(path, clock, times)
    assert library(GRAPH, AT["exponential"], CUT) == 7.5
    assert library(GRAPH, AT["exponential"], CUT) == 7.5
    assert times == ["exp"]
    library.save()
    again = Library(path, 256, gpu(256))
    assert again(GRAPH, AT["exponential"], CUT) == 7.5
    assert again(GRAPH, AT["subtract"], CUT) is None
    assert Library(path, 128, gpu(128))(GRAPH, AT["exponential"], CUT) is None
    assert [p.name for p in tmp_path.iterdir()] == ["device.json"]


def test_measuring_ends_with_its_time(tmp_path):
    times = []
    library = make(tmp_path / "device.json", Clock(), times, budget_ns=50)
    found = [library(GRAPH, AT[name], CUT) for name in ("exponential", "subtract", "divide")]
    assert found == [7.5, 7.5, None]
    assert library.misses == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1, "times": {"a": "b"}}', "\x00"])
def test_a_damaged_file_is_an_empty_library_with_one_warning(tmp_path, caplog, text):
    path = tmp_path / "device.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        library = make(path, Clock(), [])
    assert len(caplog.records) == 1
    assert library(GRAPH, AT["exponential"], CUT) == 7.5
    library.save()
    assert len(json.loads(path.read_text())["times"]) == 1


def test_what_two_save_is_there_for_both(tmp_path):
    path = tmp_path / "device.json"
    one, other = make(path, Clock(), []), make(path, Clock(), [])
    one(GRAPH, AT["exponential"], CUT)
    other(GRAPH, AT["subtract"], CUT)
    one.save()
    other.save()
    assert len(json.loads(path.read_text())["times"]) == 2


def test_measured_times_decide(tmp_path):
    """F10: one block's time, so few blocks look cheap to a library where each costs the same."""
    made = plan(GRAPH, measured=lambda graph, index, schedule: 1e6)
    assert made.kernels[0].blocks != plan(GRAPH).kernels[0].blocks or len(made.kernels) != 1
    library = make(tmp_path / "device.json", Clock(), [], budget_ns=10**9)
    assert plan(GRAPH, measured=library).kernels
    assert library.misses > 10


def test_the_text_says_what_lies_where():
    text = render_text(plan(GRAPH), Settings(48 * 1024, 256, gpu(256)))
    assert "6 elementary ops and " in text
    assert "1224 shared bytes (2448 without sharing)" in text
    assert "shared: 289 elements at byte 68" in text


def test_the_text_says_why_not_more():
    made = plan(GRAPH, budget_bytes=0, threads=1)
    text = render_text(made, Settings(0, 1, cpu()))
    assert "keeps to 0 bytes of shared memory" in text


def test_the_picture_has_every_node():
    made = plan(GRAPH)
    home = {index: n for n, kernel in enumerate(made.kernels) for index in kernel.nodes}
    root = ElementTree.fromstring(render_svg([("all", made.graph, home)]))
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(GRAPH.nodes)
    assert sum(title.endswith("kernel 0") for title in titles) == 9
