"""The ASGI application, driven in-process: every route, every error, every way to leave."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import numpy as np
import pytest
from http_fakes import FakeClient, Server, drive, tenant

from coissue.deployments.channel.checking import InferError
from coissue.deployments.channel.frames import TIME_BOUNDS
from coissue.deployments.handlers import load_handler
from coissue.deployments.http.app import HttpApp, HttpSettings
from coissue.deployments.http.errors import STATUS, HttpError
from coissue.deployments.settings import HandlerSettings

INFER = "/v2/models/m/infer"
GOOD = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
RAW = {"content-type": "application/octet-stream"}
FOUR = np.arange(4, dtype="<f4").tobytes()


@pytest.fixture
def server():
    return Server()


# --- routes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/v2", {"name": "coissue"}),
        ("/v2/", {"name": "coissue"}),
        ("/v2/health/live", {"live": True, "ready": True}),
        ("/v2/health/ready", {"live": True, "ready": True}),
        ("/healthz", {"live": True}),
        ("/readyz", {"ready": True}),
        ("/v2/models/m", {"name": "m", "versions": ["1"]}),
        ("/v2/models/m/versions/1", {"name": "m"}),
        ("/v2/models/m/ready", {"name": "m", "ready": True}),
        ("/v2/models/m/versions/1/ready", {"name": "m", "ready": True}),
        ("/v2/models/m/config", {"name": "m", "max_batch_size": 8}),
        ("/v2/models/m/versions/1/config", {"name": "m"}),
    ],
)
def test_get_routes(server, path, part):
    reply = server.get(path)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert part.items() <= reply.json.items()


def test_binary_extension_is_advertised(server):
    assert "binary_tensor_data" in server.get("/v2").json["extensions"]


def test_models_are_listed(server):
    assert server.get("/v2/models").json["models"] == list(server.client.directory)


@pytest.mark.parametrize(
    "path",
    [
        "/nothing", "/v2/nothing", "/v2/models/m/nothing", "/v2/models/m/versions",
        "/v2/models/m/versions/1/nothing", "/v2/models/m/other/1/ready", "/tenants", "/tenants/",
        "/tenants/m/x", "/v2/models/m/versions/1/ready/x", "/v2/models//infer", "//",
        "/v2/trace/setting", "/V2",
    ],
)  # fmt: skip
def test_unknown_routes(server, path):
    reply = server.get(path)
    assert reply.status == 404
    assert reply.error == f"no route {path!r}"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", INFER, "POST"),
        ("PUT", "/v2/models/m/versions/1/infer", "POST"),
        ("GET", "/tenants/m", "POST"),
        ("POST", "/v2", "GET"),
        ("DELETE", "/v2/models/m", "GET"),
        ("POST", "/status", "GET"),
        ("POST", "/v2/health/live", "GET"),
    ],
)
def test_wrong_verb(server, method, path, allowed):
    reply = server.ask(method, path)
    assert reply.status == 405
    assert reply.error.endswith(f"use {allowed}")


def test_head_is_a_get(server):
    assert server.ask("HEAD", "/healthz").status == 200


@pytest.mark.parametrize("path", ["/v2/models/zz", "/v2/models/zz/infer", "/tenants/zz"])
def test_unknown_tenant(server, path):
    method = "GET" if path.endswith("models/zz") else "POST"
    reply = server.ask(method, path, b"{}")
    assert (reply.status, reply.error) == (
        404,
        "no tenant 'zz', there are: brain, broken, bytes, half, m, mask, steps, two, waiting",
    )


def test_no_tenant_is_unknown_before_a_scheduler_has_told_of_any(server):
    """At a start every tenant of the settings is asked for too early, and none is a mistake."""
    known, server.client.directory = server.client.directory, {}
    for path in ("/v2/models/m/infer", "/tenants/m", "/tenants/zz"):
        reply = server.post(path, b"{}")
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert reply.error == "the scheduler is starting: no tenant is known yet"
    server.client.directory = known
    assert server.post("/tenants/zz", b"{}").status == 404
    server.client.directory = {}
    assert server.post("/tenants/zz", b"{}").status == 404


def test_unknown_version(server):
    reply = server.post("/v2/models/m/versions/7/infer", GOOD)
    assert (reply.status, reply.error) == (404, "tenant 'm' has version 1, not '7'")
    assert server.post("/v2/models/m/versions/1/infer", GOOD).status == 200


def test_route_prefix_is_cut(server):
    async def ask(path):
        reply = {}

        async def send(message):
            reply.update(message)

        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "root_path": "/a"}
        await server.app(scope, None, send)
        return reply["body"]

    assert b"coissue" in asyncio.run(ask("/a/v2"))
    assert b'"tenants"' in asyncio.run(ask("/a"))
    assert b"no route '/a/b'" in asyncio.run(ask("/a/b"))
    assert b"coissue" in asyncio.run(ask("/v2"))


def test_only_own_tenants():
    server = Server(tenants=frozenset({"two"}))
    assert server.post("/tenants/m", b"{}").status == 404
    assert server.get("/v2/models").json == {"models": ["two"]}


METRICS = b"""\
# HELP coissue_launches_total Launches
# TYPE coissue_launches_total counter
coissue_launches_total 3.0
# HELP coissue_requests_total Requests
# TYPE coissue_requests_total counter
coissue_requests_total{outcome="failed",tenant="m"} 1.0
coissue_requests_total{outcome="failed",tenant="two"} 2.0
coissue_requests_total{outcome="failed",tenant="two-b"} 4.0
# HELP coissue_rejections_total Refused
# TYPE coissue_rejections_total counter
coissue_rejections_total{reason="x",tenant="m"} 1.0
"""


def test_own_application_shows_nothing_of_other_tenants():
    server = Server(tenants=frozenset({"two"}))
    states = {name: [info.state, info.reason] for name, info in server.client.directory.items()}
    figures = {name: {"requests": 3, "in_time": 1.0, "p99_ms": 9.0} for name in ("m", "two")}
    told = {"policy": "space_time", "device": "cpu", "requests_open": 7, "tenants": states}
    told["figures"] = figures
    server.client.told |= {"metrics": METRICS, "status": json.dumps(told).encode()}
    assert server.get("/metrics").body.decode().splitlines() == [
        "# HELP coissue_requests_total Requests",
        "# TYPE coissue_requests_total counter",
        'coissue_requests_total{outcome="failed",tenant="two"} 2.0',
    ]
    status = server.get("/status").json
    assert [(t["name"], t["requests"]) for t in status["tenants"]] == [("two", 3)]
    kept = {"policy": "space_time", "device": "cpu", "tenants": {"two": ["ready", ""]}}
    assert status["scheduler"] == kept
    reply = server.get("/timeline")
    assert (reply.status, reply.error) == (404, "no route '/timeline': it shows all tenants")


def test_timeline_comes_from_the_scheduler(server):
    server.client.told["timeline"] = b'{"traceEvents": []}'
    reply = server.get("/timeline")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json == {"traceEvents": []}


# --- inference ----------------------------------------------------------------------------------


def test_infer_json(server):
    reply = server.post(
        INFER, {**GOOD, "id": "42", "parameters": {"timeout": 5_000_000, "priority": 2}}
    )
    assert reply.status == 200
    assert reply.json == {
        "model_name": "m",
        "model_version": "1",
        "id": "42",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}],
    }
    ((name, _, budget_ns, priority),) = server.client.calls
    assert (name, priority) == ("m", 2)
    assert 4 * 10**9 < budget_ns < 5 * 10**9


def test_plain_json(server):
    reply = server.post("/tenants/m", {"inputs": {"x": [[1, 2, 3, 4], [5, 6, 7, 8]]}})
    assert reply.json == {"outputs": {"y": [[1, 2, 3, 4], [5, 6, 7, 8]]}}
    assert server.client.calls[0][3] == 0


def test_plain_raw(server):
    reply = server.post("/tenants/m", FOUR * 2, RAW)
    assert (reply.status, reply.body) == (200, FOUR * 2)
    assert reply.headers["x-shape"] == "2,4"


def test_answers_tell_where_the_time_went_and_their_number(server):
    timing = "queue;dur=1.500, device;dur=0.250, launches;desc=3, request;desc=17"
    for reply in (
        server.post(INFER, GOOD),
        server.post("/tenants/m", {"inputs": {"x": [[1, 2, 3, 4]]}}),
        server.post("/tenants/m", FOUR, RAW),
    ):
        assert reply.headers["server-timing"] == timing


def test_plain_raw_needs_one_input_and_whole_rows(server):
    assert "whole number of rows" in server.post("/tenants/m", FOUR[:-1], RAW).error
    assert "one input" in server.post("/tenants/two", FOUR, RAW).error
    assert server.post("/tenants/m", b"", RAW).error == "rows: 0, allowed: 1 to 8"
    assert server.post("/tenants/half", FOUR, RAW).body == FOUR


def test_short_floats_have_no_plain_json(server):
    reply = server.post("/tenants/half", {"inputs": {"x": [[1, 2]]}})
    assert (reply.status, reply.error) == (
        400,
        "outputs.y: FP16 has no JSON form: ask /v2/models/half/infer for it, "
        "with parameters.binary_data_output: true",
    )


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"{}", 400, "body: object missing required field `inputs`"),
        (b'{"inputs": []}', 400, "inputs: expected `object`, got `array`"),
        ({"inputs": {}}, 400, "input 'x' is missing"),
        ({"inputs": {"q": [[1]]}}, 400, "inputs: 'q' is no input, there are: x"),
        ({"inputs": {"x": [1, 2, 3, 4]}}, 400, "inputs.x: a list nested 2 deep is needed, not 1"),
        ({"inputs": {"x": []}}, 400, "inputs.x: rows: 0, at least one is needed"),
        ({"inputs": {"x": [[]]}}, 400, "input 'x': shape [1, 0], allowed: [R, 4]"),
        ({"inputs": {"x": [[1, 2]]}}, 400, "input 'x': shape [1, 2], allowed: [R, 4]"),
        ({"inputs": {"x": [[1, 2], [3]]}}, 400, "inputs.x: lists of different lengths"),
        ({"inputs": {"x": [[1, 2, 3, "a"]]}}, 400, "inputs.x[0][3]: expected `float`, got `str`"),
        ({"inputs": {"x": [[0] * 4] * 9}}, 413, "inputs.x: 36 values, limits.rows allows 32"),
    ],
)
def test_bad_plain_json(server, body, status, sentence):
    reply = server.post("/tenants/m", body)
    assert reply.status == status
    assert reply.error.startswith(sentence)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ([], "rows: 0, at least one is needed"),
        ([[]], "tokens: 0, at least one is needed"),
        ([[1]], "a list nested 3 deep is needed, not 2"),
    ],
)
def test_empty_sequences(server, given, wrong):
    reply = server.post("/tenants/steps", {"inputs": {"x": given}})
    assert (reply.status, reply.error) == (400, f"inputs.x: {wrong}")


def test_bodies_that_would_decode_to_many_objects():
    """A body of the allowed size must not become gigabytes of Python objects."""
    names = b'{"inputs": {' + b",".join(b'"%d":0' % i for i in range(600)) + b"}}"
    assert Server().post("/tenants/m", names).error == "body: more than 512 names"
    values = b"[" + b"[]," * 1_000_000 + b"[]]"
    reply = Server(handlers={"m": Doubles()}).post("/tenants/m", values)
    assert (reply.status, reply.error) == (413, "body: more than 1000000 values")


def test_missing_input_and_wrong_rank_over_oip(server):
    one = {"name": "a", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
    reply = server.post("/v2/models/two/infer", {"inputs": [one]})
    assert (reply.status, reply.error) == (400, "input 'b' is missing")
    flat = {"name": "x", "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    assert "allowed: [R, 4]" in server.post(INFER, {"inputs": [flat]}).error


def test_too_many_rows_is_413(server):
    assert server.post("/tenants/m", FOUR * 9, RAW).status == 413


@pytest.mark.parametrize(
    "value",
    [
        "nan", "-1", "0", "inf", "x", "", "1e300", "1_0", " 10", "10 ", "+10", "1e1", "infinity",
        "0x10", ".5", "1.", "1,5", "\xb2", "\u0661".encode().decode("latin-1"), "9" * 5000,
        "86400000.1",
    ],
)  # fmt: skip
def test_bad_slo_header(server, value):
    reply = server.post(INFER, GOOD, {"x-slo-ms": value})
    assert (reply.status, reply.error[:16]) == (400, "header x-slo-ms:")


def test_slo_header_is_the_budget_unless_the_body_has_one(server):
    """Less what was used up on the way to the scheduler."""
    server.post(INFER, GOOD, {"x-slo-ms": "2000.5"})
    server.post(INFER, {**GOOD, "parameters": {"timeout": 7 * 10**6}}, {"x-slo-ms": "2000"})
    server.post("/tenants/m", FOUR, {**RAW, "x-slo-ms": "4000"})
    server.post("/tenants/m", FOUR, RAW)  # the tenant's own
    given = [2_000_500_000, 7 * 10**9, 4 * 10**9, 10**8]
    for call, budget_ns in zip(server.client.calls, given, strict=True):
        assert budget_ns // 2 < call[2] < budget_ns


# --- the body -----------------------------------------------------------------------------------


def test_body_in_pieces(server):
    body = json.dumps(GOOD).encode()
    assert server.post(INFER, chunks=[body[:10], b"", body[10:30], body[30:]]).status == 200


def test_claimed_length_is_refused_before_reading(server):
    async def ask():
        async def receive():
            pytest.fail("the body was read")

        sent = []

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": INFER, "root_path": "",
            "headers": [(b"content-length", b"1073741824")],
        }  # fmt: skip
        await server.app(scope, receive, send)
        return sent[0]

    start = asyncio.run(ask())
    assert start["status"] == 413
    assert (b"connection", b"close") in start["headers"]


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 30, "abc"])
def test_nonsense_length(server, length):
    assert server.post(INFER, GOOD, {"content-length": length}).status == 413


def test_limit_holds_when_the_length_lies():
    server = Server(body_bytes=100)
    pieces = [b" " * 60] * 50
    reply = server.post(INFER, chunks=pieces, headers={"content-length": "10"})
    assert (reply.status, reply.error) == (413, "body: 120 bytes and more, allowed: 100")
    assert server.post(INFER, b" " * 100).status == 400


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
def test_compressed_body(server, encoding, pack):
    packed = pack(json.dumps(GOOD).encode())
    assert server.post(INFER, packed, {"content-encoding": encoding}).status == 200


@pytest.mark.parametrize(
    ("encoding", "body", "status", "sentence"),
    [
        ("gzip", b"hello", 400, "body: not valid gzip"),
        ("deflate", gzip.compress(b"{}", mtime=0), 400, "body: not valid deflate"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], 400, "body: the gzip data are truncated"),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"x", 400, "body: the gzip data are truncated or"),
        ("gzip", b"", 400, "body: the gzip data are truncated"),
        ("br", b"x", 400, "header Content-Encoding: 'br' is not gzip or deflate"),
        (
            "gzip",
            gzip.compress(bytes(10_000_000)),
            413,
            "body: more than 1000000 bytes unpacked, allowed: 1000000",
        ),
    ],
)
def test_bad_compression(encoding, body, status, sentence):
    reply = Server(body_bytes=1_000_000).post(INFER, body, {"content-encoding": encoding})
    assert reply.status == status
    assert reply.error.startswith(sentence)


# --- what the scheduler answers -----------------------------------------------------------------


@pytest.mark.parametrize(("reason", "status"), STATUS.items())
def test_every_reason_is_answered_by_the_table(server, reason, status):
    server.client.error = InferError(reason, "a sentence", 1_500_000_000)
    reply = server.post(INFER, GOOD)
    assert (reply.status, reply.error) == (status, "a sentence")
    seconds = "60" if reason == "failed" else "2" if status in (429, 503) else None
    assert reply.headers.get("retry-after") == seconds
    assert server.app.counts == {reason: 1}


def test_retry_after_is_never_zero():
    _, headers, _ = HttpError("window_full", "full").answer()
    assert (b"retry-after", b"1") in headers


def test_unexpected_exception_is_hidden_and_logged(server, caplog):
    server.client.error = RuntimeError("secret detail")
    reply = server.post(INFER, GOOD)
    assert (reply.status, reply.error) == (500, "internal error")
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(("name", "state"), [("waiting", "loading"), ("broken", "failed")])
def test_tenants_that_are_not_ready(server, name, state):
    for method, path in (
        ("POST", f"/v2/models/{name}/infer"),
        ("POST", f"/tenants/{name}"),
        ("GET", f"/v2/models/{name}/ready"),
        ("GET", f"/v2/models/{name}"),
        ("GET", f"/v2/models/{name}/config"),
        # Which version it will have is not known before.
        ("GET", f"/v2/models/{name}/versions/7"),
        ("POST", f"/v2/models/{name}/versions/7/infer"),
    ):
        reply = server.ask(method, path, b"{}")
        assert reply.status == 503
        assert reply.error.startswith(f"tenant '{name}' is {state}: ")
        assert reply.headers["retry-after"] == ("60" if state == "failed" else "1")


def test_without_scheduler():
    app = HttpApp(lambda: None, HttpSettings())

    def ask(method, path):
        return asyncio.run(drive(app, method, path, b"{}"))

    assert ask("GET", "/healthz").json == {"live": True, "ready": False}
    for method, path in (("GET", "/readyz"), ("POST", INFER), ("GET", "/metrics")):
        reply = ask(method, path)
        assert reply.status == 503
        assert reply.error
    status = ask("GET", "/status")
    assert (status.status, status.json["tenants"]) == (200, [])


def test_ready_means_connected_and_one_tenant(server):
    server.client.is_connected = False
    assert server.get("/v2/health/ready").status == 503
    assert server.get("/v2/models/m/ready").status == 503
    server.client.is_connected = True
    assert server.get("/v2/models/m/ready").status == 200
    server.client.directory = {"broken": server.client.directory["broken"]}
    assert server.get("/v2/health/ready").status == 503
    assert server.get("/v2/health/live").status == 200


# --- clients that leave -------------------------------------------------------------------------


def test_client_gone_while_sending(server):
    app = server.app

    async def ask():
        messages = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive():
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": INFER, "headers": [], "root_path": ""}
        await app(scope, receive, send)

    asyncio.run(ask())
    assert app.counts == {"client_gone": 1}
    assert server.client.calls == []


def test_cancelling_from_outside_passes_through(server):
    """Serve cancels the task of a request: it must end cancelled, and withdraw its work."""
    server.client.stuck = True

    async def ask():
        task = asyncio.create_task(drive(server.app, "POST", INFER, json.dumps(GOOD).encode()))
        while not server.client.calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())
    assert server.client.cancelled == 1
    assert server.app.counts == {"client_gone": 1}


# --- handlers -----------------------------------------------------------------------------------


class Doubles:
    """A handler of the application's own protocol."""

    passes_on = False

    async def preprocess(self, payload):
        return {"x": np.array([payload["row"]], np.float64)}

    async def postprocess(self, outputs, payload):
        return {"sum": outputs["y"].sum(), "asked": payload["row"]}


