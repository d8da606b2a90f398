"""The flow `gc`: lets go of weights that no kept version needs, run by run. On a schedule, once
that is switched on.
"""

from typing import Annotated

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Failed
from pydantic import Field

from storage.errors import AstraFlowError
from storage.store import object_store
from storage.weights.retention import Retention
from tasks import garbage_collection
from tasks.services import store_credentials


@flow(name="gc", flow_run_name="gc, apply {apply}", validate_parameters=True)
def gc(
    run_ids: Annotated[
        list[str] | None,
        Field(description="Runs; empty: all runs of the store that are not frozen."),
    ] = None,
    last: Annotated[
        int, Field(description="Keep the newest so many versions of each policy.", ge=1)
    ] = 5,
    every: Annotated[
        int, Field(description="Keep every so-manieth version; 0: none of them.", ge=0)
    ] = 20,
    keep: Annotated[
        list[str] | None,
        Field(description="Keep these, each POLICY@VERSION, where a run has them."),
    ] = None,
    grace_h: Annotated[float, Field(description="Keep what is younger, in hours.", ge=0)] = 1.0,
    apply: Annotated[
        bool, Field(description="Do it; without this, only say what would go.")
    ] = False,
) -> State[None] | None:
    """Let go of weights that no kept version needs, at home and in mirrors, and of what killed
    writers left.

    Manifests stay, so every run can still be verified and resumed. What stays and what goes is
    written as an artifact. A run that cannot be worked on is told and skipped; the others go on,
    and the flow run ends as failed.
    """
    wanted, log = Retention(last, every, grace_s=grace_h * 3600), get_run_logger()
    try:
        store_credentials.load()
        done = garbage_collection.collect(
            object_store.default_store(),
            run_ids or [],
            wanted,
            keep or [],
            apply=apply,
            say=log.info,
        )
    except (
        AstraFlowError
    ) as error:  # a sentence for a person, who has no use for where it was raised
        log.error(str(error))
        return Failed(message=str(error))
    create_markdown_artifact(
        key="gc",
        markdown=garbage_collection.markdown(done),
        description="What gc lets go, and why the rest stays",
    )
    if done.skipped:
        return Failed(
            message="; ".join(f"{run_id} is skipped: {why}" for run_id, why in done.skipped.items())
        )
    return None
