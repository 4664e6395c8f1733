"""Predicted device time per signature: measured at attach, corrected by every launch.

`predict_ns` interpolates between measured points and never guesses low: below the smallest measured
point it answers with that point, above the largest it goes on in a straight line; it never falls
when an argument grows. What launches really took moves one correction factor per signature, by at
most `STEP_LIMIT` at a time, so one outlier (a page fault, a busy neighbour) hardly counts and a
lasting change is followed. Where the error differs by size, as after a point that was measured in a
busy moment, the points themselves are bent every `BEND_AFTER` launches. Points are measured with
inputs that lie together; what a launch takes longer when its segments' inputs must be joined first
is measured by itself and comes on top.

Rules: pure data and arithmetic, no clock, no torch; times in ns. Asked by the scheduler for every
candidate of a launch, so answers are kept until the next `record`.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, log
from pathlib import Path
from typing import Final

logger = logging.getLogger("coissue.kernels")

#: Weight of the newest launch in the correction and in the error.
NEWEST: Final = 0.1
#: Largest factor by which one launch may differ from the prediction, as far as it is believed.
STEP_LIMIT: Final = 2.0
#: Launches between two looks at the error by size, and how many of them one point needs.
BEND_AFTER: Final = 64
BEND_LEAST: Final = 4.0
#: Answer for a signature never measured: a fixed part and a part per unit.
UNKNOWN_NS: Final = 1_000_000
UNKNOWN_UNIT_NS: Final = 10_000
#: Predictions kept; beyond it all are computed anew.
KEPT_LIMIT: Final = 100_000


_Points = dict[int, dict[int, dict[int, int]]]
#: (signature, units, segments, weight sets, joins).
_Size = tuple[str, int, int, int, bool]


@dataclass(slots=True)
class _Entry:
    """What is known of one signature."""

    #: weight sets -> segments -> units -> measured ns.
    points: _Points = field(default_factory=dict)
    #: The same for joining the inputs alone, which weights do not matter for. Empty: it is free.
    joins: _Points = field(default_factory=dict)
    #: Measured over the points' prediction, of late.
    factor: float = 1.0
    #: Mean of |measured - predicted| / measured, and of how many launches.
    error: float = 0.0
    launch_count: int = 0
    #: All units of points, sorted.
    places: list[int] = field(default_factory=list)
    #: Units of points -> launches near them since points were bent, and the sum of the logarithms
    #: of measured over predicted.
    near: dict[int, list[float]] = field(default_factory=dict)


def save_json(path: Path, data: Mapping[str, object]) -> None:
    """Whole or not at all. Where it cannot be written, a warning says so: what is measured serves
    this process, and the next one measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1))
        partial.replace(path)
    except OSError as error:
        logger.warning("measured times are not kept: %s", error)


