"""Real clients against the real application on a real server (uvicorn, as in Ray Serve).

`tritonclient` is the client that most users of the Open Inference Protocol have.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.http as triton
import uvicorn
from tritonclient.utils import InferenceServerException

from coissue.deployments.channel.backend import InferResult
from coissue.deployments.channel.checking import check_inputs
from coissue.deployments.channel.frames import NUMPY_DTYPES, PortInfo, TenantInfo
from coissue.deployments.http.app import HttpApp, HttpSettings
from coissue.kernels.ir import Dim, R, T

BODY_BYTES = 1 << 20


def ports(name, dtype, *dims):
    return (PortInfo(name, dtype, dims),)


class Repeats:
    """A scheduler whose tenants give their first input back."""

    def __init__(self):
        every = {
            f"any-{dtype}": (ports("x", dtype, R, Dim(3)), ports("y", dtype, R, Dim(3)))
            for dtype in NUMPY_DTYPES
        }
        every["a.b_c-1"] = every["any-f32"]
        every["words"] = (ports("x", "i64", R, T), ports("y", "i64", R, T))
        self.directory = {
            name: TenantInfo(name, 1, "ready", *pair, rows_limit=4096, tokens_limit=64)
            if name == "words"
            else TenantInfo(name, 1, "ready", *pair, rows_limit=4096)
            for name, pair in every.items()
        }
        self.is_connected = True
        self.calls = []

    async def infer(self, name, inputs, budget_ns=None, priority=0, *, version=None):
        check_inputs(self.directory[name], inputs)
        self.calls.append((name, budget_ns, priority))
        return InferResult({"y": inputs["x"]}, 0, 0, 1, 1)

    def report(self, refused):
        return True

    async def ask(self, what):
        return b"{}"


@pytest.fixture(scope="module")
def scheduler():
    return Repeats()


@pytest.fixture(scope="module")
def address(scheduler):
    """host:port of the application under uvicorn."""
    app = HttpApp(lambda: scheduler, HttpSettings(body_bytes=BODY_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, log_level="error", loop="uvloop", access_log=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        host, port = listening.getsockname()
        yield f"{host}:{port}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def client(address):
    with triton.InferenceServerClient(address) as client:
        yield client


def ask(client, array, name="any-f32", as_binary=True, want=None, **options):
    datatype = triton.InferInput("x", array.shape, "FP32").datatype()
    datatype = options.pop("datatype", datatype)
    tensor = triton.InferInput("x", array.shape, datatype)
    tensor.set_data_from_numpy(array, binary_data=as_binary)
    outputs = None if want is None else [triton.InferRequestedOutput("y", binary_data=want)]
    return client.infer(name, [tensor], outputs=outputs, **options)


def test_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("words")
    assert client.is_model_ready("words", "1")
    assert not client.is_model_ready("words", "2")
    assert not client.is_model_ready("none")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("words")
    assert metadata["inputs"] == [{"name": "x", "datatype": "INT64", "shape": [-1, -1]}]
    assert client.get_model_config("words")["max_batch_size"] == 4096


DATATYPES = {
    "bool": "BOOL", "u8": "UINT8", "i8": "INT8", "i16": "INT16", "i32": "INT32", "i64": "INT64",
    "f16": "FP16", "f32": "FP32", "f64": "FP64",
}  # fmt: skip


@pytest.mark.parametrize("dtype", DATATYPES)
@pytest.mark.parametrize("as_binary", [True, False])
@pytest.mark.parametrize("want", [None, True, False])
def test_every_datatype_both_ways(client, dtype, as_binary, want):
    array = np.array([[0, 1, 1], [1, 0, 1]], NUMPY_DTYPES[dtype])
    how = {"name": f"any-{dtype}", "as_binary": as_binary, "want": want}
    if dtype == "f16" and (not as_binary or want is False):
        with pytest.raises(InferenceServerException, match="FP16"):
            ask(client, array, datatype="FP16", **how)
        return
    result = ask(client, array, datatype=DATATYPES[dtype], **how)
    np.testing.assert_array_equal(result.as_numpy("y"), array, strict=True)


def test_bf16_in_binary(client):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="tritonclient's bf16 needs ml_dtypes")
    array = np.array([[0.5, -2, 3]], ml_dtypes.bfloat16)
    result = ask(client, array, "any-bf16", datatype="BF16")
    np.testing.assert_array_equal(result.as_numpy("y").astype(np.float32), [[0.5, -2, 3]])


def test_large_body_in_many_pieces(client):
    array = np.random.default_rng(0).random((4096, 3), np.float32)
    np.testing.assert_array_equal(ask(client, array).as_numpy("y"), array)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed(client, algorithm):
    array = np.ones((9, 3), np.float32)
    result = ask(
        client,
        array,
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(result.as_numpy("y"), array)


def test_id_timeout_and_priority(client, scheduler):
    result = ask(
        client, np.ones((1, 3), np.float32), request_id="r-1", timeout=2_000_000, priority=3
    )
    assert result.get_response()["id"] == "r-1"
    name, budget_ns, priority = scheduler.calls[-1]
    assert (name, priority) == ("any-f32", 3)
    assert 10**9 < budget_ns < 2 * 10**9  # less what the way here took


def test_errors_are_readable(client):
    with pytest.raises(InferenceServerException, match="no tenant 'none'") as caught:
        ask(client, np.ones((1, 3), np.float32), "none")
    assert caught.value.status() == "404"
    with pytest.raises(InferenceServerException, match=r"shape \[1, 4\], allowed: \[R, 3\]"):
        ask(client, np.ones((1, 4), np.float32))
    with pytest.raises(InferenceServerException, match="BYTES tensors are not supported"):
        ask(client, np.array([[b"a"]], np.object_), datatype="BYTES")


def test_names_are_percent_decoded(address, client):
    assert client.is_model_ready("a.b_c-1")
    with urllib.request.urlopen(f"http://{address}/v2/models/a%2Eb%5fc%2D1") as response:
        assert json.load(response)["name"] == "a.b_c-1"


def test_raw_binary_request(address):
    """tritonclient's generate_request_body cannot make these: header value 0."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    request = urllib.request.Request(
        f"http://{address}/v2/models/any-f32/infer",
        array.tobytes(),
        {"Inference-Header-Content-Length": "0"},
    )
    with urllib.request.urlopen(request) as response:
        size = int(response.headers["Inference-Header-Content-Length"])
        body = response.read()
    assert json.loads(body[:size])["outputs"][0]["parameters"] == {"binary_data_size": 24}
    assert body[size:] == array.tobytes()


def talk(address, data):
    """The whole answer to raw bytes on a connection of their own."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(data)
        connection.settimeout(30)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


HEAD = b"POST /tenants/any-f32 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"


def test_gigabyte_claim_is_refused_at_once(address):
    """Nothing of the body is sent: the answer comes all the same, and the connection ends."""
    answer = talk(address, HEAD + b"Content-Length: 1073741824\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b'{"error":"body: 1073741824 bytes, allowed: 1048576"}')


def test_endless_chunks_end_at_the_limit(address):
    """On a connection that stays, as the ingress's do: one closed with bytes unread is reset."""
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    host, port = address.split(":")
    head = HEAD.replace(b"Connection: close\r\n", b"")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 17)
        with http.client.HTTPResponse(connection) as answer:
            answer.begin()
            assert answer.status == 413


def test_keep_alive_over_errors(address):
    """An error answer leaves the connection usable."""
    host, port = address.split(":")
    bad = b"POST /tenants/any-f32 HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
    good = b"GET /healthz HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    answer = talk(f"{host}:{port}", bad + good)
    assert answer.count(b"HTTP/1.1 ") == 2
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"HTTP/1.1 200" in answer
