"""The compiled core decides as its source does, to the last command."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from needs import lacks

from coissue.scheduler import core
from coissue.scheduler.simulation import simulate
from load_tests.demo.data import ROOT
from load_tests.sim.drawn import draw_scenario

SEEDS = range(40)


@pytest.fixture(autouse=True)
def _is_compiled():
    if core.__file__.endswith(".py"):
        lacks("cxx", "needs the compiled core: `make setup` with a C compiler and Python's headers")


def test_the_compiled_core_gives_the_same_commands_as_its_source(tmp_path):
    for name in ("scheduler", "load_tests"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        parent = tmp_path / "coissue" if name == "scheduler" else tmp_path
        shutil.copytree(ROOT / name, parent / name, ignore=ignored)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from coissue.scheduler import core\n"
        "assert core.__file__.startswith(sys.argv[1]) and core.__file__.endswith('.py')\n"
        "from coissue.scheduler.simulation import simulate\n"
        "from load_tests.sim.drawn import draw_scenario\n"
        f"print(*[simulate(draw_scenario(seed), seed).digest for seed in {SEEDS!r}])\n"
    )
    run = subprocess.run(
        [sys.executable, "-S", "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [simulate(draw_scenario(seed), seed).digest for seed in SEEDS]
