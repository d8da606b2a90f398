"""Plots as inline SVG text: lines, bars, histograms, lanes. Numbers in, markup out.

Colours are CSS variables (`--c0` to `--c7`, `--ink`, `--grid`) of the page that shows them, so that a plot follows the page's
light or dark theme. Nothing here knows what is plotted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 34, 40
POINTS_MAX = 400
"""Points drawn of one line; more cannot be told apart at this width and would only make the page heavy."""
HOVER_POINTS_MAX = 120
"""Points of a line that show their value under the mouse."""
NUM_COLORS = 8


@dataclass(frozen=True)
class Line:
    """One line of a chart. Example: `Line("solver", [0, 20], [0.33, 0.74], color=0)`."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    """As long as `xs`; not-a-number leaves a gap."""
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


@dataclass(frozen=True)
class _Axis:
    """Maps values of [low, high] to pixels of [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float | None, float | None] = (None, None),
    percent: bool = False,
    limit: tuple[float, str] | None = None,
) -> str:
    """Lines over a common x axis. `limit` draws a named horizontal bound; `percent` labels 0.5 as 50 %."""
    points = [[(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(x)] for line in lines]
    xs = [x for line in points for x, _ in line]
    ys = [y for line in points for _, y in line if math.isfinite(y)] + ([limit[0]] if limit else [])
    if not xs or not any(math.isfinite(y) for line in points for _, y in line):
        return _empty(y_label)
    x_axis = _Axis(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, LEFT, WIDTH - RIGHT)
    ticks = nice_ticks(*_span(ys, y_range))
    y_axis = _Axis(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_grid(x_axis, y_axis, ticks, x_label, y_label, percent)]
    if limit is not None:
        y = y_axis(limit[0])
        parts.append(f'<path class="limit" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="tick" x="{WIDTH - RIGHT - 3}" y="{y - 4}" text-anchor="end">{escape(limit[1])}</text>'
        )
    for line, dots in zip(lines, points, strict=True):
        parts.append(_polyline(line, thin(dots, POINTS_MAX), x_axis, y_axis, percent))
    parts.append(_legend([(line.name, line.color) for line in lines if line.style != "faint"]))
    return _svg(parts, HEIGHT, y_label)


def histogram(counts: Mapping[str, Mapping[int, int]], *, x_label: str, y_label: str, colors: Sequence[int]) -> str:
    """Side by side bars of whole numbers: series → value → how often; a colour for each series."""
    values = sorted({value for series in counts.values() for value in series})
    top = max((count for series in counts.values() for count in series.values()), default=0)
    if not values or top == 0:
        return _empty(y_label)
    low, high = values[0], values[-1]
    x_axis = _Axis(low - 0.5, high + 0.5, LEFT, WIDTH - RIGHT)
    ticks = nice_ticks(0, top)
    y_axis = _Axis(0, ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_grid(x_axis, y_axis, ticks, x_label, y_label, percent=False, x_ticks=_whole_ticks(low, high))]
    width = (x_axis(1) - x_axis(0)) * 0.8 / len(counts)
    for index, (name, series) in enumerate(counts.items()):
        for value, count in sorted(series.items()):
            x = x_axis(value - 0.4) + index * width
            y = y_axis(count)
            parts.append(
                f'<rect class="f{colors[index] % NUM_COLORS}" x="{x:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" '
                f'height="{y_axis(0) - y:.1f}"><title>{escape(name)}, {value}: {count}</title></rect>'
            )
    parts.append(_legend(list(zip(counts, colors, strict=True))))
    return _svg(parts, HEIGHT, y_label)


def stacked_bars(rows: Mapping[str, Mapping[str, float]], *, unit: str, colors: Mapping[str, int]) -> str:
    """One wide horizontal bar a row, cut into components: row → component → amount. `colors` orders the components; those
    of one colour share an entry of the legend."""
    totals = {name: sum(parts.values()) for name, parts in rows.items()}
    if not rows or max(totals.values()) <= 0:
        return _empty(unit)
    width, left, row_height = 2 * WIDTH, _label_width(set(rows)), 26
    bottom = TOP + row_height * len(rows)
    ticks = nice_ticks(0, max(totals.values()), 10)
    axis = _Axis(0, ticks[-1], left, width - RIGHT)
    parts = [_x_ticks(axis, ticks, TOP, bottom), _x_title(unit, left, bottom + BOTTOM, width)]
    for index, (name, amounts) in enumerate(rows.items()):
        y = TOP + index * row_height + 4
        parts.append(f'<text class="label" x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        at = 0.0
        for component in [known for known in colors if amounts.get(known, 0.0) > 0]:
            end = at + amounts[component]
            share = f"{component}: {number(amounts[component])} {unit} ({amounts[component] / totals[name]:.0%})"
            parts.append(
                f'<rect class="f{colors[component] % NUM_COLORS}" x="{axis(at)}" y="{y}" '
                f'width="{axis(end) - axis(at):.1f}" height="18"><title>{escape(f"{name}, {share}")}</title></rect>'
            )
            at = end
    words = {color: ", ".join(name for name in colors if colors[name] == color) for color in colors.values()}
    parts.append(_legend([(names, color) for color, names in words.items()]))
    return _svg(parts, bottom + BOTTOM, unit, width)


def lanes(rows: Sequence[Lane], *, x_label: str, legend: Sequence[tuple[str, int]] = ()) -> str:
    """Spans of time, one lane a row, over a common time axis that begins at 0. Overlapping spans of a lane stack up."""
    ends = [bar.end for row in rows for bar in row.bars] + [moment for row in rows for moment, _ in row.marks]
    if not ends:
        return _empty(x_label)
    width, left, bar_height = 2 * WIDTH, _label_width({row.name for row in rows}), 9
    axis = _Axis(0, max(*ends, 1e-9), left, width - RIGHT)
    body: list[str] = []
    y = float(TOP)
    for row in rows:
        tracks = _tracks(row.bars)
        depth = max(tracks, default=0) + 1
        row_height = depth * (bar_height + 1) + 12
        body.append(
            f'<text class="label" x="{left - 8}" y="{y + row_height / 2 + 1}" text-anchor="end">{escape(row.name)}</text>'
        )
        body.append(f'<path class="grid" d="M{left} {y + row_height - 3:.1f}H{width - RIGHT}"/>')
        for bar, track in zip(row.bars, tracks, strict=True):
            body.append(
                f'<rect class="f{bar.color % NUM_COLORS} bar" x="{axis(bar.start)}" y="{y + track * (bar_height + 1):.1f}" '
                f'width="{max(axis(bar.end) - axis(bar.start) - 0.5, 0.7):.1f}" height="{bar_height}">'
                f"<title>{escape(bar.text)}</title></rect>"
            )
        for moment, text in row.marks:
            x = axis(moment)
            place = f'class="mark s{row.mark_color % NUM_COLORS}" d="M{x} {y:.1f}v{row_height - 8}"'
            body.append(f"<path {place}><title>{escape(text)}</title></path>")
        y += row_height
    ticks = [tick for tick in nice_ticks(0, axis.high, 10) if tick <= axis.high]
    parts = [_x_ticks(axis, ticks, TOP, y), *body, _x_title(x_label, left, y + BOTTOM, width), _legend(legend)]
    return _svg(parts, y + BOTTOM, x_label, width)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [low, high]. Example: (0, 0.93) → [0, 0.2, 0.4, 0.6, 0.8, 1.0]."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thin(points: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """At most `count` of the points, evenly spread, the first and the last among them."""
    if len(points) <= count:
        return list(points)
    return [points[round(index * (len(points) - 1) / (count - 1))] for index in range(count)]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` finite values at each place. Example: ([0, 2, 4], 2) → [0, 1, 3]."""
    recent: list[float] = []
    means = []
    for value in values:
        if math.isfinite(value):
            recent = [*recent[-(window - 1) :], value] if window > 1 else [value]
        means.append(sum(recent) / len(recent) if recent else math.nan)
    return means


def number(value: float) -> str:
    """A number short enough for a label: 12345 → 12.3k, 0.00012 → 1.2e-04."""
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e9):
        return f"{value:.1e}"
    for limit, suffix in ((1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e6 if suffix == 'M' else 1e3):.3g}{suffix}"
    return f"{value:.4g}"


def _span(ys: Sequence[float], y_range: tuple[float | None, float | None]) -> tuple[float, float]:
    low = min(ys) if y_range[0] is None else y_range[0]
    high = max(ys) if y_range[1] is None else y_range[1]
    return low, max(high, low)


def _whole_ticks(low: int, high: int) -> list[float]:
    step = max(1, math.ceil((high - low + 1) / 12))
    return [float(value) for value in range(low, high + 1, step)]


def _tracks(bars: Sequence[Bar]) -> list[int]:
    """For each bar the first track that is free at its start; bars come in order of start."""
    ends: list[float] = []
    tracks = []
    for bar in bars:
        free = next((index for index, end in enumerate(ends) if end <= bar.start + 1e-9), len(ends))
        ends[free : free + 1] = [bar.end]
        tracks.append(free)
    return tracks


def _polyline(line: Line, points: list[tuple[float, float]], x_axis: _Axis, y_axis: _Axis, percent: bool) -> str:
    commands, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            commands.append(f"{pen}{x_axis(x)} {y_axis(min(max(y, y_axis.low), y_axis.high))}")
            pen = "L"
        else:
            pen = "M"
    parts = [f'<path class="line s{line.color % NUM_COLORS} {line.style}" d="{"".join(commands)}"/>']
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if line.style != "faint":
        radius = 3 if line.dots or len(finite) == 1 else 5
        kind = "dot" if line.dots or len(finite) == 1 else "hover"
        for x, y in thin(finite, HOVER_POINTS_MAX):
            value = f"{y:.1%}" if percent else number(y)
            parts.append(
                f'<circle class="{kind} f{line.color % NUM_COLORS}" cx="{x_axis(x)}" cy="{y_axis(y)}" r="{radius}">'
                f"<title>{escape(line.name)} at {number(x)}: {value}</title></circle>"
            )
    return "".join(parts)


def _grid(
    x_axis: _Axis, y_axis: _Axis, y_ticks: Sequence[float], x_label: str, y_label: str, percent: bool,
    x_ticks: Sequence[float] | None = None,
) -> str:  # fmt: skip
    inside = x_ticks or [tick for tick in nice_ticks(x_axis.low, x_axis.high, 7) if x_axis.low <= tick <= x_axis.high]
    parts = [_x_ticks(x_axis, inside, TOP, HEIGHT - BOTTOM), _x_title(x_label, LEFT, HEIGHT)]
    for tick in y_ticks:
        label = f"{tick:.0%}".replace("%", " %") if percent else number(tick)
        y = y_axis(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4}" text-anchor="end">{label}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _x_ticks(axis: _Axis, ticks: Sequence[float], top: float, bottom: float) -> str:
    return "".join(
        f'<path class="grid" d="M{axis(tick)} {top}V{bottom}"/>'
        f'<text class="tick" x="{axis(tick)}" y="{bottom + 15}" text-anchor="middle">{number(tick)}</text>'
        for tick in ticks
    )


def _x_title(text: str, left: float, height: float, width: float = WIDTH) -> str:
    middle = (left + width - RIGHT) / 2
    return f'<text class="axis" x="{middle}" y="{height - 7}" text-anchor="middle">{escape(text)}</text>'


def _legend(entries: Sequence[tuple[str, int]]) -> str:
    parts, x = [], float(LEFT)
    for name, color in entries:
        parts.append(f'<rect class="f{color % NUM_COLORS}" x="{x:.0f}" y="9" width="12" height="10" rx="2"/>')
        parts.append(f'<text class="label" x="{x + 17:.0f}" y="18">{escape(name)}</text>')
        x += 17 + 6.8 * len(name) + 16
    return "".join(parts)


def _label_width(names: set[str]) -> float:
    return 20 + 6.8 * max(len(name) for name in names)


def _empty(what: str) -> str:
    return _svg(
        [f'<text class="axis" x="{WIDTH / 2}" y="60" text-anchor="middle">no {escape(what)} yet</text>'], 100, what
    )


def _svg(parts: Sequence[str], height: float, label: str, width: float = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
