import math
import re
from xml.etree import ElementTree

import pytest

from tasks.reports.plot_parts import nice_ticks, number, smooth, thin
from tasks.reports.plots import Bar, Lane, Line, histogram, lanes, line_chart, stacked_bars


def texts(svg: str) -> list[str]:
    """Every text and title in a plot, which must be well-formed XML."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.text]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 0.93, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 80, [0, 20, 40, 60, 80]),
        (-3, 7, [-4, -2, 0, 2, 4, 6, 8]),
        (5, 5, [5, 6, 7, 8, 9, 10]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round_numbers_that_cover_the_values(
    low: float, high: float, ticks: list[float]
) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(("low", "high"), [(0.0, 3e-14), (1.0, 1.0 + 4e-16), (-2e-15, 1e-15)])
def test_almost_equal_values_have_an_axis(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert len(set(ticks)) == len(ticks) > 1


def test_values_are_placed_between_the_axes() -> None:
    svg = line_chart(
        [Line(name="solver", xs=[0, 10], ys=[0.0, 1.0], color=0)],
        x_label="step",
        y_label="reward",
        y_range=(0, 1),
    )
    assert 'd="M56.0 220.0L546.0 34.0"' in svg


def test_a_gap_interrupts_the_line() -> None:
    svg = line_chart(
        [Line(name="a", xs=[0, 1, 2], ys=[0.0, math.nan, 1.0], color=0)],
        x_label="step",
        y_label="loss",
        y_range=(0, 1),
    )
    assert 'd="M56.0 220.0M546.0 34.0"' in svg


def test_percent_and_limits_are_labelled() -> None:
    svg = line_chart(
        [Line(name="a", xs=[0, 1], ys=[0.25, 0.5], color=0, dots=True)], x_label="version", y_label="accuracy", y_range=(0, 1), percent=True,
        limit=(0.9, "goal"),
    )  # fmt: skip
    assert {"a at 0: 25.0%", "a at 1: 50.0%", "100 %", "goal", "version", "accuracy"} <= set(
        texts(svg)
    )


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [Line(name="a", xs=[], ys=[], color=0)],
        [Line(name="a", xs=[1.0], ys=[math.nan], color=0)],
    ],
)
def test_a_chart_without_values_shows_a_message(lines: list[Line]) -> None:
    assert texts(line_chart(lines, x_label="step", y_label="reward")) == ["no reward yet"]


def test_a_single_point_is_visible() -> None:
    assert 'class="dot' in line_chart(
        [Line(name="a", xs=[3], ys=[2.0], color=0)], x_label="step", y_label="loss"
    )


def test_foreign_names_are_escaped() -> None:
    svg = line_chart(
        [Line(name="<b>&", xs=[0, 1], ys=[0, 1], color=0)], x_label="step", y_label="loss"
    )
    assert "<b>" not in svg
    assert "<b>&" in texts(svg)


def test_the_bars_of_a_histogram_are_as_high_as_their_counts() -> None:
    svg = histogram({"solver": {0: 5, 2: 10}}, x_label="age", y_label="sequences", colors=[0])
    heights = [float(match) for match in re.findall(r'height="([\d.]+)"><title>solver', svg)]
    assert heights == [93.0, 186.0]
    assert {"solver, 0: 5", "solver, 2: 10"} <= set(texts(svg))


def test_components_of_a_bar_are_consecutive_and_proportional() -> None:
    svg = stacked_bars(
        {"trainer": {"step": 30.0, "wait": 70.0}}, unit="seconds", colors={"step": 0, "wait": 7}
    )
    bars = [
        (float(x), float(w))
        for x, w in re.findall(r'<rect class="f\d" x="([\d.]+)" y="38" width="([\d.]+)"', svg)
    ]
    assert bars[1][0] == pytest.approx(bars[0][0] + bars[0][1], abs=0.2)
    assert bars[1][1] / bars[0][1] == pytest.approx(7 / 3, rel=0.01)
    assert "trainer, wait: 70 seconds (70%)" in texts(svg)


def test_overlapping_spans_are_stacked_and_later_ones_use_free_rows() -> None:
    bars = [Bar(0, 2, 0, "first"), Bar(1, 3, 0, "second"), Bar(2, 4, 0, "third")]
    svg = lanes([Lane("worker", bars, [(1.0, "version 1")])], x_label="minutes")
    tops = dict(
        zip(
            ["first", "second", "third"],
            re.findall(r'bar" x="[\d.]+" y="([\d.]+)"', svg),
            strict=True,
        )
    )
    assert tops == {"first": "34.0", "second": "44.0", "third": "34.0"}
    assert "version 1" in texts(svg)


def test_thinning_keeps_both_ends() -> None:
    points = [(float(x), 0.0) for x in range(10)]
    assert [x for x, _ in thin(points, 4)] == [0, 3, 6, 9]
    assert thin(points, 10) == points


def test_smoothing_is_the_mean_of_the_last_values_without_gaps() -> None:
    assert smooth([0, 2, 4], 2) == [0, 1, 3]
    assert smooth([1, math.nan, 3], 2) == [1, 1, 2]
    assert math.isnan(smooth([math.nan, 1], 2)[0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (12345, "12.3k"),
        (2_500_000, "2.5M"),
        (0.00012, "1.2e-04"),
        (-3.5, "-3.5"),
    ],
)
def test_numbers_are_shortened(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("value", [1e308, -1e308, 5e-324, float("inf"), float("nan")])
def test_a_value_that_is_not_finite_leaves_a_gap(value: float) -> None:
    drawn = line_chart(
        [Line(name="solver", xs=[0, 1, 2], ys=[0.25, value, 0.75], color=0)],
        x_label="step",
        y_label="reward",
    )
    assert "solver at 0: 0.25" in drawn
    assert "solver at 2: 0.75" in drawn
    assert "solver at 1: " not in drawn or value == 5e-324


def test_ticks_of_an_invalid_range_are_finite() -> None:
    assert nice_ticks(0.0, 5e-324) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
