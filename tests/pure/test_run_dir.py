"""The run folder stays while anybody holds it, and goes with its last holder."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from coissue.deployments import run_dir
from coissue.deployments.run_dir import RunDir, sweep_run_dirs
from coissue.deployments.settings import AppSettings


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir.tempfile, "tempdir", str(tmp_path))


def test_it_goes_with_the_last_that_lets_go():
    first = RunDir()
    second = RunDir(first.path)
    sweep_run_dirs()
    assert not first.remove()
    assert second.path.exists()
    assert second.remove()
    assert not second.path.exists()


def test_a_sweep_takes_what_killed_processes_held():
    code = (
        "import os, sys; from coissue.deployments.run_dir import RunDir, tempfile\n"
        "tempfile.tempdir = sys.argv[1]; RunDir(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, run_dir.tempfile.gettempdir()], check=False)
    mine = RunDir()
    assert len(os.listdir(run_dir.tempfile.gettempdir())) == 2
    sweep_run_dirs()
    assert os.listdir(run_dir.tempfile.gettempdir()) == [mine.path.name]
    assert mine.remove()


def test_settings_are_those_written_last():
    folder = RunDir()
    for deadline_ms in (1.5, 2.5):
        classes = {"fast": {"deadline_ms": deadline_ms}}
        tenant = {"name": "a", "model": {"factory": "m:f"}, "slo": "fast"}
        settings = AppSettings.model_validate({"slo_classes": classes, "tenants": [tenant]})
        folder.write_settings(settings)
        assert folder.read_settings() == settings
    folder.remove()
