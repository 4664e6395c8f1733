"""The demo's twelve tenants over HTTP, under concurrent mixed load, against their eager modules."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import tritonclient.http as triton
import yaml
from rich.console import Console
from serving import Up, poll
from tokenizers import Tokenizer

from load_tests.demo import data, models, train

ITEMS = 8
WORKERS = 6


@pytest.fixture(scope="module")
def demo(tmp_path_factory, cache):
    """The application of configs/demo.yaml with deadlines that a busy machine keeps too."""
    if not train.is_trained():
        train.train(Console(quiet=True))
    config = yaml.safe_load((data.ROOT / "configs/demo.yaml").read_text())
    settings = config["applications"][0]["args"]
    settings["device"]["cache"] = str(cache)
    settings["scheduler"] |= {"metrics_port": None}
    for entry in settings["slo_classes"].values():
        entry["deadline_ms"] = 60_000
    for tenant in settings["tenants"]:
        kwargs = (tenant.get("handler") or {}).get("kwargs", {})
        if "tokenizer" in kwargs:
            kwargs["tokenizer"] = str(data.ROOT / kwargs["tokenizer"])
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(data.ROOT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        with Up(tmp_path_factory.mktemp("demo"), settings) as up:
            assert set(up.wait_settled().values()) == {"ready"}, up.status()
            yield up, settings


def make_module(settings, name):
    (tenant,) = (t for t in settings["tenants"] if t["name"] == name)
    attribute = tenant["model"]["factory"].split(":")[1]
    module, samples = getattr(models, attribute)(**tenant["model"]["kwargs"])
    return module.eval(), list(samples)


def make_inputs(name, names):
    """Real inputs of `ITEMS` requests, as arrays by input name."""
    if name in data.TEXT_TASKS:
        tokenizer = Tokenizer.from_file(str(data.CACHE / "tokenizer.json"))
        texts = [text for text, _ in data.read_texts(name).test[:ITEMS]]
        rows = [np.array([tokenizer.encode(text).ids], np.int64) for text in texts]
        return [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in rows]
    rows = data.read_arrays(name).test_x[:ITEMS].astype(np.float32)
    return [{names[0]: row[None]} for row in rows]


def infer(up, name, inputs):
    """One request by the protocol's own client, in its binary form."""
    client = triton.InferenceServerClient(f"127.0.0.1:{up.port}")
    try:
        wanted = []
        for key, array in inputs.items():
            kind = "INT64" if array.dtype == np.int64 else "FP32"
            wanted.append(triton.InferInput(key, list(array.shape), kind))
            wanted[-1].set_data_from_numpy(array)
        answer = client.infer(name, wanted)
        return answer.as_numpy(answer.get_response()["outputs"][0]["name"])
    finally:
        client.close()


def test_every_tenant_answers_as_its_eager_module_under_mixed_load(demo):
    up, settings = demo
    jobs = []
    for name in data.TASKS:
        module, names = make_module(settings, name)
        for inputs in make_inputs(name, names):
            with torch.inference_mode():
                want = module(*(torch.from_numpy(array) for array in inputs.values())).numpy()
            jobs.append((name, inputs, want))
    jobs = [job for start in range(ITEMS) for job in jobs[start::ITEMS]]
    with ThreadPoolExecutor(WORKERS) as pool:
        answers = list(pool.map(lambda job: infer(up, job[0], job[1]), jobs))
    for (name, _, want), got in zip(jobs, answers, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3, err_msg=name)
    assert up.metric("coissue_launch_tenants_sum") > up.metric("coissue_launches_total")


def test_text_handlers_name_the_class_of_the_eager_module(demo):
    up, _ = demo
    eager = json.loads((data.CACHE / "eager.json").read_text())
    for name in data.TEXT_TASKS:
        said, labels = eager[name]["predictions"], eager[name]["labels"]
        for item, (text, _) in enumerate(data.read_texts(name).test[:4]):
            reply = up.ask("POST", f"/tenants/{name}", {"text": text})
            assert reply.status == 200, reply.body
            assert labels.index(reply.json["label"]) == said[item], (name, text)


def test_backbone_is_held_once(demo):
    up, _ = demo
    scheduler = poll("the scheduler answers", lambda: up.scheduler())
    assert scheduler["weight_saved_bytes"] > 3 * scheduler["weight_bytes"]
