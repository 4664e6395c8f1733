"""LSTM, GRU and plain RNN over x (R, T, I), batch first, from zero states.

Weights follow x per layer and direction in torch's order: w_ih, w_hh, then b_ih, b_hh if `bias`.
Outputs: y (R, T, H * directions), last h (layers * directions, R, H) and, for LSTM, the last c.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from coissue.kernels.ir import Dim, Type
from coissue.kernels.optable import base
from coissue.kernels.optable.base import FLAG, POSITIVE, Array, Attr, Call, OpDef
from coissue.kernels.optable.pointwise import sigmoid

#: A step: gates from x, gates from h, state -> new state; the state is (h,) or (h, c).
Step = Callable[[Array, Array, tuple[Array, ...]], tuple[Array, ...]]


def _lstm_step(from_x: Array, from_h: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    i, f, g, o = np.split(from_x + from_h, 4, axis=-1)
    c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def _gru_step(from_x: Array, from_h: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    xr, xz, xn = np.split(from_x, 3, axis=-1)
    hr, hz, hn = np.split(from_h, 3, axis=-1)
    z = sigmoid(xz + hz)
    return ((1.0 - z) * np.tanh(xn + sigmoid(xr + hr) * hn) + z * state[0],)


def _rnn_step(fn: Callable[[Array], Array]) -> Step:
    return lambda from_x, from_h, state: (fn(from_x + from_h),)


RNN_STEPS: Final = {"tanh": _rnn_step(np.tanh), "relu": _rnn_step(lambda x: np.maximum(x, 0))}


def _infer(gates: int, states: int) -> Callable[[Call], tuple[Type, ...]]:
    def infer(call: Call) -> tuple[Type, ...]:
        dtype, attrs = call.dtype("float"), call.attrs
        rows, tokens, size = call.shape(0, [3])
        directions, hidden = 1 + attrs["bidirectional"], attrs["hidden"]
        per_cell = 4 if attrs["bias"] else 2
        cells = attrs["layers"] * directions
        base.require(
            len(call.inputs) == 1 + cells * per_cell,
            f"{len(call.inputs) - 1} weights given; needs {cells * per_cell} for {cells} cells",
        )
        wide = Dim(gates * hidden)
        for index in range(1, len(call.inputs)):
            cell, part = divmod(index - 1, per_cell)
            into = size if cell < directions else Dim(directions * hidden)
            wanted = ((wide, into), (wide, Dim(hidden)), (wide,), (wide,))[part]
            call.expect(index, wanted)
        last = Type((Dim(cells), rows, Dim(hidden)), dtype)
        return (Type((rows, tokens, Dim(directions * hidden)), dtype), *(last,) * states)

    return infer


def _walk(x: Array, weights: list[Array], step: Step, states: int, reverse: bool) -> list[Array]:
    """One cell over all tokens: y (R, T, H), then the last states (R, H)."""
    w_ih, w_hh, *bias = weights
    b_ih, b_hh = bias or (0.0, 0.0)
    state: tuple[Array, ...] = (np.zeros((len(x), w_hh.shape[1]), x.dtype),) * states
    from_x, seen = x @ w_ih.T + b_ih, []
    order = range(x.shape[1])
    for t in reversed(order) if reverse else order:
        state = step(from_x[:, t], state[0] @ w_hh.T + b_hh, state)
        seen.append(state[0])
    return [np.stack(seen[::-1] if reverse else seen, axis=1), *state]


def _run(
    x: Array, *weights: Array, step: Step, states: int,
    layers: int, bidirectional: bool, bias: bool, hidden: int,
) -> tuple[Array, ...]:  # fmt: skip
    left, per_cell = list(weights), 4 if bias else 2
    last: list[list[Array]] = [[] for _ in range(states)]
    for _ in range(layers):
        ys = []
        for reverse in (False, True)[: 1 + bidirectional]:
            y, *state = _walk(x, left[:per_cell], step, states, reverse)
            left = left[per_cell:]
            ys.append(y)
            for kept, found in zip(last, state, strict=True):
                kept.append(found)
        x = np.concatenate(ys, axis=-1)
    return x, *map(np.stack, last)


def _rnn(*xs: Array, nonlinearity: str, **attrs: Any) -> tuple[Array, ...]:
    return _run(*xs, step=RNN_STEPS[nonlinearity], states=1, **attrs)


_ATTRS: Final = {
    "hidden": POSITIVE, "layers": Attr("int", 1, 1024), "bidirectional": FLAG, "bias": FLAG,
}  # fmt: skip
_RNN: Final = {**_ATTRS, "nonlinearity": base.one_of(*RNN_STEPS)}
_LSTM_RUN: Final = partial(_run, step=_lstm_step, states=2)
_GRU_RUN: Final = partial(_run, step=_gru_step, states=1)

OPS: Final[dict[str, OpDef]] = {
    "lstm": OpDef(_infer(4, 2), _LSTM_RUN, attrs=_ATTRS, variadic=True, outputs=3),
    "gru": OpDef(_infer(3, 1), _GRU_RUN, attrs=_ATTRS, variadic=True, outputs=2),
    "rnn": OpDef(_infer(1, 1), _rnn, attrs=_RNN, variadic=True, outputs=2),
}
