"""Shards as Arrow files: one row per sequence; data of episodes and groups in the header.

    row      group episode sequence | tokens loss_mask logprobs owners versions
             | policy_set reward temperature starts_episode name finish_reason
    header   order attempt worker region weights policy_sets
             | groups: prompt, episodes: reward metrics error failure_kind seconds

The header keeps episodes that failed without a sequence. `decode` validates everything
(`shard_checks.py`): a shard that it returns fulfils every promise of
`storage.records.rollouts.Sequence`. Log-probabilities and rewards may be NaN or infinite: such a
value spoils one sequence, which the dataflow filters.

`encode_groups` and `decode_groups` are the part without the order: `evaluation_samples.py` stores
its episodes with them, too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from storage import layout
from storage.errors import ConfigError, ConflictError, CorruptError, ObjectTooLargeError
from storage.formats import arrow_files
from storage.formats.arrow_files import DICTIONARY, Table, list_of, schema_of
from storage.formats.arrow_sizes import check_sequences
from storage.formats.json_objects import build
from storage.formats.ragged_lists import TokenLists
from storage.plain_names import new_write_id
from storage.records.numbers import Count, Number, UnixTime
from storage.records.rollouts import (
    Episode,
    FailureKind,
    Group,
    Prompt,
    Sequence,
    Shard,
)
from storage.records.types import Json
from storage.run.shard_checks import (
    TOKEN_DTYPES,
    check_failure,
    check_finish_reasons,
    check_policies,
    check_policy_names,
    check_temperatures,
    check_tokens,
)
from storage.store.backend import check_size
from storage.store.object_store import ObjectStore, read_twice

KIND = "shard"
POLICIES_MIN, BYTES_PER_POLICY = 2**14, 2
"""A file may have this many policies of sequences, and one for each so many of its bytes. A row
takes some 24 bytes, and has one policy in most workflows.
"""
NAME_MAX = 100
"""Characters of the names of worker, region and sequence; longer ones are cut when they are read: a
small shard may have one of megabytes in thousands of sequences.
"""
TOKEN_COLUMNS = {name: list_of(pa.from_numpy_dtype(dtype)) for name, dtype in TOKEN_DTYPES.items()}
SCHEMA = schema_of(
    {
        "group": pa.int32(),
        "episode": pa.int32(),
        "sequence": pa.int32(),
        **TOKEN_COLUMNS,
        "policy_set": pa.int32(),
        "reward": pa.float64(),
        "temperature": pa.float64(),
        "starts_episode": pa.bool_(),
        "name": DICTIONARY,
        "finish_reason": DICTIONARY,
    }
)


@dataclass(frozen=True, kw_only=True)
class _EpisodeHeader:
    reward: Number
    metrics: Mapping[str, Number]
    error: str | None
    seconds: Number
    num_sequences: Count
    failure_kind: FailureKind | None = None
    """Absent in shards of earlier releases."""


@dataclass(frozen=True)
class GroupHeader:
    """What the header of a file has of one group."""

    prompt: Prompt
    episodes: tuple[_EpisodeHeader, ...]


PolicySets: TypeAlias = tuple[tuple[str, ...], ...]
"""The distinct `Sequence.policies` of a file; its column `policy_set` indexes them."""


class GroupsHeader(Protocol):
    """Header of a file with groups of episodes."""

    @property
    def groups(self) -> tuple[GroupHeader, ...]: ...
    @property
    def policy_sets(self) -> PolicySets: ...


H = TypeVar("H", bound=GroupsHeader)


@dataclass(frozen=True, kw_only=True)
class _Header:
    order: Count
    attempt: Count
    worker: str
    region: str
    groups: tuple[GroupHeader, ...]
    weights: Mapping[str, Mapping[int, str]]
    started_s: UnixTime
    finished_s: UnixTime
    policy_sets: PolicySets
    write_id: str


def create(run: ObjectStore, shard: Shard) -> bool:
    """Create the shard; return False when another result of the same order exists already.

    Raises:
        ObjectTooLargeError: the shard is larger than readers accept.
        ConfigError: the store cannot be written.
    """
    key = layout.shard(shard.order)
    try:
        body = encode(shard)
        check_size(key, len(body), key)
    except (ConfigError, CorruptError, OverflowError) as error:
        raise ObjectTooLargeError(str(error)) from error
    try:
        run.create(key, body)
    except ConflictError:
        return False
    return True


def read(run: ObjectStore, order: int) -> Shard:
    """Read the shard of an order.

    Raises NotFoundError while the order has no shard, CorruptError for an invalid one.
    """
    key = layout.shard(order)
    try:
        shard = read_twice(lambda: decode(run.get(key)))
    except CorruptError as error:
        raise CorruptError(f"{key}: {error}") from error
    if shard.order != order:
        raise CorruptError(f"{key} holds the shard of order {shard.order}")
    return shard


def exists(run: ObjectStore, order: int) -> bool:
    """Return whether the order has a shard."""
    return run.exists(layout.shard(order))


def encode(shard: Shard) -> bytes:
    """Encode a shard, with a new write id: two encodings of one shard differ."""
    return encode_groups(shard.groups, KIND, lambda sets: vars(_header(shard, sets)))


def encode_groups(
    groups: tuple[Group, ...], kind: str, header_of: Callable[[PolicySets], Json]
) -> bytes:
    """Encode groups of episodes, with a row for each sequence.

    Args:
        header_of: returns the fields of the file's header, those of `GroupsHeader` among them.

    Raises:
        ConfigError: the rows or the header are larger than readers accept.
        OverflowError: a column would have 2³¹ values or more.
    """
    rows = [
        (group_index, episode_index, sequence_index, sequence)
        for group_index, group in enumerate(groups)
        for episode_index, episode in enumerate(group.episodes)
        for sequence_index, sequence in enumerate(episode.sequences)
    ]
    sequences = [row[3] for row in rows]
    distinct_sets = dict.fromkeys(s.policies for s in sequences)
    policy_sets = {policies: index for index, policies in enumerate(distinct_sets)}
    columns = {
        "group": [row[0] for row in rows],
        "episode": [row[1] for row in rows],
        "sequence": [row[2] for row in rows],
        **{
            name: arrow_files.list_column([getattr(s, name) for s in sequences], kind)
            for name, kind in TOKEN_COLUMNS.items()
        },
        "policy_set": [policy_sets[s.policies] for s in sequences],
        "reward": [s.reward for s in sequences],
        "temperature": [s.temperature for s in sequences],
        "starts_episode": [s.starts_episode for s in sequences],
        "name": [s.name for s in sequences],
        "finish_reason": [s.finish_reason for s in sequences],
    }
    body = arrow_files.encode(SCHEMA, columns, kind, header_of(tuple(policy_sets)))
    try:
        check_sequences(len(sequences), len(body), kind)
        _check_num_policies(sum(len(s.policies) for s in sequences), body, kind)
    except CorruptError as error:
        raise ConfigError(str(error)) from error
    return body


def decode(body: bytes) -> Shard:
    """Decode and validate a shard; its arrays are read-only views of `body`.

    Raises CorruptError, which names the row and what is wrong with it.
    """
    header, groups = decode_groups(body, KIND, _Header)
    check_policy_names(header.weights)
    return Shard(
        order=header.order,
        attempt=header.attempt,
        worker=header.worker[:NAME_MAX],
        region=header.region[:NAME_MAX],
        groups=groups,
        weights=header.weights,
        started_s=header.started_s,
        finished_s=header.finished_s,
    )


def decode_groups(body: bytes, kind: str, header_type: type[H]) -> tuple[H, tuple[Group, ...]]:
    """Decode and validate groups of episodes: returns the header and the groups.

    Raises CorruptError, as `decode`.
    """
    table, text = arrow_files.decode(body, SCHEMA, kind)
    check_sequences(table.num_rows, len(body), kind)
    header = build(header_type, text, f"a {kind}'s header")
    _check_header(header)
    _check_keys(table, header, kind)
    sequences = iter(_sequences(table, header.policy_sets, kind, body))
    return header, tuple(
        Group(group.prompt, tuple(_episode(episode, sequences) for episode in group.episodes))
        for group in header.groups
    )


def group_headers(groups: tuple[Group, ...]) -> tuple[GroupHeader, ...]:
    """Return what a file's header has of the groups; their sequences are its rows."""
    return tuple(
        GroupHeader(
            group.prompt,
            tuple(
                _EpisodeHeader(
                    reward=episode.reward,
                    metrics=dict(episode.metrics),
                    error=episode.error,
                    seconds=episode.seconds,
                    num_sequences=len(episode.sequences),
                    failure_kind=episode.failure_kind,
                )
                for episode in group.episodes
            ),
        )
        for group in groups
    )


