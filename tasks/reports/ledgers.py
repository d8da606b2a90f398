"""The ledgers of a run in its report, counted by the functions of `verify`, and what is left out of
them, because it is damaged or missing: the numbers of the report are too low by that.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage.errors import UNREADABLE, NotFoundError
from storage.run import batches, fates
from storage.run.fates import BatchFates, LedgerCounts
from storage.store.object_store import ObjectStore
from storage.verify.missing_numbers import gaps
from tasks.monitoring.status_schema import Status
from tasks.monitoring.training_curves import READERS, STEPS_READ_MAX, History, sample
from tasks.reports.shard_log import ShardLog

NUMBERS_MAX = 5
"""Numbers that one sentence names."""


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


def left_out(
    status: Status,
    histories: Sequence[History],
    fates: Mapping[str, Collection[int]],
    log: ShardLog,
) -> list[str]:
    """Return a sentence for the shards, and one for the steps of each policy, that are left out.

    Args:
        fates: policy → steps whose batch was read.
    """
    problems = []
    if log.unreadable:
        problems.append(f"this page leaves out the unreadable {_numbers('shard', log.unreadable)}")
    for history in histories:
        progress = status.policies[history.policy]
        # The newest batch is named by the status, and its version may not exist yet.
        batches_read = set(fates[history.policy])
        unread = gaps(sorted(batches_read), 1, progress.batches)  # counted: there may be any number
        read = {step.number for step in history.steps if step.is_complete}
        published = range(0 if progress.version is None else progress.version + 1)
        counted = range(1, progress.batches)
        steps = {
            step
            for step in sample(history.num_steps, STEPS_READ_MAX)
            if step in published
            and step not in read
            and (step in batches_read or step not in counted)
        }
        steps |= set(unread.first)
        if steps:
            problems.append(
                "this page leaves out the batch or the version of "
                f"{_numbers('step', steps, unread.more)} of "
                f"{history.policy}, which is unreadable or missing"
            )
    return [f"{problem}: see `astraflow verify {status.run_id}`" for problem in problems]


def _numbers(noun: str, numbers: Collection[int], num_others: int = 0) -> str:
    """Return `step 4`, or `steps 1, 4, 7 and 20 more`. The others are above the lowest hundred."""
    if len(numbers) == 1:
        return f"{noun} {min(numbers)}"
    named = ", ".join(map(str, sorted(numbers)[:NUMBERS_MAX]))
    more = len(numbers) + num_others - NUMBERS_MAX
    return f"{noun}s {named} and {more} more" if more > 0 else f"{noun}s {named}"
