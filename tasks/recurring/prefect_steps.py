"""The steps of a night as Prefect tasks: each calls one plain function. Prefect's graph shows how
they follow from each other.

A step that makes no progress fails the night, which has no outcome then and can be started again.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from storage.errors import EmptyWindowError, TransientError
from storage.records.nights import NightEnd, NightOutcome, NightPlan
from storage.run import runs
from storage.store import object_store
from tasks.recipes import loader
from tasks.recipes.run_config import RunConfig
from tasks.recurring import judging, planning, reporting, settings
from tasks.recurring.planning import Schedule
from tasks.recurring.stalls import StepWatch, run_step
from tasks.supervision import supervisor

if TYPE_CHECKING:  # it imports torch, which a skipped night does not need
    from tasks.promotion.contest import Contest

RETRIES, RETRY_DELAY_S = 5, 10.0
"""Of each step, while the store does not answer."""
NIGHT_TAG = "night"


async def _is_transient(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    return isinstance(await state.aresult(raise_on_failure=False), TransientError)


_step: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": RETRIES,
    "retry_delay_seconds": RETRY_DELAY_S,
    "retry_condition_fn": _is_transient,
    "tags": [NIGHT_TAG],
}


@task(name="resolve champion", task_run_name="resolve the champion of {name}", **_step)
async def resolve_champion(name: str, night: str, schedule: Schedule) -> NightPlan | NightOutcome:
    """Return what the night does; its outcome where it is over, or skipped."""
    store = object_store.default_store()
    return await run_step(
        lambda: planning.begin(store, name, night, schedule),
        StepWatch(f"the start of night {night} of {name}"),
    )


@task(name="freeze data window", task_run_name="freeze the data of {plan.run_id}", **_step)
async def freeze_data(
    plan: NightPlan, recipe: str, overrides: Mapping[str, Any], deployment: str
) -> dict[str, Any] | NightOutcome:
    """Create the night's run, with its data and the versions that it begins with.

    Returns all overrides of the run's recipe; the outcome where there is no new data.
    """
    return await run_step(
        lambda: _freeze(plan, recipe, overrides, deployment),
        StepWatch(f"the freezing of the data of {plan.run_id}"),
    )


def _freeze(
    plan: NightPlan, recipe: str, overrides: Mapping[str, Any], deployment: str
) -> dict[str, Any] | NightOutcome:
    store = object_store.default_store()
    own = settings.of_night(store, loader.load(recipe, overrides), plan)
    assigned = {**overrides, **own}
    try:
        supervisor.create(store, plan.run_id, loader.load(recipe, assigned), deployment)
    except EmptyWindowError as error:
        return planning.end(store, plan.name, plan.night, NightEnd.SKIPPED, str(error))
    return assigned


@task(
    name="paired evaluation",
    task_run_name="play {plan.run_id} against the champion",
    **_step,
)
async def play(plan: NightPlan, trained: State[Any] | None) -> "Contest":
    """Play the held-out problems with the best version of the night's run, and with the champion.

    `trained` is the end of the training; None if it had ended before.
    """
    from tasks.promotion.contest import contest
    from tasks.recipes.stored_config import read_config

    store = object_store.default_store()
    run = runs.open_run(store, plan.run_id)
    config = read_config(run)
    versions = judging.trained_versions(run, config)
    watch = StepWatch(f"the contest of {plan.run_id}")
    return await run_step(
        lambda: contest(
            *(store, plan.name, plan.run_id, config, versions), on_progress=watch.note_part
        ),
        watch,
    )


@task(name="gate", task_run_name="promote or reject {plan.run_id}", **_step)
async def decide(plan: NightPlan, played: "Contest") -> NightOutcome:
    """Promote the candidate, or keep the champion."""
    store = object_store.default_store()
    return await run_step(
        lambda: judging.decide(store, plan, played), StepWatch(f"the decision on {plan.run_id}")
    )


@task(name="report", task_run_name="report {outcome.name} {outcome.night}", **_step)
async def report(outcome: NightOutcome, config: RunConfig) -> None:
    """Show the night in Prefect and MLflow, and write the page of all nights. What fails is logged:
    the outcome stands.
    """
    store = object_store.default_store()
    await run_step(
        lambda: reporting.report(store, outcome, config),
        StepWatch(f"the report of night {outcome.night} of {outcome.name}"),
    )


@task(name="notify", task_run_name="notify {block} of {outcome.name} {outcome.night}", **_step)
async def notify(outcome: NightOutcome, block: str) -> None:
    """Send the outcome to a notification block of Prefect; an error is logged."""
    await run_step(
        lambda: asyncio.run(reporting.notify(outcome, block)),
        StepWatch(f"the message about night {outcome.night} of {outcome.name}"),
    )
