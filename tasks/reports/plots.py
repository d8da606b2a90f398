"""Plots as inline SVG text: lines, stacked bars, histograms, lanes. Numbers in, markup out.

Colours are CSS variables of the page (`--c0` to `--c7`, `--ink`, `--grid`), so that a plot follows
the page's light or dark theme.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from tasks.reports.plot_parts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    NUM_COLORS,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    empty,
    frame,
    grid,
    is_drawn,
    label_width,
    legend_row,
    nice_ticks,
    number,
    thin,
    x_axis_ticks,
    x_axis_title,
)

POINTS_MAX = 400
"""Maximum number of points of a line; more are indistinguishable at this width."""
HOVER_POINTS_MAX = 120
"""Maximum number of points of a line that show their value under the mouse."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart.

    Example: `Line(name="solver", xs=[0, 20], ys=[0.33, 0.74], color=0)`.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    """As long as `xs`; NaN leaves a gap."""
    color: int
    style: Literal["solid", "faint", "dashed"] = "solid"
    """`faint` lines (raw values behind a smoothed line) are not named in the legend."""
    dots: bool = False


@dataclass(frozen=True)
class Bar:
    """A span of time in a lane. Example: `Bar(0.0, 1.5, color=0, text="order 7: 512 tokens")`."""

    start: float
    end: float
    color: int
    text: str


