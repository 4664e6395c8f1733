"""The control plane: one replica that brings tenants up and keeps them up.

It captures each tenant in a process of its own, owns the scheduler actor (which dies with it), and
compares again and again what the scheduler serves with what the settings want. A first attach, a
scheduler that was killed, and a new version are all the same step: something wanted is missing.
Requests never pass here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve

from coissue.deployments.actor import start_scheduler
from coissue.deployments.captures import Captures, TenantFailed
from coissue.deployments.discovery import BLIND, CONTROL, FAILED_PREFIX, HEALTH_SECONDS
from coissue.deployments.run_dir import RunDir, sweep_run_dirs
from coissue.deployments.settings import AppSettings, TenantSettings

logger = logging.getLogger("coissue.control")
RECONCILE_SECONDS = 0.5
STOP_SECONDS = 5
#: A tenant that the scheduler did not survive attaching so many times is failed.
ATTACH_TRIES = 2


@dataclass(slots=True)
class Wanted:
    """One tenant of the settings and how far it got."""

    settings: TenantSettings
    version: int = 1
    #: loading, captured, ready or failed.
    state: str = "loading"
    reason: str = ""
    #: Folder of the captured program; stays for re-attaching.
    artifact: str = ""
    #: Attaches begun since the last that ended.
    tries: int = 0


@serve.deployment(
    name=CONTROL, num_replicas=1, health_check_period_s=HEALTH_SECONDS, ray_actor_options=BLIND
)
class Control:
    """Owns the scheduler actor and the tenants' states."""

    async def __init__(self, settings: dict[str, Any]) -> None:
        self._run_dir: RunDir | None = None  # nothing to take down before it is there
        self._settings = AppSettings.model_validate(settings)
        sweep_run_dirs()
        self._run_dir = RunDir()
        self._wanted = {tenant.name: Wanted(tenant) for tenant in self._settings.tenants}
        self._scheduler: Any = None
        self._epoch = 0
        self._captures = Captures(self._run_dir.path, self._settings.capture)
        self._capturing = asyncio.ensure_future(self._capture_all())
        self._loop = asyncio.ensure_future(self._reconcile_forever())

    def check_health(self) -> None:
        if self._loop.done():
            raise RuntimeError(f"the reconcile loop ended: {self._loop}")

    async def _capture_all(self) -> None:
        await asyncio.gather(*map(self._capture, self._wanted.values()))
        self._captures.stop()  # it holds torch: a quarter of a gigabyte

    async def _capture(self, wanted: Wanted) -> None:
        try:
            wanted.artifact = await self._captures.capture(wanted.settings, wanted.version)
            wanted.state = "captured"
        except TenantFailed as error:
            await self._fail(wanted, str(error))
        except OSError as error:
            await self._fail(wanted, f"capture failed: {error}")

    async def _fail(self, wanted: Wanted, reason: str) -> None:
        wanted.state, wanted.reason = "failed", reason
        logger.error("tenant=%s failed reason=%s", wanted.settings.name, reason)
        with contextlib.suppress(ray.exceptions.RayError):
            await self._announce(wanted)
        await asyncio.get_running_loop().run_in_executor(
            None, show_failure, wanted.settings.name, reason
        )

    async def _announce(self, wanted: Wanted) -> None:
        """To a scheduler that does not serve the tenant."""
        if self._scheduler is not None:
            state = "failed" if wanted.state == "failed" else "loading"
            await self._scheduler.announce.remote(
                wanted.settings.model_dump(), state, wanted.reason
            )

    async def _reconcile_forever(self) -> None:
        while True:
            try:
                await self._reconcile()
            except ray.exceptions.RayError as error:
                logger.warning("scheduler not reachable: %s", " ".join(str(error).split()))
                self._scheduler = None
            await asyncio.sleep(RECONCILE_SECONDS)

    async def _reconcile(self) -> None:
        if self._scheduler is None:
            self._scheduler = start_scheduler(
                self._settings.model_dump(mode="json"), str(self._run_dir.path)
            )
        epoch, attached = await self._scheduler.attached.remote()
        if epoch != self._epoch:
            self._epoch = epoch
            for wanted in self._wanted.values():
                await self._announce(wanted)
        for name, wanted in self._wanted.items():
            missing = attached.get(name) != wanted.version
            if missing and wanted.artifact and wanted.state != "failed":
                await self._attach(wanted)

    async def _attach(self, wanted: Wanted) -> None:
        """Raises `RayError` when the scheduler dies meanwhile."""
        if wanted.tries >= ATTACH_TRIES:
            await self._fail(wanted, f"the scheduler died {wanted.tries} times attaching it")
            return
        wanted.tries += 1
        try:
            error = await self._scheduler.attach.remote(
                wanted.settings.model_dump(), wanted.version, wanted.artifact
            )
        except ray.exceptions.RayTaskError as bug:
            error = f"attach failed: {type(bug.cause).__name__}: {bug.cause}"
        wanted.tries = 0
        if error:
            await self._fail(wanted, error)
        else:
            wanted.state, wanted.reason = "ready", ""

    async def __del__(self) -> None:
        if self._run_dir is None:
            return
        self._loop.cancel()
        self._capturing.cancel()
        self._captures.stop()
        if self._scheduler is not None:
            # A scheduler that died or hangs must not keep the folder.
            with contextlib.suppress(ray.exceptions.RayError, asyncio.TimeoutError):
                await asyncio.wait_for(self._scheduler.stop.remote(), STOP_SECONDS)
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(self._scheduler)
        self._run_dir.remove()
        self._run_dir = None


@serve.deployment(num_replicas=1, max_constructor_retry_count=1, ray_actor_options=BLIND)
class FailedTenant:
    """Never comes up: its constructor carries the reason into `serve status`."""

    def __init__(self, reason: str) -> None:
        raise RuntimeError(reason)


def show_failure(name: str, reason: str) -> None:
    """Make `serve status` show why the tenant is not served, without touching the others."""
    failed = FailedTenant.options(name=name).bind(reason)
    app = serve.RunTarget(failed, name=FAILED_PREFIX + name, route_prefix=None)
    try:
        serve.run_many(
            [app], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )
    except (RuntimeError, ray.exceptions.RayError) as error:
        logger.warning("tenant=%s cannot be shown in serve status: %s", name, error)
