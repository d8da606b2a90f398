"""The flow `train`: the trainer of one policy."""

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.services import attempt_names, run_service


@flow(name="train", flow_run_name=attempt_names.of_this_flow_run)
def train(run_id: str, policy: str, member: str = "", attempt: int = 0) -> State[None] | None:
    """Train on the policy's batches in order, publish a version after each, and write checkpoints.

    On SIGTERM it writes a checkpoint and ends.
    """
    return run_service.run_trainer(run_id, member or f"trainer-{policy}", attempt, policy)
