"""Line charts as SVG text: a title, two axes with round ticks, one line per series, a legend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50
#: Told apart by people who do not see red or green, too (Okabe and Ito).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
Series = Mapping[str, Sequence[tuple[float, float]]]


def render_chart(title: str, x_label: str, y_label: str, series: Series) -> str:
    """A whole SVG file; the y axis begins at 0."""
    points = [point for line in series.values() for point in line] or [(0.0, 0.0)]
    x_ticks = find_ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = find_ticks(0.0, max(y for _, y in points))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        right = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = y / y_ticks[-1]
        return round(LEFT + right * inner_width, 1), round(TOP + (1 - up) * inner_height, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=15),
        _text(LEFT + inner_width / 2, HEIGHT - 12, x_label, anchor="middle"),
        f'<g transform="translate(16 {TOP + inner_height / 2}) rotate(-90)">'
        + _text(0, 0, y_label, anchor="middle")
        + "</g>",
    ]
    for tick in x_ticks:
        x, y = place(tick, 0)
        parts.append(_text(x, y + 18, f"{tick:g}", anchor="middle"))
    for tick in y_ticks:
        x, y = place(x_ticks[0], tick)
        parts.append(f'<path d="M{x} {y}h{inner_width}" stroke="#ddd"/>')
        parts.append(_text(x - 8, y + 4, f"{tick:g}", anchor="end"))
    for index, (name, line) in enumerate(series.items()):
        color, y = COLORS[index % len(COLORS)], TOP + 14 + 18 * index
        path = " ".join("{},{}".format(*place(*point)) for point in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        x = WIDTH - RIGHT + 12
        parts.append(f'<path d="M{x} {y - 4}h18" stroke="{color}" stroke-width="2"/>')
        parts.append(_text(x + 24, y, name))
    return "\n".join([*parts, "</svg>", ""])


def find_ticks(low: float, high: float) -> list[float]:
    """About five round numbers, the first at most `low`, the last at least `high`."""
    if high <= low:
        high = low + 1
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(s for s in (1, 2, 5, 10) if s * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