def test_handler_serves_the_plain_route_only():
    server = Server(handlers={"m": Doubles()})
    assert server.post("/tenants/m", {"row": [1, 2, 3, 4]}).json == {
        "sum": 10.0,
        "asked": [1, 2, 3, 4],
    }
    assert server.client.calls[0][1]["x"].dtype == np.float32
    assert server.post(INFER, GOOD).json["outputs"][0]["data"] == [1, 2, 3, 4]
    assert server.post("/tenants/m", FOUR, RAW).body == FOUR
    assert server.post("/tenants/m", b"[" * 10_000).error == "body: nested too deeply"
    assert server.post("/tenants/m", b"nope").error.startswith("body: not valid JSON")


def test_handler_answers_that_are_not_json():
    class Odd(Doubles):
        async def postprocess(self, outputs, payload):
            return {"a": object()}

    reply = Server(handlers={"m": Odd()}).post("/tenants/m", {"row": [1, 2, 3, 4]})
    assert reply.status == 500
    assert reply.error == "the handler's answer is not JSON: a value of type object"


def test_handler_arrays_are_cast_only_when_harmless():
    class Odd(Doubles):
        async def preprocess(self, payload):
            return {"x": np.array(payload["row"])}

    def post(tenant, row):
        return Server(handlers={tenant: Odd()}).post(f"/tenants/{tenant}", {"row": row})

    assert "the handler gave <U1, not float32" in post("m", [["a"] * 4]).error
    assert "the handler gave float64, not uint8" in post("bytes", [[0.5, 1, 2]]).error
    reply = post("bytes", [[1, 2, 256]])
    assert (reply.status, reply.error) == (400, "inputs.x: a value is out of range for uint8")


