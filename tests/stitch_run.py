"""Runs rendered sources on this machine: C++ as it is, CUDA under the emulation."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path

import numpy as np
from needs import find_tool
from stitch_reference import from_memory, memory_dtype, to_memory

from coissue.kernels.stitch.cpp import FLAGS, render_cpp
from coissue.kernels.stitch.cuda import render_cuda, segment_words, threads
from coissue.kernels.stitch.emit import emit
from coissue.kernels.stitch.graph import Graph
from coissue.kernels.stitch.loops import LoopKernel
from coissue.kernels.stitch.plan import StitchedKernel

#: The host's compiler for the emulation: no need to be fast.
EMULATION_FLAGS = ("-std=c++17", "-O1", "-fwrapv", "-fno-strict-aliasing", "-fPIC", "-shared")


def compile_cpp(source: str, folder: Path, flags=FLAGS) -> ctypes.CDLL:
    name = hashlib.sha256((source + str(flags)).encode()).hexdigest()[:16]
    text, library = folder / f"{name}.cpp", folder / f"{name}.so"
    if not library.exists():
        text.write_text(source)
        run = subprocess.run(
            [find_tool("cxx"), *flags, "-Wall", "-Wextra", "-Wno-unused", "-Wno-unknown-pragmas",
             "-o", str(library), str(text)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, f"{text}: {run.stderr}"
    return ctypes.CDLL(str(library))


def pointers(arrays) -> ctypes.Array:
    return (ctypes.c_void_p * max(len(arrays), 1))(*[a.ctypes.data for a in arrays])


def make_arrays(graph: Graph, kernel: StitchedKernel, values, units: int):
    """Inputs and outputs as a device holds them; in the outputs lies noise."""
    inputs = [to_memory(values[i], graph.nodes[i].dtype) for i in kernel.inputs]
    outputs = []
    for index in kernel.outputs:
        node = graph.nodes[index]
        shape = (units, *node.shape) if node.per_unit else node.shape
        noise = np.random.default_rng(index).integers(
            1, 256, np.prod(shape, dtype=int) * 8, np.uint8
        )
        dtype = memory_dtype(node.dtype)
        outputs.append(noise[: noise.size // 8 * dtype.itemsize].view(dtype).reshape(shape))
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


class Emulated:
    """The CUDA source of kernels, run on the host under the emulation."""

    def __init__(self, kernels: list[LoopKernel], folder: Path) -> None:
        self.kernels = kernels
        emulation = Path(__file__).with_name("cuda_emulation.h").read_text()
        run = (
            'extern "C" int run(const void* segments, int count, unsigned blocks, '
            "unsigned threads, uint64_t seed, int skip) {\n"
            "  return co_run_grid([](const void* s, int n) { launch((const co_segment*)s, n); }, "
            "segments, count, blocks, threads, seed, skip);\n}\n"
        )
        self.source = render_cuda(kernels, "launch")
        library = compile_cpp(emulation + self.source + run, folder, EMULATION_FLAGS)
        self._run = library.run
        self._run.argtypes = [
            ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64,
            ctypes.c_int,
        ]  # fmt: skip

    def launch(self, parts, seed: int, skip: int = -1) -> int:
        """`parts`: per segment (kernel, units, inputs, outputs)."""
        words = segment_words(self.kernels)
        table = np.zeros((max(len(parts), 1), words), np.int64)
        first = 0
        for row, (kernel, units, inputs, outputs) in zip(table, parts, strict=False):
            addresses = [array.ctypes.data for array in (*inputs, *outputs)]
            row[: 2 + len(addresses)] = [first, kernel, *addresses]
            first += units * self.kernels[kernel].blocks
        if not first:
            return 0
        return self._run(table.ctypes.data, len(parts), first, threads(self.kernels), seed, skip)


def run_emulated(
    graph: Graph, kernel: StitchedKernel, values, units: int, folder: Path, seed: int = 0
) -> dict[int, np.ndarray]:
    inputs, outputs = make_arrays(graph, kernel, values, units)
    emulated = Emulated([emit(graph, kernel, "stitched")], folder)
    assert emulated.launch([(0, units, inputs, outputs)], seed) == 0, emulated.source
    pairs = zip(kernel.outputs, outputs, strict=True)
    return {index: from_memory(out, graph.nodes[index].dtype) for index, out in pairs}
