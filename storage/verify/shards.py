"""Invariants 1 and 4 over orders and shards; remembers of every sequence what the books are held
against.

A shard is read once. What stays in memory of it is small: per sequence, its policies and a digest
of what each policy's trainer must see; the tokens themselves are dropped.
"""

import struct
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import xxhash

from storage import layout
from storage.errors import AstraFlowError, TransientError
from storage.records.batches import BatchRow, SequenceKey
from storage.records.rollouts import Sequence, Shard
from storage.records.types import Bool, Float32, Int32
from storage.run import orders, shards
from storage.store.object_store import ObjectStore
from storage.verify.missing_numbers import gaps

Broken = Callable[[int, str, str], None]
Progress = Callable[[str, float], None]


@dataclass(kw_only=True)
class ShardAudit:
    """What the shards of a run hold."""

    num_orders: int
    num_shards: int
    num_sequences: int = 0
    readable: set[int] = field(default_factory=set)
    """Orders whose shard can be read."""
    seen_by: dict[str, dict[int, dict[SequenceKey, str]]] = field(default_factory=dict)
    """policy → order → sequence → digest of what the policy's trainer must see of it."""
    held: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)
    """(policy, version) → digest that workers held → key of the first shard that says so."""

    def check_versions(self, published: Mapping[str, Mapping[int, str]], broken: Broken) -> None:
        """Every version a token names exists, and was held as it was published: policy → version →
        digest.
        """
        for (policy, version), digests in sorted(self.held.items()):
            true = published.get(policy, {}).get(version)
            for digest, where in digests.items():
                if true is None:
                    broken(
                        4,
                        where,
                        f"has tokens of version {version} of {policy}, which does not exist",
                    )
                elif digest != true:
                    broken(
                        4,
                        where,
                        f"was sampled with weights {digest}, but version {version} of {policy} is "
                        f"{true}",
                    )


@dataclass(frozen=True)
class _Asked:
    """What a shard must answer."""

    prompt_ids: list[str]
    samples: int
    """Episodes of each prompt."""


def audit_shards(
    run: ObjectStore, set_aside: Mapping[str, str], broken: Broken, progress: Progress
) -> ShardAudit:
    """Read every order and shard of the run."""
    # Shards are listed first: their orders were written before them.
    numbers = layout.numbers(run.list(f"{layout.SHARDS}/"), layout.shard)
    ordered = set(layout.numbers(run.list(f"{layout.ORDERS}/"), layout.order))
    audit = ShardAudit(num_orders=len(ordered), num_shards=len(numbers))
    last = max(ordered, default=-1)
    missing = gaps(sorted(ordered), 0, last)
    for number in missing.first:
        broken(1, layout.order(number), f"order {number} is missing, order {last} exists")
    if missing.more:
        broken(
            1, layout.ORDERS, f"and {missing.more:,} more orders are missing, order {last} exists"
        )
    asked = _read_orders(run, sorted(ordered), broken, progress)
    for at, number in enumerate(numbers):
        progress("shards", (at + 1) / len(numbers))
        if number not in ordered:
            broken(1, layout.shard(number), f"answers order {number}, which does not exist")
        if layout.shard(number) not in set_aside:
            _audit_shard(run, number, asked.get(number), audit, broken)
    return audit


def _read_orders(
    run: ObjectStore, numbers: Many[int], broken: Broken, progress: Progress
) -> dict[int, _Asked]:
    """What each order that can be read asked for."""
    asked: dict[int, _Asked] = {}
    for at, number in enumerate(numbers):
        progress("orders", (at + 1) / len(numbers))
        try:
            order = orders.read(run, number)
        except TransientError:
            raise
        except AstraFlowError as error:
            broken(1, layout.order(number), str(error))
        else:
            asked[number] = _Asked(
                [prompt.id for prompt in order.prompts], order.samples_per_prompt
            )
    return asked


def _audit_shard(
    run: ObjectStore, number: int, asked: _Asked | None, audit: ShardAudit, broken: Broken
) -> None:
    where = layout.shard(number)
    try:
        shard = shards.read(run, number)
    except TransientError:
        raise
    except AstraFlowError as error:
        broken(6, where, f"cannot be read and is not in quarantine: {error}")
        return
    audit.readable.add(number)
    if asked is not None:
        _check_answer(shard, asked, where, broken)
    for policy, versions in shard.weights.items():
        for version, digest in versions.items():
            audit.held.setdefault((policy, version), {}).setdefault(digest, where)
    for group_at, group in enumerate(shard.groups):
        for episode_at, episode in enumerate(group.episodes):
            for sequence_at, sequence in enumerate(episode.sequences):
                audit.num_sequences += 1
                key = SequenceKey(number, group_at, episode_at, sequence_at)
                _note_sequence(shard, key, sequence, audit, broken)


def _check_answer(shard: Shard, asked: _Asked, where: str, broken: Broken) -> None:
    answered = [group.prompt.id for group in shard.groups]
    if answered != asked.prompt_ids:
        broken(1, where, f"answers the prompts {answered}, its order asked for {asked.prompt_ids}")
    for group in shard.groups:
        if len(group.episodes) != asked.samples:
            broken(
                1,
                where,
                f"has {len(group.episodes)} episodes of {group.prompt.id}, its order asked for "
                f"{asked.samples}",
            )


def _note_sequence(
    shard: Shard, key: SequenceKey, sequence: Sequence, audit: ShardAudit, broken: Broken
) -> None:
    where = layout.shard(key.order)
    for index, policy in enumerate(sequence.policies):
        own = sequence.owners == index
        if not own.any():
            continue
        for version in np.unique(sequence.versions[own]).tolist():
            if version not in shard.weights.get(policy, {}):
                broken(
                    4,
                    where,
                    f"{_name(key)} has tokens of version {version} of {policy}, whose weights it "
                    "does not name",
                )
        digest = view_digest(
            shard.groups[key.group].prompt.id,
            sequence.tokens,
            sequence.loss_mask & own,
            sequence.logprobs,
            sequence.versions,
            sequence.min_version(policy),
            sequence.reward,
            sequence.temperature,
        )
        audit.seen_by.setdefault(policy, {}).setdefault(key.order, {})[key] = digest


def row_digest(row: BatchRow) -> str:
    """Digest of what a trainer sees of a batch row; equals that of the sequence it came from."""
    return view_digest(
        row.prompt_id,
        row.tokens,
        row.loss_mask,
        row.logprobs,
        row.versions,
        row.min_version,
        row.reward,
        row.temperature,
    )


def view_digest(
    prompt_id: str,
    tokens: Int32,
    mask: Bool,
    logprobs: Float32,
    versions: Int32,
    oldest: int,
    reward: float,
    temperature: float,
) -> str:
    """Digest of all of a sequence that a batch repeats. `tokens` and `mask` are [L]; `logprobs` and
    `versions`, [L] too, count where the mask is True.
    """
    digest = xxhash.xxh3_128(struct.pack("<qidd", len(tokens), oldest, reward, temperature))
    for part, dtype in (
        (tokens, np.int32),
        (mask, np.bool_),
        (logprobs[mask], np.float32),
        (versions[mask], np.int32),
    ):
        digest.update(np.ascontiguousarray(part, dtype).tobytes())
    digest.update(prompt_id.encode())
    return digest.hexdigest()


def _name(key: SequenceKey) -> str:
    return f"sequence {key.sequence} of episode {key.episode} of prompt {key.group}"
