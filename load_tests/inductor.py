"""The stitching compiler beside Inductor and eager torch, model by model, one thread, one run.

    python -m load_tests.inductor [--models minilm,lstm] [--seconds 3] [--avx2] [--out docs/results]

**What is counted.** A *memory-bound kernel* is one pass over memory outside of the heavy ops (GEMM,
convolution, attention, recurrence, bags of embeddings). Ours, of one forward as it is served, with
kernels joined: calls of generated functions, plus ops of the op table that move data and are in no
run (`ours all`); without those that are nothing but the epilogue of a heavy op's kernel (`ours`).
Inductor's, of the same exported model: calls of generated C++ kernels in the wrapper it generates,
and of library functions that are not heavy (`inductor`). Launches are these (`ours all`) and the
heavy ops. Views, and ops that follow from weights alone, count nowhere.

**Time.** Forwards at 1 and 8 rows in turns: eager, torch.compile, ours (the device's launch with
its control, native forms chosen as in service). Least time of each, because others use the machine
too. Memory-bound time: the least time per op or kernel, added up; of eager from the exported graph
run node by node, of Inductor from its generated kernels, of ours from generated functions and steps
of the op table. Views are not timed.

**A lesser processor.** With `--avx2` nobody uses AVX-512: not ATen, not oneDNN, not the compiler,
and Inductor no vectors over 256 bits. (MKL does as it likes.)

**Bytes.** From the IR: what memory-bound ops read and write one by one, and what they do in runs.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import run_and_get_code

from coissue.deployments.attach import size_of
from coissue.deployments.capture.artifact import Artifact
from coissue.deployments.capture.pipeline import capture
from coissue.deployments.settings import Limits, ModelSettings
from coissue.kernels.cpu import native, stitched
from coissue.kernels.cpu.border import Arrival, Border, Reader, enter, to_tensor
from coissue.kernels.cpu.device import CpuDevice, DeviceSegment
from coissue.kernels.ir import ABSENT, DTYPE_BYTES, Op
from coissue.kernels.lowered import Kernel, KernelKind, Layout, Lowered, Mode
from coissue.kernels.passes.fold import find_folds
from coissue.kernels.passes.link import cut, guess_times
from coissue.kernels.passes.pipeline import lower
from load_tests import results, stitching_models
from load_tests.stitching_models import CASES, LENGTH

ROWS = (1, 8)
#: As in service with the default bound on a launch.
JOIN_BOUND_NS = 5_000_000
HEAVY_KINDS = frozenset(
    (KernelKind.GEMM, KernelKind.CONV, KernelKind.ATTENTION, KernelKind.RECURRENT)
)
#: Ops of the IR that are no pass over memory: heavy ones, and views.
HEAVY = frozenset(["linear", "matmul", "conv", "attention", "lstm", "gru", "rnn", "embedding_bag"])
VIEWS = frozenset(["reshape", "permute", "expand", "slice", "select", "identity", "constant"])
#: Heavy functions in names of ATen and Inductor.
ATEN_HEAVY = re.compile(
    r"linear|addmm|\bmm|bmm|matmul|conv|scaled_dot_product|attention|lstm|gru|rnn|embedding_bag"
)
ATEN_VIEW = re.compile(
    r"aten\.(view|reshape|permute|transpose|t|expand|slice|select|(un)?squeeze|flatten|unbind|alias"
    r"|split|chunk|detach|sym_size|_assert\w*)\b|getitem"
)
#: Forwards with every step timed.
TIMED = 30


class Ours:
    """One model on a device of its own, every run of ops in the form that is faster."""

    def __init__(self, artifact: Artifact, folder: Path) -> None:
        self.forge = native.Forge(folder / "native", native.find_toolchain())
        self.device = CpuDevice(threads=1, memory_bytes=1 << 32, cache_dir=folder, forge=self.forge)
        self.device.load_weights({k: to_tensor(a) for k, a in artifact.weights.items()})
        self.plain = lower(artifact.program)
        one = {"model": self.plain}
        self.lowered = cut(one, guess_times([self.plain]), JOIN_BOUND_NS)["model"]
        start = time.perf_counter()
        self.kernels = [self.device.bind(self.lowered, i) for i in range(len(self.lowered.kernels))]
        self.attach_s = time.perf_counter() - start
        self.forge.wait()
        self.build_s = time.perf_counter() - start
        self.border = Border(self.lowered)

    def forward(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Through border and device, as a request that is alone."""
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        rows, tokens = size_of(self.lowered.program, arrays)
        (own,) = enter([Arrival(self.border, arrays, rows, tokens)])
        for bound in self.kernels:
            self.device.run([DeviceSegment(bound, rows, tokens, own)])
        return [torch.as_tensor(a) for a in Reader().read(self.border, own, rows, tokens)]

    def time_memory_bound(self, inputs: dict[str, Tensor]) -> float:
        """ms of all steps that are not heavy, each at its fastest."""
        clock, before = Clock(), []
        for plan in {id(k.plan): k.plan for k in self.kernels}.values():
            light = {p.step for p in plan._parts.values() if p.op.name not in HEAVY | VIEWS}
            before.append((plan, plan.steps))
            steps = [(timed_choice(step, clock), kills) for step, kills in plan.steps]
            plan.steps = [(clock.wrap(s) if s in light else s, kills) for s, kills in steps]
        for _ in range(TIMED):
            clock.start()
            self.forward(inputs)
        for plan, steps in before:
            plan.steps = steps
        return clock.total_ms()

    def builds(self, lowered: Lowered) -> list[native.Build]:
        """Of each kernel."""
        found: list[native.Build] = []
        for kernel in lowered.kernels:
            self.forge.serve(lowered, kernel, found.append)
            self.forge.wait()
        return found


