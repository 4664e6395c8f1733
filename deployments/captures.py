"""The capture server and the jobs it works on; see `capture.__main__` for its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from coissue.deployments.settings import CaptureSettings, TenantSettings
from coissue.deployments.turns import Turns

#: The capture server starts, and a job's supervisor answers, so long after the job's own time.
CAPTURE_SECONDS_MORE = 120
#: Captures at once, however many of them hang: each may take so much memory.
CAPTURE_BYTES = 2 << 30
CAPTURES_MAX = 32


class TenantFailed(Exception):
    """A tenant cannot be served; the message is for its team."""


class Captures:
    """The capture server and the jobs it works on, a few at a time."""

    def __init__(self, folder: Path, settings: CaptureSettings | None = None) -> None:
        settings = settings or CaptureSettings()
        self._folder = folder
        self._seconds = settings.seconds
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._turns = Turns(
            os.cpu_count() or 1, min(CAPTURES_MAX, memory // CAPTURE_BYTES), settings.turn_seconds
        )
        self._starting = asyncio.Lock()
        self._server: asyncio.subprocess.Process | None = None
        #: Artifact folder -> its answer.
        self._open: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def capture(self, tenant: TenantSettings, version: int) -> str:
        """The artifact's folder. Raises `TenantFailed` with the sentence that says why not."""
        out = self._folder / f"{tenant.name}-{version}"
        job = out.with_suffix(".json")
        fields = {"name", "model", "limits"}
        try:
            job.write_text(tenant.model_dump_json(include=fields))
        except ValueError as error:  # half of a surrogate pair
            raise TenantFailed(f"model.kwargs: cannot be written as JSON: {error}") from None
        asked = {"job": str(job), "folder": str(out), "seconds": self._seconds}
        async with self._turns.take():
            answer = await self._ask_in_time(asked)
            if "server" in answer:  # perhaps by another's doing: once more, with a new one
                answer = await self._ask_in_time(asked)
        if "error" in answer:
            raise TenantFailed(answer["error"])
        return str(out)

    async def _ask_in_time(self, job: dict[str, Any]) -> dict[str, Any]:
        seconds = self._seconds + CAPTURE_SECONDS_MORE
        try:
            return await asyncio.wait_for(self._ask(job), seconds)
        except TimeoutError:  # even its supervisor is gone
            return {"error": f"capture gave no answer in {seconds:.0f} s"}

    async def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        async with self._starting:
            if self._server is None or self._server.returncode is not None:
                await self._start()
        future = self._open[job["folder"]] = asyncio.get_running_loop().create_future()
        try:
            self._server.stdin.write(json.dumps(job).encode() + b"\n")
            await self._server.stdin.drain()
        except ConnectionError:
            return {"error": "the capture server ended", "server": "ended"}
        return await future

    async def _start(self) -> None:
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        self._server = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coissue.deployments.capture", "--serve",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip
        self._reader = asyncio.ensure_future(self._read(self._server))

    async def _read(self, server: asyncio.subprocess.Process) -> None:
        async for line in server.stdout:
            answer = json.loads(line)
            if future := self._open.pop(answer["folder"], None):
                future.set_result(answer)
        code = await server.wait()
        for future in filter(lambda f: not f.done(), self._open.values()):
            future.set_result({"error": f"the capture server ended: {code}", "server": code})
        self._open.clear()

    def stop(self) -> None:
        """The server ends all its jobs and then itself."""
        if self._server is not None and self._server.returncode is None:
            self._server.send_signal(signal.SIGTERM)