@pytest.mark.parametrize(
    ("inputs", "wrong"),
    [
        ({"q": [[1, 2, 3]]}, "inputs: 'q', given by {}, is no input, there are: x"),
        ({"x": [[0.5, 1, 2]]}, "inputs.x: {} gave float64, not uint8"),
    ],
)
def test_wrong_inputs_are_the_fault_of_who_chose_them(inputs, wrong):
    class Fixed(Doubles):
        async def preprocess(self, payload):
            return {name: np.array(rows) for name, rows in inputs.items()}

    reply = Server(handlers={"bytes": Fixed()}).post("/tenants/bytes", {})
    assert (reply.status, reply.error) == (500, wrong.format("the handler"))
    classes = load_handler(HandlerSettings(use="classes", kwargs={"labels": ["a", "b", "c"]}))
    reply = Server(handlers={"bytes": classes}).post("/tenants/bytes", {"inputs": inputs})
    assert (reply.status, reply.error) == (400, wrong.format("body"))


# --- status, metrics, life cycle ----------------------------------------------------------------


def test_status_as_data(server):
    server.post(INFER, GOOD)
    status = server.get("/status").json
    (broken,) = [tenant for tenant in status["tenants"] if tenant["name"] == "broken"]
    assert (broken["state"], broken["slo_class"], broken["deadline_ms"]) == ("failed", "fast", 100)
    assert status["scheduler"] == {"policy": "space_time"}
    assert status["replica_answers"] == {"ok": 1}


