"""The work pools: one for rollout workers and mirrors, one for trainers, one for the control flows.

A pool has a name and the command that starts a flow run's process. Prefect workers serve it on any
machine that has this project installed (`docs/deploying.md`). A region is a work queue of the pool
`rollout`: Prefect creates it with the first flow run that is launched into it
(`tasks/supervision/launcher.py`), so no region is registered.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.registration.client import connected
from tasks.services.prefect_settings import import_prefect

ENTRYPOINT = "deployments.registration.flow_entrypoint"


@dataclass(frozen=True)
class Pool:
    """One work pool. Example: `Pool("trainers", "One trainer for each policy.")`."""

    name: str
    description: str


POOLS = (
    Pool("rollout", "Rollout workers and mirrors; each region has a work queue with its name."),
    Pool("trainers", "One trainer for each policy."),
    Pool("control", "Supervisors, dataflows, base models, evaluations and gc."),
)


def command(python: str) -> str:
    """Return the command of a flow run's process, quoted as for a shell: a worker splits it into
    words by the same rules.

    A worker starts it unchanged, which takes a third of the CPU time of preparing a workspace for
    each flow run.
    """
    return shlex.join([python, "-m", ENTRYPOINT])


def create(api_url: str, python: str, environment: Mapping[str, str]) -> None:
    """Create or update the pools on a Prefect server.

    `python` is the interpreter on the workers' machines; `environment` is that of the flow runs.
    """
    import_prefect()
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    variables = template["variables"]["properties"]
    variables["command"]["default"] = command(python)
    variables["stream_output"]["default"] = False
    variables["env"]["default"] = dict(environment)
    with connected(api_url) as client:
        for pool in POOLS:
            definition = WorkPoolCreate(
                name=pool.name,
                type="process",
                description=pool.description,
                base_job_template=template,
            )
            client.create_work_pool(definition, overwrite=True)
