"""A device that does nothing but take time, and a cost model to go with it.

For simulation, tests and benchmarks of the scheduler alone. A launch takes its true cost times
drawn noise; faults are drawn at given rates. All draws come from the `Random` given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import final

from coissue.scheduler.messages import Launch, SignatureId
from coissue.scheduler.ports import LaunchError


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Time of a launch = fixed + units * per_unit + (weight sets - 1) * per_set; learns nothing."""

    fixed_ns: int = 100_000
    unit_ns: int = 20_000
    #: For each further set of weights in the launch.
    set_ns: int = 10_000
    #: (fixed, per unit) of signatures that differ from the above.
    own: Mapping[SignatureId, tuple[int, int]] | None = None

    def predict_ns(
        self, signature: SignatureId, units: int, segments: int, weight_sets: int
    ) -> int:
        fixed_ns, unit_ns = self.fixed_ns, self.unit_ns
        if self.own is not None:
            fixed_ns, unit_ns = self.own.get(signature, (fixed_ns, unit_ns))
        return fixed_ns + units * unit_ns + (weight_sets - 1) * self.set_ns

    def observe_ns(
        self, signature: SignatureId, units: int, segments: int, weight_sets: int, measured_ns: int
    ) -> None:
        """Nothing to learn."""


@final
class NullDevice:
    """Says how long a launch takes, or that it fails."""

    def __init__(
        self,
        cost: LinearCost,
        rng: Random,
        *,
        noise: float = 0.0,
        fail_rate: float = 0.0,
        slow_rate: float = 0.0,
        slow_factor: int = 10,
    ) -> None:
        self._cost = cost
        self._rng = rng
        self._noise = noise
        self._fail_rate = fail_rate
        self._slow_rate = slow_rate
        self._slow_factor = slow_factor

    def run_ns(self, launch: Launch) -> int:
        """Device time of the launch; raises LaunchError at the rate given."""
        if self._rng.random() < self._fail_rate:
            raise LaunchError("the null device failed this launch")
        segments = launch.segments
        time_ns = self._cost.predict_ns(
            launch.signature,
            sum(segment.units for segment in segments),
            len(segments),
            len({segment.weights for segment in segments}),
        )
        slow = self._slow_factor if self._rng.random() < self._slow_rate else 1
        return max(1, round(time_ns * slow * self._rng.uniform(1, 1 + self._noise)))
