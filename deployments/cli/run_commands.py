"""The commands that read a run from its store, or change what the store keeps of it. Each reads its
arguments, asks the module that knows, and prints; whatever takes long to import is imported inside
the command that needs it.
"""

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.terminal import (
    EXIT_FAILED,
    AsJson,
    RunId,
    console,
    named,
    policies_of,
    say,
    show,
    store,
    warn,
    write_text,
)
from storage.errors import AstraFlowError, ConfigError


def status(run: RunId = None, as_json: AsJson = False) -> None:
    """Show what a run is doing.

    Example:  astraflow status --json
    """
    from deployments.cli import tables
    from tasks.monitoring import status as statuses

    seen = statuses.status(store(), named(run))
    show(seen.model_dump(mode="json") if as_json else tables.status_picture(seen), as_json)


def runs(as_json: AsJson = False) -> None:
    """List all runs, oldest first.

    Example:  astraflow runs
    """
    from deployments.cli import tables
    from tasks.monitoring import status as statuses

    found = statuses.runs(store())
    if not found and not as_json:
        say(f"no runs yet in {store().address}; start one with `astraflow run`")
        return
    show(
        [one.model_dump(mode="json") for one in found] if as_json else tables.runs_table(found),
        as_json,
    )
    for one in found:
        for why in [one.reason] if one.state == "unreadable" else one.problems:
            warn(f"{one.run_id}: {why}")


def verify(run: RunId = None, as_json: AsJson = False) -> None:
    """Check every invariant of a run from its stored objects; exit code 1 when one is broken.

    Example:  astraflow verify
    """
    from deployments.cli import tables
    from storage.run import runs as stored_runs
    from storage.verify.verify import verify as check
    from tasks.recipes.run_terms import run_terms

    name = named(run)
    stored = stored_runs.open_run(store(), name)
    verdict = check(stored, run_terms(stored))
    if as_json:
        show({"run_id": name, **tables.verdict_json(verdict)}, as_json)
    else:
        say(f"{name} {tables.verdict_words(verdict)}")
        if not verdict.ok:
            show(tables.violations_table(verdict), as_json)
    if not verdict.ok:
        raise typer.Exit(EXIT_FAILED)


def report(
    run: RunId = None,
    out: Annotated[Path | None, typer.Option(help="Write a copy of the page to this file.")] = None,
) -> None:
    """Make a run's report, one self-contained page, and say where it is.

    Example:  astraflow report --out report.html
    """
    from storage import layout
    from storage.run import runs as stored_runs
    from tasks.reports.page import render_report, store_report, write_report

    name = named(run)
    stored = stored_runs.open_run(store(), name)
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
        warn(f"the store does not keep a copy of the report: {error}")


