"""The tables that commands print, and the JSON form of a verdict."""

import datetime
import time
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_jsonable_python
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deployments.cli.doctor.machine import Check
from deployments.cli.output import live_view
from storage.promotion.promotions import PromotionLog
from storage.records.promotions import GateVerdict, PromotionDecision, Requirement
from storage.verify.verify import Verdict
from storage.weights.tags import Tag
from tasks import sizes
from tasks.maintenance import garbage_collection
from tasks.maintenance.garbage_collection import Survey
from tasks.monitoring.status import RunSummary, Status
from tasks.monitoring.status_schema import continues
from tasks.monitoring.weights_table import Version
from tasks.promotion.decision_log import Standing
from tasks.recurring.history import NightHistory
from tasks.terminal_text import one_line

VIOLATIONS_SHOWN_MAX = 50
ID_WHOLE_MAX = 40
"""Run ids up to this length are never wrapped."""
REASON_SHOWN = 100
"""Characters that `astraflow runs` shows of a reason."""
COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


def status_picture(status: Status) -> RenderableType:
    """Return the output of `astraflow status`."""
    head = Text.assemble(
        (status.run_id, "bold"),
        "  ",
        (status.state, live_view.STATE_STYLES.get(status.state, "bold cyan")),
        f"  {live_view.clock(status.elapsed_s)}  {one_line(status.reason)}",
    )
    parts: list[RenderableType] = [
        head,
        live_view.policies_table(status),
        live_view.regions_table(status),
    ]
    if words := continues(status.origins):
        parts.insert(1, Text(words, style="dim"))
    if status.closing is not None:
        parts.insert(1, Text(live_view.closing_words(status.closing)))
    parts += [
        Text(words, style="dim")
        for words in (*live_view.waiting_lines(status), *live_view.traffic_lines(status))
    ]
    parts += [
        Text(words, style="yellow")
        for words in (*live_view.trouble_lines(status), *map(one_line, status.problems))
    ]
    if status.budget:
        parts.append(live_view.budget_line(status))
    if status.evals:
        parts.append(live_view.evaluations_table(status.evals))
    return Group(*parts)


def runs_table(runs: list[RunSummary]) -> Table:
    """Return the output of `astraflow runs`.

    Run ids, which are copied, are wrapped only when they are longer than ID_WHOLE_MAX.
    """
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    longest = max((len(run.run_id) for run in runs), default=0)
    table.add_column("run", overflow="fold", no_wrap=longest <= ID_WHOLE_MAX)
    with_origins = any(run.origins for run in runs)
    for header in ("state", "versions", "started", "took", *["continues"] * with_origins):
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
        state = Text(_state_words(run), style=live_view.STATE_STYLES.get(run.state, ""))
        table.add_row(
            run.run_id,
            state,
            versions,
            started,
            "–" if run.elapsed_s is None else live_view.clock(run.elapsed_s),
            *[continues(run.origins).removeprefix("continues ")] * with_origins,
        )
    return table


def _state_words(run: RunSummary) -> str:
    """Return the state; of a run whose budget is used up also which: `exhausted (budget: …)`."""
    if run.state != "exhausted":
        return run.state
    return f"{run.state} ({one_line(run.reason)[:REASON_SHOWN]})"


WIDE = 125
"""Terminals with at least this number of columns show every column of the weights table."""


