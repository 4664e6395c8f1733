"""Micro-benchmark of exact mode on the CPU device: the same launches in both modes.

    python -m load_tests.micro.exact_mode [--threads 1] [--quick]

Prints a table and, last, one JSON line; records nothing. Per model and mix of requests the least
time of a pass through all kernels, the modes in turns. `own` weights: half of the requests are of
another tenant with other weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from coissue.deployments.capture.artifact import Artifact
from coissue.deployments.capture.pipeline import capture
from coissue.deployments.settings import Limits, ModelSettings
from coissue.kernels.cpu.border import Arrival, Border, enter
from coissue.kernels.cpu.device import BoundKernel, CpuDevice, DeviceSegment
from coissue.kernels.lowered import Lowered
from coissue.kernels.passes.link import cut
from coissue.kernels.passes.pipeline import lower

#: Requests of a launch: (how many, rows each, tokens per row).
MIXES = ((1, 1, 16), (8, 1, 16), (32, 1, 16), (1, 32, 16), (8, 4, 16))
TOKENS = ("rows", "tokens")


def mlp(seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    layers = [part for _ in range(4) for part in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 10)), {"x": torch.randn(3, 512)}


def cnn(seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 10)), {"x": torch.randn(3, 3, 32, 32)}


def encoder(seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, tuple]]:
    """Of MiniLM's width, two layers."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(384, 12, 1536, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, {"x": torch.randn(3, 7, 384)}, {"x": TOKENS}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0].mean(1))


def lstm(seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, tuple]]:
    torch.manual_seed(seed)
    return Tagger(), {"x": torch.randn(3, 7, 64)}, {"x": TOKENS}


def capture_both(name: str) -> list[Artifact]:
    """The same model with two sets of weights."""
    return [
        capture(
            ModelSettings(factory=f"load_tests.micro.exact_mode:{name}", kwargs={"seed": seed}),
            Limits(rows=64, tokens=64), name,
        )
        for seed in (0, 1)
    ]  # fmt: skip


def bind(
    device: CpuDevice, artifact: Artifact, *, exact: bool
) -> tuple[Lowered, list[BoundKernel]]:
    """Joined up to a size as attach would."""
    device.load_weights({digest: np.asarray(a) for digest, a in artifact.weights.items()})
    lowered = cut({"one": lower(artifact.program, exact=exact)}, lambda kernel: 1, 8)["one"]
    return lowered, [device.bind(lowered, index) for index in range(len(lowered.kernels))]


def make_pass(
    device: CpuDevice,
    tenants: list[tuple[Lowered, list[BoundKernel]]],
    count: int,
    rows: int,
    tokens: int,
) -> Callable[[], None]:
    """A pass of `count` requests through all kernels, tenants in turns."""
    owners = [tenants[i % len(tenants)] for i in range(count)]
    program = owners[0][0].program
    tokens = tokens if program.tokens_limit else 0
    rng = np.random.default_rng(0)
    arrays = [
        {
            port.name: rng.standard_normal(program.types[port.value].at(rows, tokens)).astype("f4")
            for port in program.inputs
        }
        for _ in owners
    ]

    def run() -> None:
        arrivals = [
            Arrival(Border(lowered), inputs, rows, tokens)
            for (lowered, _), inputs in zip(owners, arrays, strict=True)
        ]
        buffers = enter(arrivals)
        for index in range(len(owners[0][1])):
            device.run([
                DeviceSegment(kernels[index], rows, tokens, own)
                for (_, kernels), own in zip(owners, buffers, strict=True)
            ])  # fmt: skip

    return run


def least_us(calls: list[Callable[[], None]], seconds: float) -> list[float]:
    """In turns, so that a busy moment of the machine hits all."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
        rounds += 1
    return [value * 1e6 for value in best]


def compare(device: CpuDevice, name: str, seconds: float) -> list[dict[str, object]]:
    artifacts, found = capture_both(name), []
    start = time.perf_counter()
    precise = [bind(device, artifact, exact=True) for artifact in artifacts]
    tried_ms = (time.perf_counter() - start) * 1e3
    plain = [bind(device, artifact, exact=False) for artifact in artifacts]
    for weights in ("same", "own"):
        for count, rows, tokens in MIXES:
            if weights == "own" and count == 1:
                continue
            used = slice(1) if weights == "same" else slice(2)
            calls = [
                make_pass(device, tenants[used], count, rows, tokens)
                for tenants in (plain, precise)
            ]
            default_us, exact_us = least_us(calls, seconds)
            found.append({
                "model": name, "weights": weights, "requests": count, "rows": rows,
                "default us": round(default_us, 1), "exact us": round(exact_us, 1),
                "ratio": round(exact_us / default_us, 2), "attach ms": round(tried_ms),
            })  # fmt: skip
    return found


def show(rows: list[dict[str, object]]) -> None:
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    for row in [{key: key for key in widths}, *rows]:
        print("  " + "  ".join(str(row[key]).rjust(widths[key]) for key in widths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        device = CpuDevice(threads=args.threads, memory_bytes=1 << 31, cache_dir=Path(folder))
        print(device.name)
        rows: list[dict[str, object]] = []
        for name in ("mlp", "cnn", "encoder", "lstm"):
            rows += compare(device, name, 0.1 if args.quick else 1.0)
        show(rows)
        print(json.dumps({"device": device.name, "rows": rows}))


if __name__ == "__main__":
    main()
