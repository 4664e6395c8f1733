"""The two clocks: the machine's, and one that the simulator moves.

Only this file and `runtime` may look at real time; the core gets it from its events.
"""

from __future__ import annotations

import time
from typing import final


@final
class MonotonicClock:
    """The time of this machine since boot. Deadlines of live requests are on this clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


@final
class SimulatedClock:
    """Stands still until it is moved; never back."""

    def __init__(self, at_ns: int = 0) -> None:
        self._now_ns = at_ns

    def now_ns(self) -> int:
        return self._now_ns

    def move_to(self, at_ns: int) -> None:
        if at_ns < self._now_ns:
            raise ValueError(f"the clock stands at {self._now_ns}, it cannot go back to {at_ns}")
        self._now_ns = at_ns
