"""`coissue explain`: what is generated for a tenant's memory-bound ops and recurrences, and why."""

from __future__ import annotations

import asyncio
import os
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
    SchedulerSettings,
    TenantSettings,
)
from coissue.kernels.cpu.build import (
    BUFFER_BYTES,
    SYMBOL,
    Unsuited,
    number_arguments,
    render_unit,
)
from coissue.kernels.cpu.native import find_toolchain
from coissue.kernels.cpu.timing import open_library
from coissue.kernels.ir import Op
from coissue.kernels.lowered import Kernel, Lowered, Mode, describe_kernel
from coissue.kernels.passes.fold import find_folds
from coissue.kernels.passes.link import cut, guess_times
from coissue.kernels.passes.pipeline import lower
from coissue.kernels.stitch import lower as lowering
from coissue.kernels.stitch.cpp import HEADERS as CPP_HEADERS
from coissue.kernels.stitch.cuda import cuda_prelude, render_cuda
from coissue.kernels.stitch.emit import emit
from coissue.kernels.stitch.explain import Picture, render_text
from coissue.kernels.stitch.library import Library
from coissue.kernels.stitch.lower import RULES, VIEWS
from coissue.kernels.stitch.plan import StitchPlan
from coissue.kernels.stitch.price import cpu, gpu
from coissue.kernels.stitch.recurrence import HEADERS as STEP_HEADERS
from coissue.kernels.stitch.recurrence import (
    draw_recurrence,
    find_recurrences,
    hidden_of,
    render_recurrence,
)
from coissue.kernels.stitch.render import prelude
from coissue.kernels.stitch.runs import Run, find_runs
from coissue.kernels.stitch.search import plan
from coissue.kernels.stitch.tune import Settings

CONFIG_SUFFIXES: Final = (".yaml", ".yml", ".json")
CUDA_THREADS: Final = 256
#: Rows or tokens of a launch: on the CPU a block takes one after the other, whatever their number.
UNITS: Final = {"cpu": 1, "cuda": 64}
#: Ops with kernels of a library, which stitched ones stand between.
LIBRARY: Final = ("linear", "matmul", "conv", "attention", "embedding_bag")
STEPS: Final = """\
per layer and direction, after one product of W_ih and all tokens of the launch by the library:
rows of all lengths advance together, and W_hh is read once per step and block of rows;
coissue_stitched makes the steps, coissue_stitched_pack packs W_hh once per weights"""
LEGEND: Final = """
A kernel is what the scheduler launches, named by its kind, its first ops, how many more it has
(views too, which cost nothing), and the beginning of its signature: equal ones can share a launch.
A stitched kernel is a generated function for some of its ops. Below, a unit is a row or a token (or
a pack of them, where it says so), and bytes are those read and written. %n is an elementary op or a
view with the type of its result (constants are not listed), its layer counted from the outputs,
and its schedule: (split_dim, sword) cuts the result into sword parts of split_dim for each index of
the dims before it ("column": behind it), one per block; (0, 1) is one block. A result is kept in a
block's buffer ("shared": on a CPU the stack; "without sharing": were no place used twice), computed
where it is read ("inline"), or written ("output"); a thread, warp or block sums up each row of a
reduction. Kernels touch if one reads what the other makes, or both read the same."""
Found = tuple[TenantSettings, CaptureSettings, DeviceSettings, SchedulerSettings]
SETTINGS: Final = {
    "cpu": Settings(BUFFER_BYTES, 1, cpu()),
    "cuda": Settings(48 * 1024, CUDA_THREADS, gpu(CUDA_THREADS)),
}


@dataclass(frozen=True, slots=True)
class Explained:
    """A run of ops, or a recurrence, of one kernel."""

    #: Its number, the kernel, and what.
    title: str
    text: str
    #: What is compiled, a unit per stitched kernel; empty: it stays with the op table.
    sources: list[str]
    picture: Picture
    #: How many memory-bound ops it has, 0 of a recurrence; and how many kernels have it.
    ops: int
    times: int


