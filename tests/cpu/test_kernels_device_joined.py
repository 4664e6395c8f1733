"""Products of one value as one product on the CPU device: equal answers, and what it holds."""

from __future__ import annotations

import gc
import json

import device_rig
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import lacks
from programs import Builder, R, T

from coissue.kernels.cpu import gemm
from coissue.kernels.cpu.device import CpuDevice
from coissue.kernels.cpu.gemm import GemmTable
from coissue.kernels.passes.link import cut
from coissue.kernels.passes.pipeline import lower

CHOSEN = {"kn": 2, "onednn": 1}


@pytest.fixture(autouse=True)
def _onednn():
    """Only oneDNN runs joined products; builds of torch for other processors may lack it."""
    if "onednn" not in gemm._PACKERS:
        lacks("onednn", "needs torch with oneDNN")


@pytest.fixture
def joining(monkeypatch):
    """Whatever the times are here; products of even width from stacks where weights differ."""
    monkeypatch.setattr(GemmTable, "joins", lambda *_: True)
    monkeypatch.setattr(
        GemmTable, "choose", lambda self, k, n, _: (("onednn", n % 2 == 0),) * len(gemm.ROWS)
    )


def siblings(
    k, widths, *, seed=0, last_seed=None, bias=(True,), layout="nk", tokens=True, between=False
):
    """Products of one value. `between`: each with a reader of that value and of its own behind it,
    which may write where the product is."""
    b = Builder("siblings", seed)
    x = b.op("tanh", b.input("x", *((R, T, k) if tokens else (R, k))))
    made = []
    for i, n in enumerate(widths):
        if i == len(widths) - 1 and last_seed is not None:
            b.rng = np.random.default_rng(last_seed)
        w = b.weight(n, k) if layout == "nk" else b.weight(k, n)
        vector = (b.weight(n),) if bias[i % len(bias)] else ()
        made.append(b.op("linear", x, w, *vector, layout=layout))
        if between:
            total = b.op("sum", x, dims=(2 if tokens else 1,), keepdim=True)
            made[-1] = b.op("mul", b.op("relu", made[-1]), total)
    every = b.op("concat", *made, dim=2 if tokens else 1)
    return b.build(every=every, last=made[-1])


def as_one_kernel(program):
    return cut({"a": lower(program)}, lambda kernel: 1, 1000)["a"]


def make_device(folder):
    return CpuDevice(threads=1, memory_bytes=1 << 30, cache_dir=folder)


def run(tenants, models, sizes, seed=0):
    rng = np.random.default_rng(seed)
    requests = [
        tenant.request(model.request(*size, rng), *size)
        for tenant, model, size in zip(tenants, models, sizes, strict=True)
    ]
    device_rig.run_together(requests)
    for request in requests:
        request.check(2e-4)


def bytes_of(model):
    return sum(array.nbytes for array in model.weights.values())


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    k=st.integers(1, 40),
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    bias=st.sampled_from([(True,), (False,), (True, False)]),
    layout=st.sampled_from(["nk", "kn"]),
    tokens=st.booleans(),
    between=st.booleans(),
    segments=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 7)), min_size=1, max_size=5
    ),
    room=st.booleans(),
    lowering=st.sampled_from([lower, as_one_kernel]),
)
def test_as_the_interpreter(
    joining, tmp_path_factory, k, widths, bias, layout, tokens, between, segments, room, lowering
):
    """Odd sizes, equal, partly equal and own weights, empty segments, with and without room."""
    options = {"bias": bias, "layout": layout, "tokens": tokens, "between": between}
    seeds = [(0, None), (0, 7), (1, None)]
    models = [siblings(k, widths, seed=a, last_seed=b, **options) for a, b in seeds]
    device = make_device(tmp_path_factory.getbasetemp())
    tenants = [device_rig.Tenant(device, m.program, m.weights, lowering) for m in models]
    if not room:
        device.store.limit_bytes = device.bytes_held
    owners = [owner for owner, _, _ in segments]
    sizes = [(rows, length if tokens else 0) for _, rows, length in segments]
    for seed in range(2):  # a stack is made at the second asking
        run([tenants[i] for i in owners], [models[i] for i in owners], sizes, seed)
        assert device.bytes_held <= device.store.limit_bytes


