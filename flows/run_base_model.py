"""The flow `prepare`: publishes every policy's base model as version 0."""

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.services import attempt_names, run_service


@flow(name="prepare", flow_run_name=attempt_names.of_this_flow_run)
def prepare(run_id: str, member: str = "base-model", attempt: int = 0) -> State[None] | None:
    """Build or load the base models of a run, and publish version 0 of every policy.

    Built models are cached by a hash of their settings.
    """
    return run_service.run_base_model(run_id, member, attempt)
