"""`coissue up` begins and ends cleanly: Ctrl-C, a broken file, a port in use, a second instance."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from serving import BIN, WAIT_S, Up, make_settings, poll, still_there

ONE = {"mlp-a": ("mlp", {"seed": 1})}


def test_second_instance_on_the_machine_and_ctrl_c(up, cache, tmp_path):
    """Both serve; the interrupted one leaves nothing; the other does not notice."""
    with Up(tmp_path, make_settings(cache, ONE)) as second:
        assert set(second.wait_settled().values()) == {"ready"}
        poll("it says so", lambda: "Ctrl-C ends it" in second.log.read_text())
        folder, pid = second.run_dir(), second.scheduler()["pid"]
        assert pid != up.scheduler()["pid"]
        mine = second.processes()
        titles = " ".join(process.title for process in mine)
        assert "haproxy" in titles
        assert "capture --serve" not in titles  # not needed any more
        second.interrupt()
        assert second.process.wait(WAIT_S) == 0
        poll("no process is left", lambda: not still_there(mine))
        assert not folder.exists()
        said = second.log.read_text().partition("Ctrl-C ends it.")[2]
        assert said.split("\n") == ["", "Shutting down.", ""]
    assert up.wait_settled()["mlp-a"] == "ready"


def test_terminated_before_the_tenants_are_ready(cache, tmp_path):
    with Up(tmp_path, make_settings(cache, ONE)) as up:
        poll("replicas start", lambda: [p for p in up.processes() if "ServeReplica" in p.title])
        mine = up.processes()
        up.process.terminate()
        assert up.process.wait(WAIT_S) == 0
        poll("no process is left", lambda: not still_there(mine))
        assert "Traceback" not in up.log.read_text()


def check_end(up, title, number, status):
    """Processes with `title` get signal `number`; the rest ends with this status."""
    up.wait_settled()
    mine = up.processes()
    for process in (process for process in mine if title in process.title):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
    assert up.process.wait(WAIT_S) == status, up.log.read_text()
    poll("no process is left", lambda: not still_there(mine))
    # Ray's own library may have said something before or after.
    said = [s for s in up.log.read_text().splitlines() if s.startswith("Ray has ended, its ")]
    assert len(said) == status
    assert "Traceback" not in up.log.read_text()


def test_a_signal_to_all_processes_ends_them(cache, tmp_path):
    """As a service manager ends a unit: Ray gets it too, and nobody waits for Ray then."""
    with Up(tmp_path, make_settings(cache, ONE)) as up:
        check_end(up, "", signal.SIGTERM, 0)


def run_up(path, *options):
    return subprocess.run(
        [BIN / "coissue", "up", str(path), *options],
        capture_output=True,
        text=True,
        cwd=path.parent,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("tenants", [{"name": "a", "modle": {}}]),
            ["applications.0.args.tenants.0.modle: unknown"],
        ),
        (("devise", {}), ["applications.0.args.devise", "unknown key"]),
        (("pool", {"replicas": "two"}), ["applications.0.args.pool.replicas"]),
    ],
)
def test_broken_file_is_lines_with_the_path_of_the_key(cache, tmp_path, change, words):
    args = make_settings(cache, ONE) | dict([change])
    path = tmp_path / "serve.yaml"
    application = {"import_path": "coissue.deployments.app:build", "args": args}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    run = run_up(path)
    assert (run.returncode, run.stdout) == (1, "")
    lines = run.stderr.splitlines()
    assert all(line.startswith(f"{path}: applications.0.args.") for line in lines)
    (line,) = [line for line in lines if words[0] in line]
    assert all(word in line for word in words)


def test_port_in_use_is_told_before_anything_starts(up, tmp_path):
    path = Path(up.folder / "serve.yaml")
    run = run_up(path)
    assert (run.returncode, run.stdout) == (1, "")
    assert re.fullmatch(rf"http_options\.port: .*{up.port}.*\n", run.stderr)


def test_it_ends_with_its_ray_and_leaves_no_process(up):
    """The application of many tests: it is the last of them."""
    check_end(up, "gcs_server", signal.SIGKILL, 1)


def test_a_scheduler_that_cannot_start_ends_it_with_the_reason(cache, tmp_path):
    (tmp_path / "secret").write_text("s")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        scheduler = {"tcp_port": port, "secret_file": str(tmp_path / "secret")}
        settings = make_settings(cache, ONE)
        settings["scheduler"] = settings.get("scheduler", {}) | scheduler
        with Up(tmp_path, settings) as up:
            assert up.process.wait(WAIT_S) == 1
            (line,) = [s for s in up.log.read_text().splitlines() if "cannot start" in s]
            assert "the scheduler cannot start: OSError" in line
            assert str(port) in line
            assert "Traceback" not in up.log.read_text()


def test_no_ray_at_the_address_is_one_line(cache, tmp_path):
    with Up(tmp_path, make_settings(cache, ONE), ("--address", "127.0.0.1:1")) as up:
        assert up.process.wait(WAIT_S) == 1
        assert "no Ray at 127.0.0.1:1" in up.log.read_text().splitlines()[-1]
        assert "Traceback" not in up.log.read_text()
