"""Measuring kernels for the cost table, piece by piece."""

from __future__ import annotations

import device_rig
import numpy as np
import programs
import pytest

from coissue.kernels.cost_table import CostTable
from coissue.kernels.cpu.device import gather
from coissue.kernels.cpu.measure import _time_ns, measure
from coissue.kernels.ir import R, T
from coissue.kernels.passes.pipeline import lower


@pytest.mark.parametrize("name", programs.MODELS)
def test_every_kernel_can_be_measured_on_a_grid(name, device):
    model = programs.MODELS[name]()
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    held, table = device.bytes_held, CostTable()
    for index, kernel in enumerate(tenant.lowered.kernels):
        pieces = measure(device, table, tenant.lowered, index, units=(1, 8, 40), segments=(1, 4))
        assert sum(1 for _ in pieces) >= 5
        predicted = [table.predict_ns(kernel.signature, units, 2, 2) for units in (1, 20, 1000)]
        assert predicted == sorted(predicted)
        assert predicted[0] > 0
        joined = [table.predict_ns(kernel.signature, units, 2, 2, True) for units in (1, 20, 1000)]
        assert joined == sorted(joined)
        assert all(more > less for more, less in zip(joined, predicted, strict=True))
    tenant.detach()
    assert device.bytes_held == 0 < held


def test_lookups_in_a_single_row_can_be_measured(device):
    """As token types are in many encoders."""
    b = programs.Builder()
    ids = b.input("ids", R, T, dtype="i64", fill=programs.below(1))
    model = b.build(y=b.op("embedding", b.weight(1, 4), ids))
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    assert list(measure(device, CostTable(), tenant.lowered, 0, units=(8,)))


def test_divisors_can_be_measured(device):
    b = programs.Builder()
    left, right = (b.input(name, R, dtype="i64", fill=programs.below(1)) for name in "ab")
    model = b.build(y=b.op("remainder", left, right))
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    assert list(measure(device, CostTable(), tenant.lowered, 0, units=(8,)))


@pytest.mark.parametrize(("copies", "sets"), [(9, {1, 2, 4, 8}), (4.5, {1, 2, 4, 5}), (0.5, {1})])
def test_weight_sets_are_measured_not_guessed(device, monkeypatch, copies, sets):
    """With as many as there is room for."""
    model = programs.mlp()
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    table, weights = CostTable(), tenant.kernels[0].weights.weights
    held = sum(weight.num_bytes for weight in weights)
    monkeypatch.setattr("coissue.kernels.cpu.measure.TWIN_BYTES_LIMIT", round(copies * held))
    for _ in measure(device, table, tenant.lowered, 0, units=(8,)):
        pass
    signature = tenant.lowered.kernels[0].signature
    assert set(table._entries[signature].points) == sets


def test_a_join_copies_what_lies_apart(device):
    """Of the first kernel's input: 2 and 8 requests of 8 rows in all, timed without a launch."""
    model = programs.mlp()
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    table = CostTable()
    for _ in measure(device, table, tenant.lowered, 0, units=(8,), segments=(1,)):
        pass
    signature = tenant.lowered.kernels[0].signature
    assert {count: set(of) for count, of in table._entries[signature].joins[1].items()} == {
        2: {8}, 8: {8},
    }  # fmt: skip
    copied: list[int] = []

    def watch(segments):
        place = tenant.kernels[0].inputs[0]
        before = segments[0].buffers[place].tensor
        packing = segments[0].kernel.plan.inputs[0][1]
        assert gather(segments, 0, packing).data_ptr() == before.data_ptr()
        assert gather(segments[::-1], 0, packing).data_ptr() != before.data_ptr()
        copied.append(len(segments))

    _time_ns(watch, tenant.lowered, 0, [tenant.kernels[0]] * 2, 8)
    assert set(copied) == {2}


def test_points_beyond_the_bound_are_left_out(device):
    model = programs.mlp()
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    pieces = measure(
        device, CostTable(), tenant.lowered, 0, units=(1, 8, 64), segments=(1,), bound_ns=1
    )
    assert sum(1 for _ in pieces) == 1


def test_measuring_leaves_requests_alone(device):
    model = programs.mlp()
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    one = tenant.request(model.request(2, 0, np.random.default_rng(0)), 2, 0)
    for index in range(len(tenant.kernels)):
        for _ in measure(device, CostTable(), tenant.lowered, index, units=(4,)):
            pass
        device_rig.run_kernel([one], index)
    one.check(2e-4)
