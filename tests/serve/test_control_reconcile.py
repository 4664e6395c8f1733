"""What control does about a scheduler that dies, without a cluster: only Ray's errors are real."""

from __future__ import annotations

import asyncio
import warnings

import pytest

from coissue.deployments.settings import ModelSettings, TenantSettings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing Ray
    import ray.exceptions

    from coissue.deployments import control


class Remote:
    """`method.remote(...)` of an actor handle."""

    def __init__(self, function):
        self._function = function

    async def remote(self, *args):
        return self._function(*args)


class Scheduler:
    """Dies attaching `deadly`, raises for `buggy`, refuses `wrong`; remembers what it was told."""

    def __init__(self):
        self.tries, self.told, self.served = [], {}, {}
        self.epoch = 1
        for name in ("attached", "attach", "announce"):
            setattr(self, name, Remote(getattr(self, "_" + name)))

    def _attached(self):
        return self.epoch, dict(self.served)

    def _announce(self, tenant, state, reason):
        assert tenant["name"] not in self.served
        self.told[tenant["name"]] = (state, reason)

    def _attach(self, tenant, version, artifact):
        name = tenant["name"]
        self.tries.append(name)
        if name == "deadly":
            self.epoch += 1
            self.served, self.told = {}, {}
            raise ray.exceptions.RayActorError
        if name == "buggy":
            raise ray.exceptions.RayTaskError("attach", "a traceback", KeyError("lost"))
        if name == "wrong":
            return "reference 0: output 'y' differs"
        self.served[name] = version
        return ""


@pytest.fixture
def scheduler(monkeypatch):
    fake = Scheduler()
    monkeypatch.setattr(control, "start_scheduler", lambda settings, run_dir: fake)
    monkeypatch.setattr(control, "show_failure", lambda name, reason: None)
    return fake


def make_control(*names):
    """A control replica whose tenants are captured, without what its constructor starts."""
    # The destructor is for a whole replica.
    bare = type("Bare", (control.Control.func_or_class,), {"__del__": lambda self: None})
    made = object.__new__(bare)
    model = ModelSettings(factory="m:f")
    made._wanted = {
        name: control.Wanted(
            TenantSettings(name=name, model=model, slo="fast"), state="captured", artifact="/x"
        )
        for name in names
    }
    made._scheduler, made._epoch = None, 0
    made._settings = TenantSettings(name="unused", model=model, slo="fast")
    made._run_dir = type("RunDir", (), {"path": "/x"})
    return made


def reconcile(made, times=10):
    """As `_reconcile_forever`, without the pauses."""

    async def main():
        for _ in range(times):
            try:
                await made._reconcile()
            except ray.exceptions.RayError:
                made._scheduler = None

    asyncio.run(main())
    return {name: (wanted.state, wanted.reason) for name, wanted in made._wanted.items()}


def test_a_tenant_that_kills_the_scheduler_fails_after_two_tries(scheduler):
    states = reconcile(make_control("first", "deadly", "last"))
    assert scheduler.tries.count("deadly") == 2
    assert states["deadly"] == ("failed", "the scheduler died 2 times attaching it")
    assert states["first"] == states["last"] == ("ready", "")
    assert set(scheduler.served) == {"first", "last"}
    assert scheduler.told["deadly"] == states["deadly"]


def test_an_error_of_attach_fails_that_tenant_alone(scheduler):
    states = reconcile(make_control("buggy", "wrong", "good"))
    assert scheduler.tries == ["buggy", "wrong", "good"]
    assert states["buggy"] == ("failed", "attach failed: KeyError: 'lost'")
    assert states["wrong"] == ("failed", "reference 0: output 'y' differs")
    assert states["good"] == ("ready", "")


def test_a_new_scheduler_is_told_that_tenants_load_and_gets_them_again(scheduler):
    made = make_control("a", "wrong")
    reconcile(made)
    scheduler.epoch, scheduler.served, scheduler.told = 7, {}, {}
    reconcile(made, 1)
    assert scheduler.told["a"] == ("loading", "")
    assert scheduler.told["wrong"][0] == "failed"
    assert scheduler.tries == ["a", "wrong", "a"]


def test_deaths_between_attaches_are_nobodys_fault(scheduler):
    made = make_control("a")
    for epoch in range(5):
        scheduler.epoch, scheduler.served = epoch + 10, {}
        assert reconcile(made)["a"] == ("ready", "")
