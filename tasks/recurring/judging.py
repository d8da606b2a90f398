"""The last part of a night: candidate against champion, and the decision.

run ──contest──▶ verdict ──decide──▶ decision in the promotion log ──▶ outcome of the night
"""

from storage import layout
from storage.errors import AstraFlowError, ConfigError
from storage.promotion import nights
from storage.records.nights import NightEnd, NightOutcome, NightPlan
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.monitoring import closing_steps
from tasks.promotion import candidates, promotion
from tasks.promotion.contest import Contest
from tasks.recipes.run_config import RunConfig
from tasks.recurring import planning

BY = "night {night}"
UNFINISHED = ("cancelled", "failed", "suspended")
"""States of a run whose versions are not judged."""


def trained_versions(run: ObjectStore, config: RunConfig) -> tuple[str, ...]:
    """Return the best evaluated version of each policy after version 0, as `contest` takes them.

    Version 0 is the champion itself, which a night must beat. Raises ConfigError where no later
    version has an evaluation that can be read.
    """
    assert config.evaluation is not None, "a gate needs an evaluation"
    policies = list(config.policies)
    run_id = runs.run_id(run)
    stored = candidates.read_evaluations(run, run_id)
    trained = [each for each in stored.readable if any(each.versions.values())]
    best = candidates.best_versions(trained, policies, config.evaluation.dataset)
    if best is None:
        unreadable = "; ".join(stored.unreadable.values())
        remedy = (
            f"an evaluation cannot be read: {unreadable}"
            if unreadable
            else ("lower evaluation.every, or train for more steps")
        )
        raise ConfigError(
            f"no version of {run_id} after version 0 was evaluated on "
            f"{config.evaluation.dataset!r}; {remedy}"
        )
    return tuple(f"{policy}@{version}" for policy, version in best.items())


def decide(store: ObjectStore, plan: NightPlan, contest: Contest) -> NightOutcome:
    """Promote or reject the night's candidate, and store that the night is over.

    Of a night that ended meanwhile, such as one that another night abandoned, nothing is decided.

    Raises:
        ConflictError: the champion changed since the contest; play another one.
        ConfigError: the champion is not known.
    """
    ended = nights.read_outcome(store, plan.name, plan.night)
    if ended is not None:
        return ended
    by = BY.format(night=plan.night)
    settled = promotion.decide(
        store, plan.name, contest.candidate.team, contest.verdict, contest.champion, by
    )
    how = NightEnd.PROMOTED if contest.verdict.passed else NightEnd.REJECTED
    number = settled.decision.number
    return planning.end(store, plan.name, plan.night, how, contest.verdict.reason, number)


def is_completed(store: ObjectStore, plan: NightPlan) -> bool:
    """Return whether the night's run has reached its end and its closing steps were taken."""
    run = store.sub(layout.run_prefix(plan.run_id))
    stop = runs.read_stop(run)
    return stop is not None and stop.state not in UNFINISHED and closing_steps.all_taken(run)


def unfinished(store: ObjectStore, plan: NightPlan) -> NightOutcome | None:
    """Return the outcome of a night whose run was stopped; None where it reached its end.

    Raises AstraFlowError for a suspended run, whose night has no outcome.
    """
    run = store.sub(layout.run_prefix(plan.run_id))
    stop = runs.read_stop(run)
    if stop is None:
        raise ConfigError(f"run {plan.run_id} has not ended; start night {plan.night} again")
    if stop.state == "suspended":
        raise AstraFlowError(
            f"night {plan.night} of {plan.name} is suspended: {stop.reason}; start it again with "
            f"the night_id {plan.night} to go on"
        )
    if stop.state not in UNFINISHED:
        return None
    how = NightEnd.CANCELLED if stop.state == "cancelled" else NightEnd.FAILED
    return planning.end(store, plan.name, plan.night, how, stop.reason)
