"""Control under any order of events: settings that change, captures, trials and attaches that end
late, a scheduler or a control replica that dies in the middle of any of them.

Everything that control waits for stops at a stage, and the test says who goes on. What control may
never do is checked after every event, what it must reach in the end once all went on.
"""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace

import fake_control
import pytest
import ray.exceptions
from fake_control import CHANGES, Captures, Failures, Scheduler, Trials, app, bare, leave, tenant

from coissue.deployments import control
from coissue.deployments.actor import NotOwnerError
from coissue.deployments.captures import TenantFailed

FORMS = {
    **fake_control.FORMS,
    "other class": {"slo": "other"},
    "more rows": {"limits": {"rows": 99}},
}
CLASSES = {"other class": {"other": {"deadline_ms": 99}}}
EVENTS = (
    *("change", "change", "change", "remove"),
    *("scheduler dies", "control dies", "both die", "control is replaced", "the replaced end"),
)
MODELS = {"one": {}, "two": {"n": 2}, "broken": {"broken": 1}, "misfit": {"misfit": 1}}
#: What cannot be served, and what is said of it.
WRONG = {"bad own": "no such class", "broken": "no such op", "misfit": "it does not fit"}
#: More than any event starts of what follows from it at once.
TURNS = 40
#: Until it has come to rest, whatever happened before.
TURNS_MAX = 10_000


class Stage:
    """Who waits for what; the test says who goes on."""

    def __init__(self):
        self._waiting = []

    async def wait(self):
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    async def go_on(self, rng):
        """One of those that wait, if there is one."""
        self._waiting = [future for future in self._waiting if not future.done()]
        if self._waiting:
            self._waiting.pop(rng.randrange(len(self._waiting))).set_result(None)
            await settle()


async def settle():
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def outlive(work):
    """`work` goes on when nobody waits for it any more."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


class StagedScheduler(Scheduler):
    """A call takes time on its way there and back; one that is lost with its caller goes on."""

    def __init__(self, stage, rng):
        super().__init__()
        self.stage, self.rng, self.folder = stage, rng, ""
        for name in ("attached", "adopt", "describe_served"):
            setattr(self, name, SimpleNamespace(remote=self._stage(getattr(self, "_" + name))))
        for name in CHANGES:
            change = self._stage(self._turn_of(getattr(self, "_" + name)))
            setattr(self, name, SimpleNamespace(remote=change))

    def _turn_of(self, function):
        def change(owner, *args):
            if owner != self.owner:
                raise NotOwnerError
            return function(*args)

        return change

    def _stage(self, function):
        async def call(*args):
            epoch = self.epoch
            await self.stage.wait()
            if self.rng.random() < 0.5:  # else it reaches one that Ray started anew
                self._live(epoch)
            epoch = self.epoch
            result = function(*args)
            await self.stage.wait()
            self._live(epoch)
            return result

        return lambda *args: outlive(call(*args))

    def _live(self, epoch):
        if epoch != self.epoch:
            raise ray.exceptions.RayActorError

    def _adopt(self, owner):
        super()._adopt(owner)
        return self.folder

    def _attach(self, tenant, version, artifact):
        if tenant["slo"] not in self.settings["slo_classes"]:
            raise ray.exceptions.RayTaskError("attach", "a traceback", KeyError(tenant["slo"]))
        if "misfit" in tenant["model"]["kwargs"]:
            return WRONG["misfit"]
        return super()._attach(tenant, version, artifact)

    def die(self):
        self.epoch += 1
        self.served, self.told, self.kept, self.owner = {}, {}, {}, ""


class StagedCaptures(Captures):
    """One that nobody waits for any more leaves its version all the same."""

    def __init__(self, folder, stage):
        super().__init__(folder)
        self.stage = stage

    async def capture(self, tenant, version):
        await outlive(self._capture(tenant, version))

    async def _capture(self, tenant, version):
        await self.stage.wait()
        if "broken" in tenant.model.kwargs:
            raise TenantFailed(WRONG["broken"])
        leave(self.folder, tenant, version)


class StagedTrials(Trials):
    def __init__(self, stage):
        self.stage = stage

    async def prove(self, tenant, seconds):
        await self.stage.wait()
        await super().prove(tenant, seconds)


class World:
    """A scheduler, the control replica that looks after it, and what they are asked for."""

    def __init__(self, monkeypatch, rng):
        self.rng, self.stage, self.failures = rng, Stage(), Failures()
        self.scheduler, self.started = StagedScheduler(self.stage, rng), None
        #: Control replicas that Serve has replaced and not ended yet.
        self.replaced = []
        self.was_replaced = False
        context = SimpleNamespace(app_name="coissue")
        for name, fake in {
            "find_scheduler": lambda: self.started,
            "start_scheduler": self._start,
            "RECONCILE_SECONDS": 0,
            "REFUSALS_MAX": 2,
            "Captures": lambda folder, settings: StagedCaptures(folder, self.stage),
            "Trials": lambda app_name: StagedTrials(self.stage),
            "Failures": lambda: self.failures,
            "serve": SimpleNamespace(get_replica_context=lambda: context),
        }.items():
            monkeypatch.setattr(control, name, fake)

    def _start(self, folder):
        self.started, self.scheduler.folder = self.scheduler, folder
        return self.scheduler

    async def begin(self, settings):
        """A control replica; it finds what one before it left."""
        self.control = object.__new__(bare)
        await self.control.__init__()
        begun = asyncio.ensure_future(self.change(settings))
        while not begun.done():
            await settle()
            await self.stage.go_on(self.rng)
        begun.result()

    async def change(self, settings):
        await self.control.reconfigure(settings.model_dump(mode="json", exclude_none=True))
        self.check()

    async def go_on(self):
        await settle()
        await self.stage.go_on(self.rng)
        self.check()

    async def run_out(self):
        """Until all that is under way has ended, and control has looked at that."""
        quiet, tries = 0, 0
        for _ in range(TURNS_MAX):
            if quiet == 100:
                return
            await self.go_on()
            wanted = self.control._wanted.values()
            is_quiet = tries == len(self.scheduler.tries) and not self.control._untold
            is_quiet = is_quiet and not any(each.job or each.fresh for each in wanted)
            quiet, tries = quiet + 1 if is_quiet else 0, len(self.scheduler.tries)
        raise AssertionError("control never comes to rest")

    async def replace(self, settings):
        """As Serve does it: the old control replica lives on until the new one is ready."""
        self.replaced.append(self.control)
        self.was_replaced = True
        await self.begin(settings)

    async def end_replaced(self):
        while self.replaced:
            await self.end(self.replaced.pop())

    async def end(self, replica):
        """As a process that is killed: what it began elsewhere goes on."""
        for wanted in replica._wanted.values():
            wanted.drop_job()
        for loop in replica._loops:
            loop.cancel()
        await settle()

    def check(self):
        """What holds at any time: nothing else is served in silence."""
        control, scheduler = self.control, self.scheduler
        for name, wanted in control._wanted.items():
            assert wanted.reason or wanted.state != "failed"
            if wanted.state == "ready" and not wanted.reason:
                assert wanted.is_settled, name
                if scheduler.served.get(name) == wanted.serving:  # the number names all of it
                    served = scheduler.kept[name]
                    assert served["exact"] == wanted.settings.exact
                    assert served["model"] == wanted.settings.model.model_dump()


def describe(given):
    """What of a tenant's settings has to stay together."""
    kept = {"model": {"kwargs": {}}, "exact": False, "isolation": "shared", "handler": None}
    kept |= {key: value for key, value in given.items() if key in kept}
    return {
        **kept,
        "model": kept["model"]["kwargs"],
        "handler": kept["handler"] and kept["handler"]["use"],
    }


