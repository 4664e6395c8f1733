"""The ASGI application of a replica: HTTP in, the channel to the scheduler out.

A plain callable without a framework: the two inference routes are matched first and do one dict
look-up, one decode, one `infer` and one encode. Nothing here knows Ray or torch. Whatever happens
inside a request, the client gets `{"error": ...}` and the table in `errors` decides the status.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np

from coissue.deployments.channel.checking import STALE, InferError, show
from coissue.deployments.http import oip, page, plain, tensors
from coissue.deployments.http.bodies import TIMEOUT_LIMIT_US
from coissue.deployments.http.errors import INTERNAL, JSON, Answer, HttpError, malformed
from coissue.deployments.http.intake import Body, Due, Intake, IntakeLimits
from coissue.deployments.http.report import Listener, Reports

if TYPE_CHECKING:
    from coissue.deployments.channel.backend import InferResult
    from coissue.deployments.channel.frames import TenantInfo
    from coissue.deployments.handlers import Handler

log = logging.getLogger("coissue.http")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
HeaderMap = dict[bytes, bytes]
#: Tenant, headers, body and time of arrival to an answer.
Form = Callable[["TenantInfo", HeaderMap, bytes, int], Awaitable[Answer]]

#: Tenants' names in the answer to one that there is not.
NAMES_SHOWN: Final = 16
SLO_LIMIT_MS: Final = TIMEOUT_LIMIT_US / 1000
#: Python's `float` takes more: 1_0, nan, spaces, the digits of all scripts.
_DECIMAL: Final = re.compile(rb"\d+(?:\.\d+)?")
TEXT: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
HTML: Final = (b"content-type", b"text/html; charset=utf-8")


@dataclass(frozen=True)
class HttpSettings(IntakeLimits):
    #: Tenant name -> pre- and postprocessing of its plain route.
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    #: Instead of `handlers`, where they change: that of the version that is served.
    find_handler: Callable[[TenantInfo], Handler | None] | None = None
    #: Why no scheduler can start, and why Serve does not run its newest config; "": nothing known.
    explain: Callable[[], Awaitable[tuple[str, str]]] | None = None
    #: The tenants served here; None: all.
    tenants: frozenset[str] | None = None

    def handler_of(self, info: TenantInfo) -> Handler | None:
        if self.find_handler is not None:
            return self.find_handler(info)
        return self.handlers.get(info.name)


class Client(Listener, Protocol):
    """What is used of a `SchedulerClient`."""

    @property
    def is_connected(self) -> bool: ...

    def infer(
        self,
        tenant: str,
        inputs: Mapping[str, np.ndarray],
        budget_ns: int | None = None,
        priority: int = 0,
        *,
        version: int | None = None,
    ) -> Awaitable[InferResult]: ...

    def ask(self, what: str) -> Awaitable[bytes]: ...


class HttpApp:
    """`client_source()` gives the connected client, or None while there is none."""

    def __init__(self, client_source: Callable[[], Client | None], settings: HttpSettings) -> None:
        self._client_source = client_source
        #: May be replaced at any time.
        self.settings = settings
        self._intake = Intake(lambda: self.settings)
        #: A scheduler has told of tenants: from then on, others are unknown.
        self._has_heard = False
        #: Answers of this replica by reason ("ok" or a key of `STATUS`), since its start.
        self.counts: Counter[str] = Counter()
        self.reports = Reports(client_source)
        #: Requests in tenants' handlers, by tenant.
        self._handled: Counter[str] = Counter()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _answer_other(scope, receive, send)
            return
        self.reports.sample_lag()
        try:
            status, headers, body = await self._route(scope, receive)
            self.counts["ok"] += 1
        except HttpError as error:
            status, headers, body = self._refuse(scope, error)
        except asyncio.CancelledError:
            # The server noticed first that the client is gone.
            self.counts["client_gone"] += 1
            raise
        except Exception:
            log.exception("request failed path=%r", scope.get("path"))
            status, headers, body = self._refuse(scope, HttpError("internal", INTERNAL))
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refuse(self, scope: Message, error: HttpError) -> Answer:
        self.counts[error.reason] += 1
        # A GET is no inference: probes that wait for a tenant are nobody's misses.
        is_probe = scope["method"] == "GET" and error.status >= 500
        if not error.is_counted and not is_probe:
            found = _MODEL.search(scope["path"]) or _PLAIN.search(scope["path"])
            self.reports.refuse(found[1] if found else "", error.reason, is_done=error.is_done)
        return error.answer()

    async def _route(self, scope: Message, receive: Receive) -> Answer:
        path: str = scope["path"]
        root = scope.get("root_path")
        if root and path.startswith(root):
            path = path[len(root) :] or "/"
        model = _MODEL.fullmatch(path)
        if model is not None:
            name, version, action = model.groups("")
            _check_verb(scope, "POST" if action == "infer" else "GET")
            if action == "infer":
                return await self._serve(self._infer, name, version, scope, receive)
            info = _check_ready(self._tenant(name, version))
            if action == "ready" and not self._client().is_connected:
                raise HttpError("restarting", "no scheduler is connected")
            return _json(_DESCRIBE[action](info))
        tenant = _PLAIN.fullmatch(path)
        if tenant is not None:
            _check_verb(scope, "POST")
            return await self._serve(self._plain, tenant[1], "", scope, receive)
        route = _ROUTES.get(path)
        if route is None:
            raise HttpError("unknown_route", f"no route {show(scope['path'])}")
        _check_verb(scope, "GET")
        return await route(self, scope)

    # --- inference -----------------------------------------------------------------------------

    async def _serve(
        self, form: Form, name: str, version: str, scope: Message, receive: Receive
    ) -> Answer:
        """One inference; from the start, if a new version took over before the scheduler had it."""
        arrived_ns = time.monotonic_ns()
        info = _check_ready(self._tenant(name, version))
        headers: HeaderMap = dict(scope["headers"])
        with Body(self._intake) as body:
            given = await body.read(headers, receive)
            while True:
                try:
                    answer = await form(info, headers, given, arrived_ns)
                    break
                except HttpError as error:
                    if error.reason != STALE:
                        raise
                    fresh = _check_ready(self._tenant(name, version))
                    if fresh is info:
                        raise
                    info = fresh
        self.reports.observe("http", info.name, (time.monotonic_ns() - arrived_ns) / 1e9)
        return answer

    async def _infer(
        self, info: TenantInfo, headers: HeaderMap, given: bytes, arrived_ns: int
    ) -> Answer:
        call = oip.parse_infer(info, given, headers.get(oip.LENGTH_HEADER))
        due = _due(info, call.budget_ns or _slo_header(headers), arrived_ns)
        outputs = await self._run(info, call.inputs, due, call.priority)
        in_json = {port.name: outputs[port.name] for port, binary in call.outputs if not binary}
        large = await tensors.encode_large(in_json, is_flat=True)
        return due.keep(oip.format_infer(info, call, outputs, large))

    async def _plain(
        self, info: TenantInfo, headers: HeaderMap, given: bytes, arrived_ns: int
    ) -> Answer:
        due = _due(info, _slo_header(headers), arrived_ns)
        kind = headers.get(b"content-type", b"").partition(b";")[0]
        if kind.strip().lower() == b"application/octet-stream":
            inputs = plain.parse_raw(info, given)
            return due.keep(plain.format_raw(await self._run(info, inputs, due, 0)))
        handler = self.settings.handler_of(info)
        if handler is not None:
            return due.keep(await self._through(handler, info, given, due))
        inputs = plain.parse_json(info, given)
        outputs = await self._run(info, inputs, due, 0)
        large = await tensors.encode_large(outputs)
        return due.keep(plain.format_json(outputs, large))

    async def _through(self, handler: Handler, info: TenantInfo, given: bytes, due: Due) -> Answer:
        """A tenant's own code has the time and the number of requests that the tenant has."""
        open_here = self._handled[info.name]
        if open_here >= info.in_flight_limit:
            said = f"{open_here} requests of tenant {info.name!r} are in its handler"
            raise HttpError("tenant_quota", said)
        self._handled[info.name] += 1
        try:
            payload = plain.parse_payload(given)
            async with asyncio.timeout(due.left_ns() / 1e9):
                prepared = await handler.preprocess(payload)
            inputs = tensors.conform(info, prepared, is_clients=handler.passes_on)
            outputs = await self._run(info, inputs, due, 0)
            async with asyncio.timeout(due.left_ns() / 1e9):
                made = await handler.postprocess(outputs, payload)
            return plain.format_payload(await plain.encode_arrays(made))
        except TimeoutError:
            said = "the deadline passed in the tenant's handler"
            raise due.mark(HttpError("expired", said)) from None
        except HttpError as error:
            due.mark(error)
            raise
        finally:
            self._handled[info.name] -= 1
            if not self._handled[info.name]:
                del self._handled[info.name]

    async def _run(
        self, info: TenantInfo, inputs: Mapping[str, np.ndarray], due: Due, priority: int
    ) -> Mapping[str, np.ndarray]:
        try:
            result = await self._client().infer(
                info.name, inputs, due.left_ns(), priority, version=info.version
            )
        except InferError as error:
            raise _as_http(error) from None
        due.timing = b"queue;dur=%.3f, device;dur=%.3f, launches;desc=%d, request;desc=%d" % (
            result.queue_ns / 1e6, result.device_ns / 1e6, result.launches, result.request
        )  # fmt: skip
        return result.outputs

    # --- who is there --------------------------------------------------------------------------

    def _client(self) -> Client:
        client = self._client_source()
        if client is None:
            raise HttpError("restarting", "the scheduler is starting")
        return client

    def _tenant(self, name: str, version: str = "") -> TenantInfo:
        known, only = self._client().directory, self.settings.tenants
        self._has_heard = self._has_heard or bool(known)
        if not self._has_heard:
            raise HttpError("restarting", "the scheduler is starting: no tenant is known yet")
        info = known.get(name)
        if info is None or (only is not None and name not in only):
            raise HttpError("unknown_tenant", f"no tenant {show(name)}, {self._name_some()}")
        if version and info.state == "ready" and version != str(info.version):
            raise HttpError(
                "unknown_tenant",
                f"tenant {name!r} has version {info.version}, not {show(version)}",
            )
        return info

    def _name_some(self) -> str:
        names = sorted(info.name for info in self._shown())
        return f"there are: {', '.join(names[:NAMES_SHOWN])}{', ...' * (len(names) > NAMES_SHOWN)}"

    def _shown(self) -> list[TenantInfo]:
        client, only = self._client_source(), self.settings.tenants
        known = {} if client is None else client.directory
        return [info for name, info in known.items() if only is None or name in only]

    # --- fixed routes --------------------------------------------------------------------------

    async def _server(self, scope: Message) -> Answer:
        return _json(oip.SERVER)

    async def _live(self, scope: Message) -> Answer:
        return _json({"live": True, "ready": self._is_ready()})

    async def _ready(self, scope: Message) -> Answer:
        if not self._is_ready():
            raise HttpError("loading", "no scheduler is connected or no tenant is ready")
        return _json({"live": True, "ready": True})

    def _is_ready(self) -> bool:
        """One tenant that fails or loads must not take the others out of service."""
        client = self._client_source()
        return (
            client is not None
            and client.is_connected
            and any(info.state == "ready" for info in self._shown())
        )

    async def _models(self, scope: Message) -> Answer:
        return _json({"models": [info.name for info in self._shown()]})

    async def _metrics(self, scope: Message) -> Answer:
        only, text = self.settings.tenants, await self._ask("metrics")
        return 200, [TEXT], text if only is None else page.keep_metrics(text, only)

    async def _timeline(self, scope: Message) -> Answer:
        if self.settings.tenants is not None:
            raise HttpError("unknown_route", f"no route {scope['path']!r}: it shows all tenants")
        return 200, [JSON], await self._ask("timeline")

    async def _status(self, scope: Message) -> Answer:
        explain = self.settings.explain
        why, deploy_error = await explain() if explain else ("", "")
        try:
            scheduler = msgspec.json.decode(await self._ask("status"))
            if self.settings.tenants is not None:
                scheduler = page.keep_status(scheduler, self.settings.tenants)
        except HttpError as error:
            scheduler = {"error": why or str(error), "cannot_start": bool(why)}
        status = page.status(self._shown(), scheduler, self.counts, deploy_error)
        if page.prefers_html(dict(scope["headers"]).get(b"accept", b"")):
            return 200, [HTML], page.render(status).encode()
        return _json(status)

    async def _ask(self, what: str) -> bytes:
        try:
            return await self._client().ask(what)
        except InferError as error:
            raise _as_http(error) from None


