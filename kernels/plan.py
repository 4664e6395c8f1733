"""Plans by signature: a kernel is compiled once, however many tenants and requests have it.

Used by the devices. The cache knows nothing of what a plan is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

P = TypeVar("P")


class PlanCache(Generic[P]):
    """Signature -> plan, the least recently asked for dropped beyond `limit`."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        #: Oldest use first.
        self._plans: OrderedDict[str, P] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, signature: str, make: Callable[[], P]) -> P:
        """The plan of `signature`, made by `make` if it is not there."""
        if signature in self._plans:
            self._plans.move_to_end(signature)
            return self._plans[signature]
        plan = self._plans[signature] = make()
        if len(self._plans) > self._limit:
            self._plans.popitem(last=False)
        return plan
