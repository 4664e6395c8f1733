"""Predicted device time per signature: measured at attach, corrected by every launch.

`predict_ns` interpolates between measured points and never guesses low: below the smallest measured
point it answers with that point, above the largest it goes on in a straight line; it never falls
when an argument grows. A launch with more weight sets than were measured takes as long as several
with as many as were, for that is how it runs. What launches really took moves one correction factor
per signature, by at most `STEP_LIMIT` at a time, so one outlier (a page fault, a busy neighbour)
hardly counts and a lasting change is followed. Where the error differs by size or by weight sets,
as after a point that was measured in a busy moment, the points themselves are bent every
`BEND_AFTER` launches, and are stored so. Points of several sets follow those of fewer until
launches of their own tell.
Points are measured with inputs that lie together; what a launch takes longer when its segments'
inputs must be joined first is measured by itself and comes on top.

Rules: pure data and arithmetic, no clock, no torch; times in ns. Asked by the scheduler for every
candidate of a launch, so answers are kept until the points change.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, log
from pathlib import Path
from typing import Final

from coissue.kernels.files import MOST, load_json, save_json

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
#: Predictions kept of a signature; beyond it all are computed anew.
KEPT_LIMIT: Final = 10_000


_Points = dict[int, dict[int, dict[int, int]]]


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
    #: Weight sets -> what is predicted by `points`, and by `joins`; empty when those have changed.
    grids: dict[int, _Grid] = field(default_factory=dict)
    join_grids: dict[int, _Grid] = field(default_factory=dict)
    #: Predictions by the points alone: (units, segments, weight sets, joins) -> ns.
    kept: dict[tuple[int, int, int, bool], float] = field(default_factory=dict)
    #: Weight sets -> all units of their points; both sorted.
    places: dict[int, list[int]] = field(default_factory=dict)
    #: (weight sets, units) of points -> launches near them since these points were bent, and the
    #: sum of the logarithms of measured over predicted by the points alone.
    near: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    #: Sum of the logarithms of the factor at each launch since the last look at `near`.
    factors: float = 0.0

    def forget_grids(self) -> None:
        """The points have changed."""
        self.grids, self.join_grids, self.kept = {}, {}, {}

    def predict_ns(self, size: tuple[int, int, int, bool]) -> float:
        found = self.kept.get(size)
        if found is None:
            if len(self.kept) >= KEPT_LIMIT:
                self.kept.clear()
            units, segments, sets, joins = size
            self.grids = self.grids or _make_grids(self.points)
            found = _over_sets(self.grids, units, segments, sets)
            if joins and self.joins:
                self.join_grids = self.join_grids or {1: _Grid(self.joins[1])}
                found += self.join_grids[1].at(units, segments)
            self.kept[size] = found
        return found


class CostTable:
    """See the module. `units`: rows or tokens of the launch, by the kernel's `per_token`."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, signature: str) -> bool:
        return signature in self._entries

    def predict_ns(
        self, signature: str, units: int, segments: int, sets: int, joins: bool = False
    ) -> int:
        """The device time of a launch of `units` rows or tokens in `segments` requests, whose
        inputs do not lie together yet if it `joins`."""
        entry = self._entries.get(signature)
        if entry is None or not entry.points:
            return UNKNOWN_NS + UNKNOWN_UNIT_NS * units
        return int(entry.predict_ns((units, segments, sets, joins)) * entry.factor)

    def record(
        self, signature: str, units: int, segments: int, sets: int, ns: int, joins: bool = False
    ) -> None:
        """A point measured with nothing else running. Replaces what was known of it. `joins`: of
        joining the inputs alone, the same for all weight sets (1 is recorded)."""
        entry = self._entries.setdefault(signature, _Entry())
        points = entry.joins if joins else entry.points
        points.setdefault(sets, {}).setdefault(segments, {})[units] = ns
        if not joins and units not in entry.places.get(sets, ()):
            insort(entry.places.setdefault(sets, []), units)
            entry.places = dict(sorted(entry.places.items()))
        entry.forget_grids()

    def forget(self, signature: str) -> None:
        """As if never measured."""
        self._entries.pop(signature, None)

    def observe_ns(
        self, signature: str, units: int, segments: int, sets: int, ns: int, joins: bool = False
    ) -> None:
        """A launch took this long. Without a measured point yet, it is recorded as one."""
        entry = self._entries.get(signature)
        if entry is None or not entry.points:
            self.record(signature, max(units, 1), segments, sets, ns)
            return
        predicted = max(self.predict_ns(signature, units, segments, sets, joins), 1)
        ratio = min(max(ns / predicted, 1 / STEP_LIMIT), STEP_LIMIT)
        entry.factors += log(entry.factor)
        _note(entry, units, sets, log(ratio * entry.factor))
        entry.factor *= ratio**NEWEST
        error = abs(ns - predicted) / max(ns, 1)
        weight = max(NEWEST, 1 / (entry.launch_count + 1))
        entry.error += weight * (min(error, STEP_LIMIT) - entry.error)
        entry.launch_count += 1
        if entry.launch_count % BEND_AFTER == 0:
            _bend(entry)

    def errors(self) -> dict[str, tuple[float, int]]:
        """Per signature with launches: the mean relative error of late, and how many launches."""
        return {s: (e.error, e.launch_count) for s, e in self._entries.items() if e.launch_count}

    def save(self, path: Path, device: str) -> None:
        """Writes the points, bent as they are; the factors belong to this run alone."""
        points = [
            [signature, units, segments, sets, joins, ns]
            for signature, entry in self._entries.items()
            for joins, of in ((False, entry.points), (True, entry.joins))
            for sets, by_segments in of.items()
            for segments, by_units in by_segments.items()
            for units, ns in by_units.items()
        ]
        save_json(path, {"device": device, "points": points})

    def load(self, path: Path, device: str) -> bool:
        """Reads points measured on the same `device`; False if there are none."""
        stored = load_json(path, device)
        points = stored.get("points")
        if not isinstance(points, list) or not all(map(_is_point, points)):
            if stored:
                logger.warning("measured times are not read: %s has other than points", path)
            return False
        for signature, units, segments, sets, joins, ns in points:
            self.record(signature, units, segments, sets, ns, joins)
        return True


