"""`coissue up` as a child process: how tests start it, look into it, hurt it and end it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
#: Far more than anything takes, even on a machine that does ten other things.
WAIT_S = 120.0

#: Tenant -> (factory in `tiny_models`, its arguments).
SERVED = {
    "mlp-a": ("mlp", {"seed": 1}),
    "mlp-b": ("mlp", {"seed": 2}),
    "head-a": ("headed", {"seed": 1}),
    "head-b": ("headed", {"seed": 2}),
    "head-c": ("headed", {"seed": 3, "classes": 5}),
    "tagger": ("tagger", {}),
    "wide": ("wide", {}),
    "slow": ("slow", {}),
    "strict": ("mlp", {"seed": 3}),
    "own": ("mlp", {"seed": 4}),
}
BROKEN = {
    "unimportable": ("unimportable", {}),
    "unexportable": ("unexportable", {}),
    "oversized": ("slow", {"layers": 1, "width": 6144}),
    "leaves": ("mlp", {"seed": 5}),
    "homeless": ("mlp", {"seed": 6}),
    "wordless": ("mlp", {"seed": 7}),
}
EXTRA = {
    "strict": {"nan": "reject"},
    "slow": {"slo": "batch"},
    "wide": {"slo": "batch"},
    "leaves": {"isolation": "dedicated", "handler": {"use": "own_handler:Leaves"}},
    "homeless": {"isolation": "dedicated", "handler": {"use": "no_such_module:Handler"}},
    "wordless": {"handler": {"use": "text", "kwargs": {"tokenizer": "/none"}}},
    "own": {
        "isolation": "dedicated",
        "handler": {"use": "own_handler:Sums", "kwargs": {"factor": 2.0}},
    },
}


def make_settings(cache, tenants) -> dict:
    return {
        "device": {"memory_mib": 200, "cache": str(cache), "native_kernels": False},
        "scheduler": {"metrics_port": None},
        # Deadlines that a busy machine keeps too.
        "slo_classes": {
            "fast": {"deadline_ms": 20_000},
            "batch": {"deadline_ms": 60_000, "objective": 0.9, "priority": 2},
        },
        "tenants": [
            {
                "name": name,
                "model": {"factory": f"tiny_models:{factory}", "kwargs": kwargs},
                "slo": "fast",
                "limits": {"tokens": 64},
                **EXTRA.get(name, {}),
            }
            for name, (factory, kwargs) in tenants.items()
        ],
    }


def poll(what, condition, wait_s=WAIT_S):
    """The first true value of `condition()`."""
    until = time.monotonic() + wait_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > until:
            pytest.fail(f"after {wait_s:g} s still not: {what}")
        time.sleep(0.05)


def find_free_port() -> int:
    """Below the range of outgoing connections, so that none of them takes it meanwhile."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


