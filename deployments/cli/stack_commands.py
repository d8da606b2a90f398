"""The commands for the stack and for what runs on it. Each reads its arguments, asks the module
that knows, and prints; whatever takes long to import is imported inside the command that needs it.
"""

import os
import sys
from typing import Annotated

import typer

from deployments.cli.terminal import EXIT_FAILED, AsJson, say, show, store
from deployments.paths import home
from storage.errors import ConfigError


def up() -> None:
    """Start the local stack: Prefect, MLflow, work pools, workers, deployments. Harmless when it
    runs.

    Example:  astraflow up
    """
    from deployments.stack import pages, up_down

    running = up_down.up(home(), say)
    say(f"Prefect  {pages.prefect(home(), running)}")
    say(f"MLflow   {pages.mlflow(home(), running)}")
    say(f"store    {running.store_url}")
    say(f"logs     {home().logs}")


def down() -> None:
    """Cancel active runs and stop everything that `up` started.

    Example:  astraflow down
    """
    from deployments.stack import up_down

    up_down.down(home(), say)


def deploy(
    directory: Annotated[
        str, typer.Option(help="This project's folder on the workers' machines.")
    ] = "",
    python: Annotated[str, typer.Option(help="The interpreter on the workers' machines.")] = "",
) -> None:
    """Register work pools and deployments on the Prefect server that PREFECT_API_URL names, or on
    the local stack's.

    Example:  PREFECT_API_URL=http://prefect.example:4200/api astraflow deploy --directory
    /opt/astraflow --python python
    """
    from deployments.paths import PROJECT
    from deployments.registration import deployments, work_pools
    from deployments.stack import environment, up_down

    named = environment.given("PREFECT_API_URL")
    local = None if named else up_down.running(home())
    if local is not None:
        environment.adopt(up_down.settings(home(), local))
    api_url = local.prefect_url if local else named
    if api_url is None:
        raise ConfigError(
            "no Prefect server is known; set PREFECT_API_URL to its address, or run `astraflow up`"
        )
    shared = environment.of_pool({**environment.UNTRACKED, **environment.FLOW_RUN, **os.environ})
    work_pools.create(api_url, python or sys.executable, shared)
    for name in deployments.register(api_url, directory=directory or str(PROJECT)):
        say(f"{api_url}: {name}")


def run(
    deployment: Annotated[
        str, typer.Argument(help="Which deployment to run.")
    ] = "astraflow/multi-policy",
    recipe: Annotated[
        str | None, typer.Option(help="A recipe's name or file, instead of the deployment's.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a value of the recipe; repeatable."
        ),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(help="Name of the run; an existing run goes on.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return as soon as the run is started.")
    ] = False,
) -> None:
    """Train: bring the stack up if need be, start a run, and show it until it ends.

    Example:  astraflow run --set steps=40 --set policies.solver.train.lr=1e-4
    """
    from deployments.cli import run_launcher

    wanted = run_launcher.prepare(deployment, recipe, assignments or [], run_id)
    followed = run_launcher.start(home(), wanted, say)
    if detach:
        say(f"{wanted.run_id} is started; `astraflow status {wanted.run_id}` shows it")
        say(followed.links["Prefect"])
        return
    if not run_launcher.watch(followed, say):
        raise typer.Exit(EXIT_FAILED)


def cancel(run: Annotated[str, typer.Argument(help="Run id.")]) -> None:
    """End one run; the stack and every other run stay. Started again with the same run id, it goes
    on.

    Example:  astraflow cancel tiny-20260101-120000-ab12
    """
    from deployments.cli import run_follower
    from storage.run import runs as stored_runs

    try:
        stored = stored_runs.open_run(store(), run)
    except ConfigError:
        if not run_follower.cancel_before_it_began(home(), run):
            raise
        say(f"{run} is cancelled before it began")
        return
    if (stood := stored_runs.read_stop(stored)) is not None:
        if stood.state != "completed" and run_follower.cancel_before_it_began(home(), run, stood):
            say(f"{run} is cancelled before it went on")
        else:
            say(f"{run} is {stood.state} already: {stood.reason}")
        return
    run_follower.cancel(stored)
    say(
        f"{run} is told to end; `astraflow run --run-id {run}` with the same settings goes on with "
        "it"
    )


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, what it lacks, and what to do; exit code 1 when something must be
    done.

    Example:  astraflow doctor
    """
    from dataclasses import asdict

    from deployments.cli import tables
    from deployments.cli.doctor import examine

    checks = examine(home())
    show([asdict(check) for check in checks] if as_json else tables.checks_table(checks), as_json)
    if any(check.verdict == "fail" for check in checks):
        raise typer.Exit(EXIT_FAILED)
