"""Random graphs of the stitching compiler for hypothesis: every kind, odd extents, 1."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from coissue.kernels.stitch.builder import GraphBuilder
from coissue.kernels.stitch.graph import Graph, Kind

EXTENTS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12])
SIZE_LIMIT = 1500
SHAPES = (
    st.lists(EXTENTS, max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= SIZE_LIMIT)
)
UNARY = ("exp", "neg", "tanh", "abs", "sigmoid")
BINARY = ("add", "mul", "maximum", "sub", "div")
MOVES = (
    "softmax",
    "norm",
    "reduce",
    "broadcast",
    "reshape",
    "transpose",
    "slice",
    "concat",
    "dot",
    "gather",
)
SIZE_LIMIT = 1500


class Draw:
    """A graph that grows by one random node at a time."""

    def __init__(self, data):
        self.data, self.builder = data, GraphBuilder()
        self.floats: list[int] = []

    def pick(self, options):
        return self.data.draw(st.sampled_from(list(options)))

    def node(self) -> int:
        return self.pick(self.floats[-6:])

    def parameter(self, shape, dtype="f32") -> int:
        source = len(self.builder.nodes)
        return self.builder.parameter(shape, dtype, source, self.data.draw(st.booleans()))

    def add(self, index: int) -> None:
        if self.builder.nodes[index].size <= SIZE_LIMIT:
            self.floats.append(index)

    def like(self, shape) -> int:
        """A node of that shape: one there is, or a new parameter."""
        found = [i for i in self.floats[1:] if self.builder.shape(i) in (shape, ())]
        return (
            self.pick(found) if found and self.pick((True, True, False)) else self.parameter(shape)
        )

    def step(self) -> None:
        b, x = self.builder, self.node()
        shape = b.shape(x)
        kind = self.pick(("unary", "binary", "binary", *MOVES))
        if kind == "unary":
            self.add(b.pointwise(self.pick(UNARY), x))
        elif kind == "binary":
            self.add(b.pointwise(self.pick(BINARY), x, self.like(shape)))
        elif kind == "broadcast":
            self.broadcast(x, shape)
        elif kind == "reshape":
            self.add(b.reshape(x, self.regrouped(math.prod(shape))))
        elif shape:
            getattr(self, kind)(x, shape)

    def regrouped(self, size):
        first = self.pick(d for d in range(1, size + 1) if size % d == 0)
        second = self.pick(d for d in range(1, size // first + 1) if size // first % d == 0)
        return (first, second, size // first // second)

    def broadcast(self, x, shape):
        place = self.pick(range(len(shape) + 1))
        extent = self.data.draw(EXTENTS)
        axes = tuple(axis + (axis >= place) for axis in range(len(shape)))
        if len(shape) < 4:
            wide = tuple(extent if e == 1 and self.pick((True, False)) else e for e in shape)
            self.add(self.builder.broadcast(x, axes, (*wide[:place], extent, *wide[place:])))

    def reduce(self, x, shape):
        axes = self.data.draw(st.sets(st.sampled_from(range(len(shape))), min_size=1))
        self.add(self.builder.reduce(self.pick(("sum", "amax")), x, sorted(axes)))

    def softmax(self, x, shape):
        """Over one axis, so that buffers can be shared."""
        b, axis = self.builder, self.pick(range(len(shape)))
        kept = [i for i in range(len(shape)) if i != axis]
        top = b.broadcast(b.reduce("amax", x, (axis,)), kept, shape)
        raised = b.pointwise("exp", b.pointwise("sub", x, top))
        total = b.broadcast(b.reduce("sum", raised, (axis,)), kept, shape)
        self.add(b.pointwise("div", raised, total))

    def norm(self, x, shape):
        b, axes = self.builder, (len(shape) - 1,)
        power = b.reduce("sum", b.pointwise("mul", x, x), axes)
        scale = b.pointwise("rsqrt", b.pointwise("exp", power))
        self.add(b.pointwise("mul", x, b.broadcast(scale, range(len(shape) - 1), shape)))

    def transpose(self, x, shape):
        self.add(self.builder.transpose(x, self.data.draw(st.permutations(range(len(shape))))))

    def slice(self, x, shape):
        axis = self.pick(range(len(shape)))
        start, step = self.pick(range(shape[axis])), self.pick((1, 2))
        length = self.pick(range(1, (shape[axis] - 1 - start) // step + 2))
        self.add(self.builder.slice(x, axis, start, step, length))

    def concat(self, x, shape):
        axis = self.pick(range(len(shape)))
        other = (*shape[:axis], self.data.draw(EXTENTS), *shape[axis + 1 :])
        parts = [x, self.like(other)]
        if all(self.builder.shape(part) for part in parts):
            self.add(self.builder.concat(parts, axis))

    def dot(self, x, shape):
        if len(shape) > 1:
            right = self.like((*shape[:-2], shape[-1], self.data.draw(EXTENTS)))
            if self.builder.shape(right):
                self.add(self.builder.dot(x, right))

    def gather(self, x, shape):
        table = self.parameter((4, *shape[:1]))
        index = self.parameter(self.data.draw(st.lists(EXTENTS, max_size=2).map(tuple)), "i64")
        self.add(self.builder.gather(table, index, self.pick((0, 1))))

    def graph(self) -> Graph:
        made = [i for i in self.floats if self.builder.nodes[i].kind is not Kind.PARAMETER]
        read = {o for node in self.builder.nodes for o in node.operands}
        ends = [i for i in made if i not in read]
        few = self.pick((0, 0, 1, 2))
        extra = self.data.draw(st.sets(st.sampled_from(made), max_size=few)) if made else set()
        chosen = sorted({*ends, *extra})
        results = [(i, 1000 + i, self.builder.shape(i)) for i in chosen]
        return self.builder.finish(results)


@st.composite
def graphs(draw, steps=12):
    maker = Draw(draw(st.data()))
    for _ in range(draw(st.integers(1, 2))):
        maker.add(maker.parameter(draw(SHAPES)))
    for _ in range(draw(st.integers(1, steps))):
        maker.step()
    return maker.graph()