@pytest.mark.parametrize("lowering", [lower, as_one_kernel])
def test_the_joined_form_is_held_in_place_of_one_of_each(joining, lowering, tmp_path):
    model = siblings(16, (8, 8, 8))
    device = make_device(tmp_path)
    tenant = device_rig.Tenant(device, model.program, model.weights, lowering)
    run([tenant], [model], [(2, 3)])
    assert device.bytes_held == 2 * bytes_of(model)  # plain, packed; biases apart and joined
    run([tenant, tenant], [model] * 2, [(2, 3), (1, 5)])
    assert device.bytes_held == 2 * bytes_of(model)
    assert device.bytes_saved == 0
    # What another tenant needs takes the place of both, and the answers stay.
    device.store.limit_bytes = 2 * bytes_of(model)
    device.load_weights({"other": np.zeros(bytes_of(model) // 4, np.float32)})
    held = device.bytes_held
    run([tenant], [model], [(2, 3)])
    assert device.bytes_held == held <= device.store.limit_bytes
    device.drop_weights(["other"])
    run([tenant], [model], [(2, 3)])
    assert device.bytes_held == 2 * bytes_of(model)


def test_a_device_that_its_weights_fill_takes_another_tenant_of_the_same(joining, tmp_path):
    """What is joined asks for room; else the second load, of nothing new, would be refused."""
    model = siblings(16, (8, 8, 8))
    device = CpuDevice(threads=1, memory_bytes=bytes_of(model), cache_dir=tmp_path)
    for _ in range(2):
        tenant = device_rig.Tenant(device, model.program, model.weights, lower)
        run([tenant], [model], [(2, 3)])
        assert device.bytes_held == bytes_of(model)


def test_tenants_share_it_and_the_last_one_frees_it(joining, tmp_path):
    device, models = make_device(tmp_path), [siblings(16, (8, 8, 8)) for _ in range(2)]
    mine, its = (device_rig.Tenant(device, m.program, m.weights, lower) for m in models)
    run([mine, its], models, [(2, 3), (1, 1)])
    assert device.bytes_held == 2 * bytes_of(models[0])
    assert device.bytes_saved == bytes_of(models[0])
    mine.detach()
    run([its], models[:1], [(2, 3)])
    assert device.bytes_held == 2 * bytes_of(models[0])
    its.detach()
    gc.collect()
    assert device.bytes_held == 0


def test_what_shares_a_part_runs_on_when_the_other_goes(joining, tmp_path):
    device = make_device(tmp_path)
    models = [siblings(16, (8, 8, 8)), siblings(16, (8, 8, 8), last_seed=5)]
    tenants = [device_rig.Tenant(device, m.program, m.weights, lower) for m in models]
    for seed in range(2):
        run(tenants, models, [(2, 3), (2, 3)], seed)
    tenants[0].detach()
    gc.collect()
    assert device.bytes_held == 2 * bytes_of(models[1])  # no stack of both either
    run(tenants[1:], models[1:], [(2, 3)])
    assert device.bytes_held == 2 * bytes_of(models[1])


def test_what_they_read_goes_with_the_last_of_them(joining, tmp_path):
    model, device = siblings(16, (8, 8, 8)), make_device(tmp_path)
    plan = device_rig.Tenant(device, model.program, model.weights, as_one_kernel).kernels[0].plan
    (joined,) = (part for part in plan._parts.values() if len(part.writes) == 3)
    assert [slot for slot, _ in joined.reads] == list(joined.kills)


@pytest.mark.parametrize("apart", [1, 3])
def test_only_what_was_measured_to_be_faster_is_joined(apart, tmp_path):
    model = siblings(16, (8, 12))
    shapes = {f"16x{n}": {str(rows): CHOSEN for rows in gemm.ROWS} for n in (8, 12, 20)}
    shapes["16x8+12"] = {"4": {"apart": apart, "joined": 2}}
    stored = {"device": gemm.device_name(1), "ns": shapes}
    (tmp_path / "gemm.json").write_text(json.dumps(stored))
    device = make_device(tmp_path)
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    run([tenant], [model], [(2, 3)])
    assert len(device.store._joined) == (2 if apart == 3 else 0)  # of weights and of biases


def test_it_is_measured_once(tmp_path, monkeypatch):
    path = tmp_path / "gemm.json"
    decided = GemmTable(path, "this").joins(8, (8, 8), False)
    monkeypatch.setattr(gemm, "_time_each", None)
    assert GemmTable(path, "this").joins(8, (8, 8), False) == decided


def test_large_ones_are_not_even_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "_time_each", None)
    monkeypatch.setattr(gemm, "JOINED_ELEMENTS", 8 * 16 - 1)
    assert not GemmTable(tmp_path / "gemm.json", "this").joins(8, (8, 8), False)


def test_never_in_exact_mode(joining, tmp_path):
    model, device = siblings(16, (8, 8)), make_device(tmp_path)
    tenant = device_rig.Tenant(
        device, model.program, model.weights, lambda program: lower(program, exact=True)
    )
    run([tenant], [model], [(2, 3)])
    assert not device.store._joined
    assert device.bytes_held == bytes_of(model)
