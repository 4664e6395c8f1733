"""A tenant's code in processes of its own: bounded in time and output, and nothing of it is left.

A supervisor forks the child that runs the code, in a session of its own, so that signals to its
process group reach nobody else. It adopts whatever its descendants leave behind
(`PR_SET_CHILD_SUBREAPER`), also what made itself a session, and ends it. All die with their parent.
What tenant code may still do, being of the same user, is kill any of these by its pid: whoever
asked tries again once, one after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

#: What a child prints goes to the log up to here.
OUTPUT_BYTES_MAX: Final = 256 * 1024
END_SECONDS_MAX: Final = 5.0
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """What descendants of this process leave behind becomes a child of it."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """At once, if it is dead already."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def find_children() -> list[int]:
    """Living children of this process, and those that have not been waited for."""
    own, found = os.getpid(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_bytes()
            except OSError:
                continue
            if int(stat.rpartition(b")")[2].split()[1]) == own:
                found.append(int(entry))
    return found


def end_children() -> None:
    """Kill all descendants. Those of a child that dies are adopted, so it goes on until none is."""
    until = time.monotonic() + END_SECONDS_MAX
    while (children := find_children()) and time.monotonic() < until:
        for child in children:
            with contextlib.suppress(ProcessLookupError):  # somebody waited for it meanwhile
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # all gone, or nobody has to wait for them
            pass
        time.sleep(0.005)  # a killed child may have left another: look again, do not spin


def supervise(
    work: Callable[[], dict[str, Any]], told: Path, seconds: float
) -> tuple[dict[str, Any], str]:
    """What `work` returns in a child of this process, and how that ended; ({}, why) without.

    The answer comes by the file `told`, so that nothing the tenant's code leaves running (it
    inherits every descriptor) can hold it back.
    """
    told.unlink(missing_ok=True)
    own = os.getpid()
    output, printed = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        die_with(own)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(printed, descriptor)
        told.write_text(json.dumps(work()))
        os._exit(0)
    os.close(printed)
    why = _watch(child, output, seconds)
    end_children()
    try:
        return json.loads(told.read_text()), why
    except (OSError, ValueError):
        return {}, why


def _watch(child: int, output: int, seconds: float) -> str:
    """Passes on what it prints until it ends, or has had its time. Says how it ended."""
    until = time.monotonic() + seconds
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(output, select.POLLIN)
    left = OUTPUT_BYTES_MAX
    while True:
        ready = {entry for entry, _ in poll.poll(max(0, round(1000 * (until - time.monotonic()))))}
        if output in ready:
            data = os.read(output, 65_536)
            if not data:
                poll.unregister(output)
            os.write(2, data[:left])
            if len(data) > left > 0:
                os.write(2, b"\nthe rest of what it prints is left out\n")
            left = max(0, left - len(data))
        if ended in ready and (output not in ready or not left):
            return _say_end(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if time.monotonic() >= until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"took longer than {seconds:.0f} s"


def _say_end(code: int) -> str:
    """Why a child that gave no answer ended; `code` as of `os.waitstatus_to_exitcode`."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"ended early: its code left the process with status {code}"
