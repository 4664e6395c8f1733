"""LSTM, GRU and plain RNN on the CPU, through torch's fused loops.

`make` gives the op on one request's x: (R, T, I). `make_ragged` gives it on packed tokens: rows of
all segments advance together, longest first, as torch's packed sequences do; no token is padded.
States start at zero. The last states come out per row of the launch: (cells, rows, hidden).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from coissue.kernels.cpu.attention import Run

Tensor = torch.Tensor


def _torch_function(name: str, attrs: Mapping[str, Any]) -> Any:
    full = f"rnn_{attrs['nonlinearity']}" if name == "rnn" else name
    return getattr(torch._VF, full)


def _zeros(name: str, attrs: Mapping[str, Any], rows: int, like: Tensor) -> Any:
    cells = attrs["layers"] * (1 + attrs["bidirectional"])
    h = like.new_zeros((cells, rows, attrs["hidden"]))
    return (h, torch.zeros_like(h)) if name == "lstm" else h


def make(name: str, attrs: Mapping[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
    """The op on x: (R, T, I) -> y: (R, T, H * directions), states: (cells, R, H)."""
    fn = _torch_function(name, attrs)
    rest = (attrs["bias"], attrs["layers"], 0.0, False, attrs["bidirectional"], True)

    def run(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = fn(
            x, _zeros(name, attrs, x.shape[0], x), [w for w in weights if w is not None], *rest
        )
        return made

    return run


def make_ragged(name: str, attrs: Mapping[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
    """The op on x: (tokens, I) -> y: (tokens, H * directions), states: (cells, rows, H).

    A model of a fixed number of tokens has packed rows instead: x: (rows, T, I) -> y likewise.
    """
    fn, whole = _torch_function(name, attrs), make(name, attrs)
    rest = (attrs["bias"], attrs["layers"], 0.0, False, attrs["bidirectional"])

    def run(runs: Sequence[Run], x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        if x.dim() == 3:
            return whole(x, *weights)
        if len(runs) == 1:
            y, *states = whole(x.view(*runs[0][:2], x.shape[1]), *weights)
            return y.flatten(0, 1), *states
        index, batch_sizes, order = _by_step(runs)
        made = fn(
            x[index],
            batch_sizes,
            _zeros(name, attrs, len(order), x),
            [w for w in weights if w is not None],
            *rest,
        )
        y = torch.empty_like(made[0])
        y[index] = made[0]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return y, *(state.index_select(1, back) for state in made[1:])

    return run


def _by_step(runs: Sequence[Run]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens in the order of torch's packed sequences, rows per step, and the order of the rows."""
    firsts: list[int] = []
    lengths: list[int] = []
    order: list[int] = []
    for rows, length, row, start in sorted(runs, key=lambda run: -run[1]):
        firsts += [start + i * length for i in range(rows)]
        lengths += [length] * rows
        order += range(row, row + rows)
    first, length_of = torch.tensor(firsts), torch.tensor(lengths)
    steps = torch.arange(lengths[0])
    batch_sizes = (length_of[None, :] > steps[:, None]).sum(1)
    index = torch.cat([first[:n] + step for step, n in enumerate(batch_sizes.tolist())])
    return index, batch_sizes, torch.tensor(order)
