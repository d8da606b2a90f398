"""Outcomes of a team in a promotion log's contests, as Arrow files: created once, used again.

    weights, models, problems, samples, seed, settings
       └──digest──▶ promotions/{name}/outcomes/{digest}.arrow

The key follows from everything that the outcomes depend on, so a champion that stays is not played
again, and a contest that was killed continues. A reader checks the bytes, the key, the ids, and
that each outcome is in [0, 1] or NaN. This module does not play.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from storage import layout
from storage.errors import UNREADABLE, CorruptError
from storage.formats import arrow_files, json_values
from storage.formats.json_objects import build
from storage.plain_names import PartName, new_write_id, quoted
from storage.records.numbers import Count, Quantity, UnixTime
from storage.records.types import Float32, Json
from storage.store.object_store import ObjectStore, read_twice

KIND = "team_outcomes"
EPISODES_MAX = 100_000
"""Episodes of one team on one data set: all of them are in memory while they are played."""
SCHEMA = arrow_files.schema_of(
    {"prompt_id": arrow_files.DICTIONARY, "accuracy": arrow_files.list_of(pa.float32())}
)


@dataclass(frozen=True, kw_only=True)
class PlayConditions:
    """Everything that a team's outcomes on one data set depend on. Example:

    PlayConditions(dataset="gsm8k", prompts="5d0c…", samples=4, seed=7,
                   weights={"solver": "sha256:9f…"}, models={"solver": "91be…"},
                   settings={"workflow": {"name": "single_turn", …}, …})
    """

    dataset: str
    prompts: str
    """`digest_of` the problems, in their order: the seed of an episode depends on it."""
    samples: Annotated[int, Field(ge=1, le=EPISODES_MAX)]
    """Episodes of each problem."""
    seed: Count
    weights: dict[PartName, str]
    """policy → digest of its version's weights."""
    models: dict[PartName, str]
    """policy → `digest_of` what else belongs to its model: tokenizer, configuration, adapter."""
    settings: Json
    """Of the workflow, of the sampling and of the engines."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TeamOutcomes:
    """What one team achieved on one data set. Example: of two samples of problem `a` one is right.

    TeamOutcomes(conditions=PlayConditions(…), problems=("a",), accuracies=[[1.0, 0.0]])
    """

    conditions: PlayConditions
    problems: tuple[str, ...]
    """[P] ids, each once; at least one."""
    accuracies: Float32
    """[P, S] in [0, 1]; NaN where the episode failed."""
    created_s: float = 0.0
    seconds: float = 0.0
    """Wall-clock time of playing."""


def digest_of(value: Any) -> str:
    """Return 64 hex digits: SHA-256 of the value as JSON with sorted keys and without spaces.

    Raises TypeError or ValueError for a value that JSON cannot represent.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def key(name: str, conditions: PlayConditions) -> str:
    """Return the key of the outcomes under these conditions, relative to the store."""
    return layout.outcomes(name, digest_of(asdict(conditions)))


def create(store: ObjectStore, name: str, outcomes: TeamOutcomes) -> None:
    """Create the outcomes; ConflictError when another writer was first."""
    store.create(key(name, outcomes.conditions), encode(outcomes))


def read(store: ObjectStore, name: str, conditions: PlayConditions) -> TeamOutcomes:
    """Read the outcomes under these conditions.

    Raises:
        NotFoundError: they were not played.
        CorruptError: the object is damaged, or that of other conditions; it has the key.
    """
    at = key(name, conditions)
    try:
        outcomes = read_twice(lambda: decode(store.get(at)))
        if key(name, outcomes.conditions) != at:
            raise CorruptError("holds the outcomes of other versions, problems or settings")
    except UNREADABLE as error:
        raise CorruptError(
            f"{store.url}/{at}: {error}; put it back from a copy, or delete it to have it played "
            "again"
        ) from error
    return outcomes


def encode(outcomes: TeamOutcomes) -> bytes:
    """Encode outcomes: one row for each problem, everything else in the header."""
    header = {
        **asdict(outcomes.conditions),
        "created_s": outcomes.created_s,
        "seconds": outcomes.seconds,
        "write_id": new_write_id(),
    }
    columns = {
        "prompt_id": list(outcomes.problems),
        "accuracy": arrow_files.list_column(
            list(outcomes.accuracies), SCHEMA.field("accuracy").type
        ),
    }
    return arrow_files.encode(SCHEMA, columns, KIND, header)


def decode(body: bytes) -> TeamOutcomes:
    """Decode outcomes; CorruptError for other bytes, ids, shapes, and values outside [0, 1]."""
    table, text = arrow_files.decode(body, SCHEMA, KIND)
    header = build(_Header, text, "the header of outcomes")
    if fault := json_values.fault(header.settings):  # the key is a digest of them as JSON
        raise CorruptError(f"{quoted(fault[0])} in its settings {fault[1]}")
    problems = tuple(arrow_files.strings(table, "prompt_id"))
    values, offsets = arrow_files.lists(table, "accuracy")
    _check_problems(problems, header.samples)
    lengths = np.diff(offsets)
    if (other := np.flatnonzero(lengths != header.samples)).size:
        raise CorruptError(
            f"row {other[0]} has {lengths[other[0]]} outcomes; the header says {header.samples} "
            "samples of each problem"
        )
    accuracies = values.reshape(len(problems), header.samples)
    is_valid = np.isnan(accuracies) | ((accuracies >= 0) & (accuracies <= 1))
    if not is_valid.all():
        row, sample = (int(index[0]) for index in np.nonzero(~is_valid))
        raise CorruptError(
            f"sample {sample} of row {row} is {accuracies[row, sample]:g}; it is in [0, 1], or NaN "
            "for an episode that failed"
        )
    conditions = {each.name: getattr(header, each.name) for each in fields(PlayConditions)}
    return TeamOutcomes(
        conditions=PlayConditions(**conditions),
        problems=problems,
        accuracies=accuracies,
        created_s=header.created_s,
        seconds=header.seconds,
    )


@dataclass(frozen=True, kw_only=True)
class _Header(PlayConditions):
    created_s: UnixTime
    seconds: Quantity
    write_id: str


def _check_problems(problems: tuple[str, ...], samples: int) -> None:
    """Raise CorruptError for no problem, too many episodes, and an id that is there twice."""
    if not problems or len(problems) * samples > EPISODES_MAX:
        raise CorruptError(
            f"{len(problems):,} problems with {samples:,} samples each are no outcomes; there is "
            f"at least one, and at most {EPISODES_MAX:,} episodes"
        )
    seen: set[str] = set()
    for problem in problems:
        if problem in seen:
            raise CorruptError(f"the problem {quoted(problem)} is there twice")
        seen.add(problem)
