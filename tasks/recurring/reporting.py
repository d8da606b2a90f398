"""What people and programs see of a night: the page of all nights, Prefect, MLflow, a message.

    history ──▶ nights/{name}/report.html
            ──▶ Prefect: artifact nights-{name}, event astraflow.night.{end}
            ──▶ MLflow: a run "{name} nights" with the gate's numbers of each night

All of it is made from the store, and can be made again.
"""

import inspect
import logging
import re
import uuid
from collections.abc import Callable
from typing import Any

from storage import layout
from storage.records.nights import NightOutcome
from storage.records.numbers import COUNT_MAX
from storage.store.object_store import ObjectStore
from tasks.artifact_keys import artifact_key
from tasks.recipes.run_config import RunConfig
from tasks.recurring import history
from tasks.recurring.history import NightHistory, NightRow
from tasks.reports import nights_page
from tasks.reports.nights_page import percent, points
from tasks.terminal_text import markdown as escaped
from tasks.tracking.mlflow_client import PARENT, Board, Point
from tasks.tracking.mlflow_sync import PART_CHARACTERS_MAX, tracking_uri

log = logging.getLogger(__name__)

EVENT, RESOURCE = "astraflow.night.{end}", "astraflow.recurring.{name}"
MLFLOW_RUN = "{name} nights"
SHOWN_MAX = 60
"""Nights in Prefect's table; the page has all of them."""


def report(store: ObjectStore, outcome: NightOutcome, config: RunConfig) -> None:
    """Show the night's outcome everywhere. What fails is logged, and the rest is done."""
    stored = history.read(store, outcome.name)
    page = nights_page.render(stored)
    _attempt(
        "the page of all nights",
        lambda: store.put(layout.nights_report(outcome.name), page.encode()),
    )
    _attempt("Prefect's table of nights", lambda: _to_prefect(store, stored, outcome))
    uri = tracking_uri() if config.tracking.enabled else None
    if uri is not None:
        _attempt("MLflow's run of all nights", lambda: to_mlflow(stored, page, config, uri))


async def notify(outcome: NightOutcome, block: str) -> None:
    """Send the outcome to a notification block, such as `slack-webhook/on-call`."""
    from prefect.blocks.abstract import NotificationBlock
    from prefect.blocks.core import Block

    try:
        loaded: object = await Block.aload(block)
        if not isinstance(loaded, NotificationBlock):
            log.error("%s is a %s, not a notification block", block, type(loaded).__name__)
            return
        title = f"{outcome.name}, night {outcome.night}: {outcome.end.value}"
        sent = loaded.notify(body=f"{title}\n\n{outcome.reason}", subject=title)
        if inspect.isawaitable(sent):
            await sent
    except Exception as error:  # a block's code may raise anything, with its secrets in the text
        log.error("the outcome was not sent to %s (%s)", block, type(error).__name__)


def table(stored: NightHistory) -> str:
    """Return the newest nights as a Markdown table."""
    lines = [
        "| night | end | champion | candidate | gain | at least | decision | reason |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    return "\n".join(lines + [_line(row) for row in reversed(stored.nights[-SHOWN_MAX:])])


def to_mlflow(stored: NightHistory, page: str, config: RunConfig, uri: str) -> None:
    """Log the gate's numbers of each judged night, step n for night n, and the page.

    Raises MlflowError when MLflow does not answer.
    """
    name = MLFLOW_RUN.format(name=stored.name)
    board = Board(uri, config.tracking.experiment, name, [], is_live=False)
    logged = [point for row in stored.nights for point in _points(row)]
    standing = stored.standing
    tags = {
        f"astraflow.{role}": ", ".join(
            f"{policy} {member.version} of {member.run_id}"
            for policy, member in decision.team.items()
        )
        for role, decision in standing.roles.items()
    }
    board.log(PARENT, logged, tags)
    board.log_text(PARENT, page, "nights.html")
    board.log_text(PARENT, table(stored), "nights.md")


def _points(row: NightRow) -> list[Point]:
    if row.plan is None or row.outcome is None or row.decision is None or row.decision.gate is None:
        return []
    step, at_s = min(row.plan.number + 1, COUNT_MAX), row.outcome.ended_s
    return [
        Point(f"gate/{_mlflow_name(each.dataset)}/{key}", value, step, at_s)
        for each in row.decision.gate.rows
        for key, value in (
            ("champion", each.champion),
            ("candidate", each.candidate),
            ("gain", each.gain),
            ("gain_low", each.low),
        )
    ] + [Point("promoted", float(row.decision.gate.passed), step, at_s)]


def _mlflow_name(dataset: str) -> str:
    """Return a data set as a part of a metric's name. MLflow refuses a request for one other name,
    and with it the numbers of all nights.
    """
    name = re.sub(r"[^\w .-]", "_", dataset)[:PART_CHARACTERS_MAX]
    return "_" if name in ("", ".", "..") else name


def _to_prefect(store: ObjectStore, stored: NightHistory, outcome: NightOutcome) -> None:
    from prefect.artifacts import create_markdown_artifact
    from prefect.events import emit_event

    address = f"{store.url}/{layout.nights_report(stored.name)}"
    made: Any = create_markdown_artifact(
        key=artifact_key("nights", stored.name),
        markdown=f"# {escaped(stored.name)}\n\n{table(stored)}\n\nPage: `{address}`",
        description=f"Nights of {stored.name}",
        _sync=True,  # type: ignore[call-arg]  # of Prefect's decorator, for a thread of an async task
    )
    assert not inspect.isawaitable(made)
    emit_event(
        event=EVENT.format(end=outcome.end.value),
        resource={
            "prefect.resource.id": RESOURCE.format(name=outcome.name),
            "prefect.resource.name": outcome.name,
        },
        payload={
            "night": outcome.night,
            "reason": outcome.reason,
            "decision": outcome.decision,
        },
        id=uuid.uuid5(
            uuid.NAMESPACE_URL,
            f"{store.url}/{layout.night_outcome(outcome.name, outcome.night)}",
        ),
    )


def _line(row: NightRow) -> str:
    gain = row.gain_row
    numbers = ["", "", "", ""]
    if gain is not None:
        numbers = [
            percent(gain.champion), percent(gain.candidate), points(gain.gain), points(gain.low),
        ]  # fmt: skip
    decision = "" if row.decision is None else str(row.decision.number)
    reason = escaped(row.outcome.reason) if row.outcome else ""
    return f"| {row.night} | {row.state} | {' | '.join(numbers)} | {decision} | {reason} |"


def _attempt(what: str, act: Callable[[], object]) -> None:
    """Call `act`; any error is logged, since the outcome is in the store."""
    try:
        act()
    except Exception:  # Prefect's and MLflow's clients may raise anything
        log.exception("%s is not up to date; the next night makes it again", what)
