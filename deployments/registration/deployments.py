"""The deployments, and their registration at a Prefect server.

Each flow file is imported once, in this process, for the types and descriptions of its parameters:
Prefect's web page shows them as a form. No deployment has a concurrency limit: its lease would end
a week-long run when the server is unreachable.
"""

import hashlib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from deployments.paths import PROJECT
from deployments.registration.client import connected
from storage.errors import ConfigError
from tasks.services.prefect_settings import import_prefect

TAG = "astraflow"
"""Tag of every deployment and so of every flow run: `down` cancels the flow runs with it."""
NIGHTLY = "nightly"
"""Name of the deployments with a schedule."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One deployment.

    Example: `Deployment(flow="train", name="trainer", entrypoint="flows/run_trainer.py:train",
    pool="trainers", description="…")`.
    """

    flow: str
    """The flow's name: the part before the slash in `train/trainer`."""
    name: str
    entrypoint: str
    """`folder/file.py:function`, relative to the project."""
    pool: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    cron: str = ""
    """A schedule in UTC, first paused. A later registration keeps the user's changes to it and to
    the parameters of its runs.
    """
    cron_active: bool = False


SUPERVISOR = "flows/run_supervisor.py:astraflow"

DEPLOYMENTS = (
    Deployment(
        flow="astraflow",
        name="multi-policy",
        entrypoint=SUPERVISOR,
        pool="control",
        description="Trains a solver and a verifier together, in two regions, on this machine.",
        parameters={"recipe": "multi_policy_tiny"},
    ),
    Deployment(
        flow="astraflow",
        name="single-policy",
        entrypoint=SUPERVISOR,
        pool="control",
        description="Trains the solver alone.",
        parameters={"recipe": "single_policy_tiny"},
    ),
    Deployment(
        flow="astraflow",
        name=NIGHTLY,
        entrypoint="flows/run_recurring.py:recurring",
        pool="control",
        description="Trains every night from the champion, and promotes what is better. Its "
        "schedule is off at first.",
        parameters={"recipe": "multi_policy_tiny"},
        cron="0 2 * * *",
    ),
    Deployment(
        flow="prepare",
        name="base-model",
        entrypoint="flows/run_base_model.py:prepare",
        pool="control",
        description="Builds or downloads the base models of a run. Started by its supervisor.",
    ),
    Deployment(
        flow="dataflow",
        name="dataflow",
        entrypoint="flows/run_dataflow.py:dataflow",
        pool="control",
        description="Makes orders from prompts and batches from shards. "
        "Started by a run's supervisor.",
    ),
    Deployment(
        flow="rollout",
        name="worker",
        entrypoint="flows/run_rollout.py:rollout",
        pool="rollout",
        description="A rollout worker. "
        "Started by a run's supervisor, in the work queue of its region.",
    ),
    Deployment(
        flow="mirror",
        name="mirror",
        entrypoint="flows/run_mirror.py:mirror",
        pool="rollout",
        description="Copies the weights to a region's store. "
        "Started by a run's supervisor, in the work queue of the region.",
    ),
    Deployment(
        flow="train",
        name="trainer",
        entrypoint="flows/run_trainer.py:train",
        pool="trainers",
        description="The trainer of one policy. Started by a run's supervisor.",
    ),
    Deployment(
        flow="train-node",
        name="trainer-node",
        entrypoint="flows/run_trainer_node.py:train_node",
        pool="trainers",
        description="A further machine of a trainer with several nodes. "
        "Started by a run's supervisor.",
    ),
    Deployment(
        flow="evaluate",
        name="evaluation",
        entrypoint="flows/run_evaluation.py:evaluate",
        pool="control",
        description="Evaluates on the held-out prompts. Started by a run's supervisor.",
    ),
    Deployment(
        flow="gc",
        name=NIGHTLY,
        entrypoint="flows/run_gc.py:gc",
        pool="control",
        description="Lists every night which weights are no longer needed; with `apply` it "
        "deletes them. Its schedule is off at first.",
        cron="0 4 * * *",
    ),
)