def find_model(model: str, name: str | None) -> Found:
    """The tenant `name` of a config, or what stands for the model of a factory or saved program.
    Raises `ConfigError`, and `ValueError` for what there is not."""
    if name is not None and (IMPORTED.fullmatch(model) or model.endswith(".pt2")):
        raise ValueError(f"TENANT: {name!r}, but {model!r} is a model, not a config")
    if name is None and not model.endswith(CONFIG_SUFFIXES):
        source = "factory" if IMPORTED.fullmatch(model) else "program"
        if source == "program" and not os.path.exists(model):
            raise ValueError(f"MODEL: no file {model!r}, and not pkg.mod:callable")
        made = {"name": "model", "model": {source: model}, "slo": ""}
        tenant = TenantSettings.model_validate(made)
        return tenant, CaptureSettings(), DeviceSettings(), SchedulerSettings()
    _, settings = load_app_config(Path(model))
    found = {tenant.name: tenant for tenant in settings.tenants}
    if name is None and len(found) == 1:
        (name,) = found
    if name not in found:
        raise ValueError(f"TENANT: {repr(name) if name else 'missing'}, one of: {', '.join(found)}")
    return found[name], settings.capture, settings.device, settings.scheduler


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


def capture(
    tenant: TenantSettings, settings: CaptureSettings, scheduler: SchedulerSettings
) -> tuple[Lowered, Lowered]:
    """The tenant's program, captured in a process of its own; and with its kernels joined as if it
    were served alone. Raises `TenantFailed`."""

    async def work(folder: Path) -> Artifact:
        captures = Captures(folder, settings)
        try:
            return Artifact.load(Path(await captures.capture(tenant, 1)))
        finally:
            await captures.close()

    with tempfile.TemporaryDirectory() as folder, _showing(f"capturing {tenant.name}"):
        plain = lower(asyncio.run(work(Path(folder))).program, exact=tenant.exact)
    (joined,) = cut({"": plain}, guess_times([plain]), scheduler.join_bound_ns).values()
    return plain, joined


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


def find_parts(lowered: Lowered, kernel: Kernel, device: str) -> list[Run | Op]:
    """Runs of a kernel, and recurrences whose steps are generated."""
    if kernel.exact:
        return []
    steps = find_recurrences(lowered, kernel) if device == "cpu" else {}
    found = find_runs(lowered, kernel)
    return [*found, *(kernel.ops[place] for place, hindrance in steps.items() if not hindrance)]


