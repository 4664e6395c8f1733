"""Ops that look up by data: an index outside of the table is an `IndexError`, whatever the size."""

from __future__ import annotations

import pytest
import torch

from coissue.kernels.cpu import ops
from coissue.kernels.ir import Op, R, Type, fixed

LOOKUPS = {
    "embedding": {},
    "embedding_bag sum": {"mode": "sum"},
    "embedding_bag mean": {"mode": "mean"},
    "embedding_bag max": {"mode": "max"},
    "gather": {"dim": 1},
    "index": {"dims": (1,)},
}


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("bad", [5, 50, -6, 2**62, -(2**63)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [2, 300])
def test_an_index_outside_of_the_table(lookup, bad, dtype, rows):
    if abs(bad) > 2**31 and dtype is torch.int32:
        return
    name = lookup.split()[0]
    width = 64 if name != "gather" else 5
    table = torch.ones(rows if name in ("gather", "index") else 5, width)
    if name == "index":
        table = torch.ones(rows, 5, width)
    types = (Type((R, *fixed(width)), "f32"), Type((R, *fixed(7)), "i64"))
    op = Op(name, (0, 1), (2,), LOOKUPS[lookup])
    run, _ = ops.resolve(op, types, types[0], lambda r, t: (r, width), 0)
    index = torch.zeros(rows, 7, dtype=dtype)
    run(table, index)
    index[-1, -1] = bad
    with pytest.raises(IndexError):
        run(table, index)


def test_other_failures_stay_what_they_are():
    run, _ = ops.resolve(
        Op("gather", (0, 1), (2,), {"dim": 1}),
        (Type((R, *fixed(5)), "f32"), Type((R, *fixed(7)), "i64")),
        Type((R, *fixed(7)), "f32"), lambda r, t: (r, 7), 0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="Size does not match"):
        run(torch.ones(2, 5), torch.zeros(9, 7, dtype=torch.int64))
