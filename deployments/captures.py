"""Captured programs on disk, and the capture server that makes them.

A version is a folder `<tenant>-<version>` in the run folder; what it was made from stands in its
`meta.json`. So whoever finds the run folder knows what is captured already: a control replica after
a crash, or settings that go back to what they were. The version number names the content.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, final

from pydantic import ValidationError

from coissue.deployments.capture.inputs import are_unchanged
from coissue.deployments.channel.frames import printable
from coissue.deployments.settings import CaptureSettings, Limits, ModelSettings, TenantSettings
from coissue.deployments.turns import Turns

#: The capture server starts, and a job's supervisor answers, so long after the job's own time.
CAPTURE_SECONDS_MORE: Final = 120
#: Captures at once, however many of them hang: each may take so much memory.
CAPTURE_BYTES: Final = 2 << 30
CAPTURES_MAX: Final = 32
#: Versions of a tenant that stay on disk.
VERSIONS_KEPT: Final = 3


class TenantFailed(Exception):
    """A tenant cannot be served; the message is for its team."""


@final
class Artifacts:
    """The captured versions in one folder. Reads small files only: quick enough for a loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: The last number of a version of each tenant, also of one that is gone.
        self._last: dict[str, int] = {}

    def path(self, name: str, version: int) -> Path:
        return self._folder / f"{name}-{version}"

    def versions(self, name: str) -> list[int]:
        """All that were begun, newest first."""
        form = re.compile(re.escape(name) + r"-([1-9]\d*)(\.json|\.answer)?")
        found = filter(None, (form.fullmatch(entry.name) for entry in self._folder.iterdir()))
        return sorted({int(match[1]) for match in found}, reverse=True)

    def serves(self, tenant: TenantSettings, version: int, *, is_current: bool = False) -> bool:
        """True if the version is what the settings want. Its limits may be larger.

        `is_current`: and the files that it came from did not change."""
        try:
            meta = json.loads((self.path(tenant.name, version) / "meta.json").read_text())
            model, limits = ModelSettings(**meta["source"]), Limits(**meta["limits"])
        except (OSError, ValueError, LookupError, TypeError, ValidationError):
            return False
        return (
            model == tenant.model
            and limits.rows >= tenant.limits.rows
            and limits.tokens >= tenant.limits.tokens
            and (not is_current or ("inputs" in meta and are_unchanged(meta["inputs"])))
        )

    def find(self, tenant: TenantSettings, serving: int, *, is_current: bool) -> int:
        """What may be attached as it is: the version `serving`, else the newest; 0: there is none.

        `is_current`: the files that `serving` came from must be as they were."""
        if serving and self.serves(tenant, serving, is_current=is_current):
            return serving
        found = (v for v in self.versions(tenant.name) if self.serves(tenant, v, is_current=True))
        return next(found, 0)

    def next(self, name: str, serving: int) -> int:
        """Never given twice: a capture that nobody waits for any more may still be writing, and
        the files of the version `serving` may be gone."""
        self._note_last(name)
        self._last[name] = max(self._last[name], serving) + 1
        return self._last[name]

    def _note_last(self, name: str) -> None:
        self._last[name] = max([self._last.get(name, 0), *self.versions(name)])

    def drop_others(self, names: Collection[str]) -> None:
        """Remove what was captured for tenants that are not among these."""
        found = {entry.name.rpartition("-")[0] for entry in self._folder.iterdir()}
        for name in found.difference(names, [""]):
            self.prune(name, set())

    def prune(self, name: str, keep: set[int]) -> None:
        """Remove the oldest of a tenant's versions but those to `keep`, which are in use, and the
        newest that were finished; all, if none is to be kept."""
        self._note_last(name)
        versions = self.versions(name)
        finished = [v for v in versions if (self.path(name, v) / "meta.json").exists()]
        oldest = min(finished[:VERSIONS_KEPT], default=0) if keep else math.inf
        for version in versions:
            if version not in keep and version < oldest:
                path = self.path(name, version)
                shutil.rmtree(path, ignore_errors=True)
                for suffix in (".json", ".answer"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)


