"""Deployments of single tenants: their own code stays out of the shared pool.

`DedicatedTenant` runs the handler of a tenant of the shared application. `tenant(...)` is for a
team that ships a Serve application of its own: the same routes for that tenant alone; the
tenant itself is attached by the platform's application.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.deployment import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.discovery import BLIND, HEALTH, as_deployment, find_endpoint
from coissue.deployments.handlers import (
    BUILTIN,
    HANDLERS_KEPT,
    Arrays,
    Broken,
    Handler,
    Own,
    is_cancelled,
    load_handler,
    name_of,
    naming,
    pack_arrays,
    say,
    unpack_arrays,
)
from coissue.deployments.http import plain
from coissue.deployments.http.app import HttpApp, HttpSettings
from coissue.deployments.http.errors import HttpError
from coissue.deployments.http.intake import SPARE, IntakeLimits
from coissue.deployments.settings import MIB, HandlerSettings
from coissue.deployments.trial import SECONDS_MORE, try_apart

T = TypeVar("T")

#: (value, None) or (None, (reason, sentence)): what crosses from a tenant's code to the pool is
#: bytes and strings made here, because reading an object of a tenant's own would run its code.
Settled = tuple[bytes, tuple[str, str] | None]


async def settle(work: Awaitable[bytes]) -> Settled:
    try:
        return await work, None
    except HttpError as error:
        return b"", (str.__str__(error.reason), say(error))
    except BaseException as error:  # whatever it is, it must not be read elsewhere
        if is_cancelled(error):
            raise
        return b"", ("handler_failed", f"the handler failed: {name_of(error)}")


@serve.deployment(ray_actor_options=BLIND, max_ongoing_requests=256, **HEALTH)
class DedicatedTenant:
    """Runs one tenant's handler: the one that goes with the version that a request is for."""

    def __init__(self) -> None:
        #: By settings as JSON; the newest last.
        self._handlers: dict[str, Apart] = {}

    async def is_up(self) -> bool:
        return True

    async def load(self, settings: str, seconds: float) -> str:
        """Why it cannot be loaded; empty: it is. After a trial of so many seconds in a process of
        its own, and not in the constructor: code which ends the process must not fail the whole
        application."""
        try:
            async with asyncio.timeout(2 * seconds + SECONDS_MORE):
                loaded = await (await self._find(settings, seconds)).loaded
        except TimeoutError:  # its thread is lost; another try gets one of its own
            self._handlers.pop(settings, None)
            use = _use_of(settings)
            return f"handler {use} cannot be loaded: it took longer than {seconds:g} s"
        return loaded.message if isinstance(loaded, Broken) else ""

    async def _find(self, settings: str, trial_s: float = 0.0) -> Apart:
        """The handler, once its constructor has come back. One that serves is not tried again."""
        found = self._handlers.get(settings)
        if found is None:
            found = self._handlers[settings] = Apart(settings, trial_s)
        loaded = await asyncio.shield(found.loaded)
        if isinstance(loaded, Broken):  # what it lacks may come
            self._handlers.pop(settings, None)
        else:
            done = [key for key, handler in self._handlers.items() if handler.loaded.done()]
            for key in done[:-HANDLERS_KEPT]:
                del self._handlers[key]
        return found

    async def preprocess(self, settings: str, payload: bytes) -> Settled:
        async def work(handler: Handler) -> bytes:
            arrays = await handler.preprocess(msgspec.json.decode(payload))
            with naming(_use_of(settings), "preprocess"):
                return pack_arrays(arrays)

        return await (await self._find(settings)).run(work)

    async def postprocess(self, settings: str, outputs: bytes, payload: bytes) -> Settled:
        async def work(handler: Handler) -> bytes:
            given = unpack_arrays(outputs), msgspec.json.decode(payload)
            made = await handler.postprocess(*given)
            with naming(_use_of(settings), "postprocess"):
                _, _, body = plain.format_payload(await plain.encode_arrays(made))
                return body

        return await (await self._find(settings)).run(work)


