"""A device in numpy: runs lowered programs for several requests at once, by the rules in
`kernels/lowered.py` and nothing else.

PACKED ops run once on packed tensors; everything else per request. A kernel sees only what it
declares, and values are dropped when `Lowered.drops` says so. The order of kernels is drawn from
those that `producers` allows.
"""

from __future__ import annotations

import random

import numpy as np

from coissue.kernels.interpreter import run_op, store
from coissue.kernels.ir import ABSENT, Dim, Op, Type
from coissue.kernels.lowered import Layout, Lowered, Mode
from coissue.kernels.passes.layouts import POINTWISE, lead
from coissue.kernels.spec import bind_sizes

PACKABLE = (Layout.ROWS, Layout.TOKENS)
#: Ops whose FIXED operands broadcast.
BROADCASTING = POINTWISE | {"expand", "matmul", "attention"}


class PackedRun:
    def __init__(self, lowered: Lowered, requests, weights, rng: random.Random):
        self.lowered, self.rng = lowered, rng
        self.types, self.layouts = lowered.program.types, lowered.layouts
        types = [self.types[port.value] for port in lowered.program.inputs]
        self.sizes = [
            bind_sizes(types, [r[port.name].shape for port in lowered.program.inputs])
            for r in requests
        ]
        self.weights = {
            weight.value: store(weights[weight.digest], self.types[weight.value].dtype)
            for weight in lowered.program.weights
        }
        #: Value -> one array per request.
        self.live = {
            port.value: [store(r[port.name], self.types[port.value].dtype) for r in requests]
            for port in lowered.program.inputs
        }
        self.packed_calls = 0

    def run(self):
        done, left = set(), set(range(len(self.lowered.kernels)))
        while left:
            ready = [k for k in sorted(left) if done.issuperset(self.lowered.producers[k])]
            index = self.rng.choice(ready)
            self._kernel(index)
            done.add(index)
            left.remove(index)
        outputs = self.lowered.program.outputs
        self.live |= {value: [w] * len(self.sizes) for value, w in self.weights.items()}
        return [
            {port.name: self.live[port.value][i] for port in outputs}
            for i in range(len(self.sizes))
        ]

    def _kernel(self, index):
        kernel = self.lowered.kernels[index]
        scope = {value: self.live[value] for value in kernel.inputs}
        scope |= {value: [self.weights[value]] * len(self.sizes) for value in kernel.weights}
        for op, mode in zip(kernel.ops, kernel.modes, strict=True):
            run = self._packed if mode is Mode.PACKED else self._each
            scope.update(zip(op.outputs, run(op, scope), strict=True))
        self.live |= {value: scope[value] for value in kernel.outputs}
        for value in self.lowered.drops[index]:
            del self.live[value]

    def _each(self, op, scope):
        out = [self.types[value] for value in op.outputs]
        runs = []
        for i, (rows, tokens) in enumerate(self.sizes):
            arrays = [None if v == ABSENT else scope[v][i] for v in op.inputs]
            runs.append(run_op(op, arrays, out, rows, tokens))
        return list(zip(*runs, strict=True))

    def _packed(self, op, scope):
        self.packed_calls += 1
        (value,) = op.outputs
        type_ = self.types[value]
        count = lead(type_)
        arrays = [None if v == ABSENT else self._operand(op, v, scope) for v in op.inputs]
        extents = [self._extent(type_, size) for size in self.sizes]
        shape = (Dim(sum(extents)), *type_.shape[count:])
        lost = self._lost(op, type_)
        moved = Op(op.name, op.inputs, op.outputs, move_axes(op, lost), op.where)
        (result,) = run_op(moved, arrays, [Type(shape, type_.dtype)], 1, 1)
        parts = np.split(result, np.cumsum(extents)[:-1])
        return [[p.reshape(type_.at(*s)) for p, s in zip(parts, self.sizes, strict=True)]]

    def _lost(self, op, out):
        """By how much an axis after the packed ones is less than in the logical shape."""
        dynamic = [v for v in op.inputs if v != ABSENT and self.layouts[v] is not Layout.FIXED]
        return lead(self.types[dynamic[0]] if dynamic else out) - 1

    def _operand(self, op, value, scope):
        type_ = self.types[value]
        if self.layouts[value] is not Layout.FIXED:
            assert self.layouts[value] in PACKABLE, (op, value)
            parts = [array.reshape(-1, *array.shape[lead(type_) :]) for array in scope[value]]
            return np.concatenate(parts)
        array, out = scope[value][0], self.types[op.outputs[0]]
        behind = max(len(out.shape) - lead(out), 2 if op.name == "matmul" else 0)
        if op.name in BROADCASTING and array.ndim > behind:
            assert all(extent == 1 for extent in array.shape[: array.ndim - behind])
            array = array.reshape(array.shape[array.ndim - behind :])
        return array

    @staticmethod
    def _extent(type_, size):
        return int(np.prod([dim.at(*size) for dim in type_.shape[: lead(type_)]]))


def move_axes(op: Op, lost: int):
    attrs = dict(op.attrs)
    if op.name == "permute":
        attrs["dims"] = tuple(d - lost for d in op.attrs["dims"][lost:])
    elif "dims" in attrs and not (op.name == "index" and attrs["dims"] == (0,)):
        attrs["dims"] = tuple(d - lost for d in attrs["dims"])
    elif "dim" in attrs:
        attrs["dim"] -= lost
    return attrs


def run_packed(lowered, requests, weights, seed=0):
    return PackedRun(lowered, requests, weights, random.Random(seed)).run()
