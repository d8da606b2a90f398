"""What a report leaves out, because it is damaged or missing: its numbers are too low by that."""

from collections.abc import Collection, Mapping, Sequence

from tasks.monitoring.status_schema import Status
from tasks.monitoring.training_curves import STEPS_READ_MAX, History, sample
from tasks.reports.shard_log import ShardLog

NUMBERS_MAX = 5
"""Numbers that one sentence names."""


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
        steps = set(range(1, progress.batches)) - set(fates[history.policy])
        read = {step.number for step in history.steps if step.is_complete}
        published = range(0 if progress.version is None else progress.version + 1)
        steps |= {*sample(history.num_steps, STEPS_READ_MAX)}.intersection(published) - read
        if steps:
            problems.append(
                f"this page leaves out the batch or the version of {_numbers('step', steps)} of "
                f"{history.policy}, which is unreadable or missing"
            )
    return [f"{problem}: see `astraflow verify {status.run_id}`" for problem in problems]


def _numbers(noun: str, numbers: Collection[int]) -> str:
    """Return `step 4`, or `steps 1, 4, 7 and 20 more`."""
    if len(numbers) == 1:
        return f"{noun} {min(numbers)}"
    named = ", ".join(map(str, sorted(numbers)[:NUMBERS_MAX]))
    more = len(numbers) - NUMBERS_MAX
    return f"{noun}s {named} and {more} more" if more > 0 else f"{noun}s {named}"