def _header(shard: Shard, policy_sets: PolicySets) -> _Header:
    return _Header(
        order=shard.order,
        attempt=shard.attempt,
        worker=shard.worker,
        region=shard.region,
        groups=group_headers(shard.groups),
        weights={policy: dict(versions) for policy, versions in shard.weights.items()},
        started_s=shard.started_s,
        finished_s=shard.finished_s,
        policy_sets=policy_sets,
        write_id=new_write_id(),
    )


def _episode(header: _EpisodeHeader, sequences: Iterator[Sequence]) -> Episode:
    """Build an episode from its header and the next `num_sequences` of `sequences`."""
    return Episode(
        sequences=tuple(islice(sequences, header.num_sequences)),
        reward=header.reward,
        metrics=header.metrics,
        error=header.error,
        failure_kind=header.failure_kind,
        seconds=header.seconds,
    )


def _check_header(header: GroupsHeader) -> None:
    for episode in (episode for group in header.groups for episode in group.episodes):
        check_failure(episode.error, episode.failure_kind)
    for policies in header.policy_sets:
        check_policies(policies)


def _check_keys(table: Table, header: GroupsHeader, kind: str) -> None:
    """Check that the rows are exactly the sequences that the header lists, in the same order."""
    num_listed = sum(episode.num_sequences for group in header.groups for episode in group.episodes)
    # Before `listed` is built: a header may list any number of sequences.
    if num_listed != table.num_rows:
        raise CorruptError(
            f"a {kind} has {table.num_rows} rows; its header lists {num_listed} sequences"
        )
    listed = [
        (group_index, episode_index, sequence_index)
        for group_index, group in enumerate(header.groups)
        for episode_index, episode in enumerate(group.episodes)
        for sequence_index in range(episode.num_sequences)
    ]
    actual = np.stack(
        [arrow_files.numbers(table, name) for name in ("group", "episode", "sequence")], axis=1
    )
    expected = np.array(listed, dtype=np.int32).reshape(actual.shape)
    if (wrong_rows := np.flatnonzero((actual != expected).any(axis=1))).size:
        row = int(wrong_rows[0])
        raise CorruptError(
            f"row {row} of a {kind} is group, episode, sequence {actual[row]}; "
            f"expected {expected[row]}"
        )


