"""The scheduler host without Ray: attach, answers under mixed load, refusals, detach, metrics."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
import tempfile
import threading

import numpy as np
import pytest
import tiny_models
import torch

from coissue.deployments import attach as attaching
from coissue.deployments.capture.pipeline import capture
from coissue.deployments.channel.checking import InferError
from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.host import SchedulerHost
from coissue.deployments.settings import AppSettings
from coissue.scheduler.ports import LaunchError

MODELS = {
    "mlp-a": ("mlp", {"seed": 1}),
    "mlp-b": ("mlp", {"seed": 2}),
    "head-a": ("headed", {"seed": 1}),
    "head-b": ("headed", {"seed": 2}),
    "head-c": ("headed", {"seed": 3, "classes": 5}),
    "tagger": ("tagger", {}),
    "wide": ("wide", {}),
}
#: Attached by single tests only.
HALF = ("half", {})


def make_settings(cache, models=MODELS, **scheduler) -> AppSettings:
    return AppSettings.model_validate(
        {
            "device": {"memory_mib": 256, "cache": str(cache), "native_kernels": False},
            "scheduler": {"metrics_port": 0, **scheduler},
            "slo_classes": {"fast": {"deadline_ms": 5000}},
            "tenants": [
                {
                    "name": name,
                    "model": {"factory": f"tiny_models:{factory}", "kwargs": kwargs},
                    "slo": "fast",
                    "limits": {"tokens": 64},
                }
                for name, (factory, kwargs) in models.items()
            ],
        }
    )


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """name -> folder of the captured tenant."""
    root = tmp_path_factory.mktemp("artifacts")
    for tenant in make_settings(root).tenants:
        capture(tenant.model, tenant.limits, tenant.name).save(root / tenant.name)
    return root


@pytest.fixture
def host(artifacts):
    run_dir = tempfile.mkdtemp(prefix="ci-host-")
    settings = make_settings(artifacts / "cache")
    host = SchedulerHost(settings, run_dir)
    host.start()
    for tenant in settings.tenants:
        assert host.attach(tenant.model_dump(), 1, str(artifacts / tenant.name)) == ""
    yield host
    host.stop()
    shutil.rmtree(run_dir)


def keep_only(host, tenants):
    settings = host.settings.model_copy(update={"tenants": tuple(tenants)})
    assert host.configure(settings.model_dump(mode="json")) == []


def eager(name):
    factory, kwargs = MODELS[name]
    module, samples = getattr(tiny_models, factory)(**kwargs)
    return module.eval(), samples


def draw(samples, rows, tokens, rng):
    """Inputs like the samples, of another size."""
    made = {}
    for name, sample in samples.items():
        if sample.dtype == torch.int64:
            made[name] = rng.integers(0, 50, (rows, tokens))
        else:
            made[name] = rng.standard_normal((rows, *sample.shape[1:])).astype(np.float32)
    return made


def run(work):
    return asyncio.run(work)


async def connect(host) -> SchedulerClient:
    client = await SchedulerClient.connect(host.endpoint)
    await client.wait_ready(*MODELS, timeout_s=30)
    return client


def test_mixed_load_answers_as_the_eager_module_does(host):
    async def ask(client, name, module, samples, seed):
        rng = np.random.default_rng(seed)
        for _ in range(6):
            inputs = draw(samples, int(rng.integers(1, 5)), int(rng.integers(1, 9)), rng)
            answer = await client.infer(name, inputs)
            with torch.inference_mode():
                want = module(*(torch.from_numpy(array) for array in inputs.values()))
            np.testing.assert_allclose(answer.outputs["output"], want, rtol=2e-4, atol=2e-4)

    async def work():
        client = await connect(host)
        models = {name: eager(name) for name in MODELS}
        await asyncio.gather(
            *(ask(client, name, *models[name], seed) for name in MODELS for seed in range(4))
        )
        assert client.open_requests == 0
        await client.close()

    run(work())
    host.collect()
    launches = host.metrics.registry.get_sample_value
    assert launches("coissue_launch_segments_sum") > launches("coissue_launches_total")
    assert launches("coissue_launch_tenants_sum") > launches("coissue_launches_total")


def test_equal_weights_are_held_once(host):
    backbone = sum(p.numel() * 4 for p in eager("head-a")[0][0].parameters())
    assert host.device.bytes_saved >= 2 * backbone


def test_prefix_of_one_backbone_shares_launches_although_heads_differ(host):
    first = {name: host._programs[name].spec.kernels[0] for name in ("head-a", "head-b", "head-c")}
    assert len({kernel.signature for kernel in first.values()}) == 1
    assert len({kernel.weights for kernel in first.values()}) == 1


def test_impossible_deadline_is_refused_at_once_with_the_reason(host):
    async def work():
        client = await connect(host)
        with pytest.raises(InferError) as error:
            await client.infer("mlp-a", {"input": np.zeros((1, 8), np.float32)}, budget_ns=1)
        await client.close()
        return error.value

    error = run(work())
    assert error.reason in ("deadline", "expired")
    assert error.message


def test_index_outside_of_a_table_is_the_clients_mistake(host):
    async def work():
        client = await connect(host)
        good = client.infer("tagger", {"input_ids": np.array([[1, 2]])})
        bad = client.infer("tagger", {"input_ids": np.array([[1, 50]])})
        answers = await asyncio.gather(good, bad, return_exceptions=True)
        await client.close()
        return answers

    good, bad = run(work())
    assert good.outputs["output"].shape == (1, 3)
    assert isinstance(bad, InferError)
    assert bad.reason == "malformed"
    assert bad.message == "input 'input_ids': index 50, allowed: 0 to 49"
    assert counts_of(host, "tagger") == {"malformed": 1, "good": 1, "failed": 0}


def counts_of(host, tenant):
    """Its refusals as malformed, and what counts for its objective."""
    host.collect()
    value = host.metrics.registry.get_sample_value
    labels = {"tenant": tenant, "reason": "launch_failed"}
    assert value("coissue_rejections_total", labels) is None
    malformed = value("coissue_rejections_total", {**labels, "reason": "malformed"})
    slo = {"tenant": tenant, "slo_class": "fast"}
    return {"malformed": malformed} | {
        outcome: value("coissue_slo_requests_total", {**slo, "outcome": outcome})
        for outcome in ("good", "failed")
    }


def test_computed_index_outside_of_a_table_counts_as_malformed_too(host, tmp_path):
    """The input alone does not show it; the launch does."""
    (tenant,) = make_settings(tmp_path, {"shifted": ("shifted", {})}).tenants
    capture(tenant.model, tenant.limits, "shifted").save(tmp_path / "shifted")
    assert host.attach(tenant.model_dump(), 1, str(tmp_path / "shifted")) == ""

    async def work():
        client = await connect(host)
        asks = [client.infer("shifted", {"input_ids": np.array([[1, last]])}) for last in (48, 49)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        await client.close()
        return answers

    good, bad = run(work())
    assert good.outputs["output"].shape == (1, 3)
    assert (bad.reason, bad.message[:28]) == ("malformed", "an input leads to an index t")
    assert counts_of(host, "shifted") == {"malformed": 1, "good": 1, "failed": 0}
    assert not host.executor.malformed


@pytest.mark.parametrize("name", ["gather", "embedding_bag"])
def test_torch_says_in_other_words_that_an_index_is_outside(host, monkeypatch, name):
    table, index = torch.zeros(5, 3), torch.tensor([[7, 1, 0]])

    def launch(segments):
        if name == "gather":
            torch.gather(table, 0, index)
        else:
            torch.nn.functional.embedding_bag(index, table)

    monkeypatch.setattr(host.device, "run", launch)
    with pytest.raises(LaunchError, match="index"):
        host.executor._run([])


def test_cancelled_request_is_withdrawn(host):
    async def work():
        client = await connect(host)
        inputs = {"input": np.zeros((4, 4096), np.float32)}
        tasks = [asyncio.create_task(client.infer("wide", inputs)) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        status = json.loads(await client.ask("status"))
        while status["requests_open"]:
            status = json.loads(await client.ask("status"))
        await client.close()
        return status

    outcomes = run(work())["outcomes"]
    assert outcomes["cancelled"] + outcomes["completed"] <= 50
    assert not host.executor._running


def test_wrong_reference_fails_the_tenant_and_leaves_nothing(host, artifacts, tmp_path):
    folder = tmp_path / "wrong"
    shutil.copytree(artifacts / "mlp-a", folder)
    from safetensors.numpy import load_file, save_file

    arrays = load_file(folder / "references.safetensors")
    arrays["out.1.output"] = arrays["out.1.output"] + 1
    save_file(arrays, folder / "references.safetensors")
    held = host.device.bytes_held
    tenant = next(t for t in host.settings.tenants if t.name == "mlp-a")
    other = {**tenant.model_dump(), "name": "liar"}
    message = host.attach(other, 1, str(folder))
    assert "reference 1" in message
    assert "'output'" in message
    assert "liar" not in host.attached()
    assert host.device.bytes_held == held


def test_tampered_weights_are_refused(host, artifacts, tmp_path):
    folder = tmp_path / "tampered"
    shutil.copytree(artifacts / "mlp-a", folder)
    data = bytearray((folder / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(bytes(data))
    tenant = next(t for t in host.settings.tenants if t.name == "mlp-a")
    # What is on the device already is not read again.
    keep_only(host, [t for t in host.settings.tenants if t.name != "mlp-a"])
    message = host.attach({**tenant.model_dump(), "name": "tampered"}, 1, str(folder))
    assert "digest" in message


def test_status_tells_of_a_metrics_port_in_use(artifacts, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        host = SchedulerHost(make_settings(artifacts / "cache", metrics_port=port), str(tmp_path))
        host.start()
        try:
            status = json.loads(host.ask("status"))
            said = f"scheduler.metrics_port: {port} cannot be used, Prometheus has to ask"
            assert status["note"] == f"{said} {status['metrics_port']}"
            assert status["metrics_port"] not in (0, port)
            host.configure(host.settings.model_dump(mode="json"), "from control")
            assert json.loads(host.ask("status"))["note"].startswith("from control; scheduler.m")
        finally:
            host.stop()


def test_a_cache_that_cannot_be_written_is_told_and_served_without(artifacts, tmp_path):
    host = SchedulerHost(make_settings("/proc/none", {"mlp-a": MODELS["mlp-a"]}), str(tmp_path))
    host.start()
    try:
        (tenant,) = host.settings.tenants
        assert host.attach(tenant.model_dump(), 1, str(artifacts / "mlp-a")) == ""
        note = json.loads(host.ask("status"))["note"]
        assert note.startswith("device.cache: nothing is kept in '/proc/none': No such file")
    finally:
        host.stop()


def test_a_kernel_whose_measuring_was_cut_short_is_measured_anew(artifacts, tmp_path, monkeypatch):
    """Else a part of its points would stand for all, in this process and all later ones."""
    settings = make_settings(tmp_path / "cache")
    tenant, measure = settings.tenants[0], attaching.measure

    def cut_short(*args, **how):
        yield from itertools.islice(measure(*args, **how), 3)
        raise RuntimeError("the device is gone")

    host = SchedulerHost(settings, str(tmp_path))
    host.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(attaching, "measure", cut_short)
            with pytest.raises(RuntimeError, match="the device is gone"):
                host.attach(tenant.model_dump(), 1, str(artifacts / tenant.name))
    finally:
        host.stop()
    assert json.loads((tmp_path / "cache" / "costs.json").read_text())["points"] == []


@pytest.mark.parametrize("key", ["record_to", "secret_file"])
def test_files_that_cannot_be_opened_are_named_by_their_key(tmp_path, key):
    more = {"tcp_port": 0} if key == "secret_file" else {}
    settings = make_settings(tmp_path, **{key: "/none/x"}, **more)
    with pytest.raises(OSError, match=f"^scheduler.{key}: .*No such file.*'/none/x'"):
        SchedulerHost(settings, str(tmp_path))


def test_tenant_that_does_not_fit_says_so_and_the_others_serve(artifacts):
    run_dir = tempfile.mkdtemp(prefix="ci-host-")
    settings = make_settings(artifacts / "cache")
    settings = settings.model_copy(
        update={"device": settings.device.model_copy(update={"memory_mib": 64})}
    )
    host = SchedulerHost(settings, run_dir)
    host.start()
    try:
        # Two of 67 MB: the device has room for neither.
        by_name = {tenant.name: tenant for tenant in settings.tenants}
        message = host.attach(by_name["wide"].model_dump(), 1, str(artifacts / "wide"))
        assert "bytes" in message
        assert host.attach(by_name["mlp-a"].model_dump(), 1, str(artifacts / "mlp-a")) == ""
        assert list(host.attached()) == ["mlp-a"]
    finally:
        host.stop()
        shutil.rmtree(run_dir)


def test_new_version_takes_over_and_detach_frees_the_weights(host, artifacts):
    by_name = {tenant.name: tenant for tenant in host.settings.tenants}

    async def ask():
        client = await connect(host)
        answer = await client.infer("mlp-a", {"input": np.ones((1, 8), np.float32)})
        await client.close()
        return answer.outputs["output"]

    before = run(ask())
    assert host.attach(by_name["mlp-a"].model_dump(), 2, str(artifacts / "mlp-b")) == ""
    assert host.attached()["mlp-a"] == 2
    assert host.describe_served()["mlp-a"] == (2, by_name["mlp-a"].model_dump())
    with torch.inference_mode():
        want = eager("mlp-b")[0](torch.ones(1, 8))
    after = run(ask())
    np.testing.assert_allclose(after, want, rtol=1e-4, atol=1e-5)
    assert not np.allclose(before, after)
    keep_only(host, [by_name["mlp-a"].model_copy(update={"name": "other"})])
    assert host.device.bytes_held == 0
    assert [(info.name, info.state) for info in host.directory()] == [("other", "loading")]


def test_requests_while_versions_swap_and_settings_change_are_all_answered_by_one_of_them(
    host, artifacts
):
    """Two versions with different kernels, tens of swaps: no answer is late, mixed or missing."""
    tenant = next(tenant for tenant in host.settings.tenants if tenant.name == "head-a")
    row = np.full((1, 32), 0.5, np.float32)
    with torch.inference_mode():
        a, c = (eager(name)[0](torch.from_numpy(row)).numpy() for name in ("head-a", "head-c"))
    sizes, over = set(), threading.Event()

    def swap():
        for version in range(2, 32):
            source = ("head-a", "head-c")[version % 2]
            assert host.attach(tenant.model_dump(), version, str(artifacts / source)) == ""
            settings = host.settings.model_dump(mode="json")
            settings["slo_classes"]["fast"]["deadline_ms"] = 5000 + version
            host.configure(settings)
        over.set()

    async def ask(client):
        while not over.is_set():
            answer = (await client.infer("head-a", {"input": row})).outputs["output"]
            want = a if answer.shape == a.shape else c
            np.testing.assert_allclose(answer, want, rtol=1e-4, atol=1e-5)
            sizes.add(answer.shape)

    async def work():
        client = await connect(host)
        thread = threading.Thread(target=swap)
        thread.start()
        await asyncio.gather(*(ask(client) for _ in range(8)))
        thread.join()
        assert client.directory["head-a"].version == 31
        assert client.directory["head-b"].deadline_ns == 5031 * 10**6
        await client.close()

    run(work())
    assert len(sizes) == 2


def test_why_something_else_is_served_stays_until_it_is_taken_back(host):
    settings = host.settings.model_dump(mode="json")
    by_name = {tenant["name"]: tenant for tenant in settings["tenants"]}
    host.announce(by_name["head-a"], "loading", "another version is being prepared")
    by_name["head-a"].update(share=3.0)
    host.configure(settings)
    assert host._infos["head-a"].reason == "another version is being prepared"
    assert host._infos["head-a"].state == "ready"
    host.announce(by_name["head-a"], "loading", "")
    assert host._infos["head-a"].reason == ""


def test_configure_detaches_adjusts_and_announces(host):
    settings = host.settings.model_dump(mode="json")
    settings["slo_classes"]["slow"] = {"deadline_ms": 9000, "priority": 3}
    by_name = {tenant["name"]: tenant for tenant in settings["tenants"]}
    by_name["head-a"].update(slo="slow", share=3.0, nan="reject")
    by_name["head-a"]["limits"].update(rows=2, in_flight=7)
    by_name["head-b"].update(model={"factory": "x:y"}, handler={"use": "classes"})
    settings["tenants"] = [by_name[name] for name in ("head-a", "head-b", "wide")]
    settings["tenants"].append({**by_name["wide"], "name": "new"})
    settings["device"]["memory_mib"] += 1
    served = dict(host._programs)

    async def ask():
        client = await connect(host)
        inputs = {"input": np.zeros((1, 8), np.float32)}
        open_request = asyncio.ensure_future(client.infer("mlp-a", inputs))
        await asyncio.sleep(0)
        keys = await asyncio.to_thread(host.configure, settings, "a note")
        assert keys == ["device.memory_mib"]
        await open_request
        with pytest.raises(InferError) as gone:
            await client.infer("mlp-a", inputs)
        assert gone.value.reason == "unknown_tenant"
        await client.ask("status")  # whatever the directory became is here now
        await client.close()
        return client.directory

    known = run(ask())
    assert set(known) == {"head-a", "head-b", "wide", "new"}
    a, b = known["head-a"], known["head-b"]
    assert (a.slo_class, a.deadline_ns, a.priority) == ("slow", 9000 * 10**6, 3)
    assert (a.version, a.state, a.rows_limit, a.in_flight_limit, a.nan) == (
        1,
        "ready",
        2,
        7,
        "reject",
    )
    assert (b.state, b.handler) == ("ready", "")  # that of the model that is served
    assert known["new"].state == "loading"
    spec = host._programs["head-a"].spec
    assert (spec.share, spec.in_flight_limit, spec.priority) == (3.0, 7, 3)
    assert host._programs["head-a"].kernels is served["head-a"].kernels
    assert host._programs["wide"] is served["wide"]
    assert json.loads(host.ask("status"))["note"] == "a note"
    host.announce(by_name["head-b"], "failed", "version 2 failed")
    b = next(info for info in host.directory() if info.name == "head-b")
    assert (b.state, b.reason) == ("ready", "version 2 failed")
    host.drain()
    assert host.ping(1.0) == os.getpid()


def test_bf16_model_is_served_in_bits(host, tmp_path):
    (tenant,) = make_settings(tmp_path, {"half": HALF}).tenants
    capture(tenant.model, tenant.limits, "half").save(tmp_path / "half")
    assert host.attach(tenant.model_dump(), 1, str(tmp_path / "half")) == ""
    module, samples = tiny_models.half()

    async def work():
        client = await connect(host)
        bits = samples["input"].view(torch.uint16).numpy()
        answer = await client.infer("half", {"input": bits})
        await client.close()
        return answer.outputs["output"]

    with torch.inference_mode():
        want = module(samples["input"]).float()
    got = torch.from_numpy(run(work()).copy()).view(torch.bfloat16).float()
    torch.testing.assert_close(got, want, rtol=0.04, atol=0.04)


def test_policies_can_be_switched_under_load(host):
    async def work():
        client = await connect(host)
        inputs = {"input": np.ones((2, 32), np.float32)}
        want = (await client.infer("head-a", inputs)).outputs["output"]
        for policy in ("time_only", "space_time") * 3:
            host.set_policy(policy)
            answers = await asyncio.gather(*(client.infer("head-a", inputs) for _ in range(20)))
            for answer in answers:
                np.testing.assert_allclose(answer.outputs["output"], want, rtol=1e-4, atol=1e-5)
        await client.close()

    run(work())
    with pytest.raises(ValueError, match="space_time"):
        host.set_policy("fastest")


def test_timeline_is_a_trace_with_all_launches(host):
    async def work():
        client = await connect(host)
        inputs = {"input": np.ones((2, 32), np.float32)}
        answers = await asyncio.gather(*(client.infer("head-b", inputs) for _ in range(10)))
        trace = json.loads(await client.ask("timeline"))
        await client.close()
        return trace["traceEvents"], {answer.request for answer in answers}

    events, numbers = run(work())
    launches = [event for event in events if event["ph"] == "X"]
    assert sum(event["args"]["tenants"].get("head-b", 0) for event in launches) >= 10
    opened = [event["id"] for event in events if event["ph"] == "b"]
    closed = [event["id"] for event in events if event["ph"] == "e"]
    assert sorted(opened) == sorted(closed)
    assert len(numbers) == 10
    assert numbers <= set(opened)
    assert all(event["dur"] >= 0 for event in launches)


def test_long_requests_go_in_parts_and_their_answers_are_those_of_the_eager_module(artifacts):
    """With a bound that every launch of more than one row breaks."""
    settings = make_settings(artifacts / "cache", preemption_bound_ms=0.001)
    run_dir = tempfile.mkdtemp(prefix="coissue-")
    host = SchedulerHost(settings, run_dir)
    host.start()

    async def work():
        client = await connect(host)
        for name in MODELS:
            module, samples = eager(name)
            inputs = draw(samples, 7, 5, np.random.default_rng(3))
            answer = await client.infer(name, inputs)
            with torch.inference_mode():
                want = module(*(torch.from_numpy(array) for array in inputs.values()))
            np.testing.assert_allclose(answer.outputs["output"], want, rtol=2e-4, atol=2e-4)
            kernels = host._programs[name].spec.kernels
            assert answer.launches == sum(7 if kernel.splittable else 1 for kernel in kernels)
        await client.close()

    try:
        for tenant in settings.tenants:
            assert host.attach(tenant.model_dump(), 1, str(artifacts / tenant.name)) == ""
        run(work())
    finally:
        host.stop()
        shutil.rmtree(run_dir, ignore_errors=True)
