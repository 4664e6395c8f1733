"""Which ops of a kernel can become one graph: runs that share a unit and never wait for themselves.

NOTE the one idea: an op's *depth* is the number of times the way to it left the ops of its own unit
that can be lowered. All ops of one unit and depth are one run, whether they touch or not (H2): a
way that leaves a run comes back only at a greater depth, so runs never wait for each other in a
circle. An op that only later runs read sinks to the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coissue.kernels.ir import ABSENT, Op
from coissue.kernels.lowered import Kernel, Layout, Lowered, Mode
from coissue.kernels.stitch.lower import VIEWS, can_lower


@dataclass(frozen=True, slots=True)
class Run:
    """Ops in an order that can be run, all for rows or all for tokens."""

    ops: tuple[Op, ...]
    #: ROWS or TOKENS: what one unit of the graph is.
    unit: Layout


def find_runs(lowered: Lowered, kernel: Kernel) -> list[Run]:
    """The runs of a kernel, by depth. Ops in none of them stay with the op table."""
    return _Finder(lowered, kernel).runs()


class _Finder:
    def __init__(self, lowered: Lowered, kernel: Kernel) -> None:
        self._lowered, self._ops = lowered, kernel.ops
        #: Per op that can be lowered, its unit.
        self._units: dict[int, Layout] = {}
        for index, (op, mode) in enumerate(zip(kernel.ops, kernel.modes, strict=True)):
            if can_lower(op, mode, lowered):
                self._units[index] = lowered.layouts[op.outputs[0]]
        self._fixed = {i for i, mode in enumerate(kernel.modes) if mode is Mode.ONCE}
        self._maker = {v: i for i, op in enumerate(kernel.ops) for v in op.outputs}
        self._handed = set(kernel.outputs)

    def runs(self) -> list[Run]:
        depths = self._sunk(self._depths())
        groups: dict[tuple[int, Layout], list[int]] = {}
        for index, unit in self._units.items():
            groups.setdefault((depths[index], unit), []).append(index)
        found = []
        for (_, unit), group in sorted(groups.items(), key=lambda item: item[0][0]):
            kept = self._computing(group)
            if kept:
                found.append(Run(tuple(self._ops[index] for index in kept), unit))
        return found

    def _makers(self, index: int) -> dict[int, bool]:
        """The ops that make what op `index` reads -> whether both can be in one run."""
        op = self._ops[index]
        found: dict[int, bool] = {}
        for place, value in enumerate(op.inputs):
            maker = self._maker.get(value, -1) if value != ABSENT else -1
            if maker < 0 or maker in self._fixed:
                continue
            unit = self._units.get(index)
            joins = unit is not None and unit is self._units.get(maker)
            # What is looked up must be there before, to be checked.
            joins = joins and not (op.name == "embedding" and place == 1)
            found[maker] = found.get(maker, True) and joins
        return found

    def _depths(self) -> list[int]:
        depths: list[int] = []
        for index in range(len(self._ops)):
            makers = self._makers(index)
            depths.append(
                max((depths[m] + (m in self._units and not makers[m]) for m in makers), default=0)
            )
        return depths

    def _sunk(self, depths: list[int]) -> list[int]:
        """Depths with each op as late as the first run that reads it."""
        readers: dict[int, list[tuple[int, bool]]] = {}
        for index in reversed(range(len(self._ops))):
            found = readers.get(index, [])
            kept = self._handed.isdisjoint(self._ops[index].outputs)
            if index in self._units and found and kept and all(joins for _, joins in found):
                depths[index] = min(depths[reader] for reader, _ in found)
            for maker, joins in self._makers(index).items():
                readers.setdefault(maker, []).append((index, joins))
        return depths

    def _computing(self, group: Sequence[int]) -> list[int]:
        """Without the parts, joined by what they hand each other, that only move data."""
        root = {index: index for index in group}

        def find(index: int) -> int:
            while root[index] != index:
                index = root[index]
            return index

        for index in group:
            for maker in self._makers(index):
                if maker in root:
                    root[find(index)] = find(maker)
        busy = {find(index) for index in group if self._ops[index].name not in VIEWS}
        return [index for index in group if find(index) in busy]


def positions(kernel: Kernel, runs: Sequence[Run]) -> Mapping[int, int]:
    """Place of an op in `kernel.ops` -> the run it is in."""
    home = {op.outputs: number for number, run in enumerate(runs) for op in run.ops}
    return {i: home[op.outputs] for i, op in enumerate(kernel.ops) if op.outputs in home}
