"""Generated C++ as libraries: compiled in the background, kept on disk, loaded without the GIL.

    plan -> Forge.serve -> a kernel built before: read, checked, adopted by the plan at once
                        -> else a child process plans, renders and compiles it (`build`), one kernel
                           at a time and at the lowest priority; the plan adopts it then

NOTE the one idea: planning and compiling are the child's, because a planner in a thread of the
scheduler would take the GIL from the requests for milliseconds at a time. The scheduler's process
reads the child's answer, checks each library's bytes against its name, and loads it.

Rules: nothing here waits, but for `close` and `wait`. A library is a file named by what it was made
of (source, flags, compiler, processor) and by what it is (its own bytes), written under another
name and renamed, so that several processes may share the folder and a damaged file is never loaded.
Without a compiler, or for what failed to compile, the op table runs, and one warning says so; what
failed is not tried again by this process. Knows neither torch nor plans of a device.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import msgspec

from coissue.kernels.files import fresh_name, replace_file
from coissue.kernels.lowered import Kernel, Lowered
from coissue.kernels.stitch.cpp import FLAGS

logger = logging.getLogger("coissue.kernels")

COMPILERS: Final = ("g++", "clang++")
#: Longest time for one source, and for one kernel with all its sources.
SOURCE_SECONDS: Final = 60.0
KERNEL_SECONDS: Final = 300.0
NAME_DIGITS: Final = 32


class NativeError(Exception):
    """A source that gave no library; the message is the first thing the compiler said."""


class Call(msgspec.Struct, frozen=True):
    """One generated function with its arguments, by place: see `Run`."""

    library: str
    symbol: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Scratch(msgspec.Struct, frozen=True):
    """A tensor that lives during a run: so many elements per unit."""

    dtype: str
    elements: int


class Run(msgspec.Struct, frozen=True):
    """A run of a kernel's ops as calls. Places from 0 are those of `number_values`, places from -1
    down the run's scratch tensors."""

    #: Places in `Kernel.ops`.
    ops: tuple[int, ...]
    calls: tuple[Call, ...]
    scratch: tuple[Scratch, ...]
    #: Places of index tensors, and how many entries what they look up has.
    lookups: tuple[tuple[int, int], ...] = ()


class Recurrence(msgspec.Struct, frozen=True):
    """An LSTM, GRU or RNN whose steps are a generated function (`stitch/recurrence.h`). The call's
    places are those of the op's inputs and outputs; what the function itself gets,
    `native_recurrent` knows."""

    #: Place in `Kernel.ops`.
    op: int
    call: Call


class Build(msgspec.Struct, frozen=True):
    """What became of a kernel: its runs and recurrences, and why others are not there."""

    runs: tuple[Run, ...]
    failures: tuple[str, ...] = ()
    recurrences: tuple[Recurrence, ...] = ()

    @property
    def calls(self) -> list[Call]:
        return [*(call for run in self.runs for call in run.calls),
                *(each.call for each in self.recurrences)]  # fmt: skip


class Order(msgspec.Struct, frozen=True):
    """What the child is asked for; pickled, for only this process writes to it."""

    lowered: Lowered
    kernel: Kernel
    folder: str
    #: Where it compiles, which whoever asks removes.
    work: str
    toolchain: Toolchain


def number_values(kernel: Kernel) -> list[int]:
    """The kernel's values by place: equal places in all kernels of a signature."""
    made = [value for op in kernel.ops for value in op.outputs]
    return [*kernel.inputs, *kernel.weights, *made]


# --- compiler and libraries -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler, and all besides the source that what it makes depends on."""

    compiler: str
    description: str

    def name_of(self, source: str) -> str:
        return hash_text(self.description, source)

    def find_times(self, folder: Path) -> Path:
        """The performance library of this compiler and processor: see `timing`."""
        return folder / f"times-{hash_text(self.description)}.json"


def hash_text(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:NAME_DIGITS]


def find_toolchain() -> Toolchain | None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    if version.returncode:
        return None
    return Toolchain(compiler, "\n".join([version.stdout, *FLAGS, _describe_processor()]))


