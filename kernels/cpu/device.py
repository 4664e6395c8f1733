"""The CPU as a device: weights, plans, and launches over segments, with torch.

A request's live values are its `Buffers`: value id -> `Slice` of a packed tensor, or a tensor of
its own. `run` reads the kernel's inputs from there and writes its outputs there. Inputs that lie
one after the other in one packed tensor, as those of requests that travel together do, are used in
place; others are joined by one copy.

Limitations: values that follow from weights alone (`Mode.ONCE`, kept per weight set) do not count
as held bytes; a packed weight counts with the size of the plain one.

A launch may run part of a request's rows, for kernels that are splittable. Parts come in order from
row 0; their outputs gather in a tensor of the request's own, and only the part with the last row
drops what the kernel drops. A part that failed may be run again.

Rules: one thread calls; no result depends on which segments share a launch beyond float rounding,
and of an exact kernel not even by that (see `exact`): there every weight set has a frame of its
own. A launch that fails has changed nobody's values. A packed tensor is freed when the last
request with a slice of it is done with that value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from coissue.kernels.cpu import ops
from coissue.kernels.cpu.allocator import keep_freed_memory
from coissue.kernels.cpu.compile import Plan
from coissue.kernels.cpu.exact import BlockSizes
from coissue.kernels.cpu.frame import Frame, Packing
from coissue.kernels.cpu.gemm import GemmTable, device_name
from coissue.kernels.cpu.native import Forge
from coissue.kernels.cpu.store import StoredWeight, WeightStore
from coissue.kernels.ir import Type
from coissue.kernels.lowered import Kernel, Layout, Lowered
from coissue.kernels.plan import PlanCache

Tensor = torch.Tensor


class Slice:
    """A request's entries [start, stop) of a packed tensor."""

    __slots__ = ("start", "stop", "tensor")

    def __init__(self, tensor: Tensor, start: int, stop: int) -> None:
        self.tensor, self.start, self.stop = tensor, start, stop

    @property
    def own(self) -> Tensor:
        whole = self.stop - self.start == self.tensor.shape[0]
        return self.tensor if whole else self.tensor[self.start : self.stop]


#: Value id of the tenant's program -> the request's value; absent once nothing needs it.
Buffers = dict[int, Slice | Tensor]


class WeightSet:
    """The weights of one kernel in `Kernel.weights` order; one object per content and signature."""

    __slots__ = ("__weakref__", "environment", "number", "weights")

    def __init__(self, number: int, plan: Plan, weights: tuple[StoredWeight, ...]) -> None:
        #: In order of creation: the order of groups in a launch.
        self.number = number
        self.weights = weights
        #: The plan's slots as a launch with these weights finds them.
        self.environment = plan.environment(weights)


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """A kernel of one tenant's program, ready to launch. Ids are those of that program's values."""

    plan: Plan
    weights: WeightSet
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    #: Values nothing reads once this kernel is done.
    drops: tuple[int, ...]
    #: Whether a segment may be a part of its request's rows.
    splittable: bool


@dataclass(frozen=True, slots=True)
class DeviceSegment:
    """One request in a launch: `rows` rows of `tokens` tokens each (0: no token axis)."""

    kernel: BoundKernel
    rows: int
    tokens: int
    buffers: Buffers
    #: Only rows [start, stop) of them. Not empty; the parts of a request come in order.
    part: tuple[int, int] | None = None


