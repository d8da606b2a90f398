"""The flow `evaluate`: plays the held-out prompts with exact versions, before, during and after
training.
"""

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.services import run_service


@flow(name="evaluate", flow_run_name="{member} · {run_id}")
def evaluate(run_id: str, member: str = "evaluation", attempt: int = 0) -> State[None] | None:
    """Follow the run: evaluate every vector of versions that is due and not yet in the store."""
    return run_service.run_evaluation(run_id, member, attempt)
