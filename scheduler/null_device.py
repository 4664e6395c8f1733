"""A device that does nothing but take time, and a cost model to go with it.

For simulation, tests and benchmarks of the scheduler alone. A launch is worth its true cost times
drawn noise; faults are drawn at given rates. All draws come from the `Random` given.

NOTE. Launches in flight share the device evenly: each of k runs at 1 / (1 + (k - 1) * contention)
of its speed alone. Contention 1: k launches together take as long as one after the other. Less:
they fill each other's gaps. More: they get in each other's way. (0.4 is what the space-only curve
of arXiv 1901.00041, Fig. 7, shows on a V100 from 6 to 36 launches, within 10 %.) As all run at the
same speed, work done per launch is one number, and a launch ends when it reaches its own mark; the
time of the next end changes whenever a launch comes or goes, and `version` with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import final

from coissue.scheduler.messages import (
    Event,
    Launch,
    LaunchDone,
    LaunchFailed,
    SignatureId,
    WeightsId,
)
from coissue.scheduler.ports import CostView


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Time of a launch = fixed + units * per_unit + (weight sets - 1) * per_set, and units *
    join_unit if it joins; learns nothing."""

    fixed_ns: int = 100_000
    unit_ns: int = 20_000
    #: For each further set of weights in the launch.
    set_ns: int = 10_000
    #: (fixed, per unit) of signatures that differ from the above.
    own: Mapping[SignatureId, tuple[int, int]] | None = None
    join_unit_ns: int = 0

    def predict_ns(
        self, signature: SignatureId, units: int, segments: int, sets: int, joins: bool = False
    ) -> int:
        fixed_ns, unit_ns = self.fixed_ns, self.unit_ns
        if self.own is not None:
            fixed_ns, unit_ns = self.own.get(signature, (fixed_ns, unit_ns))
        if joins:
            unit_ns += self.join_unit_ns
        return fixed_ns + units * unit_ns + (sets - 1) * self.set_ns

    def observe_ns(
        self, signature: SignatureId, units: int, segments: int, sets: int, took_ns: int,
        joins: bool,
    ) -> None:  # fmt: skip
        """Nothing to learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """How the device differs from what the core believes of it."""

    #: A launch takes its cost times 1 to 1 + noise.
    noise: float = 0.0
    #: See the module.
    contention: float = 1.0
    #: Between a decision and its launch; not part of what is measured.
    overhead_ns: int = 0
    #: If given, drawn from instead: measured times over predicted ones, and overheads.
    ratios: tuple[float, ...] = ()
    overheads_ns: tuple[int, ...] = ()
    #: Chance of each launch to fail, and to take `slow_factor` times as long.
    fail_rate: float = 0.0
    slow_rate: float = 0.0
    slow_factor: int = 10

    def slowdown(self, launches: int) -> float:
        """How much longer each of `launches` in flight takes than alone."""
        return 1 + max(0, launches - 1) * self.contention


@final
class NullDevice:
    """Takes launches and says when the next one ends, and how."""

    def __init__(
        self,
        cost: CostView,
        rng: Random,
        model: DeviceModel,
        slow_weights: Mapping[WeightsId, tuple[float, int]] | None = None,
    ) -> None:
        """`slow_weights`: how many times longer a launch takes with these weights in it, and until
        when (0: always)."""
        self._cost = cost
        self._rng = rng
        self._model = model
        self._slow_weights = slow_weights or {}
        #: Rises whenever the time of the next end may have changed.
        self.version = 0
        #: Heap of (mark in work done per launch, launch number, launch, start, failed).
        self._flying: list[tuple[float, int, Launch, int, bool]] = []
        #: Work done per launch up to `_at_ns`; counted anew whenever nothing flies.
        self._done_ns = 0.0
        self._at_ns = 0
        #: Time with at least one launch in flight.
        self.busy_ns = 0

    def start(self, launch: Launch, now_ns: int) -> None:
        self._pass_time(now_ns)
        failed = self._rng.random() < self._model.fail_rate
        work_ns = launch.predicted_ns if failed else self._draw_ns(launch)
        overhead_ns = self._model.overhead_ns
        if self._model.overheads_ns:
            overhead_ns = self._rng.choice(self._model.overheads_ns)
        mark = self._done_ns + overhead_ns + work_ns
        # It counts from when the overhead is over.
        heappush(self._flying, (mark, launch.launch, launch, now_ns + overhead_ns, failed))
        self.version += 1

    def next_ns(self) -> int | None:
        """When the next launch ends if none comes before; None: nothing is in flight."""
        if not self._flying:
            return None
        left_ns = max(0.0, self._flying[0][0] - self._done_ns)
        return self._at_ns + math.ceil(left_ns * self._model.slowdown(len(self._flying)))

    def finish(self, now_ns: int) -> list[Event]:
        """What ends by now: `LaunchDone` and `LaunchFailed`."""
        self._pass_time(now_ns)
        ended: list[Event] = []
        flying = self._flying
        while flying and flying[0][0] <= self._done_ns + 0.5:
            _, _, launch, start_ns, failed = heappop(flying)
            if failed:
                ended.append(LaunchFailed(now_ns, launch.launch, "the null device failed it"))
            else:
                ended.append(LaunchDone(now_ns, launch.launch, max(1, now_ns - start_ns)))
        if not flying:
            self._done_ns = 0.0
        self.version += 1
        return ended

    def lose(self, now_ns: int) -> None:
        """Forgets everything in flight."""
        self._pass_time(now_ns)
        self._flying.clear()
        self._done_ns = 0.0
        self.version += 1

    def _pass_time(self, now_ns: int) -> None:
        if self._flying:
            self.busy_ns += now_ns - self._at_ns
            self._done_ns += (now_ns - self._at_ns) / self._model.slowdown(len(self._flying))
        self._at_ns = now_ns

    def _draw_ns(self, launch: Launch) -> int:
        """The launch's time alone."""
        segments, model = launch.segments, self._model
        units = 0
        for segment in segments:
            units += segment.units
        weights = {segment.weights for segment in segments}
        time_ns: float = self._cost.predict_ns(
            launch.signature, units, len(segments), len(weights), launch.joins
        )
        if self._slow_weights:
            slow = [self._slow_weights.get(own, (1.0, 0)) for own in weights]
            time_ns *= max(f if not until or self._at_ns < until else 1.0 for f, until in slow)
        if self._rng.random() < model.slow_rate:
            time_ns *= model.slow_factor
        if model.ratios:
            time_ns *= self._rng.choice(model.ratios)
        elif model.noise:
            time_ns *= self._rng.uniform(1, 1 + model.noise)
        return max(1, round(time_ns))
