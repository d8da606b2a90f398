"""One night, as the flow of `astraflow/nightly` runs it.

    resolve champion ─▶ freeze data ─▶ train (subflow) ─▶ play ─▶ gate ─▶ report, notify

Each arrow is a parameter, so that Prefect shows it. What a step leaves in the store is there once:
a night that is started again does only what is missing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prefect import allow_failure, tags
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Failed

from storage import layout
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import ConfigError, ConflictError, CorruptError
from storage.records.nights import NightEnd, NightOutcome, NightPlan
from storage.store import object_store
from tasks.recipes import loader
from tasks.recurring import judging, planning, prefect_steps
from tasks.recurring.due_time import night_id
from tasks.recurring.planning import HEARTBEAT_INTERVAL_S, Schedule
from tasks.services import notification_block, store_credentials
from tasks.supervision.launcher import introduce

log = logging.getLogger(__name__)

CONTESTS_MAX = 3
"""Contests of a night, of which each may find another champion at its end."""

Train = Callable[..., Awaitable[State[Any]]]
"""The flow of one training run."""


@dataclass(frozen=True, kw_only=True)
class NightRequest:
    """The parameters of the flow."""

    recipe: str
    overrides: Mapping[str, Any]
    name: str | None
    night: str | None
    schedule: Schedule
    notify: str | None


async def run(request: NightRequest, train: Train) -> State[None]:
    """Run the night, or what is missing of it; return the final state of its flow run.

    Raises:
        AstraFlowError: the night cannot begin, or the store did not answer. It has no outcome, and
            can be started again.
    """
    notification_block.check_name("notify", request.notify)
    config = loader.load(request.recipe, request.overrides)
    name = request.name or config.name
    night = request.night or night_id(flow_run.get_scheduled_start_time())
    await asyncio.to_thread(store_credentials.load)
    await introduce(f"{name} {night}", f"night:{name}")
    with tags(f"night:{name}"):
        plan = await prefect_steps.resolve_champion(name, night, request.schedule)
        outcome = plan if isinstance(plan, NightOutcome) else await _train(plan, request, train)
        reported: State[None] = await prefect_steps.report(  # type: ignore[misc]  # as below
            outcome, config, return_state=True
        )
        if request.notify:
            after = [allow_failure(reported)]
            await prefect_steps.notify(  # type: ignore[misc]  # the overload for tasks that are no coroutines
                outcome, request.notify, return_state=True, wait_for=after
            )
    return _final_state(outcome)


async def _train(plan: NightPlan, request: NightRequest, train: Train) -> NightOutcome:
    """Train, play and decide. An error that a person must mend is the night's outcome."""
    store = object_store.default_store()
    folder = store.sub(layout.night(plan.name, plan.night))
    with HeartbeatWriter(folder, "supervisor", "night", 0, HEARTBEAT_INTERVAL_S):
        try:
            data = await prefect_steps.freeze_data(
                plan, request.recipe, request.overrides, _deployment()
            )
            if isinstance(data, NightOutcome):
                return data
            trained = None
            if not judging.is_completed(store, plan):
                trained = await train(
                    plan.run_id, request.recipe, overrides=data, return_state=True
                )
            if (unfinished := judging.unfinished(store, plan)) is not None:
                return unfinished
            return await _judge(plan, trained)
        except (ConfigError, CorruptError) as error:
            log.error("night %s of %s: %s", plan.night, plan.name, error)
            return planning.end(store, plan.name, plan.night, NightEnd.FAILED, str(error))


async def _judge(plan: NightPlan, trained: State[Any] | None) -> NightOutcome:
    """Play and decide; again where a person changed the champion meanwhile."""
    for _ in range(CONTESTS_MAX):
        played = await prefect_steps.play(plan, trained)
        try:
            return await prefect_steps.decide(plan, played)
        except ConflictError as error:
            log.warning("%s", error)
    raise ConfigError(
        f"the champion of {plan.name} changed during each of {CONTESTS_MAX} contests; decide "
        f"yourself: `astraflow promote {plan.run_id} --gate`"
    )


def _deployment() -> str:
    name = deployment.get_name()
    return f"{flow_run.get_flow_name()}/{name}" if name else ""


def _final_state(outcome: NightOutcome) -> State[None]:
    message = f"{outcome.end.value}: {outcome.reason}"
    if outcome.end in (NightEnd.FAILED, NightEnd.ABANDONED):
        return Failed(message=message)
    if outcome.end is NightEnd.CANCELLED:
        return Cancelled(message=message)
    return Completed(name=outcome.end.value.capitalize(), message=message)
