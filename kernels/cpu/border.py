"""The device's border: a request's arrays become buffers, and a finished request's buffers arrays.

Runs once per request, so it works on whole launches: the inputs of requests that start together are
joined by one copy into packed tensors, in which their first kernel finds them in place; outputs are
read through one NumPy view per packed tensor. bf16 has no NumPy type: such arrays hold the bits in
uint16, which the IR does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from coissue.kernels.cpu.device import Buffers, Slice
from coissue.kernels.cpu.frame import Packing
from coissue.kernels.lowered import Layout, Lowered

#: Request sizes whose output shapes are remembered, per program.
SIZES_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class _Port:
    name: str
    value: int
    packing: Packing
    #: Extents of an input after those that the packed axis stands for.
    rest: tuple[int, ...]


@final
class Border:
    """What goes in and out of one lowered program."""

    def __init__(self, lowered: Lowered) -> None:
        program = lowered.program
        self.inputs = tuple(_port(lowered, p.name, p.value) for p in program.inputs)
        self.outputs = tuple(_port(lowered, p.name, p.value) for p in program.outputs)
        #: Equal for programs whose inputs may be joined.
        self.key = tuple((port.packing.layout, port.packing.type) for port in self.inputs)
        self._shapes: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}

    def output_shapes(self, rows: int, tokens: int) -> tuple[tuple[int, ...], ...]:
        found = self._shapes.get((rows, tokens))
        if found is None:
            if len(self._shapes) >= SIZES_LIMIT:
                self._shapes.clear()
            found = tuple(port.packing.type.at(rows, tokens) for port in self.outputs)
            self._shapes[rows, tokens] = found
        return found


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that starts: arrays by input name, `rows` rows of `tokens` tokens each."""

    border: Border
    arrays: Mapping[str, np.ndarray]
    rows: int
    tokens: int


def enter(arrivals: Sequence[Arrival]) -> list[Buffers]:
    """The buffers of each request, copies. Arrays have their types' shapes and dtypes."""
    made: list[Buffers] = [{} for _ in arrivals]
    groups: dict[object, list[int]] = {}
    for index, arrival in enumerate(arrivals):
        groups.setdefault(arrival.border.key, []).append(index)
    for group in groups.values():
        for place in range(len(arrivals[group[0]].border.inputs)):
            _join(arrivals, made, group, place)
    return made


def _join(
    arrivals: Sequence[Arrival], made: Sequence[Buffers], group: Sequence[int], place: int
) -> None:
    """Input number `place` of the arrivals in `group`."""
    ports = [arrivals[index].border.inputs[place] for index in group]
    arrays = [arrivals[i].arrays[port.name] for i, port in zip(group, ports, strict=True)]
    if not ports[0].packing.is_packed:
        for index, port, array in zip(group, ports, arrays, strict=True):
            made[index][port.value] = to_tensor(array.copy())
        return
    parts = [array.reshape(-1, *ports[0].rest) for array in arrays]
    tensor, stop = to_tensor(np.concatenate(parts)), 0
    for index, port, part in zip(group, ports, parts, strict=True):
        start, stop = stop, stop + len(part)
        made[index][port.value] = Slice(tensor, start, stop)


@final
class Reader:
    """Reads outputs; remembers the NumPy view of each tensor until `forget`."""

    def __init__(self) -> None:
        #: id -> (the tensor, which keeps the id valid, its view).
        self._views: dict[int, tuple[torch.Tensor, np.ndarray]] = {}

    def forget(self) -> None:
        self._views.clear()

    def read(self, border: Border, buffers: Buffers, rows: int, tokens: int) -> list[np.ndarray]:
        """The program's outputs in their types' shapes; views, not copies."""
        found = []
        shapes = border.output_shapes(rows, tokens)
        for port, shape in zip(border.outputs, shapes, strict=True):
            value = buffers[port.value]
            if isinstance(value, Slice):
                array = self._view(value.tensor)[value.start : value.stop]
            else:
                array = self._view(value)
            found.append(array.reshape(shape))
        return found

    def _view(self, tensor: torch.Tensor) -> np.ndarray:
        entry = self._views.get(id(tensor))
        if entry is None:
            entry = self._views[id(tensor)] = tensor, to_array(tensor)
        return entry[1]


def _port(lowered: Lowered, name: str, value: int) -> _Port:
    packing = Packing(lowered.layouts[value], lowered.program.types[value])
    rest = tuple(dim.scale for dim in packing.type.shape[packing.lead :])
    return _Port(name, value, packing, rest if packing.layout is not Layout.EACH else ())


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """On the array's memory; uint16 as the bf16 whose bits it holds. `to_array` is the way back."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def to_array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: np.ndarray = tensor.contiguous().numpy()
    return array