class CpuDevice:
    """See the module."""

    def __init__(
        self, *, threads: int, memory_bytes: int, cache_dir: Path, forge: Forge | None = None
    ) -> None:
        """`forge`: builds native forms of memory-bound ops; whoever made it closes it."""
        torch.set_num_threads(threads)
        keep_freed_memory()
        self.name = device_name(threads)
        self.cache_dir = cache_dir
        self.store = WeightStore(memory_bytes)
        self.gemms = GemmTable(cache_dir / "gemm.json", self.name)
        self.blocks = BlockSizes()
        self._forge = forge
        self.plans: PlanCache[Plan] = PlanCache()
        #: (signature, digests) -> the set, as long as a bound kernel or segment holds it.
        self._sets: WeakValueDictionary[tuple[str, ...], WeightSet] = WeakValueDictionary()
        self._set_count = 0

    @property
    def bytes_held(self) -> int:
        return self.store.bytes_held

    @property
    def bytes_saved(self) -> int:
        """Bytes that sharing weights between tenants saves."""
        return self.store.bytes_saved

    def load_weights(
        self, items: Mapping[str, np.ndarray | Tensor], held: Iterable[str] = ()
    ) -> None:
        """Holds each digest once more; `held` without its content, which is here already.

        Raises `DeviceMemoryError` before anything changed.
        """
        self.store.load(items, held)

    def holds(self, digest: str, type_: Type) -> bool:
        """Whether the content of `digest` is here, and of this type."""
        weight = self.store.get(digest)
        return weight is not None and (
            weight.shape == type_.at(1, 1) and weight.dtype is ops.DTYPES[type_.dtype]
        )

    def drop_weights(self, digests: Iterable[str]) -> None:
        """Gives each digest back once. Bound kernels must be let go too, for the memory to free."""
        self.store.drop(digests)

    @torch.inference_mode()
    def plan(self, lowered: Lowered, kernel_index: int) -> Plan:
        """The kernel's plan; the first of a signature measures the GEMM shapes it needs, or tries
        which blocks are exact."""
        kernel = lowered.kernels[kernel_index]
        return self.plans.get(kernel.signature, lambda: self._make_plan(lowered, kernel))

    def _make_plan(self, lowered: Lowered, kernel: Kernel) -> Plan:
        plan = Plan(lowered, kernel, self.store, self.gemms, self.blocks)
        if self._forge is not None and not kernel.exact:
            self._forge.serve(lowered, kernel, partial(plan.adopt, load=self._forge.load))
        return plan

    @torch.inference_mode()
    def bind(self, lowered: Lowered, kernel_index: int) -> BoundKernel:
        """The kernel with its weights, for segments. `KeyError` if one of them is not loaded."""
        kernel, plan = lowered.kernels[kernel_index], self.plan(lowered, kernel_index)
        digest_of = {weight.value: weight.digest for weight in lowered.program.weights}
        digests = tuple(digest_of[value] for value in kernel.weights)
        key = (kernel.signature, *digests)
        weights = self._sets.get(key)
        if weights is None:
            self._set_count += 1
            stored = tuple(self.store[digest] for digest in digests)
            for weight, value in zip(stored, kernel.weights, strict=True):
                weight.convert(ops.DTYPES[lowered.program.types[value].dtype])
            weights = self._sets[key] = WeightSet(self._set_count, plan, stored)
        drops = lowered.drops[kernel_index]
        return BoundKernel(plan, weights, kernel.inputs, kernel.outputs, drops, kernel.splittable)

    @torch.inference_mode()
    def run(self, segments: Sequence[DeviceSegment]) -> None:
        """One launch of segments whose kernels have one signature; buffers change only on success.

        Raises what torch raises: `IndexError` for an id beyond its table, else `RuntimeError`; and
        `ValueError` for a part that cannot be.
        """
        plan = segments[0].kernel.plan
        for segment in segments:
            if segment.part is not None:
                _check_part(segment, *segment.part)
        order = _ordered(plan, [s for s in segments if s.rows])
        bounds = _groups(order) if plan.exact else [(0, len(order))] if order else []
        frames = [(_make_frame(order[a:b]), order[a:b]) for a, b in bounds]
        for frame, own in frames:
            for place, (slot, packing) in enumerate(plan.inputs):
                frame.env[slot] = gather(own, place, packing)
            for step, kills in plan.steps:
                step(frame)
                for slot in kills:
                    frame.env[slot] = None
        for frame, own in frames:
            for place, (slot, packing) in enumerate(plan.outputs):
                _scatter(frame, own, place, frame.env[slot], packing)
        for segment in segments:
            if not segment.rows:
                _write_empty(segment, plan)
            if segment.part is None or segment.part[1] == segment.rows:
                for value in segment.kernel.drops:
                    segment.buffers.pop(value, None)


def _check_part(segment: DeviceSegment, start: int, stop: int) -> None:
    fits = 0 <= start < stop <= segment.rows or (start, stop) == (0, segment.rows)
    if not fits or not (segment.kernel.splittable or stop - start == segment.rows):
        raise ValueError(f"rows {start} to {stop} of {segment.rows} are no part of this kernel")


def _ordered(plan: Plan, segments: list[DeviceSegment]) -> list[DeviceSegment]:
    """Groups and runs together; within them as they lie in the first packed input already."""
    if len(segments) < 2:
        return segments
    place = next((i for i, (_, packing) in enumerate(plan.inputs) if packing.is_packed), None)

    def key(segment: DeviceSegment) -> tuple[int, int, int, int]:
        kernel = segment.kernel
        if place is None:
            return kernel.weights.number, segment.tokens, 0, 0
        own: Any = segment.buffers[kernel.inputs[place]]
        if segment.part is not None:
            own = _own(segment, place, plan.inputs[place][1])
        return kernel.weights.number, segment.tokens, id(own.tensor), own.start

    return sorted(segments, key=key)