@dataclass
class Reply:
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The sentence of an error answer, whose form is checked."""
        assert list(self.json) == ["error"], self.body
        return self.json["error"]


@dataclass
class Process:
    pid: int
    parent: int
    title: str
    #: Tells a process from a later one of the same pid.
    started: str


def list_processes() -> dict[int, Process]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if fields[0] != "Z":
                    pid = int(entry.name)
                    found[pid] = Process(pid, int(fields[1]), title, fields[19])
    return found


def still_there(processes: list[Process]) -> list[Process]:
    now = list_processes()
    return [p for p in processes if p.pid in now and now[p.pid].started == p.started]


@dataclass
class Up:
    """One `coissue up`. Use as a context manager: leaving it ends every process."""

    folder: Path
    settings: dict
    options: tuple[str, ...] = ()
    port: int = field(default_factory=find_free_port)
    #: Keys of the application in the file.
    application: dict = field(default_factory=lambda: {"name": "coissue", "route_prefix": "/"})

    def write_config(self) -> None:
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "logging_config": {"enable_access_log": False},
            "applications": [
                {
                    **self.application,
                    "import_path": "coissue.deployments.app:build",
                    "args": self.settings,
                }
            ],
        }
        (self.folder / "serve.yaml").write_text(json.dumps(config))

    def __enter__(self):
        self.write_config()
        self.log = self.folder / "up.log"
        paths = [
            str(self.folder),
            str(TESTS),
            str(TESTS / "serve"),
            os.environ.get("PYTHONPATH", ""),
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "200"}
        env.pop("RAY_ADDRESS", None)
        self.env = env
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [BIN / "coissue", "up", "serve.yaml", *self.options],
                cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            mine = self.processes()
            self.interrupt()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(WAIT_S)
            for process in still_there(mine):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    # --- changes -------------------------------------------------------------------------------

    def dashboard(self) -> str:
        """The address of Ray's dashboard."""
        said = poll(
            "it says how", lambda: re.search(r"serve status -a (\S+)", self.log.read_text())
        )
        return said[1]

    def ray(self, *words: str) -> str:
        """`serve` of Ray's command line on the Ray of this application."""
        run = subprocess.run(
            [BIN / "serve", *words, "-a", self.dashboard()],
            cwd=self.folder, env={**self.env, "RAY_AUTH_MODE": "token"}, text=True,
            capture_output=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return run.stdout

    def deploy(self, settings: dict, *, by_command: bool = False) -> float:
        """Changed settings; the moment Serve had accepted them. Not by `serve deploy` each time,
        which takes a second of a core to send the file."""
        self.settings = settings
        self.write_config()
        if by_command:
            self.ray("deploy", "serve.yaml")
            return time.monotonic()
        token = (Path.home() / ".ray/auth_token").read_text().strip()
        request = urllib.request.Request(
            f"{self.dashboard()}/api/serve/applications/",
            (self.folder / "serve.yaml").read_bytes(),
            {"authorization": f"Bearer {token}", "content-type": "application/json"},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            assert reply.status == 200
        return time.monotonic()

    def tenant(self, name: str) -> dict:
        """What the status says of it; empty: nothing."""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            return next((t for t in self.status()["tenants"] if t["name"] == name), {})
        return {}

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    # --- processes -----------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        """All that descend from `coissue up`, itself included."""
        everything = list_processes()
        mine, parents = [], {self.process.pid}
        while parents:
            found = [p for p in everything.values() if p.parent in parents]
            mine += found
            parents = {p.pid for p in found}
        return [everything[self.process.pid], *mine] if self.process.pid in everything else mine

    def find(self, part: str) -> Process:
        """The one process with `part` in its title."""

        def one():
            found = [p for p in self.processes() if part in p.title]
            return found[0] if len(found) == 1 else None

        return poll(f"one process {part!r}", one)

    def replica(self, deployment: str) -> Process:
        return self.find(f"ray::ServeReplica:coissue:{deployment}")

    def run_dir(self) -> Path:
        """The folder of the control replica, by the lock that it holds open."""
        control = self.replica("Control")

        def of_control():
            for link in Path(f"/proc/{control.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = Path(os.readlink(link))
                    if target.name == "lock" and "coissue-run-" in str(target):
                        return target.parent
            return None

        return poll("the control replica holds a run folder", of_control)

    # --- requests ------------------------------------------------------------------------------

    def ask(self, method, path, body=None, headers=None, timeout_s=WAIT_S) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            if isinstance(body, dict):
                body = json.dumps(body)
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            found = {key.lower(): value for key, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path, **headers) -> Reply:
        return self.ask("GET", path, headers=headers)

    def status(self) -> dict:
        return self.get("/status").json

    def scheduler(self) -> dict:
        """The scheduler's own status; without `pid` while it is not there."""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            return self.status()["scheduler"]
        return {}

    def states(self) -> dict[str, str]:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            return {tenant["name"]: tenant["state"] for tenant in self.status()["tenants"]}
        return {}

    def wait_settled(self) -> dict[str, str]:
        """Until every tenant is ready or failed."""
        names = {tenant["name"] for tenant in self.settings["tenants"]}

        def settled():
            if self.process.poll() is not None:
                pytest.fail(f"coissue up ended: {self.log.read_text()}")
            states = self.states()
            done = names == set(states) and set(states.values()) <= {"ready", "failed"}
            return done and "pid" in self.scheduler() and states

        return poll("every tenant is ready or failed", settled, 2 * WAIT_S)

    def metric(self, name: str, **labels) -> float:
        """The sum of the metric's samples that have these labels."""
        total = 0.0
        for line in self.get("/metrics").body.decode().splitlines():
            found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if found:
                given = dict(re.findall(r'(\w+)="([^"]*)"', found[1] or ""))
                if labels.items() <= given.items():
                    total += float(found[2])
        return total
