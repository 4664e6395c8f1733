"""One run of `wrk` (Debian package), read into figures. Closed loop: it waits for answers."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


@dataclass(frozen=True, slots=True)
class Wrk:
    rps: float
    p50_ms: float
    p99_ms: float
    #: Answers that were not 2xx or 3xx, and socket errors.
    errors: int


def run_wrk(port: int, path: str, body: bytes, connections: int, seconds: float) -> Wrk:
    """POST `body` over and over from one thread."""
    escaped = "".join(f"\\{byte:03d}" for byte in body)
    with tempfile.TemporaryDirectory(prefix="coissue-wrk-") as folder:
        script = Path(folder) / "post.lua"
        script.write_text(
            'wrk.method = "POST"\n'
            'wrk.headers["content-type"] = "application/octet-stream"\n'
            f'wrk.body = "{escaped}"\n'
        )
        made = subprocess.run(
            ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency",
             "-s", str(script), f"http://127.0.0.1:{port}{path}"],
            capture_output=True, text=True, check=True, timeout=seconds + 30,
        )  # fmt: skip
    return read_wrk(made.stdout)


def read_wrk(text: str) -> Wrk:
    """The figures of wrk's report."""
    rps = re.search(r"Requests/sec:\s+([\d.]+)", text)
    if rps is None:
        raise ValueError(f"not a report of wrk: {text[:200]!r}")
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    sockets = re.search(r"Socket errors: (.*)", text)
    errors = int(bad[1]) if bad else 0
    if sockets:
        errors += sum(map(int, re.findall(r"\d+", sockets[1])))
    return Wrk(float(rps[1]), _percentile(text, 50), _percentile(text, 99), errors)


def _percentile(text: str, percent: int) -> float:
    found = re.search(rf"^\s+{percent}%\s+([\d.]+)(us|ms|s|m)$", text, re.MULTILINE)
    return float(found[1]) * MS[found[2]] if found else float("nan")
