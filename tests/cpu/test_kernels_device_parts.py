"""Launches over part of a request's rows: the parts in order leave what the whole run leaves."""

from __future__ import annotations

import dataclasses

import device_rig
import exact_rig
import numpy as np
import programs
import pytest
import test_capture_models as capturing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coissue.kernels.cpu.device import CpuDevice, Slice
from coissue.kernels.ir import R
from coissue.kernels.passes.link import cut
from coissue.kernels.passes.pipeline import lower

#: As in test_kernels_device_programs.
TOLERANCE = 2e-4
CUTS = ((1,), (1, 2), (3, 5, 6), range(9))


def lower_whole(program):
    return cut({"one": lower(program)}, lambda kernel: 1, 10**9)["one"]


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    return CpuDevice(threads=1, memory_bytes=1 << 29, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", [name for name in capturing.MODELS if name != "mobilenet"])
def test_captured_models_in_parts_equal_the_whole(name, device):
    artifact, draw = capturing.captured(name), capturing.draw_inputs(name)
    tokens = 5 if artifact.program.tokens_limit else 0
    inputs = draw(7, tokens, 0)
    for lowering in (lower, exact_rig.lower_exact):
        tenant = device_rig.Tenant(device, artifact.program, artifact.weights, lowering)
        whole = exact_rig.bits(exact_rig.run_alone(tenant, inputs, 7, tokens))
        for cuts in CUTS:
            one = tenant.request(inputs, 7, tokens)
            partners = [tenant.request(draw(rows, tokens, rows), rows, tokens) for rows in (1, 3)]
            exact_rig.run_in_parts(one, cuts, partners)
            for request in (one, *partners):
                request.check(TOLERANCE)
            if lowering is exact_rig.lower_exact:
                assert exact_rig.bits(one.outputs()) == whole
        tenant.detach()


@pytest.mark.parametrize("name", programs.MODELS)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 21), tokens=st.integers(1, 9), seed=st.integers(0, 99), data=st.data(),
    cuts=st.lists(st.integers(0, 21), max_size=4),
)  # fmt: skip
def test_any_parts_beside_any_partners_equal_the_whole(
    name, device, rows, tokens, seed, data, cuts
):
    model = programs.MODELS[name]()
    if not model.program.tokens_limit:
        tokens = 0
    ways = [lower, lower_whole, exact_rig.lower_exact, exact_rig.lower_exact_whole]
    lowering = data.draw(st.sampled_from(ways))
    tenant = device_rig.Tenant(device, model.program, model.weights, lowering)
    rng = np.random.default_rng(seed)
    one = tenant.request(model.request(rows, tokens, rng), rows, tokens)
    partners = [
        tenant.request(model.request(size, tokens, rng), size, tokens)
        for size in data.draw(st.lists(st.integers(1, 5), max_size=2))
    ]
    exact_rig.run_in_parts(one, cuts, partners)
    for request in (one, *partners):
        request.check(TOLERANCE)
    if lowering in ways[2:]:
        whole = exact_rig.run_alone(tenant, one.inputs, rows, tokens)
        assert exact_rig.bits(one.outputs()) == exact_rig.bits(whole)
    assert set(one.buffers) == {port.value for port in tenant.lowered.program.outputs}
    tenant.detach()


def test_parts_of_several_requests_share_launches(device):
    """Two tenants' requests, split at different rows, and a whole one between them."""
    model = programs.bert()
    models = (model, programs.bert(seed=3))
    tenants = [device_rig.Tenant(device, m.program, m.weights, lower) for m in models]
    rng = np.random.default_rng(0)
    a, b, c = (
        tenants[owner].request(model.request(rows, tokens, rng), rows, tokens)
        for owner, rows, tokens in ((0, 7, 3), (1, 5, 9), (0, 2, 3))
    )
    for index in range(len(tenants[0].kernels)):
        segment = exact_rig.part
        device.run([segment(a, index, 0, 3), c.segment(index), segment(b, index, 0, 1)])
        device.run([segment(b, index, 1, 4), segment(a, index, 3, 7)])
        device.run([segment(b, index, 4, 5)])
    for one in (a, b, c):
        one.check(TOLERANCE)
    for tenant in tenants:
        tenant.detach()


