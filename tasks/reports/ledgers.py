"""The ledgers of a run in its report, counted by the functions of `verify`."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage.errors import UNREADABLE, NotFoundError
from storage.run import batches, fates
from storage.run.fates import BatchFates, LedgerCounts
from storage.store.object_store import ObjectStore
from tasks.monitoring.training_curves import READERS, History
from tasks.reports.shard_log import ShardLog


@dataclass(frozen=True)
class LedgerRow:
    """One row of a policy's ledger. Example: `LedgerRow("solver", "filtered: …", 120, 0.25)`."""

    policy: str
    fate: str
    sequences: int
    share: float


def read_batch_fates(
    run: ObjectStore, history: History, known: Mapping[int, BatchFates]
) -> dict[int, BatchFates]:
    """Return step → counts of every batch of the policy that can be read.

    Those of `history`, which has a sample of a long run's steps, and of `known`, an earlier
    reading, are not read again.
    """
    counted = {
        **known,
        **{step.number: step.fates for step in history.steps if step.fates is not None},
    }

    def read(step: int) -> BatchFates | None:
        if step in counted:
            return counted[step]
        try:
            return fates.of_batch(batches.read(run, history.policy, step))
        except (NotFoundError, *UNREADABLE):
            return None

    steps = batches.steps(run, history.policy)
    with ThreadPoolExecutor(READERS, thread_name_prefix="ledger") as pool:
        listed = zip(steps, pool.map(read, steps), strict=True)
        return {step: each for step, each in listed if each is not None}


def counts(policy: str, counted: Mapping[int, BatchFates], log: ShardLog) -> LedgerCounts:
    """Return the counts of one policy's ledger. The batches were read before the shards."""
    return fates.ledger_counts(len(counted), counted.values(), log.sequences(policy))


def rows(policy: str, ledger: LedgerCounts) -> list[LedgerRow]:
    """Return the rows of one policy's table: the most frequent fate first, `waiting` last."""
    by_fate = {
        "trained": ledger.trained,
        "replayed": ledger.replayed,
        **{f"filtered: {reason}": count for reason, count in ledger.reasons.items()},
        "expired": ledger.expired,
    }
    ordered = sorted(by_fate.items(), key=lambda item: -item[1])
    named = [(fate, count) for fate, count in ordered if count] + [("waiting", ledger.waiting)]
    total = sum(count for _, count in named)
    return [
        LedgerRow(policy, fate, count, count / total if total else 0.0) for fate, count in named
    ]


def all_rows(counted: Mapping[str, Mapping[int, BatchFates]], log: ShardLog) -> Sequence[LedgerRow]:
    """Return the rows of every policy that has a batch or a sequence."""
    return [
        row
        for policy, of_policy in counted.items()
        if of_policy or log.sequences(policy)
        for row in rows(policy, counts(policy, of_policy, log))
    ]
