"""Parts of plots: axes with round ticks, a grid, a legend, the SVG frame, and short numbers.

Colours are the page's CSS classes `f0` to `f7` (filled) and `s0` to `s7` (stroked).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 34, 40
NUM_COLORS = 8

STEP_MIN, DRAWN_MAX = 1e-100, 1e100
"""Smallest range of an axis; largest absolute value that is drawn (others leave a gap)."""
RANGE_MIN = 1e-9
"""Values whose relative difference is smaller than this are equal: the rest is rounding."""


@dataclass(frozen=True)
class Axis:
    """Maps values of [low, high] to pixels of [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [low, high].

    Example: (0, 0.93) → [0, 0.2, 0.4, 0.6, 0.8, 1.0].
    """
    if not high - low > max(RANGE_MIN * max(abs(low), abs(high)), STEP_MIN):
        high = low + max(abs(low), STEP_MIN) if low else 1.0
    exact = (high - low) / count
    power = 10.0 ** math.floor(math.log10(exact))
    gap = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= exact * 0.999)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [float(f"{index * gap:.12g}") for index in range(first, last + 1)]


def is_drawn(value: float) -> bool:
    """Whether a plot shows the value: it is finite and not too large."""
    return abs(value) <= DRAWN_MAX


def thin(points: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """At most `count` of the points, evenly spread, with the first and the last."""
    if len(points) <= count:
        return list(points)
    return [points[round(index * (len(points) - 1) / (count - 1))] for index in range(count)]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Moving average over the last `window` finite values. Example: ([0, 2, 4], 2) → [0, 1, 3]."""
    recent: list[float] = []
    means = []
    for value in values:
        if is_drawn(value):
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


def grid(
    x_axis: Axis, y_axis: Axis, y_ticks: Sequence[float], x_label: str, y_label: str, percent: bool,
    x_ticks: Sequence[float] | None = None,
) -> str:  # fmt: skip
    """Both axes of a chart of standard size: lines, ticks and titles.

    `x_ticks` replaces the round ticks of the x axis.
    """
    inside = x_ticks or [
        tick for tick in nice_ticks(x_axis.low, x_axis.high, 7) if x_axis.low <= tick <= x_axis.high
    ]
    parts = [
        x_axis_ticks(x_axis, inside, TOP, HEIGHT - BOTTOM),
        x_axis_title(x_label, LEFT, HEIGHT),
    ]
    for tick in y_ticks:
        label = f"{tick:.0%}".replace("%", " %") if percent else number(tick)
        y = y_axis(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 7}" y="{y + 4}" text-anchor="end">{label}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" transform="translate(13 {middle}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    return "".join(parts)


def x_axis_ticks(axis: Axis, ticks: Sequence[float], top: float, bottom: float) -> str:
    """Vertical lines from `top` to `bottom` in pixels, with numbers below."""
    return "".join(
        f'<path class="grid" d="M{axis(tick)} {top}V{bottom}"/>'
        f'<text class="tick" x="{axis(tick)}" y="{bottom + 15}" '
        f'text-anchor="middle">{number(tick)}</text>'
        for tick in ticks
    )


def x_axis_title(text: str, left: float, height: float, width: float = WIDTH) -> str:
    """The title of the x axis, centred at the lower edge."""
    place = f'x="{(left + width - RIGHT) / 2}" y="{height - 7}"'
    return f'<text class="axis" {place} text-anchor="middle">{escape(text)}</text>'


def legend_row(entries: Sequence[tuple[str, int]]) -> str:
    """(name, colour) of each entry, in a row at the top."""
    parts, x = [], float(LEFT)
    for name, color in entries:
        parts.append(
            f'<rect class="f{color % NUM_COLORS}" x="{x:.0f}" y="9" width="12" height="10" rx="2"/>'
        )
        parts.append(f'<text class="label" x="{x + 17:.0f}" y="18">{escape(name)}</text>')
        x += 17 + 6.8 * len(name) + 16
    return "".join(parts)


def label_width(names: set[str]) -> float:
    """Width of the longest name in pixels."""
    return 20 + 6.8 * max(len(name) for name in names)


def empty(what: str) -> str:
    """A frame that says that there is no data yet."""
    return frame(
        [
            f'<text class="axis" x="{WIDTH / 2}" y="60" text-anchor="middle">no {escape(what)} '
            "yet</text>"
        ],
        100,
        what,
    )


def frame(parts: Sequence[str], height: float, label: str, width: float = WIDTH) -> str:
    """The parts as one SVG element that fills the width of its container."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