def _is_point(point: object) -> bool:
    """As `save` writes it."""
    if not isinstance(point, list) or len(point) != 6 or not isinstance(point[0], str):
        return False
    *counts, joins, ns = point[1:]
    whole = all(type(n) is int and 0 < n < MOST for n in counts) and type(ns) is int
    return whole and 0 <= ns < MOST and isinstance(joins, bool) and (counts[2] == 1 or not joins)


def _note(entry: _Entry, units: int, sets: int, error: float) -> None:
    """The error of a launch counts for the points on all sides of it, the nearer ones more."""
    for of, share in _share(list(entry.places), sets):
        for place, part in _share(entry.places[of], units):
            found = entry.near.setdefault((of, place), [0.0, 0.0])
            found[0] += share * part
            found[1] += share * part * error


def _share(places: Sequence[int], at: int) -> list[tuple[int, float]]:
    """The places on both sides, and how near each is; together 1."""
    after = min(bisect_left(places, at), len(places) - 1)
    low, high = places[max(after - 1, 0)], places[after]
    share = (min(max(at, low), high) - low) / (high - low) if high > low else 1.0
    return [(low, 1 - share), (high, share)] if share < 1 else [(high, 1.0)]


def _bend(entry: _Entry) -> None:
    """Moves points to where launches near them say; all of one number of weight sets and units
    alike, and where none say like those of fewer sets.

    What was noted of a number of sets is kept until it is enough for one of its points, however
    long that takes; then it is all forgotten, for a launch between two points speaks of both.
    """
    moved: dict[int, float] = {}
    factor = entry.factors / BEND_AFTER
    entry.factors = 0.0
    for sets, places in entry.places.items():
        noted = {place: entry.near.get((sets, place), (0.0, 0.0)) for place in places}
        own = {
            p: total / count - factor for p, (count, total) in noted.items() if count > BEND_LEAST
        }
        moved |= own
        for place in places:
            if own:
                entry.near.pop((sets, place), None)
            elif place in moved and (sets, place) in entry.near:
                count, total = entry.near[sets, place]
                entry.near[sets, place] = [count, total - count * moved[place]]
        for by_units in entry.points[sets].values():
            for place in by_units.keys() & moved.keys():
                by_units[place] = max(1, round(by_units[place] * exp(moved[place])))
    entry.forget_grids()


