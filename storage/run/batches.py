"""Batches as Arrow files: the sequences of one step and its part of the ledger, in one table.

    fate                  rows
    trained, replayed     sequences, with all their arrays, in training order
    filtered, expired     ledger entries, with empty arrays
    waiting               keys of waiting sequences, with empty arrays, in arrival order

The header has the fields of the batch as a whole. `decode` validates everything.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from storage import layout, plain_names
from storage.errors import CorruptError
from storage.formats import arrow_files
from storage.formats.arrow_files import DICTIONARY, Compression, Table, list_of, schema_of
from storage.formats.arrow_sizes import check_sequences
from storage.formats.json_objects import build
from storage.formats.ragged_lists import TokenLists
from storage.plain_names import new_write_id
from storage.records.batches import Batch, BatchRow, LedgerEntry, SequenceKey
from storage.records.numbers import Count, Number, UnixTime
from storage.records.rollouts import NOT_SAMPLED
from storage.records.types import Bool, Int32
from storage.run.shard_checks import check_temperatures
from storage.store.galloping_search import first_absent
from storage.store.object_store import ObjectStore, read_twice

KIND = "batch"
ROW_FATES = ("trained", "replayed")
LEDGER_FATES = ("filtered", "expired")
WAITING = "waiting"
REASON_MAX = 200
"""Characters of a reason; longer ones are cut when they are read: a small batch may have one of
megabytes in thousands of entries.
"""

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
    regions: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    """Region → the orders of the rows that it sampled: a shard has one region."""
    write_id: str


def create(run: ObjectStore, batch: Batch) -> None:
    """Create the batch; ConflictError when a batch of this step exists."""
    run.create(layout.batch(batch.policy, batch.step), encode(batch))


def read(run: ObjectStore, policy: str, step: int) -> Batch:
    """Read a batch; NotFoundError while it does not exist, CorruptError for an invalid one."""
    key = layout.batch(policy, step)
    try:
        batch = read_twice(lambda: decode(run.get(key)))
    except CorruptError as error:
        raise CorruptError(f"{key}: {error}") from error
    if (batch.policy, batch.step) != (policy, step):
        raise CorruptError(f"{key} holds batch {batch.step} of {plain_names.quoted(batch.policy)}")
    return batch


def exists(run: ObjectStore, policy: str, step: int) -> bool:
    """Return whether the step has a batch."""
    return run.exists(layout.batch(policy, step))


def steps(run: ObjectStore, policy: str) -> list[int]:
    """List the steps that have a batch, ascending."""
    return layout.numbers(run.list(f"{layout.BATCHES}/{policy}/"), partial(layout.batch, policy))


def is_lost(run: ObjectStore, policy: str, step: int) -> bool:
    """Return whether a step has no batch, although the next step has one.

    A batch that is made meanwhile is not lost.
    """
    return exists(run, policy, step + 1) and not exists(run, policy, step)


def next_step(run: ObjectStore, policy: str, start: int = 1) -> int:
    """Return the lowest step, not below `start`, that has no batch."""
    return first_absent(lambda step: exists(run, policy, step), start)


def encode(batch: Batch, compression: Compression = "lz4") -> bytes:
    """Encode a batch, with a new write id: two encodings of one batch differ."""
    rows, ledger, waiting = batch.rows, batch.ledger, batch.waiting
    num_empty = len(ledger) + len(waiting)
    keys = [row.key for row in rows] + [entry.key for entry in ledger] + list(waiting)
    key_parts = np.array(keys, dtype=np.int64).reshape(-1, len(SequenceKey._fields))
    fates = [ROW_FATES[row.replay] for row in rows] + [entry.fate for entry in ledger]
    reasons = [""] * len(rows) + [entry.reason for entry in ledger] + [""] * len(waiting)
    columns = {
        **{name: key_parts[:, column] for column, name in enumerate(SequenceKey._fields)},
        "fate": fates + [WAITING] * len(waiting),
        "reason": reasons,
        "prompt_id": [row.prompt_id for row in rows] + [""] * num_empty,
        **{
            name: arrow_files.list_column([getattr(row, name) for row in rows], kind, num_empty)
            for name, kind in TOKEN_COLUMNS.items()
        },
        "reward": [row.reward for row in rows] + [0.0] * num_empty,
        "temperature": [row.temperature for row in rows] + [1.0] * num_empty,
        "min_version": [row.min_version for row in rows] + [NOT_SAMPLED] * num_empty,
    }
    header = _Header(
        policy=batch.policy,
        step=batch.step,
        shards=batch.shards,
        closed_below=batch.closed_below,
        closed=batch.closed,
        metrics=dict(batch.metrics),
        created_s=batch.created_s,
        regions=_regions(rows),
        write_id=new_write_id(),
    )
    return arrow_files.encode(SCHEMA, columns, KIND, vars(header), compression)


def decode(body: bytes) -> Batch:
    """Decode and validate a batch; its arrays are read-only views of `body`.

    Raises CorruptError, which names the row and what is wrong with it.
    """
    table, text = arrow_files.decode(body, SCHEMA, KIND)
    header = build(_Header, text, "a batch's header")
    fates = arrow_files.strings(table, "fate")
    reasons = arrow_files.strings(table, "reason", REASON_MAX)
    keys = _keys(table)
    num_rows = _check_order(fates)
    check_sequences(num_rows, len(body), KIND)  # those of a writer have tokens, and more bytes
    num_entries = num_rows + sum(fate in LEDGER_FATES for fate in fates)
    rows = _rows(table, keys[:num_rows], fates[:num_rows], _region_of(header.regions))
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
        ledger=tuple(LedgerEntry(key, fate, reason) for key, fate, reason in entries),  # type: ignore[arg-type]  # fates were checked
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
        if (wrong_rows := np.flatnonzero(column < 0)).size:
            raise CorruptError(f"row {wrong_rows[0]}: {name} is negative")
    return [SequenceKey(*key) for key in zip(*(column.tolist() for column in columns), strict=True)]


def _check_order(fates: list[str]) -> int:
    """Return the number of rows with arrays.

    Raises CorruptError for an unknown fate, or when rows, ledger and waiting are mixed.
    """
    section_of = {
        fate: section
        for section, section_fates in enumerate((ROW_FATES, LEDGER_FATES, (WAITING,)))
        for fate in section_fates
    }
    if unknown := set(fates) - section_of.keys():
        raise CorruptError(f"a batch has the unknown fate {plain_names.quoted(min(unknown))}")
    sections = [section_of[fate] for fate in fates]
    if sections != sorted(sections):
        raise CorruptError("a batch's rows are not in the order trained, ledger, waiting")
    return sections.count(0)


def _regions(rows: Iterable[BatchRow]) -> dict[str, tuple[int, ...]]:
    """Return region → orders of these rows, both ascending; unknown regions are left out."""
    region_of: dict[int, str] = {}
    for row in rows:
        # An order that was lost and sampled again elsewhere could have two: the first is kept.
        region_of.setdefault(row.key.order, row.region)
    orders_of: dict[str, list[int]] = {}
    for order in sorted(region_of):
        orders_of.setdefault(region_of[order], []).append(order)
    return {region: tuple(orders_of[region]) for region in sorted(orders_of.keys() - {""})}


def _region_of(regions: Mapping[str, tuple[int, ...]]) -> dict[int, str]:
    """Return order → region; CorruptError for an invalid name, and for an order of two regions."""
    region_of: dict[int, str] = {}
    for region, orders in regions.items():
        if not layout.NAME.fullmatch(region):
            raise CorruptError(
                f"a batch has the region {plain_names.quoted(region)}, which is not a valid name"
            )
        for order in orders:
            if region_of.setdefault(order, region) != region:
                raise CorruptError(f"a batch has order {order} in two regions")
    return region_of


def _rows(
    table: Table, keys: list[SequenceKey], fates: list[str], region_of: Mapping[int, str]
) -> tuple[BatchRow, ...]:
    lists = TokenLists.from_table(table, TOKEN_COLUMNS)
    if len(lists.values["tokens"]) != lists.offsets[len(keys)]:
        raise CorruptError("a batch has tokens on a row that is not trained on")
    if (empty_rows := np.flatnonzero(np.diff(lists.offsets[: len(keys) + 1]) == 0)).size:
        raise CorruptError(f"row {empty_rows[0]}: is trained on, yet has no tokens")
    _check_tokens(lists)
    check_temperatures(arrow_files.numbers(table, "temperature"))
    _check_min_versions(lists, arrow_files.numbers(table, "min_version"), len(keys))
    # Rows come first in the table, so pairing with the shorter list of keys drops the others.
    rows = zip(
        keys,
        arrow_files.strings(table, "prompt_id"),
        *(lists.rows(name) for name in TOKEN_COLUMNS),
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
            region=region_of.get(key.order, ""),
        )
        for (
            key,
            prompt_id,
            tokens,
            mask,
            logprobs,
            versions,
            advantages,
            reward,
            temperature,
            min_version,
            replay,
        ) in rows
    )


def _check_min_versions(lists: TokenLists, min_versions: Int32, num_rows: int) -> None:
    """Check that no trained token has a version below its row's `min_version` [rows].

    All of them may be above it: `min_version` also counts tokens that the workflow masked, whose
    versions only the shard has.
    """
    if (wrong_rows := np.flatnonzero(min_versions[:num_rows] < 0)).size:
        raise CorruptError(f"row {wrong_rows[0]}: min_version is negative")
    is_older = lists.values["versions"] < lists.repeat(min_versions)
    lists.raise_where(
        lists.values["loss_mask"] & is_older, "versions are older than the row's min_version"
    )


def _check_tokens(lists: TokenLists) -> None:
    """Check every token against the promises of `BatchRow`."""
    mask: Bool = lists.values["loss_mask"]
    versions = lists.values["versions"]
    lists.raise_where(lists.values["tokens"] < 0, "tokens are negative")
    lists.raise_where(mask & (versions < 0), "versions are negative on a token that is trained on")
    lists.raise_where(
        ~mask & (versions != NOT_SAMPLED), "versions name one on a token that is not trained on"
    )
    lists.raise_where(
        ~mask & (lists.values["logprobs"] != 0),
        "logprobs are not 0 on a token that is not trained on",
    )
    lists.raise_where(
        ~mask & (lists.values["advantages"] != 0),
        "advantages are not 0 on a token that is not trained on",
    )