class Clock:
    """The least time of every call within a forward, by its place in it."""

    def __init__(self) -> None:
        self._least: list[int] = []
        self._place = 0

    def start(self) -> None:
        """A forward begins."""
        self._place = 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.perf_counter_ns()
            made = call(*args, **kwargs)
            took_ns = time.perf_counter_ns() - start_ns
            if self._place == len(self._least):
                self._least.append(took_ns)
            self._least[self._place] = min(self._least[self._place], took_ns)
            self._place += 1
            return made

        return timed

    def total_ms(self) -> float:
        return sum(self._least) / 1e6


def timed_choice(step: stitched.Step, clock: Clock) -> stitched.Step:
    """A choice of forms whose generated functions, or whose steps of the op table, are timed."""
    if not isinstance(step, stitched.Choice) or not isinstance(step._native, stitched.NativeRun):
        return step
    made = copy.copy(step)
    made._native = copy.copy(step._native)
    made._native._calls = [clock.wrap(call) for call in step._native._calls]
    made._table = [(clock.wrap(own), kills) for own, kills in step._table]
    return made


# --- ours, counted --------------------------------------------------------------------------------


def light_ops(lowered: Lowered, kernel: Kernel, build: native.Build) -> list[int]:
    """Places of the memory-bound ops that no run has."""
    gone = {*find_folds(lowered, kernel).values(), *(i for run in build.runs for i in run.ops)}
    return [
        place
        for place, (op, mode) in enumerate(zip(kernel.ops, kernel.modes, strict=True))
        if mode is not Mode.ONCE and place not in gone and op.name not in HEAVY | VIEWS
    ]


def count_ours(plain: Lowered, lowered: Lowered, builds: list[native.Build]) -> dict[str, int]:
    """`plain` says what is an epilogue; `lowered`, with its `builds`, what is run."""
    inside = {op.outputs for k in plain.kernels if k.kind in HEAVY_KINDS for op in k.ops}
    found = Counter({"ours": 0, "ours all": 0, "ours heavy": 0})
    for kernel, build in zip(lowered.kernels, builds, strict=True):
        groups = [(run.ops, len(run.calls)) for run in build.runs]
        groups += [((place,), 1) for place in light_ops(lowered, kernel, build)]
        for places, passes in groups:
            found["ours all"] += passes
            if not inside.issuperset(kernel.ops[place].outputs for place in places):
                found["ours"] += passes
        found["ours heavy"] += sum(op.name in HEAVY for op in kernel.ops)
    return {**found, "ours launches": found["ours all"] + found["ours heavy"]}


