"""The shared replica pool: the application's ingress, for tenants without code of their own.

A replica parses HTTP and talks to the scheduler over the channel; it imports no torch and sees no
GPU. The handlers of dedicated tenants are reached through their deployments' handles.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.channel.frames import TenantInfo
from coissue.deployments.discovery import BLIND, HEALTH, POOL, find_endpoint, settle_garbage
from coissue.deployments.handlers import Handler, LoadedHandlers
from coissue.deployments.http.app import HttpApp, HttpSettings
from coissue.deployments.http.errors import HttpError
from coissue.deployments.settings import AppSettings, HandlerSettings
from coissue.deployments.tenant import DedicatedTenant, Deployed, RemoteHandler

#: For control to say what is wrong.
EXPLAIN_SECONDS: Final = 2.0


@serve.deployment(name=POOL, ray_actor_options=BLIND, **HEALTH)
@serve.ingress()
class Pool:
    """One replica of the pool."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        control: DeploymentHandle[Any],
        dedicated: dict[str, DeploymentHandle[DedicatedTenant]],
    ) -> None:
        # `dedicated` is there so that Serve starts those deployments with this application.
        self._control = control
        self._handlers = PoolHandlers(serve.get_replica_context().app_name)
        self._http = HttpApp(lambda: self._client, HttpSettings(find_handler=self._handlers.find))
        self._client = await SchedulerClient.connect(find_endpoint)
        settle_garbage()

    async def reconfigure(self, settings: dict[str, Any]) -> None:
        parsed = AppSettings.model_validate(settings)
        self._handlers.expect(parsed)
        pool = parsed.pool
        self._http.settings = HttpSettings(
            body_bytes=pool.body_bytes,
            body_seconds=pool.body_seconds,
            ongoing=pool.ongoing_requests,
            held_bytes=pool.held_bytes,
            find_handler=self._handlers.find,
            explain=self._explain,
        )

    async def _explain(self) -> tuple[str, str]:
        with suppress(TimeoutError, RayError, RayServeException):
            async with asyncio.timeout(EXPLAIN_SECONDS):
                scheduler, deploy = await self._control.trouble.remote()
                return str(scheduler), str(deploy)
        return "", ""

    def __serve_build_asgi_app__(self) -> HttpApp:
        return self._http

    async def __del__(self) -> None:
        await self._client.close()


class PoolHandlers:
    """The handler that goes with a tenant's served version: here, or in its own deployment."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._loaded = LoadedHandlers()
        self._names: frozenset[str] = frozenset()
        #: Tenants with a deployment of their own -> the handler that it is for.
        self._dedicated: dict[str, str] = {}
        #: By deployment; each has a router of its own.
        self._handles: dict[str, Deployed] = {}

    def expect(self, settings: AppSettings) -> None:
        """Load what is to come while the versions before it are still served."""
        self._names = frozenset(tenant.name for tenant in settings.tenants)
        self._dedicated = {
            t.name: t.handler.model_dump_json()
            for t in settings.tenants
            if t.isolation == "dedicated" and t.handler
        }
        for name in self._handles.keys() - self._dedicated.keys():
            self._handles.pop(name).end("loading" if name in self._names else "unknown_tenant")
        self._loaded.expect(t for t in settings.tenants if t.isolation == "shared")

    def find(self, info: TenantInfo) -> Handler | None:
        if not info.handler:
            return None
        if info.name not in self._names:  # its deployment ends, a moment before it is detached
            raise HttpError("unknown_tenant", f"no tenant {info.name!r}")
        is_own = is_own_code(info.handler)
        if is_own and info.name not in self._dedicated:
            why = info.reason or "what comes instead is loading"
            raise HttpError("loading", f"tenant {info.name!r} gave up its deployment: {why}")
        if is_own or self._dedicated.get(info.name) == info.handler:
            if info.name not in self._handles:
                self._handles[info.name] = Deployed(info.name, self._app_name)
            return RemoteHandler(self._handles[info.name], info.handler)
        return self._loaded.find(info.name, info.handler)


@lru_cache(4096)
def is_own_code(handler: str) -> bool:
    """It must not be loaded here, whatever this replica knows of the tenant."""
    return not HandlerSettings.model_validate_json(handler).is_builtin
