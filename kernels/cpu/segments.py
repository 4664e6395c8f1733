"""Ops on packed tokens that need to know where each request's rows begin and end.

Exactly those `lowered` lists under SEGMENTS. A function gets the frame and packed tensors. The work
goes by runs (neighbouring segments of one length), so requests of equal length cost one call.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from coissue.kernels.cpu import attention, recurrent
from coissue.kernels.cpu.frame import Frame, Packing
from coissue.kernels.ir import Op

Tensor = torch.Tensor
SegmentFunction = Callable[..., Any]


def resolve(op: Op, out: Packing) -> SegmentFunction:
    """The op as a function of (frame, packed tensors)."""
    if op.name in ("lstm", "gru", "rnn"):
        return _recurrent(op)
    if op.name == "attention":
        ragged = attention.make_ragged(op.attrs)
        return lambda frame, *xs: ragged(frame.runs, *xs)
    if op.name == "select":
        return _select(op)
    if op.name == "embedding_bag":
        return _embedding_bag(op)
    if op.name == "expand":
        return _expand(out)
    return _reduce(op)


def _recurrent(op: Op) -> SegmentFunction:
    ragged = recurrent.make_ragged(op.name, op.attrs)

    def run(frame: Frame, *xs: Tensor) -> Any:
        y, *states = ragged(frame.runs, *xs)
        bounds = list(pairwise(frame.row_bounds))
        return y, *([state[:, a:b] for a, b in bounds] for state in states)

    return run


def _reduce(op: Op) -> SegmentFunction:
    fn, keepdim = getattr(torch, op.name), op.attrs["keepdim"]

    def run(frame: Frame, x: Tensor) -> Tensor:
        parts = [
            fn(x[start : start + rows * length].view(rows, length, *x.shape[1:]), 1, keepdim)
            for rows, length, _, start in frame.runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return run


def _select(op: Op) -> SegmentFunction:
    last = op.attrs["index"] == -1
    return lambda frame, x: x.index_select(0, torch.tensor(_ends(frame, last)))


def _ends(frame: Frame, last: bool) -> list[int]:
    """The first or the last token of every row."""
    return [
        start + row * length + (length - 1 if last else 0)
        for rows, length, _, start in frame.runs
        for row in range(rows)
    ]


def _embedding_bag(op: Op) -> SegmentFunction:
    mode = str(op.attrs["mode"])

    def run(frame: Frame, table: Tensor, index: Tensor) -> Tensor:
        offsets = torch.tensor(_ends(frame, last=False), dtype=index.dtype)
        return torch.nn.functional.embedding_bag(index, table, offsets, mode=mode)

    return run


def _expand(out: Packing) -> SegmentFunction:
    rest = [dim.scale for dim in out.type.shape[2:]]

    def run(frame: Frame, x: Tensor) -> Tensor:
        parts = [
            x[row : row + rows].expand(rows, length, *rest).flatten(0, 1)
            for rows, length, row, _ in frame.runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return run
