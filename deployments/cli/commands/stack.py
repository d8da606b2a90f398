"""The commands for the stack, and those that start a run on it.

Each command reads its arguments, calls one module and prints the result. Modules that are slow to
import are imported inside the command that needs them.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli import run_id_completion
from deployments.cli.output.terminal import EXIT_FAILED, AsJson, local_path, say, show, store
from deployments.paths import home

if TYPE_CHECKING:
    from deployments.cli.run_launcher import RunRequest


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
    from tasks.services import notification_block

    environment.refuse_bad_addresses()
    notification_block.check_name("--notify", notify)
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
    from deployments.cli.output.progress import shown_stages
    from tasks.recipes.loader import load

    config = None if recipe is None else load(recipe)
    checks = examine(home())
    if config is not None:
        with shown_stages() as progress:
            checks += examine_recipe(store(), config, progress)
    show([asdict(check) for check in checks] if as_json else tables.checks_table(checks), as_json)
    if any(check.verdict == "fail" for check in checks):
        raise typer.Exit(EXIT_FAILED)
