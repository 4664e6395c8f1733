"""Groups ops into kernels.

NOTE the one idea: ops become *units* (an anchor with its epilogue, or one memory-bound op), and
memory-bound units that touch each other with equally many anchors before them become one stitched
kernel. A path that leaves such a group through an anchor only reaches units with more anchors
before them, and an anchor's unit is left only by its last value, so kernels never depend on each
other in a circle.

- An anchor (GEMM, convolution, attention, recurrence, embedding) takes the ops after it as its
  epilogue, as long as each is the only reader of the one before: bias, activation, batch norm,
  residual and other elementwise ops, and reshapes.
- Products of one value with equally many anchors before them, such as a layer's query, key and
  value, are one kernel: none of them can wait for another, and a device may run them as one.
- FIXED ops are repeated in every kernel that needs them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

from coissue.kernels.ir import ABSENT, Op, Program
from coissue.kernels.lowered import Kernel, KernelKind, Layout, Lowered, Mode
from coissue.kernels.passes.layouts import POINTWISE, is_splittable
from coissue.kernels.passes.order import in_order
from coissue.kernels.signature import sign

ANCHORS: Final[dict[str, KernelKind]] = {
    **dict.fromkeys(("linear", "matmul"), KernelKind.GEMM),
    **dict.fromkeys(("lstm", "gru", "rnn"), KernelKind.RECURRENT),
    **dict.fromkeys(("embedding", "embedding_bag"), KernelKind.EMBEDDING),
    "conv": KernelKind.CONV,
    "attention": KernelKind.ATTENTION,
    "opaque": KernelKind.OPAQUE,
}
STITCHED: Final = KernelKind.STITCHED
#: Ops an anchor may take along behind it.
EPILOGUE: Final = POINTWISE | {"batch_norm", "reshape"}


def fuse(
    program: Program, layouts: Sequence[Layout], modes: Sequence[Mode], exact: bool = False
) -> Lowered:
    """`program` in kernels, with the layout of each value and the mode of each op from `prove`."""
    grouping = Grouping(program, modes)
    kernels = []
    for ops, kind in grouping.groups():
        steps = [(program.ops[i], modes[i]) for i in ops]
        is_fixed = all(mode is Mode.ONCE for _, mode in steps)
        handed = grouping.results if is_fixed else grouping.crossing
        kernels.append(assemble(program, layouts, steps, kind, handed, exact))
    return arrange(program, layouts, kernels)


class Grouping:
    """The ops of a program in groups; ops are known by their index."""

    def __init__(self, program: Program, modes: Sequence[Mode]) -> None:
        self.program = program
        self.modes = modes
        #: Value -> the op that makes it.
        self.maker = {v: index for index, op in enumerate(program.ops) for v in op.outputs}
        #: Value -> the ops that read it.
        self.readers: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(program.ops):
            for value in set(op.inputs):
                self.readers[value].append(index)
        self.results = {port.value for port in program.outputs}
        #: Values, not FIXED, needed outside the group that makes them; filled by `groups`.
        self.crossing = {
            value
            for value in self.results
            if value in self.maker and modes[self.maker[value]] is not Mode.ONCE
        }

    def groups(self) -> list[tuple[list[int], KernelKind]]:
        """Every group's ops, with the FIXED ops it needs, in an order that can be run."""
        home, kinds = self._units()
        home = self._stitched(home, kinds)
        for op, group in home.items():
            for value in self.program.ops[op].inputs:
                if home.get(self.maker.get(value, -1), group) != group:
                    self.crossing.add(value)
        members: dict[int, list[int]] = defaultdict(list)
        for op, group in home.items():
            members[group].append(op)
        found = [
            (sorted({*members[group], *self._fixed(members[group])}), kinds.get(group, STITCHED))
            for group in self._sorted(home)
        ]
        makers = (self.maker.get(value) for value in self.results)
        loose = [op for op in makers if op is not None and self.modes[op] is Mode.ONCE]
        if loose:
            found.append((sorted({*loose, *self._fixed(loose)}), STITCHED))
        return found

    def _units(self) -> tuple[dict[int, int], dict[int, KernelKind]]:
        """Op -> its unit (named by the first op), and the kind of each unit with an anchor."""
        home: dict[int, int] = {}
        kinds: dict[int, KernelKind] = {}
        for index, op in enumerate(self.program.ops):
            if self.modes[index] is Mode.ONCE or index in home:
                continue
            home[index] = index
            if op.name in ANCHORS:
                kinds[index] = ANCHORS[op.name]
                for follower in self._epilogue(index):
                    home.setdefault(follower, index)
        return home, kinds

    def _epilogue(self, anchor: int) -> list[int]:
        """The ops that follow `anchor` one by one, each the only reader of the one before."""
        found: list[int] = []
        op = self.program.ops[anchor]
        while self.results.isdisjoint(op.outputs):
            followers = [reader for value in op.outputs for reader in self.readers[value]]
            if len(followers) != 1 or op.outputs[0] not in self.program.ops[followers[0]].inputs:
                break
            op = self.program.ops[followers[0]]
            if op.name not in EPILOGUE or self.modes[followers[0]] is Mode.EACH:
                break
            found += followers
        return found

    def _stitched(self, home: dict[int, int], kinds: Container[int]) -> dict[int, int]:
        """`home` with units of equal depth joined: memory-bound that touch, products of a value."""
        depth: dict[int, int] = {}
        needs = self._needs(home)
        root = {unit: unit for unit in needs}
        products: dict[tuple[int, int], int] = {}

        def find(unit: int) -> int:
            while root[unit] != unit:
                root[unit] = root[root[unit]]
                unit = root[unit]
            return unit

        for unit in self._sorted(home):
            depth[unit] = max((depth[n] + (n in kinds) for n in needs[unit]), default=0)
            for need in needs[unit]:
                if unit not in kinds and need not in kinds and depth[need] == depth[unit]:
                    root[find(unit)] = find(need)
            op = self.program.ops[unit]
            if op.name == "linear" and self.modes[unit] is Mode.PACKED:
                root[find(unit)] = find(products.setdefault((op.inputs[0], depth[unit]), unit))
        return {op: find(unit) for op, unit in home.items()}

    def _needs(self, home: Mapping[int, int]) -> dict[int, dict[int, None]]:
        """Group -> the groups whose values it reads."""
        needs: dict[int, dict[int, None]] = {group: {} for group in home.values()}
        for op, group in home.items():
            for value in self.program.ops[op].inputs:
                other = home.get(self.maker.get(value, -1), group)
                if other != group:
                    needs[group][other] = None
        return needs

    def _sorted(self, home: Mapping[int, int]) -> list[int]:
        """The groups in an order that can be run, as near to the program's as can be."""
        return in_order(self._needs(home))

    def _fixed(self, ops: Iterable[int]) -> set[int]:
        """The FIXED ops that `ops` need."""
        found: set[int] = set()
        todo = list(ops)
        while todo:
            for value in self.program.ops[todo.pop()].inputs:
                maker = self.maker.get(value, -1)
                if maker >= 0 and self.modes[maker] is Mode.ONCE and maker not in found:
                    found.add(maker)
                    todo.append(maker)
        return found


