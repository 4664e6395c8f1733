"""The steps of LSTM, GRU and plain RNN as C++: see `recurrence.h`.

Per step, ATen calls a product and an elementwise kernel or two for each layer, which at a few rows
is mostly calling; and a compiler that unrolls the steps serves one number of them.
"""

from __future__ import annotations

from typing import Final

from coissue.kernels.ir import ABSENT, Op
from coissue.kernels.lowered import Lowered, Mode
from coissue.kernels.stitch.render import read_header

#: Rows of W_hh and entries of a state per hidden unit.
GATES: Final = {"rnn": 1, "gru": 3, "lstm": 4}
STATES: Final = {"rnn": 1, "gru": 1, "lstm": 2}
#: The states of those that advance together are on the stack.
HIDDEN_MAX: Final = 1024


def can_render(op: Op, mode: Mode, lowered: Lowered) -> bool:
    if op.name not in GATES or mode is not Mode.SEGMENTS or ABSENT in op.inputs:
        return False
    is_float = lowered.program.types[op.inputs[0]].dtype == "f32"
    return is_float and hidden_of(op) <= HIDDEN_MAX


def hidden_of(op: Op) -> int:
    hidden = op.attrs["hidden"]
    assert isinstance(hidden, int), "`spec` lets nothing else through"
    return hidden


def render_recurrence(op: Op, name: str) -> str:
    """A translation unit with `name` and `name`_pack: see `recurrence.h`."""
    cell = GATES[op.name] if op.name != "rnn" else int(op.attrs["nonlinearity"] == "tanh")
    return "\n".join(
        [
            *map(read_header, ("types.h", "math_cpu.h")),
            f"#define CELL {cell}",
            f"#define NAME {name}",
            f"#define NAME_pack {name}_pack",
            f"constexpr int HIDDEN = {hidden_of(op)};",
            read_header("recurrence.h"),
        ]
    )


def panel_elements(gates: int, hidden: int) -> int:
    """At most so many floats are what `name`_pack makes."""
    return gates * (hidden + 64) * (1 + hidden)
