"""What the settings want of each tenant, and how far it got: control's state, without Ray."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from coissue.deployments.changes import adjust, is_lowered_anew
from coissue.deployments.run_dir import Served
from coissue.deployments.settings import TenantSettings


@dataclass(slots=True)
class Wanted:
    """One tenant of the settings and how far it got."""

    settings: TenantSettings
    #: The version that is, or was last, attached: what a new scheduler gets first. 0: none yet.
    serving: int = 0
    #: What that version was attached with, and the handler that it has now; None: nothing yet.
    served: TenantSettings | None = None
    #: A captured version that is to take over; 0: none.
    fresh: int = 0
    #: The version that the job is about to make `fresh`; 0: there is no job.
    coming: int = 0
    #: A version that cannot serve, and why. Of the settings of now: what they replaced may fail
    #: unseen.
    failed: tuple[int, str] | None = None
    #: The reason that the scheduler was told; None: an earlier control replica told it one.
    told: str | None = ""
    #: Captures a version and tries the handler.
    job: asyncio.Task[None] | None = None
    #: By version: attaches begun that did not end.
    tries: Counter[int] = field(default_factory=Counter)

    def settings_for(self, version: int) -> TenantSettings:
        """Those of now; but what serves keeps what it came with until another can replace it."""
        old, now = self.served, self.settings
        return now if version != self.serving or old is None else adjust(old, now)

    @property
    def is_settled(self) -> bool:
        """The settings are those of what serves; whether its model is theirs, its files tell."""
        return self.served is not None and adjust(self.served, self.settings) == self.settings

    @property
    def state(self) -> str:
        """As `/status` says it: loading, ready or failed."""
        return "failed" if self.failed else "ready" if self.serving else "loading"

    @property
    def reason(self) -> str:
        """Why the settings of now are not what serves; empty: they are, or nothing does yet."""
        serves = f"version {self.serving} serves"
        if self.failed:
            version, why = self.failed
            what = f"version {version}" if version != self.serving else "the changed handler"
            return f"{what} failed, {serves}: {why}" if self.serving else why
        following = self.fresh or self.coming
        if not self.serving or self.served is None or not following:
            return ""
        if following != self.serving or is_lowered_anew(self.served, self.settings):
            return f"another version is being prepared, {serves}"
        if self.served.handler != self.settings.handler:
            return f"another handler is being loaded, {serves}"
        if self.served.isolation != self.settings.isolation:
            return f"isolation: {self.settings.isolation} is being prepared, {serves}"
        return ""

    def take_over(self, tenant: TenantSettings) -> None:
        """The served version goes with all of `tenant` from now on."""
        self.served = tenant

    def drop_job(self) -> None:
        if self.job is not None:
            self.job.cancel()
            self.job, self.coming = None, 0


class WantedTenants(dict[str, Wanted]):
    """Those of the settings, by name. One that went is kept for as long as the scheduler serves
    it: if it comes back before, that is a change like any other."""

    def __init__(self) -> None:
        super().__init__()
        self._leaving: dict[str, Wanted] = {}

    def adopt(self, served: Served) -> None:
        """From what a scheduler serves that is there already."""
        self.update({n: Wanted(TenantSettings.model_validate(u)) for n, (_, u) in served.items()})
        self.learn(served)

    def list_failed(self) -> dict[str, str]:
        """With the reasons."""
        return {name: wanted.reason for name, wanted in self.items() if wanted.failed}

    def describe_served(self) -> Served:
        return {
            name: (wanted.serving, wanted.settings_for(wanted.serving).model_dump())
            for name, wanted in self.items()
            if wanted.serving
        }

    def learn(self, served: Served) -> None:
        """What the scheduler serves of tenants that nothing was known to serve: of an attach whose
        answer was lost, or by another control replica."""
        for name, wanted in self.items():
            version, under = served.get(name, (0, {}))
            if version and not wanted.serving and wanted.fresh != version:
                wanted.serving, wanted.served = version, TenantSettings.model_validate(under)

    def keep_only(self, names: Collection[str]) -> None:
        for name in self.keys() - names:
            self._leaving[name] = self.pop(name)
            self._leaving[name].drop_job()

    def bring(self, tenant: TenantSettings) -> tuple[Wanted, bool]:
        """The tenant's state, and whether it was there all the time."""
        was_there = tenant.name in self
        if not was_there:
            self[tenant.name] = self._leaving.pop(tenant.name, Wanted(tenant))
        return self[tenant.name], was_there

    def note_attached(self, names: Collection[str]) -> bool:
        """The scheduler serves these now, no others; False: it has to be told that some went."""
        self._leaving = {name: one for name, one in self._leaving.items() if name in names}
        return all(name in self for name in names)
