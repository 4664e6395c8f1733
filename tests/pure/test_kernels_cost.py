"""Costs that can be counted by hand."""

from __future__ import annotations

import op_cases
import pytest
from op_cases import shaped

from coissue.kernels.cost import Cost, estimate, estimate_program
from coissue.kernels.ir import Op, Port, Program, Weight

#: x (R, 4) -> linear to 3 -> relu -> add x's own sum: alive at once are at most x, linear, relu.
PROGRAM = Program(
    name="small",
    types=(shaped("f32", "R", 4), shaped("f32", 3, 4), shaped("f32", "R", 3),
           shaped("f32", "R", 3), shaped("f32", "R", 1), shaped("f32", "R", 3)),
    inputs=(Port("x", 0),),
    weights=(Weight("w", 1, "00" * 32),),
    ops=(
        Op("linear", (0, 1), (2,), {"layout": "nk"}),
        Op("relu", (2,), (3,)),
        Op("sum", (0,), (4,), {"dims": (1,), "keepdim": True}),
        Op("add", (3, 4), (5,)),
    ),
    outputs=(Port("y", 5),),
    rows_limit=8,
)  # fmt: skip


def test_a_small_program_by_hand():
    rows = 5
    assert estimate_program(PROGRAM, rows, 0) == Cost(
        flops=rows * (2 * 3 * 4 + 3 + 4 + 3),
        bytes_moved=4 * (rows * 4 + 12 + rows * 3),
        bytes_peak=4 * rows * (4 + 3 + 3),
    )


def test_a_kernel_moves_only_what_crosses_its_border():
    fused = estimate(PROGRAM, PROGRAM.ops[:2], [3], 5, 0)
    apart = [estimate(PROGRAM, [op], op.outputs, 5, 0) for op in PROGRAM.ops[:2]]
    assert fused.flops == sum(cost.flops for cost in apart)
    assert fused.bytes_moved == sum(cost.bytes_moved for cost in apart) - 2 * 4 * 15


@pytest.mark.parametrize(("table_rows", "read"), [(1000, 10), (7, 7)])
def test_of_a_table_only_what_is_looked_up_is_moved(table_rows, read):
    """Two rows of five indices into a table of rows of 16."""
    program = Program(
        name="small",
        types=(shaped("i64", "R", 5), shaped("f32", table_rows, 16), shaped("f32", "R", 5, 16)),
        inputs=(Port("x", 0),),
        weights=(Weight("w", 1, "00" * 32),),
        ops=(Op("embedding", (1, 0), (2,), {}),),
        outputs=(Port("y", 2),),
        rows_limit=8,
    )
    moved = estimate_program(program, 2, 0).bytes_moved
    assert moved == 8 * 10 + 4 * 16 * read + 4 * 16 * 10


@pytest.mark.parametrize(
    ("label", "flops"),
    [
        ("conv-same-1d", 2 * (3 * 6 * 5) * (4 * 3)),
        ("attention-cross", 3 * 2 * 3 * 5 * (2 * 8 + 2 * 8 + 5)),
        ("attention-bshd", 3 * 2 * 5 * 5 * (2 * 8 + 2 * 3 + 5)),
        ("lstm-1-False-True", 3 * 5 * (2 * (20 * 3 + 20 * 5) + 10 * 5)),
        ("embedding_bag", 3 * 5 * 4),
        ("adaptive_avg_pool", 3 * 4 * 9 * 7),
        ("max_pool-f32", 3 * 4 * (5 * 4) * 6),
        ("reshape", 0),
        ("softmax", 5 * 3 * 5 * 7),
    ],
)
def test_flops_of_the_large_ops_by_hand(label, flops):
    case = next(case for case in op_cases.CASES if case.label.startswith(label))
    assert estimate_program(case.program(), 3, 5).flops == flops


@pytest.mark.parametrize("case", op_cases.CASES, ids=lambda case: case.label)
def test_cost_never_falls_with_size(case):
    small, large = (estimate_program(case.program(), rows, 5) for rows in (2, 6))
    assert 0 <= small.flops <= large.flops
    assert 0 < small.bytes_moved <= large.bytes_moved
    assert 0 < small.bytes_peak <= large.bytes_peak
