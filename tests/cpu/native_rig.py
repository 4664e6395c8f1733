"""Builds of kernels for tests: many at once in one library, and native forms that always run."""

from __future__ import annotations

import pytest
from needs import lacks

from coissue.kernels.cpu import build, native, stitched
from coissue.kernels.stitch.cpp import render_cpp


def find_chain() -> native.Toolchain:
    chain = native.find_toolchain()
    if chain is None:
        lacks("cxx", "needs a C++ compiler")
    return chain


def always(monkeypatch, *, is_native: bool) -> None:
    """Every choice is made, without trials."""

    def choose(self, frame, size):
        self._chosen[size] = is_native
        self(frame)

    monkeypatch.setattr(stitched.Choice, "_try", choose)


def build_all(kernels, folder) -> tuple[list[native.Build], native.Forge]:
    """Each (lowered, kernel) as the child process would build it, with one call of the compiler
    and one per recurrence."""
    chain, emit, loops = find_chain(), build.emit, []

    def collect(graph, kernel, _):
        loops.append(emit(graph, kernel, f"k{len(loops)}"))
        return loops[-1]

    def compile_later(folder, chain, source, work):
        whole = "NAME_pack" in source
        return native.compile_source(folder, chain, source) if whole else loops[-1].name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "emit", collect)
        patch.setattr(build, "compile_source", compile_later)
        builds = [
            build.build(native.Order(*pair, str(folder), str(folder / "work"), chain))
            for pair in kernels
        ]
    file = native.compile_source(folder, chain, render_cpp(loops))
    return [_in_library(own, file) for own in builds], native.Forge(folder, chain)


def _in_library(own: native.Build, file: str) -> native.Build:
    """With what stands for a library taken for the function's name in `file`."""

    def calls(run):
        return tuple(native.Call(file, c.library, c.inputs, c.outputs) for c in run.calls)

    runs = (native.Run(run.ops, calls(run), run.scratch, run.lookups) for run in own.runs)
    return native.Build(tuple(runs), own.failures, own.recurrences)
