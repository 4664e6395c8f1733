"""Handlers that are tried in a process of their own: whatever they do to it, it is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from coissue.deployments import trial
from coissue.deployments.settings import HandlerSettings
from coissue.deployments.trial import try_apart

HANDLERS = """
import asyncio, os, signal, subprocess

class Good:
    def __init__(self, **kwargs):
        print("x" * 1_000_000)
        os.write(1, b"not the answer")
    def preprocess(self, payload): ...
    def postprocess(self, outputs): ...

class Raises:
    def __init__(self):
        raise KeyError("no \\udc80 such key")

class Leaves:
    def __init__(self):
        os._exit(0)

class Ends:
    def __init__(self, who="getpid"):
        os.kill(getattr(os, who)(), signal.SIGKILL)
        signal.pause()

class Loops(Good):
    def __init__(self):
        asyncio.get_running_loop().create_task(asyncio.sleep(0))

class Stops:
    def __init__(self):
        os.kill(os.getppid(), signal.SIGSTOP)
        signal.pause()

class Hangs:
    def __init__(self):
        signal.pause()

class Crowds(Good):
    def __init__(self, file):
        left = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(file, "w") as text:
            text.write(str(left.pid))
"""


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    (tmp_path / "team.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(tmp_path)

    def attempt(name, seconds=60.0, **kwargs):
        settings = HandlerSettings(use=f"team:{name}", kwargs=kwargs)
        return try_apart(settings.model_dump_json(), seconds)

    return attempt


def test_one_that_can_be_loaded(attempt):
    assert attempt("Good", text='"ü\n') == ""
    assert attempt("Loops") == ""


@pytest.mark.parametrize(
    ("name", "kwargs", "why"),
    [
        ("Raises", {}, r"'no \udc80 such key'"),
        ("Absent", {}, "no attribute 'Absent'"),
        ("Leaves", {}, "its process ended early: its code left the process with status 0"),
        ("Ends", {}, "its process was ended by signal 9 (Killed)"),
        ("Ends", {"who": "getppid"}, "its trial ended 2 times"),
        ("Hangs", {"seconds": 1.0}, "its process took longer than 1 s"),
    ],
)
def test_why_one_cannot_be_loaded(attempt, name, kwargs, why):
    said = attempt(name, **kwargs)
    assert said.startswith(f"handler team:{name} cannot be loaded: ")
    assert why in said
    assert "\n" not in said


def test_a_trial_that_is_stopped_is_given_up(attempt, monkeypatch):
    monkeypatch.setattr(trial, "SECONDS_MORE", 3)
    said = attempt("Stops", seconds=1.0)
    assert said == "handler team:Stops cannot be loaded: its trial gave no answer in 4 s"


def test_nothing_of_it_is_left(attempt, tmp_path):
    file = tmp_path / "pid"
    assert attempt("Crowds", file=str(file)) == ""
    left = Path("/proc") / file.read_text()
    assert not left.exists()
