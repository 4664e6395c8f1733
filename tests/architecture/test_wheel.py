"""The wheel holds every Python file of the three folders in git, and imports from a clean place."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the files that git tracks, as a release would be."""
    source = tmp_path_factory.mktemp("source")
    for name in list_tracked("kernels", "scheduler", "deployments", "setup.py", "pyproject.toml"):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    (source / "README.md").write_text("built in a test\n")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    quick = os.environ | {"MYPYC_OPT_LEVEL": "0"}
    subprocess.run([*command, "-w", str(out), str(source)], check=True, env=quick)
    return next(out.glob("coissue-*.whl"))


def list_tracked(*paths: str) -> list[str]:
    out = subprocess.run(
        ["git", "ls-files", *paths], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return out.stdout.splitlines()


def test_wheel_holds_every_tracked_module(wheel):
    tracked = list_tracked("kernels/*.py", "scheduler/*.py", "deployments/*.py")
    expected = {f"coissue/{name}" for name in tracked}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert packed == expected


def test_wheel_holds_the_compiled_core(wheel, tool):
    tool("cxx")
    packed = {name.split(".")[0] for name in zipfile.ZipFile(wheel).namelist() if ".so" in name}
    path = {f"coissue/deployments/{name}" for name in ("channel/link", "door", "http/app")}
    assert {"coissue/scheduler/core", "coissue/scheduler/pick", "coissue_core__mypyc"} <= packed
    assert path | {"coissue/kernels/cpu/calling"} <= packed


def test_wheel_imports_from_a_clean_environment(wheel, tmp_path):
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False, system_site_packages=False)
    site = next(clean.glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # What the package needs is borrowed from here; coissue itself must come from the wheel.
    needed = [path for path in sys.path if path.endswith("site-packages")]
    (site / "needed.pth").write_text("\n".join(needed) + "\n")
    code = (
        "import coissue.kernels.ir as k, coissue.scheduler.core as s, coissue.deployments.app as d;"
        "print(k.__file__, s.__file__, d.__file__)"
    )
    run = subprocess.run(
        [str(clean / "bin" / "python"), "-c", code], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert all(str(site) in name for name in run.stdout.split())
