"""How `serve status` tells that a tenant failed: one application has one status, and one tenant
must not turn it red for all. So each failed one shows as an application of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, final

import ray
from ray import serve
from ray.serve.context import _get_global_client

from coissue.deployments.channel.frames import printable
from coissue.deployments.discovery import BLIND, FAILED_PREFIX, as_deployment

logger = logging.getLogger("coissue.control")
#: What Serve puts before the sentences of `app.build`.
BUILD_FAILED: Final = " failed with exception:\n"


def find_deploy_error(app_name: str) -> str:
    """Why Serve does not run the config of an application that it was given last; empty: it does.

    `serve.status` tells that too, and takes a quarter of a second of CPU to do so."""
    client: Any = _get_global_client()
    found = client.get_serve_status(app_name).app_status
    if found.status != "DEPLOY_FAILED":
        return ""
    head, _, said = found.message.partition(BUILD_FAILED)
    return printable(said or head)


@serve.deployment(num_replicas=1, max_constructor_retry_count=1, ray_actor_options=BLIND)
class FailedTenant:
    """Never comes up: its constructor carries the reason into `serve status`."""

    def __init__(self, reason: str) -> None:
        raise RuntimeError(reason)


@final
class Failures:
    """Shows them in the background, one after the other; a Serve that refuses is logged."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="failures")
        #: Tenant -> the reason, as asked for last; None: nothing was, also not that none failed.
        self._asked: dict[str, str] | None = None
        #: Tenant -> the reason shown; empty: what an earlier control showed. The thread's.
        self._shown: dict[str, str] = {}
        self._later(self._look)  # what an earlier control showed

    def show(self, reasons: dict[str, str]) -> None:
        """These tenants failed, for these reasons, and no others."""
        if reasons != self._asked:
            self._asked = reasons
            self._later(self._show_only, reasons)

    def _show_only(self, reasons: dict[str, str]) -> None:
        for name in self._shown.keys() - reasons.keys():
            self._try(self._hide, name)
        for name, reason in reasons.items():
            self._try(self._show, name, reason)

    def _later(self, function: Callable[..., None], *args: Any) -> None:
        self._thread.submit(self._try, function, *args)

    @staticmethod
    def _try(function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # it only shows: nothing may end for it
            logger.warning("serve status cannot show failures: %s", error)

    def _look(self) -> None:
        names = serve.status().applications
        shown = (name for name in names if name.startswith(FAILED_PREFIX))
        self._shown |= {name.removeprefix(FAILED_PREFIX): "" for name in shown}

    def _show(self, name: str, reason: str) -> None:
        if self._shown.get(name) == reason:
            return
        self._shown[name] = ""  # it may be there although this fails
        failed = as_deployment(FailedTenant).options(name=name).bind(reason)
        app = serve.RunTarget(failed, name=FAILED_PREFIX + name, route_prefix=None)
        serve.run_many(
            [app], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )
        self._shown[name] = reason

    def _hide(self, name: str) -> None:
        if name in self._shown and ray.is_initialized():
            serve.delete(FAILED_PREFIX + name, _blocking=False)
            del self._shown[name]
