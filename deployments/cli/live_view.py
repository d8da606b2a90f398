"""How a run under way is shown: as a picture that is redrawn in place, or as one line where there
is no terminal.

Only looks: what is shown comes in as a `View`, which `follow.py` gathers.
"""

from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from storage.records.control import FAULTS, ClosingStep, ServiceState
from tasks import sizes
from tasks.monitoring.status import Closing, EvalStatus, PolicyStatus, Status
from tasks.monitoring.status_schema import SILENT
from tasks.terminal_text import one_line

BAR_WIDTH = 40
ALONE = "single_turn"
"""Evaluations of this workflow are the answering policy alone; any other is the team."""
STATE_STYLES = {
    "completed": "bold green",
    "failed": "bold red",
    "interrupted": "bold red",
    "unreadable": "bold red",
    "cancelled": "bold yellow",
}


@dataclass(frozen=True, kw_only=True)
class View:
    """One look at a run. Example: `View("tiny-1", 12.5, "Pending", None)`, before its supervisor
    has begun.
    """

    run_id: str
    elapsed_s: float
    flow_state: str
    """Prefect's word on the supervisor's flow run."""
    status: Status | None
    """None until the run exists in the store."""
    base_model: float | None = None
    """Share of the base models that is built; None when nothing is being built."""
    note: str = ""
    links: dict[str, str] = field(default_factory=dict)
    """Name → address."""


def picture(view: View) -> RenderableType:
    """The whole view, for a terminal."""
    parts: list[RenderableType] = [_progress(view)]
    if view.status is not None:
        parts += [policies_table(view.status), regions_table(view.status)]
        if view.status.evals:
            parts.append(evaluations_table(view.status.evals))
        parts += [Text(words, style="dim") for words in waiting_lines(view.status)]
        parts += [Text(words, style="yellow") for words in view.status.problems]
    parts.append(_links(view.links))
    title = Text.assemble((view.run_id, "bold"), "  ", _state(view), "  ", clock(view.elapsed_s))
    panel = Panel(Group(*parts), title=title, title_align="left", border_style="dim")
    return Group(
        panel, ""
    )  # the terminal writes ^C on the last line: on one that is full it would move the picture


def line(view: View) -> str:
    """The same in one line, for logs."""
    return one_line(_words(view))


def _words(view: View) -> str:
    head = f"[{clock(view.elapsed_s)}] {_state(view).plain}"
    status = view.status
    if status is None:
        return f"{head}  waiting for the supervisor (Prefect: {view.flow_state})"
    if view.base_model is not None and status.state == "starting":
        return f"{head}  building the base models {view.base_model:.0%} {view.note}".rstrip()
    if status.state == "starting":
        return f"{head}  {status.reason or 'the supervisor is starting'}"
    if status.closing is not None:
        return f"{head}  {closing_words(status.closing)}"
    if status.state in STATE_STYLES:
        return f"{head}  its supervisor's flow run is {view.flow_state}"
    policies = [_policy_words(name, policy) for name, policy in status.policies.items()]
    tokens = sum(region.tokens_per_s for region in status.regions.values())
    workers = sum(region.workers for region in status.regions.values())
    shown = [
        head,
        *policies,
        f"{workers} worker{'' if workers == 1 else 's'} {tokens:,.0f} tokens/s",
        *_newest_scores(status.evals),
    ]
    return "  ".join(
        [*shown, status.reason] if status.state == "running" and status.reason else shown
    )


def closing_words(closing: Closing) -> str:
    """What is being done after the run's end. Example: `verifying shards 42%`."""
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
    """What members of a run that goes on wait for, or why they are not there."""
    if status.state != "running":
        return []
    troubled = [
        member
        for member in status.members
        if member.state in (ServiceState.FAILED, SILENT) or member.wait_reason in FAULTS
    ]
    return [
        f"{member.id}: {member.state}{f', {member.note}' if member.note else ''}"
        for member in troubled
    ]


def waiting_lines(status: Status) -> list[str]:
    """What members of a run that is starting wait for, such as base models that are not there yet:
    one line for each.
    """
    if status.state != "starting":
        return []
    by_note: dict[str, list[str]] = {}
    for member in status.members:
        if member.state == ServiceState.WAITING and member.note:
            by_note.setdefault(member.note, []).append(member.id)
    return [f"{', '.join(sorted(ids))}: {note}" for note, ids in sorted(by_note.items())]


def traffic_lines(status: Status) -> list[str]:
    """What crossed to and from each region, so far as its members tell."""
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


def evaluations_table(evals: list[EvalStatus]) -> Table:
    """One row for each play of the held-out problems; columns are the workflows that played
    them.
    """
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
    """`20` when all policies stand at the same version, else `solver 20, verifier 18`."""
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
        return Text(
            f"waiting for the supervisor to begin (Prefect: {view.flow_state})", style="dim"
        )
    if view.base_model is not None and view.status.state == "starting":
        return _bar(
            view.base_model, f"building the base models, {view.base_model:.0%}  {view.note}"
        )
    policies = view.status.policies.values()
    done, planned = min(policy.step for policy in policies), view.status.steps
    doing = (
        closing_words(view.status.closing)
        if view.status.closing is not None
        else view.status.reason
    )
    return _bar(done / planned, f"{done} of {planned} steps  {doing}")


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
