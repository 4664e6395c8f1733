"""Kernels built by the child process: from a cold cache, a warm one, and when it does not work."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import device_rig
import native_rig
import numpy as np
import programs
import pytest

from coissue.kernels.cpu import native, stitched, timing
from coissue.kernels.cpu.device import CpuDevice
from coissue.kernels.passes.pipeline import lower
from coissue.kernels.stitch.builder import GraphBuilder
from coissue.kernels.stitch.schedules import WHOLE


@pytest.fixture
def forges(tmp_path):
    """Makes forges over one folder; with the toolchain of this machine unless told otherwise."""
    made = []

    def make(chain=None):
        made.append(native.Forge(tmp_path / "native", chain or native_rig.find_chain()))
        return made[-1]

    yield make
    for forge in made:
        forge.close()


def make_device(tmp_path, forge) -> CpuDevice:
    return CpuDevice(threads=1, memory_bytes=1 << 28, cache_dir=tmp_path, forge=forge)


def attach(device, seed=0, name="bert") -> tuple[programs.Model, device_rig.Tenant]:
    model = {"bert": programs.bert, "cnn": programs.cnn}[name](seed=seed)
    return model, device_rig.Tenant(device, model.program, model.weights, lower)


def answer(model, rig, seed=0) -> None:
    """A launch of ragged requests is right."""
    rng = np.random.default_rng(seed)
    requests = [
        rig.request(model.request(rows, tokens, rng), rows, tokens)
        for rows, tokens in ((2, 5), (1, 1), (3, 4))
    ]
    device_rig.run_together(requests)
    for request in requests:
        request.check(1e-4)


def count_choices(rig) -> int:
    return sum(isinstance(s, stitched.Choice) for b in rig.kernels for s, _ in b.plan.steps)


def test_answers_are_right_before_while_and_after(tmp_path, forges):
    """And no launch ever waited: the first comes before anything is built."""
    forge = forges()
    model, rig = attach(make_device(tmp_path, forge))
    assert count_choices(rig) == 0
    answer(model, rig)
    forge.wait()
    assert count_choices(rig) > 0
    for turn in range(stitched.TRIALS + 2):
        answer(model, rig, turn)


def test_a_warm_cache_is_adopted_at_attach(tmp_path, forges, monkeypatch):
    first = forges()
    attach(make_device(tmp_path, first))
    first.wait()
    monkeypatch.setattr(native.Forge, "_build", None)  # nothing is built
    model, rig = attach(make_device(tmp_path, forges()))
    assert count_choices(rig) > 0
    for turn in range(stitched.TRIALS + 1):
        answer(model, rig, turn)


def test_ops_are_timed_once_and_kernels_are_built_by_the_times(tmp_path, forges, caplog):
    first, chain = forges(), native_rig.find_chain()
    attach(make_device(tmp_path, first), name="cnn")
    first.wait()
    assert first.states()["waiting"] == 0
    folder = tmp_path / "native"
    before = sorted(path.name for path in folder.glob("*.so"))
    library = timing.open_library(folder, chain, 3600.0)
    graph = chain_of("exp", "neg")
    assert [n > 0 for n in (library(graph, node, WHOLE) for node in (1, 2))] == [True, True]
    assert library.misses == 2
    library(graph, 1, WHOLE)
    assert library.misses == 2
    library.save()
    assert sorted(path.name for path in folder.glob("*.so")) == before  # what it ran is gone
    known = timing.open_library(folder, chain)
    assert known(graph, 1, WHOLE) == library(graph, 1, WHOLE)
    assert known(chain_of("tanh", "neg"), 1, WHOLE) is None
    again = forges()
    model, rig = attach(make_device(tmp_path, again), name="cnn")
    assert again.states()["waiting"] > 0  # by other times, so perhaps otherwise
    again.wait()
    assert count_choices(rig) > 0
    answer(model, rig)


def chain_of(*names):
    b = GraphBuilder()
    node = b.parameter((4, 32), "f32", 0, True)
    for name in names:
        node = b.pointwise(name, node)
    return b.finish([(node, 1, b.shape(node))])


@pytest.mark.parametrize("pattern", ["*.so", "*.json"])
@pytest.mark.parametrize("damage", [b"", b"\x7fELF and then nothing"])
def test_what_is_damaged_is_built_again(tmp_path, forges, pattern, damage):
    first = forges()
    attach(make_device(tmp_path, first), name="cnn")
    first.wait()
    files = list((tmp_path / "native").glob(pattern))
    assert files
    for file in files:
        file.unlink()  # the old one may be mapped into this process
        file.write_bytes(damage)
    second = forges()
    model, rig = attach(make_device(tmp_path, second), name="cnn")
    second.wait()
    assert count_choices(rig) > 0
    for turn in range(stitched.TRIALS + 1):
        answer(model, rig, turn)


def test_two_schedulers_may_start_with_one_cold_cache(tmp_path, forges):
    both = [forges(), forges()]
    made = [attach(make_device(tmp_path, forge), name="cnn") for forge in both]
    for forge in both:
        forge.wait()
    for model, rig in made:
        assert count_choices(rig) > 0
        answer(model, rig)


def test_without_a_compiler_the_op_table_runs_and_one_warning_says_so(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.find_toolchain() is None
    with caplog.at_level(logging.WARNING):
        forge = native.Forge(tmp_path, None)
        model, rig = attach(make_device(tmp_path, forge))
        answer(model, rig)
    forge.wait()
    assert [r.message for r in caplog.records] == [
        "no C++ compiler (g++, clang++) found: memory-bound ops run one by one"
    ]
    assert count_choices(rig) == 0


def script(tmp_path, text: str) -> native.Toolchain:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return native.Toolchain(str(path), text)


def test_a_compiler_that_fails_is_asked_once(tmp_path, forges, caplog):
    log = tmp_path / "calls"
    text = f"echo x >> {log}; echo 'kernel.cpp:1:2: error: no such thing' >&2; exit 1"
    forge = forges(script(tmp_path, text))
    device = make_device(tmp_path, forge)
    with caplog.at_level(logging.WARNING):
        model, rig = attach(device, name="cnn")
        forge.wait()
        calls = log.read_text()
        again = make_device(tmp_path, forge)
        attach(again, name="cnn")
        forge.wait()
    assert calls == log.read_text()
    assert [r.message for r in caplog.records] == [
        "memory-bound ops of a kernel run one by one: error: no such thing"
    ]
    assert count_choices(rig) == 0
    answer(model, rig)


def test_a_child_that_is_killed_leaves_the_op_table(tmp_path, forges, caplog, monkeypatch):
    """As the machine does when memory is short."""
    started = threading.Event()
    start = native.subprocess.Popen

    def popen(*args, **kwargs):
        child = start(*args, **kwargs)
        os.kill(child.pid, 9)
        started.set()
        return child

    forge = forges()
    monkeypatch.setattr(native.subprocess, "Popen", popen)
    with caplog.at_level(logging.WARNING):
        model, rig = attach(make_device(tmp_path, forge), name="cnn")
        assert started.wait(20)
        forge.wait()
    assert {r.message for r in caplog.records} == {
        "memory-bound ops of a kernel run one by one: building gave -9"
    }
    answer(model, rig)


def test_a_library_that_cannot_be_loaded_is_built_again_by_the_next_process(tmp_path, forges):
    """Its bytes are those that its name says: the compiler wrote rubbish and said it went well."""
    rubbish = 'while [ "$1" != -o ]; do shift; done; echo rubbish > $2'
    forge = forges(script(tmp_path, rubbish))
    model, rig = attach(make_device(tmp_path, forge), name="cnn")
    forge.wait()
    assert forge.states()["failed"] > 0
    answer(model, rig)
    good = native_rig.find_chain()
    forge = forges(native.Toolchain(good.compiler, rubbish))
    model, rig = attach(make_device(tmp_path, forge), name="cnn")
    forge.wait()
    assert forge.states()["failed"] == 0
    assert count_choices(rig) > 0
    answer(model, rig)


def test_closing_ends_a_compiler_that_hangs(tmp_path, forges, caplog):
    """The pipe's other end is the compiler's: reading it ends when the compiler does."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    forge = forges(script(tmp_path, f"exec sleep 600 > {pipe}"))
    model, rig = attach(make_device(tmp_path, forge), name="cnn")
    with pipe.open() as end:  # opens once the compiler runs
        answer(model, rig)
        with caplog.at_level(logging.WARNING):
            forge.close()
        assert end.read() == ""
    assert not list((tmp_path / "native").glob("partial-*"))
    assert not caplog.records, "nothing failed"


def test_a_scheduler_that_is_killed_takes_its_compiler_along(tmp_path):
    native_rig.find_chain()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script(tmp_path, f"exec sleep 600 > {pipe}")
    code = (
        "import signal, sys; from pathlib import Path; from test_native_forge import *\n"
        "folder = Path(sys.argv[1])\n"
        "forge = native.Forge(folder, native.Toolchain(str(folder / 'compiler'), 'hangs'))\n"
        "attach(make_device(folder, forge), name='cnn')\n"
        "signal.pause()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    scheduler = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    with pipe.open() as end:  # opens once the compiler runs
        scheduler.kill()
        scheduler.wait()
        assert end.read() == ""  # ends with the compiler


def test_building_that_takes_too_long_is_given_up(tmp_path, forges, monkeypatch, caplog):
    monkeypatch.setattr(native, "KERNEL_SECONDS", 0.05)
    forge = forges()
    with caplog.at_level(logging.WARNING):
        _, rig = attach(make_device(tmp_path, forge), name="cnn")
        forge.wait()
    assert "took over" in caplog.records[0].message
    assert count_choices(rig) == 0
