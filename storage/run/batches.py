"""Batches as Arrow files: what one policy trains on in one step, and its books, in one table.

    fate                  rows
    trained, replayed     sequences, with all their arrays, in the order they are trained on
    filtered, expired     ledger lines, with empty arrays
    waiting               keys that still wait, with empty arrays, in arrival order

The header holds what belongs to the batch as a whole. `decode` believes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from storage import layout
from storage.errors import CorruptError
from storage.formats import arrow_files
from storage.formats.arrow_files import DICTIONARY, Table, list_of, schema_of
from storage.formats.json_objects import build
from storage.formats.ragged_lists import TokenLists
from storage.plain_names import new_write_id
from storage.records.batches import Batch, BatchRow, Entry, SequenceKey
from storage.records.numbers import Count, Number, UnixTime
from storage.records.rollouts import NOBODY
from storage.records.types import Bool, Int32
from storage.run.shards import refuse_temperatures
from storage.store.galloping_search import first_absent
from storage.store.object_store import ObjectStore, read_twice

KIND = "batch"
ROW_FATES = ("trained", "replayed")
LEDGER_FATES = ("filtered", "expired")
WAITING = "waiting"

TOKEN_COLUMNS = {
    "tokens": list_of(pa.int32()),
    "loss_mask": list_of(pa.bool_()),
    "logprobs": list_of(pa.float32()),
    "versions": list_of(pa.int32()),
    "advantages": list_of(pa.float32()),
}
SCHEMA = schema_of(
    {
        "order": pa.int64(),
        "group": pa.int32(),
        "episode": pa.int32(),
        "sequence": pa.int32(),
        "fate": DICTIONARY,
        "reason": DICTIONARY,
        "prompt_id": DICTIONARY,
        **TOKEN_COLUMNS,
        "reward": pa.float64(),
        "temperature": pa.float64(),
        "min_version": pa.int32(),
    }
)


@dataclass(frozen=True, kw_only=True)
class _Header:
    policy: str
    step: Count
    shards: tuple[Count, ...]
    closed_below: Count
    closed: tuple[Count, ...]
    metrics: Mapping[str, Number]
    created_s: UnixTime
    write_id: str


def commit(run: ObjectStore, batch: Batch) -> None:
    """Create the batch; ConflictError when another dataflow made this step's batch first."""
    run.create(layout.batch(batch.policy, batch.step), encode(batch))


def read(run: ObjectStore, policy: str, step: int) -> Batch:
    """NotFoundError while there is no such batch; CorruptError when its bytes, fetched twice, are
    not this batch.
    """
    key = layout.batch(policy, step)
    try:
        batch = read_twice(lambda: decode(run.get(key)))
    except CorruptError as error:
        raise CorruptError(f"{key}: {error}") from error
    if (batch.policy, batch.step) != (policy, step):
        raise CorruptError(f"{key} holds batch {batch.step} of {batch.policy}")
    return batch


def exists(run: ObjectStore, policy: str, step: int) -> bool:
    return run.exists(layout.batch(policy, step))


def next_step(run: ObjectStore, policy: str, start: int = 1) -> int:
    """The first step from `start` on that has no batch."""
    return first_absent(lambda step: exists(run, policy, step), start)


def encode(batch: Batch) -> bytes:
    """The bytes of a batch, with a fresh write id: two encodings of one batch differ."""
    bare = len(batch.ledger) + len(batch.waiting)
    fates = [ROW_FATES[row.replay] for row in batch.rows] + [entry.fate for entry in batch.ledger]
    keys = (
        [row.key for row in batch.rows]
        + [entry.key for entry in batch.ledger]
        + list(batch.waiting)
    )
    places = np.array(keys, dtype=np.int64).reshape(-1, len(SequenceKey._fields))
    columns = {
        **{name: places[:, column] for column, name in enumerate(SequenceKey._fields)},
        "fate": fates + [WAITING] * len(batch.waiting),
        "reason": [""] * len(batch.rows)
        + [entry.reason for entry in batch.ledger]
        + [""] * len(batch.waiting),
        "prompt_id": [row.prompt_id for row in batch.rows] + [""] * bare,
        **{
            name: arrow_files.list_column(
                [getattr(row, name) for row in batch.rows], kind, num_empty=bare
            )
            for name, kind in TOKEN_COLUMNS.items()
        },
        "reward": [row.reward for row in batch.rows] + [0.0] * bare,
        "temperature": [row.temperature for row in batch.rows] + [1.0] * bare,
        "min_version": [row.min_version for row in batch.rows] + [NOBODY] * bare,
    }
    header = _Header(
        policy=batch.policy,
        step=batch.step,
        shards=batch.shards,
        closed_below=batch.closed_below,
        closed=batch.closed,
        metrics=dict(batch.metrics),
        created_s=batch.created_s,
        write_id=new_write_id(),
    )
    return arrow_files.write(SCHEMA, columns, KIND, vars(header))


