"""The control plane: one replica that brings tenants up, keeps them up and changes them live.

It captures each tenant in a process of its own, starts or adopts the scheduler actor, and compares
again and again what the scheduler serves with what the settings want. A first attach, a scheduler
that was killed, and a new version are all the same step: something wanted is missing. Settings
arrive by `reconfigure`, also while all of that goes on. Requests never pass here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve

from coissue.deployments.actor import NotOwnerError, find_scheduler, start_scheduler
from coissue.deployments.captures import Artifacts, Captures, TenantFailed
from coissue.deployments.changes import PREPARED, is_lowered_anew
from coissue.deployments.channel.frames import printable
from coissue.deployments.discovery import BLIND, CONTROL, HEALTH
from coissue.deployments.failures import Failures, find_deploy_error
from coissue.deployments.run_dir import LOCK, RunDir, Served, sweep_run_dirs
from coissue.deployments.settings import AppSettings, HealthSettings, TenantSettings
from coissue.deployments.trials import Trials
from coissue.deployments.wanted import Wanted, WantedTenants

logger = logging.getLogger("coissue.control")
RECONCILE_SECONDS: Final = 0.5
PING_SECONDS: Final = 1.0
#: Between two tries to start a scheduler whose constructor fails.
RETRY_SECONDS: Final = 5.0
#: For an orderly end of the scheduler, which first answers what is in flight.
STOP_SECONDS: Final = 10
#: For a scheduler that is there already to say so: Ray may just be starting it again.
ADOPT_SECONDS: Final = 60
#: What a tenant's job depends on: another one begins when they change.
JOB_KEYS: Final = (*PREPARED, "limits")
#: A replica that is refused so many times in a row takes the scheduler back.
REFUSALS_MAX: Final = 40
#: A version that the scheduler did not survive attaching so many times is failed.
ATTACH_TRIES: Final = 2


@serve.deployment(name=CONTROL, num_replicas=1, ray_actor_options=BLIND, **HEALTH)
class Control:
    """Looks after the scheduler actor and the tenants' states."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        self._run_dir: RunDir | None = None  # nothing to take down before it is there
        self._settings: AppSettings
        self._wanted = WantedTenants()
        self._scheduler: Any = None
        #: Tells this replica from one that it replaces.
        self._owner = uuid.uuid4().hex
        self._epoch = 0
        #: The scheduler of this epoch has not been told the settings.
        self._untold = True
        self._note = ""
        #: Why there is no scheduler; empty: there is one, or it is on its way.
        self._trouble = ""
        self._watch = Watch()
        self._loops: list[asyncio.Future[None]] = []

    async def reconfigure(self, settings: dict[str, Any]) -> None:
        """By Serve, after the constructor and whenever `args` change."""
        parsed = AppSettings.model_validate(settings)
        if self._run_dir is None:
            await self._begin(parsed)
        else:
            self._change(parsed)

    @property
    def _held_dir(self) -> RunDir:
        assert self._run_dir is not None, "it is held from `_begin` on"
        return self._run_dir

    async def _begin(self, settings: AppSettings) -> None:
        """From nothing, or from what a control replica left behind that was killed."""
        folder, served = await self._adopt()
        self._run_dir = RunDir(folder)
        sweep_run_dirs()
        self._artifacts = Artifacts(self._run_dir.path)
        self._captures = Captures(self._run_dir.path, settings.capture)
        self._trials = Trials(serve.get_replica_context().app_name)
        self._failures = Failures()
        self._wanted.adopt({**self._run_dir.read_served(), **served})
        logger.info("control up adopted=%d", len(served))
        self._change(settings, is_new=True)
        for loop in (self._reconcile_forever(), self._watch_forever()):
            self._loops.append(asyncio.ensure_future(loop))

    async def _adopt(self) -> tuple[Path | None, Served]:
        """Take over the scheduler that runs: the run folder that it holds and what it serves."""
        self._scheduler = find_scheduler()
        if self._scheduler is None:
            return None, {}
        try:
            async with asyncio.timeout(ADOPT_SECONDS):
                folder = Path(await ask_folder(self._scheduler, self._owner))
                served: Served = await self._scheduler.describe_served.remote()
            (folder / LOCK).stat()  # it may be on another host, or swept
        except (ray.exceptions.RayError, TimeoutError, OSError) as error:
            logger.warning("scheduler cannot be adopted: %s", one_line(error))
            await self._end_scheduler(orderly=False)
            return None, {}
        return folder, served

    async def trouble(self) -> tuple[str, str]:
        """For `/status`: why there is no scheduler, and why Serve's newest config does not run."""
        name = serve.get_replica_context().app_name
        return self._trouble, await asyncio.to_thread(find_deploy_error, name)

    def check_health(self) -> None:
        for loop in self._loops:
            if loop.done():
                raise RuntimeError(f"a loop of control ended: {loop}")

    # --- what is wanted ------------------------------------------------------------------------

    def _change(self, settings: AppSettings, *, is_new: bool = False) -> None:
        """`is_new`: this replica has not seen the files that the models came from."""
        self._settings = settings
        self._captures.settings = settings.capture
        self._untold = True
        self._wanted.keep_only({tenant.name for tenant in settings.tenants})
        for tenant in settings.tenants:
            wanted, was_there = self._wanted.bring(tenant)
            old, wanted.settings = wanted.settings, tenant
            if is_new or not was_there or old != tenant or wanted.failed:
                self._plan(wanted, old, is_current=is_new)
        self._note_served()

    def _note_served(self) -> AppSettings:
        """What the scheduler is told, also when Ray starts it anew."""
        tenants = tuple(wanted.settings_for(wanted.serving) for wanted in self._wanted.values())
        told = self._settings.model_copy(update={"tenants": tenants})
        self._held_dir.write_settings(told)
        self._held_dir.write_served(self._wanted.describe_served())
        return told

    def _plan(self, wanted: Wanted, old: TenantSettings, *, is_current: bool) -> None:
        """How the tenant gets from its `old` settings to what it is to be."""
        tenant, version = wanted.settings, wanted.serving
        is_same = all(getattr(old, key) == getattr(tenant, key) for key in JOB_KEYS)
        if wanted.job is not None and is_same and not is_lowered_anew(old, tenant):
            return
        wanted.drop_job()
        wanted.fresh, wanted.failed, wanted.tries = 0, None, Counter()
        is_other = is_lowered_anew((wanted.served if version else None) or old, tenant)
        found = 0 if is_other else self._artifacts.find(tenant, version, is_current=is_current)
        wanted.coming = found or self._artifacts.next(tenant.name, version)
        preparing = self._prepare(wanted, tenant, wanted.coming, is_captured=bool(found))
        wanted.job = asyncio.ensure_future(preparing)

    async def _prepare(
        self, wanted: Wanted, tenant: TenantSettings, version: int, *, is_captured: bool
    ) -> None:
        """Until that version of the tenant may be attached."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._trials.prove(tenant, self._settings.capture.seconds))
                if not is_captured:
                    both.create_task(self._captures.capture(tenant, version))
            if version != wanted.serving:
                wanted.fresh = version
            elif wanted.served and is_lowered_anew(wanted.served, tenant):  # attached meanwhile
                wanted.job = None
                self._plan(wanted, tenant, is_current=False)
            else:
                wanted.take_over(tenant)
                self._untold = True
        except* Exception as failed:
            self._fail(wanted, version, say_why(failed.exceptions[0]))
        finally:
            if wanted.job is asyncio.current_task():
                wanted.job, wanted.coming = None, 0
            if not any(other.job for other in self._wanted.values()):
                self._captures.stop()

    def _fail(self, wanted: Wanted, version: int, reason: str) -> None:
        wanted.failed = version, printable(reason)
        logger.error("tenant=%s failed reason=%s", wanted.settings.name, wanted.reason)

    # --- what the scheduler has ----------------------------------------------------------------

    async def _reconcile_forever(self) -> None:
        refused = 0
        while True:
            pause_s = RECONCILE_SECONDS
            try:
                await self._reconcile()
                self._trouble, refused = "", 0
            except NotOwnerError as error:  # it started anew, or Serve replaces this replica
                logger.warning("nothing was changed: %s", one_line(error))
                refused += 1
                if refused % REFUSALS_MAX == 0:  # it is not ended: the other must be gone
                    self._epoch = 0
            except ray.exceptions.RayError as error:
                logger.warning("scheduler not reachable: %s", one_line(error))
                self._scheduler = None
                self._watch.lose()
                if getattr(error, "actor_init_failed", False):
                    why = str(error).strip().rpartition("\n")[2]
                    self._trouble = f"the scheduler cannot start: {why}"
                    pause_s = RETRY_SECONDS
            await asyncio.sleep(pause_s)

    async def _reconcile(self) -> None:
        if self._scheduler is None:
            self._scheduler = start_scheduler(str(self._held_dir.path))
        epoch, owner, attached = await self._scheduler.attached.remote()
        if epoch != self._epoch:
            await self._scheduler.adopt.remote(self._owner)
            for wanted in self._wanted.values():
                wanted.told = "" if self._epoch else None
            self._epoch, self._untold = epoch, True
        elif owner != self._owner:
            raise NotOwnerError("another control replica owns the scheduler")
        self._untold |= not self._wanted.note_attached(attached)
        if any(name in attached and not one.serving for name, one in self._wanted.items()):
            self._wanted.learn(await self._scheduler.describe_served.remote())
        if self._untold:
            self._untold = False
            if keys := await self._tell():
                await self._restart(keys)
                return
        await self._tell_reasons()
        for name, wanted in list(self._wanted.items()):
            if self._untold:
                return  # the settings changed meanwhile
            has = attached.get(name, 0)
            # What was served before comes first, when nothing of it is left.
            version = (wanted.fresh if has else 0) or wanted.serving or wanted.fresh
            if version and not version == has == wanted.serving:
                await self._attach(wanted, version)
                await self._tell_reasons()

    async def _tell_reasons(self) -> None:
        """Why something else is served, or nothing: to the scheduler, and who failed to Serve."""
        for name, wanted in list(self._wanted.items()):
            if wanted.told != wanted.reason and self._wanted.get(name) is wanted:
                wanted.told = wanted.reason
                state = "failed" if wanted.failed else "loading"  # what it serves stays ready
                told = wanted.settings.model_dump()
                await self._scheduler.announce.remote(self._owner, told, state, wanted.reason)
        self._failures.show(self._wanted.list_failed())

    async def _tell(self) -> list[str]:
        """The keys that this scheduler cannot take over."""
        told = self._note_served().model_dump(mode="json")
        try:
            keys: list[str] = await self._scheduler.configure.remote(self._owner, told, self._note)
        except NotOwnerError:  # which Ray makes a `RayTaskError` too
            raise
        except ray.exceptions.RayTaskError as bug:  # it lives: no reason to keep tenants away
            logger.error("the scheduler refuses the settings: %s", one_line(bug))
            keys = []
        except ray.exceptions.RayError:
            self._untold = True
            raise
        self._artifacts.drop_others(self._wanted.keys())
        return keys

    async def _attach(self, wanted: Wanted, version: int) -> None:
        """Raises `RayError` when the scheduler dies meanwhile."""
        tenant = wanted.settings_for(version)
        error = ""
        if wanted.tries[version] >= ATTACH_TRIES:
            error = f"the scheduler died {ATTACH_TRIES} times attaching it"
        else:
            wanted.tries[version] += 1
            folder = self._artifacts.path(tenant.name, version)
            try:
                error = await self._scheduler.attach.remote(
                    self._owner, tenant.model_dump(), version, str(folder)
                )
            except NotOwnerError:
                del wanted.tries[version]
                raise
            except ray.exceptions.RayTaskError as bug:
                error = f"attach failed: {type(bug.cause).__name__}: {bug.cause}"
        del wanted.tries[version]
        wanted.fresh = 0 if wanted.fresh == version else wanted.fresh
        if error:
            wanted.serving = 0 if wanted.serving == version else wanted.serving
        else:
            wanted.serving, wanted.served, wanted.told = version, tenant, ""
        self._note_served()
        if self._wanted.get(tenant.name) is not wanted:
            return  # removed meanwhile: it is detached with the next settings
        is_served = wanted.is_settled and self._artifacts.serves(wanted.settings, wanted.serving)
        if not (is_served or wanted.fresh or wanted.job or wanted.failed):
            if error:
                self._fail(wanted, version, error)
                return
            self._plan(wanted, wanted.settings, is_current=False)
        elif error:
            logger.warning("tenant=%s version=%d is not wanted: %s", tenant.name, version, error)
        self._artifacts.prune(tenant.name, {wanted.serving, wanted.fresh, wanted.coming})

    async def _restart(self, keys: list[str]) -> None:
        self._note = f"{', '.join(keys)} changed, which needs a restart: the scheduler restarted"
        logger.warning("%s", self._note)
        await self._end_scheduler(orderly=True)

    # --- its life ------------------------------------------------------------------------------

    async def _watch_forever(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            if self._scheduler is not None:
                health = self._settings.scheduler.health
                why = await self._watch.ping(self._scheduler, health)
                if why and self._scheduler is not None:
                    logger.error("scheduler killed: %s", why)
                    await asyncio.to_thread(kill_scheduler, self._scheduler, True)

    async def _end_scheduler(self, *, orderly: bool) -> bool:
        """False: it belongs to another control replica now."""
        scheduler = self._scheduler or find_scheduler()
        self._scheduler = None
        self._watch.lose()
        if scheduler is None:
            return True
        if orderly:
            # A scheduler that died or hangs must not keep the folder.
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                stop = scheduler.stop.remote(self._owner, True)
                if not await asyncio.wait_for(stop, STOP_SECONDS):
                    return False
        await end_scheduler(scheduler)
        return True

    async def __del__(self) -> None:
        if self._run_dir is None:
            return
        for task in self._loops:
            task.cancel()
        for wanted in self._wanted.values():
            wanted.drop_job()
        self._captures.stop()
        await self._end_scheduler(orderly=True)
        self._run_dir.remove()
        self._run_dir = None


class Watch:
    """Whether the scheduler answers. Not before its first answer: starting takes its time."""

    def __init__(self) -> None:
        self.lose()

    def lose(self) -> None:
        """It is known to be away; the next answer is a first one."""
        self._answered = False
        self._missed = 0
        self._since = time.monotonic()

    async def ping(self, scheduler: Any, health: HealthSettings) -> str:
        """Why it is to be killed; empty: it is well, or there is hope."""
        timeout_s = health.ping_timeout_ms / 1e3
        try:
            # The scheduler gives up first, so that its threads do not fill with pings.
            await asyncio.wait_for(scheduler.ping.remote(timeout_s), timeout_s)
            self._answered, self._missed = True, 0
            return ""
        except ray.exceptions.RayTaskError:
            pass  # it lives, and its loop did not have a turn
        except ray.exceptions.RayError:
            self.lose()
            return ""
        except TimeoutError:
            pass
        if self._answered:
            self._missed += 1
            why = f"no answer {self._missed} times in {health.ping_timeout_ms:g} ms each"
            is_over = self._missed >= health.misses
        else:
            why = f"no first answer in {health.start_timeout_ms:g} ms"
            is_over = (time.monotonic() - self._since) * 1e3 >= health.start_timeout_ms
        if is_over:
            self.lose()
        return why if is_over else ""


async def ask_folder(scheduler: Any, owner: str) -> str:
    """The run folder of a scheduler that is there, once Ray has started it."""
    while True:
        try:
            folder: str = await scheduler.adopt.remote(owner)
            return folder
        except ray.exceptions.ActorUnavailableError:  # Ray is starting it again
            await asyncio.sleep(RECONCILE_SECONDS)


def kill_scheduler(scheduler: Any, restart: bool) -> None:
    """Also one that is stopped; takes some seconds then. `restart`: Ray starts it again."""
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(scheduler, no_restart=not restart)


async def end_scheduler(scheduler: Any) -> None:
    """Kill it, and wait until its name is free."""
    await asyncio.to_thread(kill_scheduler, scheduler, False)
    until = time.monotonic() + STOP_SECONDS
    while find_scheduler() is not None and time.monotonic() < until:
        await asyncio.sleep(0.05)


def say_why(error: Exception) -> str:
    """A tenant's failure speaks for itself; what else happens is a bug of ours."""
    return str(error) if isinstance(error, TenantFailed) else f"{type(error).__name__}: {error}"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
