"""The page of a recurring training: its nights, the gate's figures, and who was champion when."""

import math
import time
from collections.abc import Sequence

from storage.records.nights import NightEnd
from tasks.recurring.history import NightHistory, NightRow
from tasks.reports import plots
from tasks.reports.figures import Figure
from tasks.reports.page import Card
from tasks.reports.plots import Line
from tasks.reports.templates import clock_time, template

CHAMPION_COLOR, CANDIDATE_COLOR = 7, 0


def render(history: NightHistory) -> str:
    """Return the page as HTML."""
    judged = [row for row in history.nights if row.gain_row is not None]
    page: str = template("nights.html.j2").render(
        name=history.name,
        made=clock_time(time.time()),
        unreadable=history.unreadable,
        cards=_cards(history, judged),
        figures=_figures(judged),
        nights=history.nights,
        changes=history.changes,
        clock_time=clock_time,
        percent=percent,
        points=points,
    )
    return page


def percent(share: float) -> str:
    """Return a share as text: 0.925 → `92.5 %`; empty for NaN."""
    return "" if math.isnan(share) else f"{share:.1%}".replace("%", " %")


def points(share: float) -> str:
    """Return a difference of shares as text: 0.021 → `+2.1`; empty for NaN."""
    return "" if math.isnan(share) else f"{100 * share:+.1f}"


def _cards(history: NightHistory, judged: Sequence[NightRow]) -> list[Card]:
    ends = [row.outcome.end for row in history.nights if row.outcome]
    champion = history.standing.champion
    others = len(ends) - ends.count(NightEnd.PROMOTED) - ends.count(NightEnd.REJECTED)
    cards = [
        Card(
            "nights",
            str(len(history.nights)),
            f"{ends.count(NightEnd.PROMOTED)} promoted, {ends.count(NightEnd.REJECTED)} rejected, "
            f"{others} without a verdict",
        ),
        Card(
            "champion",
            "unknown"
            if history.standing.unknown
            else "none yet"
            if champion is None
            else f"decision {champion.number}",
            history.standing.unknown
            or (
                ""
                if champion is None
                else ", ".join(f"{name} {each.version}" for name, each in champion.team.items())
            ),
        ),
    ]
    rows = [row.gain_row for row in judged if row.gain_row is not None]
    if rows:
        last = rows[-1]
        cards.append(
            Card("last candidate", percent(last.candidate), f"champion {percent(last.champion)}")
        )
    return cards


def _figures(judged: Sequence[NightRow]) -> list[Figure]:
    rows = [row.gain_row for row in judged if row.gain_row is not None]
    numbers = [float(index) for index in range(1, len(rows) + 1)]
    accuracies = [
        Line(name=name, xs=numbers, ys=[getattr(row, name) for row in rows], color=color, dots=True)
        for name, color in (("champion", CHAMPION_COLOR), ("candidate", CANDIDATE_COLOR))
    ]
    gain = Line(
        name="gain", xs=numbers, ys=[row.gain for row in rows], color=CANDIDATE_COLOR, dots=True
    )
    least = Line(
        name="at least",
        xs=numbers,
        ys=[row.low for row in rows],
        color=CANDIDATE_COLOR,
        style="dashed",
    )
    return [
        Figure(
            "Accuracy",
            "Champion and candidate of each judged night, on the same problems with the same "
            "seeds. A champion is played again only against other problems.",
            plots.line_chart(accuracies, x_label="judged night", y_label="accuracy", percent=True),
        ),
        Figure(
            "Gain",
            "Candidate minus champion, and its lower bound with the gate's confidence. A candidate "
            "is promoted where the bound is high enough.",
            plots.line_chart(
                [gain, least],
                x_label="judged night",
                y_label="gain",
                percent=True,
                limit=(0.0, "no gain"),
            ),
        ),
    ]
