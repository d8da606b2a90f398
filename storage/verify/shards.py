"""Audit of orders and shards, and what the other audits need to know of every sequence.

A shard is read once. Little of it stays in memory: of each sequence its policies, and a digest of
what each policy's trainer must receive.
"""

import struct
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import xxhash

from storage import layout
from storage.errors import AstraFlowError, TransientError
from storage.records.batches import BatchRow, SequenceKey
from storage.records.rollouts import Sequence, Shard
from storage.records.types import Bool, Float32, Int32
from storage.run import orders, shards
from storage.run.quarantine import is_set_aside
from storage.store.object_store import ObjectStore
from storage.verify.frozen_prompts import PromptAudit
from storage.verify.missing_numbers import gaps
from storage.verify.violations import Findings, Invariant

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class _OrderTerms:
    """What an order asked for."""

    prompt_ids: list[str]
    samples: int
    """Episodes of each prompt."""


class ShardAudit:
    """Audit of a run's orders and shards."""

    def __init__(
        self,
        run: ObjectStore,
        quarantined: Mapping[str, str],
        findings: Findings,
        prompts: PromptAudit,
    ) -> None:
        self.quarantined = quarantined
        """Key of an object in quarantine → reason."""
        self.num_orders = self.num_shards = self.num_sequences = 0
        self.closed_orders = set(layout.numbers(quarantined, layout.order))
        """Orders in quarantine: the dataflow closes them without sequences, whatever their shards
        have.
        """
        self.regions: dict[int, str] = {}
        """Orders whose shard can be read → its region; empty for an unknown one."""
        self.sequences: dict[str, dict[int, dict[SequenceKey, str]]] = {}
        """policy → order → sequence → digest of what the policy's trainer must receive of it."""
        self._run, self._findings, self._prompts = run, findings, prompts
        self._worker_digests: dict[tuple[str, int], dict[str, str]] = {}
        """(policy, version) → digest of the weights of a worker → key of the first such shard."""

    def audit(self, progress: Progress) -> None:
        """Read every order and shard of the run."""
        # Shards are listed first: their orders were written before them.
        numbers = self._numbers(layout.SHARDS, layout.shard)
        ordered = self._numbers(layout.ORDERS, layout.order)
        self.num_orders, self.num_shards = len(ordered), len(numbers)
        with_order = self.closed_orders.union(ordered)
        self._check_order_numbers(sorted(with_order))
        terms = self._read_orders(ordered, progress)
        for index, number in enumerate(numbers):
            progress("shards", (index + 1) / len(numbers))
            if number not in with_order:
                self._findings.add(
                    Invariant.CONTIGUOUS,
                    layout.shard(number),
                    f"answers order {number}, which does not exist",
                )
            if not is_set_aside(self.quarantined, number):
                self._audit_shard(number, terms.get(number))

    def check_versions(self, published: Mapping[str, Mapping[int, str]]) -> None:
        """Check that every version that a token names exists, with the digest that its worker had.

        Args:
            published: policy → version → digest.
        """
        for (policy, version), digests in sorted(self._worker_digests.items()):
            published_digest = published.get(policy, {}).get(version)
            for digest, key in digests.items():
                if published_digest is None:
                    self._findings.add(
                        Invariant.VERSIONS_EXIST,
                        key,
                        f"has tokens of version {version} of {policy}, which does not exist",
                    )
                elif digest != published_digest:
                    self._findings.add(
                        Invariant.VERSIONS_EXIST,
                        key,
                        f"was sampled with weights {digest}, but version {version} of {policy} is "
                        f"{published_digest}",
                    )

    def _numbers(self, folder: str, key_of: Callable[[int], str]) -> list[int]:
        keys = self._findings.listed(folder, lambda: self._run.list(folder))
        return layout.numbers(keys, key_of)

    def _check_order_numbers(self, ordered: Many[int]) -> None:
        last = max(ordered, default=-1)
        missing = gaps(ordered, 0, last)
        for number in missing.first:
            self._findings.add(
                Invariant.CONTIGUOUS,
                layout.order(number),
                f"order {number} is missing, order {last} exists",
            )
        if missing.more:
            self._findings.add(
                Invariant.CONTIGUOUS,
                layout.ORDERS,
                f"and {missing.more:,} more orders are missing, order {last} exists",
            )

    def _read_orders(self, numbers: Many[int], progress: Progress) -> dict[int, _OrderTerms]:
        """Read every order that can be read."""
        terms: dict[int, _OrderTerms] = {}
        for index, number in enumerate(numbers):
            progress("orders", (index + 1) / len(numbers))
            try:
                order = orders.read(self._run, number)
            except TransientError:
                raise
            except AstraFlowError as error:
                if number not in self.closed_orders:
                    self._findings.add(Invariant.CONTIGUOUS, layout.order(number), str(error))
            else:
                self._prompts.check(order)
                prompt_ids = [prompt.id for prompt in order.prompts]
                terms[number] = _OrderTerms(prompt_ids, order.samples_per_prompt)
        return terms

    def _audit_shard(self, number: int, terms: _OrderTerms | None) -> None:
        key = layout.shard(number)
        try:
            shard = shards.read(self._run, number)
        except TransientError:
            raise
        except AstraFlowError as error:
            self._findings.add(
                Invariant.LEDGER, key, f"cannot be read and is not in quarantine: {error}"
            )
            return
        self.regions[number] = shard.region if layout.NAME.fullmatch(shard.region) else ""
        if terms is not None:
            self._check_terms(shard, terms, key)
        for policy, versions in shard.weights.items():
            for version, digest in versions.items():
                self._worker_digests.setdefault((policy, version), {}).setdefault(digest, key)
        for g, group in enumerate(shard.groups):
            for e, episode in enumerate(group.episodes):
                for s, sequence in enumerate(episode.sequences):
                    self.num_sequences += 1
                    self._add_sequence(shard, SequenceKey(number, g, e, s), sequence)

    def _check_terms(self, shard: Shard, terms: _OrderTerms, key: str) -> None:
        prompt_ids = [group.prompt.id for group in shard.groups]
        if prompt_ids != terms.prompt_ids:
            self._findings.add(
                Invariant.CONTIGUOUS,
                key,
                f"answers the prompts {prompt_ids}, its order asked for {terms.prompt_ids}",
            )
        for group in shard.groups:
            if len(group.episodes) != terms.samples:
                self._findings.add(
                    Invariant.CONTIGUOUS,
                    key,
                    f"has {len(group.episodes)} episodes of {group.prompt.id}, its order asked for "
                    f"{terms.samples}",
                )

    def _add_sequence(self, shard: Shard, key: SequenceKey, sequence: Sequence) -> None:
        """Check the versions of a sequence's tokens, and keep its digest for each policy."""
        for policy, of_policy in sequence.sampled_by():
            named = shard.weights.get(policy, {})
            versions = np.unique(sequence.versions[of_policy]).tolist()
            if unnamed := [version for version in versions if version not in named]:
                more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
                self._findings.add(
                    Invariant.VERSIONS_EXIST,
                    layout.shard(key.order),
                    f"{_name(key)} has tokens of version {unnamed[0]}{more} of {policy}, whose "
                    "weights it does not name",
                )
            digest = _trainer_digest(
                shard.groups[key.group].prompt.id,
                sequence.tokens,
                sequence.loss_mask & of_policy,
                sequence.logprobs,
                sequence.versions,
                sequence.min_version(policy),
                sequence.reward,
                sequence.temperature,
            )
            self.sequences.setdefault(policy, {}).setdefault(key.order, {})[key] = digest


