"""Native steps in a plan: with a function written by hand, so that only the seam is on trial."""

from __future__ import annotations

import itertools

import device_rig
import native_rig
import numpy as np
import programs
import pytest
from programs import R, T

from coissue.kernels.cost_table import CostTable
from coissue.kernels.cpu import native, stitched
from coissue.kernels.cpu.device import DeviceSegment
from coissue.kernels.cpu.measure import measure
from coissue.kernels.lowered import KernelKind
from coissue.kernels.passes.fuse import arrange, assemble
from coissue.kernels.passes.layouts import prove

WIDTH = 6
SOURCE = """
#include <cstdint>
extern "C" void scaled(const void* const* in, void* const* out, int64_t first, int64_t last) {
    const float* x = static_cast<const float*>(in[0]);
    const float* w = static_cast<const float*>(in[1]);
    float* y = static_cast<float*>(out[0]);
    for (int64_t i = 6 * first; i < 6 * last; ++i) y[i] = x[i] * w[i % 6];
}
extern "C" void shifted(const void* const* in, void* const* out, int64_t first, int64_t last) {
    const float* x = static_cast<const float*>(in[0]);
    const float* w = static_cast<const float*>(in[1]);
    float* y = static_cast<float*>(out[0]);
    for (int64_t i = 6 * first; i < 6 * last; ++i) y[i] = x[i] + w[i % 6] OFFSET;
}
"""


def affine(seed: int, *lead) -> programs.Model:
    """tanh(x * w + b), then a product: a run of two ops before one of the op table."""
    b = programs.Builder("affine", seed, tokens_limit=16 if T in lead else 0)
    x = b.input("x", *lead, WIDTH)
    y = b.op("add", b.op("mul", x, b.weight(WIDTH)), b.weight(WIDTH))
    return b.build(y=b.linear(b.op("tanh", y), 3), z=y)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    chain = native_rig.find_chain()
    folder = tmp_path_factory.mktemp("native")
    forge = native.Forge(folder, chain)
    files = {
        offset: native.compile_source(folder, chain, SOURCE.replace("OFFSET", offset))
        for offset in ("", "+ 100")
    }
    yield lambda offset: (files[offset], forge.load)
    forge.close()


def adopt(rig: device_rig.Tenant, libraries, offset: str = "") -> None:
    """The mul and the add by hand; `offset` tells the native form from the table's."""
    file, load = libraries(offset)
    (index,) = [
        i for i, k in enumerate(rig.lowered.kernels) if any(op.name == "mul" for op in k.ops)
    ]
    kernel = rig.lowered.kernels[index]
    values = native.number_values(kernel)
    names = [op.name for op in kernel.ops]
    ops = names.index("mul"), names.index("add")
    mul, add = (kernel.ops[i] for i in ops)
    places = {v: values.index(v) for v in (*mul.inputs, *add.inputs, *add.outputs)}
    calls = (
        native.Call(file, "scaled", tuple(places[v] for v in mul.inputs), (-1,)),
        native.Call(file, "shifted", (-1, places[add.inputs[1]]), (places[add.outputs[0]],)),
    )
    run = native.Run(ops, calls, (native.Scratch("f32", WIDTH),))
    rig.kernels[index].plan.adopt(native.Build((run,)), load)


def rigs_of(device, count: int, *lead) -> list[device_rig.Tenant]:
    models = [affine(seed, *lead) for seed in range(count)]
    return [device_rig.Tenant(device, m.program, m.weights) for m in models]