def weights_table(versions: list[Version], width: int) -> Table:
    """Return the output of `astraflow weights` for a terminal of `width` columns."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("policy", no_wrap=True)
    is_wide = width >= WIDE
    wide_only = ("bytes", "delta", "encode", "upload", "waited")
    headers = [
        header
        for header in (
            *("version", "kind", "bytes", "delta", "smaller", "changed"),
            *("encode", "upload", "visible", "waited"),
        )
        if is_wide or header not in wide_only
    ]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("served by (refreshed in)", overflow="fold")
    for version in versions:
        cells = {
            "version": " ".join([*version.tags, str(version.version)]),
            "kind": "retired" if version.retired else version.kind,
            "bytes": sizes.spelled(version.num_bytes),
            "delta": "–" if version.delta_bytes is None else sizes.spelled(version.delta_bytes),
            "smaller": "–" if version.ratio is None else f"{version.ratio:.1f}×",
            "changed": "–" if version.changed is None else f"{version.changed:.2%}",
            "encode": _seconds(version.encode_s),
            "upload": _seconds(version.upload_s),
            "visible": _seconds(version.publish_s),
            "waited": _seconds(version.publish_wait_s),
        }
        served = ", ".join(
            name if seconds is None else f"{name} ({seconds:.2f} s)"
            for name, seconds in version.held_by.items()
        )
        table.add_row(
            version.policy,
            *(cells[header] for header in headers),
            served,
        )
    return table


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.3f} s"


def tags_table(tags: Sequence[Tag]) -> Table:
    """Return the list of `astraflow tag RUN`."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for header in ("policy", "version", "tag", "created"):
        table.add_column(header, justify="right" if header == "version" else "left", no_wrap=True)
    for tag in tags:
        table.add_row(
            tag.policy,
            str(tag.version),
            f"{tag.name} ({tag.reason})" if tag.run else tag.name,
            f"{datetime.datetime.fromtimestamp(tag.at_s):%Y-%m-%d %H:%M}",
        )
    return table


def promotions_table(logs: Sequence[tuple[Standing, PromotionLog]]) -> Table:
    """Return the output of `astraflow promotions`."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for header in ("name", "decision", "time", "kind", "is", "team", "gain", "reason"):
        table.add_column(
            header,
            justify="right" if header in ("decision", "gain") else "left",
            no_wrap=header not in ("team", "reason"),
            overflow="fold",
        )
    for standing, log in logs:
        for decision in log.readable:
            table.add_row(
                log.name,
                str(decision.number),
                f"{datetime.datetime.fromtimestamp(decision.at_s):%Y-%m-%d %H:%M}",
                decision.kind.value,
                ", ".join(_roles(standing, decision)) or "–",
                ", ".join(
                    f"{policy}@{version.version} of {version.run_id}"
                    for policy, version in decision.team.items()
                ),
                _gain(decision),
                one_line(decision.reason),
            )
    return table


def gate_table(verdict: GateVerdict) -> Table:
    """Return the gate's table, which `astraflow promote --gate` prints."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    numbers = ("problems", "champion", "candidate", "gain", "at least", "at most", "p", "required")
    for header in ("data set", *numbers, "passed", "why"):
        table.add_column(
            header,
            justify="right" if header in numbers else "left",
            no_wrap=header in numbers,
            overflow="fold",
        )
    for row in verdict.rows:
        table.add_row(
            row.dataset,
            f"{row.problems:,}",
            *(f"{value:.1%}" for value in (row.champion, row.candidate)),
            *(f"{value:+.1%}" for value in (row.gain, row.low, row.high)),
            f"{row.p_value:.2g}",
            f"{row.required:+.1%}",
            "yes" if row.passed else "no",
            row.why,
        )
    return table


def promotions_json(logs: Sequence[tuple[Standing, PromotionLog]]) -> list[dict[str, Any]]:
    """Return the output of `astraflow promotions --json` (docs/schemas.md)."""
    listed = []
    for standing, log in logs:
        for decision in log.readable:
            fields = to_jsonable_python(decision, inf_nan_mode="null")
            del fields["write_id"]
            listed.append({**fields, "is": _roles(standing, decision)})
    return listed


