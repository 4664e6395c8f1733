"""Steady requests to some tenants, with every answer kept and its numbers looked at."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import tiny_models
import torch
from serving import poll

RAW = {"content-type": "application/octet-stream"}
PAUSE_S = 0.02


def expect(kwargs, factory="mlp"):
    """(the request's body, the eager answer) of a tiny model."""
    module, samples = getattr(tiny_models, factory)(**kwargs)
    (name,) = samples
    row = np.full((1, *samples[name].shape[1:]), 0.25, np.float32)
    with torch.inference_mode():
        return row.tobytes(), module.eval()(torch.from_numpy(row)).numpy()


@dataclass
class Seen:
    began: float
    status: int
    #: Of the answer, or the error.
    body: bytes

    def has(self, want) -> bool:
        return len(self.body) == want.nbytes and np.allclose(
            np.frombuffer(self.body, "<f4").reshape(want.shape), want, rtol=1e-4, atol=1e-5
        )


class Traffic:
    """One thread a tenant, from `with` to its end; also of tenants that are not there yet."""

    def __init__(self, up, bodies):
        """`bodies`: tenant -> (body, headers)."""
        self.up = up
        self.seen = {name: [] for name in bodies}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name, *given))
            for name, given in bodies.items()
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, name, body, headers):
        while not self._stop.wait(PAUSE_S):
            began = time.monotonic()
            try:
                reply = self.up.ask("POST", f"/tenants/{name}", body, headers)
                self.seen[name].append(Seen(began, reply.status, reply.body))
            except OSError as error:
                self.seen[name].append(Seen(began, 0, repr(error).encode()))

    def last(self, name) -> Seen:
        return self.seen[name][-1] if self.seen[name] else Seen(0.0, 0, b"")

    def wait_more(self, count=10):
        """Until each tenant was asked so many times more."""
        before = {name: len(seen) for name, seen in self.seen.items()}
        poll(
            "every tenant was asked",
            lambda: all(len(self.seen[name]) > before[name] + count for name in before),
        )

    def failures(self, *names):
        """What was not answered with 200, by tenant."""
        found = {
            name: [(seen.status, seen.body[:200]) for seen in self.seen[name] if seen.status != 200]
            for name in names or self.seen
        }
        return {name: failed for name, failed in found.items() if failed}

    def first(self, name, condition):
        """When the first request was sent whose answer is so; None: not yet."""
        return next((s.began for s in list(self.seen[name]) if condition(s)), None)