class Captures:
    """The capture server and the jobs it works on, a few at a time."""

    def __init__(self, folder: Path, settings: CaptureSettings | None = None) -> None:
        #: For captures that begin from now on.
        self.settings = settings or CaptureSettings()
        self._folder = folder
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._turns = Turns(os.cpu_count() or 1, min(CAPTURES_MAX, memory // CAPTURE_BYTES))
        self._starting = asyncio.Lock()
        #: Second tries go one after the other: whose capture ended the server ends its own only.
        self._again = asyncio.Lock()
        self._server: asyncio.subprocess.Process | None = None
        #: Of the newest server; ends with it.
        self._reader: asyncio.Future[None] | None = None
        #: Artifact folder -> its answer.
        self._open: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def capture(self, tenant: TenantSettings, version: int) -> str:
        """The artifact's folder. Raises `TenantFailed` with the sentence that says why not."""
        out = self._folder / f"{tenant.name}-{version}"
        job = out.with_name(out.name + ".json")
        fields = {"name", "model", "limits"}
        try:
            job.write_text(tenant.model_dump_json(include=fields))
        except ValueError as error:  # half of a surrogate pair
            raise TenantFailed(f"model.kwargs: cannot be written as JSON: {error}") from None
        except OSError as error:
            raise TenantFailed(f"capture failed: {error}") from None
        asked = {"job": str(job), "folder": str(out), "seconds": self.settings.seconds}
        async with self._turns.take(self.settings.turn_seconds):
            answer = await self._ask_in_time(asked)
            if "server" in answer:  # perhaps by another's doing: once more, with a new one
                async with self._again:
                    answer = await self._ask_in_time(asked)
        if "error" in answer:
            raise TenantFailed(printable(answer["error"]))
        return str(out)

    async def _ask_in_time(self, job: dict[str, Any]) -> dict[str, Any]:
        seconds = job["seconds"] + CAPTURE_SECONDS_MORE
        try:
            return await asyncio.wait_for(self._ask(job), seconds)
        except TimeoutError:  # even its supervisor is gone
            return {"error": f"capture gave no answer in {seconds:.0f} s"}
        except OSError as error:
            return {"error": f"capture failed: {error}"}

    async def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        async with self._starting:
            server = self._server
            if server is None or server.returncode is not None:
                server = await self._start()
        assert server.stdin is not None  # it is a pipe
        future: asyncio.Future[dict[str, Any]]
        future = self._open[job["folder"]] = asyncio.get_running_loop().create_future()
        try:
            server.stdin.write(json.dumps(job).encode() + b"\n")
            await server.stdin.drain()
        except (ConnectionError, RuntimeError):  # uvloop's, for a pipe that is closed
            await server.wait()
            return {"error": "the capture server ended", "server": "ended"}
        return await future

    async def _start(self) -> asyncio.subprocess.Process:
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        server = self._server = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coissue.deployments.capture", "--serve",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip
        self._reader = asyncio.ensure_future(self._read(server))
        return server

    async def _read(self, server: asyncio.subprocess.Process) -> None:
        assert server.stdout is not None  # it is a pipe
        async for line in server.stdout:
            answer = json.loads(line)
            future = self._open.pop(answer["folder"], None)
            if future and not future.done():
                future.set_result(answer)
        code = await server.wait()
        if server is self._server:  # not one that `stop` ended while the next began
            for future in filter(lambda f: not f.done(), self._open.values()):
                future.set_result({"error": f"the capture server ended: {code}", "server": code})
            self._open.clear()

    def stop(self) -> None:
        """The server ends all its jobs and then itself: it holds torch, a quarter of a gigabyte.
        The next job starts another."""
        server, self._server = self._server, None
        if server is not None and server.returncode is None:
            server.send_signal(signal.SIGTERM)

    async def close(self) -> None:
        """Like `stop`, and waits for the end."""
        self.stop()
        if self._reader is not None:
            await self._reader
