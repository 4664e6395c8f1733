"""What every test folder shares: optional tools, and the check that no thread is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from needs import find_tool

ROOT = Path(__file__).parents[1]
#: Folders with compiled modules, see `COMPILED` in setup.py.
COMPILED = ("kernels/cpu", "scheduler", "deployments")


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
    compiled = [path for top in COMPILED for path in (ROOT / top).rglob("*.so")]
    for path in compiled:
        name = path.name.split(".")[0]
        sources = path.with_name(f"{name}.c"), path.with_name(f"{name}.py")
        source = next((source for source in sources if source.exists()), sources[0])
        if not source.exists() or path.stat().st_mtime < source.stat().st_mtime:
            pytest.exit(
                f"{source.relative_to(ROOT)} changed since it was compiled: run `make setup`", 4
            )


def pytest_collection_modifyitems(items):
    """Those of `serve` take longest, so they begin."""
    items.sort(key=lambda item: "serve" not in item.path.parts)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """In several processes (`-n 3`): the tests of a file stay together, and all those of `serve`,
    which share one application."""
    from xdist.scheduler import LoadFileScheduling

    class ByApplication(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "serve" if file.startswith("tests/serve/") else file

    return ByApplication(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Tests that patch what is compiled, which cannot be done, run in a child with the source."""
    if pyfuncitem.get_closest_marker("from_source") is None or "COISSUE_FROM_SOURCE" in os.environ:
        return None
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        for top in COMPILED:
            shutil.copytree(ROOT / top, Path(folder, "coissue", top), ignore=ignored)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": folder, "COISSUE_FROM_SOURCE": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if run.returncode:
        pytest.fail(run.stdout[-4000:] + run.stderr[-1000:])
    return True


def pytest_addoption(parser):
    parser.addoption("--rewrite-golden", action="store_true", help="rewrite the golden files")
