"""The flow `train-node`: a node of a trainer on several machines."""

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.services import attempt_names, run_service


@flow(name="train-node", flow_run_name=attempt_names.of_this_flow_run)
def train_node(
    run_id: str, policy: str, node: int, member: str = "", attempt: int = 0
) -> State[None] | None:
    """Compute a part of every step of the policy's trainer, and end with it."""
    member = member or f"trainer-{policy}-node-{node}"
    return run_service.run_trainer_node(run_id, member, attempt, policy, node)