def requests_of(rigs, sizes, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for i, (rows, tokens) in enumerate(sizes):
        rig = rigs[i % len(rigs)]
        type_ = rig.program.types[rig.program.inputs[0].value]
        x = rng.standard_normal(type_.at(rows, tokens)).astype(np.float32)
        found.append(rig.request({"x": x}, rows, tokens))
    return found


SIZES = ((3, 5), (1, 7), (0, 5), (2, 5), (1, 1), (4, 3))


@pytest.mark.parametrize("lead", [(R,), (R, T)], ids=["rows", "tokens"])
@pytest.mark.parametrize("tenants", [1, 3])
def test_ragged_launches_of_several_weight_sets(device, libraries, lead, tenants):
    """Before, while and after both forms are on trial."""
    rigs = rigs_of(device, tenants, *lead)
    for launch in range(stitched.TRIALS + 3):
        if launch == 1:
            adopt(rigs[0], libraries)
        requests = requests_of(rigs, SIZES, launch)
        device_rig.run_together(requests)
        for request in requests:
            request.check(1e-5)


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_faster_form_is_kept(device, libraries, monkeypatch, is_faster):
    """With a wrong function as the native form, told from the table's by its answers."""
    (rig,) = rigs_of(device, 1, R)
    adopt(rig, libraries, "+ 100")
    clock = itertools.accumulate(itertools.cycle((9, 1, 2) if is_faster else (9, 2, 1)))
    monkeypatch.setattr(stitched.time, "perf_counter_ns", lambda: next(clock))
    for rows in (1, 1000):  # sizes of different classes are on trial apart
        seen = []
        for _ in range(stitched.TRIALS + 2):
            (request,) = requests_of([rig], [(rows, 0)])
            device_rig.run_together([request])
            seen.append(bool(request.outputs()["z"].mean() > 50))
        assert seen == [False] * stitched.TRIALS + [is_faster] * 2


def test_one_tenants_nan_stays_with_it(device, libraries):
    rigs = rigs_of(device, 2, R, T)
    adopt(rigs[0], libraries)
    for bad in (np.nan, np.inf, -np.inf):
        for _ in range(stitched.TRIALS + 1):
            requests = requests_of(rigs, SIZES[:2])
            requests[0] = rigs[0].request({"x": np.full((3, 5, WIDTH), bad, np.float32)}, 3, 5)
            device_rig.run_together(requests)
            assert not np.isfinite(requests[0].outputs()["z"]).any()
            requests[1].check(1e-5)


def test_parts_of_rows(device, libraries):
    (rig,) = rigs_of(device, 1, R)
    adopt(rig, libraries)
    for _ in range(stitched.TRIALS + 1):
        (request,) = requests_of([rig], [(5, 0)])
        for bound in rig.kernels:
            for part in ((0, 2), (2, 3), (3, 5)):
                device.run([DeviceSegment(bound, 5, 0, request.buffers, part)])
        request.check(1e-5)


def test_what_lies_in_another_order_is_brought_into_the_right_one(device, libraries):
    """A permuted value is a view on the op table."""
    b = programs.Builder("permuted", 0, tokens_limit=0)
    x = b.op("permute", b.input("x", R, 2, 3), dims=(0, 2, 1))
    y = b.op("add", b.op("mul", x, b.weight(3, 2)), b.weight(3, 2))
    model = b.build(y=y)
    rig = device_rig.Tenant(device, model.program, model.weights)
    adopt(rig, libraries)
    for seed in range(stitched.TRIALS + 1):
        request = rig.request(model.request(3, 0, np.random.default_rng(seed)), 3, 0)
        device_rig.run_together([request])
        request.check(1e-5)


def test_a_run_with_other_ops_between_its_own(device, libraries):
    """Steps are sorted anew, and what each leaves behind is emptied after its new last reader."""
    b = programs.Builder("between", 0, tokens_limit=0)
    x = b.input("x", R, WIDTH)
    y = b.op("mul", x, b.weight(WIDTH))
    first, second = b.linear(x, WIDTH), b.linear(x, WIDTH)
    z = b.op("add", y, b.weight(WIDTH))
    model = b.build(y=b.op("sub", b.op("sub", z, b.op("sigmoid", first)), second))

    def join(program):
        layouts, modes = prove(program)
        steps, handed = list(zip(program.ops, modes, strict=True)), {program.outputs[0].value}
        kernel = assemble(program, layouts, steps, KernelKind.JOINED, handed)
        return arrange(program, layouts, [kernel])

    rig = device_rig.Tenant(device, model.program, model.weights, join)
    before = rig.kernels[0].plan.steps
    adopt(rig, libraries)
    after = rig.kernels[0].plan.steps
    assert len(after) == len(before) - 1
    assert isinstance(after[0][0], stitched.Choice)
    for seed in range(stitched.TRIALS + 1):
        request = rig.request(model.request(3, 0, np.random.default_rng(seed)), 3, 0)
        device_rig.run_together([request])
        request.check(1e-5)


def test_runs_that_need_each_other_are_refused(device, libraries):
    (rig,) = rigs_of(device, 1, R)
    kernel = next(k for k in rig.kernels if len(k.plan.steps) > 2)
    with pytest.raises(ValueError, match="circle"):
        stitched.arrange(kernel.plan._parts, [((0, 2), None)])


def test_what_convolutions_make_stays_with_the_op_table(device, libraries):
    """It lies channels last; a run that brought it into order would make the next one undo that."""
    b = programs.Builder("conv", 0, tokens_limit=0)
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    x = b.op("conv", b.input("x", R, 2, 1, 3), b.weight(2, 2, 1, 1), out=(), **window)
    y = b.op("add", b.op("mul", x, b.weight(2, 1, 3)), b.weight(2, 1, 3))
    model = b.build(y=b.op("conv", y, b.weight(2, 2, 1, 1), out=(), **window))
    rig = device_rig.Tenant(device, model.program, model.weights)
    adopt(rig, libraries, "+ 100")
    for seed in range(stitched.TRIALS + 1):
        request = rig.request(model.request(3, 0, np.random.default_rng(seed)), 3, 0)
        device_rig.run_together([request])
        request.check(1e-5)


def test_measuring_at_attach_ends_with_the_form_that_is_kept(device, libraries):
    """So the fastest launch of each point, which counts, is of the form that requests will get."""
    (rig,) = rigs_of(device, 1, R)
    adopt(rig, libraries)
    index, choice = next(
        (i, step)
        for i, bound in enumerate(rig.kernels)
        for step, _ in bound.plan.steps
        if isinstance(step, stitched.Choice)
    )
    for _ in measure(device, CostTable(), rig.lowered, index):
        assert choice._chosen.keys() == choice._times.keys()
    assert len(choice._chosen) > 3
    assert all(count == stitched.TRIALS for _, _, count in choice._times.values())
