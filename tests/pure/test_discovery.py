"""The flags `coissue up` starts Ray with."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from coissue.deployments import discovery
from coissue.deployments.cli.main import app


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
