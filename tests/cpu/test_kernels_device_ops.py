"""The CPU device over segments says what the interpreter says for each request alone, op by op."""

from __future__ import annotations

import device_rig
import numpy as np
import op_cases
import pytest

#: Rows and tokens of the requests of one launch: odd, single, equal lengths apart, an empty one.
MIXES = (((1, 1),), ((3, 5), (1, 7), (2, 5), (1, 1)), ((2, 3), (0, 3), (4, 3)))


#: Each case with equal weights, and with those of two and three tenants if it has any.
RUNS = [
    pytest.param(case, tenants, id=f"{case.label}-weights{tenants}")
    for case in op_cases.CASES
    for tenants in ((1, 2, 3) if case.program().weights else (1,))
]


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize(("case", "tenants"), RUNS)
def test_op_over_segments_equals_interpreter_per_request(case, tenants, device):
    rigs = [device_rig.Tenant(device, case.program(), weights_of(case, i)) for i in range(tenants)]
    for mix in MIXES:
        sizes = [size for size in mix if size[0] in allowed(case, 0)]
        sizes = [size for size in sizes if size[1] in allowed(case, 1)] or [case.sizes[0]]
        requests = [
            rigs[i % tenants].request(inputs_of(case, rows, tokens), rows, tokens)
            for i, (rows, tokens) in enumerate(sizes)
        ]
        device_rig.run_together(requests)
        for request in requests:
            request.check(case.tolerance)
    for rig in rigs:
        rig.detach()
    assert device.bytes_held == 0


def allowed(case, axis: int):
    """Sizes the case says it can be run with; all, if it says nothing special."""
    return range(100) if case.sizes == op_cases.SIZES else {size[axis] for size in case.sizes}


def weights_of(case, variant: int) -> dict[str, np.ndarray]:
    """The case's weights; a variant's floats are other numbers of the same size."""
    rows, tokens = case.sizes[0]
    _, weights = case.feed(case.arrays(rows, tokens), rows, tokens)
    if variant == 0:
        return weights
    return {k: np.flip(a).copy() if a.dtype.kind == "f" else a for k, a in weights.items()}


def inputs_of(case, rows: int, tokens: int) -> dict[str, np.ndarray]:
    inputs, _ = case.feed(case.arrays(max(rows, 1), tokens), max(rows, 1), tokens)
    if rows:
        return inputs
    types = {port.name: case.program().types[port.value] for port in case.program().inputs}
    return {k: np.zeros(types[k].at(0, tokens), a.dtype) for k, a in inputs.items()}
