"""The child process that makes a kernel's memory-bound ops into libraries: see `native`.

    runs of ops -> graph -> stitched kernels -> loops -> C++ source -> library

Reads one pickled `Order` from its input, writes one `Build` to its output. Knows no torch, so that
it is up at once. What reaches a source is what the generator derives from the program's checked
types and attributes; names that a tenant chose are not among it.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import msgspec

from coissue.kernels.cpu.native import (
    Build,
    Call,
    NativeError,
    Order,
    Run,
    Scratch,
    compile_source,
    number_values,
)
from coissue.kernels.stitch.emit import emit
from coissue.kernels.stitch.graph import Graph, Kind
from coissue.kernels.stitch.lower import find_runs, lower
from coissue.kernels.stitch.plan import StitchedKernel
from coissue.kernels.stitch.planner import plan
from coissue.kernels.stitch.render import render_cpp


def build(order: Order) -> Build:
    """Every run that can be built, and in words why others cannot."""
    runs, failures = [], []
    for ops in find_runs(order.lowered, order.kernel):
        try:
            runs.append(_build_run(order, ops))
        except NativeError as error:
            failures.append(str(error))
    return Build(tuple(runs), tuple(dict.fromkeys(failures)))
