"""Ingested shards as bytes, for a task runner whose tasks run in other processes.

    IngestedShard ──encode──▶ {"shard.json": …, "solver.arrow": …, "verifier.arrow": …}
                  ◀──decode──

Each policy's rows and ledger entries have the Arrow form of a batch (`storage/run/batches.py`), of
step 0, without compression, which takes longer than the ingestion itself. The decoded shard is not
part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_ops.dataflow.shard_ingest import EpisodeOutcome, IngestedGroups, IngestedShard
from storage.formats.json_objects import build, dump
from storage.records.batches import Batch
from storage.records.numbers import Count, Number, UnixTime
from storage.run import batches

_HEADER = "shard.json"


@dataclass(frozen=True, kw_only=True)
class _GroupsHeader:
    rewards: tuple[Number, ...]
    num_groups: Count
    num_groups_kept: Count


@dataclass(frozen=True, kw_only=True)
class _Header:
    order: Count
    problem: str
    policies: Mapping[str, _GroupsHeader]
    episodes: tuple[EpisodeOutcome, ...]
    num_groups: Count
    num_sampled: Count
    finished_s: UnixTime


class IngestedShards:
    """The result of one ingest task: objects within a process, bytes between two processes.

    No dataclass, and no list: Prefect remembers the parts of such results by their `id`.
    """

    def __init__(self, shards: Sequence[IngestedShard], seconds: float) -> None:
        self._shards = tuple(shards)
        self._files: Sequence[Mapping[str, bytes]] = ()
        self.seconds = seconds
        """How long the task took, its reads included."""

    @property
    def shards(self) -> Sequence[IngestedShard]:
        """The shards, decoded when they are first asked for: Prefect unpickles a result twice.

        Raises CorruptError for bytes that were changed on their way.
        """
        if self._files:
            self._shards, self._files = tuple(map(decode, self._files)), ()
        return self._shards

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a function's name and bytes; task runners use pickle for every result."""
        return _transferred, ([encode(shard) for shard in self.shards], self.seconds)


def encode(ingested: IngestedShard) -> dict[str, bytes]:
    """Return the files of an ingested shard: name → bytes."""
    header = _Header(
        order=ingested.order,
        problem=ingested.problem,
        policies={
            policy: _GroupsHeader(
                rewards=tuple(groups.rewards.tolist()),
                num_groups=groups.num_groups,
                num_groups_kept=groups.num_groups_kept,
            )
            for policy, groups in ingested.policies.items()
        },
        episodes=ingested.episodes,
        num_groups=ingested.num_groups,
        num_sampled=ingested.num_sampled,
        finished_s=ingested.finished_s,
    )
    return {
        _HEADER: dump(header),
        **{
            f"{policy}.arrow": batches.encode(_as_batch(policy, groups), compression=None)
            for policy, groups in ingested.policies.items()
        },
    }


def decode(files: Mapping[str, bytes]) -> IngestedShard:
    """Return the ingested shard of these files, without `shard`. CorruptError for damaged files."""
    header = build(_Header, files[_HEADER], _HEADER)
    policies: dict[str, IngestedGroups] = {}
    for policy, groups in header.policies.items():
        batch = batches.decode(files[f"{policy}.arrow"])
        policies[policy] = IngestedGroups(
            rows=batch.rows,
            entries=batch.ledger,
            rewards=np.array(groups.rewards, dtype=np.float64),
            num_groups=groups.num_groups,
            num_groups_kept=groups.num_groups_kept,
        )
    return IngestedShard(
        order=header.order,
        problem=header.problem,
        policies=policies,
        episodes=header.episodes,
        num_groups=header.num_groups,
        num_sampled=header.num_sampled,
        finished_s=header.finished_s,
    )


def _transferred(files: Sequence[Mapping[str, bytes]], seconds: float) -> IngestedShards:
    result = IngestedShards((), seconds)
    result._files = files
    return result


def _as_batch(policy: str, groups: IngestedGroups) -> Batch:
    return Batch(
        policy=policy,
        step=0,
        rows=groups.rows,
        ledger=groups.entries,
        waiting=(),
        shards=(),
        closed_below=0,
        closed=(),
    )
