"""A handler constructed once in a process that goes away again, before the process that serves does
it: one that leaves its process, kills it or holds its GIL must not do so there.

    python -m coissue.deployments.trial SECONDS < SETTINGS.json
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from coissue.deployments.handlers import Broken, Handler, load_handler
from coissue.deployments.settings import HandlerSettings
from coissue.deployments.supervise import adopt_orphans, die_with, supervise

#: Trials come after whatever serves on this machine.
NICENESS: Final = 10
#: The supervisor may be killed, by the handler or by somebody else.
TRIES: Final = 2
#: For the trial to start and to end; longer only if it was stopped.
SECONDS_MORE: Final = 60
#: What its answer begins with.
DONE: Final = b"tried:"


def try_apart(settings: str, seconds: float) -> str:
    """Why a handler (`HandlerSettings` as JSON) cannot be loaded; empty: it can. Waits for it; the
    process ends with this thread."""
    command = [sys.executable, "-m", "coissue.deployments.trial", f"{seconds:g}", str(os.getpid())]
    path = os.pathsep.join(filter(None, sys.path))
    said = f"handler {HandlerSettings.model_validate_json(settings).use} cannot be loaded"
    for _ in range(TRIES):
        try:
            trial = subprocess.run(
                command, input=settings.encode(), stdout=subprocess.PIPE, check=False,
                env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
                timeout=seconds + SECONDS_MORE,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{said}: its trial gave no answer in {seconds + SECONDS_MORE:g} s"
        if trial.stdout.startswith(DONE):
            return trial.stdout.removeprefix(DONE).decode()
    return f"{said}: its trial ended {TRIES} times"


def main(seconds: float, parent: int) -> None:
    die_with(parent)
    adopt_orphans()
    os.nice(NICENESS)
    settings = HandlerSettings.model_validate_json(sys.stdin.read())

    async def load() -> Handler:  # with a loop that runs, as where it serves
        return load_handler(settings)

    def work() -> dict[str, Any]:
        loaded = asyncio.run(load())
        return {"wrong": loaded.message if isinstance(loaded, Broken) else ""}

    with tempfile.TemporaryDirectory() as folder:
        answer, why = supervise(work, Path(folder) / "answer", seconds)
    wrong = answer.get("wrong", f"handler {settings.use} cannot be loaded: its process {why}")
    sys.stdout.buffer.write(DONE + wrong.encode())


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
