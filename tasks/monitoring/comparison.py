"""Runs side by side: which settings differ, how they learned, and whether a difference is real.

    run.json, status, evaluations of each run ──▶ RunsCompared ──▶ table, page, JSON

Two runs are compared on the problems that both were evaluated on, by their newest evaluations, with
the bootstrap of the gate (tasks/promotion/gate/paired_bootstrap.py). P: such problems.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.run import evaluations
from storage.run import runs as stored_runs
from storage.run.evaluations import SOLO_WORKFLOW, Evaluation
from storage.store.object_store import ObjectStore
from tasks.monitoring.status import status_of
from tasks.promotion.gate.paired_bootstrap import bootstrap_bounds
from tasks.recipes.stored_config import flatten

CONFIDENCE = 0.95
"""Of the interval of a gain."""
RESAMPLES = 10_000
SETTING_MAX = 200
"""Characters that are shown of a setting's value."""


class Scored(NamedTuple):
    """What an accuracy is of. Example: `Scored("gsm8k", "single_turn")`."""

    dataset: str
    workflow: str


@dataclass(frozen=True, kw_only=True)
class ScorePoint:
    """One accuracy of a run."""

    version: int
    """The newest of the evaluated versions."""
    hours: float
    """From the run's creation to the evaluation."""
    accuracy: float
    n: int


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """What is compared of one run."""

    run_id: str
    state: str
    steps: Mapping[str, int]
    """Policy → newest version."""
    hours: float
    curves: Mapping[Scored, tuple[ScorePoint, ...]]
    problems: tuple[str, ...]
    """Objects that cannot be read, and why."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A run's accuracy minus that of the first run, on the problems that both have."""

    run_id: str
    scored: Scored
    gain: float
    low: float
    high: float
    """Bounds of the gain with the confidence CONFIDENCE; NaN without a common problem."""
    n: int


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """A setting that differs between the runs."""

    key: str
    values: tuple[str, ...]
    """Of each run; empty where a run does not have it."""


@dataclass(frozen=True, kw_only=True)
class RunsCompared:
    """Runs side by side; gains refer to the first one."""

    runs: tuple[ComparedRun, ...]
    gains: tuple[Gain, ...]
    settings: tuple[SettingRow, ...]


def compare(store: ObjectStore, run_ids: Sequence[str]) -> RunsCompared:
    """Compare runs of one store.

    Raises:
        ConfigError: one of them does not exist.
        CorruptError: its `run.json` cannot be read.
    """
    opened = [stored_runs.open_run(store, run_id) for run_id in run_ids]
    played = [evaluations.read_all(run).readable for run in opened]
    return RunsCompared(
        runs=tuple(map(_compared, opened, played)),
        gains=tuple(
            gain
            for run_id, others in zip(run_ids[1:], played[1:], strict=True)
            for gain in _gains(run_id, played[0], others)
        ),
        settings=_differing([_settings(run) for run in opened]),
    )


def _compared(run: ObjectStore, played: Sequence[Evaluation]) -> ComparedRun:
    status = status_of(run)
    curves: dict[Scored, tuple[ScorePoint, ...]] = {}
    for evaluation in played:
        for score in evaluations.scores(evaluation):
            scored = Scored(evaluation.dataset, score.workflow)
            point = ScorePoint(
                version=max(evaluation.versions.values(), default=0),
                hours=max(0.0, evaluation.created_s - status.started) / 3600,
                accuracy=score.accuracy,
                n=score.n,
            )
            curves[scored] = (*curves.get(scored, ()), point)
    return ComparedRun(
        run_id=status.run_id,
        state=status.state,
        steps={name: policy.version or 0 for name, policy in status.policies.items()},
        hours=status.elapsed_s / 3600,
        curves=curves,
        problems=tuple(status.problems),
    )


def _gains(run_id: str, first: Sequence[Evaluation], others: Sequence[Evaluation]) -> list[Gain]:
    ours, theirs = _newest_results(others), _newest_results(first)
    gains = []
    for scored in ours.keys() & theirs.keys():
        common = sorted(ours[scored].keys() & theirs[scored].keys())
        differences_P = np.array([ours[scored][id] - theirs[scored][id] for id in common])
        low, high = _bounds(differences_P)
        gain = float(differences_P.mean()) if common else float("nan")
        gains.append(
            Gain(run_id=run_id, scored=scored, gain=gain, low=low, high=high, n=len(common))
        )
    return sorted(gains, key=lambda gain: gain.scored)


def _bounds(differences_P: NDArray[np.float64]) -> tuple[float, float]:
    if not len(differences_P):
        return float("nan"), float("nan")
    one_sided = 1 - (1 - CONFIDENCE) / 2
    return bootstrap_bounds(differences_P, one_sided, RESAMPLES, np.random.default_rng(0))


def _newest_results(played: Sequence[Evaluation]) -> dict[Scored, Mapping[str, float]]:
    """Return problem → result of the newest evaluation of each data set and workflow; a failed play
    counts as wrong.
    """
    newest: dict[Scored, Mapping[str, float]] = {}
    for evaluation in played:
        columns = {evaluation.workflow: evaluation.final, SOLO_WORKFLOW: evaluation.first_attempt}
        for score in evaluations.scores(evaluation):
            results = np.nan_to_num(columns[score.workflow]).tolist()
            newest[Scored(evaluation.dataset, score.workflow)] = dict(
                zip(evaluation.rows, results, strict=True)
            )
    return newest


def _settings(run: ObjectStore) -> dict[str, str]:
    config: Any = stored_runs.read_run_config(run)
    return {key: str(value) for key, value in flatten(config).items()}


def _differing(settings: Sequence[Mapping[str, str]]) -> tuple[SettingRow, ...]:
    keys = sorted(set().union(*settings))
    rows = {key: tuple(each.get(key, "") for each in settings) for key in keys}
    return tuple(
        SettingRow(key=key, values=tuple(map(_shown, values)))
        for key, values in rows.items()
        if len(set(values)) > 1
    )


def _shown(value: str) -> str:
    """Return a long value cut, with a digest of the whole: two that differ are shown so."""
    if len(value) <= SETTING_MAX:
        return value
    digest = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:8]
    return f"{value[:SETTING_MAX]}… ({digest})"