def assemble(
    program: Program,
    layouts: Sequence[Layout],
    steps: Sequence[tuple[Op, Mode]],
    kind: KernelKind,
    handed: Container[int],
    exact: bool = False,
) -> Kernel:
    """The kernel of `steps`, which are in an order that can be run; it hands out `handed`."""
    ops, modes = zip(*steps, strict=True)
    made = dict.fromkeys(value for op in ops for value in op.outputs)
    read = dict.fromkeys(v for op in ops for v in op.inputs if v not in made and v != ABSENT)
    weights = {weight.value for weight in program.weights}
    outputs = tuple(value for value in made if value in handed)
    inputs = tuple(value for value in read if value not in weights)
    crossing = (*inputs, *outputs)
    return Kernel(
        ops=ops,
        modes=modes,
        inputs=inputs,
        outputs=outputs,
        weights=tuple(value for value in read if value in weights),
        kind=kind,
        per_token=any(dim.tokens for v in (*made, *read) for dim in program.types[v].shape),
        signature=sign(ops, modes, outputs, weights, program.types, layouts, exact),
        exact=exact,
        splittable=is_splittable(steps, crossing, program.types, layouts),
    )


def arrange(program: Program, layouts: Sequence[Layout], kernels: Sequence[Kernel]) -> Lowered:
    """`kernels`, in topological order, with what each waits for and what it frees."""
    maker = {value: index for index, kernel in enumerate(kernels) for value in kernel.outputs}
    readers: dict[int, list[int]] = {port.value: [] for port in program.inputs}
    producers: list[set[int]] = [set() for _ in kernels]
    drops: list[list[int]] = [[] for _ in kernels]
    for index, kernel in enumerate(kernels):
        producers[index].update(maker[value] for value in kernel.inputs if value in maker)
        for value in kernel.inputs:
            readers.setdefault(value, []).append(index)
    results = {port.value for port in program.outputs}
    for value, found in readers.items():
        if value in results or not kernels:
            continue
        *others, last = found or [0]
        producers[last].update(others)
        drops[last].append(value)
    return Lowered(
        program=program,
        layouts=tuple(layouts),
        kernels=tuple(kernels),
        producers=tuple(tuple(sorted(found)) for found in producers),
        drops=tuple(map(tuple, drops)),
    )