def explain_parts(
    lowered: Lowered, device: str, units: int, console: Console, times: Library | None = None
) -> list[Explained]:
    """Every part of every kind of kernel; equal kernels are explained once.

    `units`: rows, or tokens, of a launch. `times`: of the CPU."""
    settings = replace(SETTINGS[device], measured=times if device == "cpu" else None, units=units)
    kinds: dict[str, list[int]] = {}
    for number, kernel in enumerate(lowered.kernels):
        kinds.setdefault(kernel.signature, []).append(number)
    work = [
        (numbers, kernel, part)
        for numbers in kinds.values()
        for kernel in [lowered.kernels[numbers[0]]]
        for part in find_parts(lowered, kernel, device)
    ]
    said = "planning" if times is None or not times.is_filled else "tuning and planning"
    found: list[Explained] = []
    for numbers, kernel, part in track(work, said, console=console, transient=True):
        name = f"{len(found) + 1}. kernel {numbers[0]}"
        name += f" and {len(numbers) - 1} equal to it" if len(numbers) > 1 else ""
        if isinstance(part, Op):
            title = f"{name}: recurrence: {part.name} of {hidden_of(part)} hidden units"
            sources = [render_recurrence(part, SYMBOL)]
            drawn = name, draw_recurrence(part), {2: 0}
            found.append(Explained(title, STEPS, sources, drawn, 0, len(numbers)))
            continue
        made = plan(
            lowering.lower(lowered, part.ops),
            threads=settings.threads, budget_bytes=settings.budget_bytes,
            measured=settings.measured, units=units,
        )  # fmt: skip
        title = f"{name}: ops of {part.unit.name.lower()}: {', '.join(o.name for o in part.ops)}"
        text = render_text(made, replace(settings, measured=None, units=units // made.units))
        try:
            if device == "cpu":
                number_arguments(made, kernel)
                sources = [render_unit(made.graph, unit) for unit in made.kernels]
            else:
                sources = [*_render_cuda(made, f"run{len(found)}")]
        except Unsuited as error:
            text, sources = f"stays with the op table: {error}\n{text}", []
        home = {index: n for n, unit in enumerate(made.kernels) for index in unit.nodes}
        drawn = name, made.graph, home
        found.append(Explained(title, text, sources, drawn, len(part.ops), len(numbers)))
    return found


def _render_cuda(made: StitchPlan, name: str) -> Iterator[str]:
    for number, unit in enumerate(made.kernels):
        kernel = f"{name}_kernel{number}"
        yield render_cuda([emit(made.graph, unit, kernel)], f"launch_{kernel}")


def describe(
    before: Lowered, lowered: Lowered, parts: list[Explained], device: str
) -> Iterator[str]:
    """Text, part by part. `before`: with its kernels as they were before they were joined."""
    ops = sum(one.ops * one.times for one in parts)
    stitched = sum(len(one.sources) * one.times for one in parts if one.ops)
    steps = sum(one.times for one in parts if not one.ops)
    joined = " as for the CPU device" if device == "cuda" else ""
    yield (
        f"launches: {len(before.kernels)} before kernels are joined{joined}, "
        f"{len(lowered.kernels)} after, for this tenant alone; a prefix that it shares with other "
        "tenants may be cut elsewhere"
    )
    yield from describe_launches(before, lowered)
    more = f"; {steps} recurrence{'s' * (steps > 1)} with generated steps" if steps else ""
    yield (
        f"in them {ops} memory-bound op{'s' * (ops != 1)}, in {stitched} stitched "
        f"kernel{'s' * (stitched != 1)}{more}"
    )
    yield LEGEND
    for one in parts:
        yield f"\n== {one.title}\n{one.text.rstrip()}"
    yield ""
    yield from describe_rest(lowered, device)


def describe_launches(before: Lowered, lowered: Lowered) -> Iterator[str]:
    """A line per kernel, with the numbers of those that it was before."""
    for number, kernel in enumerate(lowered.kernels):
        inside = {op.outputs for op in kernel.ops}
        parts = [i for i, k in enumerate(before.kernels) if {op.outputs for op in k.ops} <= inside]
        places = f"{parts[0]} to {parts[-1]}" if len(parts) > 1 else "".join(map(str, parts))
        yield f"  kernel {number}: {describe_kernel(kernel)}, before: {places}"


def describe_sources(parts: list[Explained], device: str) -> Iterator[str]:
    """Each translation unit, what all of its kind begin with only once."""
    kinds = [cuda_prelude()] if device == "cuda" else [prelude(CPP_HEADERS), prelude(STEP_HEADERS)]
    known: list[str] = []
    for one in parts:
        for number, source in enumerate(one.sources):
            begin = next(text for text in kinds if source.startswith(text))
            if begin not in known:
                known.append(begin)
                yield f"// == prelude {len(known)}\n{begin}"
            what = f"stitched kernel {number}" if one.ops else "steps"
            yield f"// == {one.title}: {what}, after prelude {known.index(begin) + 1}"
            yield source.removeprefix(begin)


def describe_rest(lowered: Lowered, device: str) -> Iterator[str]:
    """The ops that are in no part, and why; but for views, which are free."""
    found: dict[str, Counter[str]] = {}
    for kernel in lowered.kernels:
        why_not = dict.fromkeys(find_folds(lowered, kernel).values(), "batch norm of a convolution")
        steps = find_recurrences(lowered, kernel)
        why_not |= steps if device == "cpu" else dict.fromkeys(steps, "steps are for the CPU alone")
        parts = find_parts(lowered, kernel, device)
        ops = [op for part in parts for op in (part.ops if isinstance(part, Run) else [part])]
        inside = {op.outputs for op in ops}
        for place, (op, mode) in enumerate(zip(kernel.ops, kernel.modes, strict=True)):
            if op.outputs not in inside and op.name not in VIEWS:
                why = "exact" if kernel.exact else why_not.get(place) or _why_not(op, mode)
                found.setdefault(why, Counter())[op.name] += 1
    for why, names in sorted(found.items()):
        listed = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in names.most_common())
        yield f"not generated, {why}: {listed}"


def _why_not(op: Op, mode: Mode) -> str:
    if mode is Mode.ONCE:
        return "from weights alone, once"
    if op.name in LIBRARY:
        return "for the library"
    if mode is not Mode.PACKED:
        return "every request apart"
    return "no rule for it" if op.name not in RULES else "may fail at a launch"
