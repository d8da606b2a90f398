"""What an evaluation found, as an object of the run: one Arrow file for each vector of versions,
created once.

One evaluation of `actor_and_verify` gives two accuracies on the same first attempts: of the solver
alone (`first_attempt`) and of the team (`final`).

Everything read is checked: bytes, places, and that each answer is right, wrong or failed. This
module does not play or schedule evaluations.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from storage import layout
from storage.errors import UNREADABLE, ConfigError, CorruptError
from storage.formats import arrow_files
from storage.formats.json_objects import build
from storage.plain_names import new_write_id
from storage.records.numbers import Count, Quantity, UnixTime
from storage.records.types import Float32
from storage.store.object_store import ObjectStore, read_twice

CACHE_MAX = 1024
"""Evaluations kept in memory."""
KIND = "evaluation"
SOLO_WORKFLOW = "single_turn"
"""The name under which the accuracy of first attempts is reported."""
SCHEMA = arrow_files.schema_of(
    {"prompt_id": arrow_files.DICTIONARY, "first_attempt": pa.float32(), "final": pa.float32()}
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation:
    """One play of the held-out set by exact versions. Two problems, the second mended by the team:
    `Evaluation({"solver": 20, "verifier": 20}, "chained_addition", "actor_and_verify", ("a", "b"),
    [1, 0], [1, 1])`.
    """

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


def key(evaluation: Evaluation) -> str:
    """The key of the evaluation, relative to its run."""
    return layout.evaluation(evaluation.versions)


def commit(run: ObjectStore, evaluation: Evaluation) -> None:
    """Creates the evaluation; ConflictError when the same versions have been evaluated already."""
    run.create(key(evaluation), encode(evaluation))


def read(run: ObjectStore, versions: Mapping[str, int]) -> Evaluation:
    """Raises NotFoundError, or CorruptError naming the object."""
    return _read_key(run, layout.evaluation(versions))


def exists(run: ObjectStore, versions: Mapping[str, int]) -> bool:
    return run.exists(layout.evaluation(versions))


def keys(run: ObjectStore, start_after: str = "") -> list[str]:
    """Keys of all evaluations below the run, in the order of their versions."""
    return [found for found in run.list(layout.EVALS, start_after) if found.endswith(".arrow")]


@dataclass(frozen=True)
class Evaluations:
    """Every evaluation of a run, in the order of their versions."""

    found: tuple[Evaluation, ...]
    unreadable: Mapping[str, str]
    """Key → why it cannot be read. `evals` alone: not even their names are known."""


def look(run: ObjectStore, wanted: Sequence[str] | None = None) -> Evaluations:
    """Read every evaluation below the run, or those of the keys `wanted`."""
    found: list[Evaluation] = []
    unreadable: dict[str, str] = {}
    try:
        places = keys(run) if wanted is None else wanted
    except ConfigError as error:
        return Evaluations((), {layout.EVALS: str(error)})
    for place in places:
        try:
            found.append(_read_key(run, place))
        except CorruptError as error:
            unreadable[place] = str(error)
    return Evaluations(tuple(found), unreadable)


def missing(run: ObjectStore, vectors: Iterable[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """The vectors of versions that have no evaluation yet."""
    return [versions for versions in vectors if not exists(run, versions)]


@dataclass(frozen=True)
class Accuracy:
    """One accuracy of an evaluation. Example: `Accuracy("single_turn", 0.5, 2)`."""

    workflow: str
    accuracy: float
    """In [0, 1]; a failed play counts as wrong."""
    n: int


def scores(evaluation: Evaluation) -> tuple[Accuracy, ...]:
    """Accuracies of an evaluation: the solver alone, then the team if the workflow has one."""
    alone = Accuracy(SOLO_WORKFLOW, _accuracy(evaluation.first_attempt), len(evaluation.rows))
    if evaluation.workflow == SOLO_WORKFLOW:
        return (alone,)
    return alone, Accuracy(evaluation.workflow, _accuracy(evaluation.final), len(evaluation.rows))


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
    """Raises CorruptError for bytes that are not an evaluation of this format, or whose answers are
    neither right nor wrong.
    """
    table, text = arrow_files.read(body, SCHEMA, KIND)
    header = build(_Header, text, "the header of an evaluation")
    return Evaluation(
        versions=header.versions,
        dataset=header.dataset,
        workflow=header.workflow,
        rows=tuple(arrow_files.strings(table, "prompt_id")),
        first_attempt=_judged(arrow_files.numbers(table, "first_attempt"), "first_attempt"),
        final=_judged(arrow_files.numbers(table, "final"), "final"),
        created_s=header.created_s,
        seconds=header.seconds,
    )


@dataclass(frozen=True, kw_only=True)
class _Header:
    versions: dict[str, Count]
    dataset: str
    workflow: str
    created_s: UnixTime
    seconds: Quantity
    write_id: str


@lru_cache(
    maxsize=CACHE_MAX
)  # created-once objects never change, and a live view asks for all of them every second
def _read_key(run: ObjectStore, place: str) -> Evaluation:
    try:
        evaluation = read_twice(lambda: decode(run.get(place)))
        own = key(evaluation)
    except UNREADABLE as error:
        raise CorruptError(f"{place}: {error}") from error
    if own != place:
        raise CorruptError(f"{place} holds the evaluation of {dict(evaluation.versions)}")
    return evaluation


def _judged(values: Float32, column: str) -> Float32:
    """[N] the column; CorruptError for a value that is not in [0, 1], or NaN for a play that
    failed.
    """
    wrong = np.flatnonzero(~(np.isnan(values) | ((values >= 0) & (values <= 1))))
    if wrong.size:
        raise CorruptError(
            f"{column} of row {wrong[0]} is {values[wrong[0]]:g}; it is in [0, 1], or NaN for a "
            "play that failed"
        )
    return values


def _accuracy(answers: Float32) -> float:
    """Share of right answers; a failed play (NaN) counts as wrong. 0 for no answers."""
    return float(np.nan_to_num(answers).mean(dtype=np.float64)) if len(answers) else 0.0
