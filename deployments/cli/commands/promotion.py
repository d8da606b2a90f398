"""The commands that decide which versions are in use.

Each command reads its arguments, calls one module and prints the result. Modules that are slow to
import are imported inside the command that needs them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from deployments.cli.output.terminal import (
    EXIT_FAILED,
    AsJson,
    NamedRun,
    local_path,
    say,
    show,
    store,
    warn,
    write_text,
)
from deployments.paths import home

if TYPE_CHECKING:
    from storage.records.promotions import Team
    from storage.store.object_store import ObjectStore
    from tasks.promotion.promotion import Settled
    from tasks.recipes.run_config import RunConfig

T = TypeVar("T")

LogName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the promotion log.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Stored with the decision.")]


def promote(
    run: NamedRun,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the promotion log; default: the name in the run's recipe."),
    ] = None,
    version: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERSION",
            help="A number, a tag, `best` or `latest`, for every policy; or POLICY@VERSION for "
            "one, repeatable. `best`, the default, is the version with the highest accuracy in "
            "the run's own evaluations.",
        ),
    ] = None,
    gate: Annotated[
        bool,
        typer.Option(
            "--gate",
            help="Play held-out problems with this team and with the champion, and promote it only "
            "if it is better. This runs the workflow and the reward that the run's recipe names.",
        ),
    ] = False,
    reason: Reason = "",
) -> None:
    """Make versions of a run the champion: those that are in use.

    All policies of the run are promoted together. The decision is stored in the promotion log NAME,
    gc keeps its weights, and MLflow's alias `champion` moves to its registered models.
    `astraflow rollback` undoes it.

    Nothing is compared with the present champion, unless --gate is given: then the team must be
    better by the section `gate` of the run's recipe; where there is no champion, better than its
    base model. The exit code is 0 for a promotion and 1 for a rejection.

    Example:  astraflow promote tiny-20260101-120000-ab12 --reason "looked at 20 episodes"
    """
    from storage.run import runs as stored_runs
    from tasks.promotion import candidates, promotion
    from tasks.recipes.stored_config import read_config

    opened = store()
    stored = stored_runs.open_run(opened, run)
    config = read_config(stored)
    if gate:
        _promote_the_better(opened, name or config.name, run, config, version or (), reason)
        return
    found = candidates.find(stored, run, config, version or ())
    _adopt_stack()
    why = "; ".join(filter(None, (reason, found.description)))
    log_name = config.name if name is None else name
    _report(promotion.promote(opened, log_name, found.team, _user(), why))


def _promote_the_better(
    opened: "ObjectStore",
    name: str,
    run: str,
    config: "RunConfig",
    words: Sequence[str],
    reason: str,
) -> None:
    """Decide by a contest; raises typer.Exit for a rejection."""
    from deployments.cli.output import tables
    from deployments.cli.output.progress import shown_contest
    from tasks.promotion import promotion
    from tasks.promotion.contest import contest

    with shown_contest() as on_progress:
        held = contest(opened, name, run, config, words, on_progress)
    against = f"decision {held.champion.number}" if held.champion else "no champion: its base model"
    say(f"{_named(held.candidate.team)} against {_named(held.opponent)} ({against})")
    show(tables.gate_table(held.verdict), as_json=False)
    _adopt_stack()
    team = held.candidate.team
    _report(promotion.decide(opened, name, team, held.verdict, held.champion, _user(), reason))
    if not held.verdict.passed:
        raise typer.Exit(EXIT_FAILED)


def rollback(
    name: LogName,
    to: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Return to the champion of decision N; default: the one before.",
        ),
    ] = None,
    reason: Reason = "",
) -> None:
    """Make the champion before the present one the champion again.

    This is a new decision in the log; nothing is deleted. A second rollback goes one champion
    further back. `astraflow promotions NAME` lists the decisions.

    Example:  astraflow rollback tiny --reason "answers are too long"
    """
    from tasks.promotion import promotion

    opened = store()
    _adopt_stack()
    _report(promotion.roll_back(opened, name, _user(), reason, to))


def promotions(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name of a promotion log; default: all of them."),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Also bring tags and MLflow's aliases to what the log says, after a crash or "
            "while MLflow did not answer.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the decisions about the champion, oldest first.

    Example:  astraflow promotions tiny
    """
    from deployments.cli.output import tables
    from storage.promotion import promotions as stored_promotions
    from tasks.promotion import decision_log, promotion

    opened = store()
    logs = _readable(
        name,
        lambda: stored_promotions.names(opened),
        lambda each: stored_promotions.read_log(opened, each),
    )
    listed = [(decision_log.fold(log), log) for log in logs if log.readable or log.unreadable]
    if as_json:
        show(tables.promotions_json(listed), as_json)
    elif listed:
        show(tables.promotions_table(listed), as_json)
    else:
        say(f"no decisions yet in {opened.address}; `astraflow promote RUN` makes the first one")
    for standing, log in listed:
        for problem in log.unreadable.values():
            warn(f"{log.name}: {problem}")
        if standing.unknown:
            warn(
                f"the champion of {log.name} is not known; put the object back, or name the "
                f"champion: `astraflow rollback {log.name} --to NUMBER`"
            )
    if repair:
        _adopt_stack()
        for _, log in listed:
            _, problems = promotion.project(opened, log.name)
            for problem in problems:
                warn(f"{log.name}: {problem}")


