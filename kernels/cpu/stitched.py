"""Runs of memory-bound ops as native steps of a plan, where they are faster than the op table.

NOTE the one idea: which form of a run is faster is not predicted but seen. When the native form is
there, the next `TRIALS` launches of each size run both on their own data and time them; from then
on that size runs the faster one. Sizes nobody sends are never tried, and what is tried costs
a launch one run more, a few times in all.

So a plan's launches change in cost while it serves. Times measured at attach are those of whatever
was ready then: with a warm cache the native form, whose trials are over before the fastest of
`measure`'s launches; else the op table's, which the cost table's correction follows from launch to
launch, as it follows any lasting change. Measuring anew would stop the device for points that the
correction has already; and until it has, predictions are high, which delays nobody's deadline.

A launch with several weight sets calls the functions once per group, on its range of units, with
its own weights' addresses: packed values are neither cut nor joined.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from coissue.kernels.cpu import ops
from coissue.kernels.cpu.calls import address_of, pack_places
from coissue.kernels.cpu.calls import call as run
from coissue.kernels.cpu.exact import Part
from coissue.kernels.cpu.frame import Frame, Packing
from coissue.kernels.cpu.native import Call, Run
from coissue.kernels.lowered import Layout
from coissue.kernels.passes.order import in_order

Step = Callable[[Frame], None]
#: A step with the slots that no later one reads.
Steps = list[tuple[Step, tuple[int, ...]]]
#: The slot of a plan's environment that holds what is found once per weight set, by who found it.
CACHE: Final = 1
#: Inductor's way to allocate: a third of the time of `torch.empty`.
_empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cpu", None
) or (lambda shape, strides, dtype: torch.empty(shape, dtype=dtype))
#: Launches of one size that time both forms; fewer than `measure.REPEATS`.
TRIALS: Final = 3


class Native(Protocol):
    """A native form of ops of a plan."""

    def __call__(self, frame: Frame) -> None: ...

    def units(self, frame: Frame) -> int:
        """The size of a launch."""

    def suits(self, frame: Frame) -> bool:
        """Whether a launch may be run by it."""


class NativeRun:
    """A run of ops as calls of generated functions, for launches of any size."""

    __slots__ = ("_calls", "_fixed", "_lookups", "_made", "_per_token", "_reads", "_scratch")

    def __init__(
        self, run: Run, values: Mapping[int, tuple[int, Packing]], load: Callable[[Call], Any]
    ) -> None:
        """`values`: slot and packing by place, of the kernel's values (`native.number_values`)."""
        made = [place for call in run.calls for place in call.outputs if place >= 0]
        used = dict.fromkeys(place for call in run.calls for place in call.inputs if place >= 0)
        outside = [place for place in used if place not in made]
        fixed = [place for place in outside if values[place][1].layout is Layout.FIXED]
        reads = [place for place in outside if place not in fixed]
        #: Slots of what is read from outside: by weight set, and by launch.
        self._fixed = tuple(values[place][0] for place in fixed)
        self._reads = tuple(values[place][0] for place in reads)
        self._made = [_Output(*values[place]) for place in made]
        self._scratch = [(ops.DTYPES[s.dtype], s.elements) for s in run.scratch]
        self._lookups = [(values[place][0], size) for place, size in run.lookups]
        self._per_token = values[made[0]][1].layout is Layout.TOKENS
        scratch = [~index for index in range(len(run.scratch))]
        spots = {place: i for i, place in enumerate((*fixed, *reads, *made, *scratch))}
        self._calls = [_Function(load(call), call, spots) for call in run.calls]

    def units(self, frame: Frame) -> int:
        return frame.tokens if self._per_token else frame.rows

    def __call__(self, frame: Frame) -> None:
        env, units = frame.env, frame.tokens if self._per_token else frame.rows
        for slot, size in self._lookups:
            _check_index(env[slot], size)
        tensors = [_in_order(env[slot]) for slot in self._reads]
        for output in self._made:
            env[output.slot] = tensor = output.make(units)
            tensors.append(tensor)
        for dtype, size in self._scratch:
            tensors.append(_empty((units * size,), (1,), dtype))
        moving = [tensor.data_ptr() for tensor in tensors]
        if not frame.split:
            addresses = self._addresses(env) + moving
            for call in self._calls:
                call(addresses, 0, units)
        for group in frame.split:
            addresses = self._addresses(group.env) + moving
            first = group.first[2 if self._per_token else 1]
            for call in self._calls:
                call(addresses, first, first + self.units(group))

    def suits(self, frame: Frame) -> bool:
        """Whether all that is read lies in the order of its axes, or else in none.

        What convolutions make lies channels last. Bringing it into order could be worth its while
        for this run, and would then be undone by the next convolution, which no trial sees.
        """
        read = [frame.env[slot] for slot in self._reads]
        return all(x.is_contiguous() or not _is_channels_last(x) for x in read)

    def _addresses(self, env: list[Any]) -> list[int]:
        """Of what follows from weights alone; found once per weight set."""
        known = env[CACHE].get(self)
        if known is None:
            tensors = [env[slot].contiguous() for slot in self._fixed]
            known = env[CACHE][self] = tensors, [tensor.data_ptr() for tensor in tensors]
        addresses: list[int] = known[1]
        return addresses


