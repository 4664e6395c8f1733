"""Computes the package list: each of the three folders is one `coissue.*` package.

See docs/decisions/001-packaging.md.
"""

from pathlib import Path

from setuptools import setup

FOLDERS = ("kernels", "scheduler", "deployments")
HERE = Path(__file__).parent


def list_packages() -> list[str]:
    """Every folder below the three that holds Python files, by its import name."""
    folders = {
        path.parent.relative_to(HERE) for top in FOLDERS for path in (HERE / top).rglob("*.py")
    }
    folders |= {Path(top) for top in FOLDERS}
    return sorted("coissue." + ".".join(folder.parts) for folder in folders)


setup(
    packages=list_packages(),
    package_dir={f"coissue.{top}": top for top in FOLDERS},
    package_data={"coissue.kernels.stitch": ["*.h"]},  # what generated sources begin with
)
