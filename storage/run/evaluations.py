"""Evaluations as Arrow files: the results of one held-out set at exact versions, created once.

One evaluation of `actor_and_verify` gives two accuracies on the same first attempts: of the solver
alone (`first_attempt`) and of the team (`final`).

A reader checks the bytes, the key, and that each result is in [0, 1] or NaN. This module does not
play or schedule evaluations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pyarrow as pa
from pydantic import Field

from storage import layout
from storage.errors import UNREADABLE, ConfigError, CorruptError, NotFoundError
from storage.formats import arrow_files
from storage.formats.json_objects import build
from storage.plain_names import new_write_id
from storage.records.numbers import Count, Quantity, UnixTime
from storage.records.types import Float32
from storage.store.object_store import ObjectStore, read_twice
from storage.store.remembered import remembered

CACHE_MAX = 1024
"""Evaluations in the cache of the process."""
KIND = "evaluation"
NAME_MAX = 1_000
"""Characters of the names of data set and workflow; longer ones are cut when they are read."""
SOLO_WORKFLOW = "single_turn"
"""The name under which the accuracy of first attempts is reported."""
SCHEMA = arrow_files.schema_of(
    {"prompt_id": arrow_files.DICTIONARY, "first_attempt": pa.float32(), "final": pa.float32()}
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation:
    """The results of the held-out set at one version of each policy.

    Example: the answer to problem `b` was wrong at first and right in the end.

    Evaluation(versions={"solver": 20, "verifier": 20}, dataset="chained_addition",
               workflow="actor_and_verify", rows=("a", "b"), first_attempt=[1, 0], final=[1, 1])
    """

    versions: Mapping[str, int]
    """policy → evaluated version."""
    dataset: str
    workflow: str
    rows: tuple[str, ...]
    """[N] prompt ids."""
    first_attempt: Float32
    """[N] 1.0 where the first attempt was right, else 0.0; NaN where the episode failed."""
    final: Float32
    """[N] the same for the workflow's final answer."""
    created_s: float = 0.0
    seconds: float = 0.0
    """Wall-clock time of the evaluation."""
    num_kept: int = 0
    """Its episodes that `evaluation_samples.py` stored."""


def key(evaluation: Evaluation) -> str:
    """Return the key of the evaluation, relative to its run."""
    return layout.evaluation(evaluation.versions)


def create(run: ObjectStore, evaluation: Evaluation) -> None:
    """Create the evaluation; ConflictError when these versions were evaluated already."""
    run.create(key(evaluation), encode(evaluation))


def read(run: ObjectStore, versions: Mapping[str, int]) -> Evaluation:
    """Read the evaluation of these versions; NotFoundError for none, CorruptError with its key."""
    return _read_cached(run, layout.evaluation(versions))


def exists(run: ObjectStore, versions: Mapping[str, int]) -> bool:
    """Return whether these versions were evaluated."""
    return run.exists(layout.evaluation(versions))


