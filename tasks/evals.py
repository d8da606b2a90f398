"""What an evaluation found, as an object of the run: one Arrow file for each vector of versions, created once.

One play of `actor_and_verify` on the held-out set gives two numbers on the same first attempts: the solver alone
(`first_attempt`) and the team (`final`). Who plays it stands in `evaluation.py`; nothing here imports a model.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from storage import arrow_files, layout
from storage.errors import ConfigError, CorruptError
from storage.json_numbers import Number
from storage.json_objects import build, new_write_id
from storage.objects import ObjectStore
from storage.records import Float32
from storage.second_reads import read_twice
from tasks.config import RunConfig

log = logging.getLogger(__name__)

CACHE_MAX = 1024
"""Evaluations kept in memory."""
KIND = "evaluation"
SCHEMA = arrow_files.schema_of({"prompt_id": arrow_files.DICTIONARY, "first_attempt": pa.float32(), "final": pa.float32()})
SOLO_WORKFLOW = "single_turn"
"""The name under which first attempts are reported: the answering policy alone, without the others."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One play of the held-out set by exact versions. Two problems, the second mended by the team:
    `Evaluation({"solver": 20, "verifier": 20}, "chained_addition", "actor_and_verify", ("a", "b"), [1, 0], [1, 1])`."""

    versions: Mapping[str, int]
    """policy → the version that played."""
    dataset: str
    workflow: str
    rows: tuple[str, ...]
    """[N] prompt ids."""
    first_attempt: Float32
    """[N] 1.0 where the first attempt was right, else 0.0; NaN where the play failed."""
    final: Float32
    """[N] the same of the workflow's final answer."""
    created_s: float = 0.0
    seconds: float = 0.0
    """Wall-clock of the play."""


@dataclass(frozen=True)
class Score:
    """One number of an evaluation. Example: `Score("single_turn", 0.5, 2)`."""

    workflow: str
    accuracy: float
    """In [0, 1]; a failed play counts as wrong."""
    n: int


def scores(evaluation: Evaluation) -> tuple[Score, ...]:
    """The answering policy alone on its first attempts, then, for a workflow of several turns, the whole team."""
    alone = Score(SOLO_WORKFLOW, _share(evaluation.first_attempt), len(evaluation.rows))
    if evaluation.workflow == SOLO_WORKFLOW:
        return (alone,)
    return alone, Score(evaluation.workflow, _share(evaluation.final), len(evaluation.rows))


def pending(run: ObjectStore, config: RunConfig) -> list[dict[str, int]]:
    """The version vectors of the run that are still to be evaluated."""
    return [versions for versions in config.evaluated_versions() if not exists(run, versions)]


def commit(run: ObjectStore, evaluation: Evaluation) -> None:
    """Creates the evaluation; ConflictError when the same versions have been evaluated already."""
    run.create(layout.evaluation(evaluation.versions), encode(evaluation))


def read(run: ObjectStore, versions: Mapping[str, int]) -> Evaluation:
    """Raises NotFoundError, or CorruptError naming the object."""
    return _read_key(run, layout.evaluation(versions))


def exists(run: ObjectStore, versions: Mapping[str, int]) -> bool:
    return run.exists(layout.evaluation(versions))


def keys(run: ObjectStore, start_after: str = "") -> list[str]:
    """Keys of all evaluations below the run, in the order of their versions."""
    return [key for key in run.list(layout.EVALS, start_after) if key.endswith(".arrow")]


def read_all(run: ObjectStore, wanted: Sequence[str] | None = None) -> Iterator[Evaluation]:
    """Every evaluation (or those of the keys `wanted`) in the order of its versions; unreadable ones are left out."""
    for key in keys(run) if wanted is None else wanted:
        try:
            yield _read_key(run, key)
        except CorruptError as error:
            log.debug("left out: %s", error)


def encode(evaluation: Evaluation) -> bytes:
    """One row for each prompt; everything else stands in the header."""
    header = {
        "versions": dict(evaluation.versions),
        "dataset": evaluation.dataset,
        "workflow": evaluation.workflow,
        "created_s": evaluation.created_s,
        "seconds": evaluation.seconds,
        "write_id": new_write_id(),
    }
    columns = {
        "prompt_id": list(evaluation.rows),
        "first_attempt": evaluation.first_attempt,
        "final": evaluation.final,
    }
    return arrow_files.write(SCHEMA, columns, KIND, header)


def decode(body: bytes) -> Evaluation:
    """Raises CorruptError for bytes that are not an evaluation of this format."""
    table, text = arrow_files.read(body, SCHEMA, KIND)
    header = build(_Header, text, "the header of an evaluation")
    return Evaluation(
        versions=header.versions,
        dataset=header.dataset,
        workflow=header.workflow,
        rows=tuple(arrow_files.strings(table, "prompt_id")),
        first_attempt=arrow_files.numbers(table, "first_attempt"),
        final=arrow_files.numbers(table, "final"),
        created_s=header.created_s,
        seconds=header.seconds,
    )


@dataclass(frozen=True)
class _Header:
    versions: dict[str, int]
    dataset: str
    workflow: str
    created_s: Number
    seconds: Number
    write_id: str


@lru_cache(maxsize=CACHE_MAX)  # created-once objects never change, and a live view asks for all of them every second
def _read_key(run: ObjectStore, key: str) -> Evaluation:
    try:
        evaluation = read_twice(lambda: decode(run.get(key)))
        place = layout.evaluation(evaluation.versions)
    except (CorruptError, ConfigError) as error:
        raise CorruptError(f"{key}: {error}") from error
    if place != key:
        raise CorruptError(f"{key} holds the evaluation of {dict(evaluation.versions)}")
    return evaluation


def _share(values: Float32) -> float:
    """Share of rights among all; failed plays (NaN) are wrong. 0 for an empty set."""
    return float(np.nan_to_num(values).mean(dtype=np.float64)) if len(values) else 0.0
