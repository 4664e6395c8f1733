"""A tenant's modules as their files are now, in a process that lives on.

Python imports a module once. A handler that is loaded beside an older one (other arguments, another
revision) would get the code that the process started with, while its trial ran what is on disk. So
when a file behind the tenant's own modules changed, all of these are imported anew; whoever holds
objects of the old ones keeps them. What is installed (the interpreter's and ours) stays.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_FOLDERS: Final = (
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(), site.getusersitepackages(),
)  # fmt: skip
_INSTALLED: Final = tuple(os.path.join(os.path.realpath(folder), "") for folder in _FOLDERS)
_OURS: Final = "coissue"
_lock: Final = threading.Lock()
#: File -> what it was when a module of it was imported.
_files: dict[str, tuple[int, int]] = {}


def import_anew(name: str) -> Any:
    """The module, as `importlib.import_module`; and its kin, if any of their files changed."""
    with _lock:
        own = _find_own()
        if any(_files.get(file, state) != state for file, state in _read(own.values())):
            for module in own:
                sys.modules.pop(module, None)
            _files.clear()
            importlib.invalidate_caches()
    found = importlib.import_module(name)
    with _lock:
        for file, state in _read(_find_own().values()):
            _files.setdefault(file, state)
    return found


def _find_own() -> dict[str, str]:
    """Modules of a tenant's own -> their files."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(file, str) and name != "__main__" and name.partition(".")[0] != _OURS:
            file = os.path.realpath(file)
            if not file.startswith(_INSTALLED):
                found[name] = file
    return found


def _read(files: Iterable[str]) -> list[tuple[str, tuple[int, int]]]:
    states = []
    for file in set(files):
        try:
            state = Path(file).stat()
        except OSError:  # gone: changed
            states.append((file, (0, 0)))
        else:
            states.append((file, (state.st_mtime_ns, state.st_size)))
    return states