def row_digest(row: BatchRow) -> str:
    """Digest what a trainer receives in a batch row; equals that of the sequence in its shard."""
    return _trainer_digest(
        row.prompt_id,
        row.tokens,
        row.loss_mask,
        row.logprobs,
        row.versions,
        row.min_version,
        row.reward,
        row.temperature,
    )


def _trainer_digest(
    prompt_id: str,
    tokens: Int32,
    mask: Bool,
    logprobs: Float32,
    versions: Int32,
    min_version: int,
    reward: float,
    temperature: float,
) -> str:
    """Digest everything of a sequence that a batch repeats.

    Args:
        tokens, mask, logprobs, versions: [L]; the last two count where `mask` is True.
    """
    digest = xxhash.xxh3_128(struct.pack("<qidd", len(tokens), min_version, reward, temperature))
    for part, dtype in (
        (tokens, np.int32),
        (mask, np.bool_),
        (logprobs[mask], np.float32),
        (versions[mask], np.int32),
    ):
        digest.update(np.ascontiguousarray(part, dtype).tobytes())
    # Of this process only. Python keeps the hash of a text, which thousands of rows may share.
    digest.update(struct.pack("<q", hash(prompt_id)))
    return digest.hexdigest()


def _name(key: SequenceKey) -> str:
    return f"sequence {key.sequence} of episode {key.episode} of prompt {key.group}"
