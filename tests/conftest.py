"""What every test folder shares: optional tools, and the check that no thread is left behind."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Tools that a test may skip for want of, unless COISSUE_REQUIRE names them (as CI does).
TOOLS = {"cxx": ("g++", "clang++"), "prometheus": ("prometheus",), "wrk": ("wrk",)}
REQUIRED = set(filter(None, os.environ.get("COISSUE_REQUIRE", "").split(",")))


def find_tool(name: str) -> str:
    """The tool's path. Skips the test without it, or fails where it is required."""
    path = next(filter(None, map(shutil.which, TOOLS[name])), None)
    if path is None:
        report = pytest.fail if name in REQUIRED else pytest.skip
        report(f"needs {' or '.join(TOOLS[name])}, which is not installed")
    return path


@pytest.fixture
def tool():
    """`tool("prometheus")`: the path of an optional tool."""
    return find_tool


@pytest.fixture(autouse=True)
def _no_thread_left_behind(request):
    """Fails a test that leaves one of coissue's threads running."""
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("coissue")]
    if left and "serve" not in request.node.path.parts:
        pytest.fail(f"left running: {left}")


def pytest_configure():
    """Tests of a compiled module that is older than its source would say nothing."""
    compiled = {path.name.split(".")[0]: path for path in ROOT.glob("scheduler/*.so")}
    for name, path in compiled.items():
        if path.stat().st_mtime < (ROOT / f"scheduler/{name}.py").stat().st_mtime:
            pytest.exit(f"scheduler/{name}.py changed since it was compiled: run `make setup`", 4)


def pytest_addoption(parser):
    parser.addoption("--rewrite-golden", action="store_true", help="rewrite the golden files")
