"""Exact mode: an answer has the same bits alone and in any company, order, memory and size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import device_rig
import exact_rig
import numpy as np
import op_cases
import programs
import pytest
import test_capture_models as capturing
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coissue.kernels.cpu import exact
from coissue.kernels.cpu.device import CpuDevice
from coissue.kernels.ir import R, T
from coissue.kernels.passes.pipeline import lower
from coissue.kernels.spec import check_program

SIZES = ((1, 1), (3, 5), (2, 7), (13, 5), (1, 5), (7, 1))
PROPERTY = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
#: Rows of order one, and some that reach every block size.
DRAWN = st.lists(
    st.tuples(st.sampled_from((1, 2, 3, 5, 8, 17, 40, 64)), st.integers(1, 9)),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """One for all, so that a block is tried once."""
    return CpuDevice(threads=1, memory_bytes=1 << 29, cache_dir=tmp_path_factory.mktemp("cache"))


def check_company(requests, alone, order, shift=0):
    """All in one launch per kernel, in this order and off alignment: each as alone."""
    chosen = [requests[index]() for index in order]
    for place, request in enumerate(chosen):
        exact_rig.move(request, (place + shift) % 7)
    device_rig.run_together(chosen)
    for index, request in zip(order, chosen, strict=True):
        assert exact_rig.bits(request.outputs()) == alone[index]


def answer(make):
    request = make()
    device_rig.run_together([request])
    return exact_rig.bits(request.outputs())


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("case", op_cases.CASES, ids=lambda case: case.label)
def test_every_op_keeps_its_bits(case, device):
    sizes = SIZES if case.sizes == op_cases.SIZES else case.sizes
    weights = case.feed(case.arrays(*sizes[0]), *sizes[0])[1]
    tenant = device_rig.Tenant(device, case.program(), weights, exact_rig.fuse_exact)
    requests = [
        lambda size=size: tenant.request(case.feed(case.arrays(*size), *size)[0], *size)
        for size in sizes
    ]
    alone = [answer(make) for make in requests]
    for seed in range(3):
        check_company(requests, alone, np.random.default_rng(seed).permutation(len(sizes)), seed)
    tenant.detach()


def attached(device, program, weights, lowering):
    """Two tenants of one program, with other floats in their weights."""
    rng = np.random.default_rng(5)
    other = {
        k: rng.permutation(a.ravel()).reshape(a.shape) if a.dtype.kind == "f" else a
        for k, a in weights.items()
    }
    return [device_rig.Tenant(device, program, w, lowering) for w in (weights, other)]


def check_everything(tenants, draw, sizes, owners, seed):
    """`draw(rows, tokens, seed)` gives inputs. Any order, and rows one by one."""
    rng = np.random.default_rng(seed)
    requests, alone = [], []
    for i, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        inputs = draw(*size, i)
        requests.append(lambda t=tenants[owner], inputs=inputs, s=size: t.request(inputs, *s))
        alone.append(answer(requests[-1]))
    for _ in range(2):
        check_company(requests, alone, rng.permutation(len(sizes)), seed)
    if exact_rig.is_separable(tenants[0].lowered):
        rows = min(sizes[0][0], 9)
        whole = exact_rig.run_alone(tenants[owners[0]], draw(*sizes[0], 0), *sizes[0])
        check_rows_one_by_one(tenants[owners[0]], draw(*sizes[0], 0), sizes[0], whole, rows)


def check_rows_one_by_one(tenant, inputs, size, whole, rows):
    program = tenant.program
    for row in range(rows):
        single = exact_rig.run_alone(tenant, exact_rig.row_of(program, inputs, row), 1, size[1])
        want = {
            port.name: whole[port.name]
            .reshape(size[0], -1)[row : row + 1]
            .reshape(program.types[port.value].at(1, size[1]))
            for port in program.outputs
        }
        assert exact_rig.bits(single) == exact_rig.bits(want)


@pytest.mark.parametrize("name", programs.MODELS)
@PROPERTY
@given(data=st.data())
def test_programs_keep_their_bits_in_any_company(name, device, data):
    model = programs.MODELS[name]()
    sizes = data.draw(DRAWN)
    if not model.program.tokens_limit:
        sizes = [(rows, 0) for rows, _ in sizes]
    owners = data.draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))
    lowering = data.draw(st.sampled_from([exact_rig.lower_exact, exact_rig.lower_exact_whole]))
    tenants = attached(device, model.program, model.weights, lowering)

    def draw(rows, tokens, seed):
        return model.request(rows, tokens, np.random.default_rng(seed))

    check_everything(tenants, draw, sizes, owners, data.draw(st.integers(0, 99)))
    for tenant in tenants:
        tenant.detach()


@pytest.mark.parametrize("name", [name for name in capturing.MODELS if name != "mobilenet"])
def test_captured_models_keep_their_bits_in_any_company(name, device):
    artifact = capturing.captured(name)
    draw = capturing.draw_inputs(name)
    tenants = attached(device, artifact.program, artifact.weights, exact_rig.lower_exact)
    sizes = [(1, 3), (4, 9), (1, 3), (16, 2), (3, 9), (7, 1)]
    if not artifact.program.tokens_limit:
        sizes = [(rows, 0) for rows, _ in sizes]
    check_everything(tenants, draw, sizes, [0, 1, 0, 1, 1, 0], seed=3)
    for tenant in tenants:
        tenant.detach()


# --- random programs ------------------------------------------------------------------------------

POINTWISE = ("sigmoid", "silu", "tanh", "exp", "erf", "mish", "softplus", "sin", "relu", "abs")


def grow(b, x, other, kind, pick):
    """One float op on x: (R, T, n), with `other` of the same rows; None if it does not fit."""
    width = b.types[x].shape[-1].scale
    if kind == 0:
        return b.linear(x, 1 + pick % 37)
    if kind == 1:
        return b.op(POINTWISE[pick % len(POINTWISE)], x)
    if kind == 2:
        return b.op("gelu", x, approximate=("none", "tanh")[pick % 2])
    if kind == 3:
        return b.norm(x)
    if kind == 4:
        return b.op("softmax", x, dim=2)
    if kind == 5:
        mean = b.op("mean", x, dims=(1 + pick % 2,), keepdim=True)
        return b.op("sub", x, mean)
    if kind == 6:
        return b.op("concat", x, other, dim=2) if width < 80 else None
    if kind == 7:
        return b.op("mul", x, b.weight(width))
    if kind == 8:
        return b.op("cumsum", x, dim=1 + pick % 2)
    heads = b.op("reshape", x, out=(R, T, 1, width))
    attrs = {"causal": bool(pick & 1), "scale": 0.4, "mask": "none", "layout": "bshd"}
    y = b.op("attention", heads, heads, heads, **attrs)
    return b.op("reshape", y, out=(R, T, width))


def build(steps):
    b = programs.Builder("random", tokens_limit=16)
    x = first = b.input("x", R, T, 5)
    for kind, pick in steps:
        x = grow(b, x, first, kind, pick) or x
    pooled = b.op("mean", x, dims=(1,), keepdim=False)
    model = b.build(y=x, z=b.linear(pooled, 3))
    check_program(model.program)
    return model


@settings(PROPERTY, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 63)), min_size=1, max_size=7),
    sizes=DRAWN,
    seed=st.integers(0, 99),
)
def test_random_programs_keep_their_bits_in_any_company(device, steps, sizes, seed):
    model = build(steps)
    tenants = attached(device, model.program, model.weights, exact_rig.lower_exact)
    owners = np.random.default_rng(seed).integers(0, 2, len(sizes)).tolist()

    def draw(rows, tokens, seed):
        return model.request(rows, tokens, np.random.default_rng(seed))

    check_everything(tenants, draw, sizes, owners, seed)
    for tenant in tenants:
        tenant.detach()


# --- poison ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("name", programs.MODELS)
def test_poison_of_a_partner_changes_no_bit(name, poison, device):
    model = programs.MODELS[name]()
    tenants = attached(device, model.program, model.weights, exact_rig.lower_exact)
    tokens = 5 if model.program.tokens_limit else 0
    drawn = [model.request(rows, tokens, np.random.default_rng(rows)) for rows in (2, 3, 1, 18)]
    alone = exact_rig.bits(exact_rig.run_alone(tenants[0], drawn[0], 2, tokens))
    mixed = [tenants[0].request(drawn[0], 2, tokens)]
    for owner, rows, inputs in zip((0, 1, 0), (3, 1, 18), drawn[1:], strict=True):
        for key, array in inputs.items():
            if array.dtype.kind == "f":
                inputs[key] = np.full_like(array, poison)
        mixed.append(tenants[owner].request(inputs, rows, tokens))
    device_rig.run_together(mixed)
    assert exact_rig.bits(mixed[0].outputs()) == alone
    for tenant in tenants:
        tenant.detach()


@pytest.mark.parametrize("name", programs.MODELS)
def test_poison_in_the_padding_of_a_block_changes_no_bit(name, device, monkeypatch):
    model = programs.MODELS[name]()
    tenant, _ = attached(device, model.program, model.weights, exact_rig.lower_exact)
    tokens = 5 if model.program.tokens_limit else 0
    inputs = model.request(3, tokens, np.random.default_rng(0))
    clean = exact_rig.bits(exact_rig.run_alone(tenant, inputs, 3, tokens))

    def poisoned(rows, entries, missing):
        extra = rows[-entries:].repeat(missing, *[1] * (rows.dim() - 1))
        return torch.cat([rows, extra.fill_(torch.nan) if extra.is_floating_point() else extra])

    monkeypatch.setattr(exact, "_filled_up", poisoned)
    assert exact_rig.bits(exact_rig.run_alone(tenant, inputs, 3, tokens)) == clean


def test_an_index_error_of_padding_is_impossible(device):
    """A row of zeros would divide by zero and look up -1."""
    b = programs.Builder()
    ids, x = b.input("ids", R, dtype="i64", fill=programs.below(3)), b.input("x", R, 4)
    table = b.op("embedding", b.weight(3, 4), b.op("sub", ids, b.constant(5, "i64")))
    share = b.op("cast", b.op("floor_div", b.constant(12, "i64"), ids), dtype="f32")
    y = b.op("mul", b.linear(b.op("add", x, table), 4), b.op("reshape", share, out=(R, 1)))
    model = b.build(y=y)
    tenant = device_rig.Tenant(device, model.program, model.weights, exact_rig.lower_exact)
    inputs = {"ids": np.array([5, 6, 7]), "x": np.ones((3, 4), np.float32)}
    one = tenant.request(inputs, 3, 0)
    device_rig.run_together([one])
    one.check(1e-4)


# --- what it rests on -----------------------------------------------------------------------------


def test_exact_kernels_share_no_launch_with_others():
    for name in programs.MODELS:
        program = programs.MODELS[name]().program
        plain, precise = lower(program).kernels, exact_rig.lower_exact(program).kernels
        assert not {k.signature for k in plain} & {k.signature for k in precise}
        assert exact_rig.lower_exact_whole(program).kernels[0].exact


def test_blocks_of_a_gemm_agree_here(tmp_path):
    """What the cost of exact mode rests on: without it every row would be a call of its own. (With
    weights that are computed it is, where torch's `linear` has another way for one row.)"""
    device = CpuDevice(threads=1, memory_bytes=1 << 28, cache_dir=tmp_path)
    model = programs.mlp()
    device_rig.Tenant(device, model.program, model.weights, exact_rig.lower_exact)
    gemms = [sizes for key, sizes in device.blocks._known.items() if key.startswith("('linear'")]
    assert gemms
    assert all(len(sizes) >= 2 for sizes in gemms)


def test_a_place_that_matters_leaves_single_rows(monkeypatch, device, tmp_path):
    """With a GEMM that favours its first row, blocks are given up and the bits still hold."""
    addmm = torch.addmm

    def crooked(bias, x, w, **kwargs):
        y = addmm(bias, x, w, **kwargs)
        y[1:] *= 1.0000001
        return y

    monkeypatch.setattr(torch, "addmm", crooked)
    own = CpuDevice(threads=1, memory_bytes=1 << 28, cache_dir=tmp_path)
    model = programs.mlp()
    tenants = attached(own, model.program, model.weights, exact_rig.lower_exact)
    assert {s for k, s in own.blocks._known.items() if k.startswith("('linear'")} == {(1,)}

    def draw(rows, tokens, seed):
        return model.request(rows, 0, np.random.default_rng(seed))

    check_everything(tenants, draw, [(3, 0), (5, 0), (1, 0)], [0, 1, 0], 1)


def wide(seed=0):
    """Shapes of real models: many columns, deep sums, more elements than torch gives one thread."""
    b = programs.Builder("wide", seed, tokens_limit=0)
    x = b.op("sigmoid", b.linear(b.input("x", R, 1021), 1500))
    x = b.norm(b.op("gelu", b.linear(x, 770), approximate="none"))
    return b.build(y=b.op("softmax", b.linear(x, 33), dim=1), z=b.linear(x, 1))


@pytest.mark.parametrize("threads", [1, 2])
def test_wide_models_keep_their_bits_with_any_number_of_threads(threads, tmp_path):
    own = CpuDevice(threads=threads, memory_bytes=1 << 29, cache_dir=tmp_path)
    try:
        model = wide()
        tenants = attached(own, model.program, model.weights, exact_rig.lower_exact)

        def draw(rows, tokens, seed):
            return model.request(rows, 0, np.random.default_rng(seed))

        sizes = [(9, 0), (1, 0), (70, 0), (33, 0), (4, 0), (150, 0)]
        check_everything(tenants, draw, sizes, [0, 1, 0, 1, 0, 0], 1)
    finally:
        torch.set_num_threads(1)


def test_memory_left_does_not_show(device, tmp_path):
    """Without room for packed weights, and beside a tenant that packed them in default mode."""
    model = programs.cnn()
    inputs = model.request(5, 0, np.random.default_rng(0))
    tight = CpuDevice(threads=1, memory_bytes=1, cache_dir=tmp_path)
    tight.store.limit_bytes = sum(array.nbytes for array in model.weights.values())
    beside = device_rig.Tenant(device, model.program, model.weights, lower)
    exact_rig.run_alone(beside, inputs, 5, 0)
    found = []
    for own in (tight, device):
        tenant = device_rig.Tenant(own, model.program, model.weights, exact_rig.lower_exact)
        found.append(exact_rig.bits(exact_rig.run_alone(tenant, inputs, 5, 0)))
    assert found[0] == found[1]
    assert not any("conv" in f for w in tight.store._weights.values() for f in w.forms)
    assert any("exact conv" in f for w in device.store._weights.values() for f in w.forms)


RESTART = """
import sys; sys.path[:0] = sys.argv[1:3]
import hashlib, json, pathlib, numpy, programs, exact_rig, device_rig
from coissue.kernels.cpu.device import CpuDevice
threads = int(sys.argv[4])
device = CpuDevice(threads=threads, memory_bytes=1 << 28, cache_dir=pathlib.Path(sys.argv[3]))
found = {}
for name, make in programs.MODELS.items():
    model = make()
    tenant = device_rig.Tenant(device, model.program, model.weights, exact_rig.lower_exact)
    tokens = 5 if model.program.tokens_limit else 0
    inputs = model.request(int(sys.argv[5]), tokens, numpy.random.default_rng(0))
    outputs = exact_rig.run_alone(tenant, inputs, int(sys.argv[5]), tokens)
    found[name] = hashlib.sha256(repr(exact_rig.bits(outputs)).encode()).hexdigest()
print(json.dumps(found))
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_new_process_gives_the_same_bits(threads, tmp_path):
    """With an empty cache each time, so nothing measured is carried over."""
    here = Path(__file__).parent
    found = []
    for run in ("first", "second"):
        args = [str(here), str(here.parent), str(tmp_path / run), str(threads), "7"]
        command = [sys.executable, "-c", RESTART, *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]
