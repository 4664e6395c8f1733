"""Clients and processes that go away: what is lost is told, and service comes back by itself."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import tiny_models
import torch
from serving import list_processes, poll, still_there

RAW = {"content-type": "application/octet-stream"}
SLOW = np.ones((64, 1024), np.float32).tobytes()
SMALL = np.full((1, 8), 0.25, np.float32)


def expected():
    with torch.inference_mode():
        return tiny_models.mlp(seed=1)[0](torch.from_numpy(SMALL)).numpy()


def test_client_gone_withdraws_its_queued_work(up):
    before = up.scheduler()["outcomes"]
    head = (
        f"POST /tenants/slow HTTP/1.1\r\nhost: x\r\ncontent-type: {RAW['content-type']}\r\n"
        f"x-shape: 64,1024\r\ncontent-length: {len(SLOW)}\r\n\r\n"
    ).encode()
    clients = []
    for _ in range(100):
        client = socket.create_connection(("127.0.0.1", up.port), timeout=60)
        client.sendall(head + SLOW)
        clients.append(client)
    poll("requests wait in the scheduler", lambda: up.scheduler()["requests_open"] > 20)
    for client in clients:
        client.close()
    poll("nothing is open any more", lambda: up.scheduler()["requests_open"] == 0)
    after = up.scheduler()["outcomes"]
    cancelled = after["cancelled"] - before["cancelled"]
    assert cancelled > 0
    assert cancelled + after["completed"] - before["completed"] <= 100
    assert up.metric("coissue_requests_total", tenant="slow", outcome="cancelled") >= cancelled
    assert up.ask("POST", "/tenants/slow", SLOW, RAW).status == 200


class Load:
    """Requests without a pause from some threads; every answer is kept, a hang is an error."""

    def __init__(self, up, threads=6):
        self.up = up
        self.want = expected()
        #: (seconds, status, Retry-After or None, what is wrong or "").
        self.answers = []
        self.errors = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(threads)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        poll("load is being answered", lambda: len(self.answers) > 20)
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number):
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                if number % 2:
                    reply = self.up.ask("POST", "/tenants/slow", SLOW, RAW)
                else:
                    reply = self.up.ask("POST", "/tenants/mlp-a", SMALL.tobytes(), RAW)
            except OSError as error:
                self.errors.append(error)
                continue
            wrong = self._judge(reply, number)
            self.answers.append((began, reply.status, reply.headers.get("retry-after"), wrong))
            if reply.status != 200:
                self._stop.wait(0.2)  # as a client that may try again does

    def _judge(self, reply, number):
        if reply.status != 200:
            return "" if "error" in reply.json else f"answer {reply.body!r}"
        if number % 2:
            return "" if len(reply.body) == len(SLOW) else "size"
        got = np.frombuffer(reply.body, "<f4").reshape(1, 4)
        return "" if np.allclose(got, self.want, rtol=1e-4, atol=1e-5) else "numbers"

    def first_good_after(self, moment):
        """Seconds from `moment` to the start of the first request after it that was answered."""
        good = [began for began, status, *_ in list(self.answers) if status == 200]
        return min((began - moment for began in good if began > moment), default=None)


def kill(process) -> float:
    os.kill(process.pid, signal.SIGKILL)
    return time.monotonic()


def test_scheduler_killed_under_load(up, capsys):
    scheduler = list_processes()[up.scheduler()["pid"]]
    with Load(up) as load:
        killed = kill(scheduler)
        # An answer that was on its way may still come; only later ones are of the new process.
        poll("the load sees it", lambda: any(a[1] == 503 for a in load.answers))
        refused = max(a[0] for a in load.answers if a[1] == 503)
        poll("good answers again", lambda: load.first_good_after(refused))
        up.wait_settled()
        settled = time.monotonic() - killed
    recovery = load.first_good_after(max(a[0] for a in load.answers if a[1] == 503)) or 0
    lost = [a for a in load.answers if a[1] != 200]
    with capsys.disabled():
        last = max(a[0] for a in lost) - killed
        print(
            f"\nscheduler killed: good answers {last + recovery:.1f} s, all {settled:.1f} s after"
        )
    assert not load.errors
    assert {status for _, status, *_ in load.answers} == {200, 503}
    assert all(retry_after for *_, retry_after, _ in lost)
    assert not [wrong for *_, wrong in load.answers if wrong]
    assert any(began < killed for began, *_ in lost)  # requests in flight were told
    assert up.scheduler()["pid"] != scheduler.pid


def test_control_and_scheduler_killed_come_back_without_capturing(up, capsys):
    control, folder = up.replica("Control"), up.run_dir()
    scheduler = list_processes()[up.scheduler()["pid"]]
    captured = {entry: entry.stat().st_mtime_ns for entry in folder.glob("*/meta.json")}
    with Load(up, threads=1) as load:
        kill(scheduler)
        killed = kill(control)
        poll("another scheduler", lambda: up.scheduler().get("pid", scheduler.pid) != scheduler.pid)
        up.wait_settled()
        settled = time.monotonic() - killed
    with capsys.disabled():
        print(f"\ncontrol and scheduler killed: all tenants {settled:.1f} s after")
    assert not load.errors
    assert not [wrong for *_, wrong in load.answers if wrong]
    assert not still_there([control, scheduler])
    assert up.run_dir() == folder
    assert captured == {entry: entry.stat().st_mtime_ns for entry in folder.glob("*/meta.json")}
    assert up.ask("POST", "/tenants/mlp-a", SMALL.tobytes(), RAW).status == 200


def test_pool_killed_comes_back(up, capsys):
    pool, scheduler = up.replica("Pool"), up.scheduler()["pid"]
    killed = kill(pool)
    poll("another pool", lambda: pool.pid not in [p.pid for p in up.processes()])

    def answered():
        try:
            return up.ask("POST", "/tenants/wide", bytes(4 * 4096), RAW).status == 200
        except OSError:
            return False

    poll("service is back", answered)
    with capsys.disabled():
        print(f"\npool killed: good answers {time.monotonic() - killed:.1f} s after")
    assert up.scheduler()["pid"] == scheduler
    poll("its requests are withdrawn", lambda: up.scheduler()["requests_open"] == 0)


def test_nothing_is_left_in_shared_folders(up):
    up.run_dir()
    assert not [name for name in os.listdir("/dev/shm") if "coissue" in name]
    mine = {process.pid for process in up.processes()}
    for folder in Path(tempfile.gettempdir()).glob("coissue-run-*/lock"):
        holders = {
            int(line.split()[4]) for line in Path("/proc/locks").read_text().splitlines()
            if f":{folder.stat().st_ino} " in line
        }  # fmt: skip
        assert holders, f"{folder} has no owner"
    assert mine
