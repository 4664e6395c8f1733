"""Every op of the op table, lowered and run for several requests at once, is as each alone."""

from __future__ import annotations

import numpy as np
import pytest
from op_cases import CASES
from packed import run_packed

from coissue.kernels.interpreter import interpret
from coissue.kernels.passes.pipeline import lower


@pytest.mark.parametrize("case", [c for c in CASES if c.op != "opaque"], ids=lambda c: c.label)
def test_the_coalescing_law_holds_for_the_op(case):
    requests, weights = [], {}
    for rows, tokens in case.sizes:
        inputs, weights = case.feed(case.arrays(rows, tokens), rows, tokens)
        requests.append(inputs)
    program = case.program()
    lowered = lower(program)
    for request, found in zip(requests, run_packed(lowered, requests, weights), strict=True):
        alone = interpret(program, request, weights)
        assert found.keys() == alone.keys()
        for name in alone:
            np.testing.assert_allclose(found[name], alone[name], rtol=1e-6, atol=1e-6)
