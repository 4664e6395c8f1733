"""The performance library (F12): what one node costs a block under a schedule, measured once.

A miss is measured by whoever can run kernels on the device, as long as the time for tuning lasts;
after that, and for what cannot be measured, the estimate decides. One file per device, shared by
all tenants. Rules: nothing here reads a clock or compiles; the file is replaced as a whole, and one
that cannot be read counts as empty.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from coissue.kernels.files import replace_file
from coissue.kernels.stitch.graph import Graph, Kind, Node
from coissue.kernels.stitch.plan import Schedule, StitchedKernel
from coissue.kernels.stitch.price import Machine
from coissue.kernels.stitch.shared import Draft, plan_memory
from coissue.kernels.stitch.tune import Settings, finish

logger = logging.getLogger("coissue.kernels")

#: ns of a launch of the kernel with one unit, or None if it cannot be run.
Measure = Callable[[Graph, StitchedKernel], float | None]
VERSION = 1
#: Longer than any block takes: what is not less is damaged.
LONGEST_NS = 1e12


class Library:
    """Is a `price.Measured`."""

    def __init__(
        self,
        path: Path,
        threads: int,
        machine: Machine,
        measure: Measure | None = None,
        *,
        budget_ns: int = 0,
        now_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        """`path`: of this device's file. `budget_ns`: for all measuring until the end."""
        self._path, self._threads, self._machine = path, threads, machine
        self._measure, self._now_ns = measure, now_ns
        self._left_ns = budget_ns
        self._times = self._read()
        self.misses = 0

    def __call__(self, graph: Graph, index: int, schedule: Schedule) -> float | None:
        key = describe(graph, index, schedule, self._threads)
        if key not in self._times and self._measure is not None and self.is_filled:
            self.misses += 1
            start_ns = self._now_ns()
            found = self._measure(*isolate(graph, index, schedule, self._threads, self._machine))
            self._left_ns -= self._now_ns() - start_ns
            if found is not None:
                self._times[key] = found
        return self._times.get(key)

    @property
    def is_filled(self) -> bool:
        """What is not known yet is measured."""
        return self._measure is not None and self._left_ns > 0

    def save(self) -> None:
        """Writes all times, those that others have written since as well."""
        self._times = self._read() | self._times
        data = {"version": VERSION, "unit": "ns", "times": self._times}
        replace_file(self._path, json.dumps(data).encode())

    def _read(self) -> dict[str, float]:
        try:
            found = json.loads(self._path.read_text())
            if found["version"] != VERSION:
                return {}
            times = {str(key): float(time) for key, time in found["times"].items()}
            return {key: time for key, time in times.items() if 0 <= time < LONGEST_NS}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("performance library unreadable path=%s error=%r", self._path, error)
            return {}


def describe(graph: Graph, index: int, schedule: Schedule, threads: int) -> str:
    """The key: opcode, shapes, schedule, threads."""
    node = graph.nodes[index]
    operands = [(list(graph.nodes[o].shape), graph.nodes[o].dtype) for o in node.operands]
    cut = [schedule.split_dim, schedule.sword, schedule.order.value]
    parts = [node.kind.value, node.name, node.dtype, node.shape, node.axes, operands, cut, threads]
    return json.dumps(parts)


def isolate(
    graph: Graph, index: int, schedule: Schedule, threads: int, machine: Machine
) -> tuple[Graph, StitchedKernel]:
    """A graph of the node alone, all its operands from outside, and its kernel."""
    node = graph.nodes[index]
    given = [graph.nodes[operand] for operand in node.operands]
    parameters = [
        n if n.kind is Kind.CONSTANT else Node(Kind.PARAMETER, "", (), n.shape, n.dtype)
        for n in given
    ]
    alone = Node(node.kind, node.name, tuple(range(len(given))), node.shape, node.dtype, node.axes)
    place = len(given)
    small = Graph((*parameters, alone), (place,))
    whole = dict.fromkeys(range(place), Schedule(0, 1))
    blocks = schedule.blocks(node.shape)
    draft = Draft(small, (place,), (place,), blocks, {**whole, place: schedule})
    memory = plan_memory(draft, [0] * (place + 1), 0)
    assert memory is not None, "one node needs no shared memory"
    return small, finish(draft, memory, Settings(0, threads, machine)).kernel
