"""One test per rule of the planner; F, G and H number the mechanisms of the papers."""

from __future__ import annotations

import pytest
from stitch_check import PlanFault, check_plan
from test_stitch_golden import AT, GRAPH

from coissue.kernels.stitch.builder import GraphBuilder, hold
from coissue.kernels.stitch.graph import Kind, Node
from coissue.kernels.stitch.plan import Buffer, Home, Order, Rows, Schedule, StitchPlan
from coissue.kernels.stitch.price import bytes_moved, choose_rows, cpu, gpu
from coissue.kernels.stitch.schedules import WHOLE, column, list_schedules, needs, row
from coissue.kernels.stitch.search import FOOTPRINT_BYTES_LIMIT, Search, plan
from coissue.kernels.stitch.shared import (
    Draft,
    find_homes,
    find_reads,
    place_buffers,
    plan_memory,
)
from coissue.kernels.stitch.spans import span_of
from coissue.kernels.stitch.tune import Settings, Tuner, combine


def col(dim, sword):
    return Schedule(dim, sword, Order.COLUMN)


def make(kind, shape, operands=1, axes=(), name=""):
    return Node(kind, name, tuple(range(operands)), shape, "f32", axes)


def tuner_of(graph, threads=256, budget_bytes=48 * 1024):
    machine = cpu() if threads == 1 else gpu(threads)
    return Tuner(graph, Settings(budget_bytes, threads, machine))


def finish(b, *nodes):
    return b.finish([(node, place, b.shape(node)) for place, node in enumerate(nodes)])


# --- F7, F8: schedules -----------------------------------------------------------------------


def test_blocks_by_order():
    shape = (4, 6, 5)
    assert Schedule(1, 3).blocks(shape) == 12
    assert col(1, 3).blocks(shape) == 15
    assert WHOLE.blocks(shape) == WHOLE.blocks(()) == 1


@pytest.mark.parametrize(
    ("shape", "blocks", "wanted"),
    [
        ((64, 8, 17, 128), 512, Schedule(2, 1)),
        ((64, 8, 17, 128), 256, Schedule(1, 4)),
        ((8704, 17), 512, Schedule(0, 512)),
        ((8704,), 8704, Schedule(0, 8704)),
        ((6, 5), 10, None),
        ((6, 5), 4, None),
        ((1, 4), 2, Schedule(1, 2)),
        ((), 1, WHOLE),
        ((), 2, None),
    ],
)
def test_a_row_schedule_has_one_form(shape, blocks, wanted):
    assert row(shape, blocks) == wanted


def test_a_column_schedule_that_cuts_alike_is_a_row_schedule():
    assert column((8,), 0, 4) == Schedule(0, 4)
    assert column((4, 6), 1, 1) == WHOLE
    assert column((4, 6), 0, 4) == row((4, 6), 24)
    assert column((4, 6), 1, 6) == col(0, 1)
    assert column((4, 6), 1, 3) == col(1, 3)


def test_each_set_of_blocks_is_listed_once():
    found = list_schedules((4, 3))
    assert len(found) == len(set(found))
    assert {s.blocks((4, 3)) for s in found} == {1, 2, 4, 12, 3, 6}


# --- F9: the table of what each kind accepts ---------------------------------------------------