def _check_num_policies(num_policies: int, body: bytes, kind: str) -> None:
    """Check the number of policies of all sequences together: each is work for every reader."""
    if num_policies > max(POLICIES_MIN, len(body) // BYTES_PER_POLICY):
        raise CorruptError(
            f"the sequences of a {kind} of {len(body)} bytes have {num_policies} policies "
            "together; that is too many"
        )


def _sequences(table: Table, policy_sets: PolicySets, kind: str, body: bytes) -> list[Sequence]:
    lists = TokenLists.from_table(table, TOKEN_COLUMNS)
    check_temperatures(arrow_files.numbers(table, "temperature"))
    set_indices = arrow_files.numbers(table, "policy_set")
    if ((set_indices < 0) | (set_indices >= len(policy_sets))).any():
        raise CorruptError(
            f"a {kind}'s policy_set names one of {len(policy_sets)} sets that does not exist"
        )
    set_sizes = np.array([len(policies) for policies in policy_sets], dtype=np.int64)
    _check_num_policies(int(set_sizes[set_indices].sum()), body, kind)
    check_tokens(lists, set_sizes[set_indices])
    reasons = arrow_files.strings(table, "finish_reason")
    check_finish_reasons(reasons)
    rows = zip(
        *(lists.rows(name) for name in TOKEN_COLUMNS),
        [policy_sets[index] for index in set_indices.tolist()],
        arrow_files.numbers(table, "reward").tolist(),
        arrow_files.numbers(table, "temperature").tolist(),
        arrow_files.numbers(table, "starts_episode").tolist(),
        arrow_files.strings(table, "name", NAME_MAX),
        reasons,
        strict=True,
    )
    return [
        Sequence(
            tokens=tokens,
            loss_mask=mask,
            logprobs=logprobs,
            owners=owners,
            versions=versions,
            policies=policies,
            reward=reward,
            temperature=temperature,
            starts_episode=starts_episode,
            name=name,
            finish_reason=reason,
        )
        for (
            tokens,
            mask,
            logprobs,
            owners,
            versions,
            policies,
            reward,
            temperature,
            starts_episode,
            name,
            reason,
        ) in rows
    ]
