"""What one replica takes in at once: slow bodies, many bodies, large ones, and late answers."""

from __future__ import annotations

import asyncio
import gzip
import json
import time

import msgspec
import numpy as np
import pytest
from http_fakes import Server, drive, tenant

from coissue.deployments.channel.frames import NUMPY_DTYPES
from coissue.deployments.http import tensors
from coissue.deployments.http.intake import BODY_BYTES_PER_SECOND
from coissue.kernels.ir import R

INFER = "/v2/models/m/infer"
GOOD = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
RAW = {"content-type": "application/octet-stream"}
FOUR = np.arange(4, dtype="<f4").tobytes()


class Slow:
    """A client whose body comes in pieces, each after `pause` seconds, and may never end."""

    def __init__(self, app, pieces=(b"{",), pause=0.0, ends=False, path="/tenants/m"):
        self.app, self.pieces, self.pause, self.ends = app, list(pieces), pause, ends
        self.path, self.start, self.body = path, {}, b""

    async def receive(self):
        if self.pieces:
            await asyncio.sleep(self.pause)
            body = self.pieces.pop(0)
            more = bool(self.pieces) or not self.ends
            return {"type": "http.request", "body": body, "more_body": more}
        await asyncio.Event().wait()

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.start = message
        else:
            self.body += message["body"]

    async def run(self):
        headers = [(b"content-length", b"100"), (b"content-type", b"application/octet-stream")]
        scope = {"type": "http", "method": "POST", "path": self.path, "headers": headers}
        await self.app(scope, self.receive, self.send)
        return self

    @property
    def status(self):
        return self.start["status"]

    @property
    def headers(self):
        return dict(self.start["headers"])


def test_a_body_that_does_not_come_is_given_up():
    server = Server(body_seconds=0.2)
    slow = asyncio.run(Slow(server.app).run())
    assert slow.status == 408
    assert json.loads(slow.body) == {"error": "body: 1 bytes and no end of it in 0 s"}
    assert slow.headers[b"connection"] == b"close"
    assert server.app.counts == {"body_timeout": 1}


