"""Which nodes become one kernel: patterns, a beam over sets of patterns, and merging (F2 to F5, G4
to G7, H2).

NOTE the one idea: a pattern grows from a root (a node that all its readers are decided for) towards
the inputs, layer by layer. A node joins if a reader has joined and no reader has been given up, so
whatever leads from the pattern back into it is inside. Patterns decided later only feed those
decided before, and what is merged afterwards is looked at as a whole: never a cycle.

A beam of `WIDTH` partial plans is kept by a score that needs no schedules; then each plan's kernels
are merged as long as one costs less than two, whether they touch or not, and the cheapest plan is
taken by the estimate of whole kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.stitch.graph import Graph
from coissue.kernels.stitch.packing import pack_units
from coissue.kernels.stitch.plan import StitchPlan
from coissue.kernels.stitch.price import Machine, Measured, bytes_moved, cpu, gpu
from coissue.kernels.stitch.spans import HEAVY, find_operands
from coissue.kernels.stitch.split import split_long_rows
from coissue.kernels.stitch.tune import Settings, Tuned, Tuner

WIDTH: Final = 3
#: F2: most bytes per unit that a kernel of patterns that do not touch may read and write.
FOOTPRINT_BYTES_LIMIT: Final = 2**22
#: Pairs of kernels whose merging is looked at in one round.
PAIRS_LIMIT: Final = 200

Pattern = frozenset[int]


def plan(
    graph: Graph,
    *,
    budget_bytes: int = 48 * 1024,
    threads: int = 256,
    machine: Machine | None = None,
    measured: Measured | None = None,
    units: int = 1,
) -> StitchPlan:
    """The kernels of a graph, for launches of so many units; `threads` 1 is for a CPU.

    Every graph gets a plan: at worst each node is a kernel of one block (F8)."""
    machine = machine or (cpu() if threads == 1 else gpu(threads))
    forms = [(graph, 1), *((form, 1) for form in split_long_rows(graph, machine))]
    forms += pack_units(graph, machine, units)
    plans = [
        _cheapest(
            Tuner(form, Settings(budget_bytes, threads, machine, measured, units // count)), count
        )
        for form, count in forms
    ]
    return min(plans, key=lambda found: found[0])[1]


def _cheapest(tuner: Tuner, count: int) -> tuple[float, StitchPlan]:
    """The best plan of the tuner's graph, of which a unit is `count` units, after its price."""
    ends = [_merge(tuner, state.patterns) for state in Search(tuner).run()]
    patterns = min(ends, key=lambda found: sum(map(tuner.price, found)), default=())
    kernels = [_tuned(tuner, pattern).kernel for pattern in order(tuner, patterns)]
    return sum(map(tuner.price, patterns)), StitchPlan(tuner.graph, tuple(kernels), count)


def _tuned(tuner: Tuner, pattern: Collection[int]) -> Tuned:
    found = tuner.tune(pattern)
    assert found is not None, f"no kernel of {sorted(pattern)} fits the budget"
    return found


@dataclass(frozen=True, slots=True)
class _State:
    """A partial plan."""

    patterns: tuple[Pattern, ...] = ()
    #: Nodes of all patterns.
    done: Pattern = frozenset()
    saved_ns: float = 0.0


