"""The flow `astraflow`: one training run, from recipe to report; it supervises the other flows."""

from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Completed, Failed
from pydantic import Field

from storage.errors import AstraFlowError
from tasks.supervision import suspension
from tasks.supervision.lifecycle import run_training


@flow(name="astraflow", validate_parameters=True)
async def astraflow(
    run_id: Annotated[
        str | None,
        Field(
            description="Name of the run; an existing run is resumed. Empty: the name of this "
            "flow run.",
            max_length=100,
        ),
    ] = None,
    recipe: Annotated[
        str, Field(description="Name of a file in recipes/, a path, or the YAML text itself.")
    ] = "multi_policy_tiny",
    steps: Annotated[int | None, Field(description="Training steps of every policy.", ge=1)] = None,
    seed: Annotated[int | None, Field(description="Seed of everything random.", ge=0)] = None,
    max_staleness: Annotated[
        int | None,
        Field(
            description="Maximum age of a trained sequence in versions; 0: synchronous.",
            ge=0,
        ),
    ] = None,
    samples_per_prompt: Annotated[
        int | None, Field(description="Episodes per prompt.", ge=1)
    ] = None,
    overrides: Annotated[
        dict[str, Any] | None,
        Field(
            description="Other values of the recipe by dotted key, such as "
            '{"policies.solver.train.lr": 1e-4}.'
        ),
    ] = None,
) -> State[str] | str:
    """Train the policies of a recipe together.

    Rollout workers, the dataflow, one trainer per policy and the evaluation are started on their
    work pools, monitored, and replaced when they fail. The run is in the object store: starting
    this flow again with the same run id resumes it.
    """
    parameters = {
        "steps": steps,
        "seed": seed,
        "data.max_staleness": max_staleness,
        "data.samples_per_prompt": samples_per_prompt,
    }
    assigned = {key: value for key, value in parameters.items() if value is not None}
    try:
        outcome = await run_training(run_id, recipe, {**(overrides or {}), **assigned})
    except AstraFlowError as error:  # a message for the user, who does not need a traceback
        get_run_logger().error(str(error))
        return await suspension.settle(Failed(message=str(error)))
    if outcome.state == "suspended":
        return await suspension.suspend(outcome.run_id, outcome.reason)
    if outcome.state == "cancelled":
        return await suspension.settle(Cancelled(message=outcome.reason))
    if outcome.state == "exhausted":
        return await suspension.settle(Completed(message=outcome.reason))
    await suspension.settle(Completed(message=outcome.reason))
    return outcome.run_id
