"""The flow `mirror`: copies the weights to a region's store."""

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.services import attempt_names, run_service


@flow(name="mirror", flow_run_name=attempt_names.of_this_flow_run)
def mirror(run_id: str, region: str, member: str = "", attempt: int = 0) -> State[None] | None:
    """Copy every new version of every policy to the region's store, up to the last one."""
    return run_service.run_mirror(run_id, member or f"mirror-{region}", attempt, region)
