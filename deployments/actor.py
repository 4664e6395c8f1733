"""The scheduler actor: one process per device, started, found and restarted by Ray.

A thin shell around `host.SchedulerHost`, which needs no Ray. Control calls arrive on Ray's threads;
requests arrive on the channel. torch is imported in the actor's process only.
"""

from __future__ import annotations

from typing import Any

import ray

from coissue.deployments.discovery import NAMESPACE, scheduler_name


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=16)
class SchedulerActor:
    """Owns the device. Its methods are the control plane; none of them touches a request."""

    def __init__(self, settings: dict[str, Any], run_dir: str) -> None:
        from coissue.deployments.host import SchedulerHost
        from coissue.deployments.settings import AppSettings

        self._host = SchedulerHost(AppSettings.model_validate(settings), run_dir, on_crash=_exit)
        self._host.start()

    def endpoint(self) -> Any:
        return self._host.endpoint

    def attached(self) -> tuple[int, dict[str, int]]:
        """(epoch of this process, tenant -> version served). A new epoch has forgotten all."""
        return self._host.epoch, self._host.attached()

    def announce(self, tenant: dict[str, Any], state: str, reason: str) -> None:
        self._host.announce(tenant, state, reason)

    def attach(self, tenant: dict[str, Any], version: int, artifact: str) -> str:
        """Bring a captured tenant to READY. Returns "" or the sentence that says why not."""
        return self._host.attach(tenant, version, artifact)

    def detach(self, name: str) -> None:
        self._host.detach(name)

    def set_policy(self, policy: str) -> None:
        self._host.set_policy(policy)

    def timeline(self) -> bytes:
        return self._host.ask("timeline")

    def stop(self) -> None:
        self._host.stop()


def _exit(story: str) -> None:
    """The core broke an invariant: die, so that Ray starts a clean process."""
    import logging
    import os

    logging.getLogger("coissue").critical("scheduler stops: %s", story)
    os._exit(70)


def start_scheduler(settings: dict[str, Any], run_dir: str, device_index: int = 0) -> Any:
    """The named scheduler actor, created when there is none. It dies with the caller's process."""
    return SchedulerActor.options(
        name=scheduler_name(device_index), namespace=NAMESPACE, get_if_exists=True
    ).remote(settings, run_dir)
