"""Answers over HTTP equal those of the eager module, for every tenant and every way to ask."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiny_models
import torch
import tritonclient.http as triton
from serving import SERVED, poll

RAW = {"content-type": "application/octet-stream"}
NAMES = {np.dtype(np.float32): "FP32", np.dtype(np.int64): "INT64"}


class Model:
    """A tenant's eager module, in this process. Made in one thread: torch has one seed."""

    def __init__(self, name):
        factory, kwargs = SERVED[name]
        self.name = name
        self.module, samples = getattr(tiny_models, factory)(**kwargs)
        self.module.eval()
        ((self.input, self.sample),) = samples.items()

    def draw(self, rng):
        rows = int(rng.integers(1, 6))
        if self.sample.dtype == torch.int64:
            return rng.integers(0, 50, (rows, int(rng.integers(1, 30))))
        return rng.standard_normal((rows, *self.sample.shape[1:])).astype(np.float32)

    def answer(self, array):
        with torch.inference_mode():
            return self.module(torch.from_numpy(array)).numpy()


def ask_plain(up, client, model, array):
    reply = up.ask("POST", f"/tenants/{model.name}", {"inputs": {model.input: array.tolist()}})
    assert reply.status == 200, reply.body
    return np.array(reply.json["outputs"]["output"], np.float32)


def ask_raw(up, client, model, array):
    shape = {"x-shape": ",".join(map(str, array.shape))}
    reply = up.ask("POST", f"/tenants/{model.name}", array.tobytes(), RAW | shape)
    assert reply.status == 200, reply.body
    shape = [int(size) for size in reply.headers["x-shape"].split(",")]
    return np.frombuffer(reply.body, "<f4").reshape(shape)


def ask_oip(up, client, model, array):
    tensor = {
        "name": model.input, "shape": array.shape, "datatype": NAMES[array.dtype],
        "data": array.ravel().tolist(),
    }  # fmt: skip
    reply = up.ask("POST", f"/v2/models/{model.name}/infer", {"id": "7", "inputs": [tensor]})
    assert reply.status == 200, reply.body
    assert (reply.json["id"], reply.json["model_name"]) == ("7", model.name)
    (output,) = reply.json["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def ask_triton(up, client, model, array):
    given = triton.InferInput(model.input, array.shape, NAMES[array.dtype])
    given.set_data_from_numpy(array, binary_data=True)
    wanted = triton.InferRequestedOutput("output", binary_data=True)
    return client.infer(model.name, [given], outputs=[wanted]).as_numpy("output")


WAYS = (ask_plain, ask_raw, ask_oip, ask_triton)


def test_concurrent_mixed_load_is_answered_as_by_the_eager_modules(up):
    torch.set_num_threads(1)
    # The handler of "own" takes another payload on the plain route.
    models = [Model(name) for name in SERVED if name != "own"]

    def work(worker):
        rng = np.random.default_rng(worker)
        client = triton.InferenceServerClient(f"127.0.0.1:{up.port}")
        try:
            for turn in range(4 * len(models)):
                model = models[(worker + turn) % len(models)]
                way = WAYS[(worker + turn // len(models)) % len(WAYS)]
                array = model.draw(rng)
                if way is ask_raw and array.dtype == np.int64:
                    array = array[:1]  # raw tokens are one row
                got, want = way(up, client, model, array), model.answer(array)
                assert got.shape == want.shape
                np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
        finally:
            client.close()
        return turn + 1

    before = up.metric("coissue_requests_total", outcome="completed")
    with ThreadPoolExecutor(12) as pool:
        sent = sum(pool.map(work, range(12)))
    assert up.metric("coissue_requests_total", outcome="completed") - before == sent


def test_tenants_share_launches(up):
    """Backbones of three tenants at once, until one launch has carried several of them."""

    models = [Model(name) for name in ("head-a", "head-b", "head-c")]

    def work(model):
        array = model.draw(np.random.default_rng(0))
        for _ in range(20):
            np.testing.assert_allclose(
                ask_raw(up, None, model, array), model.answer(array), rtol=2e-4, atol=2e-4
            )

    def shared():
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(work, models * 4))
        launches = up.metric("coissue_launches_total")
        return up.metric("coissue_launch_tenants_sum") > launches

    poll("a launch of several tenants", shared)
    assert up.scheduler()["weight_saved_bytes"] > 0


def test_own_handler(up):
    model = Model("own")
    reply = up.ask("POST", "/tenants/own", {"sizes": [0, 1, 2.5]})
    want = 2.0 * model.answer(np.array([[0], [1], [2.5]], np.float32).repeat(8, 1))
    np.testing.assert_allclose(reply.json["scaled"], want, rtol=1e-4, atol=1e-5)
    refused = up.ask("POST", "/tenants/own", {"sizes": [-1]})
    assert (refused.status, refused.error) == (400, "sizes: only positive ones")
    pool = up.replica("Pool").pid
    odd = up.ask("POST", "/tenants/own", {"sizes": "odd"})
    assert odd.error == "handler own_handler:Sums failed in preprocess: TypeError"
    assert up.ask("POST", "/tenants/own", {"sizes": "many"}).status == 413
    assert up.replica("Pool").pid == pool
    # Without the handler by the other routes.
    array = np.ones((2, 8), np.float32)
    np.testing.assert_allclose(
        ask_oip(up, None, model, array), model.answer(array), rtol=1e-4, atol=1e-5
    )


def test_live_metadata_through_tritonclient(up):
    client = triton.InferenceServerClient(f"127.0.0.1:{up.port}")
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata()["name"] == "coissue"
        assert client.is_model_ready("tagger")
        assert not client.is_model_ready("unimportable")
        assert client.get_model_metadata("tagger") == {
            "name": "tagger",
            "versions": ["1"],
            "platform": client.get_model_metadata("mlp-a")["platform"],
            "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}],
            "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}],
        }
        assert client.get_model_config("wide")["max_batch_size"] == 64
    finally:
        client.close()


@pytest.mark.parametrize("class_name", ["fast", "batch"])
def test_impossible_deadline_is_refused_whatever_the_class(up, class_name):
    name = {"fast": "mlp-a", "batch": "wide"}[class_name]
    info = next(t for t in up.status()["tenants"] if t["name"] == name)
    assert info["slo_class"] == class_name
    model = Model(name)
    array = model.draw(np.random.default_rng(0))
    tensor = {
        "name": model.input, "shape": array.shape, "datatype": "FP32",
        "data": array.ravel().tolist(),
    }  # fmt: skip
    by_parameter = up.ask(
        "POST", f"/v2/models/{name}/infer", {"inputs": [tensor], "parameters": {"timeout": 1}}
    )
    by_header = up.ask(
        "POST", f"/tenants/{name}", array.tobytes(), {**RAW, "x-slo-ms": "0.001"}
    )  # fmt: skip
    for reply in (by_parameter, by_header):
        assert reply.status in (429, 504)
        assert "deadline" in reply.error
        assert ("retry-after" in reply.headers) == (reply.status == 429)
    np.testing.assert_allclose(
        ask_raw(up, None, model, array), model.answer(array), rtol=2e-4, atol=2e-4
    )