def _own(segment: DeviceSegment, place: int, packing: Packing) -> Slice:
    """The rows of a packed input that belong to the segment's part."""
    own: Any = segment.buffers[segment.kernel.inputs[place]]
    part = segment.part or (0, segment.rows)
    start, stop = (own.start + packing.entries(row, row * segment.tokens) for row in part)
    return Slice(own.tensor, start, stop)


def _groups(order: Sequence[DeviceSegment]) -> list[tuple[int, int]]:
    """Where the segments of each weight set start and stop."""
    sets = [segment.kernel.weights for segment in order]
    starts = [i for i, own in enumerate(sets) if i == 0 or own is not sets[i - 1]]
    return list(zip(starts, [*starts[1:], len(order)], strict=True))


def _make_frame(order: Sequence[DeviceSegment]) -> Frame:
    """The launch's frame, with one frame per group if weights differ."""
    rows = [s.rows if s.part is None else s.part[1] - s.part[0] for s in order]
    lengths = [s.tokens for s in order]
    frame = Frame(order[0].kernel.weights.environment.copy(), rows, lengths)
    groups = _groups(order)
    if len(groups) > 1:
        for start, stop in groups:
            env = order[start].kernel.weights.environment.copy()
            group = Frame(env, rows[start:stop], lengths[start:stop])
            group.first = (start, frame.row_bounds[start], frame.token_bounds[start])
            frame.split.append(group)
    return frame


def gather(order: Sequence[DeviceSegment], place: int, packing: Packing) -> Any:
    """The launch's value of an input: in place if its parts are neighbours, else joined."""
    if not packing.is_packed:
        return [s.buffers[s.kernel.inputs[place]] for s in order]
    slices: list[Any] = [
        s.buffers[s.kernel.inputs[place]] if s.part is None else _own(s, place, packing)
        for s in order
    ]
    tensor, start = slices[0].tensor, slices[0].start
    stop = start
    for own in slices:
        if own.tensor is not tensor or own.start != stop:
            return torch.cat([own.own for own in slices])
        stop = own.stop
    return tensor if stop - start == tensor.shape[0] else tensor[start:stop]


def _scatter(
    frame: Frame, order: Sequence[DeviceSegment], place: int, value: Any, packing: Packing
) -> None:
    """Writes an output into each request's buffers."""
    if packing.is_packed:
        start, offsets = 0, frame.offsets(packing)
        for segment, stop in zip(order, offsets[1:], strict=True):
            if segment.part is None:
                segment.buffers[segment.kernel.outputs[place]] = Slice(value, start, stop)
            else:
                _collect(segment, segment.part, place, value[start:stop], packing)
            start = stop
    elif packing.layout is Layout.EACH:
        for segment, own in zip(order, value, strict=True):
            segment.buffers[segment.kernel.outputs[place]] = own
    else:
        slot, _ = order[0].kernel.plan.outputs[place]
        for segment in order:
            environment = segment.kernel.weights.environment
            segment.buffers[segment.kernel.outputs[place]] = environment[slot]


def _collect(
    segment: DeviceSegment, part: tuple[int, int], place: int, rows: Tensor, packing: Packing
) -> None:
    """Writes a part of an output where the request's parts gather."""
    name, tokens = segment.kernel.outputs[place], segment.tokens
    start, stop = (packing.entries(row, row * tokens) for row in part)
    if part[0] == 0:
        total = packing.entries(segment.rows, segment.rows * tokens)
        segment.buffers[name] = Slice(rows.new_empty((total, *rows.shape[1:])), 0, total)
    gathering: Any = segment.buffers[name]
    gathering.tensor[start:stop] = rows


def _write_empty(segment: DeviceSegment, plan: Plan) -> None:
    """The outputs of a segment without rows."""
    for value, (_, packing) in zip(segment.kernel.outputs, plan.outputs, strict=True):
        shape, dtype = packing.type.at(0, segment.tokens), ops.DTYPES[packing.type.dtype]
        if packing.is_packed:
            shape = packing.packed_shape(0, 0)
        empty = torch.zeros(shape, dtype=dtype)
        segment.buffers[value] = Slice(empty, 0, 0) if packing.is_packed else empty
