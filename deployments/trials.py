"""Whether a tenant's handler can be loaded, asked before anything is served with it.

The deployments of tenants' own code come up empty and load it when they are asked to, after a trial
in a process of its own. So code that cannot be loaded, even code that ends its process or holds its
GIL, fails that tenant and neither the application nor the handler that serves.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, final

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from coissue.deployments.captures import TenantFailed
from coissue.deployments.handlers import Broken, load_handler
from coissue.deployments.settings import HandlerSettings, TenantSettings
from coissue.deployments.trial import SECONDS_MORE

#: A process may also end for other reasons than what it loads.
TRIES: Final = 2


@final
class Trials:
    """Loads built-in handlers of the pool here, and others in their deployments."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name

    async def prove(self, tenant: TenantSettings, seconds: float) -> None:
        """`seconds` for the trial, and as many for loading it where it serves. Raises
        `TenantFailed` with the sentence that says why it cannot be loaded."""
        handler = tenant.handler
        if handler is None:
            return
        if tenant.isolation == "shared":
            loaded = await asyncio.to_thread(load_handler, handler)
            wrong = loaded.message if isinstance(loaded, Broken) else ""
        else:
            wrong = await self._ask(tenant.name, handler, seconds)
        if wrong:
            raise TenantFailed(wrong)

    async def _ask(self, name: str, handler: HandlerSettings, seconds: float) -> str:
        handle: DeploymentHandle[Any] = DeploymentHandle(name, self._app_name)
        settings = handler.model_dump_json()
        said = f"handler {handler.use} cannot be loaded:"
        for _ in range(TRIES):
            try:
                await handle.is_up.remote()  # Serve's time to start it is not the handler's
                async with asyncio.timeout(2 * seconds + 2 * SECONDS_MORE):
                    return str(await handle.load.remote(settings, seconds))
            except TimeoutError:
                return f"{said} its deployment gave no answer"
            except (RayError, RayServeException):
                pass  # its process ended; Serve starts another
        return f"{said} its process ended {TRIES} times meanwhile"
