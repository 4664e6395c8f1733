"""Measures a kernel's launches for the cost table, in pieces short enough to serve in between.

Launches are timed with inputs that lie together, as those of requests that travel together do; what
it takes to join inputs that do not is timed apart from that: it needs no weights, and little time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
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
    gather,
)
from coissue.kernels.cpu.frame import Packing
from coissue.kernels.lowered import Lowered
from coissue.kernels.optable.base import KINDS

#: All points are timed in turns, so often: what decides is how they compare, and a machine that is
#: shared may be slow for as long as all of them take (1.4 times, for half a second, was seen).
ROUNDS = 3
#: Launches timed per point and round at least, after one to warm up; the fastest counts, for
#: whatever else the machine does only adds time, and what it does all the time is corrected for
#: while serving.
REPEATS = 2
#: Short launches are timed for so long, or so many of them: two differ by chance more than what is
#: to be decided by them.
POINT_NS = 2_000_000
REPEATS_MAX = 40
#: The same where weights are launched first: up to twenty launches are each a little shorter than
#: the last, by a quarter in all, until the caches have settled on them.
FRESH_NS = 10_000_000
#: Changes whenever points are chosen or timed differently: older stored points are not read.
GRID = 6
#: Two, for where reading weights takes all the time eight look too long by one alone.
UNITS = (1, 2, 8, 64, 256)
#: Of one request too: what large launches take that the caches do not hold.
LARGE = (1024, 4096)
SEGMENTS = (1, 8)
WEIGHT_SETS = (1, 2, 4, 8)
#: Segments that a join is measured for: two numbers, for what each further segment costs.
JOINED = (2, 8)
#: Other tenants' weights are played by copies of so many bytes at most: of large ones there are
#: fewer. (The same weights in place of copies would be in the cache, where others' are not.)
TWIN_BYTES_LIMIT = 1 << 26
#: Different numbers in inputs.
DRAWN = 1 << 12
_Run = Callable[[Sequence[DeviceSegment]], None]


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
    numbers = sorted({min(number, len(sets)) for number in weight_sets})
    best: dict[tuple[int, int, int, bool], int] = {}

    def record(units: int, count: int, number: int, ns: int, joins: bool = False) -> None:
        size = units, count, number, joins
        best[size] = min(ns, best.get(size, ns))
        table.record(signature, units, count, number, best[size], joins)

    def is_too_long(total: int, number: int) -> bool:
        """By the points of one request: between few points the table has to be cautious, and what
        it so forbids to measure it would never learn."""
        return number * table.predict_ns(signature, total, 1, 1) > bound_ns

    for turn in range(ROUNDS):
        for number in numbers:
            point_ns = POINT_NS if turn else FRESH_NS
            for count in sorted({max(count, number) for count in segments}):
                # A unit each is what tenants with one row send.
                totals = {count, *(total for total in units if total >= count)}
                for total in sorted(totals.union(LARGE if count == 1 else ())):
                    if best and is_too_long(total, number):
                        break
                    chosen = [sets[i * number // count] for i in range(count)]
                    done, ns = _time_ns(device.run, lowered, kernel_index, chosen, total, point_ns)
                    point_ns = POINT_NS
                    record(done, count, number, ns)
                    yield
        for count in JOINED:
            for total in (total for total in units if total >= count):
                if is_too_long(total, 1):
                    break
                done, ns = _time_ns(_join, lowered, kernel_index, [bound] * count, total)
                record(done, count, 1, ns, joins=True)
                yield
    for twin in sets[1:]:
        for weight in twin.weights.weights:
            device.store.drop_stacks(weight.digest)


@torch.inference_mode()
def _twins(bound: BoundKernel, count: int) -> list[BoundKernel]:
    """`bound`, and others with weights of their own, `count` in all if they are not too large."""
    held = sum(weight.num_bytes for weight in bound.weights.weights)
    made = [bound]
    for i in range(1, min(count, 1 + TWIN_BYTES_LIMIT // max(1, held))):
        weights = tuple(w.twin(f"{w.digest}~{i}") for w in bound.weights.weights)
        made.append(replace(bound, weights=WeightSet(-i, bound.plan, weights)))
    return made


def _time_ns(
    run: _Run, lowered: Lowered, index: int, chosen: Sequence[BoundKernel], units: int,
    point_ns: int = POINT_NS,
) -> tuple[int, int]:  # fmt: skip
    """Units done, and the least time of some launches of about `units` over `chosen`."""
    per_token = lowered.kernels[index].per_token
    limit = max(lowered.program.tokens_limit, 1)
    share = units // len(chosen)
    # Tokens in rows as long as they may be: where the length matters, longer is dearer.
    rows, tokens = (-(-share // limit), min(share, limit)) if per_token else (share, min(limit, 8))

    def launch(whole: int) -> int:
        times: list[int] = []
        inputs = _together(lowered, index, rows, tokens, len(chosen), whole)
        while len(times) <= REPEATS or (len(times) < REPEATS_MAX and sum(times) < point_ns):
            pairs = zip(chosen, inputs, strict=True)
            launched = [DeviceSegment(bound, rows, tokens, dict(own)) for bound, own in pairs]
            start_ns = time.perf_counter_ns()
            run(launched)
            times.append(time.perf_counter_ns() - start_ns)
        return min(times[1:])

    try:
        ns = launch(1)
    except (IndexError, RuntimeError):  # a lookup among one entry, where only 0 is in range
        ns = launch(0)
    return len(chosen) * rows * (tokens if per_token else 1), ns


def _join(segments: Sequence[DeviceSegment]) -> None:
    """Joins their inputs, as a launch would if they were not neighbours."""
    for place, (_, packing) in enumerate(segments[0].kernel.plan.inputs):
        gather(segments[::-1], place, packing)


def _together(
    lowered: Lowered, index: int, rows: int, tokens: int, count: int, whole: int
) -> list[Buffers]:
    """Inputs of `count` equal requests that travel together: slices of one tensor per value.

    Floats are of order one, whole numbers all `whole`, masks all true.
    """
    found: list[Buffers] = [{} for _ in range(count)]
    for value in lowered.kernels[index].inputs:
        packing = Packing(lowered.layouts[value], lowered.program.types[value])
        if packing.is_packed:
            each = packing.entries(rows, rows * tokens)
            shape = packing.packed_shape(count * rows, count * rows * tokens)
            tensor = _filled(shape, packing.type.dtype, whole)
            for i, own in enumerate(found):
                own[value] = Slice(tensor, i * each, (i + 1) * each)
        else:
            for own in found:
                shape = packing.type.at(rows, tokens)
                own[value] = _filled(shape, packing.type.dtype, whole)
    return found


def _filled(shape: tuple[int, ...], dtype: str, whole: int) -> torch.Tensor:
    if dtype in KINDS["float"]:
        size = math.prod(shape)  # drawing them all would take longer than the launch
        drawn = torch.randn(min(size, DRAWN)).to(ops.DTYPES[dtype])
        return drawn.repeat(-(-size // max(len(drawn), 1)))[:size].view(shape)
    return torch.full(shape, True if dtype == "bool" else whole, dtype=ops.DTYPES[dtype])
