"""The flow `evaluate`: evaluates versions on held-out prompts before, during and after training."""

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.services import attempt_names, run_service


@flow(name="evaluate", flow_run_name=attempt_names.of_this_flow_run)
def evaluate(run_id: str, member: str = "evaluation", attempt: int = 0) -> State[None] | None:
    """Evaluate every combination of versions that is due and has no stored evaluation yet."""
    return run_service.run_evaluation(run_id, member, attempt)
