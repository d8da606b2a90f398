"""Creation of the work pools (`pools.py`) at a Prefect server, and AstraFlow's part of those that
exist: the command of a flow run's process, and the variables with the addresses of store and
MLflow.

A pool that exists keeps its type, image, namespace, limit and all else that somebody has set.
Prefect workers serve a pool on any machine that has this project installed (`docs/deploying.md`). A
region is a work queue of the pool `rollout`; Prefect creates one without a limit with the first
flow run that is launched into it (`tasks/supervision/launcher.py`).
"""

import copy
import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from deployments.registration.client import connected
from deployments.registration.pools import ROLLOUT, Pool
from storage.errors import ConfigError
from storage.records.types import Json
from tasks.services.prefect_settings import import_prefect

ENTRYPOINT = "deployments.registration.flow_entrypoint"


def command(python: str) -> str:
    """Return the command of a flow run's process, quoted as for a shell: a worker splits it into
    words by the same rules.

    A worker starts it unchanged, which takes a third of the CPU time of preparing a workspace for
    each flow run.
    """
    return shlex.join([python, "-m", ENTRYPOINT])


def create_or_merge(
    api_url: str,
    pools: Mapping[str, Pool],
    python: str,
    environment: Mapping[str, str],
    own_variables: Collection[str],
) -> list[str]:
    """Create the pools that a Prefect server lacks, and set AstraFlow's part of the others.

    Args:
        api_url: address of the server.
        pools: by name.
        python: the interpreter on the workers' machines.
        environment: that of all flow runs; its names are among `own_variables`.
        own_variables: environment variables that AstraFlow alone sets; one that a pool has and
            `environment` lacks is removed from the pool.

    Returns:
        One sentence for each pool that was created or changed.

    Raises:
        ConfigError: the server does not know a pool's type, or the type lacks a job variable.
    """
    import_prefect()
    said: list[str] = []
    with connected(api_url) as client:
        for name, pool in pools.items():
            stored = _stored(client, name)
            kind = pool.type if stored is None else stored.type
            template = _template(client, name, kind) if stored is None else stored.base_job_template
            wanted = with_defaults(name, kind, template, pool.job_variables)
            variables = {**environment, **pool.environment}
            wanted = with_own_part(wanted, kind, command(python), variables, own_variables)
            if stored is None:
                _create(client, name, pool, wanted)
                said.append(f"created the work pool {name} of type {kind}")
            else:
                said.extend(_update(client, name, pool, stored, wanted))
            if name == ROLLOUT:
                _limit_regions(client, pool)
    return said


def types(api_url: str, names: Iterable[str]) -> dict[str, str]:
    """Return the types of those of the pools that a Prefect server has."""
    with connected(api_url) as client:
        found = {name: _stored(client, name) for name in names}
    return {name: str(pool.type) for name, pool in found.items() if pool is not None}


def with_defaults(name: str, kind: str, template: Json, values: Mapping[str, Any]) -> Json:
    """Return a copy of a job template with other default values of its variables.

    Raises:
        ConfigError: the template has no such variable.
    """
    changed = copy.deepcopy(template)
    variables = _variables(changed)
    for variable, value in values.items():
        if variable not in variables:
            raise ConfigError(
                f"work pool {name}: jobs of type {kind} have no variable {variable}; they have "
                f"{', '.join(sorted(variables))}"
            )
        variables[variable]["default"] = value
    return changed


def with_own_part(
    template: Json,
    kind: str,
    command: str,
    environment: Mapping[str, str],
    own_variables: Collection[str],
) -> Json:
    """Return a copy of a job template with what AstraFlow sets in any pool."""
    changed = copy.deepcopy(template)
    variables = _variables(changed)
    variables.setdefault("command", {"type": "string"})["default"] = command
    if kind == "process":  # its jobs die with their worker otherwise (`docs/deploying.md`)
        variables.setdefault("stream_output", {"type": "boolean"})["default"] = False
    stored = variables.setdefault("env", {"type": "object"}).get("default") or {}
    others = {name: value for name, value in stored.items() if name not in own_variables}
    variables["env"]["default"] = {**others, **environment}
    return changed


def _variables(template: Json) -> dict[str, Any]:
    variables: dict[str, Any] = template.setdefault("variables", {}).setdefault("properties", {})
    return variables


def _stored(client: Any, name: str) -> Any:
    """Return the pool as the server has it; None for none."""
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_work_pool(name)
    except ObjectNotFound:
        return None


def _template(client: Any, name: str, kind: str) -> Json:
    """Return the job template of a type of pools, which the server's collection has."""
    if kind == "process":
        from prefect.workers.process import ProcessWorker

        return dict(ProcessWorker.get_default_base_job_template())
    known = {
        worker: each
        for package in client.read_worker_metadata().values()
        for worker, each in package.items()
    }
    if kind not in known:
        raise ConfigError(
            f"work pool {name}: the Prefect server has no type {kind!r}; it has "
            f"{', '.join(sorted(known))}"
        )
    return dict(known[kind]["default_base_job_configuration"])


def _create(client: Any, name: str, pool: Pool, template: Json) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate

    client.create_work_pool(
        WorkPoolCreate(
            name=name,
            type=pool.type,
            description=pool.description,
            base_job_template=template,
            concurrency_limit=pool.concurrency,
        )
    )


def _update(client: Any, name: str, pool: Pool, stored: Any, template: Json) -> list[str]:
    from prefect.client.schemas.actions import WorkPoolUpdate

    said = []
    if "type" in pool.model_fields_set and pool.type != stored.type:
        said.append(f"the work pool {name} keeps its type {stored.type}; {pool.type} is not set")
    changes: dict[str, Any] = {}
    if template != stored.base_job_template:
        changes["base_job_template"] = template
    if pool.concurrency is not None and pool.concurrency != stored.concurrency_limit:
        changes["concurrency_limit"] = pool.concurrency
    if changes:
        client.update_work_pool(name, WorkPoolUpdate(**changes))
        said.append(f"changed the work pool {name}: {', '.join(sorted(changes))}")
    return said


def _limit_regions(client: Any, pool: Pool) -> None:
    """Create the work queues of regions with a limit; set the limit of those that exist."""
    from prefect.exceptions import ObjectNotFound

    for region, queue in pool.regions.items():
        try:
            stored = client.read_work_queue_by_name(region, work_pool_name=ROLLOUT)
        except ObjectNotFound:
            client.create_work_queue(
                region, concurrency_limit=queue.concurrency, work_pool_name=ROLLOUT
            )
        else:
            if queue.concurrency is not None and queue.concurrency != stored.concurrency_limit:
                client.update_work_queue(stored.id, concurrency_limit=queue.concurrency)
