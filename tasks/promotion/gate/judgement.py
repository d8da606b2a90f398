"""The rule of the gate: one row for each data set, and one verdict.

    passed  =  the data set `gain_on` (or all pooled) has   p ≤ 1 - confidence  and  low ≥ min_gain
               and each other data set has                  low ≥ -max_loss
               and each row has                             problems ≥ min_problems

`low` is the one-sided lower bound of the gain (`comparison.py`). All requirements must hold, so the
probability of promoting a candidate that is not better stays at most 1 - confidence, however many
data sets there are (an intersection-union test: Berger, Technometrics 1982).
"""

import math
from collections.abc import Mapping, Sequence

from storage.errors import AstraFlowError, ConfigError
from storage.import_path import described
from storage.plain_names import listed
from storage.records.promotions import ROWS_MAX, GateRow, GateVerdict, Requirement
from tasks.promotion.gate.comparison import Comparison, GateTest
from tasks.promotion.gate.config import GateConfig
from tasks.promotion.gate.outcomes import (
    POOLED,
    PairedOutcomes,
    ProblemMeans,
    pooled,
    problem_means,
)

TOLERANCE = 1e-9
"""Bounds that miss a requirement by less meet it: they are sums of rounded numbers."""


def judge(outcomes: Sequence[PairedOutcomes], config: GateConfig) -> GateVerdict:
    """Decide whether the candidate may replace the champion.

    Raises:
        ConfigError: no data set or one given twice, a setting that names another data set, a custom
            test that cannot be used, or outcomes that the test cannot compare.
    """
    means = _means_by_dataset(outcomes)
    _check_names(means, config)
    gains_on = config.gaining(list(means))
    if gains_on == POOLED:
        means[POOLED] = pooled(list(means.values()))
    test = config.test.make("gate.test")
    rows = tuple(
        _row(
            dataset,
            part,
            Requirement.GAIN if dataset == gains_on else Requirement.LOSS,
            test,
            config,
        )
        for dataset, part in means.items()
    )
    passed = all(row.passed for row in rows)
    decisive = [row for row in rows if not row.passed] or [
        row for row in rows if row.requirement is Requirement.GAIN
    ]
    return GateVerdict(
        passed=passed,
        reason="; ".join(f"{row.dataset}: {row.why}" for row in decisive),
        test=config.test.name,
        confidence=config.confidence,
        rows=rows,
    )


def _means_by_dataset(outcomes: Sequence[PairedOutcomes]) -> dict[str, ProblemMeans]:
    if not outcomes:
        raise ConfigError("the gate has no data set to compare; name at least one")
    if len(outcomes) >= ROWS_MAX:
        raise ConfigError(f"the gate compares at most {ROWS_MAX - 1} data sets; name fewer")
    means: dict[str, ProblemMeans] = {}
    for part in outcomes:
        if part.dataset in means:
            raise ConfigError(f"the data set {part.dataset!r} is given twice; give each once")
        means[part.dataset] = problem_means(part)
    return means


def _check_names(datasets: Mapping[str, object], config: GateConfig) -> None:
    """Raise ConfigError for a setting of a data set that was not played."""
    named = {"gate.gain_on": {config.gain_on} - {POOLED}, "gate.max_loss_on": config.max_loss_on}
    for key, names in named.items():
        for name in names:
            if name not in datasets:
                raise ConfigError(
                    f"{key} names the data set {name!r}, which was not played; those are "
                    f"{listed(datasets)}"
                )


def _row(
    dataset: str,
    means: ProblemMeans,
    requirement: Requirement,
    test: GateTest,
    config: GateConfig,
) -> GateRow:
    problems = len(means.champion_P)
    needs_gain = requirement is Requirement.GAIN
    required = config.min_gain if needs_gain else -config.allowed_loss(dataset)
    compared = (
        _compare(dataset, means, test, config)
        if problems
        else Comparison(math.nan, math.nan, math.nan)
    )
    champion, candidate = (
        float(team_P.mean()) if problems else math.nan
        for team_P in (means.champion_P, means.candidate_P)
    )
    if problems < config.min_problems:
        passed = False
        why = f"{problems} problems were compared, {config.min_problems} are needed"
    elif needs_gain:
        passed, why = _gains(compared, candidate - champion, config)
    else:
        passed, why = _loses_little(compared, candidate - champion, required, config)
    return GateRow(
        dataset=dataset,
        problems=problems,
        champion_failed=means.champion_failed,
        candidate_failed=means.candidate_failed,
        champion=champion,
        candidate=candidate,
        gain=candidate - champion,
        low=compared.low,
        high=compared.high,
        p_value=compared.p_value,
        requirement=requirement,
        required=required,
        passed=passed,
        why=why + _failures(means.candidate_failed),
    )


def _gains(compared: Comparison, gain: float, config: GateConfig) -> tuple[bool, str]:
    p_max, sure = 1 - config.confidence, f"{100 * config.confidence:g}% confidence"
    measured = f"gain of {gain:+.1%}, at least {compared.low:+.1%} with {sure}"
    if compared.p_value > p_max + TOLERANCE:
        return False, (
            f"{measured}; it may be chance: p = {compared.p_value:.2g}, and at most {p_max:.2g} is "
            "accepted"
        )
    if compared.low < config.min_gain - TOLERANCE:
        return False, f"{measured}; {config.min_gain:+.1%} is required"
    return True, f"{measured}, p = {compared.p_value:.2g}"


def _loses_little(
    compared: Comparison, gain: float, required: float, config: GateConfig
) -> tuple[bool, str]:
    sure = f"{100 * config.confidence:g}% confidence"
    if compared.low < required - TOLERANCE:
        return False, (
            f"change of {gain:+.1%}; with {sure} a loss of {-compared.low:.1%} is not excluded, "
            f"and {-required:.1%} is allowed (more problems or samples make this narrower)"
        )
    return True, f"change of {gain:+.1%}, not below {compared.low:+.1%} with {sure}"


def _failures(failed: int) -> str:
    return f"; {failed} failed episodes of the candidate count as wrong" if failed else ""


def _compare(dataset: str, means: ProblemMeans, test: GateTest, config: GateConfig) -> Comparison:
    """Call the test; ConfigError for one that fails, or whose result is impossible."""
    name = config.test.name
    try:
        compared = test.compare(means.champion_P, means.candidate_P, config.confidence)
        low, high, p_value = float(compared.low), float(compared.high), float(compared.p_value)
    except AstraFlowError as error:
        raise ConfigError(f"gate.test: {dataset}: {error}") from error
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(
            f"gate.test: {name} cannot compare the data set {dataset}: {described(error)}"
        ) from error
    if not (-1 <= low <= high <= 1 and 0 <= p_value <= 1):
        raise ConfigError(
            f"gate.test: {name} gives the bounds {low:g} and {high:g} and the p value {p_value:g} "
            f"for the data set {dataset}; bounds are in [-1, 1], the lower one first, and p is in "
            "[0, 1]"
        )
    return Comparison(low, high, p_value)
