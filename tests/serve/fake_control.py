"""Control without Serve and without a scheduler process: fakes of all that it works with."""

from __future__ import annotations

import asyncio
import json
import warnings

import pytest

from coissue.deployments.captures import Artifacts, TenantFailed
from coissue.deployments.changes import adjust_attached
from coissue.deployments.run_dir import RunDir
from coissue.deployments.settings import AppSettings, TenantSettings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing Ray
    import ray.exceptions

    from coissue.deployments import control


#: What the owner of a scheduler may ask for.
CHANGES = ("attach", "announce", "configure")


class Remote:
    """`method.remote(...)` of an actor handle."""

    def __init__(self, function):
        self._function = function

    async def remote(self, *args):
        return self._function(*args)


class Owned(Remote):
    """One that begins with who asks."""

    async def remote(self, owner, *args):
        return self._function(*args)


class Scheduler:
    """Dies attaching `deadly`, raises for `buggy`, refuses `wrong`; remembers what it was told."""

    def __init__(self):
        self.tries, self.told, self.served, self.settings = [], {}, {}, None
        #: What each tenant was last told with; of what is built in, what it was attached with.
        self.kept = {}
        self.epoch, self.owner = 1, ""
        for name in ("attached", "adopt", "describe_served"):
            setattr(self, name, Remote(getattr(self, "_" + name)))
        for name in CHANGES:
            setattr(self, name, Owned(getattr(self, "_" + name)))

    def _attached(self):
        return self.epoch, self.owner, dict(self.served)

    def _describe_served(self):
        kept = {name: self.kept.get(name, tenant(name)) for name in self.served}
        return {
            name: (version, TenantSettings.model_validate(kept[name]).model_dump())
            for name, version in self.served.items()
        }

    def _adopt(self, owner):
        self.owner = owner
        return "/x"

    def _configure(self, settings, note):
        AppSettings.model_validate(settings)  # as the real one
        self.settings = settings
        tenants = {tenant["name"]: tenant for tenant in settings["tenants"]}
        names = list(tenants)
        for name in self.served.keys() - tenants.keys():
            self._detach(name)
        for name in self.served:
            told = TenantSettings.model_validate(tenants[name])
            before = TenantSettings.model_validate(self.kept.get(name, tenants[name]))
            tenants[name] = adjust_attached(before, told).model_dump()
        self.kept |= tenants
        self.told |= {name: ("loading", "") for name in names if name not in self.told}
        return []

    def _detach(self, name):
        del self.served[name]
        self.told.pop(name, None)

    def _announce(self, tenant, state, reason):
        self.told[tenant["name"]] = (state, reason)

    def _attach(self, tenant, version, artifact):
        name = tenant["name"]
        self.tries.append(name)
        if name == "deadly" or "deadly" in tenant["model"]["kwargs"]:
            self.epoch += 1
            self.served, self.told = {}, {}
            raise ray.exceptions.RayActorError
        if name == "buggy":
            raise ray.exceptions.RayTaskError("attach", "a traceback", KeyError("lost"))
        if name == "wrong":
            return "reference 0: output 'y' differs"
        self.served[name], self.kept[name] = version, tenant
        self.told[name] = ("ready", "")
        return ""


class Failures:
    def __init__(self):
        self.shown = {}

    def show(self, reasons):
        self.shown = reasons


class Captures:
    """Leaves what a capture leaves; models with `broken` in their arguments cannot be captured."""

    def __init__(self, folder):
        self.folder, self.jobs = folder, []

    async def capture(self, tenant, version):
        await asyncio.sleep(0)
        self.jobs.append((tenant.name, version))
        if "broken" in tenant.model.kwargs:
            raise TenantFailed("no such op")
        leave(self.folder, tenant, version)

    def stop(self):
        pass


class Trials:
    """Handlers of tenants' own `bad` classes cannot be loaded."""

    async def prove(self, tenant, seconds):
        await asyncio.sleep(0)
        if tenant.handler and "bad" in tenant.handler.use:
            raise TenantFailed("no such class")
        if tenant.handler and "bug" in tenant.handler.use:
            raise KeyError("lost")


def leave(folder, tenant, version, inputs=None):
    made = folder / f"{tenant.name}-{version}"
    made.mkdir(exist_ok=True)
    meta = {
        "source": tenant.model.model_dump(exclude_none=True),
        "limits": tenant.limits.model_dump(),
        "inputs": inputs or {},
    }
    (made / "meta.json").write_text(json.dumps(meta))


def tenant(name, **fields):
    kwargs = fields.pop("kwargs", {})
    return {"name": name, "model": {"factory": "m:f", "kwargs": kwargs}, "slo": "fast", **fields}


def app(*tenants, **parts):
    classes = {"fast": {"deadline_ms": 10}, "batch": {"deadline_ms": 99}}
    parts = {"slo_classes": classes} | parts
    return AppSettings.model_validate({"tenants": tenants, **parts})


#: Settings of a tenant that differ in what a change of them asks for.
FORMS = {
    "shared": {},
    "built-in": {"handler": {"use": "text"}},
    "own": {"isolation": "dedicated", "handler": {"use": "team:good"}},
    "other own": {"isolation": "dedicated", "handler": {"use": "team:other"}},
    "built-in apart": {"isolation": "dedicated", "handler": {"use": "text"}},
    "bad own": {"isolation": "dedicated", "handler": {"use": "team:bad"}},
    "exact": {"exact": True},
    "exact own": {"exact": True, "isolation": "dedicated", "handler": {"use": "team:good"}},
}

#: The destructor is for a whole replica.
bare = type("Bare", (control.Control.func_or_class,), {"__del__": lambda self: None})


@pytest.fixture
def scheduler(monkeypatch):
    fake = Scheduler()
    monkeypatch.setattr(control, "start_scheduler", lambda run_dir: fake)
    monkeypatch.setattr(control, "find_scheduler", lambda: None)
    return fake


@pytest.fixture
def make(tmp_path, scheduler):
    """A control replica without Serve; call it inside of a running loop."""

    async def make(settings, served=None):
        made = object.__new__(bare)
        await made.__init__()
        made._run_dir, made._settings = RunDir(), settings
        made._captures = Captures(made._run_dir.path)
        made._artifacts = Artifacts(made._run_dir.path)
        made._failures, made._trials = Failures(), Trials()
        made._wanted.adopt(served or {})
        folders.append(made._run_dir)
        return made

    folders = []
    yield make
    for folder in folders:
        folder.remove()


async def reconcile(made, times=10):
    """As `_reconcile_forever`, without the pauses."""
    for _ in range(times):
        jobs = [wanted.job for wanted in made._wanted.values() if wanted.job]
        await asyncio.gather(*jobs, return_exceptions=True)
        try:
            await made._reconcile()
        except ray.exceptions.RayError:
            made._scheduler = None
    return {name: (wanted.state, wanted.reason) for name, wanted in made._wanted.items()}


async def begin(make, settings):
    """A control replica with all of these tenants served."""
    made = await make(settings)
    made._change(settings, is_new=True)
    await reconcile(made)
    return made