@dataclass(frozen=True)
class Lane:
    name: str
    bars: Sequence[Bar]
    marks: Sequence[tuple[float, str]] = ()
    """(moment, text) of points in time."""
    mark_color: int = 0


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float | None, float | None] = (None, None),
    percent: bool = False,
    limit: tuple[float, str] | None = None,
) -> str:
    """Draw lines over a common x axis.

    Args:
        y_range: lower and upper end of the y axis; None: the data's.
        percent: label 0.5 as 50 %.
        limit: a horizontal bound and its label.
    """
    points = [
        [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if is_drawn(x)] for line in lines
    ]
    xs = [x for line in points for x, _ in line]
    ys = [y for line in points for _, y in line if is_drawn(y)] + ([limit[0]] if limit else [])
    if not xs or not any(is_drawn(y) for line in points for _, y in line):
        return empty(y_label)
    x_axis = Axis(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, LEFT, WIDTH - RIGHT)
    ticks = nice_ticks(*_span(ys, y_range))
    y_axis = Axis(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [grid(x_axis, y_axis, ticks, x_label, y_label, percent)]
    if limit is not None:
        y = y_axis(limit[0])
        parts.append(f'<path class="limit" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="tick" x="{WIDTH - RIGHT - 3}" y="{y - 4}" '
            f'text-anchor="end">{escape(limit[1])}</text>'
        )
    for line, dots in zip(lines, points, strict=True):
        parts.append(_polyline(line, thin(dots, POINTS_MAX), x_axis, y_axis, percent))
    parts.append(legend_row([(line.name, line.color) for line in lines if line.style != "faint"]))
    return frame(parts, HEIGHT, y_label)


def histogram(
    counts: Mapping[str, Mapping[int, int]], *, x_label: str, y_label: str, colors: Sequence[int]
) -> str:
    """Draw bars of counts side by side: series → value → count; a colour for each series."""
    values = sorted({value for series in counts.values() for value in series})
    top = max((count for series in counts.values() for count in series.values()), default=0)
    if not values or top == 0:
        return empty(y_label)
    low, high = values[0], values[-1]
    x_axis = Axis(low - 0.5, high + 0.5, LEFT, WIDTH - RIGHT)
    ticks = nice_ticks(0, top)
    y_axis = Axis(0, ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [
        grid(
            x_axis, y_axis, ticks, x_label, y_label, percent=False, x_ticks=_whole_ticks(low, high)
        )
    ]
    width = (x_axis(1) - x_axis(0)) * 0.8 / len(counts)
    for index, (name, series) in enumerate(counts.items()):
        for value, count in sorted(series.items()):
            x = x_axis(value - 0.4) + index * width
            y = y_axis(count)
            parts.append(
                f'<rect class="f{colors[index] % NUM_COLORS}" x="{x:.1f}" y="{y}" '
                f'width="{max(width - 1, 0.5):.1f}" '
                f'height="{y_axis(0) - y:.1f}"><title>{escape(name)}, {value}: '
                f"{count}</title></rect>"
            )
    parts.append(legend_row(list(zip(counts, colors, strict=True))))
    return frame(parts, HEIGHT, y_label)


def stacked_bars(
    rows: Mapping[str, Mapping[str, float]], *, unit: str, colors: Mapping[str, int]
) -> str:
    """Draw a wide horizontal bar for each row, of components: row → component → amount.

    `colors` orders the components; components of one colour share an entry of the legend.
    """
    totals = {name: sum(parts.values()) for name, parts in rows.items()}
    if not rows or max(totals.values()) <= 0:
        return empty(unit)
    width, left, row_height = 2 * WIDTH, label_width(set(rows)), 26
    bottom = TOP + row_height * len(rows)
    ticks = nice_ticks(0, max(totals.values()), 10)
    axis = Axis(0, ticks[-1], left, width - RIGHT)
    parts = [
        x_axis_ticks(axis, ticks, TOP, bottom),
        x_axis_title(unit, left, bottom + BOTTOM, width),
    ]
    for index, (name, amounts) in enumerate(rows.items()):
        y = TOP + index * row_height + 4
        parts.append(
            f'<text class="label" x="{left - 8}" y="{y + 13}" '
            f'text-anchor="end">{escape(name)}</text>'
        )
        start = 0.0
        for component in [each for each in colors if amounts.get(each, 0.0) > 0]:
            amount = amounts[component]
            end = start + amount
            share = f"{component}: {number(amount)} {unit} ({amount / totals[name]:.0%})"
            parts.append(
                f'<rect class="f{colors[component] % NUM_COLORS}" x="{axis(start)}" y="{y}" '
                f'width="{axis(end) - axis(start):.1f}" '
                f'height="18"><title>{escape(f"{name}, {share}")}</title></rect>'
            )
            start = end
    words: dict[int, list[str]] = {}
    for name, color in colors.items():
        words.setdefault(color, []).append(name)
    parts.append(legend_row([(", ".join(names), color) for color, names in words.items()]))
    return frame(parts, bottom + BOTTOM, unit, width)


def lanes(rows: Sequence[Lane], *, x_label: str, legend: Sequence[tuple[str, int]] = ()) -> str:
    """Draw spans of time, a lane for each row, over a common time axis from 0.

    Overlapping spans of a lane are drawn one below the other.
    """
    ends = [bar.end for row in rows for bar in row.bars] + [
        moment for row in rows for moment, _ in row.marks
    ]
    if not ends:
        return empty(x_label)
    width, left, bar_height = 2 * WIDTH, label_width({row.name for row in rows}), 9
    axis = Axis(0, max(*ends, 1e-9), left, width - RIGHT)
    body: list[str] = []
    y = float(TOP)
    for row in rows:
        tracks = _tracks(row.bars)
        depth = max(tracks, default=0) + 1
        row_height = depth * (bar_height + 1) + 12
        body.append(
            f'<text class="label" x="{left - 8}" y="{y + row_height / 2 + 1}" '
            f'text-anchor="end">{escape(row.name)}</text>'
        )
        body.append(f'<path class="grid" d="M{left} {y + row_height - 3:.1f}H{width - RIGHT}"/>')
        for bar, track in zip(row.bars, tracks, strict=True):
            body.append(
                f'<rect class="f{bar.color % NUM_COLORS} bar" x="{axis(bar.start)}" '
                f'y="{y + track * (bar_height + 1):.1f}" '
                f'width="{max(axis(bar.end) - axis(bar.start) - 0.5, 0.7):.1f}" '
                f'height="{bar_height}">'
                f"<title>{escape(bar.text)}</title></rect>"
            )
        for moment, text in row.marks:
            x = axis(moment)
            place = f'class="mark s{row.mark_color % NUM_COLORS}" d="M{x} {y:.1f}v{row_height - 8}"'
            body.append(f"<path {place}><title>{escape(text)}</title></path>")
        y += row_height
    ticks = [tick for tick in nice_ticks(0, axis.high, 10) if tick <= axis.high]
    parts = [
        x_axis_ticks(axis, ticks, TOP, y),
        *body,
        x_axis_title(x_label, left, y + BOTTOM, width),
        legend_row(legend),
    ]
    return frame(parts, y + BOTTOM, x_label, width)


def _span(ys: Sequence[float], y_range: tuple[float | None, float | None]) -> tuple[float, float]:
    low = min(ys) if y_range[0] is None else y_range[0]
    high = max(ys) if y_range[1] is None else y_range[1]
    return low, max(high, low)


def _whole_ticks(low: int, high: int) -> list[float]:
    step = max(1, math.ceil((high - low + 1) / 12))
    return [float(value) for value in range(low, high + 1, step)]


def _tracks(bars: Sequence[Bar]) -> list[int]:
    """The first free track of each bar; bars are in the order of their starts."""
    ends: list[float] = []
    tracks = []
    for bar in bars:
        free = next((index for index, end in enumerate(ends) if end <= bar.start + 1e-9), len(ends))
        ends[free : free + 1] = [bar.end]
        tracks.append(free)
    return tracks


def _polyline(
    line: Line, points: list[tuple[float, float]], x_axis: Axis, y_axis: Axis, percent: bool
) -> str:
    commands, pen = [], "M"
    for x, y in points:
        if is_drawn(y):
            commands.append(f"{pen}{x_axis(x)} {y_axis(min(max(y, y_axis.low), y_axis.high))}")
            pen = "L"
        else:
            pen = "M"
    parts = [
        f'<path class="line s{line.color % NUM_COLORS} {line.style}" d="{"".join(commands)}"/>'
    ]
    finite = [(x, y) for x, y in points if is_drawn(y)]
    if line.style != "faint":
        radius = 3 if line.dots or len(finite) == 1 else 5
        kind = "dot" if line.dots or len(finite) == 1 else "hover"
        for x, y in thin(finite, HOVER_POINTS_MAX):
            value = f"{y:.1%}" if percent else number(y)
            parts.append(
                f'<circle class="{kind} f{line.color % NUM_COLORS}" cx="{x_axis(x)}" '
                f'cy="{y_axis(y)}" r="{radius}">'
                f"<title>{escape(line.name)} at {number(x)}: {value}</title></circle>"
            )
    return "".join(parts)