def _describe_processor() -> str:
    """Model and instruction sets: a virtual machine may hide some from one model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def find_library(folder: Path, name: str) -> str | None:
    """The file of the source called `name`, if one with the right bytes is there."""
    files = sorted(path.name for path in folder.glob(f"{name}-*.so"))
    return next((file for file in files if is_intact(folder / file)), None)


def is_intact(path: Path) -> bool:
    """Whether a library's bytes are those that its name says."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return path.stem.endswith("-" + hashlib.sha256(content).hexdigest()[:NAME_DIGITS])


def compile_source(
    folder: Path, toolchain: Toolchain, source: str, work: Path | None = None
) -> str:
    """The library's file in `folder`, made if it is not there. Raises `NativeError`.

    `work`: a folder of this process alone for what is not whole yet, which the caller removes: who
    may be killed cannot.
    """
    name = toolchain.name_of(source)
    found = find_library(folder, name)
    if found is not None:
        return found
    if work is None:
        with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as own:
            return compile_source(folder, toolchain, source, Path(own))
    work.mkdir(parents=True, exist_ok=True)
    text, made = work / "kernel.cpp", work / "kernel.so"
    text.write_text(source)
    command = [toolchain.compiler, *FLAGS, "-o", str(made), str(text)]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=SOURCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise NativeError(f"the compiler took over {SOURCE_SECONDS:.0f} s") from None
    if ran.returncode or not made.exists():
        raise NativeError(_first_error(ran.stderr) or f"the compiler gave {ran.returncode}")
    digest = hashlib.sha256(made.read_bytes()).hexdigest()[:NAME_DIGITS]
    file = f"{name}-{digest}.so"
    made.replace(folder / file)
    return file


