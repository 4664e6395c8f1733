"""The sources of known kernels, and what NVRTC makes of them. `--rewrite-golden` rewrites them.

Registers and spills depend on the compiler: its version is in the file, and another one only has
to compile everything without spills.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest
from needs import lacks
from stitch_kernels import KERNELS

from coissue.kernels.stitch.cpp import render_cpp
from coissue.kernels.stitch.cuda import render_cuda, shared_bytes
from coissue.kernels.stitch.emit import emit

HERE = Path(__file__).parent
ARCHITECTURES = ("sm_80", "sm_90")
PACKED = ("layer_norm_block", "gelu", "paper_attention")


def compare(name: str, text: str, config) -> None:
    path = HERE / name
    if config.getoption("--rewrite-golden"):
        path.write_text(text)
    assert path.exists(), f"no {name}: run pytest tests/golden --rewrite-golden"
    assert text == path.read_text()


def cuda_source(name: str) -> str:
    return render_cuda([emit(*KERNELS[name], f"{name}_0")], name)


def packed_source() -> str:
    return render_cuda([emit(*KERNELS[name], name) for name in PACKED], "packed")


@pytest.mark.parametrize("name", KERNELS)
def test_cpp_sources(name, request):
    source = render_cpp([emit(*KERNELS[name], name)])
    compare(f"{name}.cpp", source[source.index('extern "C"') :], request.config)


@pytest.mark.parametrize("name", [*KERNELS, "packed"])
def test_cuda_sources(name, request):
    source = packed_source() if name == "packed" else cuda_source(name)
    compare(f"{name}.cu", source[source.index("struct co_segment") :], request.config)


class Nvrtc:
    """NVIDIA's run-time compiler; it needs no GPU and no driver."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, architecture: str) -> str:
        """The log of ptxas, after a cubin was made."""
        program = ctypes.c_void_p()
        text = source.encode()
        assert not self._library.nvrtcCreateProgram(
            ctypes.byref(program), text, b"kernel.cu", 0, None, None
        )
        flags = [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v",
                 "--disable-warnings"]  # fmt: skip
        options = (ctypes.c_char_p * len(flags))(*map(str.encode, flags))
        failed = self._library.nvrtcCompileProgram(program, len(flags), options)
        log = self._read(program, "ProgramLog").decode(errors="replace")
        assert not failed, log
        assert self._read(program, "CUBIN").startswith(b"\x7fELF")
        self._library.nvrtcDestroyProgram(ctypes.byref(program))
        return log

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw.rstrip(b"\0") if what == "ProgramLog" else buffer.raw


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    for folder in map(Path, sys.path):
        for path in sorted(folder.glob("nvidia/*/lib/libnvrtc.so.*")):
            return Nvrtc(path)
    lacks("nvrtc", "needs NVRTC: pip install nvidia-cuda-nvrtc")


def find_resources(log: str) -> tuple[int, int, int]:
    """Registers per thread, bytes of shared memory, bytes spilled."""
    registers = re.search(r"Used (\d+) registers", log)
    shared = re.search(r"(\d+) bytes smem", log)
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    return int(registers[1]), int(shared[1]) if shared else 0, int(stores) + int(loads)


def test_cubins_and_what_they_use(nvrtc, request):
    lines = [f"NVRTC {nvrtc.version}: kernel, architecture, registers, shared bytes, spilled bytes"]
    path = HERE / "resources.txt"
    for name in [*KERNELS, "packed"]:
        source = packed_source() if name == "packed" else cuda_source(name)
        for architecture in ARCHITECTURES:
            registers, shared, spilled = find_resources(nvrtc.compile(source, architecture))
            lines.append(f"{name} {architecture} {registers} {shared} {spilled}")
            assert spilled == 0
            if name in KERNELS and architecture == "sm_80":
                assert shared == shared_bytes(emit(*KERNELS[name], name))
    if path.exists() and not request.config.getoption("--rewrite-golden"):
        recorded = path.read_text().splitlines()[0].split(":")[0]
        if recorded != f"NVRTC {nvrtc.version}":
            reason = f"{path.name} is of {recorded}, this is {nvrtc.version}; nothing spills"
            lacks("nvrtc", reason)
    compare(path.name, "\n".join([*lines, ""]), request.config)
