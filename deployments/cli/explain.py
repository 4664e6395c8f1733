"""`coissue explain`: what the stitching compiler makes of a tenant's memory-bound ops, and why."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import track

from coissue.deployments.capture.artifact import Artifact
from coissue.deployments.captures import Captures
from coissue.deployments.config_file import load_app_config
from coissue.deployments.settings import (
    IMPORTED,
    CaptureSettings,
    DeviceSettings,
    TenantSettings,
)
from coissue.kernels.cpu.build import (
    BUFFER_BYTES,
    Unsuited,
    find_lookups,
    number_arguments,
    without_folds,
)
from coissue.kernels.cpu.native import find_toolchain, number_values, work_folder
from coissue.kernels.cpu.timing import open_library
from coissue.kernels.ir import Op
from coissue.kernels.lowered import Kernel, Lowered, Mode
from coissue.kernels.passes.fold import find_folds
from coissue.kernels.passes.pipeline import lower
from coissue.kernels.stitch import lower as lowering
from coissue.kernels.stitch.cpp import render_cpp
from coissue.kernels.stitch.cuda import render_cuda
from coissue.kernels.stitch.emit import emit
from coissue.kernels.stitch.explain import render_svg, render_text
from coissue.kernels.stitch.library import Library
from coissue.kernels.stitch.lower import RULES, VIEWS
from coissue.kernels.stitch.plan import StitchPlan
from coissue.kernels.stitch.price import cpu, gpu
from coissue.kernels.stitch.runs import Run, find_runs
from coissue.kernels.stitch.search import plan
from coissue.kernels.stitch.tune import Settings

CONFIG_SUFFIXES: Final = (".yaml", ".yml", ".json")
CUDA_THREADS: Final = 256
#: Ops with kernels of a library, which stitched ones stand between.
LIBRARY: Final = ("linear", "matmul", "conv", "attention", "lstm", "gru", "rnn", "embedding_bag")
Found = tuple[TenantSettings, CaptureSettings, DeviceSettings]
SETTINGS: Final = {
    "cpu": Settings(BUFFER_BYTES, 1, cpu()),
    "cuda": Settings(48 * 1024, CUDA_THREADS, gpu(CUDA_THREADS)),
}


@dataclass(frozen=True, slots=True)
class Explained:
    """One run of ops of one kernel."""

    #: Number of the kernel in the program, and how many are equal to it.
    kernel: int
    times: int
    run: Run
    plan: StitchPlan
    #: Why the CPU device leaves the run to its op table; empty: it does not.
    unsuited: str


def find_model(model: str, name: str | None) -> Found:
    """The tenant `name` of a config, or what stands for the model of a factory or saved program.
    Raises `ConfigError`, and `ValueError` for what there is not."""
    if name is None and not model.endswith(CONFIG_SUFFIXES):
        source = "factory" if IMPORTED.fullmatch(model) else "program"
        if source == "program" and not os.path.exists(model):
            raise ValueError(f"MODEL: no file {model!r}, and not pkg.mod:callable")
        made = {"name": "model", "model": {source: model}, "slo": ""}
        return TenantSettings.model_validate(made), CaptureSettings(), DeviceSettings()
    _, settings = load_app_config(Path(model))
    found = {tenant.name: tenant for tenant in settings.tenants}
    if name is None and len(found) == 1:
        (name,) = found
    if name not in found:
        raise ValueError(f"TENANT: {repr(name) if name else 'missing'}, one of: {', '.join(found)}")
    return found[name], settings.capture, settings.device


@contextmanager
def _showing(text: str) -> Iterator[None]:
    """A spinner. What the capture's process says on stderr is left out: its reason is one line."""
    with os.fdopen(os.dup(2), "w") as kept, open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
        try:
            with Console(file=kept).status(text):
                yield
        finally:
            os.dup2(kept.fileno(), 2)


def capture(tenant: TenantSettings, settings: CaptureSettings) -> Lowered:
    """The tenant's program, captured in a process of its own. Raises `TenantFailed`."""

    async def work(folder: Path) -> Artifact:
        captures = Captures(folder, settings)
        try:
            return Artifact.load(Path(await captures.capture(tenant, 1)))
        finally:
            await captures.close()

    with tempfile.TemporaryDirectory() as folder, _showing(f"capturing {tenant.name}"):
        return lower(asyncio.run(work(Path(folder))).program, exact=tenant.exact)


@contextmanager
def open_times(settings: DeviceSettings, seconds: float) -> Iterator[Library | None]:
    """The performance library of this CPU, with so much time to fill it; None: there is no
    compiler. Raises `ValueError` if it was to be filled."""
    toolchain = find_toolchain()
    if toolchain is None and seconds:
        raise ValueError("--tune: no C++ compiler (g++, clang++) found")
    if toolchain is None:
        yield None
        return
    folder = settings.cache_dir / "native"
    library = open_library(folder, toolchain, seconds)
    try:
        yield library
    finally:
        if seconds:
            library.save()
            shutil.rmtree(work_folder(folder, os.getpid()), ignore_errors=True)


