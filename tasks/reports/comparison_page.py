"""The page of a comparison: curves of accuracy of several runs, their gains, differing settings."""

import time
from collections.abc import Callable, Sequence

from tasks.monitoring.comparison import CONFIDENCE, ComparedRun, RunsCompared, Scored, ScorePoint
from tasks.reports import plots
from tasks.reports.figures import Figure
from tasks.reports.nights_page import percent, points
from tasks.reports.plot_parts import NUM_COLORS
from tasks.reports.plots import Line
from tasks.reports.templates import clock_time, duration, template


def render_comparison(compared: RunsCompared, mlflow_link: str | None = None) -> str:
    """Return the page as HTML."""
    page: str = template("comparison.html.j2").render(
        compared=compared,
        figures=figures(compared.runs),
        mlflow_link=mlflow_link,
        made=clock_time(time.time()),
        confidence=f"{CONFIDENCE:.0%}",
        duration=duration,
        percent=percent,
        points=points,
    )
    return page


def scored_in(runs: Sequence[ComparedRun]) -> list[Scored]:
    """Return what any of the runs was evaluated on."""
    return sorted({scored for run in runs for scored in run.curves})


def figures(runs: Sequence[ComparedRun]) -> list[Figure]:
    """Return two figures for each data set and workflow: over versions, and over time."""
    drawn = []
    for scored in scored_in(runs):
        title = f"{scored.dataset}: {scored.workflow}"
        for note, x_label, x_of in (
            ("over versions", "version", lambda point: float(point.version)),
            ("over time", "hours", lambda point: point.hours),
        ):
            lines = _lines(runs, scored, x_of)
            chart = plots.line_chart(lines, x_label=x_label, y_label="accuracy", percent=True)
            drawn.append(Figure(title, f"Accuracy of each run, {note}.", chart))
    return drawn


def _lines(
    runs: Sequence[ComparedRun], scored: Scored, x_of: Callable[[ScorePoint], float]
) -> list[Line]:
    return [
        Line(
            name=run.run_id,
            xs=[x_of(point) for point in run.curves[scored]],
            ys=[point.accuracy for point in run.curves[scored]],
            color=index % NUM_COLORS,
            dots=True,
        )
        for index, run in enumerate(runs)
        if scored in run.curves
    ]
