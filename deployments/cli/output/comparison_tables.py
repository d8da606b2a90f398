"""The output of `astraflow compare`."""

import math
from typing import Any

from pydantic_core import to_jsonable_python
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tasks.monitoring.comparison import CONFIDENCE, Gain, RunsCompared
from tasks.reports.nights_page import percent, points
from tasks.terminal_text import one_line

SETTINGS_SHOWN = 40
"""More differing settings are only counted; the page has them all."""


def comparison_table(compared: RunsCompared) -> RenderableType:
    """Return accuracies, gains over the first run, and the settings that differ."""
    parts: list[RenderableType] = [_accuracies(compared)]
    if compared.gains:
        first = one_line(compared.runs[0].run_id)
        title = f"\ngain over {first}, in points, with its {CONFIDENCE:.0%} interval"
        parts += [Text(title, style="bold"), _gains(compared)]
    parts += [Text("\nsettings that differ", style="bold"), _settings(compared)]
    if (more := len(compared.settings) - SETTINGS_SHOWN) > 0:
        parts.append(Text(f"and {more} more"))
    return Group(*parts)


def comparison_json(compared: RunsCompared) -> dict[str, Any]:
    """Return the comparison as docs/schemas.md describes it; null for NaN."""
    return {
        "runs": [
            {
                "run_id": run.run_id,
                "state": run.state,
                "versions": dict(run.steps),
                "hours": run.hours,
                "evals": [
                    {**scored._asdict(), **to_jsonable_python(point)}
                    for scored, curve in run.curves.items()
                    for point in curve
                ],
                "problems": list(run.problems),
            }
            for run in compared.runs
        ],
        "gains": [
            {
                "run_id": gain.run_id,
                **gain.scored._asdict(),
                **{name: _or_null(getattr(gain, name)) for name in ("gain", "low", "high")},
                "n": gain.n,
            }
            for gain in compared.gains
        ],
        "settings": {row.key: list(row.values) for row in compared.settings},
    }


def _accuracies(compared: RunsCompared) -> Table:
    of_run, of_score = ("run", "state", "versions", "hours"), ("data set", "workflow")
    table = _table(*of_run, *of_score, "newest", "best", "n")
    for run in compared.runs:
        head = (
            one_line(run.run_id),
            run.state,
            ", ".join(f"{policy} {step}" for policy, step in run.steps.items()),
            f"{run.hours:.2f}",
        )
        for scored, curve in run.curves.items() or [(None, ())]:
            if scored is None:
                table.add_row(*head, "–", "–", "–", "–", "–")
                continue
            best = max(curve, key=lambda point: point.accuracy)
            table.add_row(
                *head,
                one_line(scored.dataset),
                one_line(scored.workflow),
                percent(curve[-1].accuracy),
                f"{percent(best.accuracy)} at {best.version}",
                str(curve[-1].n),
            )
            head = ("", "", "", "")
    return table


def _gains(compared: RunsCompared) -> Table:
    table = _table("run", "data set", "workflow", "gain", "from", "to", "problems", "")
    for gain in compared.gains:
        table.add_row(
            one_line(gain.run_id),
            one_line(gain.scored.dataset),
            one_line(gain.scored.workflow),
            points(gain.gain),
            points(gain.low),
            points(gain.high),
            str(gain.n),
            _words(gain),
        )
    return table


def _words(gain: Gain) -> str:
    if math.isnan(gain.low):
        return "no common problem"
    return "better" if gain.low > 0 else "worse" if gain.high < 0 else "no clear difference"


def _settings(compared: RunsCompared) -> Table:
    table = _table("setting", *(one_line(run.run_id) for run in compared.runs))
    for row in compared.settings[:SETTINGS_SHOWN]:
        table.add_row(one_line(row.key), *map(one_line, row.values))
    return table


def _table(*headers: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else value