def _first_error(text: str) -> str:
    """Without the place in a source that nobody has."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = next((line for line in lines if "error" in line), lines[0] if lines else "")
    return found[max(found.find("error:"), 0) :]


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


@cache
def digest_generator() -> str:
    """Of all code that decides what a kernel becomes: what an older one planned is not read."""
    files = Path(__file__).parents[1].rglob("*.[hp]*")
    return hash_text(*(file.read_text() for file in sorted(files) if file.suffix in (".py", ".h")))


# --- the background -------------------------------------------------------------------------------

Adopt = Callable[[Build], None]
#: A kernel in which nothing is memory-bound is in none of them.
STATES: Final = ("ready", "failed", "waiting")


def _state(build: Build) -> str:
    if build.failures:
        return "failed"
    return "ready" if build.calls else ""


@final
class Forge:
    """Builds of kernels by signature; see the module. Calls come from the device's thread."""

    def __init__(self, folder: Path, toolchain: Toolchain | None) -> None:
        self._folder = folder
        self._toolchain = toolchain
        #: Guards what follows. Never held while anything is waited for.
        self._lock = threading.Lock()
        self._orders: deque[tuple[str, Lowered, Kernel, Adopt]] = deque()
        self._thread: threading.Thread | None = None
        self._is_working = False
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        #: Builds that came out incomplete, and reasons that were told already.
        self._failed: dict[str, Build] = {}
        self._told: set[str] = set()
        #: Key -> one of `STATES`: failed if in part.
        self._states: dict[str, str] = {}
        self._libraries: dict[str, ctypes.CDLL] = {}
        #: What times plans are made by: with others, kernels are built anew.
        self._times = _read_text(toolchain.find_times(folder)) if toolchain else ""
        if toolchain is None:
            logger.warning(
                "no C++ compiler (%s) found: memory-bound ops run one by one", ", ".join(COMPILERS)
            )

    def serve(self, lowered: Lowered, kernel: Kernel, adopt: Adopt) -> None:
        """`adopt` is called with the kernel's build: at once if there is one on disk, else later
        on the forge's thread, if it ever comes to be."""
        if self._toolchain is None:
            return
        key = self._key(kernel)
        build = self._failed.get(key) or self._find(key)
        if build is not None:
            self._hand_over(key, build, adopt)
            return
        with self._lock:
            if self._closed:
                return
            self._orders.append((key, lowered, kernel, adopt))
            self._states[key] = "waiting"
            if not self._is_working:
                self._is_working = True
                self._thread = threading.Thread(
                    target=self._work, name="coissue-forge", daemon=True
                )
                self._thread.start()

    def load(self, call: Call) -> Any:
        """The function, which runs without the GIL. Raises `OSError` or `AttributeError`."""
        library = self._libraries.get(call.library)
        if library is None:
            library = self._libraries[call.library] = ctypes.CDLL(str(self._folder / call.library))
        function = getattr(library, call.symbol)
        function.restype = None
        return function

    def states(self) -> dict[str, int]:
        """How many kernels are in each of `STATES`. From any thread."""
        found = list(self._states.values())
        return {state: found.count(state) for state in STATES}

    def wait(self) -> None:
        """Until nothing is being built."""
        while (thread := self._thread) is not None:
            thread.join()
            with self._lock:
                if thread is self._thread:
                    self._thread = None

    def close(self) -> None:
        """Give up what is being built."""
        with self._lock:
            self._closed = True
            self._orders.clear()
            child = self._child
        if child is not None:  # whoever talks to it sees its end, and tidies up
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        self.wait()

    def _key(self, kernel: Kernel) -> str:
        assert self._toolchain is not None
        by = self._toolchain.description, digest_generator(), self._times
        return hash_text(kernel.signature, *by)

    def _find(self, key: str) -> Build | None:
        """The kernel as it was built before; None: not built, or not whole any more."""
        build = read_build(self._folder / f"{key}.json")
        files = {call.library for call in build.calls} if build else ()
        return build if all(is_intact(self._folder / file) for file in files) else None

    def _hand_over(self, key: str, build: Build, adopt: Adopt) -> None:
        try:
            adopt(build)
            self._states[key] = _state(build)
        except (OSError, AttributeError, ValueError) as error:  # cannot be loaded, or not arranged
            self._fail(key, Build((), (str(error),)))
            # Another process may build it better.
            with suppress(OSError):
                (self._folder / f"{key}.json").unlink(missing_ok=True)
                for file in {call.library for call in build.calls}:
                    (self._folder / file).unlink(missing_ok=True)

    def _fail(self, key: str, build: Build) -> None:
        """What is not there of it will not be tried again."""
        self._failed[key] = build
        self._states[key] = "failed"
        for failure in set(build.failures) - self._told:
            self._told.add(failure)
            logger.warning("memory-bound ops of a kernel run one by one: %s", failure)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._orders:
                    self._is_working = False
                    return
                key, lowered, kernel, adopt = self._orders.popleft()
            build = self._failed.get(key) or self._find(key)
            if build is None:
                try:
                    build = self._build(key, lowered, kernel)
                except (NativeError, OSError, ValueError) as error:  # also a full disk
                    build = Build((), (str(error),))
                if self._closed:
                    return
                if build.failures:
                    self._fail(key, build)
            self._hand_over(key, build, adopt)

    def _build(self, key: str, lowered: Lowered, kernel: Kernel) -> Build:
        """By a child process, which may be killed with all it started."""
        assert self._toolchain is not None
        folder, work = self._folder, fresh_name(self._folder)
        order = Order(lowered, kernel, str(folder), str(work), self._toolchain)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._lock:
            if self._closed:
                return Build(())
            self._child = child = subprocess.Popen(
                [sys.executable, "-m", "coissue.kernels.cpu.build"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=environment, start_new_session=True,
            )  # fmt: skip
        try:
            answer, said = child.communicate(pickle.dumps(order), timeout=KERNEL_SECONDS)
        except subprocess.TimeoutExpired:
            raise NativeError(f"planning and compiling took over {KERNEL_SECONDS:.0f} s") from None
        finally:
            self._child = None
            _kill(child)
            shutil.rmtree(work, ignore_errors=True)
        if self._closed:
            return Build(())
        if child.returncode:
            *_, last = ["", *said.decode(errors="replace").strip().splitlines()]
            raise NativeError(f"building gave {child.returncode}: {last}".rstrip(": "))
        build = msgspec.json.decode(answer, type=Build)
        if not build.failures:
            write_build(folder / f"{key}.json", build)
        return build


def _kill(child: subprocess.Popen[bytes]) -> None:
    """With all it started; and takes its exit status, so that no zombie is left."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in filter(None, (child.stdin, child.stdout, child.stderr)):
        pipe.close()
    child.wait()


def read_build(path: Path) -> Build | None:
    """The build in a file that begins with the digest of the rest; None if it does not."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest.decode() != hashlib.sha256(content).hexdigest():
            return None
        return msgspec.json.decode(content, type=Build)
    except (OSError, ValueError):
        return None


def write_build(path: Path, build: Build) -> None:
    content = msgspec.json.encode(build)
    replace_file(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