class Search:
    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self._layers = sorted(tuner.work, key=lambda index: (tuner.spans[index], -index))

    def run(self) -> list[_State]:
        """G6: the best whole plans, by score."""
        beam = [_State()]
        while any(len(state.done) < len(self._layers) for state in beam):
            longer = [following for state in beam for following in self._extend(state)]
            unique = {frozenset(state.patterns): state for state in longer}
            beam = sorted(unique.values(), key=lambda state: -state.saved_ns)[:WIDTH]
        return beam

    def _extend(self, state: _State) -> Iterator[_State]:
        """The plan with each of the patterns (G5) that its first undecided node may be root of."""
        root = next((index for index in self._layers if index not in state.done), None)
        if root is None:
            yield state
            return
        alone = frozenset({root})
        grown = self.grow(root, state.done, through_heavy=True)
        shallow = self.grow(root, state.done, through_heavy=False)
        for pattern in dict.fromkeys((grown, shallow, alone)):
            yield _State(
                (*state.patterns, pattern),
                state.done | pattern,
                state.saved_ns + self._score(pattern),
            )

    def grow(self, root: int, done: Collection[int], through_heavy: bool) -> Pattern:
        """F3: the pattern of `root`; without `through_heavy`, only what fits in registers."""
        fused = {root}
        given_up: set[int] = set()
        for index in self._layers:
            if index in done or index == root:
                continue
            if self._tuner.spans[index] <= self._tuner.spans[root]:
                given_up.add(index)  # another root; what it reads too is decided with it
                continue
            is_heavy = self._tuner.graph.nodes[index].kind in HEAVY
            wanted = through_heavy or not is_heavy
            if wanted and self._is_consistent(index, fused, given_up):
                fused.add(index)
            else:
                given_up.add(index)
        return frozenset(fused)

    def _is_consistent(self, index: int, fused: set[int], given_up: set[int]) -> bool:
        """F4. The third test asks for a schedule that makes one kernel no dearer than two."""
        readers = self._tuner.readers[index]
        if any(reader in given_up for reader in readers):
            return False
        if not any(reader in fused for reader in readers):
            return False
        apart = self._tuner.price(fused) + self._tuner.price({index})
        return self._tuner.price(fused | {index}, base=fused) <= apart

    def _score(self, pattern: Pattern) -> float:
        """G4: ns saved by memory not touched and launches not made, less parallelism lost."""
        tuner, machine = self._tuner, self._tuner.settings.machine
        outputs = set(tuner.outputs(pattern))
        saved_bytes = 0
        for index in pattern:
            node = tuner.graph.nodes[index]
            size = node.size * DTYPE_BYTES[node.dtype]
            inside = sum(reader in pattern for reader in tuner.readers[index])
            saved_bytes += size * (inside + (index not in outputs))
        saved_ns = saved_bytes / machine.bytes_per_ns + machine.launch_ns * (len(pattern) - 1)
        return saved_ns - self._idle_ns(pattern)

    def _idle_ns(self, pattern: Pattern) -> float:
        """What fewer blocks than each node could have alone cost."""
        tuner, machine = self._tuner, self._tuner.settings.machine
        units = tuner.settings.units
        blocks = min(units * _tuned(tuner, pattern).kernel.blocks, machine.slots)
        idle = 0.0
        for index in pattern:
            alone = min(units * _tuned(tuner, {index}).kernel.blocks, machine.slots)
            steps = units * tuner.graph.nodes[index].size / machine.lanes
            idle += machine.step_ns * steps * max(0.0, 1 / blocks - 1 / alone)
        return idle


def _merge(tuner: Tuner, patterns: Sequence[Pattern]) -> tuple[Pattern, ...]:
    """F5, F2 and G7: kernels in pairs, the most saving pair first, until no pair saves anything."""
    found = list(patterns)
    while True:
        best, saved_ns = None, 0.0
        for one, other in list(combinations(found, 2))[:PAIRS_LIMIT]:
            gain = tuner.price(one) + tuner.price(other) - _joint_price(tuner, one, other)
            rest = [pattern for pattern in found if pattern not in (one, other)]
            if gain > saved_ns and can_order(tuner, [*rest, one | other]):
                best, saved_ns = (one, other, rest), gain
        if best is None:
            return tuple(found)
        found = [*best[2], best[0] | best[1]]


def _joint_price(tuner: Tuner, one: Pattern, other: Pattern) -> float:
    """F2: what does not touch must be small together."""
    if not touch(tuner, one, other) and _footprint(tuner, one | other) > FOOTPRINT_BYTES_LIMIT:
        return float("inf")
    return tuner.price(one | other)


def touch(tuner: Tuner, one: Pattern, other: Pattern) -> bool:
    """Whether one reads what the other makes."""
    pairs = ((one, other), (other, one))
    return any(reader in b for a, b in pairs for index in a for reader in tuner.readers[index])


def _footprint(tuner: Tuner, pattern: Pattern) -> int:
    """Bytes per unit that go in and out."""
    operands = {o for index in pattern for o in tuner.graph.nodes[index].operands}
    return bytes_moved(tuner.graph, tuple(operands - pattern), tuner.outputs(pattern))


def can_order(tuner: Tuner, patterns: Sequence[Pattern]) -> bool:
    return len(order(tuner, patterns)) == len(patterns)


def order(tuner: Tuner, patterns: Sequence[Pattern]) -> list[Pattern]:
    """The patterns after those they read from; those in or behind a circle are left out."""
    home = {index: pattern for pattern in patterns for index in pattern}
    places = home.keys()
    waiting = {
        pattern: {home[o] for index in pattern for o in find_operands(tuner.graph, index, places)}
        - {pattern}
        for pattern in patterns
    }
    found: list[Pattern] = []
    while True:
        ready = [pattern for pattern, needs in waiting.items() if needs <= set(found)]
        if not ready:
            return found
        found += sorted(ready, key=min)
        for pattern in ready:
            del waiting[pattern]
