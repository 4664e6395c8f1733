"""Which ops of a kernel can become one graph: runs that share a unit and never wait for themselves.

NOTE the one idea: an op's *depth* is the number of times the way to it left the ops of its own unit
that can be lowered. All ops of one unit and depth are one run, whether they touch or not (H2): a
way that leaves a run comes back only at a greater depth, so runs never wait for each other in a
circle. An op that only later runs read sinks to the first of them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from coissue.kernels.ir import ABSENT, Op
from coissue.kernels.lowered import Kernel, Layout, Lowered, Mode
from coissue.kernels.passes.fold import find_folds
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
        folded = set(find_folds(lowered, kernel).values())
        for index, (op, mode) in enumerate(zip(kernel.ops, kernel.modes, strict=True)):
            if can_lower(op, mode, lowered) and index not in folded:
                self._units[index] = lowered.layouts[op.outputs[0]]
        self._fixed = {i for i, mode in enumerate(kernel.modes) if mode is Mode.ONCE}
        self._maker = {v: i for i, op in enumerate(kernel.ops) for v in op.outputs}
        self._handed = set(kernel.outputs)
        #: Per op: the ops that make what it reads -> whether both can be in one run.
        self._makers = [self._find_makers(index) for index in range(len(kernel.ops))]
        #: The other way round.
        self._readers: list[dict[int, bool]] = [{} for _ in kernel.ops]
        for index, makers in enumerate(self._makers):
            for maker, joins in makers.items():
                self._readers[maker][index] = joins

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

    def _find_makers(self, index: int) -> dict[int, bool]:
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
        for makers in self._makers:
            exits = (depths[m] + (m in self._units and not joins) for m, joins in makers.items())
            depths.append(max(exits, default=0))
        return depths

    def _sunk(self, depths: list[int]) -> list[int]:
        """Depths with each op as late as the first run that reads it."""
        for index in reversed(self._units):
            found = self._readers[index]
            kept = self._handed.isdisjoint(self._ops[index].outputs)
            if found and kept and all(found.values()):
                depths[index] = min(depths[reader] for reader in found)
        return depths

    def _computing(self, group: Sequence[int]) -> list[int]:
        """Without the parts, joined by what they hand each other, that only move data."""
        root = {index: index for index in group}

        def find(index: int) -> int:
            while root[index] != index:
                index = root[index]
            return index

        for index in group:
            for maker in self._makers[index]:
                if maker in root:
                    root[find(index)] = find(maker)
        busy = {find(index) for index in group if self._ops[index].name not in VIEWS}
        return self._trimmed([index for index in group if find(index) in busy])

    def _trimmed(self, group: Sequence[int]) -> list[int]:
        """Without moves at the rim that are free outside and copies inside: of values from outside,
        if others need them too, and of values that are handed out anyway."""
        kept = dict.fromkeys(group)
        views = [index for index in group if self._ops[index].name in VIEWS]
        first: set[int] = set()
        for index in views:
            if all(maker in first for maker in self._makers[index] if maker in kept):
                first.add(index)
        last: set[int] = set()
        for index in reversed(views):
            if all(reader in last for reader in self._readers[index] if reader in kept):
                last.add(index)
        for index in reversed(views):
            if index in first and self._is_handed_out(index, kept):
                del kept[index]
        for index in views:
            makers = [maker for maker in self._makers[index] if maker in kept]
            if index in last and all(self._is_handed_out(m, {*kept, index}) for m in makers):
                kept.pop(index, None)
        return list(kept)

    def _is_handed_out(self, index: int, group: Container[int]) -> bool:
        """Whether an op's value is needed outside of a group that the op is in."""
        outside = any(reader not in group for reader in self._readers[index])
        return outside or not self._handed.isdisjoint(self._ops[index].outputs)
