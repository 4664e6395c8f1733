"""A plan in words and as a picture: what was fused with what, and why not more. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final
from xml.sax.saxutils import escape

from coissue.kernels.stitch.graph import Graph, Kind
from coissue.kernels.stitch.plan import Home, Order, Schedule, StitchedKernel, StitchPlan
from coissue.kernels.stitch.price import bytes_moved
from coissue.kernels.stitch.search import can_order, touch
from coissue.kernels.stitch.spans import GIVEN, find_work, span_of
from coissue.kernels.stitch.tune import Settings, Tuner

#: Pairs of kernels whose separation is explained.
PAIRS_LIMIT: Final = 20


def name_node(graph: Graph, index: int) -> str:
    node = graph.nodes[index]
    shape = ", ".join(map(str, node.shape))
    return f"%{index} {node.name or node.kind.value} {node.dtype}[{shape}]"


def name_schedule(schedule: Schedule) -> str:
    order = "" if schedule.order is Order.ROW else " column"
    return f"({schedule.split_dim}, {schedule.sword}){order}"


def render_text(plan: StitchPlan, settings: Settings) -> str:
    """The plan, stitched kernel by stitched kernel, then why pairs of them stay apart."""
    graph = plan.graph
    work = find_work(graph)
    apart = sum(bytes_moved(graph, _outside(graph, index), (index,)) for index in work)
    views = len({index for kernel in plan.kernels for index in kernel.nodes} - {*work})
    joined = sum(bytes_moved(graph, kernel.inputs, kernel.outputs) for kernel in plan.kernels)
    inside = f"{_count(len(work), 'elementary op')} and {_count(views, 'view')}"
    lines = [
        f"{inside} in {_count(len(plan.kernels), 'stitched kernel')}; "
        f"bytes per unit: {apart // plan.units} unfused, {joined // plan.units} stitched"
    ]
    if plan.units > 1:
        packed = f"units are packed: {plan.units} units of a launch are one below"
        lines.append(f"{packed}; what is left over runs as it would unpacked")
    for number, kernel in enumerate(plan.kernels):
        lines += ["", *_kernel_lines(graph, number, kernel)]
    reasons = list(_reasons(plan, Tuner(graph, settings)))
    if reasons:
        lines += ["", *reasons]
    return "\n".join(lines) + "\n"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _outside(graph: Graph, index: int) -> tuple[int, ...]:
    operands = []
    for operand in graph.nodes[index].operands:
        while graph.nodes[operand].kind is Kind.BROADCAST:  # only what is there is read
            (operand,) = graph.nodes[operand].operands
        operands.append(operand)
    found = dict.fromkeys(operands)
    return tuple(o for o in found if graph.nodes[o].kind is not Kind.CONSTANT)


def _kernel_lines(graph: Graph, number: int, kernel: StitchedKernel) -> Iterator[str]:
    total = sum(_buffer_bytes(graph, kernel, index) for index in kernel.buffers)
    yield (
        f"stitched kernel {number}: {_count(kernel.blocks, 'block')} of "
        f"{_count(kernel.threads, 'thread')} per unit, "
        f"{kernel.shared_bytes} shared bytes ({total} without sharing)"
    )
    spans = span_of(graph)
    for index in kernel.nodes:
        home = kernel.homes[index]
        place = {Home.INLINE: "inline", Home.OUTPUT: "output"}.get(home, "")
        if home is Home.SHARED:
            buffer = kernel.buffers[index]
            place = f"shared: {_count(buffer.elements, 'element')} at byte {buffer.offset_bytes}"
        if index in kernel.rows:
            place += f", a {kernel.rows[index].value} per row"
        schedule = name_schedule(kernel.schedules[index])
        yield f"  {name_node(graph, index):<40} layer {spans[index]:<3} {schedule:<12} {place}"
    for index in kernel.inputs:
        yield f"  reads {name_node(graph, index)}"


def _buffer_bytes(graph: Graph, kernel: StitchedKernel, index: int) -> int:
    node = graph.nodes[index]
    return kernel.buffers[index].elements * bytes_moved(graph, (), (index,)) // max(1, node.size)


def _reasons(plan: StitchPlan, tuner: Tuner) -> Iterator[str]:
    places = frozenset(tuner.work)
    patterns = [frozenset(kernel.nodes) & places for kernel in plan.kernels]
    for one, other in list(combinations(range(len(patterns)), 2))[:PAIRS_LIMIT]:
        a, b = patterns[one], patterns[other]
        rest = [pattern for pattern in patterns if pattern not in (a, b)]
        yield f"stitched kernels {one} and {other}: {_reason(tuner, a, b, rest)}"


def _reason(
    tuner: Tuner, a: frozenset[int], b: frozenset[int], rest: Sequence[frozenset[int]]
) -> str:
    if not can_order(tuner, [*rest, a | b]):
        return "one kernel of both would wait for itself"
    budget_bytes = tuner.settings.budget_bytes
    if tuner.tune(a | b) is None:
        return f"no way to cut both alike keeps to {budget_bytes} bytes of shared memory"
    apart, joint = tuner.price(a) + tuner.price(b), tuner.price(a | b)
    how = "touch" if touch(tuner, a, b) else "do not touch"
    return f"they {how}; one kernel was estimated at {joint:.0f} ns, two at {apart:.0f} ns"


# --- the picture --------------------------------------------------------------------------------

BOX: Final = (150, 34)
GAP: Final = (20, 34)
COLOURS: Final = ("#cfe8fc", "#d8f0d0", "#fde7c7", "#f3d4e6", "#e3dcf7", "#d3f1ee", "#f9d9d2")


#: A title, a graph, and the number of the stitched kernel that makes a node.
Picture = tuple[str, Graph, Mapping[int, int]]


def render_svg(pictures: Sequence[Picture]) -> str:
    """Graphs below each other, each by layers with inputs at the top; one colour per stitched
    kernel, outputs framed bold."""
    parts, width, top = [], 400, 0
    for title, graph, home in pictures:
        parts.append(f'<text x="{GAP[0]}" y="{top + 18}" font-size="14">{escape(title)}</text>')
        spans, top = span_of(graph), top + 24
        shown = [i for i, node in enumerate(graph.nodes) if node.kind is not Kind.CONSTANT]
        deepest = max((spans[index] for index in shown), default=0)
        layers: dict[int, list[int]] = {}
        for index in shown:
            layers.setdefault(deepest - spans[index], []).append(index)
        at = {
            index: (place * (BOX[0] + GAP[0]) + GAP[0], top + row * (BOX[1] + GAP[1]) + GAP[1])
            for row, layer in layers.items()
            for place, index in enumerate(layer)
        }
        parts += [_edge(at[o], at[i]) for i in shown for o in graph.nodes[i].operands if o in at]
        parts += [_box(graph, index, at[index], home.get(index)) for index in shown]
        width = max([width, *(x + BOX[0] + GAP[0] for x, _ in at.values())])
        top = max([top, *(y + BOX[1] + GAP[1] for _, y in at.values())])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}"'
    return "\n".join([f'{head} font-family="sans-serif" font-size="11">', *parts, "</svg>\n"])


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    half = BOX[0] // 2
    return (
        f'<line x1="{start[0] + half}" y1="{start[1] + BOX[1]}" '
        f'x2="{end[0] + half}" y2="{end[1]}" stroke="#777"/>'
    )


def _box(graph: Graph, index: int, at: tuple[int, int], kernel: int | None) -> str:
    is_given = graph.nodes[index].kind in GIVEN
    colour = "#ffffff" if is_given or kernel is None else COLOURS[kernel % len(COLOURS)]
    width = 3 if index in graph.outputs else 1
    text = escape(name_node(graph, index))
    where = "given" if kernel is None else f"stitched kernel {kernel}"
    return (
        f'<g><title>{text}, {where}</title><rect x="{at[0]}" y="{at[1]}" width="{BOX[0]}" '
        f'height="{BOX[1]}" rx="5" fill="{colour}" stroke="#333" stroke-width="{width}"/>'
        f'<text x="{at[0] + 6}" y="{at[1] + 21}">{text[:26]}</text></g>'
    )