def test_a_failed_part_can_be_run_again(device):
    model = programs.bert()
    tenant = device_rig.Tenant(device, model.program, model.weights, lower_whole)
    inputs = model.request(5, 4, np.random.default_rng(0))
    good = {key: array.copy() for key, array in inputs.items()}
    inputs["ids"][3:] = 10_000
    one = tenant.request(inputs, 5, 4)
    with pytest.raises(IndexError):
        device.run([exact_rig.part(one, 0, 0, 4)])
    device.run([exact_rig.part(one, 0, 0, 2)])
    kept = set(one.buffers)
    with pytest.raises(IndexError):
        device.run([exact_rig.part(one, 0, 2, 5)])
    assert set(one.buffers) == kept
    ids = next(port.value for port in model.program.inputs if port.name == "ids")
    repaired = tenant.request(good, 5, 4)
    one.buffers[ids], one.inputs = repaired.buffers[ids], good
    device.run([exact_rig.part(one, 0, 2, 5)])
    one.check(TOLERANCE)
    tenant.detach()


def test_only_the_last_part_drops(device):
    model = programs.mlp()
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    one = tenant.request(model.request(4, 0, np.random.default_rng(0)), 4, 0)
    (given,) = one.buffers
    device.run([exact_rig.part(one, 0, 0, 3)])
    assert given in one.buffers
    device.run([exact_rig.part(one, 0, 3, 4)])
    assert given not in one.buffers
    (made,) = one.buffers.values()
    assert isinstance(made, Slice)
    assert (made.start, made.stop) == (0, 4)
    tenant.detach()


@pytest.mark.parametrize("span", [(0, 0), (2, 1), (-1, 2), (3, 5)])
def test_rows_that_are_no_part_are_refused(span, device):
    model = programs.mlp()
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    one = tenant.request(model.request(4, 0, np.random.default_rng(0)), 4, 0)
    with pytest.raises(ValueError, match="no part"):
        device.run([exact_rig.part(one, 0, *span)])
    tenant.detach()


def test_kernels_that_mix_rows_are_not_split(device):
    model = programs.batch_statistics()
    tenant = device_rig.Tenant(device, model.program, model.weights, lower_whole)
    one = tenant.request(model.request(4, 0, np.random.default_rng(0)), 4, 0)
    assert not tenant.kernels[0].splittable
    with pytest.raises(ValueError, match="no part"):
        device.run([exact_rig.part(one, 0, 0, 2)])
    device.run([dataclasses.replace(one.segment(0), part=(0, 4))])  # all rows are the whole
    one.check(TOLERANCE)
    tenant.detach()


def test_all_kernels_of_common_models_are_splittable():
    """Positions and token types, which no row has a part in, do not stand in the way."""
    for name in ("mlp", "bert", "bert_mean", "gpt", "cnn", "lstm", "gru", "dlrm"):
        for way in (lower, lower_whole):
            lowered = way(programs.MODELS[name]().program)
            assert all(kernel.splittable for kernel in lowered.kernels), name


def test_what_depends_on_a_rows_number_or_on_other_rows_is_not_splittable():
    def kernels(out):
        b = programs.Builder()
        x = b.input("x", R, 4)
        return lower_whole(b.build(y=out(b, x)).program).kernels

    def numbered(b, x):
        number = b.op("cast", b.op("reshape", b.arange(R), out=(R, 1)), dtype="f32")
        return b.op("add", x, number)

    def mixed(b, x):
        return b.op("sub", x, b.op("mean", x, dims=(0,), keepdim=True))

    def plain(b, x):
        return b.op("relu", x)

    assert [[k.splittable for k in kernels(out)] for out in (numbered, mixed, plain)] == [
        [False], [False], [True]
    ]  # fmt: skip


def test_a_needed_state_of_a_recurrence_keeps_rows_together(device):
    """The cell state is kept per request: (layers, R, hidden)."""
    b = programs.Builder("state")
    x = b.input("x", R, 4, 3)
    sizes = ((16, 3), (16, 4), (16,), (16,))
    attrs = {"hidden": 4, "layers": 1, "bidirectional": False, "bias": True}
    y, _, state = b.op("lstm", x, *(b.weight(*size) for size in sizes), **attrs)
    model = b.build(y=y, state=state)
    tenant = device_rig.Tenant(device, model.program, model.weights, exact_rig.lower_exact)
    assert not any(kernel.splittable for kernel in tenant.kernels)
    request = model.request(3, 0, np.random.default_rng(0))
    one, partner = tenant.request(request, 3, 0), tenant.request(request, 3, 0)
    device_rig.run_together([one, partner])
    one.check(TOLERANCE)
    assert exact_rig.bits(one.outputs()) == exact_rig.bits(partner.outputs())
    tenant.detach()
