"""Factories of tenants that misbehave while they are captured, towards others or in the dark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

LINEAR = (nn.Linear(2, 2), {"x": torch.ones(3, 2)})


def good():
    return LINEAR


def hangs(pid_file=None):
    if pid_file:
        Path(pid_file).write_text(str(os.getpid()))
    signal.alarm(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:  # it hangs: that is what is tested
        time.sleep(60)


def fails_at_a_name_that_is_not_utf8():
    path = os.fsdecode(b"/models/gew\xe4hlt.pt")
    raise ValueError(f"no weights at {path}")


def leaves():
    sys.exit()


def kills_its_group():
    os.killpg(0, signal.SIGTERM)
    time.sleep(60)  # in the middle of its capture when the signal comes


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kills_the_server(flag):
    """Once."""
    if not Path(flag).exists():
        Path(flag).touch()
        os.kill(parent_of(os.getppid()), signal.SIGKILL)
        time.sleep(60)  # in the middle of its capture when the server dies
    return LINEAR


def leaves_a_daemon(pid_file):
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True
    )
    Path(pid_file).write_text(str(child.pid))
    return LINEAR


def leaves_a_daemon_and_hangs(pid_file):
    leaves_a_daemon(pid_file)
    hangs()


def prints(num_bytes):
    os.write(1, b"the beginning\n")
    for _ in range(num_bytes >> 16):
        os.write(1, b"x" * (1 << 16))
    return LINEAR