def nights_table(listed: Sequence[NightHistory]) -> Table:
    """Return the output of `astraflow nights`."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for header in ("name", "night", "end", "champion", "candidate", "gain", "decision", "reason"):
        table.add_column(
            header,
            justify="right" if header in ("champion", "candidate", "gain", "decision") else "left",
            no_wrap=header != "reason",
            overflow="fold",
        )
    for history in listed:
        for row in history.nights:
            gain = row.gain_row
            numbers = ["–"] * 3
            if gain is not None:
                numbers = [f"{gain.champion:.1%}", f"{gain.candidate:.1%}", f"{gain.gain:+.1%}"]
            table.add_row(
                history.name,
                row.night,
                row.state,
                *numbers,
                str(row.decision.number) if row.decision else "–",
                one_line(row.outcome.reason) if row.outcome else "",
            )
    return table


def nights_json(listed: Sequence[NightHistory]) -> list[dict[str, Any]]:
    """Return the output of `astraflow nights --json` (docs/schemas.md)."""
    return [
        {
            "name": history.name,
            "night": row.night,
            "end": row.state,
            "reason": row.outcome.reason if row.outcome else "",
            "run": row.plan.run_id if row.plan else None,
            "began_with": row.plan.champion if row.plan else None,
            "decision": row.decision.number if row.decision else None,
        }
        for history in listed
        for row in history.nights
    ]


def _roles(standing: Standing, decision: PromotionDecision) -> list[str]:
    return [role for role, each in standing.roles.items() if each.number == decision.number]


def _gain(decision: PromotionDecision) -> str:
    """Return the gain on the data set that had to gain; a dash for a decision by hand."""
    rows = decision.gate.rows if decision.gate else ()
    gains = [row.gain for row in rows if row.requirement is Requirement.GAIN]
    return f"{gains[0]:+.1%}" if gains else "–"


def retention_table(survey: Survey) -> Table:
    """Return the output of `astraflow gc`."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for header in ("of", "keeps", "because", "deletes"):
        table.add_column(header, overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    for row in garbage_collection.rows(survey):
        deleted = (row.goes or "–", row.size)
        for number, (kept, reason) in enumerate(row.keeps or [("–", "")]):
            table.add_row(
                *((row.what, kept, reason, *deleted) if number == 0 else ("", kept, reason, "", ""))
            )
    return table


def verdict_line(verdict: Verdict) -> str:
    """Return the verdict in one line.

    Example: `clean: 80 orders, 80 shards, 10,240 sequences; solver 5,120 trained, …`.
    """
    fates = "; ".join(
        f"{name} {counts.trained:,} trained, {counts.filtered:,} filtered, "
        f"{counts.expired:,} expired, {counts.waiting:,} waiting"
        for name, counts in verdict.policies.items()
    )
    result = "clean" if verdict.ok else f"{len(verdict.violations)} violations"
    objects = (
        f"{verdict.orders:,} orders, {verdict.shards:,} shards, {verdict.sequences:,} sequences"
    )
    return f"{result}: {objects}; {fates}" if fates else f"{result}: {objects}"


def violations_table(verdict: Verdict) -> Table:
    """Return the first violations, one per row."""
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
    """Return the output of `astraflow verify --json` (docs/schemas.md)."""
    return {
        "ok": verdict.ok,
        "violations": [violation._asdict() for violation in verdict.violations],
        "orders": verdict.orders,
        "shards": verdict.shards,
        "quarantined": verdict.quarantined,
        "sequences": verdict.sequences,
        "policies": {
            name: {
                "batches": counts.batches,
                "trained": counts.trained,
                "replayed": counts.replayed,
                "filtered": counts.filtered,
                "expired": counts.expired,
                "waiting": counts.waiting,
            }
            for name, counts in verdict.policies.items()
        },
    }


def checks_table(checks: list[Check]) -> Table:
    """Return the output of `astraflow doctor`."""
    table = Table("", "check", "found", "fix", box=None, header_style="dim")
    for check in checks:
        table.add_row(
            Text(check.verdict, style=COLORS[check.verdict]), check.name, check.finding, check.fix
        )
    return table


def summary_lines(status: Status) -> list[str]:
    """Return the first and last accuracy of the answering policy alone and of the team."""
    lines = []
    for workflow in dict.fromkeys(score.workflow for score in status.evals):
        scores = [score for score in status.evals if score.workflow == workflow]
        subject = "the policy alone" if workflow == live_view.ALONE else f"the team ({workflow})"
        first, last = scores[0], scores[-1]
        lines.append(
            f"{subject}: {live_view.percent(first.accuracy)} → "
            f"{live_view.percent(last.accuracy)} of {last.n} held-out problems "
            f"(version {live_view.versions_words(first.versions)} → "
            f"{live_view.versions_words(last.versions)})"
        )
    return lines