def count_bytes(
    lowered: Lowered, builds: list[native.Build], rows: int, tokens: int
) -> dict[str, float]:
    """MB of the memory-bound ops, op by op and in runs. Of a table, what is looked up."""
    program, apart, fused = lowered.program, 0, 0
    tables = {
        op.inputs[0]: op.outputs[0]
        for kernel in lowered.kernels for op in kernel.ops if op.name == "embedding"
    }  # fmt: skip

    def size(value: int) -> int:
        return program.types[tables.get(value, value)].num_bytes(rows, tokens)

    def moved(op: Op) -> int:
        return sum(size(value) for value in {*op.inputs, *op.outputs} - {ABSENT})

    for kernel, build in zip(lowered.kernels, builds, strict=True):
        fused += sum(moved(kernel.ops[i]) for i in light_ops(lowered, kernel, build))
        apart += sum(
            moved(op)
            for op, mode in zip(kernel.ops, kernel.modes, strict=True)
            if mode is not Mode.ONCE and op.name not in HEAVY | VIEWS
        )
        values = native.number_values(kernel)
        for run in build.runs:
            made = kernel.ops[run.ops[0]].outputs[0]
            units = rows * tokens if lowered.layouts[made] is Layout.TOKENS else rows
            for place in (p for call in run.calls for p in (*call.inputs, *call.outputs)):
                if place >= 0:
                    fused += size(values[place])
                else:
                    scratch = run.scratch[~place]
                    fused += units * scratch.elements * DTYPE_BYTES[scratch.dtype]
    return {"MB apart": apart / 1e6, "MB fused": fused / 1e6}


# --- Inductor and eager ---------------------------------------------------------------------------


class Inductor:
    """The exported model, compiled for inputs of one size."""

    def __init__(self, exported: torch.nn.Module, inputs: dict[str, Tensor]) -> None:
        torch._dynamo.reset()
        before = len(PyCodeCache.modules)
        self.module = torch.compile(exported)
        start = time.perf_counter()
        _, self.code = run_and_get_code(lambda: self.module(**inputs))
        self.compile_s = time.perf_counter() - start
        self._generated = PyCodeCache.modules[before:]

    def count(self) -> dict[str, int]:
        """Calls in the wrapper's code; a function is called where its name does not follow `def`
        or stand left of `=`."""
        text = "\n".join(self.code)
        fused = len(re.findall(r"^\s+cpp_fused_\w+\(", text, re.MULTILINE))
        calls = re.findall(r"(?:extern_kernels|torch\.ops)\.([\w.]+)\(", text)
        calls += re.findall(r"^\s+(cpp_(?!fused)\w*gemm\w*)\(", text, re.MULTILINE)
        light = [name for name in calls if not ATEN_HEAVY.search(name)]
        return {"inductor": fused + len(light), "inductor launches": fused + len(calls)}

    def time_memory_bound(self, inputs: dict[str, Tensor]) -> float:
        """ms of all generated kernels, each at its fastest."""
        clock = Clock()
        for module in self._generated:
            for name in [name for name in vars(module) if name.startswith("cpp_fused")]:
                setattr(module, name, clock.wrap(getattr(module, name)))
        for _ in range(TIMED):
            clock.start()
            self.module(**inputs)
        return clock.total_ms()


class Timed(torch.fx.Interpreter):
    """An exported graph node by node: what eager does, with a clock at the memory-bound nodes."""

    def __init__(self, module: torch.fx.GraphModule, clock: Clock) -> None:
        super().__init__(module)
        self._clock = clock

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = str(target)
        is_timed = not (ATEN_HEAVY.search(name) or ATEN_VIEW.search(name))
        return (self._clock.wrap(target) if is_timed else target)(*args, **kwargs)


def time_eager_memory_bound(exported: torch.fx.GraphModule, inputs: dict[str, Tensor]) -> float:
    clock = Clock()
    timed = Timed(exported, clock)
    for _ in range(TIMED):
        clock.start()
        timed.run(*inputs.values())
    return clock.total_ms()


# --- one model ------------------------------------------------------------------------------------