def keys(run: ObjectStore, start_after: str = "") -> list[str]:
    """List the keys of all evaluations of the run, in ascending order of versions."""
    return [key for key in run.list(layout.EVALS, start_after) if key.endswith(".arrow")]


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run, in ascending order of versions."""

    readable: tuple[Evaluation, ...]
    unreadable: Mapping[str, str]
    """Key → why it cannot be read. The key `evals`: the evaluations cannot be listed."""


def read_all(
    run: ObjectStore, selected: Sequence[str] | None = None, *, cached: bool = True
) -> Evaluations:
    """Read all evaluations of the run, or those of the keys `selected`.

    Args:
        cached: take those that this process has read before from its cache.
    """
    readable: list[Evaluation] = []
    unreadable: dict[str, str] = {}
    try:
        to_read = keys(run) if selected is None else selected
    except ConfigError as error:
        return Evaluations((), {layout.EVALS: str(error)})
    for name in to_read:
        try:
            readable.append((_read_cached if cached else _read_key)(run, name))
        except (CorruptError, NotFoundError) as error:
            unreadable[name] = str(error)
    return Evaluations(tuple(readable), unreadable)


@dataclass(frozen=True)
class Accuracy:
    """One accuracy of an evaluation. Example: `Accuracy("single_turn", 0.5, 2)`."""

    workflow: str
    accuracy: float
    """In [0, 1]; a failed play counts as wrong."""
    n: int


def scores(evaluation: Evaluation) -> tuple[Accuracy, ...]:
    """Accuracies of an evaluation: of first attempts, then of the workflow if it has others."""
    alone = Accuracy(SOLO_WORKFLOW, _accuracy(evaluation.first_attempt), len(evaluation.rows))
    if evaluation.workflow == SOLO_WORKFLOW:
        return (alone,)
    return alone, Accuracy(evaluation.workflow, _accuracy(evaluation.final), len(evaluation.rows))


def encode(evaluation: Evaluation) -> bytes:
    """Encode an evaluation: one row for each prompt, everything else in the header."""
    header = {
        "versions": dict(evaluation.versions),
        "dataset": evaluation.dataset,
        "workflow": evaluation.workflow,
        "created_s": evaluation.created_s,
        "seconds": evaluation.seconds,
        "num_kept": evaluation.num_kept,
        "write_id": new_write_id(),
    }
    columns = {
        "prompt_id": list(evaluation.rows),
        "first_attempt": evaluation.first_attempt,
        "final": evaluation.final,
    }
    return arrow_files.encode(SCHEMA, columns, KIND, header)


def decode(body: bytes) -> Evaluation:
    """Decode an evaluation; CorruptError for other bytes, and for results outside [0, 1]."""
    table, text = arrow_files.decode(body, SCHEMA, KIND)
    header = build(_Header, text, "the header of an evaluation")
    return Evaluation(
        versions=header.versions,
        dataset=_shown(header.dataset),
        workflow=_shown(header.workflow),
        rows=tuple(arrow_files.strings(table, "prompt_id")),
        first_attempt=_checked_results(
            arrow_files.numbers(table, "first_attempt"), "first_attempt"
        ),
        final=_checked_results(arrow_files.numbers(table, "final"), "final"),
        created_s=header.created_s,
        seconds=header.seconds,
        num_kept=header.num_kept,
    )


def _shown(name: str) -> str:
    """Return a name of a data set or workflow as one line, of NAME_MAX characters at most."""
    return " ".join(name[:NAME_MAX].splitlines())


@dataclass(frozen=True, kw_only=True)
class _Header:
    versions: Annotated[dict[str, Count], Field(min_length=1)]
    dataset: str
    workflow: str
    created_s: UnixTime
    seconds: Quantity
    write_id: str
    num_kept: Count = 0
    """Absent in evaluations of earlier releases."""


def _read_key(run: ObjectStore, name: str) -> Evaluation:
    try:
        evaluation = read_twice(lambda: decode(run.get(name)))
        expected_name = key(evaluation)
    except UNREADABLE as error:
        raise CorruptError(f"{name}: {error}") from error
    if name != expected_name:
        raise CorruptError(f"{name} holds the evaluation of {dict(evaluation.versions)}")
    return evaluation


@remembered(CACHE_MAX)  # a live view reads all of them every second
def _read_cached(run: ObjectStore, name: str) -> Evaluation:
    return _read_key(run, name)


def _checked_results(values: Float32, column: str) -> Float32:
    """Return the column [N]; CorruptError for a value that is neither in [0, 1] nor NaN."""
    is_valid = np.isnan(values) | ((values >= 0) & (values <= 1))
    if (wrong_rows := np.flatnonzero(~is_valid)).size:
        row = wrong_rows[0]
        raise CorruptError(
            f"{column} of row {row} is {values[row]:g}; it is in [0, 1], or NaN for an episode "
            "that failed"
        )
    return values


def _accuracy(answers: Float32) -> float:
    """Share of right answers; a failed play (NaN) counts as wrong. 0 for no answers."""
    return float(np.nan_to_num(answers).mean(dtype=np.float64)) if len(answers) else 0.0
