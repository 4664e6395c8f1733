"""Recurrences in generated code: the interpreter's answers for each request, in ragged launches of
one and of several weight sets, and each row's own bits whatever runs beside it."""

from __future__ import annotations

import device_rig
import native_rig
import numpy as np
import programs
import pytest
import torch
from programs import R, T

from coissue.kernels.cpu.native_recurrent import NativeRecurrence
from coissue.kernels.passes.pipeline import lower
from coissue.kernels.stitch.recurrence import HIDDEN_MAX, find_recurrences

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
#: Cell, hidden units, layers, directions, whether with biases, and rnn's function.
CASES = {
    "lstm": ("lstm", 20, 2, 2, True, None),
    "lstm of one": ("lstm", 1, 1, 1, False, None),
    "gru": ("gru", 33, 2, 1, True, None),
    "gru both ways": ("gru", 16, 1, 2, False, None),
    "tanh": ("rnn", 70, 2, 2, True, "tanh"),
    "relu": ("rnn", 5, 1, 1, True, "relu"),
}
SIZES = ((3, 5), (1, 7), (0, 5), (2, 5), (1, 1), (4, 3))
#: More rows than advance together.
MANY = ((9, 4), (17, 2), (1, 30))
TOLERANCE = 2e-5


def model(case, seed, *, tokens=T):
    cell, hidden, layers, directions, bias, function = CASES[case]
    b = programs.Builder("recurrent", seed, tokens_limit=32 if tokens is T else 0)
    x = b.input("x", R, tokens, 3)
    weights = []
    for layer in range(layers):
        into = 3 if layer == 0 else directions * hidden
        for _ in range(directions):
            sizes = [(into,), (hidden,), (), ()][: 4 if bias else 2]
            # Larger ones make the recurrence chaotic, and any rounding is another answer.
            scale = 0.8 / hidden**0.5
            weights += [b.weight(GATES[cell] * hidden, *size, scale=scale) for size in sizes]
    attrs = {"hidden": hidden, "layers": layers, "bidirectional": directions == 2, "bias": bias}
    attrs |= {"nonlinearity": function} if function else {}
    y, *states = b.op(cell, x, *weights, **attrs)
    # The last states of a request lie apart from the others': whatever reads them runs by request.
    last = {f"s{i}": b.op("permute", s, dims=(1, 0, 2)) for i, s in enumerate(states)}
    return b.build(y=y, **last)


def tenants(device, case, count, forge, *, tokens=T):
    """Rigs whose recurrence is generated code, always."""
    models = [model(case, seed, tokens=tokens) for seed in range(count)]
    rigs = [device_rig.Tenant(device, m.program, m.weights, lower) for m in models]
    kernels = [(rigs[0].lowered, kernel) for kernel in rigs[0].lowered.kernels]
    builds, made = native_rig.build_all(kernels, forge)
    for rig in rigs:
        for bound, build in zip(rig.kernels, builds, strict=True):
            assert not build.failures
            bound.plan.adopt(build, made.load)
    assert sum(len(build.recurrences) for build in builds) == 1
    return models, rigs


@pytest.fixture(scope="module")
def forge(tmp_path_factory):
    return tmp_path_factory.mktemp("native")


@pytest.fixture
def calls(monkeypatch):
    """How many launches the generated code had."""
    native_rig.always(monkeypatch, is_native=True)
    found, whole = [], NativeRecurrence.__call__

    def call(self, frame):
        found.append(frame.rows)
        whole(self, frame)

    monkeypatch.setattr(NativeRecurrence, "__call__", call)
    return found


def ask(models, rigs, sizes, seed=0):
    rng = np.random.default_rng(seed)
    count = len(rigs)
    return [
        rigs[i % count].request(models[i % count].request(rows, tokens, rng), rows, tokens)
        for i, (rows, tokens) in enumerate(sizes)
    ]


@pytest.mark.parametrize("tokens", [T, 6], ids=["ragged", "fixed"])
@pytest.mark.parametrize("count", [1, 3], ids=["one", "three"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_interpreter_per_request(case, count, tokens, device, forge, calls):
    models, rigs = tenants(device, case, count, forge, tokens=tokens)
    sizes = [*SIZES, *MANY] if tokens is T else [(rows, 0) for rows, _ in (*SIZES, *MANY)]
    requests = ask(models, rigs, sizes)
    device_rig.run_together(requests)
    for request in requests:
        request.check(TOLERANCE)
    assert calls == [sum(rows for rows, _ in sizes)]


@pytest.mark.parametrize("case", ["lstm", "gru", "tanh"])
def test_the_steps_of_a_row_have_the_same_bits_whatever_runs_beside_it(
    case, device, forge, calls, monkeypatch
):
    def add(bias, x, w):  # without rounding that depends on the size
        return (bias.double() + x.double() @ w.double()).float()

    models, rigs = tenants(device, case, 1, forge)
    monkeypatch.setattr(torch, "addmm", add)
    together = ask(models, rigs, [*SIZES, *MANY])
    device_rig.run_together(together)
    for index in range(len(together)):
        alone = ask(models, rigs, [*SIZES, *MANY])[index]
        device_rig.run_together([alone])
        for key, wanted in alone.outputs().items():
            np.testing.assert_array_equal(together[index].outputs()[key], wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("case", ["lstm", "gru", "relu"])
def test_one_rows_nan_never_reaches_another(case, bad, device, forge, calls):
    models, rigs = tenants(device, case, 1, forge)
    clean = ask(models, rigs, SIZES)
    device_rig.run_together(clean)
    mixed = ask(models, rigs, SIZES)
    rows, tokens = SIZES[0]
    mixed[0] = rigs[0].request({"x": np.full_like(mixed[0].inputs["x"], bad)}, rows, tokens)
    device_rig.run_together(mixed)
    assert not np.isfinite(mixed[0].outputs()["y"]).all()
    for before, after in zip(clean[1:], mixed[1:], strict=True):
        for key, wanted in before.outputs().items():
            np.testing.assert_array_equal(after.outputs()[key], wanted)


@pytest.mark.parametrize(
    ("hidden", "dtype", "why"),
    [(HIDDEN_MAX, "f32", ""), (HIDDEN_MAX + 1, "f32", "over 1024 hidden units"),
     (4, "f64", "not of f32")],
)  # fmt: skip
def test_why_steps_are_not_generated(hidden, dtype, why):
    b = programs.Builder("recurrent", 0, tokens_limit=32)
    x = b.input("x", R, T, 3, dtype=dtype)
    weights = [b.weight(hidden, width, dtype=dtype) for width in (3, hidden)]
    attrs = {"hidden": hidden, "layers": 1, "bidirectional": False, "bias": False}
    y, _ = b.op("rnn", x, *weights, nonlinearity="tanh", **attrs)
    lowered = lower(b.build(y=y).program)
    assert [find_recurrences(lowered, kernel) for kernel in lowered.kernels] == [{0: why}]
