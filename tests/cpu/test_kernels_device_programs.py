"""Whole programs on the CPU device: requests in one launch equal the interpreter on each alone."""

from __future__ import annotations

import device_rig
import numpy as np
import programs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coissue.kernels.cpu.device import Slice
from coissue.kernels.ir import R
from coissue.kernels.passes.link import cut
from coissue.kernels.passes.pipeline import lower

#: A few f32 roundings in a row against f64; logits are of order one.
TOLERANCE = 2e-4
SIZES = st.tuples(st.integers(0, 4), st.integers(1, 9))


def lower_whole(program):
    """The program as one joined kernel."""
    return cut({"one": lower(program)}, lambda kernel: 1, 10**9)["one"]


def attach(device, name, seed=0, lower=lower):
    model = programs.MODELS[name]() if seed == 0 else reseeded(name, seed)
    return model, device_rig.Tenant(device, model.program, model.weights, lower)


def reseeded(name, seed):
    """The same model with other floats in its weights, as a tenant's own training gives."""
    model, rng = programs.MODELS[name](), np.random.default_rng(seed)
    other = {
        k: rng.permutation(a.ravel()).reshape(a.shape) if a.dtype.kind == "f" else a
        for k, a in model.weights.items()
    }
    return programs.Model(model.program, other, model.fills)


def request(model, tenant, rows, tokens, seed):
    made = model.request(max(rows, 1), tokens, np.random.default_rng(seed))
    types = {port.name: model.program.types[port.value] for port in model.program.inputs}
    if rows == 0:
        made = {k: np.zeros(types[k].at(0, tokens), a.dtype) for k, a in made.items()}
    return tenant.request(made, rows, tokens)


@pytest.mark.parametrize("name", programs.MODELS)
@settings(
    max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_requests_of_two_tenants_together_equal_each_alone(name, device, data):
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=6))
    owners = data.draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))
    how = data.draw(st.sampled_from([lower, lower_whole]))
    attached = [attach(device, name, lower=how), attach(device, name, 5, lower=how)]
    has_tokens = attached[0][0].program.tokens_limit > 0
    requests = [
        request(*attached[owner], rows, tokens if has_tokens else 0, seed=i)
        for i, (owner, (rows, tokens)) in enumerate(zip(owners, sizes, strict=True))
    ]
    try:
        device_rig.run_together(requests)
        for one in requests:
            one.check(TOLERANCE)
    finally:
        for _, tenant in attached:
            tenant.detach()
    assert device.bytes_held == 0


@pytest.mark.parametrize("name", programs.MODELS)
def test_nan_of_one_tenant_stays_with_it(name, device):
    """The poisoned request shares every launch; the others' answers are what they were, but for the
    order in which a library adds, which goes by addresses: bits are kept in exact mode."""
    (model, good), (_, bad) = attach(device, name), attach(device, name, seed=5)
    tokens = 5 if model.program.tokens_limit else 0

    def answers(poison):
        mixed = [
            request(model, t, r, tokens, i)
            for i, (t, r) in enumerate(((good, 2), (bad, 3), (good, 1)))
        ]
        for array in mixed[1].inputs.values():
            if poison and array.dtype.kind == "f":
                array[...] = np.nan
        device_rig.run_together(mixed)
        return mixed[0].outputs(), mixed[2].outputs()

    for clean, beside_nan in zip(answers(poison=False), answers(poison=True), strict=True):
        for key, wanted in clean.items():
            assert np.isfinite(wanted).all()
            np.testing.assert_allclose(beside_nan[key], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 5])
def test_poisoned_weights_stay_with_their_tenant(device, seed):
    model, good = attach(device, "bert")
    poisoned = {k: a * np.nan if a.dtype.kind == "f" else a for k, a in model.weights.items()}
    bad = device_rig.Tenant(device, model.program, poisoned, lower)
    requests = [request(model, t, 2, 3 + seed, i) for i, t in enumerate((bad, good, bad, good))]
    device_rig.run_together(requests)
    for one in (requests[1], requests[3]):
        one.check(TOLERANCE)
    assert np.isnan(requests[0].outputs()["y"]).all()


