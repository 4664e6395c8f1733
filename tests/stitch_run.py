"""Runs rendered sources on this machine: C++ as it is, CUDA under the emulation."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path

import numpy as np

from coissue.kernels.stitch.cpp import FLAGS, render_cpp
from coissue.kernels.stitch.emit import emit
from coissue.kernels.stitch.graph import Graph
from coissue.kernels.stitch.plan import StitchedKernel
from stitch_reference import from_memory, memory_dtype, to_memory


def compile_cpp(source: str, folder: Path, flags=FLAGS) -> ctypes.CDLL:
    name = hashlib.sha256((source + str(flags)).encode()).hexdigest()[:16]
    text, library = folder / f"{name}.cpp", folder / f"{name}.so"
    if not library.exists():
        text.write_text(source)
        run = subprocess.run(
            ["g++", *flags, "-Wall", "-Wextra", "-Wno-unused", "-Wno-unknown-pragmas",
             "-o", str(library), str(text)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, f"{run.stderr}\n{source}"
    return ctypes.CDLL(str(library))


def pointers(arrays) -> ctypes.Array:
    return (ctypes.c_void_p * max(len(arrays), 1))(*[a.ctypes.data for a in arrays])


def make_arrays(graph: Graph, kernel: StitchedKernel, values, units: int):
    inputs = [to_memory(values[i], graph.nodes[i].dtype) for i in kernel.inputs]
    outputs = []
    for index in kernel.outputs:
        node = graph.nodes[index]
        shape = (units, *node.shape) if node.per_unit else node.shape
        outputs.append(np.zeros(shape, memory_dtype(node.dtype)))
    return inputs, outputs


def run_cpp(
    graph: Graph, kernel: StitchedKernel, values, units: int, folder: Path
) -> dict[int, np.ndarray]:
    """The kernel's outputs; every unit but the first in one call, to see that parts fit."""
    source = render_cpp([emit(graph, kernel, "stitched")])
    function = compile_cpp(source, folder).stitched
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function.restype = None
    inputs, outputs = make_arrays(graph, kernel, values, units)
    cut = min(1, units)
    for first, last in ((0, cut), (cut, units)):
        function(pointers(inputs), pointers(outputs), first, last)
    pairs = zip(kernel.outputs, outputs, strict=True)
    return {index: from_memory(out, graph.nodes[index].dtype) for index, out in pairs}
