"""The child process that makes a kernel's memory-bound ops into libraries: see `native`.

    runs of ops -> graph -> stitched kernels -> loops -> C++ source -> library

Reads one pickled `Order` from its input, writes one `Build` to its output. Knows no torch, so that
it is up at once. What reaches a source is what the generator derives from the program's checked
types and attributes; names that a tenant chose are not among it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from coissue.kernels.cpu.native import (
    Build,
    Call,
    NativeError,
    Order,
    Recurrence,
    Run,
    Scratch,
    compile_source,
    number_values,
)
from coissue.kernels.cpu.timing import open_library
from coissue.kernels.ir import Op
from coissue.kernels.lowered import Kernel
from coissue.kernels.stitch.cpp import render_cpp
from coissue.kernels.stitch.emit import emit
from coissue.kernels.stitch.graph import Graph, Kind
from coissue.kernels.stitch.lower import lower
from coissue.kernels.stitch.plan import StitchedKernel, StitchPlan
from coissue.kernels.stitch.recurrence import find_recurrences, render_recurrence
from coissue.kernels.stitch.runs import find_runs
from coissue.kernels.stitch.search import plan

_Made = TypeVar("_Made")


class Unsuited(Exception):
    """A run that a launch could not call; it stays with the op table."""


#: One name in all libraries, so that equal kernels have equal sources.
SYMBOL = "coissue_stitched"
#: Of buffers on the stack: a share of the second cache, far from the end of any thread's stack.
BUFFER_BYTES = 128 * 1024
#: Added to the scheduler's own: it goes first, always.
NICENESS = 19


def build(order: Order) -> Build:
    """Every run that can be built, and in words why others cannot."""
    lowered, kernel = order.lowered, order.kernel
    failures: list[str] = []

    def tried(make: Callable[[], _Made]) -> list[_Made]:
        try:
            return [make()]
        except Unsuited:
            return []
        except NativeError as error:
            failures.append(str(error))
        except Exception as error:  # a fault of planner or generator: the op table has these ops
            failures.append(f"{type(error).__name__}: {error}")
        return []

    runs = [
        made
        for run in find_runs(lowered, kernel)
        for made in tried(partial(build_run, order, run.ops))
    ]
    recurrences = [
        made
        for place, hindrance in find_recurrences(lowered, kernel).items()
        if not hindrance
        for made in tried(partial(build_recurrence, order, place))
    ]
    return Build(tuple(runs), tuple(dict.fromkeys(failures)), tuple(recurrences))


def build_recurrence(order: Order, place: int) -> Recurrence:
    """Raises `NativeError`."""
    op, values = order.kernel.ops[place], number_values(order.kernel)
    file = _compile(order, render_recurrence(op, SYMBOL))
    ins, outs = (tuple(map(values.index, given)) for given in (op.inputs, op.outputs))
    return Recurrence(place, Call(file, SYMBOL, ins, outs))


def build_run(order: Order, ops: Sequence[Op]) -> Run:
    """Raises `Unsuited` or `NativeError`."""
    lowered, kernel = order.lowered, order.kernel
    known = open_library(Path(order.folder), order.toolchain)
    stitched = plan(lower(lowered, ops), threads=1, budget_bytes=BUFFER_BYTES, measured=known)
    arguments, scratch, lookups = number_arguments(stitched, kernel)
    calls = []
    for unit in stitched.kernels:
        source = render_unit(stitched.graph, unit)
        file = _compile(order, source)
        ins = tuple(arguments[node] for node in unit.inputs)
        outs = tuple(arguments[node] for node in unit.outputs)
        calls.append(Call(file, SYMBOL, ins, outs))
    made = {op.outputs for op in ops}
    inside = tuple(place for place, op in enumerate(kernel.ops) if op.outputs in made)
    return Run(inside, tuple(calls), scratch, lookups)


def _compile(order: Order, source: str) -> str:
    return compile_source(Path(order.folder), order.toolchain, source, Path(order.work))


def render_unit(graph: Graph, unit: StitchedKernel) -> str:
    return render_cpp([emit(graph, unit, SYMBOL)])


def number_arguments(
    stitched: StitchPlan, kernel: Kernel
) -> tuple[dict[int, int], tuple[Scratch, ...], tuple[tuple[int, int], ...]]:
    """Node -> its place as an argument, the scratch tensors among them, and lookups.

    Raises `Unsuited`."""
    nodes = stitched.graph.nodes
    places = {value: place for place, value in enumerate(number_values(kernel))}
    found: dict[int, int] = {}
    scratch: list[Scratch] = []
    for index in (i for unit in stitched.kernels for i in (*unit.inputs, *unit.outputs)):
        node = nodes[index]
        if index in found:
            continue
        if node.kind is not Kind.PARAMETER and not node.per_unit:
            raise Unsuited("the same for all units, but made in a launch")
        if node.source in places:
            found[index] = places[node.source]
        else:
            found[index] = ~len(scratch)
            scratch.append(Scratch(node.dtype, node.size))
    return found, tuple(scratch), find_lookups(stitched.graph, places)


def find_lookups(graph: Graph, places: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """The index tensors that requests bring, with the extent they look up in.

    Generated code never reads outside of a table, but the op table says that an index is wrong.
    Where an index is computed on the way, nobody could say so in time.
    """
    found = []
    for node in graph.nodes:
        if node.kind is not Kind.GATHER:
            continue
        table, index = (graph.nodes[operand] for operand in node.operands)
        if index.per_unit:
            if index.kind is not Kind.PARAMETER:
                raise Unsuited("an index is computed in the run that looks it up")
            found.append((places[index.source], table.shape[node.axes[0]]))
    return tuple(dict.fromkeys(found))


def end_with(scheduler: int) -> None:
    """A scheduler that is killed takes its build with it, compilers included."""
    select.select([scheduler], [], [])
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    scheduler = os.pidfd_open(os.getppid())
    threading.Thread(target=end_with, args=[scheduler], daemon=True).start()
    os.nice(NICENESS)
    order = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(msgspec.json.encode(build(order)))


if __name__ == "__main__":
    main()
