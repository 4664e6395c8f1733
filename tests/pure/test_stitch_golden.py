"""The paper's running example: attention's softmax times V, with the numbers of its figure."""

from __future__ import annotations

import pytest

from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.plan import Home, Schedule
from coissue.kernels.stitch.price import gpu
from coissue.kernels.stitch.spans import span_of
from coissue.kernels.stitch.tune import Settings, Tuner

NAMES = ("arg1", "arg2", "reduce1", "broadcast1", "subtract", "exponential", "reduce2",
         "broadcast2", "divide", "bitcast", "dot")  # fmt: skip
AT = {name: index for index, name in enumerate(NAMES)}
ROWS = (8704, 17)


def node(kind, name, operands, shape, axes=()):
    return Node(kind, name, tuple(AT[o] for o in operands), shape, "f32", axes)


GRAPH = Graph(
    (
        node(Kind.PARAMETER, "", (), ROWS),
        node(Kind.PARAMETER, "", (), (64, 8, 17, 128)),
        node(Kind.REDUCE, "amax", ("arg1",), (8704,), (1,)),
        node(Kind.BROADCAST, "", ("reduce1",), ROWS, (0,)),
        node(Kind.POINTWISE, "sub", ("arg1", "broadcast1"), ROWS),
        node(Kind.POINTWISE, "exp", ("subtract",), ROWS),
        node(Kind.REDUCE, "sum", ("exponential",), (8704,), (1,)),
        node(Kind.BROADCAST, "", ("reduce2",), ROWS, (0,)),
        node(Kind.POINTWISE, "div", ("exponential", "broadcast2"), ROWS),
        node(Kind.RESHAPE, "", ("divide",), (64, 8, 17, 17)),
        node(Kind.DOT, "", ("bitcast", "arg2"), (64, 8, 17, 128)),
    ),
    (AT["dot"],),
)
#: Op -> span, (split_dim, sword), elements per block in shared memory.
TABLE = {
    "dot": (0, (2, 1), None),
    "bitcast": (1, (2, 1), None),
    "divide": (2, (0, 512), 289),
    "broadcast2": (3, (0, 512), None),
    "reduce2": (4, (0, 512), 17),
    "exponential": (5, (0, 512), 289),
    "subtract": (6, (0, 512), None),
    "broadcast1": (7, (0, 512), None),
    "reduce1": (8, (0, 512), 17),
    "arg1": (9, (0, 512), None),
    "arg2": (9, (2, 1), None),
}
TUNER = Tuner(GRAPH, Settings(48 * 1024, 256, gpu(256)))


def test_one_kernel_of_512_blocks():
    tuned = TUNER.tune(TUNER.work)
    assert tuned is not None
    assert tuned.kernel.blocks == 512
    assert tuned.kernel.inputs == (AT["arg1"], AT["arg2"])


@pytest.mark.parametrize("name", TABLE)
def test_the_table_row_by_row(name):
    span, schedule, elements = TABLE[name]
    kernel = TUNER.tune(TUNER.work).kernel
    assert span_of(GRAPH)[AT[name]] == span
    assert kernel.schedules[AT[name]] == Schedule(*schedule)
    assert kernel.schedules[AT[name]].blocks(GRAPH.nodes[AT[name]].shape) == 512
    buffer = kernel.buffers.get(AT[name])
    assert (None if buffer is None else buffer.elements) == elements
    assert (kernel.homes.get(AT[name]) is Home.SHARED) == (elements is not None)


def test_306_floats_with_sharing_and_612_without():
    kernel = TUNER.tune(TUNER.work).kernel
    assert kernel.shared_bytes == 306 * 4
    assert sum(buffer.elements for buffer in kernel.buffers.values()) == 612
    place = {name: kernel.buffers[AT[name]].offset_bytes for name in
             ("reduce1", "reduce2", "exponential", "divide")}  # fmt: skip
    assert place["reduce2"] == place["reduce1"]
    assert place["divide"] == place["exponential"]
