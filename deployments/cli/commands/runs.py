"""The commands that read or change a stored run.

Each command reads its arguments, calls one module and prints the result. Modules that are slow to
import are imported inside the command that needs them.
"""

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.output.terminal import (
    EXIT_FAILED,
    AsJson,
    NamedRun,
    RunId,
    console,
    local_path,
    policies_of,
    run_or_newest,
    say,
    show,
    store,
    warn,
    write_text,
)
from storage.errors import AstraFlowError, ConfigError


def status(run: RunId = None, as_json: AsJson = False) -> None:
    """Show the state and progress of a run.

    Example:  astraflow status --json
    """
    from deployments.cli.output import tables
    from tasks.monitoring import status as statuses

    current = statuses.status(store(), run_or_newest(run))
    show(current.model_dump(mode="json") if as_json else tables.status_picture(current), as_json)


def runs(as_json: AsJson = False) -> None:
    """List all runs, oldest first.

    Example:  astraflow runs
    """
    from deployments.cli.output import tables
    from tasks.monitoring import status as statuses

    summaries = statuses.runs(store())
    if not summaries and not as_json:
        say(f"no runs yet in {store().address}; start one with `astraflow run`")
        return
    show(
        [summary.model_dump(mode="json") for summary in summaries]
        if as_json
        else tables.runs_table(summaries),
        as_json,
    )
    for summary in summaries:
        for problem in [summary.reason] if summary.state == "unreadable" else summary.problems:
            warn(f"{summary.run_id}: {problem}")


def verify(run: RunId = None, as_json: AsJson = False) -> None:
    """Check every invariant of a run. Exit code 1 if one is violated.

    Example:  astraflow verify
    """
    from deployments.cli.output import tables
    from storage.run import runs as stored_runs
    from storage.verify.verify import verify as check
    from tasks.recipes.run_terms import run_terms

    name = run_or_newest(run)
    stored = stored_runs.open_run(store(), name)
    verdict = check(stored, run_terms(stored))
    if as_json:
        show({"run_id": name, **tables.verdict_json(verdict)}, as_json)
    else:
        say(f"{name} {tables.verdict_line(verdict)}")
        if not verdict.ok:
            show(tables.violations_table(verdict), as_json)
    if not verdict.ok:
        raise typer.Exit(EXIT_FAILED)


def report(
    run: RunId = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, help="Also write the page to this file, which is replaced."
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Write it again and again until the run has ended."),
    ] = False,
) -> None:
    """Write the report of a run, one self-contained page, and print its address.

    Example:  astraflow report --out report.html
    """
    import time

    from storage import layout
    from storage.run import runs as stored_runs
    from tasks.reports import page as pages
    from tasks.reports.page import render_report, store_report, write_report

    name = run_or_newest(run)
    stored = stored_runs.open_run(store(), name)
    if watch:
        say(str(out or f"{stored.url}/{layout.REPORT}"))
        pages.watch(stored, name, time.sleep, lambda page: write_text(out, page) if out else None)
        return
    if out is None:
        write_report(stored, name)
        say(f"{stored.url}/{layout.REPORT}")
        return
    page = render_report(stored, name)
    write_text(out, page)
    say(str(out))
    try:
        store_report(stored, page)
    except AstraFlowError as error:
        warn(f"the report is not stored with the run: {error}")


def export(
    run: NamedRun,
    policy: Annotated[str, typer.Argument(help="Name of the policy.")],
    out: Annotated[
        Path,
        typer.Option(
            parser=local_path,
            help="Folder to write: a new or empty one, or an earlier export, which is replaced. "
            "A folder with other files is refused.",
        ),
    ],
    version: Annotated[
        str | None, typer.Option(help="Number or tag of the version; default: the newest.")
    ] = None,
) -> None:
    """Write a policy's weights as a folder for `AutoModelForCausalLM.from_pretrained`.

    Example:  astraflow export tiny-20260101-120000-ab12 solver --out ./solver
    """
    from storage.weights import tags
    from tasks.maintenance.export import export_model

    stored, _ = policies_of(run, policy)
    written = export_model(
        stored, policy, None if version is None else tags.resolve(stored, policy, version), out
    )
    say(f"{policy} version {written} is in {out}")


