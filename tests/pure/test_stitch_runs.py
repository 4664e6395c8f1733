"""Runs of a kernel's ops: as large as can be, never waiting for themselves, equal to the ops."""

from __future__ import annotations

import random

import numpy as np
import pytest
from packed import PackedRun
from programs import MODELS, Builder
from stitch_blocks import PlanRun
from stitch_check import check_plan

from coissue.kernels.interpreter import interpret
from coissue.kernels.ir import ABSENT, R, T
from coissue.kernels.lowered import Layout, Mode
from coissue.kernels.passes.link import cut
from coissue.kernels.passes.pipeline import lower as lower_program
from coissue.kernels.stitch.graph import Kind
from coissue.kernels.stitch.lower import lower
from coissue.kernels.stitch.runs import find_runs
from coissue.kernels.stitch.search import plan

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SIZES = ((2, 3), (1, 1))


def joined(program):
    """As few kernels as can be: runs with anchors between them."""
    return cut({"m": lower_program(program)}, lambda kernel: 1, 10**9)["m"]


class StitchedRun(PackedRun):
    """The device of the tests with each run of ops as a stitched plan, block by block."""

    stitched = 0

    def _kernel(self, index):
        kernel = self.lowered.kernels[index]
        scope = {value: self.live[value] for value in kernel.inputs}
        scope |= {value: [self.weights[value]] * len(self.sizes) for value in kernel.weights}
        runs = find_runs(self.lowered, kernel)
        inside = {op.outputs for run in runs for op in run.ops}
        modes = zip(kernel.ops, kernel.modes, strict=True)
        left = [*runs, *((op, mode) for op, mode in modes if op.outputs not in inside)]
        while left:
            ready = [part for part in left if self._needs(part) <= scope.keys()]
            assert ready, "runs wait for each other in a circle"
            for part in ready:
                left.remove(part)
                if isinstance(part, tuple):
                    run = self._packed if part[1] is Mode.PACKED else self._each
                    scope.update(zip(part[0].outputs, run(part[0], scope), strict=True))
                else:
                    self._stitch(part, scope)
        self.live |= {value: scope[value] for value in kernel.outputs}
        for value in self.lowered.drops[index]:
            del self.live[value]

    @staticmethod
    def _needs(part):
        ops = [part[0]] if isinstance(part, tuple) else part.ops
        made = {value for op in ops for value in op.outputs}
        return {value for op in ops for value in op.inputs} - made - {ABSENT}

    def _stitch(self, run, scope):
        graph = lower(self.lowered, run.ops)
        made = plan(graph, budget_bytes=1024, threads=self.rng.choice((1, 64)))
        check_plan(made, 1024)
        self.stitched += 1
        values = [graph.nodes[i].source for i in graph.outputs]
        parts = {value: [] for value in values}
        for request, (rows, tokens) in enumerate(self.sizes):
            units = rows * tokens if run.unit is Layout.TOKENS else rows
            found = [self._unit(made, scope, request, units, unit) for unit in range(units)]
            for value, arrays in zip(values, zip(*found, strict=True), strict=True):
                shape = self.types[value].at(rows, tokens)
                parts[value].append(np.concatenate([a.reshape(-1) for a in arrays]).reshape(shape))
        scope.update(parts)

    def _unit(self, made, scope, request, units, unit):
        parameters = {}
        for index, node in enumerate(made.graph.nodes):
            if node.kind is Kind.PARAMETER:
                array = scope[node.source][request]
                cut = array.reshape(units, -1)[unit] if node.per_unit else array
                parameters[index] = cut.reshape(node.shape)
        return PlanRun(made, parameters).outputs()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("join", [False, True])
def test_a_model_with_stitched_runs_gives_what_the_interpreter_says(name, join):
    model = MODELS[name]()
    rng = np.random.default_rng(2)
    requests = [model.request(*size, rng) for size in SIZES]
    lowered = joined(model.program) if join else lower_program(model.program)
    device = StitchedRun(lowered, requests, model.weights, random.Random(3))
    for request, outputs in zip(requests, device.run(), strict=True):
        alone = interpret(model.program, request, model.weights)
        for port in alone:
            np.testing.assert_allclose(outputs[port], alone[port], **CLOSE)


def names(b, **outputs):
    lowered = joined(b.build(**outputs).program)
    (kernel,) = lowered.kernels
    return [[op.name for op in run.ops] for run in find_runs(lowered, kernel)]


def test_an_anchor_is_between_two_runs():
    b = Builder()
    x = b.op("exp", b.input("x", R, 4))
    y = b.op("softmax", b.linear(x, 4), dim=1)
    assert names(b, y=b.op("add", x, y)) == [["exp"], ["softmax", "add"]]


def test_what_does_not_touch_is_one_run_all_the_same():
    b = Builder()
    one = b.op("tanh", b.input("x", R, 4))
    other = b.op("exp", b.input("z", R, 3))
    assert names(b, y=one, z=other) == [["tanh", "exp"]]


def test_rows_and_tokens_are_not_one_run():
    b = Builder()
    assert len(names(b, y=b.op("tanh", b.input("x", R, 4)), z=b.op("exp", b.input("t", R, T)))) == 2


def test_an_op_sinks_to_the_run_that_reads_it():
    b = Builder()
    x = b.input("x", R, 4)
    shifted = b.op("add", x, x)
    y = b.op("mul", b.linear(b.op("exp", x), 4), shifted)
    assert names(b, y=y) == [["exp"], ["add", "mul"]]


def test_moves_alone_are_no_run():
    b = Builder()
    x = b.op("reshape", b.linear(b.input("x", R, 4), 6), out=(R, 2, 3))
    assert names(b, y=b.op("permute", x, dims=(0, 2, 1))) == []


def test_moves_at_the_rim_stay_outside_where_they_are_free():
    b = Builder()
    x = b.op("reshape", b.linear(b.input("x", R, 4), 6), out=(R, 2, 3))
    assert names(b, y=b.op("permute", x, dims=(0, 2, 1)), z=b.op("exp", x)) == [["exp"]]
    b = Builder()
    x = b.op("exp", b.linear(b.input("x", R, 4), 6))
    y = b.op("reshape", x, out=(R, 2, 3))
    assert names(b, y=b.op("permute", y, dims=(0, 2, 1)), x=x) == [["exp"]]
    b = Builder()
    x = b.op("exp", b.linear(b.input("x", R, 4), 6))
    y = b.op("reshape", x, out=(R, 2, 3))
    assert names(b, y=b.op("permute", y, dims=(0, 2, 1))) == [["exp", "reshape", "permute"]]


def test_an_index_is_made_before_the_run_that_looks_it_up():
    b = Builder()
    spots = b.op(
        "add", *[b.input("x", R, T, dtype="i64", fill=lambda g, s: g.integers(0, 2, s))] * 2
    )
    y = b.op("tanh", b.op("embedding", b.weight(9, 4), spots))
    assert names(b, y=y) == [["add"], ["embedding", "tanh"]]
