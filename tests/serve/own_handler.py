"""A tenant's own handler, as a team would write it: `use: "own_handler:Sums"`."""

from __future__ import annotations

import ctypes
import os
import signal

import numpy as np


class Odd:
    """Whoever reads its pickle leaves."""

    def __reduce__(self):
        return os._exit, (7,)


class Leaves:
    """Ends the process that constructs it: leaves it, or gets it a signal."""

    def __init__(self, by: str = "exit") -> None:
        if by == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.Signals[by])
        signal.pause()


class Holds:
    """Its constructor never gives the GIL back."""

    def __init__(self) -> None:
        ctypes.PyDLL(None).pause()


class Waits:
    """Its constructor waits until somebody writes to its named pipe: the first to the trial, the
    second where it serves; then like `Sums`."""

    def __init__(self, first: str, second: str) -> None:
        is_trial = not os.path.exists(f"{first}.done")
        with open(first if is_trial else second) as pipe:
            pipe.read()
        with open(f"{first}.done", "w"):
            pass
        self.preprocess = Sums().preprocess

    def postprocess(self, outputs):
        return {"waited": True}


class Sums:
    """{"sizes": [n, ...]} -> rows of n; answers what the test wants to know of its replica."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    async def preprocess(self, payload):
        sizes = payload["sizes"]
        if sizes == "odd":
            return {"input": Odd()}
        if sizes == "many":
            return {"input": np.ones((200_000, 8), np.float32)}
        if min(sizes) < 0:
            raise ValueError("sizes: only positive ones")
        return {"input": np.array(sizes, np.float32)[:, None].repeat(8, 1)}

    def postprocess(self, outputs):
        return {
            "scaled": outputs["output"] * self.factor,
            "pid": os.getpid(),
            "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
