"""The flow `rollout`: one rollout worker."""

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.services import attempt_names, run_service


@flow(name="rollout", flow_run_name=attempt_names.of_this_flow_run)
def rollout(run_id: str, region: str, member: str = "", attempt: int = 0) -> State[None] | None:
    """Lease orders, run the workflow, write shards, and load new weights during generation.

    On SIGTERM it finishes leased orders or releases them.
    """
    return run_service.run_rollout(run_id, member or f"rollout-{region}-0", attempt, region)
