"""Results as a table: every figure by its path, whatever the keys are."""

from __future__ import annotations

from load_tests import results


def test_every_figure_is_in_the_table():
    found = {
        "core_us": {10: 3.5, 10_000: 4.123456},
        "spread": {10: [3.25, 4.5]},
        "rows": [{"shape": "1x2", "ratio": 1.5}],
        "wanted": "flat",
        "long": list(range(results.LIST_LIMIT + 1)),
    }
    assert results.flatten(found) == {
        "core_us.10": "3.5",
        "core_us.10000": "4.123",
        "spread.10": "3.25; 4.5",
        "rows.0": "shape 1x2, ratio 1.5",
        "wanted": "flat",
    }