def _readable(
    asked: str | None, names: Callable[[], Sequence[str]], read: Callable[[str], T]
) -> list[T]:
    """Return what `read` returns for the name that was asked for, else for each one; warn of those
    that cannot be read, such as one whose folder cannot be listed.

    Raises the error of the one that was asked for, and that of `names` where the whole store does
    not answer.
    """
    from storage.errors import AstraFlowError

    found = []
    for name in names() if asked is None else (asked,):
        try:
            found.append(read(name))
        except AstraFlowError as error:
            if name == asked:
                raise
            names()
            warn(f"{name} is skipped, because it cannot be read: {error}")
    return found


def _named(team: "Team") -> str:
    return ", ".join(
        f"{policy}@{version.version} of {version.run_id}" for policy, version in team.items()
    )


def nights(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name of a recurring training; default: all of them."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=local_path,
            help="Write the page of NAME: the nights, the gate's figures, who was champion when.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the nights of recurring trainings, oldest first.

    A night trains from the champion on new data; the gate promotes or rejects what it made. The
    deployment astraflow/nightly starts one at each of its scheduled times.

    Example:  astraflow nights tiny --out nights.html
    """
    from deployments.cli.output import tables
    from storage.errors import ConfigError
    from storage.promotion import nights as stored_nights
    from tasks.recurring import history

    opened = store()
    listed = _readable(
        name, lambda: stored_nights.names(opened), lambda each: history.read(opened, each)
    )
    if out is not None:
        if name is None:
            raise ConfigError("--out writes the page of one recurring training; give its NAME")
        from tasks.reports import nights_page

        write_text(out, nights_page.render(listed[0]))
        say(str(out))
        return
    if as_json:
        show(tables.nights_json(listed), as_json)
    elif any(each.nights for each in listed):
        show(tables.nights_table(listed), as_json)
    else:
        say(
            f"no night yet in {opened.address}; `prefect deployment run astraflow/nightly` starts "
            "one"
        )
    for each in listed:
        for where, why in each.unreadable.items():
            warn(f"{each.name}, {where}: {why}")


def _report(settled: "Settled") -> None:
    from storage.records.promotions import DecisionKind

    decision = settled.decision
    role = "not champion" if decision.kind is DecisionKind.REJECTED else "champion"
    where = f"{role} of {decision.name} by decision {decision.number}"
    say(f"{_named(decision.team)}: {where}; {decision.reason}")
    for problem in settled.problems:
        warn(problem)


def _adopt_stack() -> None:
    """Use the servers of the environment, else those of the running local stack."""
    import logging

    from deployments.stack import environment, up_down

    # Prefect warns about events that it still sends when the command ends
    logging.getLogger("EventsWorker").setLevel(logging.ERROR)
    environment.refuse_bad_addresses()
    if environment.given("PREFECT_API_URL") is not None:
        return
    if (local := up_down.reachable(home())) is not None:
        environment.adopt(up_down.settings(home(), local))


def _user() -> str:
    """Return the user and the machine, for the log."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # the user has no name on this machine
        user = "a user without a name"
    return f"{user}@{socket.gethostname()}"