CUBE = (4, 6, 8)
TABLE = [
    ("element-wise", make(Kind.POINTWISE, CUBE, name="exp"), [CUBE], Schedule(1, 3),
     Schedule(1, 3)),
    ("element-wise", make(Kind.POINTWISE, CUBE, name="exp"), [CUBE], col(1, 3), col(1, 3)),
    ("scalar", make(Kind.POINTWISE, CUBE, name="exp"), [()], Schedule(1, 3), WHOLE),
    ("transpose, before", make(Kind.TRANSPOSE, (4, 8, 6), axes=(0, 2, 1)), [CUBE], Schedule(0, 2),
     Schedule(0, 2)),
    ("transpose, at", make(Kind.TRANSPOSE, (4, 8, 6), axes=(0, 2, 1)), [CUBE], Schedule(1, 1),
     Schedule(1, 1)),
    ("transpose, cut", make(Kind.TRANSPOSE, (4, 8, 6), axes=(0, 2, 1)), [CUBE], Schedule(1, 2),
     WHOLE),
    ("transpose, column", make(Kind.TRANSPOSE, (6, 4, 8), axes=(1, 0, 2)), [CUBE], col(2, 4),
     col(2, 4)),
    ("transpose, column at", make(Kind.TRANSPOSE, (6, 4, 8), axes=(1, 0, 2)), [CUBE], col(1, 1),
     col(1, 1)),
    ("transpose, column cut", make(Kind.TRANSPOSE, (6, 4, 8), axes=(1, 0, 2)), [CUBE], col(0, 2),
     WHOLE),
    ("reduce, before", make(Kind.REDUCE, (4, 8), axes=(1,), name="sum"), [CUBE], Schedule(0, 2),
     Schedule(0, 2)),
    ("reduce, by input", make(Kind.REDUCE, (4, 8), axes=(1,), name="sum"), [CUBE], Schedule(1, 1),
     Schedule(1, 1)),
    ("reduce, behind", make(Kind.REDUCE, (4, 8), axes=(1,), name="sum"), [CUBE], Schedule(1, 2),
     WHOLE),
    ("reduce, column", make(Kind.REDUCE, (4, 8), axes=(1,), name="sum"), [CUBE], col(1, 2),
     col(2, 2)),
    ("reduce, between", make(Kind.REDUCE, (6, 2), axes=(0, 2), name="sum"), [(4, 6, 8, 2)],
     col(0, 3), WHOLE),
    ("reduce, one axis left", make(Kind.REDUCE, (8,), axes=(0, 1), name="sum"), [CUBE],
     Schedule(0, 4), col(2, 4)),
    ("dot, sword 1", make(Kind.DOT, (4, 5, 6), 2), [(4, 5, 3), (4, 3, 6)], Schedule(1, 1),
     Schedule(1, 1)),
    ("dot, rows", make(Kind.DOT, (4, 6, 6), 2), [(4, 6, 6), (4, 6, 6)], Schedule(1, 2),
     (Schedule(1, 2), WHOLE)),
    ("dot, column", make(Kind.DOT, (4, 5, 6), 2), [(4, 5, 3), (4, 3, 6)], col(2, 2), WHOLE),
    ("reshape", make(Kind.RESHAPE, CUBE), [(24, 8)], Schedule(1, 3), Schedule(0, 12)),
    ("reshape, no form", make(Kind.RESHAPE, (2, 3, 4)), [(4, 6)], Schedule(1, 3), WHOLE),
    ("reshape, column", make(Kind.RESHAPE, CUBE), [(24, 4, 2)], col(2, 2), WHOLE),
    ("reshape, column kept", make(Kind.RESHAPE, CUBE), [(2, 2, 6, 8)], col(2, 2), col(3, 2)),
    ("broadcast, kept", make(Kind.BROADCAST, CUBE, axes=(0, 1)), [(4, 6)], Schedule(1, 3),
     Schedule(1, 3)),
    ("broadcast, behind", make(Kind.BROADCAST, CUBE, axes=(0, 1)), [(4, 6)], Schedule(2, 2), WHOLE),
    ("broadcast, column", make(Kind.BROADCAST, CUBE, axes=(1, 2)), [(6, 8)], col(2, 2), col(1, 2)),
    ("slice, before", make(Kind.SLICE, (4, 3, 8), axes=(1, 0, 2)), [CUBE], Schedule(0, 2),
     Schedule(0, 2)),
    ("slice, cut", make(Kind.SLICE, (4, 3, 8), axes=(1, 0, 2)), [CUBE], Schedule(1, 3), WHOLE),
    ("concat", make(Kind.CONCAT, CUBE, 2, axes=(1,)), [(4, 2, 8), (4, 4, 8)], Schedule(0, 4),
     Schedule(1, 1)),
    ("concat, column", make(Kind.CONCAT, CUBE, 2, axes=(1,)), [(4, 2, 8), (4, 4, 8)], col(2, 4),
     col(2, 4)),
    ("concat, cut", make(Kind.CONCAT, CUBE, 2, axes=(1,)), [(4, 2, 8), (4, 4, 8)], Schedule(1, 2),
     None),
    ("gather", make(Kind.GATHER, CUBE, 2, axes=(0,)), [(9, 8), (4, 6)], Schedule(1, 3),
     (WHOLE, Schedule(1, 3))),
]  # fmt: skip


@pytest.mark.parametrize(("label", "node", "shapes", "schedule", "wanted"), TABLE)
def test_what_reaches_the_operands(label, node, shapes, schedule, wanted):
    found = needs(node, shapes, schedule)
    if wanted is None:
        assert found is None
    else:
        assert tuple(found) == ((wanted,) * len(shapes) if isinstance(wanted, Schedule) else wanted)


def test_several_roots_have_one_number_of_blocks():
    """F11."""
    ways = list(combine({0: (4, 6), 1: (6,)}))
    assert {blocks for blocks, _ in ways} == {1, 2, 3, 6}
    for blocks, roots in ways:
        assert roots[0].blocks((4, 6)) == roots[1].blocks((6,)) == blocks