def weights(
    run: RunId = None,
    policy: Annotated[
        str | None, typer.Argument(help="Name of the policy; default: all of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a run's weights with sizes, times and the workers that serve them.

    Example:  astraflow weights tiny-20260101-120000-ab12 solver
    """
    from deployments.cli.output import tables
    from tasks.monitoring.weights_table import history

    stored, policies = policies_of(run_or_newest(run), policy)
    histories = [history(stored, name) for name in policies]
    versions = [version for listed in histories for version in listed.readable]
    show(
        [version.model_dump(mode="json") for version in versions]
        if as_json
        else tables.weights_table(versions, console().width),
        as_json,
    )
    problems = (problem for listed in histories for problem in listed.unreadable.values())
    for problem in dict.fromkeys(problems):
        warn(f"skipped, because it cannot be read: {problem}")


def tag(
    run: NamedRun,
    version: Annotated[
        str | None, typer.Argument(help="POLICY@VERSION; default: list all tags.")
    ] = None,
    name: Annotated[str | None, typer.Argument(help="The tag: letters, digits, - and _.")] = None,
    remove: Annotated[str | None, typer.Option(metavar="NAME", help="Delete this tag.")] = None,
) -> None:
    """Tag a version: gc keeps it with its update path, and `export --version NAME` exports it.

    Example:  astraflow tag tiny-20260101-120000-ab12 solver@40 best
    """
    from deployments.cli.output import tables
    from storage.run import runs as stored_runs
    from storage.weights import tags

    if version is not None and (name is None or remove is not None):
        raise ConfigError(
            f"a version needs a name, and no other option: astraflow tag {run} {version} NAME"
        )
    stored = stored_runs.open_run(store(), run)
    if remove is not None:
        deleted = tags.delete(stored, remove)
        target = f"{deleted.policy}@{deleted.version}" if deleted else "an unreadable record"
        say(f"deleted the tag {remove} of {target}")
    elif version is not None and name is not None:
        tags.create(stored, name, *tags.parse(version))
        say(f"{version} is tagged {name}")
    else:
        tagged = tags.read_all(stored)
        if tagged.readable:
            show(tables.tags_table(tagged.readable), as_json=False)
        elif not tagged.unreadable:
            say(f"{run} has no tags; `astraflow tag {run} POLICY@VERSION NAME` creates one")
        for problem in tagged.unreadable.values():
            warn(f"1 tag cannot be read: {problem}")


def gc(
    run: NamedRun,
    last: Annotated[
        int, typer.Option(min=1, help="Keep this number of the newest versions of each policy.")
    ] = 5,
    every: Annotated[
        int,
        typer.Option(min=0, help="Keep every version whose number is a multiple of this; 0: none."),
    ] = 20,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Keep this version, written as POLICY@VERSION; repeatable."),
    ] = None,
    grace_hours: Annotated[
        float, typer.Option(min=0, help="Keep versions that are younger.")
    ] = 1.0,
    delete: Annotated[
        bool,
        typer.Option("--delete", help="Delete; without this, only list what would be deleted."),
    ] = False,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="From now on delete nothing of this run.")
    ] = False,
    thaw: Annotated[bool, typer.Option("--thaw", help="Remove a freeze.")] = False,
) -> None:
    """List the weights that no kept version needs; --delete deletes them, mirrors included.

    Files of killed writers are listed and deleted, too.

    Manifests are kept: the run can still be verified and resumed.

    Example:  astraflow gc tiny-20260101-120000-ab12 --last 3 --keep solver@40 --delete
    """
    from deployments.cli.output import tables
    from storage.run import runs as stored_runs
    from storage.weights import retention
    from tasks import sizes
    from tasks.maintenance import garbage_collection
    from tasks.recipes.stored_config import read_config

    if freeze and thaw:
        raise ConfigError("--freeze and --thaw contradict each other; give one of them")
    if delete and (freeze or thaw):
        raise ConfigError(
            f"{'--freeze' if freeze else '--thaw'} deletes nothing; repeat the command with "
            "--delete alone"
        )
    stored = stored_runs.open_run(store(), run)
    if freeze or thaw:
        (retention.freeze if freeze else retention.thaw)(stored)
        say(f"{run} is {'frozen: nothing of it is deleted' if freeze else 'no longer frozen'}")
        return
    config = read_config(stored)
    versions = retention.named(keep or [], config.policies)
    retention.check_versions_exist(stored, versions)
    settings = retention.Retention(last, every, versions, grace_hours * 3600)
    survey = garbage_collection.survey(stored, run, config, settings, verify=delete)
    show(tables.retention_table(survey), as_json=False)
    for reason in survey.lost:
        warn(reason)
    unreachable = garbage_collection.remove(survey) if delete else survey.unreachable
    for region, reason in unreachable.items():
        warn(f"the mirror in {region} is unchanged until the next gc: {reason}")
    size = f"{sizes.spelled(survey.num_bytes)} of {run}"
    if delete:
        say(f"{size} are deleted")
    elif retention.is_frozen(stored):
        say(
            f"{size} would be deleted if it were not frozen; `astraflow gc {run} --thaw` removes "
            "the freeze"
        )
    else:
        say(f"{size} would be deleted; nothing is deleted yet, add --delete")
