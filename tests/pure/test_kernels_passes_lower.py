"""Lowering keeps the meaning of real shapes of models, packed and alone."""

from __future__ import annotations

import numpy as np
import pytest
from packed import run_packed
from programs import MODELS, Builder

from coissue.kernels.interpreter import interpret
from coissue.kernels.ir import R
from coissue.kernels.passes.pipeline import REWRITES, lower
from coissue.kernels.spec import check_program

#: f64 arithmetic rounded to f32 once per op, in another order of summation.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SIZES = ((2, 3), (1, 5), (3, 1), (1, 1))


@pytest.mark.parametrize("name", MODELS)
def test_rewrites_are_legal_and_keep_the_results(name):
    model = MODELS[name]()
    rng = np.random.default_rng(1)
    requests = [model.request(*size, rng) for size in SIZES]
    wanted = [interpret(model.program, request, model.weights) for request in requests]
    program = model.program
    for rewrite in REWRITES:
        program = rewrite(program)
        check_program(program)
        for request, outputs in zip(requests, wanted, strict=True):
            found = interpret(program, request, model.weights)
            for port in outputs:
                np.testing.assert_allclose(found[port], outputs[port], **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_requests_together_are_as_each_alone(name):
    model = MODELS[name]()
    rng = np.random.default_rng(2)
    requests = [model.request(*size, rng) for size in SIZES]
    found = run_packed(lower(model.program), requests, model.weights)
    for request, outputs in zip(requests, found, strict=True):
        alone = interpret(model.program, request, model.weights)
        assert outputs.keys() == alone.keys()
        for port in alone:
            np.testing.assert_allclose(outputs[port], alone[port], **CLOSE)


def test_a_pad_of_no_dim_before_a_convolution_goes():
    b = Builder()
    x = b.op("pad", b.input("x", R, 3, 8), pads=(), value=0.0)
    window = {"stride": (1,), "padding": (1,), "dilation": (1,), "groups": 1}
    model = b.build(y=b.op("conv", x, b.weight(4, 3, 3), **window))
    assert [op.name for op in lower(model.program).program.ops] == ["conv"]
