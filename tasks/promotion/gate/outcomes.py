"""What champion and candidate achieved on the same problems with the same seeds.

P: problems, S: samples of each problem.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from storage.errors import ConfigError
from storage.plain_names import quoted
from tasks.promotion.gate.comparison import Accuracies

POOLED = "pooled"
"""Names all data sets together; no data set may have this name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PairedOutcomes:
    """Accuracies of both teams on one data set. Example: the candidate solves problem `b`, too.

    PairedOutcomes.of("gsm8k", ("a", "b"), champion=[[1.0], [0.0]], candidate=[[1.0], [1.0]])
    """

    dataset: str
    problems: tuple[str, ...]
    """[P] ids, each once."""
    champion: NDArray[np.float64]
    """[P, S] in [0, 1]; NaN where the episode failed. Sample s of both teams has one seed."""
    candidate: NDArray[np.float64]
    """[P, S] the same for the candidate."""

    @classmethod
    def of(
        cls, dataset: str, problems: Sequence[str], champion: ArrayLike, candidate: ArrayLike
    ) -> "PairedOutcomes":
        """Check the outcomes of both teams.

        Raises ConfigError for a problem that is listed twice, arrays of other shapes, and values
        outside [0, 1].
        """
        ids = tuple(problems)
        if not dataset or dataset == POOLED:
            raise ConfigError(
                f"{dataset!r} cannot name a data set of the gate: {POOLED!r} names all of them "
                "together; rename the data set"
            )
        if len(set(ids)) < len(ids):
            twice = next(problem for problem, count in Counter(ids).items() if count > 1)
            raise ConfigError(
                f"{dataset}: the problem {quoted(twice)} is listed twice; give each problem once, "
                "with all of its samples in its row"
            )
        arrays = [
            _checked(outcomes, len(ids), f"{dataset}: the {team}'s outcomes")
            for team, outcomes in (("champion", champion), ("candidate", candidate))
        ]
        if arrays[0].shape != arrays[1].shape:
            raise ConfigError(
                f"{dataset}: the champion has {arrays[0].shape[1]} samples of each problem and the "
                f"candidate {arrays[1].shape[1]}; play both with the same number"
            )
        return cls(dataset=dataset, problems=ids, champion=arrays[0], candidate=arrays[1])


@dataclass(frozen=True, eq=False)
class ProblemMeans:
    """Accuracies of the problems that can be compared."""

    champion_P: Accuracies
    """[P] mean over the compared samples of each problem."""
    candidate_P: Accuracies
    champion_failed: int
    """Samples that the champion's failed episodes left out."""
    candidate_failed: int
    """Compared samples in which the candidate's episode failed."""


def problem_means(outcomes: PairedOutcomes) -> ProblemMeans:
    """Average the samples of each problem.

    A failed episode counts against the candidate, never for it: the candidate's counts as wrong
    (0), the champion's leaves out the sample for both teams. A problem without any sample left is
    left out.
    """
    counts_PS = ~np.isnan(outcomes.champion)
    failed_PS = counts_PS & np.isnan(outcomes.candidate)
    num_P = counts_PS.sum(axis=1)
    kept = num_P > 0
    means = [
        np.where(counts_PS, np.nan_to_num(team), 0.0).sum(axis=1)[kept] / num_P[kept]
        for team in (outcomes.champion, outcomes.candidate)
    ]
    return ProblemMeans(means[0], means[1], int((~counts_PS).sum()), int(failed_PS.sum()))


def pooled(parts: Sequence[ProblemMeans]) -> ProblemMeans:
    """Put the problems of several data sets together; each problem counts the same."""
    return ProblemMeans(
        np.concatenate([part.champion_P for part in parts]),
        np.concatenate([part.candidate_P for part in parts]),
        sum(part.champion_failed for part in parts),
        sum(part.candidate_failed for part in parts),
    )


def _checked(outcomes: ArrayLike, problems: int, label: str) -> NDArray[np.float64]:
    """Return the outcomes [P, S]; ConfigError for another shape or a value outside [0, 1]."""
    try:
        array = np.asarray(outcomes, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{label} are not a table of numbers ({error}); give [P, S]") from None
    if problems == 0 and array.size == 0:
        return np.zeros((0, 1))
    if array.ndim != 2 or len(array) != problems or array.shape[1] == 0:
        raise ConfigError(
            f"{label} have the shape {array.shape} for {problems} problems; give one row for each "
            "problem, with at least one sample in it"
        )
    is_valid = np.isnan(array) | ((array >= 0) & (array <= 1))
    if not is_valid.all():
        row, column = (int(index[0]) for index in np.nonzero(~is_valid))
        raise ConfigError(
            f"{label} have {array[row, column]:g} in row {row}; an accuracy is in [0, 1], or NaN "
            "for an episode that failed"
        )
    return array
