"""The steps of LSTM, GRU and plain RNN as C++: see `recurrence.h`.

Per step, ATen calls a product and an elementwise kernel or two for each layer, which at a few rows
is mostly calling; and a compiler that unrolls the steps serves one number of them.
"""

from __future__ import annotations

from typing import Final

from coissue.kernels.ir import ABSENT, Op
from coissue.kernels.lowered import Kernel, Lowered, Mode
from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.render import prelude, read_header

#: Rows of W_hh and entries of a state per hidden unit.
GATES: Final = {"rnn": 1, "gru": 3, "lstm": 4}
STATES: Final = {"rnn": 1, "gru": 1, "lstm": 2}
#: The states of those that advance together are on the stack.
HIDDEN_MAX: Final = 1024
HEADERS: Final = ("types.h", "math_cpu.h")


def find_recurrences(lowered: Lowered, kernel: Kernel) -> dict[int, str]:
    """Place in `Kernel.ops` -> why the steps are not generated; empty: they are."""
    found = {}
    for place, (op, mode) in enumerate(zip(kernel.ops, kernel.modes, strict=True)):
        if op.name in GATES:
            hindrances = {
                "once, or every request apart": mode is not Mode.SEGMENTS,
                "an input is left out": ABSENT in op.inputs,
                "not of f32": lowered.program.types[op.inputs[0]].dtype != "f32",
                f"over {HIDDEN_MAX} hidden units": hidden_of(op) > HIDDEN_MAX,
            }
            found[place] = next((why for why, applies in hindrances.items() if applies), "")
    return found


def hidden_of(op: Op) -> int:
    hidden = op.attrs["hidden"]
    assert isinstance(hidden, int), "`spec` lets nothing else through"
    return hidden


def render_recurrence(op: Op, name: str) -> str:
    """A translation unit with `name` and `name`_pack: see `recurrence.h`."""
    cell = GATES[op.name] if op.name != "rnn" else int(op.attrs["nonlinearity"] == "tanh")
    return prelude(HEADERS) + "\n".join(
        [
            f"#define CELL {cell}",
            f"#define NAME {name}",
            f"#define NAME_pack {name}_pack",
            f"constexpr int HIDDEN = {hidden_of(op)};",
            read_header("recurrence.h"),
        ]
    )


def draw_recurrence(op: Op) -> Graph:
    """What `name` reads and makes per layer and direction; its last node is a step."""
    gates, hidden = GATES[op.name] * hidden_of(op), hidden_of(op)
    from_x = Node(Kind.PARAMETER, "W_ih x + b_ih", (), (gates,), "f32")
    w_hh = Node(Kind.PARAMETER, "W_hh", (), (gates, hidden), "f32", per_unit=False)
    step = Node(Kind.POINTWISE, f"{op.name} step", (0, 1), (hidden,), "f32")
    return Graph((from_x, w_hh, step), (2,))


def panel_elements(gates: int, hidden: int) -> int:
    """At most so many floats are what `name`_pack makes."""
    return gates * (hidden + 64) * (1 + hidden)