_MODEL: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/(infer|ready|config))?")
_PLAIN: Final = re.compile(r"/tenants/([^/]+)")
_DESCRIBE: Final[dict[str, Callable[[TenantInfo], Any]]] = {
    "": oip.model_metadata,
    "config": oip.model_config,
    "ready": lambda info: {"name": info.name, "ready": True},
}
_ROUTES: Final[dict[str, Callable[[HttpApp, Message], Awaitable[Answer]]]] = {
    "/v2": HttpApp._server,
    "/v2/": HttpApp._server,
    "/v2/health/live": HttpApp._live,
    "/v2/health/ready": HttpApp._ready,
    "/v2/models": HttpApp._models,
    "/": HttpApp._status,
    "/status": HttpApp._status,
    "/metrics": HttpApp._metrics,
    "/timeline": HttpApp._timeline,
    "/healthz": HttpApp._live,
    "/readyz": HttpApp._ready,
}


def _slo_header(headers: HeaderMap) -> int | None:
    value = headers.get(b"x-slo-ms")
    if value is None:
        return None
    milliseconds = float(value) if _DECIMAL.fullmatch(value) else math.nan
    if not 0 < milliseconds <= SLO_LIMIT_MS:
        given = show(value.decode("latin-1"))
        raise malformed(f"header x-slo-ms: {given}, allowed: milliseconds above 0, up to a day")
    return math.ceil(milliseconds * 1_000_000)


def _check_verb(scope: Message, verb: str) -> None:
    method = scope["method"]
    if method != verb and (method, verb) != ("HEAD", "GET"):
        raise HttpError("wrong_verb", f"{method[:20]} is not possible here, use {verb}")


def _check_ready(info: TenantInfo) -> TenantInfo:
    if info.state != "ready":
        why = f": {info.reason}" if info.reason else ""
        raise HttpError(info.state, f"tenant {info.name!r} is {info.state}{why}")
    return info


def _as_http(error: InferError) -> HttpError:
    made = HttpError(error.reason, error.message, error.retry_after_ns)
    made.is_counted = error.is_counted
    return made


def _due(info: TenantInfo, budget_ns: int | None, arrived_ns: int) -> Due:
    return Due(budget_ns or info.deadline_ns or TIMEOUT_LIMIT_US * 1000, arrived_ns)


def _json(value: Any) -> Answer:
    return 200, [JSON], msgspec.json.encode(value)


async def _answer_other(scope: Message, receive: Receive, send: Send) -> None:
    """Life-cycle messages of the server; websockets are refused."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    while True:
        message = await receive()
        phase = message["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{phase}.complete"})
        if phase == "shutdown":
            return
