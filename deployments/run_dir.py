"""The private folder of an application: the scheduler's socket, captured programs, settings.

Control and the scheduler both hold a lock on it that the kernel drops however they end. So either
may be killed and find the folder again, and a folder that nobody holds is known for sure, whatever
became of the pids. Needs no Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from coissue.deployments.settings import AppSettings

#: Tenant -> version served, and the settings that it is served under.
Served = Mapping[str, tuple[int, dict[str, Any]]]
RUN_PREFIX = "coissue-run-"
LOCK = "lock"
#: What a scheduler that starts again by itself reads: the settings of now, not of its first start.
SETTINGS = "settings.json"
#: Tenant -> version that serves and its settings: for a control replica that finds neither the one
#: before it nor what the scheduler had.
SERVED = "served.json"


@final
class RunDir:
    """Made now, or one that others hold. Gone when its last holder lets go with `remove`, or with
    the next `sweep_run_dirs` after that one."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
        lock = self.path / LOCK
        # Under its name only once it is locked: a sweep never sees it free.
        draft = lock if path else self.path / "lock.new"
        self._lock = os.open(draft, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        draft.rename(lock)

    def write_settings(self, settings: AppSettings) -> None:
        self._write(SETTINGS, settings.model_dump_json())

    def read_settings(self) -> AppSettings:
        return AppSettings.model_validate_json((self.path / SETTINGS).read_text())

    def write_served(self, served: Served) -> None:
        self._write(SERVED, json.dumps(served))

    def read_served(self) -> Served:
        """Nothing, if nothing was written."""
        try:
            served: Served = json.loads((self.path / SERVED).read_text())
        except FileNotFoundError:
            return {}
        return served

    def _write(self, name: str, text: str) -> None:
        """Whole or not at all."""
        draft = self.path / f"{name}.new"
        draft.write_text(text)
        draft.rename(self.path / name)

    def remove(self) -> bool:
        """Lets go; False: somebody else holds the folder, so it stays."""
        try:
            return _remove_free(self._lock, self.path)
        finally:
            os.close(self._lock)


def _remove_free(lock: int, folder: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def sweep_run_dirs() -> None:
    """Remove this user's folders whose holders were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                _remove_free(descriptor, lock.parent)
            finally:
                os.close(descriptor)
