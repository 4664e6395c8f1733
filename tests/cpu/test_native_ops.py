"""Every op that can be stitched, as generated code through the device: as the interpreter says."""

from __future__ import annotations

import device_rig
import native_rig
import op_cases
import pytest
from test_kernels_device_ops import MIXES, allowed, inputs_of, weights_of

from coissue.kernels.passes.fuse import fuse
from coissue.kernels.passes.layouts import prove
from coissue.kernels.stitch.runs import find_runs


def lowered_of(case):
    program = case.program()
    return fuse(program, *prove(program))


def stitched_cases():
    found = {}
    for case in op_cases.CASES:
        lowered = lowered_of(case)
        if any(find_runs(lowered, kernel) for kernel in lowered.kernels):
            found[case.label] = case
    return found


CASES = stitched_cases()
CASES.pop("relu-i64-10", 0)


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Label -> builds of the kernels of that case."""
    owners, kernels = [], []
    for label, case in CASES.items():
        lowered = lowered_of(case)
        owners += [label] * len(lowered.kernels)
        kernels += [(lowered, kernel) for kernel in lowered.kernels]
    made, forge = native_rig.build_all(kernels, tmp_path_factory.mktemp("native"))
    found = {label: [] for label in CASES}
    for label, build in zip(owners, made, strict=True):
        found[label].append(build)
    yield found, forge.load
    forge.close()


RUNS = [
    pytest.param(label, tenants, id=f"{label}-weights{tenants}")
    for label, case in CASES.items()
    for tenants in ((1, 3) if case.program().weights else (1,))
]


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize(("label", "tenants"), RUNS)
def test_op_as_generated_code_equals_interpreter_per_request(
    label, tenants, device, builds, monkeypatch
):
    case = CASES[label]
    native_rig.always(monkeypatch, is_native=True)
    rigs = [device_rig.Tenant(device, case.program(), weights_of(case, i)) for i in range(tenants)]
    found, load = builds
    for bound, build in zip(rigs[0].kernels, found[label], strict=True):
        bound.plan.adopt(build, load)
    for mix in MIXES:
        sizes = [size for size in mix if size[0] in allowed(case, 0)]
        sizes = [size for size in sizes if size[1] in allowed(case, 1)] or [case.sizes[0]]
        requests = [
            rigs[i % tenants].request(inputs_of(case, rows, tokens), rows, tokens)
            for i, (rows, tokens) in enumerate(sizes)
        ]
        device_rig.run_together(requests)
        for request in requests:
            request.check(max(case.tolerance, 2e-6) if case.tolerance else 0)
