"""The flags `coissue up` starts Ray with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from coissue.deployments import discovery
from coissue.deployments.cli.main import app
from coissue.deployments.discovery import SERVE_FLAGS
from coissue.deployments.settings import SloClass


@pytest.fixture
def apply(monkeypatch):
    """`apply(NAME=value)`: what the flags make of an environment that is not this process's."""

    def run(**environ):
        monkeypatch.setattr(discovery, "os", SimpleNamespace(environ=environ))
        discovery.apply_serve_flags()
        return environ

    return run


def test_no_two_clusters_share_a_fallback_proxy(apply):
    """They share the port silently, and while a replica is away either may answer for the other."""
    ports = {apply()[name] for name in discovery.FALLBACK_PORTS}
    assert not ports & {"8500", "9500"}
    assert len(ports) == 2


def test_coissue_flags_is_what_a_shell_sets():
    result = CliRunner().invoke(app, ["flags"])
    assert result.exit_code == 0
    lines = [re.fullmatch(r"export (\w+)=(\d+)", line) for line in result.output.splitlines()]
    assert {line[1] for line in lines} == set(discovery.choose_serve_flags())
    assert "export RAY_SERVE_ENABLE_HA_PROXY=1" in result.output


def test_flags_of_the_user_win(apply):
    given = {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": "12345", "RAY_worker_niceness": "5"}
    assert given.items() <= apply(**given).items()


def test_of_two_that_start_together_one_gets_the_port(apply):
    """Neither listens yet, so looking is not enough."""
    port = discovery.find_port(0)
    claim = (
        "import sys; from coissue.deployments.discovery import claim_port; "
        "print(claim_port(int(sys.argv[1])), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", claim, str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as two:
        got = sorted(int(process.stdout.readline()) for process in (one, two))
        assert discovery.claim_port(port) == 0
    assert got == [0, port]
    assert discovery.claim_port(port) == port  # given back when its process ended
    assert discovery.claim_port(port) == port
    os.close(discovery._CLAIMS.pop(port))


def test_statistics_ports_are_free_ones_where_the_usual_are_claimed(apply, monkeypatch):
    monkeypatch.setattr(discovery, "claim_port", lambda port: 0)
    given = apply()
    for name, port in discovery.HAPROXY_PORTS.items():
        assert given[name] not in ("0", str(port))
    assert apply(**given).items() >= given.items()


def test_a_replaced_haproxy_ends_no_request_before_its_deadline():
    seconds = int(SERVE_FLAGS["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    longest = SloClass.model_json_schema()["properties"]["deadline_ms"]["maximum"]
    assert seconds * 1000 > longest
