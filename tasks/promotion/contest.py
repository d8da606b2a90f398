"""A contest: the best evaluated team of a run against the champion, judged by the gate.

    best evaluated versions of the run ──▶ candidate ─┐
    promotion log ──▶ champion                        ├─▶ outcomes ──gate──▶ verdict
    no champion yet ──▶ base model of the run         ┘

Nothing is decided here: `promotion.decide` adds the decision to the log.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage.errors import ConfigError
from storage.promotion import promotions
from storage.records.promotions import GateVerdict, PromotionDecision, Team
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.promotion import candidates, decision_log, gate_checks, kept_versions
from tasks.promotion.candidates import Candidate
from tasks.promotion.contest_inputs import gate_settings
from tasks.promotion.gate.judgement import judge
from tasks.promotion.gate.outcomes import PairedOutcomes
from tasks.promotion.paired_play import OnProgress, paired_outcomes
from tasks.recipes.run_config import RunConfig

BASE_MODEL = "0"
"""The version that a candidate is compared with where there is no champion yet."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Contest:
    """Who was compared with whom, and the gate's verdict."""

    champion: PromotionDecision | None
    """The decision whose team was the champion; None where there was none."""
    opponent: Team
    """The champion, or the base model of the candidate's run."""
    candidate: Candidate
    outcomes: tuple[PairedOutcomes, ...]
    verdict: GateVerdict


def contest(
    store: ObjectStore,
    name: str,
    run_id: str,
    config: RunConfig,
    words: Sequence[str] = (),
    on_progress: OnProgress = lambda progress: None,
    check: Callable[[], None] = lambda: None,
) -> Contest:
    """Compare the best evaluated team of a run with the champion of a promotion log.

    The weights of the candidate are kept from gc before they are played, as for a decision.

    Args:
        config: of the run; without `gate`, the defaults of that section.
        words: other versions than the best, as for `candidates.find`.
        on_progress, check: as for `paired_outcomes`.

    Raises:
        ConfigError: the recipe cannot be judged, there is no candidate, the champion is unknown, or
            both have the same weights; also what `paired_outcomes` raises.
    """
    gate, _ = gate_settings(config)
    config = config.model_copy(update={"gate": gate})
    if wrong := [f"{'.'.join(path)}: {why}" for path, why in gate_checks.faults(config)]:
        raise ConfigError(f"the recipe of {run_id} cannot be judged: {'; '.join(wrong)}")
    standing = decision_log.fold(promotions.read_log(store, name))
    decision_log.require_known(store, standing)
    run = runs.open_run(store, run_id)
    candidate = candidates.find(run, run_id, config, words)
    champion = standing.champion
    opponent = (
        champion.team if champion else candidates.find(run, run_id, config, [BASE_MODEL]).team
    )
    _refuse_same_weights(name, candidate.team, opponent, champion)
    kept_versions.keep(store, name, candidate.team)
    outcomes = paired_outcomes(
        store, name, opponent, candidate.team, config, on_progress=on_progress, check=check
    )
    return Contest(
        champion=champion,
        opponent=opponent,
        candidate=candidate,
        outcomes=outcomes,
        verdict=judge(outcomes, gate),
    )


def _refuse_same_weights(
    name: str, candidate: Team, opponent: Team, champion: PromotionDecision | None
) -> None:
    """Raise ConfigError where both teams have the same weights: there is nothing to decide."""
    weights = [
        {policy: version.digest for policy, version in team.items()}
        for team in (candidate, opponent)
    ]
    if weights[0] != weights[1]:
        return
    team = ", ".join(
        f"{policy}@{each.version} of {each.run_id}" for policy, each in candidate.items()
    )
    if champion is None:
        raise ConfigError(
            f"{team} has the weights of its base model, with which it would be compared, because "
            f"{name} has no champion; nothing is decided: train further, or name other versions"
        )
    raise ConfigError(
        f"{team} has the weights of the champion of {name} (decision {champion.number}); nothing "
        "is decided: name other versions"
    )