def test_what_is_handed_out_is_made_once():
    b = GraphBuilder()
    first = b.pointwise("exp", b.parameter((4,), "f32", 0, True))
    graph = finish(b, first, b.pointwise("neg", b.broadcast(first, (1,), (8, 4))))
    made = {tuned.kernel.blocks for tuned in candidates(graph)}
    assert made == {1, 2, 4}  # columns of the larger output, but none of its 8 rows
    for tuned in candidates(graph):
        assert tuned.kernel.schedules[graph.outputs[0]].blocks((4,)) == tuned.kernel.blocks


def candidates(graph):
    tuner = tuner_of(graph)
    return list(tuner.candidates(frozenset(tuner.work)))


# --- F14, F15, F16: shared memory ----------------------------------------------------------------


def golden_draft():
    tuner = tuner_of(GRAPH)
    kernel = tuner.tune(tuner.work).kernel
    return Draft(GRAPH, kernel.nodes, kernel.outputs, kernel.blocks, kernel.schedules)


def test_ranks_of_optional_buffers():
    homes, ranks = find_homes(golden_draft())
    assert ranks == {AT["divide"]: 3, AT["exponential"]: 2}
    mandatory = {AT["reduce1"], AT["reduce2"]}
    assert {i for i, home in homes.items() if home is Home.SHARED} == mandatory | ranks.keys()


def test_expensive_buffers_of_a_product_are_given_up_last():
    """F15: exp goes first, then div; without exp, what it reads would be worth a buffer, but as a
    cheap one goes before div. The reductions cannot go."""
    draft = golden_draft()
    shrunk = {
        floats: plan_memory(draft, span_of(GRAPH), floats * 4) for floats in (306, 305, 34, 33)
    }
    assert shrunk[306].shrunk == ()
    order = (AT["exponential"], AT["subtract"], AT["divide"])
    assert shrunk[305].shrunk == shrunk[34].shrunk == order
    assert shrunk[34].shared_bytes == 34 * 4
    assert shrunk[33] is None


def test_a_buffer_is_not_reused_while_it_is_read():
    b = GraphBuilder()
    x = b.parameter((4, 8), "f32", 0, True)
    first = b.pointwise("exp", x)
    total = b.reduce("sum", first, (1,))
    turned = b.transpose(first, (1, 0))
    second = b.pointwise("exp", turned)
    other = b.reduce("sum", second, (0,))
    y = b.pointwise("mul", second, b.broadcast(b.pointwise("add", total, other), (1,), (8, 4)))
    graph = finish(b, y)
    nodes = tuple(i for i, n in enumerate(graph.nodes) if n.kind is not Kind.PARAMETER)
    draft = Draft(graph, nodes, graph.outputs, 1, dict.fromkeys(range(len(graph.nodes)), WHOLE))
    homes, _ = find_homes(draft)
    buffers, total_bytes = place_buffers(draft, homes, find_reads(draft, homes))
    exps = [i for i in buffers if graph.nodes[i].name == "exp"]
    # The second exp reads the first at other places: not in place.
    spans = [(buffers[i].offset_bytes, buffers[i].offset_bytes + 128) for i in exps]
    assert spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]
    assert total_bytes >= 256


def test_check_finds_a_buffer_that_is_overwritten_too_early():
    made = plan(GRAPH)
    (kernel,) = made.kernels
    buffers = dict(kernel.buffers)
    buffers[AT["reduce2"]] = Buffer(buffers[AT["exponential"]].offset_bytes, 17)
    broken = StitchPlan(GRAPH, (replaced(kernel, buffers=buffers),))
    check_plan(made, 48 * 1024)
    with pytest.raises(PlanFault, match="overwrites"):
        check_plan(broken, 48 * 1024)
    with pytest.raises(PlanFault, match="budget"):
        check_plan(made, 1000)


def replaced(kernel, **changes):
    fields = {name: getattr(kernel, name) for name in kernel.__slots__}
    return type(kernel)(**(fields | changes))


# --- F1 to F5, G7: fusion ------------------------------------------------------------------------


def test_parameters_are_in_the_last_layer():
    assert span_of(GRAPH)[AT["arg1"]] == span_of(GRAPH)[AT["arg2"]] == 9


def test_a_node_with_a_reader_given_up_is_not_fused():
    """F4, first test: else the pattern would wait for itself."""
    b = GraphBuilder()
    x = b.parameter((2, 64), "f32", 0, True)
    shared = b.pointwise("exp", x)
    reduced = b.reduce("sum", shared, (0, 1))
    y = b.pointwise("mul", shared, b.broadcast(reduced, (), (2, 64)))
    graph = finish(b, y)
    search = Search(tuner_of(graph, threads=1))
    root = graph.outputs[0]
    assert len(search.grow(root, (), through_heavy=True)) == 3
    assert search.grow(root, (), through_heavy=False) == {root}