def explain_runs(
    lowered: Lowered, device: str, units: int, console: Console, times: Library | None = None
) -> list[Explained]:
    """Every run of every kind of kernel; equal kernels are explained once.

    `units`: rows, or tokens, of a launch. `times`: of the CPU."""
    settings = SETTINGS[device]
    kinds: dict[str, list[int]] = {}
    for number, kernel in enumerate(lowered.kernels):
        kinds.setdefault(kernel.signature, []).append(number)
    work = [
        (numbers, kernel, run)
        for numbers in kinds.values()
        for kernel in [without_folds(lowered, lowered.kernels[numbers[0]])]
        for run in find_runs(lowered, kernel)
    ]
    found = []
    said = "planning" if times is None or not times.is_filled else "tuning and planning"
    for numbers, kernel, run in track(work, said, console=console, transient=True):
        made = plan(
            lowering.lower(lowered, run.ops),
            threads=settings.threads, budget_bytes=settings.budget_bytes,
            measured=times if device == "cpu" else None, units=units,
        )  # fmt: skip
        why = _unsuited(kernel, made) if device == "cpu" else ""
        found.append(Explained(numbers[0], len(numbers), run, made, why))
    return found


def _unsuited(kernel: Kernel, made: StitchPlan) -> str:
    places = {value: place for place, value in enumerate(number_values(kernel))}
    try:
        number_arguments(made, places)
        find_lookups(made.graph, places)
    except Unsuited as error:
        return str(error)
    return ""


def describe(lowered: Lowered, runs: list[Explained], device: str, units: int) -> Iterator[str]:
    """Text, run by run."""
    before = sum(len(one.run.ops) * one.times for one in runs)
    after = sum(len(one.plan.kernels) * one.times for one in runs)
    yield f"{len(lowered.kernels)} kernels; in them {before} memory-bound ops, {after} stitched"
    for one in runs:
        ops = ", ".join(op.name for op in one.run.ops)
        unit = one.run.unit.name.lower()
        yield f"\n== kernel {one.kernel}{_times(one)}: ops of {unit}: {ops}"
        if one.unsuited:
            yield f"stays with the op table: {one.unsuited}"
        settings = replace(SETTINGS[device], units=units // one.plan.units)
        yield render_text(one.plan, settings).rstrip()
    yield ""
    yield from describe_rest(lowered)


def describe_rest(lowered: Lowered) -> Iterator[str]:
    """The ops that are in no run, and why; but for views, which are free."""
    found: dict[str, Counter[str]] = {}
    for kernel in lowered.kernels:
        folded = set(find_folds(lowered, kernel).values())
        runs = find_runs(lowered, without_folds(lowered, kernel))
        inside = {op.outputs for run in runs for op in run.ops}
        for place, (op, mode) in enumerate(zip(kernel.ops, kernel.modes, strict=True)):
            if op.outputs not in inside and op.name not in VIEWS:
                why = "batch norm of a convolution" if place in folded else _why_not(op, mode)
                found.setdefault(why, Counter())[op.name] += 1
    for why, ops in sorted(found.items()):
        listed = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in ops.most_common())
        yield f"not stitched, {why}: {listed}"


def _why_not(op: Op, mode: Mode) -> str:
    if mode is Mode.ONCE:
        return "from weights alone, once"
    if op.name in LIBRARY:
        return "for the library"
    if mode is not Mode.PACKED:
        return "every request apart"
    return "no rule for it" if op.name not in RULES else "may fail at a launch"


def _times(one: Explained) -> str:
    return f" and {one.times - 1} equal to it" if one.times > 1 else ""


def render_sources(runs: list[Explained], device: str) -> Iterator[str]:
    """What is compiled, a source for each stitched kernel."""
    for place, one in enumerate(runs):
        for number, kernel in enumerate(one.plan.kernels):
            name = f"run{place}_kernel{number}"
            loops = [emit(one.plan.graph, kernel, name)]
            yield render_cpp(loops) if device == "cpu" else render_cuda(loops, f"launch_{name}")


_SIZE: Final = re.compile(r'width="(\d+)" height="(\d+)"')


def render_picture(runs: list[Explained]) -> str:
    """The graphs of all runs below each other, as one SVG."""
    parts, width, top = [], 400, 0
    for one in runs:
        picture = render_svg(one.plan)
        size = _SIZE.search(picture)
        assert size is not None, "it begins with its size"
        title = f"kernel {one.kernel}{_times(one)}"
        parts.append(f'<text x="20" y="{top + 18}" font-size="14">{title}</text>')
        parts.append(picture.replace("<svg ", f'<svg y="{top + 24}" ', 1))
        width, top = max(width, int(size[1])), top + 24 + int(size[2])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}"'
    return "\n".join([f'{head} font-family="sans-serif">', *parts, "</svg>\n"])