def export(
    run: Annotated[str, typer.Argument(help="Run id.")],
    policy: Annotated[str, typer.Argument(help="Name of the policy.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    version: Annotated[
        str | None, typer.Option(help="Which weights, by number or tag; the newest when left out.")
    ] = None,
) -> None:
    """Write a policy's weights as a folder that transformers'
    `AutoModelForCausalLM.from_pretrained` loads.

    Example:  astraflow export tiny-20260101-120000-ab12 solver --out ./solver
    """
    from storage.weights import tags
    from tasks.export import export_model

    stored, _ = policies_of(run, policy)
    written = export_model(
        stored, policy, None if version is None else tags.resolve(stored, policy, version), out
    )
    say(f"{policy} version {written} is in {out}")


def weights(
    run: RunId = None,
    policy: Annotated[
        str | None, typer.Argument(help="Name of the policy; all of them when left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a run's weights: how large, how made, how long under way, who serves
    them.

    Example:  astraflow weights tiny-20260101-120000-ab12 solver
    """
    from deployments.cli import tables
    from tasks.monitoring.weights_table import history

    stored, policies = policies_of(named(run), policy)
    seen = [history(stored, name) for name in policies]
    found = [version for one in seen for version in one.found]
    width = console().width
    show(
        [one.model_dump(mode="json") for one in found]
        if as_json
        else tables.weights_table(found, width),
        as_json,
    )
    for why in dict.fromkeys(why for one in seen for why in one.unreadable.values()):
        warn(f"left out, because it cannot be read: {why}")


def tag(
    run: Annotated[str, typer.Argument(help="Run id.")],
    version: Annotated[
        str | None, typer.Argument(help="POLICY@VERSION; all tags are listed when left out.")
    ] = None,
    name: Annotated[str | None, typer.Argument(help="Its name: letters, digits, - and _.")] = None,
    remove: Annotated[str | None, typer.Option(metavar="NAME", help="Take this name away.")] = None,
) -> None:
    """Name a version: gc keeps a tagged one, with all that leads to it, and `export --version NAME`
    finds it.

    Example:  astraflow tag tiny-20260101-120000-ab12 solver@40 best
    """
    from deployments.cli import tables
    from storage.run import runs as stored_runs
    from storage.weights import tags

    if version is not None and (name is None or remove is not None):
        raise ConfigError(
            f"give {version} a name, in a call of its own: astraflow tag {run} {version} NAME"
        )
    stored = stored_runs.open_run(store(), run)
    if remove is not None:
        taken = tags.delete(stored, remove)
        whose = (
            f"{taken.policy}@{taken.version}" if taken else "the version, which could not be read,"
        )
        say(f"{whose} is not tagged {remove} any more")
    elif version is not None and name is not None:
        tags.create(stored, name, *tags.parse(version))
        say(f"{version} is tagged {name}")
    else:
        tagged = tags.read_all(stored)
        if tagged.found:
            show(tables.tags_table(tagged.found), as_json=False)
        elif not tagged.unreadable:
            say(f"{run} has no tags; `astraflow tag {run} POLICY@VERSION NAME` gives one")
        for why in tagged.unreadable.values():
            warn(f"1 tag cannot be read: {why}")


def gc(
    run: Annotated[str, typer.Argument(help="Run id.")],
    last: Annotated[
        int, typer.Option(min=1, help="Keep the newest so many versions of each policy.")
    ] = 5,
    every: Annotated[
        int, typer.Option(min=0, help="Keep every so-manieth version; 0: none of them.")
    ] = 20,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Keep this version, as POLICY@VERSION. May be repeated."),
    ] = None,
    grace_hours: Annotated[float, typer.Option(min=0, help="Keep what is younger.")] = 1.0,
    delete: Annotated[
        bool, typer.Option("--delete", help="Do it; without this, only say what would go.")
    ] = False,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="From now on nothing of the run is deleted.")
    ] = False,
    thaw: Annotated[bool, typer.Option("--thaw", help="Take a freeze back.")] = False,
) -> None:
    """Let go of weights that no kept version needs, at home and in mirrors, and of what killed
    writers left. Manifests stay, so the run can still be verified and resumed.

    Example:  astraflow gc tiny-20260101-120000-ab12 --last 3 --keep solver@40 --delete
    """
    from deployments.cli import tables
    from storage.run import runs as stored_runs
    from storage.weights import retention
    from tasks import garbage_collection, sizes
    from tasks.recipes.stored_config import read_config

    if freeze and thaw:
        raise ConfigError("--freeze and --thaw contradict each other; give one of them")
    if delete and (freeze or thaw):
        raise ConfigError(
            f"{'--freeze' if freeze else '--thaw'} deletes nothing; give --delete in a call of its "
            "own"
        )
    stored = stored_runs.open_run(store(), run)
    if freeze or thaw:
        (retention.freeze if freeze else retention.thaw)(stored)
        say(f"{run} is {'frozen: nothing of it is deleted' if freeze else 'not frozen any more'}")
        return
    config = read_config(stored)
    versions = retention.named(keep or [], config.policies)
    retention.refuse_absent(stored, versions)
    wanted = retention.Retention(last, every, versions, grace_hours * 3600)
    found = garbage_collection.survey(stored, run, config, wanted)
    show(tables.retention_table(found), as_json=False)
    away = garbage_collection.remove(found) if delete else found.away
    for region, why in away.items():
        warn(f"the mirror in {region} is left for the next time: {why}")
    size = f"{sizes.spelled(found.num_bytes)} of {run}"
    if delete:
        say(f"{size} are deleted")
    elif retention.is_frozen(stored):
        say(
            f"{size} would go if it were not frozen; `astraflow gc {run} --thaw` takes the freeze "
            "back"
        )
    else:
        say(f"{size} would go; nothing is deleted yet, add --delete to do it")
