"""Audit of one policy's batches: a fold that compares every entry of the ledger with the shards.

waiting ─┬─ + sequences of the shards that batch n ingests
         ├─ − trained (rows), filtered, expired (ledger)    ⇒  must equal what batch n lists
         └─ a fate for a sequence that does not wait is a violation: a second one, one too early
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from storage import layout
from storage.errors import AstraFlowError, TransientError
from storage.records.batches import Batch, BatchRow, SequenceKey
from storage.run import batches, fates
from storage.run.fates import BatchFates, LedgerCounts
from storage.store.object_store import ObjectStore
from storage.verify.missing_numbers import gaps
from storage.verify.shards import ShardAudit, row_digest
from storage.verify.violations import Findings, Invariant

Progress = Callable[[str, float], None]


class LedgerAudit:
    """Audit of one policy's batches, in their order."""

    def __init__(
        self,
        run: ObjectStore,
        policy: str,
        shards: ShardAudit,
        findings: Findings,
        *,
        batch_size: int,
        max_staleness: int,
    ) -> None:
        self._run, self._policy, self._shards, self._findings = run, policy, shards, findings
        self._batch_size, self._max_staleness = batch_size, max_staleness
        self._digests: Mapping[int, Mapping[SequenceKey, str]] = shards.sequences.get(policy, {})
        """order → sequence → digest of what a row must hold."""
        self._waiting: set[SequenceKey] = set()
        self._settled: dict[SequenceKey, str] = {}
        """sequence → key of the batch that gave it its fate."""
        self._trained: set[SequenceKey] = set()
        self._ingested: set[int] = set()
        """Orders whose shards a batch ingested."""
        self._numbers = np.zeros(0, np.int64)
        """The same: compared with every batch, of which there may be as many as orders."""
        self._unknown: set[int] = set()
        """Those whose shard is in quarantine: which sequences they have, the batches alone say."""
        self._counted: list[BatchFates] = []

    def audit(self, steps: Sequence[int], due: int, progress: Progress) -> LedgerCounts:
        """Read the batches.

        Args:
            steps: numbers of the batches that exist, ascending.
            due: the batch that must exist, with all before it; −1 where none must.
        """
        self._check_numbers(steps, due)
        for index, step in enumerate(steps):
            progress(f"batches of {self._policy}", (index + 1) / len(steps))
            key = layout.batch(self._policy, step)
            try:
                batch = batches.read(self._run, self._policy, step)
            except TransientError:
                raise
            except AstraFlowError as error:
                self._findings.add(Invariant.CONTIGUOUS, key, str(error))
                continue
            if len(batch.rows) != self._batch_size:
                self._findings.add(
                    Invariant.CONTIGUOUS,
                    key,
                    f"has {len(batch.rows)} rows; every batch of {self._policy} has "
                    f"{self._batch_size}",
                )
            self._ingest(batch, key)
            self._settle(batch, key)
            self._compare_regions(batch, key)
            self._compare_waiting(batch, key)
            self._counted.append(fates.of_batch(batch))
        in_shards = {order: len(sequences) for order, sequences in self._digests.items()}
        return fates.ledger_counts(len(steps), self._counted, in_shards)

    def _check_numbers(self, steps: Sequence[int], due: int) -> None:
        last = max([0, *steps])
        missing = gaps(steps, 1, max(last, due) + 1)
        for step in missing.first:
            why = f"batch {last} exists" if step < last else "and the run is completed"
            self._findings.add_missing(
                layout.batch(self._policy, step), f"batch {step} is missing, {why}"
            )
        if missing.more:
            self._findings.add(
                Invariant.CONTIGUOUS,
                f"{layout.BATCHES}/{self._policy}",
                f"and {missing.more:,} more batches are missing",
            )

    def _ingest(self, batch: Batch, key: str) -> None:
        """Add the sequences of the shards that the batch ingests."""
        new = set(batch.shards) - self._ingested
        self._numbers = np.append(self._numbers, np.array([*new], np.int64))
        for order in batch.shards:
            if order in self._ingested:
                self._findings.add(Invariant.LEDGER, key, f"takes in shard {order} a second time")
                continue
            if layout.shard(order) in self._shards.quarantined:
                self._unknown.add(order)
            elif order not in self._shards.regions and order not in self._shards.closed_orders:
                self._findings.add(
                    Invariant.LEDGER,
                    key,
                    f"took in shard {order}, which does not exist or cannot be read",
                )
            self._ingested.add(order)
            self._waiting |= self._digests.get(order, {}).keys()
        # Counted, not listed: `closed_below` may be any number.
        is_beyond = self._numbers >= batch.closed_below
        num_beyond = int(np.count_nonzero(is_beyond))
        closed_beyond = {order for order in batch.closed if order >= batch.closed_below}
        num_below = len(self._ingested) - num_beyond
        if (
            num_below != batch.closed_below
            or num_beyond != len(closed_beyond)
            or closed_beyond != set(self._numbers[is_beyond].tolist())
        ):
            self._findings.add(
                Invariant.LEDGER,
                key,
                f"counts {batch.closed_below + len(closed_beyond)} shards as taken in; the batches "
                f"up to it name {len(self._ingested)}",
            )

    def _settle(self, batch: Batch, key: str) -> None:
        """Give the sequences of the batch and of its ledger their fates."""
        for row in batch.rows:
            self._check_row(batch.step, row, key)
            if row.replay:
                if row.key not in self._trained:
                    self._findings.add(
                        Invariant.TRAINED_ONCE,
                        key,
                        f"replays {_name(row.key)}, which was never trained on",
                    )
                continue
            self._settle_sequence(row.key, "trained", key)
            self._trained.add(row.key)
        for entry in batch.ledger:
            self._settle_sequence(entry.key, entry.fate, key)

    def _settle_sequence(self, sequence: SequenceKey, fate: str, key: str) -> None:
        if sequence in self._waiting:
            self._waiting.discard(sequence)
        elif sequence in self._settled:
            self._findings.add(
                Invariant.TRAINED_ONCE if fate == "trained" else Invariant.LEDGER,
                key,
                f"{_name(sequence)} is {fate}, but {self._settled[sequence]} had settled it",
            )
        elif sequence.order not in self._unknown:
            self._findings.add(
                Invariant.LEDGER,
                key,
                f"{_name(sequence)} is {fate}, but no shard taken in so far holds it",
            )
        self._settled[sequence] = key

    def _check_row(self, step: int, row: BatchRow, key: str) -> None:
        expected_digest = self._digests.get(row.key.order, {}).get(row.key)
        if expected_digest is not None and expected_digest != row_digest(row):
            self._findings.add(
                Invariant.TOKENS, key, f"{_name(row.key)} is not as its shard holds it"
            )
        if not np.isfinite(row.advantages).all():
            self._findings.add(
                Invariant.TOKENS,
                key,
                f"{_name(row.key)} has an advantage that is not a finite number",
            )
        trained_versions = row.versions[row.loss_mask]
        if not trained_versions.size:
            return
        newest, staleness = int(np.max(trained_versions)), step - 1 - row.min_version
        if staleness > self._max_staleness and not row.replay:
            self._findings.add(
                Invariant.STALENESS,
                key,
                f"{_name(row.key)} has staleness {staleness}; at most {self._max_staleness} is "
                "allowed",
            )
        if newest > step - 1:
            self._findings.add(
                Invariant.STALENESS,
                key,
                f"{_name(row.key)} has tokens of version {newest}, which batch {step} cannot know",
            )

    def _compare_regions(self, batch: Batch, key: str) -> None:
        """Compare the regions of the rows with those of their shards."""
        regions = {row.key.order: row.region for row in batch.rows}
        if not any(regions.values()):
            return  # batches of earlier releases name none
        for order, region in sorted(regions.items()):
            sampled_in = self._shards.regions.get(order, region)
            if region != sampled_in:
                self._findings.add(
                    Invariant.TOKENS,
                    key,
                    f"names the region {region!r} for order {order}, and its shard {sampled_in!r}",
                )

    def _compare_waiting(self, batch: Batch, key: str) -> None:
        listed = set(batch.waiting)
        for sequence in sorted(self._waiting - listed):
            self._findings.add(
                Invariant.LEDGER, key, f"{_name(sequence)} has vanished: no fate, and not waiting"
            )
        for sequence in sorted(listed - self._waiting):
            if sequence.order in self._unknown and sequence not in self._settled:
                continue
            self._findings.add(
                Invariant.LEDGER,
                key,
                f"{_name(sequence)} is listed as waiting, but it is settled or was never taken in",
            )
        # The dataflow went on from what the batch lists; so does the audit, and reports a violation
        # once and not at every later batch.
        self._waiting = listed


def _name(key: SequenceKey) -> str:
    return f"order {key.order}, prompt {key.group}, episode {key.episode}, sequence {key.sequence}"