def test_a_large_body_may_take_longer():
    server = Server(body_seconds=0.3)
    piece = bytes(BODY_BYTES_PER_SECOND // 4)
    slow = Slow(server.app, [piece] * 5, pause=0.15, ends=True)
    server.client.directory["m"] = tenant(deadline_ns=10**10)
    assert asyncio.run(slow.run()).status == 413  # too many rows: so it was read whole


def test_slow_bodies_leave_room_for_others():
    """More slow clients than bodies may be on their way: no route waits for them, no body that
    comes whole is refused."""
    server = Server(body_seconds=0.5, ongoing=8)

    async def scenario():
        slow = [asyncio.ensure_future(Slow(server.app).run()) for _ in range(9)]
        while sum(one.done() for one in slow) < 3:
            await asyncio.sleep(0)
        assert (await drive(server.app, "GET", "/healthz")).status == 200
        whole = await drive(server.app, "POST", "/tenants/m", FOUR, RAW)
        assert sum(not one.done() for one in slow) == 6  # neither waited for them
        return whole, await asyncio.gather(*slow)

    whole, ended = asyncio.run(scenario())
    assert whole.status == 200
    assert sorted(one.status for one in ended) == [408] * 6 + [429] + [503] * 2
    (refused, _) = (one for one in ended if one.status == 503)
    assert refused.headers[b"retry-after"] == b"1"
    assert json.loads(refused.body)["error"] == "6 bodies are on the way already"


def test_more_requests_than_a_replica_works_on_are_refused_at_once():
    server = Server(ongoing=2)
    server.client.stuck = True

    async def scenario():
        stuck = [
            asyncio.ensure_future(drive(server.app, "POST", "/tenants/m", FOUR, RAW))
            for _ in range(2)
        ]
        await asyncio.sleep(0.05)
        refused = await drive(server.app, "POST", INFER, json.dumps(GOOD).encode())
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        server.client.stuck = False
        return refused, await drive(server.app, "POST", "/tenants/m", FOUR, RAW)

    refused, again = asyncio.run(scenario())
    assert (refused.status, refused.headers["connection"]) == (429, "close")
    assert refused.error == "2 requests are open in this replica"
    assert again.status == 200


@pytest.mark.parametrize("encoding", [None, "gzip"])
def test_bytes_of_bodies_are_bounded_until_their_requests_are_answered(encoding):
    wide = tenant("wide", {"x": ("f32", R, 1024)}, {"y": ("f32", R, 1)}, rows_limit=4)
    server = Server(held_bytes=20_000)
    server.client.directory["wide"] = wide
    server.client.stuck = True
    body = bytes(4 * 4096)
    headers = dict(RAW)
    if encoding:
        body, headers["content-encoding"] = gzip.compress(body), encoding

    async def scenario():
        def ask():
            return drive(server.app, "POST", "/tenants/wide", body, headers)

        first = asyncio.ensure_future(ask())
        await asyncio.sleep(0.05)
        refused = await ask()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        server.client.stuck = False
        return refused, await ask()

    refused, again = asyncio.run(scenario())
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert refused.error.startswith("bodies: 16")
    assert again.status == 200


# --- deadlines ----------------------------------------------------------------------------------


def test_time_of_the_body_counts_and_what_is_late_does_not_go_on():
    server = Server()
    slow = Slow(server.app, [FOUR[:8], FOUR[8:]], pause=0.08, ends=True)  # the SLO is 100 ms
    assert asyncio.run(slow.run()).status == 504
    assert server.client.calls == []


@pytest.mark.parametrize(("path", "body"), [(INFER, GOOD), ("/tenants/m", FOUR)])
def test_an_answer_after_the_deadline_is_an_error(path, body):
    server = Server()
    infer = server.client.infer

    async def late(*args, **_):
        result = await infer(*args)
        await asyncio.sleep(0.15)
        return result

    server.client.infer = late
    reply = server.post(path, body, RAW if body is FOUR else {})
    assert (reply.status, reply.error) == (504, "the deadline passed before the request was done")
    assert server.app.reports._refused == {("m", "expired", True): 1}


# --- large answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (40_000,), (3, 20_000), (40_000, 3), (2, 3, 20_000), (0, 5)])
@pytest.mark.parametrize("dtype", ["f32", "i64", "bool"])
def test_json_in_parts_is_the_same_json(shape, dtype):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(NUMPY_DTYPES[dtype])
    whole = msgspec.json.encode(array.tolist())
    assert b"".join(tensors._encode_parts(array)) == whole
    large = asyncio.run(tensors.encode_large({"y": array}))
    assert ({"y": msgspec.Raw(whole)} if array.size > tensors.VALUES_AT_ONCE else {}) == large


@pytest.mark.parametrize("path", [INFER.replace("/m/", "/large/"), "/tenants/large"])
def test_a_large_json_answer_does_not_hold_up_others(path):
    """25 MB of JSON; between its parts the loop has turns."""
    values = 1_400_000
    server = Server()
    server.client.directory["large"] = tenant(
        "large", {"x": ("f32", R, 4)}, {"y": ("f32", R, values)}, deadline_ns=10**11
    )
    answer = {"y": np.random.default_rng(0).random((1, values), np.float32)}
    infer = server.client.infer

    async def given(name, *rest, **_):
        return msgspec.structs.replace(await infer("m", *rest), outputs=answer)

    server.client.infer = given

    async def scenario():
        body = GOOD if path.endswith("infer") else {"inputs": {"x": [[1, 2, 3, 4]]}}
        large = asyncio.ensure_future(drive(server.app, "POST", path, json.dumps(body).encode()))
        waits = []
        while not large.done():
            before = time.thread_time()  # what this thread did, whatever else the machine does
            await asyncio.sleep(0)
            waits.append(time.thread_time() - before)
        return await large, waits

    reply, waits = asyncio.run(scenario())
    assert reply.status == 200
    assert len(reply.body) > 25_000_000
    got = reply.json["outputs"]
    data = got[0]["data"] if isinstance(got, list) else got["y"][0]
    assert np.array_equal(np.array(data, np.float32), answer["y"][0])
    assert len(waits) > 50
    assert max(waits) < sum(waits) / 2  # whatever the machine's speed


# --- what is not supported, and what is echoed --------------------------------------------------


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"parameters": {"sequence_id": 7}}, "parameters.sequence_id"),
        ({"parameters": {"sequence_id": "a"}}, "parameters.sequence_id"),
        (
            {"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]},
            "outputs[0].parameters.shared_memory_region",
        ),
    ],
)
def test_what_is_not_supported_is_refused(change, path):
    reply = Server().post(INFER, {**GOOD, **change})
    assert reply.status == 400
    assert reply.error.startswith(f"{path}: ")
    assert reply.error.endswith("not supported")


def test_no_sequence_is_no_sequence():
    assert Server().post(INFER, {**GOOD, "parameters": {"sequence_id": 0}}).status == 200


LONG = "n" * 100_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/v2/models/{LONG}/infer", GOOD),
        (f"/v2/models/m/versions/{LONG}/infer", GOOD),
        (f"/{LONG}", GOOD),
        (INFER, {"inputs": [{**GOOD["inputs"][0], "name": LONG}]}),
        (INFER, {"inputs": [{**GOOD["inputs"][0], "datatype": LONG}]}),
        (INFER, {**GOOD, "outputs": [{"name": LONG}]}),
        ("/tenants/m", {"inputs": {LONG: [[1, 2, 3, 4]]}}),
        ("/tenants/m", {LONG: 1}),
    ],
)
def test_what_a_client_said_is_not_echoed_whole(path, body):
    reply = Server().post(path, body)
    assert reply.status in (400, 404)
    assert len(reply.error) < 300


@pytest.mark.parametrize("headers", [{"content-encoding": LONG}, {"x-slo-ms": LONG}])
def test_headers_are_not_echoed_whole(headers):
    reply = Server().post(INFER, GOOD, headers)
    assert reply.status == 400
    assert len(reply.error) < 300


def test_verbs_are_not_echoed_whole():
    assert len(Server().ask("X" * 10_000, "/healthz").error) < 100
