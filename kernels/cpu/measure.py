"""Measures a kernel's launches for the cost table, in pieces short enough to serve in between."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from coissue.kernels.cost_table import CostTable
from coissue.kernels.cpu import ops
from coissue.kernels.cpu.device import (
    BoundKernel,
    Buffers,
    CpuDevice,
    DeviceSegment,
    Slice,
    WeightSet,
)
from coissue.kernels.cpu.frame import Packing
from coissue.kernels.lowered import Lowered

#: Launches timed per point, after one to warm up; the fastest counts, for whatever else the machine
#: does only adds time, and what it does all the time is corrected for while serving.
REPEATS = 5
#: Changes whenever points are chosen or timed differently: older stored points are not read.
GRID = 2
UNITS = (1, 8, 64, 256)
SEGMENTS = (1, 8)
WEIGHT_SETS = (1, 4)
#: Other tenants' weights are played by copies up to this size, beyond it by the same weights.
TWIN_BYTES_LIMIT = 1 << 26


def measure(
    device: CpuDevice,
    table: CostTable,
    lowered: Lowered,
    kernel_index: int,
    *,
    units: Sequence[int] = UNITS,
    segments: Sequence[int] = SEGMENTS,
    weight_sets: Sequence[int] = WEIGHT_SETS,
    bound_ns: int = 20_000_000,
) -> Iterator[None]:
    """Records the kernel on a grid of units, segments and weight sets, one point per step.

    Points that as many launches as there are weight sets put beyond `bound_ns` are left out, so
    that no step takes much longer than `REPEATS` times that.
    """
    signature = lowered.kernels[kernel_index].signature
    bound = device.bind(lowered, kernel_index)
    sets = _twins(bound, max(weight_sets) if bound.weights.weights else 1)
    for number in sorted({min(number, len(sets)) for number in weight_sets}):
        for count in sorted({max(count, number) for count in segments}):
            for total in (total for total in units if total >= count):
                # By the points of one request: between few points the table has to be cautious,
                # and what it so forbids to measure it would never learn.
                if (
                    signature in table
                    and number * table.predict_ns(signature, total, 1, 1) > bound_ns
                ):
                    break
                chosen = [sets[i % number] for i in range(count)]
                done, ns = _time_ns(device, lowered, kernel_index, chosen, total)
                table.record(signature, done, count, number, ns)
                yield
    for twin in sets[1:]:
        for weight in twin.weights.weights:
            device.store.drop_stacks(weight.digest)


@torch.inference_mode()
def _twins(bound: BoundKernel, count: int) -> list[BoundKernel]:
    """`bound`, and as many others with weights of their own as make `count`."""
    held = sum(weight.num_bytes for weight in bound.weights.weights)
    copy = held * (count - 1) <= TWIN_BYTES_LIMIT
    made = [bound]
    for i in range(1, count):
        weights = tuple(w.twin(f"{w.digest}~{i}", copy=copy) for w in bound.weights.weights)
        made.append(replace(bound, weights=WeightSet(-i, bound.plan, weights)))
    return made


def _time_ns(
    device: CpuDevice, lowered: Lowered, index: int, chosen: Sequence[BoundKernel], units: int
) -> tuple[int, int]:
    """Units done, and the least time of `REPEATS` launches of about `units` over `chosen`."""
    per_token = lowered.kernels[index].per_token
    limit = max(lowered.program.tokens_limit, 1)
    share = units // len(chosen)
    # Tokens in rows as long as they may be: where the length matters, longer is dearer.
    size = (-(-share // limit), min(share, limit)) if per_token else (share, min(limit, 8))
    sizes = [size] * len(chosen)
    inputs = _together(lowered, index, sizes)
    times = []
    for _ in range(REPEATS + 1):
        launched = [
            DeviceSegment(bound, rows, tokens, dict(zip(bound.inputs, own.values(), strict=True)))
            for bound, (rows, tokens), own in zip(chosen, sizes, inputs, strict=True)
        ]
        start_ns = time.perf_counter_ns()
        device.run(launched)
        times.append(time.perf_counter_ns() - start_ns)
    done = sum(rows * tokens if per_token else rows for rows, tokens in sizes)
    return done, min(times[1:])


def _together(lowered: Lowered, index: int, sizes: Sequence[tuple[int, int]]) -> list[Buffers]:
    """Inputs of requests that travel together: slices of one packed tensor per value."""
    found: list[Buffers] = [{} for _ in sizes]
    for value in lowered.kernels[index].inputs:
        packing = Packing(lowered.layouts[value], lowered.program.types[value])
        dtype = ops.DTYPES[packing.type.dtype]
        if not packing.is_packed:
            for own, (rows, tokens) in zip(found, sizes, strict=True):
                own[value] = _filled(packing.type.at(rows, tokens), dtype)
            continue
        rows = sum(size[0] for size in sizes)
        whole = _filled(packing.packed_shape(rows, sum(r * t for r, t in sizes)), dtype)
        start = 0
        for own, (rows, tokens) in zip(found, sizes, strict=True):
            stop = start + packing.entries(rows, rows * tokens)
            own[value], start = Slice(whole, start, stop), stop
    return found


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers: they are in range wherever a value is an index, and true as masks."""
    return (
        torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)
    )
