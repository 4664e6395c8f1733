"""Captures of tenants that hang, kill, leave processes behind or print without end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coissue.deployments.captures import Captures, TenantFailed
from coissue.deployments.settings import CaptureSettings, TenantSettings
from coissue.deployments.turns import Turns

WAIT_S = 120.0  # a hang, not a speed, fails a test


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


def tenant(name, factory=None, **kwargs):
    model = {"factory": f"bad_tenants:{factory or name}", "kwargs": kwargs}
    return TenantSettings.model_validate({"name": name, "model": model, "slo": "fast"})


def run(tmp_path, *tenants, then=None, **settings):
    """name -> "ok" or the sentence of its failure."""

    async def one(captures, given):
        try:
            await captures.capture(given, 1)
        except TenantFailed as error:
            return str(error)
        return "ok"

    async def main():
        captures = Captures(tmp_path, CaptureSettings(**settings))
        try:
            found = asyncio.gather(*(one(captures, given) for given in tenants))
            if then is not None:
                found.add_done_callback(lambda future: future.cancelled() or future.exception())
                return await then(captures, found)
            return await asyncio.wait_for(found, WAIT_S)
        finally:
            server = captures._server
            captures.stop()
            if server is not None:
                await asyncio.wait_for(server.wait(), WAIT_S)

    found = asyncio.run(main())
    return dict(zip([given.name for given in tenants], found, strict=True)) if found else {}


def is_gone(pid_file, within_s=10.0):
    pid = int(pid_file.read_text())
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_tenants_that_hang_do_not_keep_the_others_waiting(tmp_path):
    hanging = [tenant(f"h{index}", "hangs") for index in range(os.cpu_count() or 1)]
    found = run(tmp_path, *hanging, tenant("good"), seconds=25, turn_seconds=1)
    assert found.pop("good") == "ok"
    assert set(found.values()) == {"capture took longer than 25 s"}
    assert (tmp_path / "good-1" / "meta.json").stat().st_mtime < (
        (tmp_path / "h0-1.json").stat().st_mtime + 25
    )


def test_reasons_can_be_written_and_say_who_ended_it(tmp_path):
    odd = tenant("odd", "fails_at_a_name_that_is_not_utf8")
    found = run(tmp_path, odd, tenant("leaves", "leaves"))
    assert "no weights at /models/gew\\udce4hlt.pt" in found["odd"]
    found["odd"].encode()
    assert found["leaves"] == ("capture ended early: its code left the process with status 0")


def test_neighbours_that_kill_leave_things_behind_or_print_without_end(tmp_path, capfd):
    """Signals to one's own process group reach nobody else, a daemon ends with its capture, and the
    log keeps the beginning of what is printed."""
    daemon = tmp_path / "daemon"
    found = run(
        tmp_path, tenant("killer", "kills_its_group"), tenant("good"),
        tenant("noisy", "prints", num_bytes=100 << 20),
        tenant("parent", "leaves_a_daemon", pid_file=str(daemon)),
    )  # fmt: skip
    assert found == {
        "killer": "capture was ended by signal 15 (Terminated)",
        "good": "ok",
        "noisy": "ok",
        "parent": "ok",
    }
    assert is_gone(daemon)
    printed = capfd.readouterr().err
    assert "the beginning\nxxx" in printed
    assert "the rest of what it prints is left out" in printed
    assert len(printed) < 400_000


def test_captures_that_died_with_the_server_are_tried_again(tmp_path):
    killer = tenant("killer", "kills_the_server", flag=str(tmp_path / "flag"))
    assert run(tmp_path, killer, tenant("good")) == {"killer": "ok", "good": "ok"}


def test_nothing_is_left_when_the_server_is_stopped(tmp_path):
    daemon = tmp_path / "daemon"

    async def stop(captures, found):
        while not daemon.exists() or not daemon.read_text():
            await asyncio.sleep(0.05)
        found.cancel()

    parent = tenant("parent", "leaves_a_daemon_and_hangs", pid_file=str(daemon))
    run(tmp_path, parent, then=stop)
    assert is_gone(daemon)


def test_the_server_ends_with_whoever_started_it(tmp_path):
    """Killed, the owner of the pipe says nothing."""
    pid_file, script = tmp_path / "pid", tmp_path / "owner.py"
    script.write_text(
        "import asyncio, sys\n"
        "from test_captures import Captures, Path, tenant\n"
        "captures = Captures(Path(sys.argv[1]))\n"
        "given = tenant('h', 'hangs', pid_file=sys.argv[2])\n"
        "asyncio.run(captures.capture(given, 1))\n"
    )
    owner = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(pid_file)], env={**os.environ}
    )
    try:
        until = time.monotonic() + WAIT_S
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < until
            assert owner.poll() is None
            time.sleep(0.05)
    finally:
        owner.kill()
        owner.wait()
    assert is_gone(pid_file)


def test_turns():
    async def main():
        turns, running, most = Turns(2, 4), 0, 0

        async def work(*rest):
            nonlocal running, most
            async with turns.take(0.05):
                running += 1
                most = max(most, running)
                await asyncio.gather(asyncio.sleep(0), *rest)
                running -= 1

        await asyncio.gather(*(work() for _ in range(10)))
        assert most == 2
        end = asyncio.Event()
        slow = [asyncio.ensure_future(work(end.wait())) for _ in range(3)]
        await work()  # not behind the slow ones, whose turn is over after 0.05 s
        end.set()
        await asyncio.gather(*slow)
        assert most <= 4
        await asyncio.gather(*(work() for _ in range(10)))
        assert turns._turns._value == 2
        assert turns._all._value == 4

    asyncio.run(main())
