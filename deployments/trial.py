"""A handler constructed once in a process that goes away again, before the process that serves does
it: one that leaves its process, kills it or holds its GIL must not do so there.

    python -m coissue.deployments.trial SECONDS < SETTINGS.json
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from coissue.deployments.handlers import Broken, load_handler
from coissue.deployments.settings import HandlerSettings
from coissue.deployments.supervise import adopt_orphans, die_with, supervise

#: Trials come after whatever serves on this machine.
NICENESS: Final = 10
#: The supervisor may be killed, by the handler or by somebody else.
TRIES: Final = 2
#: What its answer begins with.
DONE: Final = b"tried:"


def try_apart(settings: str, seconds: float) -> str:
    """Why a handler (`HandlerSettings` as JSON) cannot be loaded; empty: it can. Waits for it; the
    process ends with this thread."""
    command = [sys.executable, "-m", "coissue.deployments.trial", f"{seconds:g}", str(os.getpid())]
    path = os.pathsep.join(filter(None, sys.path))
    for _ in range(TRIES):
        trial = subprocess.run(
            command, input=settings.encode(), stdout=subprocess.PIPE, check=False,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
        if trial.stdout.startswith(DONE):
            return trial.stdout.removeprefix(DONE).decode()
    use = HandlerSettings.model_validate_json(settings).use
    return f"handler {use} cannot be loaded: its trial ended {TRIES} times"


def main(seconds: float, parent: int) -> None:
    die_with(parent)
    adopt_orphans()
    os.nice(NICENESS)
    settings = HandlerSettings.model_validate_json(sys.stdin.read())

    def work() -> dict[str, Any]:
        loaded = load_handler(settings)
        return {"wrong": loaded.message if isinstance(loaded, Broken) else ""}

    with tempfile.TemporaryDirectory() as folder:
        answer, why = supervise(work, Path(folder) / "answer", seconds)
    wrong = answer.get("wrong", f"handler {settings.use} cannot be loaded: its process {why}")
    sys.stdout.buffer.write(DONE + wrong.encode())


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