def test_requests_that_travel_together_are_never_copied(device, monkeypatch):
    model, tenant = attach(device, "mlp")
    requests = [request(model, tenant, rows, 0, rows) for rows in (2, 1, 3)]
    device_rig.run_kernel(requests, 0)
    made = [one.buffers[one.segment(0).kernel.outputs[0]] for one in requests]
    assert all(isinstance(own, Slice) for own in made)
    assert len({own.tensor.data_ptr() for own in made}) == 1

    monkeypatch.setattr(torch, "cat", None)  # a copy would call it
    for index in range(1, len(tenant.kernels)):
        device_rig.run_kernel(requests[::-1], index)
    for one in requests:
        one.check(TOLERANCE)


def test_requests_that_meet_on_the_way_are_joined(device):
    model, tenant = attach(device, "mlp")
    early, late = request(model, tenant, 2, 0, 1), request(model, tenant, 3, 0, 2)
    device_rig.run_kernel([early], 0)
    device_rig.run_kernel([late], 0)
    for index in range(1, len(tenant.kernels)):
        device_rig.run_kernel([late, early], index)
    early.check(TOLERANCE)
    late.check(TOLERANCE)


def test_values_are_dropped_once_nothing_reads_them(device):
    model, tenant = attach(device, "bert")
    one = request(model, tenant, 2, 4, 0)
    device_rig.run_together([one])
    assert set(one.buffers) == {port.value for port in tenant.lowered.program.outputs}


def test_failed_launch_changes_no_buffers(device):
    model, tenant = attach(device, "bert")
    good, bad = request(model, tenant, 1, 4, 0), request(model, tenant, 1, 4, 1)
    bad.inputs["ids"][...] = 10_000
    bad = tenant.request(bad.inputs, 1, 4)
    lookups = (
        i for i, k in enumerate(tenant.lowered.kernels) if bad.buffers.keys() & set(k.inputs)
    )
    failing = next(
        i for i in lookups if any(op.name == "embedding" for op in tenant.lowered.kernels[i].ops)
    )
    for index in range(failing):
        device_rig.run_kernel([good, bad], index)
    before = [dict(one.buffers) for one in (good, bad)]
    with pytest.raises(IndexError):
        device_rig.run_kernel([good, bad], failing)
    assert [dict(one.buffers) for one in (good, bad)] == before
    for index in range(failing, len(tenant.kernels)):
        device_rig.run_kernel([good], index)
    good.check(TOLERANCE)


def test_plans_are_shared_by_signature(device):
    attach(device, "bert")
    plans = len(device.plans)
    attach(device, "bert", seed=5)
    assert len(device.plans) == plans


@pytest.mark.parametrize("of_weights", [True, False])
def test_an_opaque_op_that_makes_another_shape_than_declared_is_an_error(of_weights, device):
    b = programs.Builder()
    x = b.input("x", R, 4)
    source = b.weight(4) if of_weights else x
    attrs = {"target": "aten.tan.default", "args": '[[{"input": 0}], {}]'}
    short = b.op("opaque", source, out=(1,) if of_weights else (R, 1), **attrs)
    model = b.build(y=b.op("add", x, short))

    def run():
        tenant = device_rig.Tenant(device, model.program, model.weights, lower)
        device_rig.run_together([request(model, tenant, 2, 0, 0)])

    with pytest.raises(ValueError, match="but the program declares"):
        run()


def test_a_model_may_answer_with_a_weight(device):
    b = programs.Builder()
    x, w = b.input("x", R, 4), b.weight(3, 4)
    model = b.build(y=b.op("relu", x), table=b.op("identity", w), same=w)
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    one = request(model, tenant, 2, 0, 0)
    device_rig.run_together([one])
    one.check(0.0)
