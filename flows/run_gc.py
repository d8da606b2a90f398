"""The flow `gc`: deletes weights that no kept version needs. Its schedule is off at first."""

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
from tasks.maintenance import garbage_collection
from tasks.services import store_credentials


@flow(name="gc", flow_run_name="gc, apply {apply}", validate_parameters=True)
def gc(
    run_ids: Annotated[
        list[str] | None,
        Field(description="Run ids; empty: all runs of the store that are not frozen."),
    ] = None,
    last: Annotated[
        int, Field(description="Keep this number of the newest versions of each policy.", ge=1)
    ] = 5,
    every: Annotated[
        int,
        Field(description="Keep every version whose number is a multiple of this; 0: none.", ge=0),
    ] = 20,
    keep: Annotated[
        list[str] | None,
        Field(description="Keep these versions, each written as POLICY@VERSION."),
    ] = None,
    grace_h: Annotated[
        float, Field(description="Keep versions that are younger, in hours.", ge=0)
    ] = 1.0,
    apply: Annotated[
        bool, Field(description="Delete; without this, only list what would be deleted.")
    ] = False,
) -> State[None] | None:
    """List the weights that no kept version needs; with `apply`, delete them, mirrors included.

    Files of killed writers are listed and deleted, too. Manifests are kept, so every run can be
    verified and resumed. An artifact lists what is kept and what is deleted. A run that cannot be
    read is logged and skipped, and the flow run ends as failed.
    """
    log = get_run_logger()
    try:
        store_credentials.load()
        done = garbage_collection.collect(
            object_store.default_store(),
            run_ids or [],
            Retention(last, every, grace_s=grace_h * 3600),
            keep or [],
            apply=apply,
            say=log.info,
        )
    except AstraFlowError as error:  # a message for the user, who does not need a traceback
        log.error(str(error))
        return Failed(message=str(error))
    create_markdown_artifact(
        key="gc",
        markdown=garbage_collection.markdown(done),
        description="What gc deletes, and why it keeps the rest",
    )
    if done.skipped:
        return Failed(
            message="; ".join(
                f"{run_id} is skipped: {reason}" for run_id, reason in done.skipped.items()
            )
        )
    return None
