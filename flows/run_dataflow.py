"""The flow `dataflow`: makes orders from prompts and batches from shards.

Shards are ingested by parallel tasks.
"""

from typing import Literal

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.services import attempt_names, run_service
from tasks.services.sigterm import drained


@flow(name="dataflow-window", flow_run_name="window {window} · {run_id}")
def window_of_dataflow(
    run_id: str, member: str, attempt: int, window: int
) -> Literal["done", "full", "stopped"]:
    """Run the dataflow for a bounded number of shards.

    The memory of a flow run grows with every task, so each window is a separate flow run, which
    rebuilds its state from the store.
    """
    return run_service.run_dataflow_window(run_id, member, attempt)


@flow(name="dataflow", flow_run_name=attempt_names.of_this_flow_run)
def dataflow(run_id: str, member: str = "dataflow", attempt: int = 0) -> State[None] | None:
    """Write orders and every policy's batches until each policy has all of its steps."""
    window = 0
    while (ended := window_of_dataflow(run_id, member, attempt, window)) == "full":
        window += 1
    return drained() if ended == "stopped" else None
