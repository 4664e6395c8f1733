"""The core's view of the cost table: signatures by number. Imports no torch."""

from __future__ import annotations

from typing import final

from coissue.kernels.cost_table import CostTable
from coissue.scheduler.messages import SignatureId


@final
class Costs:
    """A `CostView`."""

    def __init__(self, table: CostTable, *, learns: bool = True) -> None:
        """`learns`: what is observed corrects the table."""
        self.table = table
        self._learns = learns
        #: By `SignatureId`.
        self._names: list[str] = []
        self._ids: dict[str, SignatureId] = {}

    def intern(self, signature: str) -> SignatureId:
        found = self._ids.get(signature)
        if found is None:
            found = self._ids[signature] = SignatureId(len(self._names))
            self._names.append(signature)
        return found

    def name(self, signature: SignatureId) -> str:
        """Raises IndexError for a number that `intern` did not give."""
        return self._names[signature]

    def predict_ns(
        self, signature: SignatureId, units: int, segments: int, sets: int, joins: bool = False
    ) -> int:
        return self.table.predict_ns(self._names[signature], units, segments, sets, joins)

    def observe_ns(
        self,
        signature: SignatureId,
        units: int,
        segments: int,
        sets: int,
        took_ns: int,
        joins: bool,
    ) -> None:
        if self._learns:
            name = self._names[signature]
            self.table.observe_ns(name, units, segments, sets, took_ns, joins)
