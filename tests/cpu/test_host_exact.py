"""Exact tenants in a live scheduler: under mixed load each answer has the bits it has alone."""

from __future__ import annotations

import asyncio
import shutil
import tempfile

import exact_rig
import numpy as np
import pytest
import test_host

from coissue.deployments.capture.pipeline import capture
from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.host import SchedulerHost

EXACT = ("mlp-a", "mlp-b", "tagger")
NAMES = (*EXACT, "head-a")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    root = tmp_path_factory.mktemp("artifacts")
    for tenant in tenants_of(root):
        capture(tenant.model, tenant.limits, tenant.name).save(root / tenant.name)
    return root


def tenants_of(root):
    settings = test_host.make_settings(root, {name: test_host.MODELS[name] for name in NAMES})
    return [t.model_copy(update={"exact": t.name in EXACT}) for t in settings.tenants]


def start(artifacts, cache):
    run_dir = tempfile.mkdtemp(prefix="ci-exact-")
    settings = test_host.make_settings(cache, {n: test_host.MODELS[n] for n in NAMES})
    host = SchedulerHost(settings, run_dir)
    host.start()
    for tenant in tenants_of(artifacts):
        assert host.attach(tenant.model_dump(), 1, str(artifacts / tenant.name)) == ""
    return host, run_dir


async def ask_all(host, requests, *, together):
    client = await SchedulerClient.connect(host.endpoint)
    await client.wait_ready(*NAMES, timeout_s=30)
    asked = [client.infer(name, inputs) for name, inputs in requests]
    answers = await asyncio.gather(*asked) if together else [await one for one in asked]
    await client.close()
    return [exact_rig.bits(answer.outputs) for answer in answers]


def test_answers_under_mixed_load_have_the_bits_of_the_same_requests_alone(artifacts, tmp_path):
    rng = np.random.default_rng(0)
    samples = {name: test_host.eager(name)[1] for name in NAMES}
    requests = [
        (
            name,
            test_host.draw(samples[name], int(rng.integers(1, 24)), int(rng.integers(1, 9)), rng),
        )
        for name in rng.choice(NAMES, 120)
    ]
    host, run_dir = start(artifacts, tmp_path / "first")
    try:
        alone = asyncio.run(ask_all(host, requests, together=False))
        launches = host.metrics.registry.get_sample_value
        host.collect()
        before = launches("coissue_launch_segments_sum") - launches("coissue_launches_total")
        for turn in range(3):
            order = np.random.default_rng(turn).permutation(len(requests))
            found = asyncio.run(ask_all(host, [requests[i] for i in order], together=True))
            for index, bits in zip(order, found, strict=True):
                if requests[index][0] in EXACT:
                    assert bits == alone[index]
        host.collect()
        after = launches("coissue_launch_segments_sum") - launches("coissue_launches_total")
        assert after > before + 50  # they did share launches
        signatures = {n: {k.signature for k in host._programs[n].spec.kernels} for n in NAMES}
        assert signatures["mlp-a"] == signatures["mlp-b"]
    finally:
        host.stop()
        shutil.rmtree(run_dir)

    host, run_dir = start(artifacts, tmp_path / "second")  # measures everything anew
    try:
        again = asyncio.run(ask_all(host, requests, together=True))
        for (name, _), bits, wanted in zip(requests, again, alone, strict=True):
            if name in EXACT:
                assert bits == wanted
    finally:
        host.stop()
        shutil.rmtree(run_dir)