@pytest.mark.parametrize("seed", range(100))
def test_any_order_of_events(monkeypatch, seed):
    asyncio.run(live_through(monkeypatch, Random(seed)))


def test_what_served_serves_again_when_both_die_after_a_change_that_failed(monkeypatch):
    async def main():
        world = World(monkeypatch, Random(0))
        await world.begin(app(tenant("a"), tenant("b")))
        await world.run_out()
        failed = app(tenant("a", kwargs=MODELS["broken"]), tenant("b"))
        await world.change(failed)
        await world.run_out()
        world.scheduler.die()
        await world.end(world.control)
        await world.begin(failed)
        await world.run_out()
        assert world.scheduler.served == {"a": 1, "b": 1}
        said = world.control._wanted["a"].reason
        assert said.endswith(f"version 1 serves: {WRONG['broken']}")
        await world.end(world.control)
        world.control._run_dir.remove()

    asyncio.run(main())


async def live_through(monkeypatch, rng):
    world = World(monkeypatch, rng)
    scheduler, good, form, model = world.scheduler, [], "shared", "one"
    settings = app(tenant("a"), tenant("b"))
    await world.begin(settings)
    was_served = False
    for _ in range(rng.randint(1, 12)):
        event = rng.choice(EVENTS)
        if event == "change":
            form, model = rng.choice(list(FORMS)), rng.choice(list(MODELS))
            wanted = tenant("a", kwargs=MODELS[model], share=rng.randint(1, 9), **FORMS[form])
            classes = {"fast": {"deadline_ms": 10}} | CLASSES.get(form, {})
            settings = app(wanted, tenant("b"), slo_classes=classes)
            await world.change(settings)
        was_served = was_served or "a" in scheduler.served
        if event == "remove":
            was_served = False
            settings = app(tenant("b"))
            await world.change(settings)
        if event in ("scheduler dies", "both die"):
            scheduler.die()
        if event in ("control dies", "both die"):
            await world.end(world.control)
            await world.begin(settings)
        if event == "control is replaced":
            await world.replace(settings)
        if event == "the replaced end":
            await world.end_replaced()
        if not WRONG.keys() & {form, model}:
            good.append(describe(settings.tenants[0].model_dump()))
        for _ in range(rng.choice((0, 1, 3, 10, 100))):
            await world.go_on()
    await world.end_replaced()
    await world.run_out()
    reached = {name: (w.state, w.reason) for name, w in world.control._wanted.items()}
    died = {name for name, (_, reason) in reached.items() if "scheduler died" in reason}
    assert "b" in died or reached["b"] == ("ready", "")
    assert scheduler.served.keys() <= reached.keys()
    if "a" in reached and "a" not in died:
        wrong = WRONG.keys() & {form, model}
        state, reason = reached["a"]
        if not wrong:
            assert (state, reason) == ("ready", "")
            told = settings.tenants[0].model_dump()
            assert describe(scheduler.kept["a"]) == describe(told)
            assert scheduler.kept["a"]["share"] == told["share"]
        else:
            assert state == "failed"
            assert any(WRONG[each] in reason for each in wrong)
        # Of what a replaced one had attached, the next may never hear.
        assert "a" in scheduler.served or not was_served or world.was_replaced
        if "a" in scheduler.served:
            assert world.control._wanted["a"].serving == scheduler.served["a"]
            assert describe(scheduler.kept["a"]) in good
        assert scheduler.told["a"][1] == reason
    shown = {name: reason for name, (state, reason) in reached.items() if state == "failed"}
    assert world.failures.shown == shown
    await world.end(world.control)
    world.control._run_dir.remove()
