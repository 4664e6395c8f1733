"""What the application of single tenants shows of the scheduler: nothing of the other tenants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

_TENANT: Final = re.compile(rb'[{,]tenant="([^"]*)"')
#: Facts of the scheduler's status that say nothing of what tenants do.
_PLAIN_FACTS: Final = ("device", "policy")


def keep_metrics(text: bytes, tenants: AbstractSet[str]) -> bytes:
    """The samples of exposition text that carry one of `tenants`, with their HELP and TYPE."""
    names = {name.encode() for name in tenants}
    kept: list[bytes] = []
    heads: list[bytes] = []
    for line in text.splitlines():
        if line.startswith(b"#"):
            if line.startswith(b"# HELP"):
                heads.clear()
            heads.append(line)
        elif (found := _TENANT.search(line)) and found[1] in names:
            kept += [*heads, line]
            heads.clear()
    return b"".join(line + b"\n" for line in kept)


def keep_status(scheduler: Mapping[str, Any], tenants: AbstractSet[str]) -> dict[str, Any]:
    kept = {key: scheduler[key] for key in _PLAIN_FACTS if key in scheduler}
    states = scheduler.get("tenants", {})
    return kept | {"tenants": {name: states[name] for name in sorted(tenants) if name in states}}