def test_another_root_of_the_layer_keeps_what_it_reads():
    b = GraphBuilder()
    x = b.pointwise("exp", b.parameter((4,), "f32", 0, True))
    graph = finish(b, b.pointwise("neg", x), b.pointwise("abs", x))
    search = Search(tuner_of(graph, threads=1))
    first, second = graph.outputs
    assert search.grow(first, (), through_heavy=True) == {first}
    assert len(search.grow(second, {first}, through_heavy=True)) == 2
    assert len(plan(graph, threads=1).kernels) == 1


@pytest.mark.parametrize(("extent", "kernels"), [(64, 1), (FOOTPRINT_BYTES_LIMIT // 8, 2)])
def test_small_patterns_that_do_not_touch_are_one_kernel(extent, kernels):
    """F2 and G7."""
    b = GraphBuilder()
    made = [b.pointwise("exp", b.parameter((extent,), "f32", n, True)) for n in range(2)]
    assert len(plan(finish(b, *made), threads=1).kernels) == kernels


def test_every_graph_has_a_plan_without_shared_memory():
    """F8."""
    made = plan(GRAPH, budget_bytes=0, threads=1)
    check_plan(made, 0)
    assert len(made.kernels) > 1


@pytest.mark.parametrize(
    ("shape", "threads", "wanted"),
    [
        ((4096, 17), 256, Rows.THREAD),
        ((32, 256), 1024, Rows.WARP),
        ((1, 30000), 1024, Rows.BLOCK),
        ((1, 30000), 1, Rows.THREAD),
    ],
)
def test_short_rows_are_packed_and_long_ones_spread(shape, threads, wanted):
    """H5."""
    b = GraphBuilder()
    graph = finish(b, b.reduce("sum", b.parameter(shape, "f32", 0, True), (1,)))
    draft = Draft(graph, (1,), (1,), 1, {0: WHOLE, 1: WHOLE})
    assert choose_rows(draft, 1, threads)[0] is wanted


@pytest.mark.parametrize(
    ("rows", "reads_all", "read"),
    [(1000, False, 4 * 16), (3, False, 3 * 16), (1000, True, 1000 * 16)],
)
def test_a_table_costs_what_is_looked_up(rows, reads_all, read):
    b = GraphBuilder()
    table = b.parameter((rows, 16), "f32", 0, False)
    index = b.parameter((4,), "i64", 1, True)
    found = b.pointwise("relu", b.gather(table, index, 0))
    outputs = (found, b.pointwise("relu", table)) if reads_all else (found,)
    graph = finish(b, *outputs)
    assert bytes_moved(graph, (table, index), (found,)) == 4 * read + 4 * 8 + 4 * 4 * 16


@pytest.mark.parametrize(("reads_all", "read"), [(False, 8 + 2), (True, 64)])
def test_what_is_only_sliced_costs_its_slices(reads_all, read):
    b = GraphBuilder()
    x = b.parameter((64,), "f32", 0, True)
    parts = (b.slice(x, 0, 0, 1, 8), b.slice(x, 0, 10, 1, 2))
    made = tuple(b.pointwise("relu", part) for part in parts)
    graph = finish(b, *made, *([b.pointwise("relu", x)] if reads_all else []))
    assert bytes_moved(graph, (x,), made) == 4 * (read + 8 + 2)


# --- the builder ---------------------------------------------------------------------------------


def test_equal_nodes_are_one_and_constants_are_computed():
    b = GraphBuilder()
    x = b.parameter((3,), "f32", 0, True)
    assert b.pointwise("exp", x) == b.pointwise("exp", x)
    two = b.pointwise("add", b.constant(1.5, "f32"), b.constant(0.5, "f32"))
    assert b.nodes[two].value == 2.0
    assert b.transpose(b.transpose(b.reshape(x, (1, 3)), (1, 0)), (1, 0)) == b.reshape(x, (1, 3))
    spread = b.broadcast(b.broadcast(x, (0,), (3, 4)), (1, 2), (2, 3, 4))
    assert b.nodes[spread].operands == (x,)
    assert b.nodes[spread].axes == (1,)


@pytest.mark.parametrize(
    ("value", "dtype", "wanted"),
    [(300, "u8", 44), (-1.5, "i32", -1), (1e300, "f32", float("inf")), (0.1, "bf16", 0.10009765625),
     (70000.0, "f16", float("inf")), (float("nan"), "i64", None), (2, "bool", True)],
)  # fmt: skip
def test_constants_are_held_as_their_dtype_holds_them(value, dtype, wanted):
    assert hold(value, dtype) == wanted
