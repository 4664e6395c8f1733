"""The private folder of one control process: its socket and captured programs.

The owner holds a lock that the kernel drops however the owner ends, so a folder without a living
owner is known for sure, whatever became of its pid. Needs no Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import final

RUN_PREFIX = "coissue-run-"
LOCK = "lock"


@final
class RunDir:
    """Made now; gone with `remove`, or with the next `sweep_run_dirs` after its owner."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
        # Under its name only once it is locked: a sweep never sees it free.
        draft = self.path / "lock.new"
        self._lock = os.open(draft, os.O_CREAT | os.O_WRONLY, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(self.path / LOCK)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep_run_dirs() -> None:
    """Remove this user's folders whose owners were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
