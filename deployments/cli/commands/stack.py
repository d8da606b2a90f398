"""The commands for the stack and the runs on it.

Each command reads its arguments, calls one module and prints the result. Modules that are slow to
import are imported inside the command that needs them.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli import run_id_completion
from deployments.cli.output.terminal import (
    EXIT_FAILED,
    AsJson,
    NamedRun,
    local_path,
    say,
    show,
    store,
    warn,
)
from deployments.paths import home
from storage.errors import ConfigError
from tasks.terminal_text import one_line

if TYPE_CHECKING:
    from deployments.cli.run_launcher import RunRequest
    from storage.records.control import Stop
    from storage.store.object_store import ObjectStore


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
    pools: Annotated[
        Path | None,
        typer.Option(
            parser=local_path,
            help="A file of work pools: types, images, limits, variables, regions.",
        ),
    ] = None,
    notify: Annotated[
        str,
        typer.Option(
            envvar="ASTRAFLOW_NOTIFY",
            help="A notification block for failed runs and idle pools, such as "
            "slack-webhook/on-call.",
        ),
    ] = "",
) -> None:
    """Register work pools, deployments and automations at a Prefect server.

    The server is that of PREFECT_API_URL, else that of the local stack. A pool that exists keeps
    its type, image, namespace, limit and variables; AstraFlow sets its command, and the addresses
    of store and MLflow. An automation that is switched off stays off.

    Example:  astraflow deploy --directory /opt/astraflow --python python
    """
    from deployments.paths import PROJECT
    from deployments.registration import automations, deployments, work_pools
    from deployments.registration import pools as pool_files
    from deployments.stack import environment, up_down

    environment.refuse_bad_addresses()
    wanted = pool_files.load() if pools is None else pool_files.load(pools)
    api_url = up_down.adopt_server(home())
    shared = environment.of_pool({**environment.UNTRACKED, **environment.FLOW_RUN, **os.environ})
    interpreter = python or sys.executable
    changes = work_pools.create_or_merge(api_url, wanted, interpreter, shared, environment.POOL)
    for change in changes:
        say(f"{api_url}: {change}")
    for name in deployments.register(api_url, directory=directory or str(PROJECT)):
        say(f"{api_url}: {name}")
    for name in automations.register(api_url, notify):
        say(f"{api_url}: {name}")


def worker(
    pool: Annotated[str, typer.Option(help="control, trainers or rollout.")],
    region: Annotated[
        str, typer.Option(help="Region that it serves, of the pool rollout; default: all.")
    ] = "",
    gpus: Annotated[
        str, typer.Option(help="GPUs of its flow runs, such as 0,1; default: those it can see.")
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Most flow runs at a time; default: 1 with --gpus, else any."),
    ] = None,
) -> None:
    """Serve a work pool on this machine, until Ctrl-C.

    The Prefect server is that of PREFECT_API_URL, else that of the local stack. Credentials of the
    store are those of the environment, or of the block that ASTRAFLOW_STORE_SECRET names. One
    worker for each GPU: start several, each with its own --gpus.

    Example:  astraflow worker --pool rollout --region eu-west --gpus 0
    """
    from deployments.stack import another_worker

    another_worker.serve(home(), pool, region, gpus, limit, say)


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
        str | None,
        typer.Option(
            help="Name of the run; an existing run is resumed.",
            autocompletion=run_id_completion.suggest,
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the run is started.")
    ] = False,
) -> None:
    """Train: start the local stack if it is not running, start a run and show its progress.

    Example:  astraflow run --set steps=40 --set policies.solver.train.lr=1e-4
    """
    from deployments.cli import run_launcher

    _start(run_launcher.prepare(deployment, recipe, assignments or [], run_id), detach)


def _start(request: "RunRequest", detach: bool) -> None:
    """Start a run and, unless `detach`, show its progress."""
    from deployments.cli import run_launcher

    followed = run_launcher.start(home(), request, say)
    if detach:
        say(f"{request.run_id} is started; `astraflow status {request.run_id}` shows it")
        say(followed.links["Prefect"])
        return
    if not run_launcher.watch(followed, say):
        raise typer.Exit(EXIT_FAILED)


def continue_(
    run: Annotated[
        str,
        typer.Argument(
            help="Run id of the run to continue.", autocompletion=run_id_completion.suggest
        ),
    ],
    steps: Annotated[int, typer.Option(min=1, metavar="+N", help="Steps of the new run.")],
    version: Annotated[
        list[str] | None,
        typer.Option(
            help="Number or tag of the version to begin with, or latest (default); POLICY@VERSION "
            "for one policy; repeatable."
        ),
    ] = None,
    with_optimizer: Annotated[
        bool,
        typer.Option(
            "--with-optimizer", help="Begin with the optimizers' moments of that step, too."
        ),
    ] = False,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a value of the recipe; repeatable."
        ),
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the new run.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the run is started.")
    ] = False,
) -> None:
    """Continue a run: a new run with its recipe begins with its weights, which are not copied.

    Its steps begin at 0, its prompts where those of the other run ended.

    Example:  astraflow continue tiny-20260101-120000-ab12 --steps +40 --version best
    """
    from deployments.cli import continuation

    request = continuation.prepare(
        store(),
        run,
        steps,
        version or [],
        assignments or [],
        run_id,
        with_optimizer=with_optimizer,
    )
    _start(request, detach)


def cancel(run: NamedRun) -> None:
    """End one run; the stack and other runs continue. A suspended run is ended, too.

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
    previous_stop = stored_runs.read_stop(stored)
    if previous_stop is None:
        run_follower.cancel(stored)
        say(
            f"{run} is being cancelled; `astraflow run --run-id {run}` with the same settings "
            "resumes it"
        )
    elif previous_stop.state != "completed" and run_follower.cancel_before_it_began(
        home(), run, previous_stop
    ):
        say(f"{run} is cancelled; it had not resumed")
    elif previous_stop.state in ("suspended", "cancelled"):
        _cancel_suspended(stored, run, previous_stop)
    else:
        say(f"{run} is already {previous_stop.state}: {one_line(previous_stop.reason)}")