def _in_order(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


class _Output:
    """A packed value of a plan, to be written by a generated function."""

    __slots__ = ("_dtype", "_rest", "_scale", "_strides", "slot")

    def __init__(self, slot: int, packing: Packing) -> None:
        self.slot = slot
        self._dtype = ops.DTYPES[packing.type.dtype]
        (self._scale, *rest) = packing.packed_shape(1, 1)
        self._rest = tuple(rest)
        self._strides = tuple(math.prod(rest[i:]) for i in range(len(rest) + 1))

    def make(self, units: int) -> torch.Tensor:
        return _empty((units * self._scale, *self._rest), self._strides, self._dtype)


class _Function:
    """A generated function and where its arguments are among the addresses of a launch."""

    __slots__ = ("_address", "_function", "_inputs", "_places")

    def __init__(self, function: Any, call: Call, spots: Mapping[int, int]) -> None:
        """`spots`: where the address of a place is."""
        self._function = function  # keeps its library loaded
        self._address = address_of(function)
        self._inputs = len(call.inputs)
        self._places = pack_places([spots[place] for place in (*call.inputs, *call.outputs)])

    def __call__(self, addresses: list[int], first: int, last: int) -> None:
        run(self._address, self._places, self._inputs, addresses, first, last)


def _check_index(index: torch.Tensor, size: int) -> None:
    """Generated code would read some other row."""
    if not index.numel():
        return
    least, most = torch.aminmax(index)
    if least.item() < 0 or most.item() >= size:
        raise IndexError(f"an index is outside of a table of {size}")


class Choice:
    """A step of a plan: a run in both forms, of which each size of launch takes the faster one."""

    __slots__ = ("_chosen", "_kills", "_native", "_table", "_times")

    def __init__(self, native: Native, table: Steps) -> None:
        self._native, self._table = native, table
        self._kills = tuple(dict.fromkeys(slot for _, kills in table for slot in kills))
        #: Size -> whether it runs the native form; sizes that are not there are on trial.
        self._chosen: dict[tuple[int, int], bool] = {}
        #: Size -> the least ns of the native form and of the table, and of how many trials.
        self._times: dict[tuple[int, int], tuple[int, int, int]] = {}

    def __call__(self, frame: Frame) -> None:
        size = self._native.units(frame).bit_length(), len(frame.split).bit_length()
        is_native = self._chosen.get(size)
        if is_native is None:
            self._try(frame, size)
        elif is_native:
            self._native(frame)
            for slot in self._kills:
                frame.env[slot] = None
        else:
            self._run_table(frame)

    def _run_table(self, frame: Frame) -> None:
        for step, kills in self._table:
            step(frame)
            for slot in kills:
                frame.env[slot] = None

    def _try(self, frame: Frame, size: tuple[int, int]) -> None:
        """Both forms; the native one first, for the table may write into what it reads."""
        if not self._native.suits(frame):
            self._chosen[size] = False
            self._run_table(frame)
            return
        start_ns = time.perf_counter_ns()
        self._native(frame)
        middle_ns = time.perf_counter_ns()
        self._run_table(frame)
        end_ns = time.perf_counter_ns()
        native_ns, table_ns, count = self._times.get(size, (1 << 62, 1 << 62, 0))
        native_ns = min(native_ns, middle_ns - start_ns)
        table_ns = min(table_ns, end_ns - middle_ns)
        self._times[size] = native_ns, table_ns, count + 1
        if count + 1 == TRIALS:
            self._chosen[size] = native_ns < table_ns


def arrange(parts: Mapping[int, Part], runs: Sequence[tuple[Sequence[int], Native]]) -> Steps:
    """The plan's steps with each run, given by its ops' places, as one `Choice`.

    `parts`: by place in `Kernel.ops`. A run's parts may have others between them, so runs and the
    parts that stand alone are sorted anew, as near to the order of before as can be.
    """
    home = {place: index for index, (places, _) in enumerate(runs) for place in places}
    groups: dict[int, list[int]] = {}
    for place in parts:
        groups.setdefault(~home[place] if place in home else place, []).append(place)
    order = _sorted(parts, list(groups.values()))
    steps: Steps = []
    kills = _kills(parts, [place for places in order for place in places])
    for places in order:
        table = [(parts[place].step, kills[place]) for place in places]
        if places[0] in home:
            steps.append((Choice(runs[home[places[0]]][1], table), ()))
        else:
            steps += table
    return steps


def _sorted(parts: Mapping[int, Part], groups: Sequence[list[int]]) -> list[list[int]]:
    """Groups of parts after those that make what they read."""
    home = {place: g for g, places in enumerate(groups) for place in places}
    maker = {slot: home[p] for p, part in parts.items() for slot, _ in part.writes}
    needs: dict[int, set[int]] = {g: set() for g in range(len(groups))}
    for place, part in parts.items():
        needs[home[place]] |= {maker[slot] for slot, _ in part.reads if slot in maker}
    return [groups[g] for g in in_order({g: found - {g} for g, found in needs.items()})]


def _kills(parts: Mapping[int, Part], order: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Per part: the slots to empty after it, now that the parts run in this order."""
    ending = {slot for part in parts.values() for slot in part.kills}
    kills: dict[int, tuple[int, ...]] = {}
    for place in reversed(order):
        touched = {slot for slot, _ in (*parts[place].reads, *parts[place].writes)} & ending
        kills[place] = tuple(touched)
        ending -= touched
    return kills
