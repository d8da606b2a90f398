"""What evaluations of a run say, and which are still to be made. Their stored form is
`storage/run/evaluations.py`'s.

One play of `actor_and_verify` on the held-out set gives two numbers on the same first attempts: the
solver alone (`first_attempt`) and the team (`final`). Who plays it stands in `evaluation.py`;
nothing here imports a model.
"""

from dataclasses import dataclass

import numpy as np

from storage.records.types import Float32
from storage.run.evaluations import (
    Evaluation,
    Evaluations,
    create,
    decode,
    encode,
    exists,
    keys,
    read,
    read_all,
)
from storage.store.object_store import ObjectStore
from tasks.recipes.run_config import RunConfig

__all__ = [  # the stored form, under the name by which it is used beside the scores
    "Evaluation",
    "Evaluations",
    "create",
    "decode",
    "encode",
    "exists",
    "keys",
    "read",
    "read_all",
]

SOLO_WORKFLOW = "single_turn"
"""The name under which first attempts are reported: the answering policy alone, without the others.
"""


@dataclass(frozen=True)
class Accuracy:
    """One number of an evaluation. Example: `Accuracy("single_turn", 0.5, 2)`."""

    workflow: str
    accuracy: float
    """In [0, 1]; a failed play counts as wrong."""
    n: int


def scores(evaluation: Evaluation) -> tuple[Accuracy, ...]:
    """The answering policy alone on its first attempts, then, for a workflow of several turns, the
    whole team.
    """
    alone = Accuracy(SOLO_WORKFLOW, _share(evaluation.first_attempt), len(evaluation.rows))
    if evaluation.workflow == SOLO_WORKFLOW:
        return (alone,)
    return alone, Accuracy(evaluation.workflow, _share(evaluation.final), len(evaluation.rows))


def pending(run: ObjectStore, config: RunConfig) -> list[dict[str, int]]:
    """The version vectors of the run that are still to be evaluated."""
    return [versions for versions in config.evaluated_versions() if not exists(run, versions)]


def _share(values: Float32) -> float:
    """Share of rights among all; failed plays (NaN) are wrong. 0 for an empty set."""
    return float(np.nan_to_num(values).mean(dtype=np.float64)) if len(values) else 0.0
