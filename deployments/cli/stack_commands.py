"""The commands for the stack and the runs on it.

Each command reads its arguments, calls one module and prints the result. Modules that are slow to
import are imported inside the command that needs them.
"""

import os
import sys
from typing import Annotated

import typer

from deployments.cli.terminal import EXIT_FAILED, AsJson, say, show, store
from deployments.paths import home
from storage.errors import ConfigError


def up() -> None:
    """Start the local stack: Prefect, MLflow, work pools, workers, deployments.

    A running stack is not changed.

    Example:  astraflow up
    """
    from deployments.stack import pages, up_down

    running = up_down.up(home(), say)
    say(f"Prefect  {pages.prefect(home(), running)}")
    say(f"MLflow   {pages.mlflow(home(), running)}")
    say(f"store    {running.store_url}")
    say(f"logs     {home().logs}")


def down() -> None:
    """Cancel active runs and stop every process of the local stack.

    Example:  astraflow down
    """
    from deployments.stack import up_down

    up_down.down(home(), say)


def deploy(
    directory: Annotated[
        str, typer.Option(help="This project's folder on the workers' machines.")
    ] = "",
    python: Annotated[
        str, typer.Option(help="The Python interpreter on the workers' machines.")
    ] = "",
) -> None:
    """Register work pools and deployments at a Prefect server.

    The server is that of PREFECT_API_URL, else that of the local stack.

    Example:  astraflow deploy --directory /opt/astraflow --python python
    """
    from deployments.paths import PROJECT
    from deployments.registration import deployments, work_pools
    from deployments.stack import environment, up_down

    environment.refuse_bad_addresses()
    api_url = environment.given("PREFECT_API_URL")
    if api_url is None and (local := up_down.reachable(home())) is not None:
        environment.adopt(up_down.settings(home(), local))
        api_url = local.prefect_url
    if api_url is None:
        raise ConfigError(
            "there is no Prefect server; set PREFECT_API_URL to its address, or run `astraflow up`"
        )
    shared = environment.of_pool({**environment.UNTRACKED, **environment.FLOW_RUN, **os.environ})
    work_pools.create(api_url, python or sys.executable, shared)
    for name in deployments.register(api_url, directory=directory or str(PROJECT)):
        say(f"{api_url}: {name}")


def run(
    deployment: Annotated[
        str, typer.Argument(help="Name of the deployment.")
    ] = "astraflow/multi-policy",
    recipe: Annotated[
        str | None, typer.Option(help="Name or file of a recipe; default: the deployment's.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a value of the recipe; repeatable."
        ),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(help="Name of the run; an existing run is resumed.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the run is started.")
    ] = False,
) -> None:
    """Train: start the local stack if it is not running, start a run and show its progress.

    Example:  astraflow run --set steps=40 --set policies.solver.train.lr=1e-4
    """
    from deployments.cli import run_launcher

    request = run_launcher.prepare(deployment, recipe, assignments or [], run_id)
    followed = run_launcher.start(home(), request, say)
    if detach:
        say(f"{request.run_id} is started; `astraflow status {request.run_id}` shows it")
        say(followed.links["Prefect"])
        return
    if not run_launcher.watch(followed, say):
        raise typer.Exit(EXIT_FAILED)


def cancel(run: Annotated[str, typer.Argument(help="Run id.")]) -> None:
    """End one run; the stack and other runs continue.

    `astraflow run --run-id RUN` resumes it.

    Example:  astraflow cancel tiny-20260101-120000-ab12
    """
    from deployments.cli import run_follower
    from storage.run import runs as stored_runs

    try:
        stored = stored_runs.open_run(store(), run)
    except ConfigError:
        if not run_follower.cancel_before_it_began(home(), run):
            raise
        say(f"{run} is cancelled; it had not started")
        return
    if (previous_stop := stored_runs.read_stop(stored)) is not None:
        if previous_stop.state != "completed" and run_follower.cancel_before_it_began(
            home(), run, previous_stop
        ):
            say(f"{run} is cancelled; it had not resumed")
        else:
            say(f"{run} is already {previous_stop.state}: {previous_stop.reason}")
        return
    run_follower.cancel(stored)
    say(
        f"{run} is being cancelled; `astraflow run --run-id {run}` with the same settings resumes "
        "it"
    )


def doctor(as_json: AsJson = False) -> None:
    """Check this machine and the environment. Exit code 1 if something must be fixed.

    Example:  astraflow doctor
    """
    from dataclasses import asdict

    from deployments.cli import tables
    from deployments.cli.doctor import examine

    checks = examine(home())
    show([asdict(check) for check in checks] if as_json else tables.checks_table(checks), as_json)
    if any(check.verdict == "fail" for check in checks):
        raise typer.Exit(EXIT_FAILED)