def register(
    api_url: str, deployments: Iterable[Deployment] = DEPLOYMENTS, directory: str = str(PROJECT)
) -> list[str]:
    """Create or update the deployments on a Prefect server; return their full names.

    `directory` is the project's folder on the workers' machines. Raises ConfigError when a flow
    file cannot be imported, or when the server refuses a deployment.
    """
    from prefect.exceptions import PrefectHTTPStatusError

    names: list[str] = []
    flows: dict[str, Any] = {}
    with connected(api_url) as client:
        for deployment in deployments:
            if deployment.entrypoint not in flows:
                flows[deployment.entrypoint] = flow_of(deployment)
            try:
                _create(client, deployment, flows[deployment.entrypoint], directory)
            except PrefectHTTPStatusError as error:
                raise ConfigError(
                    f"{api_url} refused the deployment {deployment.flow}/{deployment.name}: "
                    f"{error.response.text[:500]}"
                ) from error
            names.append(f"{deployment.flow}/{deployment.name}")
    return names


def import_flows(deployments: Iterable[Deployment] = DEPLOYMENTS) -> None:
    """Import every flow file before `register`. Raises ConfigError when an import fails."""
    import_prefect()
    for deployment in deployments:
        flow_of(deployment)


def digest(root: Path = PROJECT) -> str:
    """Return a digest of the source files that a registration depends on."""
    patterns = ("flows/*.py", "deployments/**/*.py", "*/config.py", "tasks/*/*config.py")
    sources = [source for pattern in patterns for source in root.glob(pattern)]
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def flow_of(deployment: Deployment) -> Any:
    """Import the flow of a deployment. Raises ConfigError when its file cannot be imported."""
    path, function = deployment.entrypoint.split(":")
    module = path.removesuffix(".py").replace("/", ".")
    try:
        flow = getattr(importlib.import_module(module), function)
    except Exception as error:  # a flow file may raise anything; the message names the file
        raise ConfigError(f"{path} cannot be deployed: {type(error).__name__}: {error}") from error
    if flow.name != deployment.flow:
        raise ConfigError(
            f"{path}: the flow is named {flow.name!r}, but it is deployed as {deployment.flow!r}; "
            "make them equal"
        )
    return flow


def form(flow: Any) -> dict[str, Any]:
    """Return the JSON schema of a flow's parameters, which the web page shows as a form.

    Prefect reads descriptions from the docstring alone; those of
    `Annotated[…, Field(description=…)]` are added here.
    """
    from prefect.utilities.callables import parameter_schema

    schema = parameter_schema(flow).model_dump_for_openapi()
    for name, hint in get_type_hints(flow.fn, include_extras=True).items():
        descriptions = [
            data.description
            for data in getattr(hint, "__metadata__", ())
            if getattr(data, "description", None)
        ]
        if descriptions and name in schema["properties"]:
            schema["properties"][name].setdefault("description", descriptions[0])
    return schema


def _create(client: Any, deployment: Deployment, flow: Any, directory: str) -> None:
    registered = _registered(client, deployment) if deployment.cron else None
    schema = form(flow)
    changed = {
        name: value
        for name, value in (registered.parameters if registered else {}).items()
        if name in schema["properties"]
    }
    client.create_deployment(
        flow_id=client.create_flow_from_name(flow.name),
        name=deployment.name,
        entrypoint=deployment.entrypoint,
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": directory}}],
        work_pool_name=deployment.pool,
        parameters={**deployment.parameters, **changed},
        parameter_openapi_schema=schema,
        enforce_parameter_schema=True,
        description=f"{deployment.description}\n\n{flow.description or ''}".strip(),
        tags=[TAG],
        schedules=_schedules(deployment, registered),
    )


def _registered(client: Any, deployment: Deployment) -> Any:
    """Return the deployment as the server has it; None when it is new."""
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(f"{deployment.flow}/{deployment.name}")
    except ObjectNotFound:
        return None


def _schedules(deployment: Deployment, registered: Any) -> list[Any]:
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    if not deployment.cron:
        return []
    active = (
        registered.schedules[0].active
        if registered and registered.schedules
        else deployment.cron_active
    )
    schedule = CronSchedule(cron=deployment.cron, timezone="UTC")
    return [DeploymentScheduleCreate(schedule=schedule, active=active, slug=deployment.name)]
