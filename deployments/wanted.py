"""What the settings want of each tenant, and how far it got: control's state, without Ray."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coissue.deployments.changes import adjust, find_built_in
from coissue.deployments.settings import TenantSettings

#: Tenant -> version served, and what is built into it.
Attached = Mapping[str, tuple[int, dict[str, Any]]]


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
    #: A version captured earlier that the job is about to make `fresh`; 0: none.
    coming: int = 0
    #: loading, ready or failed.
    state: str = "loading"
    reason: str = ""
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

    def is_attached(self, version: int, attached: tuple[int, dict[str, Any]]) -> bool:
        """Whether the scheduler serves that version, as this one believes: an attach of a control
        replica that died may end later."""
        have, built_in = attached
        is_known = self.served is None or built_in == find_built_in(self.served)
        return version == have == self.serving and is_known

    @property
    def is_settled(self) -> bool:
        """The settings are those of what serves; whether its model is theirs, its files tell."""
        return self.served is not None and adjust(self.served, self.settings) == self.settings

    def take_over(self, tenant: TenantSettings) -> None:
        """The served version goes with all of `tenant` from now on."""
        self.served, self.state, self.reason = tenant, "ready", ""

    def expect(self, found: int) -> None:
        """That version (0: one that is to be captured) is to serve."""
        self.state, self.reason = "ready" if self.serving else "loading", self.describe_next(found)

    def describe_next(self, found: int) -> str:
        """What `/status` says until that version (0: one that is to be captured) is served."""
        serves = f"version {self.serving} serves"
        if self.serving and found != self.serving:
            return f"another version is being prepared, {serves}"
        if self.serving and self.settings_for(found).handler != self.settings.handler:
            return f"another handler is being loaded, {serves}"
        return ""

    def fail(self, version: int, reason: str) -> None:
        if self.serving:
            what = f"version {version}" if version != self.serving else "the changed handler"
            reason = f"{what} failed, version {self.serving} serves: {reason}"
        self.state, self.reason = "failed", reason

    def drop_job(self) -> None:
        if self.job is not None:
            self.job.cancel()
            self.job = None


class WantedTenants(dict[str, Wanted]):
    """Those of the settings, by name. One that went is kept until the scheduler was told: until
    then it is served, and if it comes back before, that is a change like any other."""

    def __init__(self) -> None:
        super().__init__()
        self._leaving: dict[str, Wanted] = {}

    def adopt(self, tenants: Sequence[TenantSettings], attached: Attached) -> set[str]:
        """From the settings that a scheduler was to be told last and what it serves; the names of
        those that it serves and was to drop."""
        for tenant in tenants:
            version, built_in = attached.get(tenant.name, (0, {}))
            served = tenant.model_copy(update=built_in)
            self[tenant.name] = Wanted(served, serving=version, served=served)
        return attached.keys() - self.keys()

    def keep_only(self, names: Collection[str]) -> list[str]:
        """The names of those that went."""
        gone = [name for name in self if name not in names]
        for name in gone:
            self._leaving[name] = self.pop(name)
            self._leaving[name].drop_job()
        return gone

    def bring(self, tenant: TenantSettings) -> tuple[Wanted, bool]:
        """The tenant's state, and whether it was there all the time."""
        was_there = tenant.name in self
        if not was_there:
            self[tenant.name] = self._leaving.pop(tenant.name, Wanted(tenant))
        return self[tenant.name], was_there

    def list_leaving(self) -> list[Wanted]:
        return list(self._leaving.values())

    def forget(self, gone: Collection[Wanted]) -> None:
        """The scheduler was told that these went."""
        kept = {name: one for name, one in self._leaving.items() if not any(one is g for g in gone)}
        self._leaving = kept