def least_ms(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The least time of each, in turns."""
    best = dict.fromkeys(calls, math.inf)
    end = time.perf_counter() + seconds
    turns = 0
    while turns < 5 or time.perf_counter() < end:
        for name, call in calls.items():
            start_ns = time.perf_counter_ns()
            call()
            best[name] = min(best[name], (time.perf_counter_ns() - start_ns) / 1e6)
        turns += 1
    return best


def run_model(name: str, seconds: float, folder: Path, say: Callable[[str], None]) -> dict:
    say("capturing")
    model = ModelSettings(factory="load_tests.stitching_models:build", kwargs={"name": name})
    artifact = capture(model, Limits(rows=8, tokens=LENGTH), name)
    module = stitching_models.build(name)[0]
    say("planning and compiling ours")
    ours = Ours(artifact, folder / name)
    builds = ours.builds(ours.lowered)
    found: dict[str, Any] = {"attach s": ours.attach_s, "build s": ours.build_s}
    found["not built"] = sorted({reason for build in builds for reason in build.failures})
    found |= count_ours(ours.plain, ours.lowered, builds)
    for rows in ROWS:
        inputs = CASES[name].inputs(rows)
        exported = torch.export.export(module, (), kwargs=inputs).module()
        say(f"compiling Inductor's, {rows} rows")
        inductor = Inductor(exported, inputs)
        if rows == 1:
            found |= inductor.count() | {"inductor compile s": inductor.compile_s}
            found |= count_bytes(ours.lowered, builds, rows, LENGTH)
        say(f"timing, {rows} rows")
        calls = {
            "eager": lambda inputs=inputs: module(**inputs),
            "inductor": lambda inputs=inputs, inductor=inductor: inductor.module(**inputs),
            "ours": lambda inputs=inputs: ours.forward(inputs),
        }
        for side, ms in least_ms(calls, seconds).items():
            found[f"x{rows} {side} ms"] = ms
        wanted, answer = calls["eager"](), ours.forward(inputs)[0]  # after all trials
        found[f"x{rows} difference"] = float((wanted - answer).abs().max() / wanted.abs().max())
        found[f"x{rows} eager memory ms"] = time_eager_memory_bound(exported, inputs)
        found[f"x{rows} inductor memory ms"] = inductor.time_memory_bound(inputs)
        found[f"x{rows} ours memory ms"] = ours.time_memory_bound(inputs)
    ours.forge.close()
    return found


AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def limit_torch() -> None:
    """To AVX2: starts this process anew, for torch has made its choice already."""
    if any(os.environ.get(name) != value for name, value in AVX2.items()):
        spec = sys.modules["__main__"].__spec__
        assert spec is not None, "run as a module"
        words = [sys.executable, "-m", spec.name, *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, **AVX2})
    torch._inductor.config.cpp.simdlen = 256


def limit_compilers(folder: Path) -> None:
    compiler = folder / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -mno-avx512f\n')
    compiler.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


RATIOS = {
    "kernels over inductor": ("ours", "inductor"),
    "all passes over inductor": ("ours all", "inductor"),
    "launches over inductor": ("ours launches", "inductor launches"),
    "bytes fused over apart": ("MB fused", "MB apart"),
    **{
        f"x{rows} {what}over {side}": (f"x{rows} ours {what}ms", f"x{rows} {side} {what}ms")
        for rows in ROWS
        for what in ("", "memory ")
        for side in ("inductor", "eager")
    },
}


def find_ratios(models: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Ours over theirs per model, with the geometric mean; models where either is 0 are not in it
    (nothing memory-bound is left to compare)."""
    found: dict[str, dict[str, float]] = {}
    for ratio, (mine, its) in RATIOS.items():
        own = {name: m[mine] / m[its] for name, m in models.items() if m[mine] and m[its]}
        if own:
            found[ratio] = {"geomean": statistics.geometric_mean(own.values()), **own}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing per model and size")
    parser.add_argument("--avx2", action="store_true", help="as on a processor without AVX-512")
    parser.add_argument("--out", type=Path, default=None, help="folder of result files")
    args = parser.parse_args()
    if args.avx2:
        limit_torch()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console, models, start = Console(), {}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="coissue-inductor-") as folder, torch.inference_mode():
        if args.avx2:
            limit_compilers(Path(folder))
        names = args.models.split(",")
        for number, name in enumerate(names, 1):
            with console.status(name) as status:
                label = f"{number}/{len(names)} {name}: "
                models[name] = run_model(
                    name, args.seconds, Path(folder), lambda text, label=label: status.update(
                        label + text
                    ),
                )  # fmt: skip
            console.print(f"{label}{results.summarise(models[name])}", highlight=False)
    found = {"ratios": find_ratios(models), "models": models}
    for ratio, own in found["ratios"].items():
        console.print(f"{ratio}: {results.summarise(own)}", highlight=False)
    if args.out is not None:
        seconds = time.monotonic() - start
        name = "stitching-avx2" if args.avx2 else "stitching"
        console.print(str(results.write(args.out, name, found, seconds=seconds)))


if __name__ == "__main__":
    main()
