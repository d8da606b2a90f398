"""The mismatch of sampler and trainer in the report: its figures, and one headline number."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.monitoring.training_curves import History
from tasks.reports import plots
from tasks.reports.figures import Figure
from tasks.reports.plot_parts import NUM_COLORS, number
from tasks.reports.plots import Line
from trainer.losses.mismatch import PREFIX, REGIONS_MAX, STATISTIC, region_of

RATIO = "ratio_max"


@dataclass(frozen=True)
class Headline:
    """The newest measured mismatch. Example: `Headline("3.1e-07", "solver 3.1e-07; torch")`."""

    value: str
    note: str


def figures(histories: Sequence[History], engine: str, colors: Mapping[str, int]) -> list[Figure]:
    """Return the mismatch over the steps, per policy and region; none when nothing was measured."""
    notes = {
        STATISTIC: (
            "Mismatch of sampler and trainer",
            "mean |Δ log p|",
            f"Mean difference of log-probabilities between the rollout engine ({engine}) and the "
            "trainer, on tokens of the version in training.",
        ),
        RATIO: (
            "Largest mismatch",
            "ratio",
            "The largest probability ratio of the two on one such token; 1 is no mismatch.",
        ),
    }
    return [
        Figure(
            title,
            note,
            plots.line_chart(
                _lines(histories, statistic, colors),
                x_label="step",
                y_label=unit,
                y_range=(0.0 if statistic == STATISTIC else 1.0, None),
            ),
        )
        for statistic, (title, unit, note) in notes.items()
        if any(history.has(PREFIX + statistic) for history in histories)
    ]


def headline(histories: Sequence[History], engine: str) -> Headline | None:
    """Return the newest mean |Δ log p| of each policy, the largest first; None without any."""
    newest = {
        history.policy: line.ys[-1]
        for history in histories
        if (line := _line(history, PREFIX + STATISTIC, history.policy, 0)) is not None
    }
    if not newest:
        return None
    by_policy = ", ".join(f"{policy} {number(value)}" for policy, value in newest.items())
    return Headline(
        number(max(newest.values())), f"mean |Δ log p| of {engine} and trainer: {by_policy}"
    )


def _lines(histories: Sequence[History], statistic: str, colors: Mapping[str, int]) -> list[Line]:
    """Return a line for each policy, and dashed ones for its regions where there are several."""
    lines = []
    for history in histories:
        color = colors[history.policy]
        lines.append(_line(history, PREFIX + statistic, history.policy, color))
        regions = _most_measured(history, statistic)
        for index, region in enumerate(regions if len(regions) > 1 else ()):
            name = f"{PREFIX}{statistic}/{region}"
            shade = (color + 3 + index) % NUM_COLORS
            lines.append(_line(history, name, f"{history.policy}, {region}", shade, dashed=True))
    return [line for line in lines if line is not None]


def _most_measured(history: History, statistic: str) -> list[str]:
    """Return the REGIONS_MAX regions with the most steps, in alphabetical order."""
    names = (region_of(name, statistic) for step in history.steps for name in step.metrics)
    counts = Counter(name for name in names if name)
    return sorted(sorted(counts, key=lambda name: (-counts[name], name))[:REGIONS_MAX])


def _line(
    history: History, metric: str, name: str, color: int, *, dashed: bool = False
) -> Line | None:
    """Return the steps that measured the metric as a line; None for none."""
    points = [
        (step.number, value)
        for step in history.steps
        if math.isfinite(value := step.metrics.get(metric, math.nan))
    ]
    if not points:
        return None
    return Line(
        name=name,
        xs=[x for x, _ in points],
        ys=[y for _, y in points],
        color=color,
        style="dashed" if dashed else "solid",
        dots=len(points) == 1,
    )
