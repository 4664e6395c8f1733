"""Native kernels in a live scheduler: built beside the traffic, adopted under it, kept on disk."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile

import native_rig
import numpy as np
import pytest
import test_host
import tiny_models
import torch

from coissue.deployments.capture.pipeline import capture
from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.host import SchedulerHost
from coissue.kernels.cpu import native
from coissue.kernels.cpu.stitched import Choice

MODELS = {
    "norms-a": ("norms", {"seed": 1}),
    "norms-b": ("norms", {"seed": 2}),
    "wider": ("norms", {"width": 80}),
    "tagger": ("tagger", {}),
}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    root = tmp_path_factory.mktemp("artifacts")
    for tenant in test_host.make_settings(root, MODELS).tenants:
        capture(tenant.model, tenant.limits, tenant.name).save(root / tenant.name)
    return root


class Running:
    """A host with the tenants attached."""

    def __init__(self, artifacts, cache, *, native_kernels=True):
        settings = test_host.make_settings(cache, MODELS)
        device = settings.device.model_copy(update={"native_kernels": native_kernels})
        self.folder = tempfile.mkdtemp(prefix="ci-native-")
        self.host = SchedulerHost(settings.model_copy(update={"device": device}), self.folder)
        self.artifacts = artifacts

    def __enter__(self):
        self.host.start()
        for tenant in self.host.settings.tenants:
            folder = str(self.artifacts / tenant.name)
            assert self.host.attach(tenant.model_dump(), 1, folder) == ""
        return self

    def __exit__(self, *_):
        self.host.stop()
        shutil.rmtree(self.folder)

    def adopted(self) -> int:
        """Steps of plans that have a native form."""
        bound = [b for served in self.host._programs.values() for b in served.kernels]
        plans = {id(b.plan): b.plan for b in bound}.values()
        return sum(isinstance(step, Choice) for plan in plans for step, _ in plan.steps)


def states(host) -> dict[str, int]:
    """As the status says, and the metrics with it."""
    shown = json.loads(host.ask("status"))["native_kernels"]
    value = host.metrics.registry.get_sample_value
    for state, count in shown.items():
        assert value("coissue_native_kernels", {"state": state}) == count
    return shown


def outdated(host) -> set[str]:
    """Signatures that were measured before their native form came."""
    measured = host.attacher._measured.items()
    return {signature for signature, (plan, steps) in measured if plan.steps is not steps}


async def ask(client, name, rounds, seed):
    factory, kwargs = MODELS[name]
    module, samples = getattr(tiny_models, factory)(**kwargs)
    module.eval()
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        inputs = test_host.draw(samples, int(rng.integers(1, 9)), int(rng.integers(1, 9)), rng)
        answer = await client.infer(name, inputs)
        with torch.inference_mode():
            want = module(*(torch.from_numpy(array) for array in inputs.values()))
        np.testing.assert_allclose(answer.outputs["output"], want, rtol=2e-4, atol=2e-4)


async def load(host, rounds=10):
    client = await SchedulerClient.connect(host.endpoint)
    await client.wait_ready(*MODELS, timeout_s=30)
    await asyncio.gather(*(ask(client, name, rounds, s) for name in MODELS for s in range(3)))
    await client.close()


def test_answers_are_right_before_during_and_after_adoption_and_the_next_start_adopts_at_once(
    artifacts, tmp_path
):
    native_rig.find_chain()
    with Running(artifacts, tmp_path) as first:

        async def until_built():
            built = asyncio.get_running_loop().run_in_executor(None, first.host.forge.wait)
            while not built.done():
                await load(first.host, rounds=2)
            await load(first.host)

        asyncio.run(until_built())
        adopted = first.adopted()
        assert adopted >= 4  # both runs of both widths
        found = states(first.host)
        assert found["ready"] > 0 == found["waiting"] == found["failed"]
        late = outdated(first.host)
        assert late
    # The next process measures what it will run, and only that.
    assert not [signature for signature in late if signature in first.host.costs.table]
    with Running(artifacts, tmp_path) as second:
        assert second.adopted() == adopted
        assert second.host.forge._thread is None  # nothing had to be built
        asyncio.run(load(second.host))
        assert states(second.host) == found
        assert set(second.host.attacher._measured) == late
        assert not outdated(second.host)


def test_predictions_follow_when_a_native_form_comes(artifacts, tmp_path):
    """Points measured without it stay in the table; launches correct what is predicted by them."""
    native_rig.find_chain()
    with Running(artifacts, tmp_path) as running:
        running.host.forge.wait()
        asyncio.run(load(running.host, rounds=40))
        table = running.host.costs.table
        errors = [error for error, count in table.errors().values() if count > 20]
    assert errors
    assert np.median(errors) < 1  # launches of tens of us vary by themselves


def test_stopping_gives_up_what_is_being_built(artifacts, tmp_path):
    native_rig.find_chain()
    with Running(artifacts, tmp_path) as running:
        child = running.host.forge._child
    assert child is None or child.returncode is not None
    assert running.host.forge._thread is None


@pytest.mark.parametrize("compilers", [("no-such-compiler",), ("false",)])
def test_without_a_compiler_that_works_one_warning_and_the_op_table(
    artifacts, tmp_path, monkeypatch, caplog, compilers
):
    monkeypatch.setattr(native, "COMPILERS", compilers)
    with Running(artifacts, tmp_path) as running:
        asyncio.run(load(running.host))
        assert running.adopted() == 0
        assert not any(states(running.host).values())
    assert [r.message for r in caplog.records if "compiler" in r.message] == [
        f"no C++ compiler ({compilers[0]}) found: memory-bound ops run one by one"
    ]


def test_off_unless_it_is_asked_for(artifacts, tmp_path):
    with Running(artifacts, tmp_path, native_kernels=False) as running:
        assert running.host.forge is None
        assert json.loads(running.host.ask("status"))["native_kernels"] is None
        assert not (tmp_path / "native").exists()
