"""Predictions of the cost table: never low, rising, corrected by launches but not by outliers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coissue.kernels.cost_table import CostTable

POINT = st.tuples(
    st.integers(1, 512),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([1, 4, 6]),
    st.integers(1, 10**7),
)


def table_of(*points):
    table = CostTable()
    for point in points:
        table.record("s", *point)
    return table


def test_between_points_it_is_on_the_line_and_outside_never_lower():
    table = table_of((10, 1, 1, 100), (20, 1, 1, 300))
    asked = [(1, 100), (10, 100), (15, 200), (20, 300), (30, 500)]
    assert [table.predict_ns("s", units, 1, 1) for units, _ in asked] == [ns for _, ns in asked]


def test_one_point_goes_on_in_proportion():
    assert table_of((10, 1, 1, 100)).predict_ns("s", 25, 1, 1) == 250


def test_segments_and_weight_sets_are_between_their_points():
    table = table_of((8, 1, 1, 100), (8, 8, 1, 170), (8, 8, 8, 590))
    assert table.predict_ns("s", 8, 4, 1) == 130
    assert table.predict_ns("s", 8, 8, 4) == 350


def test_many_weight_sets_take_as_long_as_launches_of_the_most_that_are_known():
    one = [(1, 1, 1, 100), (64, 1, 1, 730), (8, 8, 1, 170), (64, 8, 1, 730)]
    assert table_of(*one).predict_ns("s", 16, 16, 16) == 1600
    assert table_of(*one).predict_ns("s", 8 * 64, 8, 8) == pytest.approx(8 * 730)
    four = [(4, 4, 4, 150), (64, 4, 4, 1100), (8, 8, 4, 160), (64, 8, 4, 1100)]
    table = table_of(*one, *four)
    assert table.predict_ns("s", 16, 16, 16) == 600
    assert table.predict_ns("s", 4 * 64, 16, 16) == pytest.approx(4 * 1100)
    assert 100 < table.predict_ns("s", 2, 2, 2) < 150


def test_what_a_segment_costs_is_told_by_fewer_sets_where_the_most_do_not():
    """As after `measure`: eight sets in eight segments only. True: 20 + 1 per unit, 0.1 per segment
    and 8 per further set."""
    points = [(units, 1, 1, 20_000 + 1000 * units + 100) for units in (1, 8, 64, 256)]
    points += [(units, 8, 1, 20_800 + 1000 * units) for units in (8, 64, 256)]
    points += [(units, 8, 8, 76_800 + 1000 * units) for units in (8, 64, 256)]
    table = table_of(*points)
    assert table.predict_ns("s", 256, 256, 8) == pytest.approx(76_000 + 256_000 + 25_600, rel=0.05)
    assert table.predict_ns("s", 256, 256, 16) == pytest.approx(2 * 76_000 + 281_600, rel=0.05)


def test_many_segments_of_which_nothing_is_known_are_that_many_launches():
    table = table_of((1, 1, 1, 100), (64, 1, 1, 730))
    assert table.predict_ns("s", 16, 16, 1) == 1600
    assert table_of((1, 1, 1, 100)).predict_ns("s", 2, 2, 1) == 200


def test_what_takes_more_per_unit_when_it_is_large_is_no_cheaper_in_groups():
    """Else more weight sets would be predicted to take less."""
    table = table_of((1, 1, 1, 10), (8, 1, 1, 80), (16, 1, 1, 800), (16, 8, 1, 800))
    found = [table.predict_ns("s", 16, 8, sets) for sets in (1, 2, 4, 8)]
    assert found == sorted(found)
    assert found[0] == 800


def test_unknown_signature_has_an_answer():
    assert CostTable().predict_ns("never seen", 10, 1, 1) > 0


@settings(max_examples=300)
@given(
    st.lists(POINT, min_size=1, max_size=10),
    st.tuples(st.integers(1, 999), st.integers(1, 99), st.integers(1, 99)),
    st.tuples(st.integers(0, 999), st.integers(0, 99), st.integers(0, 99)),
)
def test_it_never_falls_when_an_argument_grows(points, small, more):
    table = table_of(*points)
    for units, segments, _, ns in points:
        table.record("s", units, segments, 1, ns // 2, joins=True)
    for units, *_, ns in (*points, (3, 1, 1, 12345)) * 40:  # enough to bend the points
        table.observe_ns("s", units, 1, 1, ns // 3)
    large = tuple(a + b for a, b in zip(small, more, strict=True))
    assert table.predict_ns("s", *small) <= table.predict_ns("s", *large)
    joined = [table.predict_ns("s", *size, joins=True) for size in (small, large)]
    assert table.predict_ns("s", *small) <= joined[0] <= joined[1]


def test_a_lasting_change_is_followed_and_an_outlier_is_not():
    table = table_of((10, 1, 1, 1000))
    table.observe_ns("s", 10, 1, 1, 1_000_000)
    assert table.predict_ns("s", 10, 1, 1) < 1100
    for _ in range(60):
        table.observe_ns("s", 10, 1, 1, 3000)
    assert table.predict_ns("s", 10, 1, 1) == pytest.approx(3000, rel=0.02)


def test_a_point_measured_in_a_busy_moment_is_corrected_by_launches_of_its_size():
    """True is 1000 + 50 per unit; at 64 units the table has four times that."""
    table, rng = table_of((1, 1, 1, 1050), (8, 1, 1, 1400), (64, 1, 1, 16_800)), random.Random(0)
    for _ in range(1500):
        units = rng.choice([1, 4, 8, 16, 32, 64])
        took = (1000 + 50 * units) * rng.uniform(0.8, 1.3)
        table.observe_ns("s", units, 1, 1, round(took))
    for units in (1, 8, 32, 64):
        assert table.predict_ns("s", units, 1, 1) == pytest.approx(1000 + 50 * units, rel=0.15)


def busy_sets():
    """True is 1000 + 50 per unit and 200 per further set; two and four sets have double that."""
    points = [
        (units, segments, 1, 1000 + 50 * units) for units in (1, 8, 64) for segments in (1, 8)
    ]
    points += [(8, sets, sets, 2 * (1200 + 200 * sets)) for sets in (2, 4)]
    return table_of(*points)


def test_points_of_several_weight_sets_are_corrected_by_their_own_launches():
    table, rng = busy_sets(), random.Random(0)
    for _ in range(1500):
        sets = rng.choice([1] * 12 + [2, 3, 4])
        units = rng.choice([1, 8, 64]) if sets == 1 else 8
        took = (800 + 50 * units + 200 * sets) * rng.uniform(0.8, 1.3)
        table.observe_ns("s", units, sets, sets, round(took))
    for units, sets in ((1, 1), (8, 1), (64, 1), (8, 2), (8, 3), (8, 4)):
        true = 800 + 50 * units + 200 * sets
        assert table.predict_ns("s", units, sets, sets) == pytest.approx(true, rel=0.15)


def test_points_of_several_weight_sets_follow_those_of_one_until_they_are_known():
    """Everything at 8 units was measured in a busy moment, and only one set is launched."""
    points = [(1, 1, 1, 1000), (8, 1, 1, 2000), (64, 1, 1, 2400), (8, 8, 1, 2000), (8, 2, 2, 2400)]
    table, took = table_of(*points), {1: 1000, 8: 1000, 64: 2400}
    for turn in range(600):
        units = (1, 8, 64)[turn % 3]
        table.observe_ns("s", units, 1, 1, took[units])
    assert table.predict_ns("s", 8, 2, 2) == pytest.approx(1200, rel=0.1)


def test_corrected_points_are_stored_as_corrected(tmp_path):
    table, again = busy_sets(), CostTable()
    for turn in range(640):
        sets = 1 + turn % 2
        table.observe_ns("s", 8, sets, sets, 1200 + 200 * sets)
    table.save(tmp_path / "costs.json", "this")
    assert again.load(tmp_path / "costs.json", "this")
    ratio = again.predict_ns("s", 8, 2, 2) / again.predict_ns("s", 8, 1, 1)
    assert ratio == pytest.approx(1600 / 1400, rel=0.05)


def test_what_chance_added_to_one_long_launch_is_not_taken_times_the_segments():
    points = [(8, 1, 1, 800), (64, 1, 1, 12_000), (8, 8, 1, 870), (64, 8, 1, 17_000)]
    table = table_of(*points)
    assert table.predict_ns("s", 16, 16, 1) - table.predict_ns("s", 16, 8, 1) == 80


def test_error_is_exported_per_signature():
    table = table_of((10, 1, 1, 1000))
    assert table.errors() == {}
    table.observe_ns("s", 10, 1, 1, 800)
    assert table.errors() == {"s": (pytest.approx(0.25), 1)}


def test_points_are_kept_by_device(tmp_path):
    path = tmp_path / "deep" / "costs.json"
    table = table_of((10, 8, 4, 100), (20, 8, 4, 300))
    table.record("s", 20, 8, 1, 50, joins=True)
    table.save(path, "this")
    again = CostTable()
    assert not again.load(path, "other")
    assert "s" not in again
    assert again.load(path, "this")
    assert again.predict_ns("s", 20, 8, 4) == 300
    assert again.predict_ns("s", 20, 8, 4, joins=True) == 350
    assert not CostTable().load(tmp_path / "missing.json", "this")


@pytest.mark.parametrize(
    "stored",
    [
        "{}", '"points": null', '"points": [[1]]', '"points": [[["s"], 1, 1, 1, false, 5]]',
        '"points": [["s", 1, 1, 1, false, NaN]]', '"points": [["s", 1, 1, 1, false, null]]',
        '"points": [["s", 1, 1, 1, false, -5]]', '"points": [["s", 0, 1, 1, false, 5]]',
        '"points": [["s", 1, 1, 1, false, 1e400]]', '"points": [["s", 1, 1, 2, true, 5]]',
        '"points": [["s", 1, 1, 1, false, 5], ["s", "8", 1, 1, false, 5]]',
        '"points": ' + "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_is_not_read_at_all(tmp_path, stored):
    path, table = tmp_path / "costs.json", CostTable()
    path.write_text('{"device": "this", ' + stored.strip("{}") + "}")
    assert not table.load(path, "this")
    assert "s" not in table


def test_no_units_at_all_are_learned_as_one():
    table = CostTable()
    table.observe_ns("s", 0, 1, 1, 1000)
    assert table.predict_ns("s", 1, 1, 1) == 1000


def test_joining_comes_on_top_and_rises_with_units_and_segments():
    table = table_of((8, 1, 1, 100), (64, 1, 1, 660))
    assert table.predict_ns("s", 8, 2, 1, joins=True) == table.predict_ns("s", 8, 2, 1)
    for units, segments, ns in ((8, 2, 10), (64, 2, 80), (64, 8, 110)):
        table.record("s", units, segments, 1, ns, joins=True)
    more = [
        table.predict_ns("s", units, segments, sets, joins=True)
        - table.predict_ns("s", units, segments, sets)
        for units, segments, sets in ((8, 2, 1), (36, 2, 2), (64, 2, 2), (64, 5, 1), (64, 20, 1))
    ]
    assert more == [10, 45, 80, 95, 170]


def test_what_a_join_costs_is_no_error_of_the_table():
    """Launches that take as long as predicted with their joins leave all predictions alone."""
    table = table_of((8, 1, 1, 1000), (8, 2, 1, 1100))
    table.record("s", 8, 2, 1, 500, joins=True)
    for _ in range(100):
        table.observe_ns("s", 8, 2, 1, 1600, joins=True)
    assert table.predict_ns("s", 8, 1, 1) == 1000
    assert table.errors()["s"] == (0, 100)