class CostTable:
    """See the module. `units`: rows or tokens of the launch, by the kernel's `per_token`."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        #: What was recorded, and predictions by the points alone.
        self._measured: dict[_Size, int] = {}
        self._kept: dict[_Size, float] = {}

    def __contains__(self, signature: str) -> bool:
        return signature in self._entries

    def predict_ns(
        self, signature: str, units: int, segments: int, sets: int, joins: bool = False
    ) -> int:
        """The device time of a launch of `units` rows or tokens in `segments` requests, whose
        inputs do not lie together yet if it `joins`."""
        base = self._base_ns((signature, units, segments, sets, joins))
        entry = self._entries.get(signature)
        return int(base if entry is None else base * entry.factor)

    def record(
        self, signature: str, units: int, segments: int, sets: int, ns: int, joins: bool = False
    ) -> None:
        """A point measured with nothing else running. Replaces what was known of it. `joins`: of
        joining the inputs alone, the same for all weight sets (1 is recorded)."""
        self._measured[signature, units, segments, sets, joins] = ns
        entry = self._entries.setdefault(signature, _Entry())
        points = entry.joins if joins else entry.points
        points.setdefault(sets, {}).setdefault(segments, {})[units] = ns
        if not joins and units not in entry.places:
            insort(entry.places, units)
        self._kept.clear()

    def forget(self, signature: str) -> None:
        """As if never measured."""
        self._entries.pop(signature, None)
        self._measured = {size: ns for size, ns in self._measured.items() if size[0] != signature}
        self._kept.clear()

    def observe_ns(
        self, signature: str, units: int, segments: int, sets: int, ns: int, joins: bool = False
    ) -> None:
        """A launch took this long. Without a measured point yet, it is recorded as one."""
        entry = self._entries.get(signature)
        if entry is None or not entry.points:
            self.record(signature, units, segments, sets, ns)
            return
        predicted = max(self.predict_ns(signature, units, segments, sets, joins), 1)
        ratio = min(max(ns / predicted, 1 / STEP_LIMIT), STEP_LIMIT)
        entry.factor *= ratio**NEWEST
        error = abs(ns - predicted) / max(ns, 1)
        weight = max(NEWEST, 1 / (entry.launch_count + 1))
        entry.error += weight * (min(error, STEP_LIMIT) - entry.error)
        entry.launch_count += 1
        _note(entry, units, log(ratio))
        if entry.launch_count % BEND_AFTER == 0:
            _bend(entry)
            self._kept.clear()

    def errors(self) -> dict[str, tuple[float, int]]:
        """Per signature with launches: the mean relative error of late, and how many launches."""
        return {s: (e.error, e.launch_count) for s, e in self._entries.items() if e.launch_count}

    def save(self, path: Path, device: str) -> None:
        """Writes the measured points; the corrections belong to this run alone."""
        points = [[*size, ns] for size, ns in self._measured.items()]
        save_json(path, {"device": device, "points": points})

    def load(self, path: Path, device: str) -> bool:
        """Reads points measured on the same `device`; False if there are none."""
        try:
            stored = json.loads(path.read_text())
        except (OSError, ValueError):
            return False
        if not isinstance(stored, dict) or stored.get("device") != device:
            return False
        for signature, units, segments, sets, joins, ns in stored["points"]:
            self.record(signature, units, segments, sets, ns, joins)
        return True

    def _base_ns(self, key: _Size) -> float:
        signature, units, segments, sets, joins = key
        if key not in self._kept:
            entry = self._entries.get(signature)
            if entry is None or not entry.points:
                return UNKNOWN_NS + UNKNOWN_UNIT_NS * units
            if len(self._kept) >= KEPT_LIMIT:
                self._kept.clear()
            base = _over_sets(entry.points, units, segments, sets)
            more = _over_sets(entry.joins, units, segments, 1) if joins and entry.joins else 0
            self._kept[key] = base + more
        return self._kept[key]


def _note(entry: _Entry, units: int, error: float) -> None:
    """The error of a launch counts for the points on both sides of it, the nearer one more."""
    places = entry.places
    after = min(bisect_left(places, units), len(places) - 1)
    low, high = places[max(after - 1, 0)], places[after]
    share = (min(max(units, low), high) - low) / (high - low) if high > low else 1.0
    for place, part in ((low, 1 - share), (high, share)):
        found = entry.near.setdefault(place, [0.0, 0.0])
        found[0] += part
        found[1] += part * error


def _bend(entry: _Entry) -> None:
    """Moves points to where launches near them say; all of one number of units alike."""
    gains = {
        p: exp(total / count) for p, (count, total) in entry.near.items() if count > BEND_LEAST
    }
    for of in entry.points.values():
        for by_units in of.values():
            for place in by_units.keys() & gains.keys():
                by_units[place] = max(1, round(by_units[place] * gains[place]))
    entry.near.clear()


def _over_sets(points: _Points, units: int, segments: int, weight_sets: int) -> float:
    """Interpolates over units, then segments, then weight sets. Beyond the last number of segments
    or weight sets the slope is the same whatever `units` is, so that the answer rises with each
    argument."""
    most_segments = max(max(by_segments) for by_segments in points.values())
    most_units = max(max(p) for by_segments in points.values() for p in by_segments.values())

    def over_segments(of: Mapping[int, Mapping[int, int]], units: int, segments: int) -> float:
        curve = {s: _at(units, by_units) for s, by_units in of.items()}
        far = {s: _at(most_units, by_units) for s, by_units in of.items()}
        return _at(segments, curve, _slope_of_segments(of, far))

    curve = {w: over_segments(of, units, segments) for w, of in points.items()}
    far = {w: over_segments(of, most_units, most_segments) for w, of in points.items()}
    return _at(weight_sets, curve, _last_slope(far))


def _slope_of_segments(of: Mapping[int, Mapping[int, int]], far: Mapping[int, float]) -> float:
    """What one more segment costs: the least that was measured, at whatever units. Without joins it
    is next to nothing, and what one long launch took longer than another by chance is not: taken
    times the number of segments, it kept groups small."""
    if len(of) > 1:
        before, last = sorted(of)[-2:]
        common = of[before].keys() & of[last].keys()
        if common:
            rise = min(of[last][units] - of[before][units] for units in common)
            return max(0, rise) / (last - before)
    return _last_slope(far)


def _at(place: int, points: Mapping[int, float], slope: float | None = None) -> float:
    """The value at `place`: the first point's below it, straight on beyond the last, with the last
    two points' slope if none is given.

    A point lower than one before it counts as equal to it.
    """
    places = sorted(points)
    curve = list(accumulate((points[p] for p in places), max))
    after = bisect_left(places, place)
    if after == 0:
        return curve[0]
    if after < len(places):
        low, high = places[after - 1 : after + 1]
        return curve[after - 1] + (curve[after] - curve[after - 1]) * (place - low) / (high - low)
    rise = _last_slope(points) if slope is None else slope
    return curve[-1] + rise * (place - places[-1])


def _last_slope(points: Mapping[int, float]) -> float:
    """Between the last two points, or from nothing to the only one."""
    places = sorted(points)
    curve = list(accumulate((points[p] for p in places), max))
    before, rise = (0, curve[-1]) if len(places) == 1 else (places[-2], curve[-1] - curve[-2])
    return rise / (places[-1] - before)
