"""The machine's clock; the simulator has no other than the times of its events.

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
