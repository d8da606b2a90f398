"""What the commands print: tables for people, and the JSON form of a verdict for programs."""

import datetime
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deployments.cli import live_view
from deployments.cli.doctor import Check
from storage.verify.verify import Verdict
from storage.weights.tags import Tag
from tasks import garbage_collection, sizes
from tasks.garbage_collection import Survey
from tasks.monitoring.status import RunSummary, Status
from tasks.monitoring.weights_table import Version

VIOLATIONS_SHOWN_MAX = 50
ID_WHOLE_MAX = 40
"""Characters of a run id that stay on one line in any terminal."""
COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


def status_picture(status: Status) -> RenderableType:
    head = Text.assemble(
        (status.run_id, "bold"),
        "  ",
        (status.state, live_view.STATE_STYLES.get(status.state, "bold cyan")),
        f"  {live_view.clock(status.elapsed_s)}  {status.reason}",
    )
    parts: list[RenderableType] = [
        head,
        live_view.policies_table(status),
        live_view.regions_table(status),
    ]
    if status.closing is not None:
        parts.insert(1, Text(live_view.closing_words(status.closing)))
    parts += [
        Text(words, style="dim")
        for words in (*live_view.waiting_lines(status), *live_view.traffic_lines(status))
    ]
    parts += [
        Text(words, style="yellow")
        for words in (*live_view.trouble_lines(status), *status.problems)
    ]
    if status.evals:
        parts.append(live_view.evaluations_table(status.evals))
    return Group(*parts)


def runs_table(runs: list[RunSummary]) -> Table:
    """A run id is what people copy: the other columns give way to it, and only one that fits no
    terminal is folded.
    """
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    longest = max((len(run.run_id) for run in runs), default=0)
    table.add_column("run", overflow="fold", no_wrap=longest <= ID_WHOLE_MAX)
    for header in ("state", "versions", "started", "took"):
        table.add_column(header, overflow="fold")
    for run in runs:
        versions = ", ".join(
            f"{name} {'–' if v is None else v}/{run.steps}" for name, v in run.versions.items()
        )
        started = (
            "–"
            if run.started is None
            else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
        )
        state = Text(run.state, style=live_view.STATE_STYLES.get(run.state, ""))
        table.add_row(
            run.run_id,
            state,
            versions,
            started,
            "–" if run.elapsed_s is None else live_view.clock(run.elapsed_s),
        )
    return table


WIDE = 125
"""Columns from which on a terminal shows all there is to say of weights."""


def weights_table(versions: list[Version], width: int) -> Table:
    """For a terminal of `width` columns: a narrow one shows what is asked for most."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("policy", no_wrap=True)
    is_wide = width >= WIDE
    more = ("bytes", "delta", "encode", "upload", "waited")
    headers = (
        "version",
        "kind",
        "bytes",
        "delta",
        "smaller",
        "changed",
        "encode",
        "upload",
        "visible",
        "waited",
    )
    for header in headers:
        if is_wide or header not in more:
            table.add_column(header, justify="right", no_wrap=True)
    table.add_column("served by (refreshed in)", overflow="fold")
    for one in versions:
        cells = {
            "version": " ".join([*one.tags, str(one.version)]),
            "kind": "retired" if one.retired else one.kind,
            "bytes": sizes.spelled(one.num_bytes),
            "delta": "–" if one.delta_bytes is None else sizes.spelled(one.delta_bytes),
            "smaller": "–" if one.ratio is None else f"{one.ratio:.1f}×",
            "changed": "–" if one.changed is None else f"{one.changed:.2%}",
            "encode": _seconds(one.encode_s),
            "upload": _seconds(one.upload_s),
            "visible": _seconds(one.publish_s),
            "waited": _seconds(one.publish_wait_s),
        }
        served = ", ".join(
            name if took is None else f"{name} ({took:.2f} s)" for name, took in one.held_by.items()
        )
        table.add_row(
            one.policy,
            *(cells[header] for header in headers if is_wide or header not in more),
            served,
        )
    return table


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.3f} s"


def tags_table(found: Sequence[Tag]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for header in ("policy", "version", "tag", "given"):
        table.add_column(header, justify="right" if header == "version" else "left", no_wrap=True)
    for tag in found:
        table.add_row(
            tag.policy,
            str(tag.version),
            tag.name,
            f"{datetime.datetime.fromtimestamp(tag.at_s):%Y-%m-%d %H:%M}",
        )
    return table


def retention_table(found: Survey) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for header in ("of", "keeps", "because", "deletes"):
        table.add_column(header, overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    for row in garbage_collection.rows(found):
        goes = (row.goes or "–", row.size)
        for number, (kept, why) in enumerate(row.keeps or [("–", "")]):
            table.add_row(
                *((row.what, kept, why, *goes) if number == 0 else ("", kept, why, "", ""))
            )
    return table


def verdict_words(verdict: Verdict) -> str:
    """One line for people. Example:
    `clean: 80 orders, 80 shards, 10,240 sequences; solver 5,120 trained, …`.
    """
    books = "; ".join(
        f"{name} {book.trained:,} trained, {book.filtered:,} filtered, {book.expired:,} expired, "
        f"{book.waiting:,} waiting"
        for name, book in verdict.policies.items()
    )
    found = "clean" if verdict.ok else f"{len(verdict.violations)} violations"
    counts = (
        f"{verdict.orders:,} orders, {verdict.shards:,} shards, {verdict.sequences:,} sequences"
    )
    return f"{found}: {counts}; {books}" if books else f"{found}: {counts}"


def violations_table(verdict: Verdict) -> Table:
    table = Table("invariant", "where", "what", box=None, header_style="dim")
    for violation in verdict.violations[:VIOLATIONS_SHOWN_MAX]:
        table.add_row(
            str(violation.invariant),
            Text(violation.where, overflow="fold"),
            Text(violation.what, overflow="fold"),
        )
    if (more := len(verdict.violations) - VIOLATIONS_SHOWN_MAX) > 0:
        table.add_row("", "", f"and {more} more; --json lists all of them")
    return table


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The stable schema of `astraflow verify --json`."""
    return {
        "ok": verdict.ok,
        "violations": [violation._asdict() for violation in verdict.violations],
        "orders": verdict.orders,
        "shards": verdict.shards,
        "quarantined": verdict.quarantined,
        "sequences": verdict.sequences,
        "policies": {
            name: {
                "batches": book.batches,
                "trained": book.trained,
                "replayed": book.replayed,
                "filtered": book.filtered,
                "expired": book.expired,
                "waiting": book.waiting,
            }
            for name, book in verdict.policies.items()
        },
    }


def checks_table(checks: list[Check]) -> Table:
    table = Table("", "check", "found", "what to do", box=None, header_style="dim")
    for check in checks:
        table.add_row(
            Text(check.verdict, style=COLORS[check.verdict]), check.name, check.found, check.fix
        )
    return table


def summary_lines(status: Status) -> list[str]:
    """Accuracy before and after, for the answering policy alone and for the team."""
    lines = []
    for workflow in dict.fromkeys(score.workflow for score in status.evals):
        scores = [score for score in status.evals if score.workflow == workflow]
        who = "the policy alone" if workflow == live_view.ALONE else f"the team ({workflow})"
        first, last = scores[0], scores[-1]
        lines.append(
            f"{who}: {live_view.percent(first.accuracy)} → {live_view.percent(last.accuracy)} of "
            f"{last.n} held-out problems "
            f"(version {live_view.versions_words(first.versions)} → "
            f"{live_view.versions_words(last.versions)})"
        )
    return lines
