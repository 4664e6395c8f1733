"""The shared replica pool: the application's ingress, for tenants without code of their own.

A replica parses HTTP and talks to the scheduler over the channel; it imports no torch and sees no
GPU. The handlers of dedicated tenants are reached through their deployments' handles.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.discovery import BLIND, HEALTH_SECONDS, POOL, find_endpoint, settle_garbage
from coissue.deployments.handlers import Handler, load_handlers
from coissue.deployments.http.app import HttpApp, HttpSettings
from coissue.deployments.settings import AppSettings
from coissue.deployments.tenant import RemoteHandler


@serve.deployment(name=POOL, health_check_period_s=HEALTH_SECONDS, ray_actor_options=BLIND)
@serve.ingress()
class Pool:
    """One replica of the pool."""

    async def __init__(
        self,
        settings: dict[str, Any],
        control: DeploymentHandle,
        dedicated: dict[str, DeploymentHandle],
    ) -> None:
        parsed = AppSettings.model_validate(settings)
        # Kept so that Serve starts and watches the control replica with this application.
        self._control = control
        shared = [tenant for tenant in parsed.tenants if tenant.name not in dedicated]
        handlers: dict[str, Handler] = dict(load_handlers(shared))
        handlers |= {name: RemoteHandler(name, handle) for name, handle in dedicated.items()}
        pool = parsed.pool
        self._http = HttpSettings(
            body_bytes=pool.body_bytes,
            body_seconds=pool.body_seconds,
            ongoing=pool.ongoing_requests,
            held_bytes=pool.held_bytes,
            handlers=handlers,
        )
        self._client = await SchedulerClient.connect(find_endpoint)
        settle_garbage()

    def __serve_build_asgi_app__(self) -> HttpApp:
        return HttpApp(lambda: self._client, self._http)

    async def __del__(self) -> None:
        await self._client.close()
