"""Micro-benchmark of the CPU device: overhead per launch and step, GEMM providers, sharing.

    python load_tests/micro/cpu_device.py [--threads 1]

Prints tables and one JSON line; records nothing. Minimum of several runs, one thread unless told
otherwise. The baseline `eager` is the same arithmetic as straight torch calls (`linear`, `relu`):
on all rows at once where weights are equal, else request by request with the tenant's own weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from coissue.kernels.cpu.border import Arrival, Border, enter
from coissue.kernels.cpu.device import CpuDevice, DeviceSegment
from coissue.kernels.ir import Dim, Op, Port, Program, R, Type, Weight, fixed
from coissue.kernels.lowered import KernelKind, Lowered
from coissue.kernels.passes.fuse import arrange, assemble
from coissue.kernels.passes.layouts import prove

PROVIDERS = ("kn", "mkl", "onednn", "stack")
SHAPES = ((64, 64), (384, 384), (384, 1536), (1024, 1024))


def mlp(seed: int, width: int, layers: int) -> tuple[Program, dict[str, np.ndarray]]:
    """`layers` times linear and relu, all `width` wide."""
    rng, types, ops, named, arrays = np.random.default_rng(seed), [], [], [], {}

    def value(*shape: Dim) -> int:
        types.append(Type(shape, "f32"))
        return len(types) - 1

    x = given = value(R, Dim(width))
    for layer in range(layers):
        sides = []
        for size in ((width, width), (width,)):
            array = (rng.standard_normal(size) / width**0.5).astype(np.float32)
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            arrays[digest] = array
            sides.append(value(*fixed(*size)))
            named.append(Weight(f"{layer}.{len(size)}", sides[-1], digest))
        y, z = value(R, Dim(width)), value(R, Dim(width))
        ops.append(Op("linear", (x, *sides), (y,), {"layout": "nk"}))
        ops.append(Op("relu", (y,), (z,)))
        x = z
    ports = ((Port("x", given),), (Port("y", x),))
    return Program("mlp", tuple(types), ports[0], tuple(named), tuple(ops), ports[1], 1024), arrays


def joined(program: Program) -> Lowered:
    """The whole program as one kernel."""
    layouts, modes = prove(program)
    parts = list(zip(program.ops, modes, strict=True))
    handed = {program.outputs[0].value}
    kernel = assemble(program, layouts, parts, KernelKind.JOINED, handed)
    return arrange(program, layouts, [kernel])


def best_us(call: Callable[[], object], repeats: int = 7, inner: int = 20) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        times.append((time.perf_counter() - start) / inner)
    return min(times) * 1e6


def show(title: str, rows: list[dict[str, object]]) -> None:
    print(f"\n{title}")
    widths = {key: max(len(key), *(len(str(row.get(key, ""))) for row in rows)) for key in rows[0]}
    for row in [{key: key for key in widths}, *rows]:
        print("  " + "  ".join(str(row.get(key, "")).rjust(widths[key]) for key in widths))


def overhead(device: CpuDevice, width: int, layers: int, tenants: int, same: bool) -> list[dict]:
    """One launch of a joined MLP over segments of one row, against eager torch on all rows."""
    programs = [mlp(0 if same else seed, width, layers) for seed in range(tenants)]
    bounds, rows = [], []
    for program, arrays in programs:
        device.load_weights(arrays)
        lowered = joined(program)
        weights = [torch.from_numpy(array) for array in arrays.values()]
        bounds.append((lowered, device.bind(lowered, 0), weights))
    for count in (1, 8, 32):
        x = np.random.default_rng(1).standard_normal((count, width)).astype(np.float32)
        owners = [bounds[i % tenants] for i in range(count)]
        places = enter(
            [Arrival(Border(o[0]), {"x": x[i : i + 1]}, 1, 0) for i, o in enumerate(owners)]
        )

        def launch(owners=owners, places=places):
            device.run([
                DeviceSegment(o[1], 1, 0, dict(own)) for o, own in zip(owners, places, strict=True)
            ])  # fmt: skip

        def eager(x=torch.from_numpy(x), owners=owners):  # noqa: B008
            for y, (_, _, weights) in (
                [(x, owners[0])] if same else zip(x.split(1), owners, strict=True)
            ):
                for w, b in zip(weights[::2], weights[1::2], strict=True):
                    y = torch.relu(torch.nn.functional.linear(y, w, b))

        with torch.inference_mode():
            ours, theirs = best_us(launch), best_us(eager)
        rows.append({
            "width": width, "layers": layers, "weight sets": 1 if same else min(tenants, count),
            "segments": count, "launch us": round(ours, 1), "eager us": round(theirs, 1),
            "over per step us": round((ours - theirs) / (2 * layers), 2),
        })  # fmt: skip
    for _, arrays in programs:
        device.drop_weights(arrays)
    return rows


def providers(device: CpuDevice) -> list[dict]:
    rows = []
    for k, n in SHAPES:
        device.gemms.choose(k, n)  # measures what it does not know, and stores it
        stored = json.loads((device.cache_dir / "gemm.json").read_text())
        for count, ns in stored["ns"][f"{k}x{n}"].items():
            best = min(ns, key=ns.__getitem__)
            shown = {name: round(value / 1000, 1) for name, value in ns.items()}
            rows.append({"K": k, "N": n, "rows": count, **dict.fromkeys(PROVIDERS, ""), **shown})
            rows[-1]["best"] = best
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    with tempfile.TemporaryDirectory() as folder:
        device = CpuDevice(threads=threads, memory_bytes=1 << 31, cache_dir=Path(folder))
        print(device.name)
        rows = [*overhead(device, 64, 1, 1, True), *overhead(device, 64, 8, 1, True)]
        rows += [*overhead(device, 384, 8, 1, True), *overhead(device, 64, 8, 8, False)]
        rows += overhead(device, 384, 8, 8, False)
        show("launches (requests arrive one by one: rows are joined by a copy)", rows)
        show("GEMM providers, us (stack: per member of 8)", table := providers(device))
        print(json.dumps({"device": device.name, "launches": rows, "providers": table}))


if __name__ == "__main__":
    main()