def _cancel_suspended(stored: "ObjectStore", run: str, previous_stop: "Stop") -> None:
    """Cancel a suspended run. Its flow run is resumed, and takes the closing steps."""
    from deployments.cli import run_follower
    from deployments.registration import flow_runs
    from deployments.stack import up_down

    if previous_stop.state == "suspended":
        _wait_while_taken_up(stored, run, previous_stop)
        run_follower.cancel(stored)
    try:
        resumed = flow_runs.resume_if_suspended(up_down.adopt_server(home()), run)
    except ConfigError as error:
        if previous_stop.state == "suspended":
            warn(f"{run} is cancelled in the store, its flow run in Prefect is as before: {error}")
            warn("repeat the command when Prefect answers, so that the run is closed")
            return
        resumed = None
    if resumed:
        say(f"{run} is being cancelled: its flow run goes on with the closing steps")
    elif previous_stop.state == "suspended":
        say(f"{run} is cancelled")
    else:
        say(f"{run} is already cancelled: {one_line(previous_stop.reason)}")


def _wait_while_taken_up(stored: "ObjectStore", run: str, suspension: "Stop") -> None:
    """Wait while a supervisor that was started by a resume is about to delete the suspension: it
    could delete a cancellation instead.
    """
    import time

    from deployments.registration import flow_runs
    from deployments.stack import up_down
    from storage.run import runs as stored_runs

    is_told = False
    try:
        server = up_down.adopt_server(home())
        while stored_runs.read_stop(stored) == suspension and flow_runs.is_taken_up(
            server, run, suspension.at_s
        ):
            if not is_told:
                say(f"{run} is being resumed: it is cancelled when its supervisor has begun")
            is_told = True
            time.sleep(flow_runs.POLL_S)
    except ConfigError:  # without Prefect nothing is resumed either
        return


def suspend(run: NamedRun) -> None:
    """Suspend a run: workers finish their orders, trainers save a checkpoint, and all leave.

    `astraflow resume RUN`, or the button Resume on Prefect's page, goes on with it.

    Example:  astraflow suspend tiny-20260101-120000-ab12
    """
    from deployments.cli import run_follower
    from storage.run import runs as stored_runs

    stored = stored_runs.open_run(store(), run)
    before = stored_runs.read_stop(stored)
    stop = before or run_follower.suspend(stored)
    if stop.state != "suspended":
        raise ConfigError(f"{run} is {stop.state}, so it cannot be suspended: {stop.reason}")
    if before is not None:
        _refuse_to_suspend_what_is_being_resumed(run, before)
        say(
            f"{run} is already suspended: {one_line(stop.reason)}; `astraflow resume {run}` goes on"
        )
        return
    say(f"{run} is being suspended; `astraflow resume {run}` goes on when its members have left")


def _refuse_to_suspend_what_is_being_resumed(run: str, before: "Stop") -> None:
    """Raise ConfigError while the supervisor of a resumed run has not begun: it would go on."""
    from deployments.registration import flow_runs
    from deployments.stack import up_down

    try:
        resumed = flow_runs.is_being_resumed(up_down.adopt_server(home()), run, before.at_s)
    except ConfigError:  # without Prefect nothing is resumed either
        return
    if resumed:
        raise ConfigError(
            f"{run} is being resumed; suspend it when `astraflow status {run}` shows it running"
        )


def resume(run: NamedRun) -> None:
    """Resume a suspended run in its flow run in Prefect; a worker then starts its supervisor.

    Example:  astraflow resume tiny-20260101-120000-ab12
    """
    from deployments.registration import flow_runs
    from deployments.stack import up_down
    from storage.run import runs as stored_runs

    stored = stored_runs.open_run(store(), run)
    stop = stored_runs.read_stop(stored)
    if stop is None:
        raise ConfigError(f"{run} is not suspended; `astraflow status {run}` shows what it does")
    again = f"`astraflow run --run-id {run}` with the same settings"
    if stop.state != "suspended":
        remedy = "" if stop.state == "completed" else f"; {again} takes it up"
        raise ConfigError(f"{run} is {stop.state}, not suspended: {stop.reason}{remedy}")
    if flow_runs.resume(up_down.adopt_server(home()), run, stop.at_s) is None:
        raise ConfigError(f"Prefect has no suspended flow run of {run}; start it with {again}")
    say(f"{run} is resumed; `astraflow attach {run}` shows it")


def doctor(
    recipe: Annotated[
        str | None,
        typer.Option(help="Also measure how far sampler and trainer of this recipe disagree."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and the environment. Exit code 1 if something must be fixed.

    Example:  astraflow doctor --recipe multi_policy_tiny
    """
    from dataclasses import asdict

    from deployments.cli.doctor.machine import examine
    from deployments.cli.doctor.recipe import examine_recipe
    from deployments.cli.output import tables
    from tasks.recipes.loader import load

    config = None if recipe is None else load(recipe)
    checks = examine(home())
    if config is not None:
        checks += examine_recipe(store(), config)
    show([asdict(check) for check in checks] if as_json else tables.checks_table(checks), as_json)
    if any(check.verdict == "fail" for check in checks):
        raise typer.Exit(EXIT_FAILED)
