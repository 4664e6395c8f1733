"""The files that a captured model came from: if none of them changed, neither did the model.

Recorded in the child that runs the factory: modules outside of the standard library (an installed
package counts as one), files opened while it ran, files still mapped into memory, and what the
settings name. Not seen: what C code read and let go, the network, the environment, the clock. For
those, and to take a changed file at once, there is `model.revision` in the settings. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from coissue.deployments.settings import ModelSettings

#: path -> (bytes, time of the last change in ns).
Inputs = dict[str, tuple[int, int]]
#: A folder that the settings name counts with so many files, at most.
FOLDER_FILES_MAX: Final = 1000
#: Not files of anybody.
_VIRTUAL: Final = ("/proc/", "/dev/", "/sys/")
_STDLIB: Final = sysconfig.get_paths()["stdlib"] + os.sep
_SITES: Final = tuple({sysconfig.get_paths()[key] + os.sep for key in ("purelib", "platlib")})


class OpenedFiles:
    """Paths that this process opens for reading from now on; a hook of Python that stays."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes):
            flags = args[2] if isinstance(args[2], int) else 0
            if flags & os.O_ACCMODE == os.O_RDONLY:
                self.paths.add(os.path.abspath(os.fsdecode(args[0])))


def find_inputs(model: ModelSettings, opened: Iterable[str]) -> Inputs:
    """As they are now. Call when the model has been captured."""
    paths = {*opened, *_list_modules(), *_list_mapped(), *_list_named(model)}
    stamps = ((path, stamp(path)) for path in sorted({_find_package(path) for path in paths}))
    return {path: found for path, found in stamps if found is not None}


def are_unchanged(inputs: Inputs) -> bool:
    return all(stamp(path) == tuple(found) for path, found in inputs.items())


def stamp(path: str) -> tuple[int, int] | None:
    """None: no file."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        if os.path.isfile(path):
            return found.st_size, found.st_mtime_ns
    return None


def _find_package(path: str) -> str:
    """For a file of an installed package the package's first file, which an upgrade rewrites too;
    nothing for the standard library, byte code and what is no file."""
    for site in _SITES:
        if path.startswith(site):
            top = site + path[len(site) :].split(os.sep, 1)[0]
            return os.path.join(top, "__init__.py") if os.path.isdir(top) else top
    if path.startswith((_STDLIB, *_VIRTUAL)) or path.endswith(".pyc"):
        return ""
    return path


def _list_modules() -> Iterator[str]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            yield os.path.abspath(file)


def _list_mapped() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            path = line.split(maxsplit=5)[5:]
            if path and path[0].startswith("/") and ".so" not in path[0]:
                yield path[0]


def _list_named(model: ModelSettings) -> Iterator[str]:
    names = [model.program, model.checkpoint, *model.kwargs.values()]
    for name in names:
        if isinstance(name, str) and 0 < len(name) < os.pathconf("/", "PC_PATH_MAX"):
            with contextlib.suppress(OSError, ValueError):
                path = os.path.abspath(name)
                yield path
                if os.path.isdir(path):
                    for entry in sorted(os.listdir(path))[:FOLDER_FILES_MAX]:
                        yield os.path.join(path, entry)
