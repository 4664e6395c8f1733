"""LSTM, GRU and RNN of a plan with their steps in generated code: see `stitch/recurrence.h`.

What a layer takes from x is one product over all tokens of the launch, by torch; then its steps are
one call per direction, in which rows of all lengths advance together, without the GIL. W_hh is
packed once per weight set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from coissue.kernels.cpu.attention import Run
from coissue.kernels.cpu.calls import address_of, pack_places
from coissue.kernels.cpu.calls import call as call_native
from coissue.kernels.cpu.frame import Frame
from coissue.kernels.cpu.native import Call
from coissue.kernels.cpu.stitched import CACHE
from coissue.kernels.ir import Op
from coissue.kernels.stitch.recurrence import GATES, STATES, hidden_of, panel_elements

Tensor = torch.Tensor
#: What a layer reads in one direction: W_ih transposed, b_ih, the panels of W_hh and b_hh.
Cell = tuple[Tensor, Tensor, Tensor]


class NativeRecurrence:
    """The op for launches of any segments."""

    __slots__ = ("_address", "_bias", "_directions", "_functions", "_gates", "_hidden", "_how",
                 "_outs", "_places", "_weights", "_x")  # fmt: skip

    def __init__(
        self, op: Op, call: Call, slots: Mapping[int, int], load: Callable[[Call], Any]
    ) -> None:
        """`slots`: by place of value (`native.number_values`)."""
        self._gates, self._hidden = GATES[op.name], hidden_of(op)
        self._bias, self._directions = bool(op.attrs["bias"]), 1 + bool(op.attrs["bidirectional"])
        self._x, *self._weights = (slots[place] for place in call.inputs)
        self._outs = [slots[place] for place in call.outputs]
        pack = Call(call.library, f"{call.symbol}_pack", (), ())
        self._functions = load(call), load(pack)  # keep their library loaded
        self._address = address_of(self._functions[0])
        self._places = pack_places(range(5 + STATES[op.name]))
        width = self._directions * self._hidden
        self._how = [torch.tensor([width, direction]) for direction in range(self._directions)]

    def units(self, frame: Frame) -> int:
        return frame.rows

    def suits(self, frame: Frame) -> bool:
        return True

    def __call__(self, frame: Frame) -> None:
        env = frame.env
        x: Tensor = env[self._x]
        length = x.shape[1] if x.dim() == 3 else 0  # of every row, in a model that fixes it
        flat = x.flatten(0, 1) if length else x
        cells = len(self._weights) // (4 if self._bias else 2)
        y = x.new_empty((len(flat), self._directions * self._hidden))
        states = [x.new_empty((cells, frame.rows, self._hidden)) for _ in self._outs[1:]]
        for group in frame.split or [frame]:
            self._advance(group, flat, y, states, length)
        env[self._outs[0]] = y.view(*x.shape[:-1], y.shape[1])
        for slot, state in zip(self._outs[1:], states, strict=True):
            env[slot] = [state[:, first:last] for first, last in pairwise(frame.row_bounds)]

    def _advance(
        self, group: Frame, x: Tensor, y: Tensor, states: Sequence[Tensor], length: int
    ) -> None:
        """All layers, for the rows of one weight set."""
        _, row, token = group.first
        start, count = (row * length, group.rows * length) if length else (token, group.tokens)
        sequences = _longest_first([(group.rows, length, 0, 0)] if length else group.runs)
        made = x[start : start + count]
        cells = self._cells(group.env)
        for index, (w_ih, b_ih, panels) in enumerate(cells):
            direction = index % self._directions
            if direction == 0:
                is_last = index + self._directions == len(cells)
                read, made = made, y[start : start + count]
                if not is_last:
                    made = x.new_empty((count, y.shape[1]))
            from_x = torch.addmm(b_ih, read, w_ih)
            into = [made[:, direction * self._hidden :], *(s[index, row:] for s in states)]
            tensors = from_x, panels, sequences, self._how[direction], *into
            addresses = [tensor.data_ptr() for tensor in tensors]
            call_native(self._address, self._places, 4, addresses, 0, len(sequences))

    def _cells(self, env: list[Any]) -> list[Cell]:
        """Found once per weight set."""
        found: list[Cell] | None = env[CACHE].get(self)
        if found is None:
            weights = [env[slot] for slot in self._weights]
            per_cell = 4 if self._bias else 2
            parts = [weights[i : i + per_cell] for i in range(0, len(weights), per_cell)]
            found = env[CACHE][self] = [self._pack(*part) for part in parts]
        return found

    def _pack(self, w_ih: Tensor, w_hh: Tensor, *bias: Tensor) -> Cell:
        none = w_ih.new_zeros(self._gates * self._hidden)
        b_ih, b_hh = bias or (none, none)
        read = w_hh.contiguous(), b_hh.contiguous()
        panels = w_hh.new_empty(panel_elements(self._gates, self._hidden))
        addresses = [tensor.data_ptr() for tensor in (*read, panels)]
        call_native(address_of(self._functions[1]), pack_places(range(3)), 2, addresses, 0, 1)
        return w_ih.t(), b_ih, panels


def _longest_first(runs: Sequence[Run]) -> Tensor:
    """(n, 3): first token, length and row of each sequence, as `recurrence.h` wants them."""
    found = [
        (start + i * length, length, row + i)
        for rows, length, row, start in sorted(runs, key=lambda run: -run[1])
        for i in range(rows)
    ]
    return torch.tensor(found, dtype=torch.int64).view(-1, 3)
