"""Times single nodes on this CPU, for the performance library (F12).

A node alone is rendered, compiled and run over units that fit the nearest cache, so that its
arithmetic is timed and not the memory, which the estimate prices apart. The compiler is what takes
the time (about a second for each), so nothing here runs where requests are served.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import numpy as np

from coissue.kernels.cpu.native import NativeError, Toolchain, compile_source
from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.stitch.cpp import render_cpp
from coissue.kernels.stitch.emit import emit
from coissue.kernels.stitch.graph import Graph, Node
from coissue.kernels.stitch.library import Library
from coissue.kernels.stitch.plan import StitchedKernel
from coissue.kernels.stitch.price import cpu

SYMBOL: Final = "coissue_timed"
#: Elements of the node in one call, at least; and the least time that is taken of several calls.
ELEMENTS: Final = 4096
SAMPLE_NS: Final = 20_000
SAMPLES: Final = 7


def open_library(folder: Path, toolchain: Toolchain, budget_s: float = 0.0) -> Library:
    """Of `toolchain`, in the forge's `folder`. `budget_s`: for measuring what is not known yet; 0:
    only what is known counts."""
    measure = NodeTimer(folder, toolchain) if budget_s else None
    return Library(
        toolchain.find_times(folder), 1, cpu(), measure,
        budget_ns=round(budget_s * 1e9), now_ns=time.monotonic_ns,
    )  # fmt: skip


@final
class NodeTimer:
    """Is a `library.Measure`: ns of one block, or None for what gives no library."""

    def __init__(self, folder: Path, toolchain: Toolchain) -> None:
        self._folder, self._toolchain = folder, toolchain
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, graph: Graph, kernel: StitchedKernel) -> float | None:
        try:
            source = render_cpp([emit(graph, kernel, SYMBOL)])
            file = compile_source(self._folder, self._toolchain, source)
        except NativeError:
            return None
        function = getattr(ctypes.CDLL(str(self._folder / file)), SYMBOL)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        function.restype = None
        (self._folder / file).unlink()  # nobody else wants it
        (out,) = kernel.outputs
        units = max(1, ELEMENTS // max(1, graph.nodes[out].size))
        ins = [_make(graph.nodes[index], units) for index in kernel.inputs]
        outs = [_make(graph.nodes[index], units) for index in kernel.outputs]
        given = _addresses(ins), _addresses(outs), 0, units
        return _least_ns(lambda: function(*given)) / units / kernel.blocks


def _make(node: Node, units: int) -> np.ndarray:
    """Values that every function takes; indices are 0."""
    count = node.size * (units if node.per_unit else 1)
    if node.dtype in ("f32", "f64"):
        return np.linspace(0.1, 2.0, count).astype("f4" if node.dtype == "f32" else "f8")
    return np.zeros(count * DTYPE_BYTES[node.dtype], np.uint8)


def _addresses(arrays: list[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(1, len(arrays)))(*[array.ctypes.data for array in arrays])


def _least_ns(call: Callable[[], object]) -> float:
    turns = 1
    while (took := _time_ns(call, turns)) < SAMPLE_NS:
        turns *= 2
    return min(took, *(_time_ns(call, turns) for _ in range(SAMPLES - 1))) / turns


def _time_ns(call: Callable[[], object], turns: int) -> int:
    start = time.perf_counter_ns()
    for _ in range(turns):
        call()
    return time.perf_counter_ns() - start
