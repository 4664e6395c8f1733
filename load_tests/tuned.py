"""Whether plans by the performance library are faster than plans by the estimate, on this CPU.

    python -m load_tests.tuned [--models minilm,bert] [--tune 120] [--out docs/results]

Every model is built twice, with an empty library and with one that `--tune` seconds filled (as
`coissue explain --tune` does), and run by both in turns, one thread. `same kernels` says how many
of the generated functions came out alike; where all did, the plans are the same, and the times tell
how far chance reaches. Times are the least of each side; memory-bound time as in
`load_tests.inductor`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from coissue.deployments.capture.artifact import Artifact
from coissue.deployments.capture.pipeline import capture
from coissue.deployments.settings import Limits, ModelSettings
from coissue.kernels.cpu import native
from coissue.kernels.cpu.build import BUFFER_BYTES
from coissue.kernels.cpu.timing import open_library
from coissue.kernels.lowered import Lowered
from coissue.kernels.stitch.lower import lower
from coissue.kernels.stitch.runs import find_runs
from coissue.kernels.stitch.search import plan
from load_tests import results
from load_tests.inductor import ROWS, Ours, least_ms
from load_tests.stitching_models import CASES, LENGTH


def fill(lowered: Lowered, folder: Path, seconds: float) -> dict[str, Any]:
    """Times the single ops that plans of the program ask for."""
    chain = native.find_toolchain()
    assert chain is not None, "no C++ compiler (g++, clang++)"
    library, start = open_library(folder, chain, seconds), time.monotonic()
    kernels = {kernel.signature: kernel for kernel in lowered.kernels}
    for kernel in kernels.values():
        for run in find_runs(lowered, kernel):
            graph = lower(lowered, run.ops)
            plan(graph, threads=1, budget_bytes=BUFFER_BYTES, measured=library)
    library.save()
    took_s = time.monotonic() - start
    return {"ops timed": library.misses, "all timed": library.is_filled, "tuning s": took_s}


def libraries(ours: Ours) -> set[str]:
    """Of all generated functions, by what they were made of."""
    builds = ours.builds(ours.lowered)
    return {call.library for build in builds for run in build.runs for call in run.calls}


def compare(name: str, artifact: Artifact, tune: float, seconds: float, folder: Path) -> dict:
    estimated = Ours(artifact, folder / name / "estimate")
    found = fill(estimated.lowered, folder / name / "times" / "native", tune)
    sides = {"estimate": estimated, "library": Ours(artifact, folder / name / "times")}
    made = {side: libraries(ours) for side, ours in sides.items()}
    found |= {f"{side} kernels": len(own) for side, own in made.items()}
    found["same kernels"] = len(made["estimate"] & made["library"])
    for rows in ROWS:
        inputs = CASES[name].inputs(rows)
        calls = {
            side: lambda ours=ours, own=inputs: ours.forward(own) for side, ours in sides.items()
        }
        times = least_ms(calls, seconds)
        for side, ours in sides.items():
            found[f"x{rows} {side} ms"] = times[side]
            found[f"x{rows} {side} memory ms"] = ours.time_memory_bound(inputs)
    for ours in sides.values():
        ours.forge.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--tune", type=float, default=120.0, help="seconds of timing per model")
    parser.add_argument("--seconds", type=float, default=5.0, help="of comparing, model and size")
    parser.add_argument("--out", type=Path, default=None, help="folder of result files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console, models, start = Console(), {}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="coissue-tuned-") as folder, torch.inference_mode():
        for name in args.models.split(","):
            with console.status(name):
                factory = "load_tests.stitching_models:build"
                model = ModelSettings(factory=factory, kwargs={"name": name})
                artifact = capture(model, Limits(rows=8, tokens=LENGTH), name)
                models[name] = compare(name, artifact, args.tune, args.seconds, Path(folder))
            console.print(f"{name}: {results.summarise(models[name])}", highlight=False)
    ratios = {
        f"x{rows} {what}library over estimate": statistics.geometric_mean(
            m[f"x{rows} library {what}ms"] / m[f"x{rows} estimate {what}ms"]
            for m in models.values()
            if m[f"x{rows} estimate {what}ms"]
        )
        for rows in ROWS
        for what in ("", "memory ")
    }
    console.print(results.summarise(ratios), highlight=False)
    if args.out is not None:
        found = {"ratios": ratios, "models": models}
        path = results.write(args.out, "tuned", found, seconds=time.monotonic() - start)
        console.print(str(path))


if __name__ == "__main__":
    main()