def decode(body: bytes) -> Batch:
    """The batch in `body`, its arrays read-only views; CorruptError says what is wrong and in which
    row.
    """
    table, text = arrow_files.read(body, SCHEMA, KIND)
    header = build(_Header, text, "a batch's header")
    fates = arrow_files.strings(table, "fate")
    reasons = arrow_files.strings(table, "reason")
    keys = _keys(table)
    num_rows = _check_order(fates)
    num_entries = num_rows + sum(fate in LEDGER_FATES for fate in fates)
    rows = _rows(table, keys[:num_rows], fates[:num_rows])
    entries = zip(
        keys[num_rows:num_entries],
        fates[num_rows:num_entries],
        reasons[num_rows:num_entries],
        strict=True,
    )
    return Batch(
        policy=header.policy,
        step=header.step,
        rows=rows,
        ledger=tuple(Entry(key, fate, reason) for key, fate, reason in entries),  # type: ignore[arg-type]  # fates were checked
        waiting=tuple(keys[num_entries:]),
        shards=header.shards,
        closed_below=header.closed_below,
        closed=header.closed,
        metrics=header.metrics,
        created_s=header.created_s,
    )


def _keys(table: Table) -> list[SequenceKey]:
    columns = [arrow_files.numbers(table, name) for name in SequenceKey._fields]
    for name, column in zip(SequenceKey._fields, columns, strict=True):
        if (wrong := np.flatnonzero(column < 0)).size:
            raise CorruptError(f"row {wrong[0]}: {name} is negative")
    return [SequenceKey(*key) for key in zip(*(column.tolist() for column in columns), strict=True)]


def _check_order(fates: list[str]) -> int:
    """How many rows carry arrays; CorruptError for an unknown fate, or when rows, ledger and
    waiting are mixed.
    """
    places = {
        fate: place
        for place, kind in enumerate((ROW_FATES, LEDGER_FATES, (WAITING,)))
        for fate in kind
    }
    if unknown := set(fates) - places.keys():
        raise CorruptError(f"a batch has the unknown fates {sorted(unknown)}")
    order = [places[fate] for fate in fates]
    if order != sorted(order):
        raise CorruptError("a batch's rows are not in the order trained, ledger, waiting")
    return order.count(0)


def _rows(table: Table, keys: list[SequenceKey], fates: list[str]) -> tuple[BatchRow, ...]:
    lists = TokenLists.of(table, TOKEN_COLUMNS)
    if len(lists.values["tokens"]) != lists.offsets[len(keys)]:
        raise CorruptError("a batch has tokens on a row that is not trained on")
    if (bare := np.flatnonzero(np.diff(lists.offsets[: len(keys) + 1]) == 0)).size:
        raise CorruptError(f"row {bare[0]}: is trained on, yet has no tokens")
    _check_tokens(lists)
    refuse_temperatures(arrow_files.numbers(table, "temperature"))
    _check_ages(lists, arrow_files.numbers(table, "min_version"), len(keys))
    # Rows stand first in the table, so pairing with the shorter list of keys cuts off the rest.
    rows = zip(
        keys,
        arrow_files.strings(table, "prompt_id"),
        *(lists.cut(name) for name in TOKEN_COLUMNS),
        arrow_files.numbers(table, "reward").tolist(),
        arrow_files.numbers(table, "temperature").tolist(),
        arrow_files.numbers(table, "min_version").tolist(),
        (fate == ROW_FATES[1] for fate in fates),
        strict=False,
    )
    return tuple(
        BatchRow(
            key=key,
            prompt_id=prompt_id,
            tokens=tokens,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            advantages=advantages,
            reward=reward,
            temperature=temperature,
            min_version=min_version,
            replay=replay,
        )
        for key, prompt_id, tokens, mask, logprobs, versions, advantages, reward, temperature, min_version, replay in rows
    )


def _check_ages(lists: TokenLists, ages: Int32, num_rows: int) -> None:
    """No row to train on claims to be younger than a token that it trains on. `ages` [rows] is
    `min_version`.

    It may be older: the policy's own tokens that the workflow masked count too, and only the shard
    knows those.
    """
    if (wrong := np.flatnonzero(ages[:num_rows] < 0)).size:
        raise CorruptError(f"row {wrong[0]}: min_version is negative")
    younger = lists.repeat(ages) > lists.values["versions"]
    lists.refuse(
        lists.values["loss_mask"] & younger, "versions are older than the row's min_version"
    )


def _check_tokens(lists: TokenLists) -> None:
    """Every token keeps the promises of `BatchRow`; all rows at once."""
    mask: Bool = lists.values["loss_mask"]
    versions = lists.values["versions"]
    lists.refuse(lists.values["tokens"] < 0, "tokens are negative")
    lists.refuse(mask & (versions < 0), "versions are negative on a token that is trained on")
    lists.refuse(
        ~mask & (versions != NOBODY), "versions name one on a token that is not trained on"
    )
    lists.refuse(
        ~mask & (lists.values["logprobs"] != 0),
        "logprobs are not 0 on a token that is not trained on",
    )
    lists.refuse(
        ~mask & (lists.values["advantages"] != 0),
        "advantages are not 0 on a token that is not trained on",
    )
