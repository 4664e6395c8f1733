"""What one launch works on: segments in order, their offsets, and the values so far.

Made by `CpuDevice.run`, read and filled by the steps of a plan. Segments of equal weights are
neighbours (a *group*); inside a group they are ordered by tokens per row, so that rows of one
length are neighbours too (a *run*).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from coissue.kernels.cpu.attention import Run
from coissue.kernels.ir import R, T, Type
from coissue.kernels.lowered import Layout


@dataclass(frozen=True, slots=True)
class Packing:
    """How a value lies in memory: see `lowered`."""

    layout: Layout
    #: The value's type as one request sees it.
    type: Type

    @property
    def is_packed(self) -> bool:
        return self.layout in (Layout.ROWS, Layout.TOKENS)

    @property
    def scale(self) -> int:
        """Entries of the packed axis per row or token."""
        return self.type.shape[0].scale

    @property
    def lead(self) -> int:
        """How many logical axes the packed axis stands for: 0, 1 or 2."""
        if not self.is_packed:
            return 0
        return 2 if self.layout is Layout.TOKENS and self.type.shape[:2] == (R, T) else 1

    def entries(self, rows: int, tokens: int) -> int:
        """Length of the packed axis for `rows` rows and `tokens` tokens in all."""
        return self.scale * (tokens if self.layout is Layout.TOKENS else rows)

    def packed_shape(self, rows: int, tokens: int) -> tuple[int, ...]:
        rest = (dim.scale for dim in self.type.shape[self.lead :])
        return (self.entries(rows, tokens), *rest)


class Span(NamedTuple):
    """Consecutive rows of one length, and their place in the launch."""

    #: Of their segment, if they are one.
    segment: int
    row: int
    rows: int
    token: int
    tokens: int
    #: Tokens per row.
    length: int


class Frame:
    """See the module. `env[slot]`: a tensor (packed or FIXED) or one tensor per segment (EACH)."""

    __slots__ = ("_runs", "env", "first", "lengths", "row_bounds", "rows", "split", "token_bounds",
                 "tokens")  # fmt: skip

    def __init__(self, env: list[Any], rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.env = env
        #: Tokens per row of each segment.
        self.lengths = lengths
        #: Offsets of the segments, in rows and in tokens; one more than segments.
        self.row_bounds = (0, *accumulate(rows))
        self.token_bounds = (0, *accumulate(map(int.__mul__, rows, lengths)))
        self.rows = self.row_bounds[-1]
        self.tokens = self.token_bounds[-1]
        #: One frame per group if there are several groups; steps with weights run in each.
        self.split: list[Frame] = []
        #: Of a frame in a split: index of its first segment, row and token in the whole launch.
        self.first = (0, 0, 0)
        self._runs: list[Run] | None = None

    @property
    def runs(self) -> list[Run]:
        """Neighbouring segments of one length, as one: (rows, tokens per row, row, token)."""
        if self._runs is None:
            self._runs = []
            for i, length in enumerate(self.lengths):
                row, token = self.row_bounds[i], self.token_bounds[i]
                rows = self.row_bounds[i + 1] - row
                if self._runs and self._runs[-1][1] == length:
                    before, _, row, token = self._runs.pop()
                    rows += before
                self._runs.append((rows, length, row, token))
        return self._runs

    def spans(self) -> Iterator[Span]:
        """The segments."""
        for i, length in enumerate(self.lengths):
            row, token = self.row_bounds[i], self.token_bounds[i]
            rows = self.row_bounds[i + 1] - row
            yield Span(i, row, rows, token, rows * length, length)

    def offsets(self, packing: Packing) -> Sequence[int]:
        """Where each segment starts in a packed value, and where the last one ends."""
        offsets = self.token_bounds if packing.layout is Layout.TOKENS else self.row_bounds
        scale = packing.scale
        return offsets if scale == 1 else [scale * offset for offset in offsets]

    def part(self, packing: Packing, value: Any, index: int) -> torch.Tensor:
        """A segment's own value in its logical shape."""
        own: torch.Tensor = value[index] if packing.layout is Layout.EACH else value
        if not packing.is_packed:
            return own
        if len(self.lengths) > 1:
            start, stop = self.offsets(packing)[index : index + 2]
            own = own[start:stop]
        split = (-1, self.lengths[index], *own.shape[1:])
        return own.reshape(split) if packing.lead == 2 else own

    def of_group(self, packing: Packing, value: Any) -> Any:
        """In a frame of a split: this group's part of the whole launch's `value`."""
        segment, row, token = self.first
        if packing.layout is Layout.EACH:
            return value[segment : segment + len(self.lengths)]
        start = packing.entries(row, token)
        return value[start : start + packing.entries(self.rows, self.tokens)]


def pack(packing: Packing, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logical tensors of the segments as one packed tensor."""
    flat = [part.flatten(0, 1) for part in parts] if packing.lead == 2 else parts
    return flat[0] if len(flat) == 1 else torch.cat(list(flat))


def join(packing: Packing, parts: Sequence[Any]) -> Any:
    """Values of the groups as one value of the launch."""
    if packing.layout is Layout.EACH:
        return [own for part in parts for own in part]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
