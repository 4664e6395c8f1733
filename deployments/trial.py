"""A handler constructed once in a process that goes away again, before the process that serves does
it: one that leaves its process, kills it or holds its GIL must not do so there.

    python -m coissue.deployments.trial SECONDS < SETTINGS.json
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from coissue.deployments.handlers import Broken, load_handler
from coissue.deployments.settings import HandlerSettings
from coissue.deployments.supervise import adopt_orphans, die_with, supervise

#: Trials come after whatever serves on this machine.
NICENESS: Final = 10


async def try_apart(settings: str, seconds: float) -> str:
    """Why a handler (`HandlerSettings` as JSON) cannot be loaded; empty: it can."""
    trial = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coissue.deployments.trial", f"{seconds:g}", str(os.getpid()),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )  # fmt: skip
    said, _ = await trial.communicate(settings.encode())
    if trial.returncode:
        use = HandlerSettings.model_validate_json(settings).use
        return f"handler {use} cannot be loaded: its process ended"
    return said.decode()


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
    sys.stdout.buffer.write(wrong.encode())


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
