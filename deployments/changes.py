"""What a change of the settings asks for: nothing, an adjustment, another version, a restart.

model, larger rows or tokens -> captured as a new version beside the old one
exact and whatever else only attaching knows -> the same program attached as a new version
slo, share, limits, nan, handler, an SLO class, the policy -> adjusted in place
the device, and what the scheduler binds or builds at its start -> the scheduler restarts
"""

from __future__ import annotations

from typing import Any, Final

from coissue.deployments.settings import AppSettings, TenantSettings

#: Of a tenant: adjusted in place, whatever serves it.
_ADJUSTED: Final = ("slo", "share", "limits", "nan")
#: Decided by what is captured (model), or taken over once the handler is loaded.
PREPARED: Final = ("model", "handler", "isolation")
#: Of the scheduler.
_LIVE: Final = {"policy", "health"}


def list_restart_keys(old: AppSettings, new: AppSettings) -> list[str]:
    """The keys that changed and cannot change in a running scheduler."""
    return [
        f"{part}.{key}"
        for part in ("device", "scheduler")
        for key, value in getattr(new, part)
        if key not in _LIVE and value != getattr(getattr(old, part), key)
    ]


def adjust(served: TenantSettings, now: TenantSettings) -> TenantSettings:
    """What serves a tenant, under its settings of now; the rest waits until it is prepared."""
    return served.model_copy(update={key: getattr(now, key) for key in _ADJUSTED})


def adjust_attached(attached: TenantSettings, told: TenantSettings) -> TenantSettings:
    """The attached program under the settings told: it stays what it is, whoever tells. A changed
    model comes with a new version, and its handler with it."""
    if told.model != attached.model:
        return adjust(attached, told)
    return told.model_copy(update=_find_built_in(attached))


def _find_built_in(tenant: TenantSettings) -> dict[str, Any]:
    """The keys that are built into the attached program, though not into the captured one."""
    return {key: value for key, value in tenant if key not in (*_ADJUSTED, *PREPARED)}


def is_lowered_anew(old: TenantSettings, new: TenantSettings) -> bool:
    return _find_built_in(old) != _find_built_in(new)