def test_status_tells_which_handler_serves_and_how_a_tenant_does(server):
    figures = {"requests": 200, "in_time": 0.995, "p99_ms": 12.5}
    told = {"policy": "fifo", "figures": {"m": figures, "gone": figures}}
    server.client.told["status"] = json.dumps(told).encode()
    server.client.directory["m"] = tenant(handler='{"use":"team.text:Own","kwargs":{}}')
    status = server.get("/status").json
    tenants = {one["name"]: one for one in status["tenants"]}
    assert {key: tenants["m"][key] for key in ("handler", *figures)} == {
        "handler": "team.text:Own", **figures,
    }  # fmt: skip
    nothing = {"handler": "", "requests": None, "in_time": None, "p99_ms": None}
    assert {key: tenants["two"][key] for key in nothing} == nothing
    assert status["scheduler"] == {"policy": "fifo"}
    page = server.get("/status", {"accept": "text/html"}).body.decode()
    for cell in ("team.text:Own", "200", "0.995", "12.5"):
        assert f"<td>{cell}</td>" in page
    assert "None" not in page


def test_status_says_why_the_config_deployed_last_does_not_run(server):
    async def explain():
        return "", "args.tenants.0.slo: <no> class"

    assert server.get("/status").json["deploy_error"] == ""
    server.app.settings = HttpSettings(explain=explain)
    assert server.get("/status").json["deploy_error"] == "args.tenants.0.slo: <no> class"
    page = server.get("/status", {"accept": "text/html"}).body.decode()
    assert "does not run: args.tenants.0.slo: &lt;no&gt; class" in page


