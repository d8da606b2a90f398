"""Rendering of a run in progress: a picture that is redrawn in place, or one line where there is no
terminal.

Pure functions of a `View`, which `run_follower.py` gathers.
"""

from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from storage.records.control import FAULTS, ClosingStep, ServiceState, WaitReason
from tasks import sizes
from tasks.monitoring.budget_status import budget_words
from tasks.monitoring.status import Closing, EvalStatus, PolicyStatus, Status
from tasks.monitoring.status_schema import SILENT
from tasks.terminal_text import one_line

BAR_WIDTH = 40
ALONE = "single_turn"
"""Workflow of evaluations of the answering policy alone; any other is the team's."""
STATE_STYLES = {
    "completed": "bold green",
    "exhausted": "bold green",
    "failed": "bold red",
    "interrupted": "bold red",
    "unreadable": "bold red",
    "suspended": "bold yellow",
    "cancelled": "bold yellow",
}


@dataclass(frozen=True, kw_only=True)
class View:
    """State of a run at one poll. Example, before its supervisor has begun:
    `View(run_id="tiny-1", elapsed_s=12.5, flow_state="Pending", status=None)`.
    """

    run_id: str
    elapsed_s: float
    flow_state: str
    """Prefect's state of the supervisor's flow run; empty while it is not known."""
    status: Status | None
    """None until the run exists in the store."""
    base_model: float | None = None
    """Completed share (0-1) of building the base models; None when none is being built."""
    note: str = ""
    """What is being built, or waited for after the run's end, or why the store cannot be read; for
    people.
    """
    links: dict[str, str] = field(default_factory=dict)
    """Name → address."""


def picture(view: View) -> RenderableType:
    """Draw the whole view, for a terminal."""
    parts: list[RenderableType] = [_progress(view)]
    if view.status is not None:
        parts += [policies_table(view.status), regions_table(view.status)]
        if view.status.evals:
            parts.append(evaluations_table(view.status.evals))
        parts += [Text(words, style="dim") for words in waiting_lines(view.status)]
        if view.status.budget:
            parts.append(budget_line(view.status))
        parts += [Text(one_line(words), style="yellow") for words in view.status.problems]
    parts.append(_links(view.links))
    title = Text.assemble((view.run_id, "bold"), "  ", _state(view), "  ", clock(view.elapsed_s))
    panel = Panel(Group(*parts), title=title, title_align="left", border_style="dim")
    # A terminal writes ^C on the last line; there it would move the picture if the line were full.
    return Group(panel, "")


def line(view: View) -> str:
    """Write the view as one line, for logs."""
    return one_line(f"[{clock(view.elapsed_s)}] {line_words(view)}")


def line_words(view: View) -> str:
    """Return the line's words, which do not change by time alone."""
    head = _state(view).plain
    status = view.status
    if status is None:
        return f"{head}  waiting for the supervisor{_flow_state(view)}"
    if status.state == "starting":
        doing = status.reason or "the supervisor is starting"
        if view.base_model is not None:
            doing = f"building the base models {view.base_model:.0%} {view.note}".rstrip()
        return f"{head}  {'; '.join([doing, *waiting_lines(status)])}"
    if status.closing is not None:
        return f"{head}  {closing_words(status.closing)}"
    if status.state in STATE_STYLES:
        flow = f"its supervisor's flow run is {view.flow_state}" if view.flow_state else ""
        return "  ".join(filter(None, [head, flow or view.note]))
    policies = [_policy_words(name, policy) for name, policy in status.policies.items()]
    tokens = sum(region.tokens_per_s for region in status.regions.values())
    workers = sum(region.workers for region in status.regions.values())
    shown = [
        head,
        *policies,
        f"{workers} worker{'' if workers == 1 else 's'} {tokens:,.0f} tokens/s",
        *_newest_scores(status.evals),
        *filter(None, [budget_words(status.budget)]),
    ]
    return "  ".join(
        [*shown, status.reason] if status.state == "running" and status.reason else shown
    )


def closing_words(closing: Closing) -> str:
    """Describe a closing step. Example: `verifying shards 42%`."""
    match closing.step:
        case ClosingStep.LEAVING:
            return (
                f"waiting for members to leave: {closing.part}"
                if closing.part
                else "waiting for members to leave"
            )
        case ClosingStep.VERIFYING:
            return (
                f"verifying {closing.part} {closing.share:.0%}"
                if closing.part
                else "verifying every invariant"
            )
        case ClosingStep.REPORTING:
            return "writing the report"
        case ClosingStep.TRACKING:
            return "registering metrics, report and models in MLflow"
        case ClosingStep.NOTIFYING:
            return "showing the end of the run in Prefect"


def policies_table(status: Status) -> Table:
    table = _table(
        "policy",
        "step",
        "reward",
        "accuracy",
        "staleness mean/max",
        "trainer waits",
        "tokens trained",
    )
    for name, policy in status.policies.items():
        table.add_row(
            name,
            f"{policy.step}/{policy.steps}",
            number(policy.reward_mean),
            percent(policy.accuracy),
            f"{number(policy.staleness_mean, 1)} / {number(policy.staleness_max, 0)}",
            percent(policy.wait_fraction),
            f"{policy.tokens_trained:,}",
        )
    return table


