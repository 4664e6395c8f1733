"""The served side of load tests starts a Ray of its own, whatever runs or ran on the machine."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from load_tests import host


class Started(Exception):
    pass


def test_it_joins_no_cluster_that_is_or_was_there(monkeypatch):
    """`ray.init()` without an address takes RAY_ADDRESS, or what `ray start` left in /tmp/ray."""
    given = {}

    def init(**options):
        given.update(options)
        raise Started

    ray = ModuleType("ray")
    ray.init, ray.serve = init, ModuleType("ray.serve")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(host, "apply_serve_flags", lambda: None)
    with pytest.raises(Started):
        host.start(None, 0, False, 1)
    assert given["address"] == "local"
