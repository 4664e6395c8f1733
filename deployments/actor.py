"""The scheduler actor: one process per device, started, found and restarted by Ray.

A thin shell around `host.SchedulerHost`, which needs no Ray. Control calls arrive on Ray's threads;
requests arrive on the channel. torch is imported in the actor's process only.

It outlives a control replica that is killed, so that tenants are served meanwhile: the next one
adopts it. One that nobody asks for `health.orphan_timeout_ms` ends itself (docs/decisions/010).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorClass

from coissue.deployments.discovery import NAMESPACE, scheduler_name
from coissue.deployments.run_dir import RunDir

logger = logging.getLogger("coissue")


class NotOwnerError(Exception):
    """Another control replica has adopted the scheduler, or none has since it started."""


@ray.remote(  # type: ignore[call-overload]  # Ray's types know the options of tasks only
    num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=16
)
class SchedulerActor:
    """Owns the device. Its methods are the control plane; none of them touches a request."""

    def __init__(self, run_dir: str) -> None:
        from coissue.deployments.host import SchedulerHost

        self._run_dir = RunDir(Path(run_dir))
        self._host = SchedulerHost(self._run_dir.read_settings(), run_dir, on_crash=_exit)
        self._host.start()
        #: The control replica that may change or stop it: the last that adopted it.
        self._owner = ""
        #: Around every change, so that none of an earlier owner comes after the next one's look.
        self._turn = threading.Lock()
        #: Seconds of this process since an owner was heard.
        self._idle_s = 0
        self._itself = ray.get_runtime_context().current_actor
        threading.Thread(target=self._watch_owner, daemon=True).start()

    def _watch_owner(self) -> None:
        pause = threading.Event()
        while self._idle_s * 1000 < self._host.settings.scheduler.health.orphan_timeout_ms:
            pause.wait(1)
            self._idle_s += 1
        logger.warning("no control for %d s: the scheduler ends", self._idle_s)
        self._end()
        ray.kill(self._itself)

    def adopt(self, owner: str) -> str:
        """From now on this owner alone may change or stop it. Returns the run folder."""
        self._owner = owner
        self._idle_s = 0
        return str(self._run_dir.path)

    def ping(self, timeout_s: float) -> int:
        self._idle_s = 0
        return self._host.ping(timeout_s)

    def endpoint(self) -> Any:
        return self._host.endpoint

    def attached(self) -> tuple[int, str, dict[str, int]]:
        """(epoch of this process, its owner, versions that it serves). A new epoch has forgotten
        all."""
        with self._turn:
            return self._host.epoch, self._owner, self._host.attached()

    def describe_served(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """What it serves, in full: for the one that adopts it."""
        with self._turn:
            return self._host.describe_served()

    @contextlib.contextmanager
    def _turn_of(self, owner: str) -> Iterator[None]:
        with self._turn:
            if owner != self._owner:
                raise NotOwnerError("another control replica owns the scheduler")
            yield

    def configure(self, owner: str, settings: dict[str, Any], note: str) -> list[str]:
        """Returns the keys that this process cannot take over. This and the other changes raise
        `NotOwnerError`."""
        with self._turn_of(owner):
            return self._host.configure(settings, note)

    def announce(self, owner: str, tenant: dict[str, Any], state: str, reason: str) -> None:
        with self._turn_of(owner):
            self._host.announce(tenant, state, reason)

    def attach(self, owner: str, tenant: dict[str, Any], version: int, artifact: str) -> str:
        """Bring a captured tenant to READY. Returns "" or the sentence that says why not."""
        with self._turn_of(owner):
            return self._host.attach(tenant, version, artifact)

    def set_policy(self, policy: str) -> None:
        self._host.set_policy(policy)

    def timeline(self) -> bytes:
        return self._host.ask("timeline")

    def status(self) -> bytes:
        return self._host.ask("status")

    def metrics(self) -> bytes:
        return self._host.ask("metrics")

    def stop(self, owner: str, drain: bool) -> bool:
        """False: another control owns it now, so it goes on."""
        if self._owner not in ("", owner):
            return False
        if drain:
            self._host.drain()
        self._end()
        return True

    def _end(self) -> None:
        self._host.stop()
        self._run_dir.remove()


def _exit(story: str) -> None:
    """The core broke an invariant: die, so that Ray starts a clean process."""
    import os

    logger.critical("scheduler stops: %s", story)
    os._exit(70)


def find_scheduler(device_index: int = 0) -> Any:
    """The named scheduler actor; None: there is none."""
    try:
        return ray.get_actor(scheduler_name(device_index), namespace=NAMESPACE)
    except ValueError:
        return None


def start_scheduler(run_dir: str, device_index: int = 0) -> Any:
    """The named scheduler actor, created when there is none; it reads its settings in `run_dir`."""
    # mypy does not apply the decorators of classes.
    return cast("ActorClass[SchedulerActor]", SchedulerActor).options(
        name=scheduler_name(device_index), namespace=NAMESPACE, get_if_exists=True,
        lifetime="detached",
    ).remote(run_dir)  # fmt: skip