class _Curve:
    """Straight lines between points; a point lower than one before it counts as equal to it."""

    __slots__ = ("per_place", "places", "rise", "values")

    def __init__(self, points: Mapping[int, float]) -> None:
        self.places = sorted(points)
        self.values = list(accumulate((points[p] for p in self.places), max))
        #: Beyond the last point: as between the last two, or from nothing to the only one.
        start, low = (self.places[-2], self.values[-2]) if len(points) > 1 else (0, 0.0)
        self.rise = (self.values[-1] - low) / (self.places[-1] - start)
        #: The most per place at and beyond each point.
        backwards = [v / p for p, v in zip(self.places[::-1], self.values[::-1], strict=True)]
        self.per_place = [*accumulate(backwards, max, initial=self.rise)][::-1]

    def at(self, place: float, rise: float | None = None) -> float:
        """The first point's value below it; beyond the last point by `rise`, if it is given."""
        places, values = self.places, self.values
        after = bisect_left(places, place)
        if after == 0:
            return values[0]
        if after == len(places):
            return values[-1] + (self.rise if rise is None else rise) * (place - places[-1])
        start, low = places[after - 1], values[after - 1]
        return low + (values[after] - low) * (place - start) / (places[after] - start)

    def at_most(self, place: float) -> float:
        """Like `at`, raised so that per place it never gets more: k times a k-th never falls."""
        after = bisect_left(self.places, place)
        return max(self.at(place), place * self.per_place[after])


class _Grid:
    """What is known of launches with one number of weight sets."""

    __slots__ = ("_curves", "_group", "_knows_segments", "_least", "segment_ns")

    def __init__(self, points: Mapping[int, Mapping[int, int]], fewer: _Grid | None = None) -> None:
        """`points`: segments -> units -> ns. `fewer`: of fewer sets, for what these do not tell."""
        self._curves = {count: _Curve(by_units) for count, by_units in points.items()}
        self._least = min(points)
        self._knows_segments = len(points) > 1 or fewer is not None
        self.segment_ns = self._find_segment_ns(points, fewer)
        #: Over units, without what the segments cost.
        own_ns = self._least * self.segment_ns
        self._group = _Curve({p: max(0, ns - own_ns) for p, ns in points[self._least].items()})

    def at(self, units: int, segments: int) -> float:
        """Beyond the last number of segments the slope is the same whatever `units` is, so that the
        answer rises with both. Where just one number is known, more are that many launches."""
        if not self._knows_segments and segments > self._least:
            groups = segments / self._least
            return groups * self._curves[self._least].at_most(units / groups)
        over = _Curve({count: curve.at(units) for count, curve in self._curves.items()})
        return over.at(segments, self.segment_ns)

    def group_ns(self, units: float) -> float:
        """Of a launch that is one of several, to which what the segments cost comes on top."""
        return self._group.at_most(units)

    def _find_segment_ns(
        self, points: Mapping[int, Mapping[int, int]], fewer: _Grid | None
    ) -> float:
        """What one more segment costs: the least that was measured, at whatever units. Without
        joins it is next to nothing, and what one long launch took longer than another by chance is
        not: taken times the number of segments, it kept groups small."""
        if len(points) > 1:
            before, last = sorted(points)[-2:]
            common = points[before].keys() & points[last].keys()
            if common:
                rise = min(points[last][units] - points[before][units] for units in common)
                return max(0, rise) / (last - before)
        if fewer is not None:
            return fewer.segment_ns
        return self._curves[self._least].values[0] / self._least  # of the smallest launch known


def _make_grids(points: _Points) -> dict[int, _Grid]:
    made: dict[int, _Grid] = {}
    for sets in sorted(points):
        made[sets] = _Grid(points[sets], made[max(made)] if made else None)
    return made


def _over_sets(grids: Mapping[int, _Grid], units: int, segments: int, sets: int) -> float:
    """Between measured numbers of weight sets on the line; beyond them as long as launches of the
    last, that each take their part of the units."""
    last = max(grids)
    over = _Curve({number: grid.at(units, segments) for number, grid in grids.items()})
    if sets <= last:
        return over.at(sets)
    groups = sets / last
    apart = groups * grids[last].group_ns(units / groups) + segments * grids[last].segment_ns
    return max(over.at(last), apart)
