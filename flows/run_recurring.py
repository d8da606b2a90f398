"""The flow of `astraflow/nightly`: a run that begins with the champion, a gate, and a decision."""

from typing import Annotated, Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Failed
from pydantic import Field

from flows.run_supervisor import astraflow
from storage.errors import AstraFlowError
from tasks.recurring import night
from tasks.recurring.planning import Schedule


@flow(name="astraflow", validate_parameters=True)
async def recurring(
    recipe: Annotated[
        str, Field(description="Name of a file in recipes/, a path, or the YAML text itself.")
    ] = "multi_policy_tiny",
    name: Annotated[
        str | None,
        Field(
            description="Name of the recurring training and of its promotion log. Empty: the "
            "recipe's name.",
            max_length=80,
        ),
    ] = None,
    overrides: Annotated[
        dict[str, Any] | None,
        Field(description='Other values of the recipe by dotted key, such as {"steps": 40}.'),
    ] = None,
    begin_with: Annotated[
        Literal["champion", "recipe"],
        Field(description="The weights of the champion, or the recipe's models."),
    ] = "champion",
    catch_up: Annotated[
        bool,
        Field(
            description="Begin nights that are late, too. Without it, a late night is skipped, "
            "and the next one uses its data."
        ),
    ] = False,
    late_limit_h: Annotated[
        float, Field(description="A night is late after this number of hours.", gt=0, le=8760)
    ] = 12.0,
    night_id: Annotated[
        str | None,
        Field(
            description="The night to begin or to take up, as YYYYMMDD-HHMM in UTC. Empty: the "
            "scheduled time of this flow run."
        ),
    ] = None,
    notify: Annotated[
        str | None,
        Field(
            description="A notification block for the outcome of the night, such as "
            "slack-webhook/on-call."
        ),
    ] = None,
) -> State[None]:
    """Train from the champion on the data since the last night, and promote what is better.

    Started again for the same night, it goes on where it was. A night is skipped while an earlier
    one still runs, and when there is no new data.
    """
    try:
        return await night.run(
            night.NightRequest(
                recipe=recipe,
                overrides=overrides or {},
                name=name,
                night=night_id,
                schedule=Schedule(
                    late_limit_s=late_limit_h * 3600,
                    catches_up=catch_up,
                    begins_with_champion=begin_with == "champion",
                ),
                notify=notify,
            ),
            train=astraflow,
        )
    except AstraFlowError as error:  # a message for the user, who does not need a traceback
        get_run_logger().error(str(error))
        return Failed(message=str(error))
