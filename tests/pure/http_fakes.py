"""A scheduler client that answers in-process, and a driver for ASGI applications."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import numpy as np

from coissue.deployments.channel.backend import InferResult
from coissue.deployments.channel.checking import InferError, check_inputs
from coissue.deployments.channel.frames import NUMPY_DTYPES, PortInfo, TenantInfo
from coissue.deployments.http.app import HttpApp, HttpSettings
from coissue.kernels.ir import Dim, R, T


def tenant(name="m", inputs=None, outputs=None, **fields):
    """A ready tenant; ports are given as {name: (dtype, *dims)}."""

    def ports(given):
        return tuple(
            PortInfo(key, dtype, tuple(d if isinstance(d, Dim) else Dim(d) for d in dims))
            for key, (dtype, *dims) in given.items()
        )

    known = {"rows_limit": 8, "tokens_limit": 0, "slo_class": "fast", "deadline_ns": 10**8}
    return TenantInfo(
        name,
        1,
        **{"state": "ready", **known, **fields},
        inputs=ports(inputs or {"x": ("f32", R, 4)}),
        outputs=ports(outputs or {"y": ("f32", R, 4)}),
    )


TENANTS = {
    info.name: info
    for info in (
        tenant(),
        tenant("two", {"a": ("i64", R, T), "b": ("f32", R, 2)}, tokens_limit=16),
        tenant("half", {"x": ("f16", R, 2)}, {"y": ("f16", R, 2)}),
        tenant("brain", {"x": ("bf16", R, 2)}, {"y": ("bf16", R, 2)}),
        tenant("mask", {"x": ("bool", R, 3)}, {"y": ("bool", R, 3)}),
        tenant("bytes", {"x": ("u8", R, 3)}, {"y": ("u8", R, 3)}),
        tenant("steps", {"x": ("f32", R, T, 2)}, tokens_limit=16),
        tenant("waiting", state="loading", reason="capturing"),
        tenant("broken", state="failed", reason="outputs.y: wrong <b>numbers</b>"),
    )
}


class FakeClient:
    """Outputs repeat the first input, in the output's dtype and shape."""

    def __init__(self):
        self.directory = dict(TENANTS)
        self.is_connected = True
        self.calls = []
        #: Raised by the next calls if set.
        self.error = None
        #: Never answers if set.
        self.stuck = False
        self.cancelled = 0
        #: What it was told of refusals.
        self.reported = []
        self.told = {"status": b'{"policy": "space_time"}', "metrics": b"coissue_x 1\n"}

    async def infer(self, name, inputs, budget_ns=None, priority=0, *, version=None):
        info = self.directory[name]
        rows, tokens = check_inputs(info, inputs)
        self.calls.append((name, inputs, budget_ns, priority))
        if self.error:
            raise self.error
        if self.stuck:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        first = inputs[info.inputs[0].name]
        outputs = {
            port.name: np.resize(first, [d.at(rows, tokens) for d in port.shape]).astype(
                NUMPY_DTYPES[port.dtype]
            )
            for port in info.outputs
        }
        return InferResult(outputs, 1_500_000, 250_000, 3, 17)

    def report(self, report):
        self.reported += [report] if self.is_connected else []
        return self.is_connected

    async def ask(self, what):
        if not self.is_connected:
            raise InferError("restarting", "no scheduler is connected", 10**9)
        return self.told[what]


@dataclass
class Reply:
    status: int = 0
    headers: dict = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        """The sentence of an error answer, whose form is checked."""
        assert self.headers["content-type"] == "application/json"
        assert list(self.json) == ["error"]
        return self.json["error"]


async def drive(app, method, path, body=b"", headers=None, *, chunks=None, then=()):
    """One request. `then`: messages that the server sends after the body."""
    parts = [body] if chunks is None else chunks
    messages = [
        {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]
    messages += [{"type": kind} for kind in then]
    given = {"content-length": str(sum(map(len, parts))), **(headers or {})}
    raw = [(key.lower().encode(), value.encode("latin-1")) for key, value in given.items()]
    reply = Reply()

    async def receive():
        if messages:
            return messages.pop(0)
        return await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.start":
            assert not reply.status
            reply.status = message["status"]
            reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            reply.body += message["body"]

    scope = {"type": "http", "method": method, "path": path, "headers": raw, "root_path": ""}
    await app(scope, receive, send)
    assert reply.headers["content-length"] == str(len(reply.body))
    return reply


class Server:
    """`Server().post("/v2/...", body)`: a fake client behind the real application."""

    def __init__(self, **settings):
        self.client = FakeClient()
        self.app = HttpApp(lambda: self.client, HttpSettings(**settings))

    def ask(self, method, path, body=b"", headers=None, **how):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        return asyncio.run(drive(self.app, method, path, body, headers, **how))

    def get(self, path, headers=None):
        return self.ask("GET", path, headers=headers)

    def post(self, path, body=b"", headers=None, **how):
        return self.ask("POST", path, body, headers, **how)
