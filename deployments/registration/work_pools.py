"""The work pools: one for each region of rollout workers, one for trainers, one for everything that steers.

A pool is only a name and the way a flow run becomes a process. Workers serve it from any machine that has this project
installed; `docs/deploying.md` tells how.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.registration.client import connected

ENGINE = "{python} -m deployments.registration.flow_entrypoint"
"""Given a command, a worker starts it as it is: a third of the CPU time of preparing a workspace for each flow run."""


@dataclass(frozen=True)
class Pool:
    name: str
    description: str


POOLS = (
    Pool("rollout-us-east", "Rollout workers of region us-east: they play episodes and write shards."),
    Pool("rollout-eu-west", "Rollout workers of region eu-west: they play episodes and write shards."),
    Pool("trainers", "One trainer for each policy."),
    Pool("control", "Supervisors, dataflows, base models, evaluations and gc."),
)


def create(api_url: str, python: str, environment: Mapping[str, str]) -> None:
    """Creates the pools on a Prefect server, or updates them. `python` is the interpreter on the workers' machines."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    variables = template["variables"]["properties"]
    variables["command"]["default"] = ENGINE.format(python=python)
    variables["stream_output"]["default"] = False
    variables["env"]["default"] = dict(environment)
    with connected(api_url) as client:
        for pool in POOLS:
            wanted = WorkPoolCreate(name=pool.name, type="process", description=pool.description, base_job_template=template)
            client.create_work_pool(wanted, overwrite=True)