class Apart:
    """A handler with a thread and an event loop of its own, for constructor and methods alike: code
    that takes its time, or never comes back, leaves the handler that is served alone. The thread
    of one that was loaded stays until the process ends, which does not wait for it."""

    def __init__(self, settings: str, trial_s: float) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_over = False
        threading.Thread(target=self._live, daemon=True, name="handler").start()

        async def load() -> Handler:
            wrong = try_apart(settings, trial_s) if trial_s else ""
            if wrong:
                return Broken(wrong)
            return load_handler(HandlerSettings.model_validate_json(settings))

        self.loaded = self._start(load())
        self.loaded.add_done_callback(self._end_if_broken)

    def _live(self) -> None:
        while not self._is_over:  # a handler may stop its loop
            self._loop.run_forever()
        self._loop.close()

    def _end_if_broken(self, loaded: asyncio.Future[Handler]) -> None:
        if not loaded.cancelled() and isinstance(loaded.result(), Broken):
            self._is_over = True
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def run(self, work: Callable[[Handler], Coroutine[Any, Any, bytes]]) -> Settled:
        """`work` on the handler, there."""
        handler = await self.loaded
        if isinstance(handler, Broken):
            return b"", ("failed", handler.message)
        return await self._start(settle(work(handler)))


@lru_cache(64)
def _use_of(settings: str) -> str:
    return HandlerSettings.model_validate_json(settings).use


class Deployed:
    """The deployment of one tenant's code, seen from the pool."""

    def __init__(self, name: str, app_name: str) -> None:
        self.name = name
        self.handle: DeploymentHandle[DedicatedTenant] = DeploymentHandle(name, app_name)
        #: Why nothing comes any more: a call would wait for another replica for ever.
        self._end: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

    def end(self, reason: str) -> None:
        """The settings have no such deployment any more."""
        self._end.set_result((reason, f"tenant {self.name!r} has no deployment any more"))

    async def call(self, response: Awaitable[Settled]) -> bytes:
        waiting = asyncio.ensure_future(response)
        both: set[asyncio.Future[Any]] = {waiting, self._end}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise HttpError(*self._end.result())
            value, error = waiting.result()
        except (RayError, RayServeException, asyncio.CancelledError) as lost:
            if is_cancelled(lost):
                raise
            raise HttpError(
                "restarting", f"the deployment of tenant {self.name!r} is restarting"
            ) from lost
        finally:
            waiting.cancel()
        if error is not None:
            raise HttpError(*error)
        return value


class RemoteHandler(Handler):
    """The handler of a `DedicatedTenant`, seen from the pool; `settings` is its JSON."""

    def __init__(self, deployed: Deployed, settings: str) -> None:
        self._deployed = deployed
        self._settings = settings
        self.passes_on = BUILTIN.get(_use_of(settings), Own).passes_on

    async def preprocess(self, payload: Any) -> Any:
        sent = msgspec.json.encode(payload)
        response = self._deployed.handle.preprocess.remote(self._settings, sent)
        return unpack_arrays(await self._deployed.call(response))

    async def postprocess(self, outputs: Arrays, payload: Any) -> Any:
        sent = pack_arrays(outputs), msgspec.json.encode(payload)
        response = self._deployed.handle.postprocess.remote(self._settings, *sent)
        return msgspec.Raw(await self._deployed.call(response))


@serve.deployment(
    ray_actor_options=BLIND, max_ongoing_requests=IntakeLimits().ongoing + SPARE, **HEALTH
)
@serve.ingress()
class TenantIngress:
    """The HTTP routes of one tenant, in an application of its own."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, name: str, handler: dict[str, Any] | None, body_mib: int
    ) -> None:
        handlers = {}
        if handler is not None:
            handlers[name] = load_handler(HandlerSettings.model_validate(handler))
        self._settings = HttpSettings(
            body_bytes=body_mib * MIB, handlers=handlers, tenants=frozenset({name})
        )
        self._client = await SchedulerClient.connect(find_endpoint)

    def __serve_build_asgi_app__(self) -> HttpApp:
        return HttpApp(lambda: self._client, self._settings)

    async def __del__(self) -> None:
        await self._client.close()


def tenant(
    name: str, *, handler: str | None = None, body_mib: int = 64, num_replicas: int = 1,
    **kwargs: Any,
) -> Application:  # fmt: skip
    """A Serve application for tenant `name`, with the team's own `handler` ("pkg.mod:Class").

    `kwargs` go to the handler. Use it as `app = coissue.deployments.tenant.tenant("sentiment",
    handler="my_team.text:Handler")` and deploy it under a route prefix of your own.
    """
    own = None if handler is None else {"use": handler, "kwargs": kwargs}
    ingress = as_deployment(TenantIngress).options(name=name, num_replicas=num_replicas)
    app: Application = ingress.bind(name, own, body_mib)
    return app