def regions_table(status: Status) -> Table:
    table = _table("region", "workers", "tokens/s", "orders done")
    for name, region in status.regions.items():
        table.add_row(
            name, str(region.workers), f"{region.tokens_per_s:,.0f}", str(region.orders_done)
        )
    return table


def trouble_lines(status: Status) -> list[str]:
    """Describe the members of a running run that failed, are silent or meet a fault."""
    if status.state != "running":
        return []
    troubled = [
        member
        for member in status.members
        if member.state in (ServiceState.FAILED, SILENT) or member.wait_reason in FAULTS
    ]
    return [
        one_line(f"{member.id}: {member.state}{f', {member.note}' if member.note else ''}")
        for member in troubled
    ]


def waiting_lines(status: Status) -> list[str]:
    """Describe what the members of a starting run wait for, such as base models: one line for each
    text.
    """
    if status.state != "starting":
        return []
    by_note: dict[str, list[str]] = {}
    for member in status.members:
        if member.note and member.wait_reason in {WaitReason.BASE_MODEL, *FAULTS}:
            by_note.setdefault(member.note, []).append(member.id)
    return [one_line(f"{', '.join(sorted(ids))}: {note}") for note, ids in sorted(by_note.items())]


def traffic_lines(status: Status) -> list[str]:
    """Describe the bytes that crossed to and from each region, as its members counted them."""
    lines = []
    for name, region in status.regions.items():
        parts = [
            ("{} of weights from home", sum(region.weights_in_home.values())),
            ("{} from its mirror", sum(region.weights_in_mirror.values())),
            ("{} copied into the mirror", sum(region.mirrored.values())),
        ]
        read = ", ".join(
            words.format(sizes.spelled(num_bytes)) for words, num_bytes in parts if num_bytes
        )
        if read or region.shards_out:
            lines.append(
                f"{name}: {read or 'no weights'}; {sizes.spelled(region.shards_out)} of shards"
            )
    return lines


def budget_line(status: Status) -> Text:
    """Describe what is used of the budget; yellow when little of it is left."""
    nearly = any(each.is_nearly_used_up for each in status.budget.values())
    return Text(budget_words(status.budget), style="yellow" if nearly else "dim")


def evaluations_table(evals: list[EvalStatus]) -> Table:
    """Draw one row for each evaluated vector of versions, with a column for each workflow."""
    workflows = list(dict.fromkeys(score.workflow for score in evals))
    table = _table(
        "evaluated versions", *(_workflow_words(workflow) for workflow in workflows), "problems"
    )
    rows: dict[tuple[str, str], dict[str, EvalStatus]] = {}
    for score in evals:
        rows.setdefault((versions_words(score.versions), score.dataset), {})[score.workflow] = score
    for (versions, _), scores in rows.items():
        accuracies = [
            percent(scores[workflow].accuracy) if workflow in scores else "–"
            for workflow in workflows
        ]
        table.add_row(versions, *accuracies, str(next(iter(scores.values())).n))
    return table


def versions_words(versions: dict[str, int]) -> str:
    """Write `20` when all policies have the same version, else `solver 20, verifier 18`."""
    if len(set(versions.values())) == 1:
        return str(next(iter(versions.values())))
    return ", ".join(f"{policy} {version}" for policy, version in versions.items())


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _progress(view: View) -> RenderableType:
    if view.status is None:
        return Text(f"waiting for the supervisor to begin{_flow_state(view)}", style="dim")
    if view.base_model is not None and view.status.state == "starting":
        return _bar(
            view.base_model,
            one_line(f"building the base models, {view.base_model:.0%}  {view.note}"),
        )
    policies = view.status.policies.values()
    done, planned = min(policy.step for policy in policies), view.status.steps
    if view.status.closing is not None:
        doing = closing_words(view.status.closing)
    else:
        note = view.note if view.status.state in STATE_STYLES else ""
        doing = "; ".join(filter(None, [view.status.reason, note]))
    return _bar(done / planned, one_line(f"{done} of {planned} steps  {doing}"))


def _flow_state(view: View) -> str:
    return f" (Prefect: {view.flow_state})" if view.flow_state else ""


def _bar(share: float, words: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(total=1.0, completed=share, width=BAR_WIDTH), Text(words))
    return grid


def _table(*headers: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(headers[0])
    for header in headers[1:]:
        table.add_column(header, justify="right")
    return table


def _links(links: dict[str, str]) -> RenderableType:
    return Text(
        "\n".join(f"{name:<8} {address}" for name, address in links.items()),
        style="dim",
        overflow="fold",
    )


def _state(view: View) -> Text:
    state = view.status.state if view.status is not None else "starting"
    return Text(state, style=STATE_STYLES.get(state, "bold cyan"))


def _policy_words(name: str, policy: PolicyStatus) -> str:
    return f"{name} {policy.step}/{policy.steps} reward {number(policy.reward_mean)}"


def _newest_scores(evals: list[EvalStatus]) -> list[str]:
    newest = {_workflow_words(score.workflow): score for score in evals}
    return [
        f"{words} {percent(score.accuracy)}@{max(score.versions.values())}"
        for words, score in newest.items()
    ]


def _workflow_words(workflow: str) -> str:
    return "alone" if workflow == ALONE else f"team ({workflow})"