def test_status_page_escapes_everything(server):
    server.client.told["status"] = b'{"<i>": ["<script>alert(1)</script>", {"a": 0.5}]}'
    reply = server.get("/status", {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    page = reply.body.decode()
    assert "&lt;b&gt;numbers&lt;/b&gt;" in page
    assert "<script" not in page
    assert "<i>" not in page


@pytest.mark.parametrize("accept", ["", "*/*", "application/json", "application/json, text/html"])
def test_status_is_data_unless_html_is_preferred(server, accept):
    assert server.get("/status", {"accept": accept}).headers["content-type"] == "application/json"


def test_status_says_why_there_is_no_scheduler(server):
    server.client.is_connected = False
    server.client.error = InferError("restarting", "no scheduler is connected")
    said = {"error": "no scheduler is connected", "cannot_start": False}
    assert server.get("/status").json["scheduler"] == said
    why = "the scheduler cannot start: OSError: no"

    async def explain():
        return why, ""

    server.app.settings = HttpSettings(explain=explain)
    assert server.get("/status").json["scheduler"] == {"error": why, "cannot_start": True}
    page = server.get("/status", headers={"accept": "text/html"}).body.decode()
    assert why in page


def test_metrics_come_from_the_scheduler(server):
    reply = server.get("/metrics")
    assert reply.body == b"coissue_x 1\n"
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_refusals_and_times_are_reported_once_with_the_tenant(server):
    server.app.reports.report_after_s = 0.01
    server.app.reports.lag_sample_s = 0.001
    counted = InferError("deadline", "too late")
    counted.is_counted = True

    async def main():
        for path in ("/tenants/m", INFER, "/tenants/made-up", "/nope"):
            await drive(server.app, "POST", path, b"{")
        await drive(server.app, "GET", "/tenants/m")
        answer = await drive(server.app, "POST", INFER, json.dumps(GOOD).encode())
        assert answer.status == 200
        server.client.error = counted
        await drive(server.app, "POST", INFER, json.dumps(GOOD).encode())
        server.client.is_connected = False
        # A probe: whoever waits for the tenant is no miss of it.
        assert (await drive(server.app, "GET", "/v2/models/m/ready")).status == 503
        await asyncio.sleep(0.05)
        assert server.client.reported == []
        server.client.is_connected = True
        while len(server.client.reported) < 3:
            await asyncio.sleep(0.01)

    asyncio.run(main())
    reports = server.client.reported
    assert sorted(entry for report in reports for entry in report.refused) == [
        ("", "unknown_route", 1, False), ("", "unknown_tenant", 1, False),
        ("m", "malformed", 2, False), ("m", "wrong_verb", 1, False),
    ]  # fmt: skip
    times = [entry for report in reports for entry in report.times]
    (answered,) = [entry for entry in times if entry.kind == "http"]
    assert (answered.tenant, sum(answered.counts)) == ("m", 1)
    # A loop that was never busy for long: each sample is in a bucket, and each is told once.
    assert {entry[:2] for entry in times} == {("http", "m"), ("lag", "")}
    assert all(len(entry.counts) == len(TIME_BOUNDS) + 1 for entry in times)


def test_lifespan_and_websocket():
    app = HttpApp(FakeClient, HttpSettings())

    async def play(kind, messages):
        sent = []

        async def receive():
            return {"type": messages.pop(0)}

        async def send(message):
            sent.append(message["type"])

        await app({"type": kind}, receive, send)
        return sent

    assert asyncio.run(play("lifespan", ["lifespan.startup", "lifespan.shutdown"])) == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    assert asyncio.run(play("websocket", [])) == ["websocket.close"]
