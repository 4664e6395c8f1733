"""Whole programs with every run as generated code: the table's answers, whatever is coalesced."""

from __future__ import annotations

import device_rig
import native_rig
import numpy as np
import programs
import pytest

from coissue.kernels.cpu.device import DeviceSegment
from coissue.kernels.passes.link import cut
from coissue.kernels.passes.pipeline import lower

#: Name -> model by seed of its weights.
MODELS = {
    "mlp": lambda seed: programs.mlp(seed=seed),
    "bert": lambda seed: programs.bert(seed=seed),
    "bert_mean": lambda seed: programs.bert(seed=seed, pool="mean"),
    "gpt": lambda seed: programs.gpt(seed=seed),
    "cnn": lambda seed: programs.cnn(seed=seed),
    "lstm": lambda seed: programs.lstm(seed=seed),
    "dlrm": lambda seed: programs.dlrm(seed=seed),
}
SIZES = ((3, 5), (1, 7), (0, 5), (2, 5), (1, 1), (4, 3))
TOLERANCE = 2e-4


def join(program):
    """As many kernels in one as an attached program may have."""
    return cut({"": lower(program)}, lambda kernel: 1, bound_ns=4)[""]


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    kernels, owners = [], []
    for name, make in MODELS.items():
        lowered = join(make(0).program)
        kernels += [(lowered, kernel) for kernel in lowered.kernels]
        owners += [name] * len(lowered.kernels)
    made, forge = native_rig.build_all(kernels, tmp_path_factory.mktemp("native"))
    found = {name: [] for name in MODELS}
    for name, build in zip(owners, made, strict=True):
        found[name].append(build)
    yield found, forge.load
    forge.close()


def rigs_of(device, name, count):
    made = [MODELS[name](seed) for seed in range(count)]
    return made, [device_rig.Tenant(device, m.program, m.weights, join) for m in made]


def adopt(rigs, name, builds):
    found, load = builds
    assert any(build.runs for build in found[name])
    for bound, build in zip(rigs[0].kernels, found[name], strict=True):
        bound.plan.adopt(build, load)


def requests_of(models, rigs, seed):
    rng = np.random.default_rng(seed)
    count = len(rigs)
    return [
        rigs[i % count].request(models[i % count].request(rows, tokens, rng), rows, tokens)
        for i, (rows, tokens) in enumerate(SIZES)
    ]


@pytest.mark.parametrize("tenants", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_programs_over_ragged_segments(name, tenants, device, builds, monkeypatch):
    """With the op table before, and generated code from one launch to the next."""
    native_rig.always(monkeypatch, is_native=True)
    models, rigs = rigs_of(device, name, tenants)
    for turn in range(3):
        if turn == 1:
            adopt(rigs, name, builds)
        requests = requests_of(models, rigs, turn)
        device_rig.run_together(requests)
        for request in requests:
            request.check(TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_adopted_in_the_middle_of_a_request(name, device, builds, monkeypatch):
    """Some kernels of a forward before, others after."""
    native_rig.always(monkeypatch, is_native=True)
    models, rigs = rigs_of(device, name, 1)
    requests = requests_of(models, rigs, 0)
    for index in range(len(rigs[0].kernels)):
        if index == len(rigs[0].kernels) // 2:
            adopt(rigs, name, builds)
        device_rig.run_kernel(requests, index)
    for request in requests:
        request.check(TOLERANCE)


@pytest.mark.parametrize("name", ["mlp", "bert", "cnn", "dlrm"])
def test_one_tenants_nan_never_reaches_another(name, device, builds, monkeypatch):
    """Neutral for the others to the last bit: a unit's loop reads that unit alone."""
    native_rig.always(monkeypatch, is_native=True)
    models, rigs = rigs_of(device, name, 2)
    adopt(rigs, name, builds)
    clean = requests_of(models, rigs, 1)
    device_rig.run_together(clean)
    for bad in (np.nan, np.inf):
        mixed = requests_of(models, rigs, 1)
        inputs = {
            k: np.full_like(a, bad) if a.dtype.kind == "f" else a
            for k, a in mixed[0].inputs.items()
        }
        mixed[0] = rigs[0].request(inputs, *SIZES[0])
        device_rig.run_together(mixed)
        for before, after in zip(clean[1:], mixed[1:], strict=True):
            for key, wanted in before.outputs().items():
                np.testing.assert_array_equal(after.outputs()[key], wanted)


@pytest.mark.parametrize("name", ["mlp", "bert", "gpt", "cnn", "dlrm"])
def test_parts_of_rows(name, device, builds, monkeypatch):
    native_rig.always(monkeypatch, is_native=True)
    models, rigs = rigs_of(device, name, 1)
    adopt(rigs, name, builds)
    request = rigs[0].request(models[0].request(5, 4, np.random.default_rng(0)), 5, 4)
    for bound in rigs[0].kernels:
        for part in ((0, 2), (2, 3), (3, 5)) if bound.splittable else ((0, 5),):
            device.run([DeviceSegment(bound, 5, 4, request.buffers, part)])
    request.check(TOLERANCE)
