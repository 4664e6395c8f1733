"""The loading side's view of `host`: start it, ask it, measure its processes, always stop it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from load_tests.demo.data import ROOT

STOP_SECONDS_MAX = 40.0
ASK_SECONDS_MAX = 120.0


class HostFailed(Exception):
    """The served side did not start or did not answer; the message says where its log is."""


def find_free_port() -> int:
    """Below the range that outgoing connections use, so that none of them can take it meanwhile."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


def short_temp() -> str:
    """Where HAProxy's socket can be: Serve puts 68 characters behind the folder, and HAProxy takes
    97 in all."""
    here = tempfile.gettempdir()
    return here if len(here) <= len("/tmp") else "/tmp"


def isolate_haproxy(folder: Path) -> dict[str, str]:
    """Files and ports of its own for this run's HAProxy, so that several clusters can coexist."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(find_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(find_free_port()),
    }


class Hosted:
    """A running `load_tests.host`. Use as a context manager: leaving it stops every process."""

    def __init__(
        self,
        log: Path,
        *,
        config: Path | None = None,
        stock: int = 0,
        empty: bool = False,
        port: int = 8000,
    ) -> None:
        self.port = port
        self.log = log
        self._arguments = ["--port", str(port), "--stock", str(stock)]
        self._arguments += ["--config", str(config)] if config else []
        self._arguments += ["--empty"] if empty else []
        self._folder = Path(tempfile.mkdtemp(prefix="coissue-load-", dir=short_temp()))
        self._arguments += ["--folder", str(self._folder)]
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Hosted:
        check_port_free(self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "load_tests.host", *self._arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **isolate_haproxy(self._folder)},
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with keep_from_interrupts():
            self.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Every process of this cluster stands still; its idle work must not slow another down."""
        assert self._child is not None
        family = list_family(self._child.pid)
        signal_all(family, signal.SIGSTOP)
        try:
            yield
        finally:
            signal_all(family, signal.SIGCONT)

    def close(self) -> None:
        child = self._child
        if child is None:
            return
        family = list_family(child.pid)
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
        end_processes(family)
        shutil.rmtree(self._folder, ignore_errors=True)

    def poll_started(self, seconds: float) -> bool:
        """Wait up to `seconds` for the first answer. Raises `HostFailed` when starting failed."""
        assert self._child is not None
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], seconds)[0]:
            return False
        self._read()
        return True

    def ask(self, verb: str, **arguments: Any) -> Any:
        """One call to the host; raises `HostFailed` with its sentence."""
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._child is not None
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], ASK_SECONDS_MAX)[0]:
            raise HostFailed(f"no answer for {ASK_SECONDS_MAX:.0f} s, see {self.log}")
        line = self._child.stdout.readline()
        given = json.loads(line) if line else {"error": "the process ended"}
        if "error" in given:
            raise HostFailed(f"{given['error']} (log: {self.log})")
        return given["ok"]

    def get(self, path: str) -> tuple[int, bytes]:
        """GET from the ingress; status 0 while nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def tenant_states(self) -> dict[str, tuple[str, str]]:
        """tenant -> (state, reason); empty while the pool does not answer."""
        status, body = self.get("/status")
        if status != 200:
            return {}
        return {t["name"]: (t["state"], t["reason"]) for t in json.loads(body)["tenants"]}

    def read_metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels, as in the exposition text."""
        status, body = self.get("/metrics")
        if status != 200:
            raise HostFailed(f"/metrics answered {status} (log: {self.log})")
        lines = (line for line in body.decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def resident_bytes(self) -> dict[str, int]:
        """Process title -> resident bytes, of the scheduler, the replicas and HAProxy."""
        assert self._child is not None
        sizes: dict[str, int] = {}
        for pid in list_family(self._child.pid):
            title = read_title(pid)
            if title.startswith(("ray::SchedulerActor", "ray::ServeReplica")) or (
                "haproxy" in title.split(" ")[0]
            ):
                name = "haproxy" if "haproxy" in title.split(" ")[0] else title
                sizes[name] = sizes.get(name, 0) + read_resident(pid)
        return sizes


def wait_ready(hosted: Hosted, tenants: int, seconds: float) -> Iterator[Mapping[str, Any]]:
    """Yields the tenants' states until all are ready or failed. Raises `HostFailed` after time."""
    end = time.monotonic() + seconds
    started = False
    while time.monotonic() < end:
        started = started or hosted.poll_started(0.3)
        states = hosted.tenant_states() if started else {}
        yield states
        settled = [name for name, (state, _) in states.items() if state in ("ready", "failed")]
        if len(settled) >= tenants:
            return
        if started:
            time.sleep(0.3)
    raise HostFailed(f"not ready after {seconds:.0f} s, see {hosted.log}")


def check_port_free(port: int) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise HostFailed(f"port {port} is in use: stop what listens there first")


def interrupt_on_signals() -> None:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt, also in a background job, where shells ignore
    Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def keep_from_interrupts() -> Iterator[None]:
    """A second Ctrl-C must not cut the shutdown short."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# --- processes, by /proc ----------------------------------------------------------------------


def list_family(pid: int) -> list[int]:
    """`pid` and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    family, queue = [], [pid]
    while queue:
        family.append(queue.pop())
        queue += children.get(family[-1], [])
    return family


def read_title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def read_resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_processes(pids: list[int]) -> None:
    """Kill what is left of the host's family; they were listed while it ran."""
    for pid in pids:
        if any(mark in read_title(pid) for mark in ("ray", "haproxy", "load_tests", "coissue")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
