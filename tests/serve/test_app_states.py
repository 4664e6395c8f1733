"""What a running application tells of itself: tenants that serve, tenants that fail and why."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from serving import BIN, BROKEN, SERVED, poll

REASONS = {
    "unimportable": ["ImportError", "the tenant's dependency is missing"],
    "unexportable": ["svd"],
    "oversized": ["bytes"],
    "leaves": ["own_handler:Leaves cannot be loaded", "its code left the process with status 3"],
    "homeless": ["no_such_module:Handler cannot be loaded", "No module named 'no_such_module'"],
    "wordless": ["handler text cannot be loaded", "no tokenizer file '/none'"],
}


def test_broken_tenants_fail_with_the_reason_and_the_others_serve(up):
    tenants = {tenant["name"]: tenant for tenant in up.status()["tenants"]}
    assert {name for name, t in tenants.items() if t["state"] == "ready"} == set(SERVED)
    for name in BROKEN:
        assert tenants[name]["state"] == "failed"
        for part in REASONS[name]:
            assert part in tenants[name]["reason"]


def test_coissue_status_shows_the_reasons(up):
    shown = subprocess.run(
        [BIN / "coissue", "status", "--url", f"http://127.0.0.1:{up.port}"],
        env={"COLUMNS": "300"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in BROKEN:
        line = next(line for line in shown.splitlines() if name in line)
        assert "failed" in line
        for part in REASONS[name]:
            assert part in shown


def test_what_a_handler_raises_is_in_the_logs_that_up_names(up):
    reply = up.ask("POST", "/tenants/own", {"sizes": "none"})
    assert reply.error == "handler own_handler:Sums failed in preprocess: TypeError"
    named = poll("up names them", lambda: re.search(r"\n +logs +(\S+)", up.log.read_text()))
    folder = Path(named[1])

    def written():
        texts = [path.read_text(errors="replace") for path in folder.glob("worker-*.err")]
        return [text for text in texts if "own_handler:Sums failed" in text]

    (text,) = poll("a replica's log has it", written)
    assert "Traceback" in text
    assert "TypeError: '<' not supported" in text


def test_serve_status_shows_the_reasons(up):
    def applications():
        # The command as it is shown, with the tools of this Python.
        shown = re.search(r"in Ray's words +(.*)", up.log.read_text())[1]
        run = subprocess.run(
            ["sh", "-c", shown], env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
            capture_output=True, text=True,
        )  # fmt: skip
        found = yaml.safe_load(run.stdout)["applications"] if run.returncode == 0 else {}
        failed = {n for n, told in found.items() if told["status"] == "DEPLOY_FAILED"}
        return failed >= {f"tenant-{name}" for name in BROKEN} and found

    found = poll("serve status shows the failed tenants", applications)
    assert found["coissue"]["status"] == "RUNNING"
    for name in BROKEN:
        message = found[f"tenant-{name}"]["deployments"][name]["message"]
        for part in REASONS[name]:
            assert part in message


@pytest.mark.parametrize("name", BROKEN)
def test_a_failed_tenant_answers_503_with_the_reason(up, name):
    reply = up.ask("POST", f"/tenants/{name}", {"inputs": {"input": [[0.0] * 8]}})
    assert reply.status == 503
    assert reply.headers["retry-after"]
    for part in REASONS[name]:
        assert part in reply.error


def test_requests_are_taken_on_the_given_interface_only(up):
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.2", up.port)) == errno.ECONNREFUSED


def test_replicas_see_no_gpu_and_the_pool_has_no_torch(up):
    pool, control = up.replica("Pool"), up.replica("Control")
    own = up.ask("POST", "/tenants/own", {"sizes": [1]}).json
    assert own["cuda"] == ""
    assert own["pid"] not in (pool.pid, control.pid, up.scheduler()["pid"])
    for process in (pool, control):
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            assert b"CUDA_VISIBLE_DEVICES=" in file.read().split(b"\0")
    for pid in (pool.pid, own["pid"]):
        with open(f"/proc/{pid}/maps") as file:
            assert "libtorch" not in file.read()
    with open(f"/proc/{up.scheduler()['pid']}/maps") as file:
        assert "libtorch" in file.read()  # the test can see it where it is
