"""Computes the package list and compiles what must be quick.

Each of the three folders is one `coissue.*` package: see docs/decisions/001-packaging.md. The
modules in `COMPILED` become extension modules by mypyc, where mypy and a C compiler are there (see
docs/decisions/012-compiled-core.md); elsewhere, or with COISSUE_PURE=1, they run as they are. The
one module in C calls what the stitching compiler generates.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

FOLDERS = ("kernels", "scheduler", "deployments")
HERE = Path(__file__).parent
#: What runs per kernel and per request. Not what is read by its annotations (messages, frames,
#: bodies), which compiling erases, nor what inherits from a class that is not compiled.
COMPILED = {
    "scheduler": (
        "admission", "clock", "coalesce", "core", "dispatch", "fairness", "health", "hold", "pick",
        "policies", "program", "ready", "retire", "runtime", "states", "trace", "window",
    ),
    "deployments": ("door", "executor"),
    "deployments/channel": ("arena", "checking", "client", "framing", "link", "server", "session"),
    "deployments/http": ("app", "errors", "intake", "oip", "plain", "report", "tensors"),
}  # fmt: skip
MYPY = (
    "[mypy]\nmypy_path = .links\nnamespace_packages = True\nexplicit_package_bases = True\n"
    "follow_imports = silent\nignore_missing_imports = True\n"
)
#: Reading the types of these took minutes and gigabytes; nothing compiled gains by them.
UNREAD = ("torch", "ray", "transformers", "prometheus_client", "fastapi", "starlette")
#: The commands that need them; others only ask for names and versions.
BUILDING = {"build", "build_ext", "bdist_wheel", "develop", "editable_wheel", "install"}


def list_packages() -> list[str]:
    """Every folder below the three that holds Python files, by its import name."""
    folders = {
        path.parent.relative_to(HERE) for top in FOLDERS for path in (HERE / top).rglob("*.py")
    }
    folders |= {Path(top) for top in FOLDERS}
    return sorted("coissue." + ".".join(folder.parts) for folder in folders)


def list_extensions() -> list[Extension]:
    if os.environ.get("COISSUE_PURE") or not BUILDING.intersection(sys.argv):
        return []
    found = [Extension("coissue.kernels.cpu.calling", ["kernels/cpu/calling.c"]), *compile_python()]
    for extension in found:
        extension.optional = True
    return found


def compile_python() -> list[Extension]:
    try:
        from mypyc.build import mypycify
    except ImportError:
        return []
    links = HERE / ".links/coissue"
    links.mkdir(parents=True, exist_ok=True)
    for top in FOLDERS:
        if not (links / top).is_symlink():
            (links / top).symlink_to(Path("../..") / top)
    files = [
        f".links/coissue/{folder}/{name}.py" for folder in COMPILED for name in COMPILED[folder]
    ]
    config = links.parent / "mypyc.ini"
    config.write_text(MYPY + "".join(f"[mypy-{n}.*]\nfollow_imports = skip\n" for n in UNREAD))
    found: list[Extension] = mypycify(
        [f"--config-file={config}", *files],
        opt_level=os.environ.get("MYPYC_OPT_LEVEL", "3"),
        group_name="coissue_core",
    )
    for extension in found:  # looking for what Python's own -Wall asks for is half of the time
        extension.extra_compile_args.append("-Wno-all")
    return found


setup(
    packages=list_packages(),
    package_dir={f"coissue.{top}": top for top in FOLDERS},
    package_data={"coissue.kernels.stitch": ["*.h"]},  # what generated sources begin with
    ext_modules=list_extensions(),
)
