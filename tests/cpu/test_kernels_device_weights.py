"""Weights on the CPU device: sharing, limits, forms; GEMM providers agree with each other."""

from __future__ import annotations

import gc
import json
import weakref

import device_rig
import numpy as np
import programs
import pytest
import torch

from coissue.kernels.cpu import gemm
from coissue.kernels.cpu.gemm import Gemm, GemmTable, device_name
from coissue.kernels.cpu.store import DeviceMemoryError, WeightStore
from coissue.kernels.passes.pipeline import lower


def matrix(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_equal_content_is_held_once_and_counted_as_saved():
    store = WeightStore(10_000)
    store.load({"a": matrix(10, 10)})
    store.load({"a": matrix(10, 10), "b": matrix(5, 5)})
    assert (store.bytes_held, store.bytes_saved) == (500, 400)
    store.drop(["a"])
    assert (store.bytes_held, store.bytes_saved) == (500, 0)
    store.drop(["a", "b"])
    assert (store.bytes_held, len(store)) == (0, 0)


def test_over_the_limit_nothing_is_loaded():
    store = WeightStore(500)
    store.load({"a": matrix(10, 10)})
    with pytest.raises(
        DeviceMemoryError, match=r"need 400 bytes, but the device has 100 left of its 500"
    ):
        store.load({"a": matrix(10, 10), "b": matrix(10, 10)})
    assert (store.bytes_held, store.bytes_saved, len(store)) == (400, 0, 1)


def test_derived_forms_count_and_make_room_for_weights():
    store = WeightStore(1000)
    store.load({"a": matrix(10, 10)})
    packed = store.derive(store["a"], "mkl", lambda: torch.ones(10, 10))
    assert packed is not None
    assert store.bytes_held == 800
    assert store.derive(store["a"], "onednn", lambda: torch.ones(10, 10)) is None
    store.load({"b": matrix(10, 10, seed=1)})
    assert store.bytes_held == 800


def test_a_matrix_for_gemms_is_turned_not_copied():
    store = WeightStore(1000)
    store.load({"a": matrix(10, 20)})
    assert store["a"].as_kn("nk").is_contiguous()
    assert store.bytes_held == 800
    np.testing.assert_array_equal(store["a"].plain, matrix(10, 20))


def test_what_a_tenant_held_is_freed_when_it_leaves(device):
    model = programs.mlp()
    tenant = device_rig.Tenant(device, model.program, model.weights, lower)
    held = [weakref.ref(kernel.weights) for kernel in tenant.kernels]
    device_rig.run_together([tenant.request(model.request(2, 0, np.random.default_rng(0)), 2, 0)])
    tenant.detach()
    gc.collect()
    assert device.bytes_held == 0
    assert [ref() for ref in held] == [None] * len(held)


def test_equal_weights_of_two_tenants_are_one_weight_set(device):
    model = programs.mlp()
    first, second = (
        device_rig.Tenant(device, model.program, model.weights, lower) for _ in range(2)
    )
    for mine, its in zip(first.kernels, second.kernels, strict=True):
        assert mine.weights is its.weights
    assert device.bytes_saved == sum(array.nbytes for array in model.weights.values())


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("provider", ["kn", *gemm._PACKERS, "stack"])
def test_providers_agree(provider, bias, layout, tmp_path):
    store, k, n = WeightStore(1 << 24), 33, 17
    store.load({name: matrix(k, n, seed=i) for i, name in enumerate("abc")})
    store.load({f"{name}b": matrix(n, seed=i) for i, name in enumerate("abc")})
    if layout == "nk":
        store = WeightStore(1 << 24)
        store.load({name: matrix(k, n, seed=i).T for i, name in enumerate("abc")})
        store.load({f"{name}b": matrix(n, seed=i) for i, name in enumerate("abc")})
    chosen = {"kn": {}, "stack": {"kn": 2, "stack": 1}}.get(provider, {"kn": 2, provider: 1})
    path = tmp_path / "gemm.json"
    rows = {str(rows): chosen or {"kn": 1} for rows in gemm.ROWS}
    path.write_text(json.dumps({"device": device_name(1), "ns": {f"{k}x{n}": rows}}))
    multiply = Gemm(store, GemmTable(path, device_name(1)), k, (n,), layout)
    for count in (0, 1, 5, 40, 300):
        parts = [(store[name], store[f"{name}b"] if bias else None, count) for name in "abc"]
        x = torch.from_numpy(matrix(3 * count, k, seed=9))
        wanted = np.concatenate([
            x[i * count : (i + 1) * count].numpy().astype(np.float64) @ matrix(k, n, seed=i)
            + (matrix(n, seed=i) if bias else 0)
            for i in range(3)
        ])  # fmt: skip
        for _ in range(2):  # a stack is made at the second asking
            np.testing.assert_allclose(multiply.each(x, parts), wanted, rtol=1e-4, atol=1e-4)
        if count > 1:  # no row reaches another
            x[0] = torch.nan
            assert multiply.each(x, parts)[1:].isfinite().all()
            x[0] = 0.0
            wanted[0] = matrix(n) if bias else 0.0
        alone = multiply.one(x[:count], store["a"], store["ab"] if bias else None)
        np.testing.assert_allclose(alone, wanted[:count], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("provider", ["kn", *gemm._PACKERS, "stack"])
def test_a_matrix_read_both_ways_round_is_not_mixed_up(provider, tmp_path):
    """As by an autoencoder with tied weights: x @ w.T on the way in, h @ w on the way out."""
    store, path = WeightStore(1 << 24), tmp_path / "gemm.json"
    weights = {name: matrix(16, 16, seed=i) for i, name in enumerate("ab")}
    store.load(weights)
    chosen = {"kn": 2, provider: 1} if provider != "kn" else {"kn": 1}
    rows = {str(rows): chosen for rows in gemm.ROWS}
    path.write_text(json.dumps({"device": device_name(1), "ns": {"16x16": rows}}))
    table, x = GemmTable(path, device_name(1)), matrix(6, 16, seed=9)
    for _ in range(2):  # a stack is made at the second asking
        for layout in ("nk", "kn"):
            multiply = Gemm(store, table, 16, (16,), layout)
            turned = {k: w.T if layout == "nk" else w for k, w in weights.items()}
            alone = multiply.one(torch.from_numpy(x), store["a"], None)
            np.testing.assert_allclose(alone, x @ turned["a"], rtol=1e-4, atol=1e-4)
            both = multiply.each(torch.from_numpy(x), [(store[name], None, 3) for name in "ab"])
            wanted = np.concatenate([x[:3] @ turned["a"], x[3:] @ turned["b"]])
            np.testing.assert_allclose(both, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("limit", "is_stacked"), [(2 * 16 * 16 * 4, True), (2047, False)])
def test_stacks_larger_than_the_cache_are_not_made(limit, is_stacked, tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "STACK_BYTES", limit)
    store, path = WeightStore(1 << 24), tmp_path / "gemm.json"
    store.load({name: matrix(16, 16, seed=i) for i, name in enumerate("ab")})
    rows = {str(rows): {"kn": 2, "stack": 1} for rows in gemm.ROWS}
    path.write_text(json.dumps({"device": device_name(1), "ns": {"16x16": rows}}))
    multiply = Gemm(store, GemmTable(path, device_name(1)), 16, (16,), "kn")
    x = matrix(6, 16, seed=9)
    for _ in range(3):
        found = multiply.each(torch.from_numpy(x), [(store[name], None, 3) for name in "ab"])
    own = [matrix(16, 16, seed=i) for i in range(2)]
    wanted = np.concatenate([x[:3] @ own[0], x[3:] @ own[1]])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert (store._stack_bytes() > 0) == is_stacked


def test_large_weights_are_chosen_for_by_a_few_rows_too(tmp_path, monkeypatch):
    """One row says nothing of what joined requests cost: `kn` may take twice as long there."""
    took = {1: {"kn": 7, "mkl": 8, "onednn": 8}, 4: {"kn": 14, "mkl": 8, "onednn": 9}}
    asked = []

    def time_each(calls):
        rows = calls["kn"].args[1].shape[0]
        asked.append(rows)
        return {name: took[rows][name] for name in calls}

    monkeypatch.setattr(gemm, "_time_each", time_each)
    monkeypatch.setattr(gemm, "STACK_ELEMENTS", 0)
    monkeypatch.setattr(gemm, "SHAPE_NS", 0)  # as where one call takes longer
    chosen = GemmTable(tmp_path / "gemm.json", "this").choose(8, 8)
    assert sorted(asked) == [1, 4]
    assert {name for name, _ in chosen} == ({"mkl"} if "mkl" in gemm._PACKERS else {"kn"})


@pytest.mark.parametrize("is_tokens", [False, True])
def test_one_row_does_not_choose_for_tokens(is_tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "_PACKERS", {"mkl": None})  # chosen, not called
    path, times = tmp_path / "gemm.json", {rows: {"kn": 10, "mkl": 8} for rows in gemm.ROWS}
    times[1] = {"kn": 1, "mkl": 9}
    path.write_text(json.dumps({"device": "this", "ns": {"8x8": times}}))
    chosen = GemmTable(path, "this").choose(8, 8, is_tokens)
    assert {name for name, _ in chosen} == ({"mkl"} if is_tokens else {"kn"})


@pytest.mark.parametrize(
    "stored",
    [
        "", ', "ns": null', ', "ns": []', ', "ns": {"6x6": []}', ', "ns": {"6x6": {"1": 5}}',
        ', "ns": {"6x6": {"4": {"mkl": 3}, "1": {}}}', ', "ns": {"6x6": {"4": {"kn": "3"}}}',
        ', "ns": ' + '{"6x6": ' * 50_000,
    ],
)  # fmt: skip
def test_a_damaged_gemm_table_is_measured_anew(tmp_path, stored):
    path = tmp_path / "gemm.json"
    path.write_text(f'{{"device": "this"{stored}}}')
    assert GemmTable(path, "this").choose(6, 6)
    assert GemmTable(path, "this")._ns["6x6"]


def test_gemm_table_is_measured_once_and_kept(tmp_path, monkeypatch):
    path = tmp_path / "gemm.json"
    monkeypatch.setattr(gemm, "SHAPE_NS", 0)
    GemmTable(path, "this").choose(8, 8)
    assert set(json.loads(path.read_text())["ns"]["8x8"]) == {"1", "4"}
    monkeypatch.setattr(gemm, "SHAPE_NS", 10**12)  # the next process measures the rest
    GemmTable(path, "this").choose(8, 8)
    measured = json.loads(path.read_text())["ns"]["8x8"]
    assert set(measured) == {str(rows) for rows in gemm.ROWS}
    monkeypatch.setattr(gemm, "_measure", None)
    GemmTable(path, "this").choose(8, 8)
    assert json.loads(path.read_text())["ns"]["8x8"] == measured
    with pytest.raises(TypeError):  # another device measures for itself
        GemmTable(path, "other").choose(8, 8)
