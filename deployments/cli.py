"""The command line `astraflow`. Every command is a few lines here: it reads its arguments, asks the module that knows,
and prints. Whatever takes long to import is imported inside the command that needs it.
"""

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from deployments.home import Home, home
from storage.errors import AstraFlowError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
T = TypeVar("T")

EXIT_FAILED = 1
EXIT_CONFIG = 2
"""What a person can mend by writing something else."""
PIPED_WIDTH = 400

app = typer.Typer(
    help="Reinforcement learning of LLM agents across regions. Start with `astraflow run`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_debug = False

RunId = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run id; the newest run when left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the documented JSON form.")]


def _command(function: Callable[P, T]) -> Callable[P, T]:
    """Registers a command whose errors become one sentence and an exit code."""

    @functools.wraps(function)
    def reported(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (typer.Exit, typer.Abort, KeyboardInterrupt):
            raise
        except Exception as error:  # the outermost edge: nothing above would tell the person
            if _debug:
                traceback.print_exc()
            typer.secho(_sentence(error), fg="red", err=True)
            raise typer.Exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED) from None

    app.command()(reported)
    return reported


def _sentence(error: Exception) -> str:
    if isinstance(error, AstraFlowError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the system'}: {error.strerror}"
    return f"unexpected {type(error).__name__}: {error} (`astraflow --debug …` shows where)"


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False) -> None:
    from stamina import instrumentation

    global _debug
    _debug = debug
    instrumentation.set_on_retry_hooks([])  # the store's own log tells of retries, to those who listen


@_command
def up() -> None:
    """Start the local stack: Prefect, MLflow, work pools, workers, deployments. Harmless when it runs.

    Example:  astraflow up
    """
    from deployments import stack

    running = stack.up(home(), _say)
    _say(f"Prefect  {running.ui_url}")
    _say(f"MLflow   {running.mlflow_url}")
    _say(f"store    {running.store_url}")
    _say(f"logs     {home().logs}")


@_command
def down() -> None:
    """Cancel active runs and stop everything that `up` started.

    Example:  astraflow down
    """
    from deployments import stack

    stack.down(home(), _say)


@_command
def deploy(
    directory: Annotated[str, typer.Option(help="This project's folder on the workers' machines.")] = "",
    python: Annotated[str, typer.Option(help="The interpreter on the workers' machines.")] = "",
) -> None:
    """Register work pools and deployments on the Prefect server that PREFECT_API_URL names, or on the local stack's.

    Example:  PREFECT_API_URL=http://prefect.example:4200/api astraflow deploy --directory /opt/astraflow --python python
    """
    from deployments import environment, pools, register, stack
    from deployments.home import PROJECT

    named = environment.given("PREFECT_API_URL")
    local = None if named else stack.running(home())
    if local is not None:
        environment.adopt(stack.settings(home(), local))
    api_url = local.prefect_url if local else named
    if api_url is None:
        raise ConfigError("no Prefect server is known; set PREFECT_API_URL to its address, or run `astraflow up`")
    pools.create(api_url, python or sys.executable, environment.of_pool({**environment.FLOW_RUN, **os.environ}))
    for name in register.register(api_url, directory=directory or str(PROJECT)):
        _say(f"{api_url}: {name}")


@_command
def run(
    deployment: Annotated[str, typer.Argument(help="Which deployment to run.")] = "astraflow/multi-policy",
    recipe: Annotated[str | None, typer.Option(help="A recipe's name or file, instead of the deployment's.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe; repeatable.")
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run; an existing run goes on.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return as soon as the run is started.")] = False,
) -> None:
    """Train: bring the stack up if need be, start a run, and show it until it ends.

    Example:  astraflow run --set steps=40 --set policies.solver.train.lr=1e-4
    """
    from deployments import launch

    wanted = launch.prepare(deployment, recipe, assignments or [], run_id)
    followed = launch.start(home(), wanted, _say)
    if detach:
        _say(f"{wanted.run_id} is started; `astraflow status {wanted.run_id}` shows it")
        _say(followed.links["Prefect"])
        return
    if not launch.watch(followed, _say):
        raise typer.Exit(EXIT_FAILED)


@_command
def cancel(run: Annotated[str, typer.Argument(help="Run id.")]) -> None:
    """End one run; the stack and every other run stay. Started again with the same run id, it goes on.

    Example:  astraflow cancel tiny-20260101-120000-ab12
    """
    from deployments import follow
    from storage import runs as stored_runs

    try:
        stored = stored_runs.open_run(_store(), run)
    except ConfigError:
        if not follow.cancel_before_it_began(home(), run):
            raise
        _say(f"{run} is cancelled before it began")
        return
    if (stood := stored_runs.read_stop(stored)) is not None:
        if stood.state != "completed" and follow.cancel_before_it_began(home(), run, stood):
            _say(f"{run} is cancelled before it went on")
        else:
            _say(f"{run} is {stood.state} already: {stood.reason}")
        return
    follow.cancel(stored)
    _say(f"{run} is told to end; `astraflow run --run-id {run}` with the same settings goes on with it")


@_command
def status(run: RunId = None, as_json: AsJson = False) -> None:
    """Show what a run is doing.

    Example:  astraflow status --json
    """
    from deployments import tables
    from tasks import status as statuses

    seen = statuses.status(_store(), _named(run))
    _print(seen.model_dump(mode="json") if as_json else tables.status_picture(seen), as_json)


@_command
def runs(as_json: AsJson = False) -> None:
    """List all runs, oldest first.

    Example:  astraflow runs
    """
    from deployments import tables
    from tasks import status as statuses

    found = statuses.runs(_store())
    if not found and not as_json:
        _say(f"no runs yet in {_store().address}; start one with `astraflow run`")
        return
    _print([one.model_dump(mode="json") for one in found] if as_json else tables.runs_table(found), as_json)


@_command
def verify(run: RunId = None, as_json: AsJson = False) -> None:
    """Check every invariant of a run from its stored objects; exit code 1 when one is broken.

    Example:  astraflow verify
    """
    from deployments import tables
    from storage import runs as stored_runs
    from storage.audit.verify import verify as check

    name = _named(run)
    verdict = check(stored_runs.open_run(_store(), name))
    if as_json:
        _print({"run_id": name, **tables.verdict_json(verdict)}, as_json)
    else:
        _say(f"{name} {tables.verdict_words(verdict)}")
        if not verdict.ok:
            _print(tables.violations_table(verdict), as_json)
    if not verdict.ok:
        raise typer.Exit(EXIT_FAILED)


@_command
def report(
    run: RunId = None,
    out: Annotated[Path | None, typer.Option(help="Write a copy of the page to this file.")] = None,
) -> None:
    """Make a run's report, one self-contained page, and say where it is.

    Example:  astraflow report --out report.html
    """
    from storage import layout
    from storage import runs as stored_runs
    from tasks.reports.page import write_report

    name = _named(run)
    stored = stored_runs.open_run(_store(), name)
    page = write_report(stored, name)
    if out is not None:
        out.write_text(page)
    _say(str(out) if out is not None else f"{stored.url}/{layout.REPORT}")


@_command
def export(
    run: Annotated[str, typer.Argument(help="Run id.")],
    policy: Annotated[str, typer.Argument(help="Name of the policy.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    version: Annotated[str | None, typer.Option(help="Which weights, by number or tag; the newest when left out.")] = None,
) -> None:
    """Write a policy's weights as a folder that transformers' `AutoModelForCausalLM.from_pretrained` loads.

    Example:  astraflow export tiny-20260101-120000-ab12 solver --out ./solver
    """
    from storage import tags
    from tasks.export import export_model

    stored, _ = _policies(run, policy)
    written = export_model(stored, policy, None if version is None else tags.resolve(stored, policy, version), out)
    _say(f"{policy} version {written} is in {out}")


@_command
def weights(
    run: RunId = None,
    policy: Annotated[str | None, typer.Argument(help="Name of the policy; all of them when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a run's weights: how large, how made, how long under way, who serves them.

    Example:  astraflow weights tiny-20260101-120000-ab12 solver
    """
    from deployments import tables
    from tasks.weights_history import history

    stored, policies = _policies(_named(run), policy)
    found = [version for name in policies for version in history(stored, name)]
    console = _console()
    _print([one.model_dump(mode="json") for one in found] if as_json else tables.weights_table(found, console.width), as_json)


@_command
def tag(
    run: Annotated[str, typer.Argument(help="Run id.")],
    version: Annotated[str | None, typer.Argument(help="POLICY@VERSION; all tags are listed when left out.")] = None,
    name: Annotated[str | None, typer.Argument(help="Its name: letters, digits, - and _.")] = None,
    remove: Annotated[str | None, typer.Option(metavar="NAME", help="Take this name away.")] = None,
) -> None:
    """Name a version: gc keeps a tagged one, with all that leads to it, and `export --version NAME` finds it.

    Example:  astraflow tag tiny-20260101-120000-ab12 solver@40 best
    """
    from deployments import tables
    from storage import runs as stored_runs
    from storage import tags

    if version is not None and (name is None or remove is not None):
        raise ConfigError(f"give {version} a name, in a call of its own: astraflow tag {run} {version} NAME")
    stored = stored_runs.open_run(_store(), run)
    if remove is not None:
        taken = tags.take(stored, remove)
        _say(f"{taken.policy}@{taken.version} is not tagged {remove} any more")
    elif version is not None and name is not None:
        tags.give(stored, name, *tags.parse(version))
        _say(f"{version} is tagged {name}")
    elif found := tags.read_all(stored):
        _print(tables.tags_table(found), as_json=False)
    else:
        _say(f"{run} has no tags; `astraflow tag {run} POLICY@VERSION NAME` gives one")


@_command
def gc(
    run: Annotated[str, typer.Argument(help="Run id.")],
    last: Annotated[int, typer.Option(min=1, help="Keep the newest so many versions of each policy.")] = 5,
    every: Annotated[int, typer.Option(min=0, help="Keep every so-manieth version; 0: none of them.")] = 20,
    keep: Annotated[list[str] | None, typer.Option(help="Keep this version, as POLICY@VERSION. May be repeated.")] = None,
    grace_hours: Annotated[float, typer.Option(min=0, help="Keep what is younger.")] = 1.0,
    delete: Annotated[bool, typer.Option("--delete", help="Do it; without this, only say what would go.")] = False,
    freeze: Annotated[bool, typer.Option("--freeze", help="From now on nothing of the run is deleted.")] = False,
    thaw: Annotated[bool, typer.Option("--thaw", help="Take a freeze back.")] = False,
) -> None:
    """Let go of weights that no kept version needs, at home and in mirrors, and of what killed writers left. Manifests stay, so
    the run can still be verified and resumed.

    Example:  astraflow gc tiny-20260101-120000-ab12 --last 3 --keep solver@40 --delete
    """
    from deployments import tables
    from storage import retention
    from storage import runs as stored_runs
    from tasks import garbage, sizes
    from tasks.config import RunConfig

    if freeze and thaw:
        raise ConfigError("--freeze and --thaw contradict each other; give one of them")
    if delete and (freeze or thaw):
        raise ConfigError(f"{'--freeze' if freeze else '--thaw'} deletes nothing; give --delete in a call of its own")
    stored = stored_runs.open_run(_store(), run)
    if freeze or thaw:
        (retention.freeze if freeze else retention.thaw)(stored)
        _say(f"{run} is {'frozen: nothing of it is deleted' if freeze else 'not frozen any more'}")
        return
    config = RunConfig.model_validate(stored_runs.run_config(stored))
    named = retention.named(keep or [], config.policies)
    retention.refuse_absent(stored, named)
    wanted = retention.Retention(last, every, named, grace_hours * 3600)
    found = garbage.survey(stored, run, config, wanted)
    _print(tables.retention_table(found), as_json=False)
    away = garbage.remove(found) if delete else found.away
    for region, why in away.items():
        typer.secho(f"the mirror in {region} is left for the next time: {why}", fg="yellow", err=True)
    size = f"{sizes.spelled(found.num_bytes)} of {run}"
    if delete:
        _say(f"{size} are deleted")
    elif retention.is_frozen(stored):
        _say(f"{size} would go if it were not frozen; `astraflow gc {run} --thaw` takes the freeze back")
    else:
        _say(f"{size} would go; nothing is deleted yet, add --delete to do it")


@_command
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, what it lacks, and what to do; exit code 1 when something must be done.

    Example:  astraflow doctor
    """
    from dataclasses import asdict

    from deployments import tables
    from deployments.doctor import examine

    checks = examine(home())
    _print([asdict(check) for check in checks] if as_json else tables.checks_table(checks), as_json)
    if any(check.verdict == "fail" for check in checks):
        raise typer.Exit(EXIT_FAILED)


def _store() -> Any:
    """The store that `run` would use: ASTRAFLOW_STORE, else the living stack's, else the home's own folder."""
    from deployments import environment, plan, record

    here: Home = home()
    store = environment.open_store(here, plan.living(record.load(here)))
    os.environ["ASTRAFLOW_STORE"] = store.address
    return store


def _policies(run: str, policy: str | None) -> tuple[Any, list[str]]:
    """The run, and the policy that is named or all of its policies."""
    from storage import runs as stored_runs
    from tasks.config import RunConfig

    stored = stored_runs.open_run(_store(), run)
    known = list(RunConfig.model_validate(stored_runs.run_config(stored)).policies)
    if policy is not None and policy not in known:
        raise ConfigError(f"{run} has no policy {policy!r}; it has {', '.join(known)}")
    return stored, known if policy is None else [policy]


def _named(run: str | None) -> str:
    from storage import runs as stored_runs

    if run is not None:
        return run
    known = stored_runs.list_runs(_store())
    if not known:
        raise ConfigError(f"{_store().address} holds no run yet; start one with `astraflow run`")
    return known[-1]


def _print(what: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(what, indent=2))
        return
    _console().print(what)


def _console() -> "Console":
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH  # a program reads it, or a file: nothing to fit into
    return console


def _say(words: str) -> None:
    typer.echo(words)


if __name__ == "__main__":
    app()
