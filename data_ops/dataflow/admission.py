"""Decide how many orders may be outstanding: pure arithmetic on counts.

AReaL's rule (arXiv 2505.24298), with S = max_staleness and B = batch_size. Work that is sampled at
version v can be used up to batch v + 1 + S. Workers are l versions behind the newest one when they
play an order, as measured on finished orders, so an order that is admitted at version v brings rows
for batches up to v − l + 1 + S. With b batches made and w rows waiting, a policy can use

    demand = (min(v + 1 + max(0, S − l), steps) − b) · B − w        sequences,

and is *short* while the outstanding orders are expected to bring fewer:  outstanding groups · yield
< demand. The yield is the number of sequences that a group brings this policy, measured after
filtering. An order is admitted while any unfinished policy is short; since orders are indivisible
the last one may overshoot, by less than one order.

**Several policies share every rollout**, so what is just enough for one is too much for another
whose trainer is slower or whose groups are filtered less. The rule "admit while *all* policies are
short" would slow the fast policies down to the slow one. "While *any* is short" costs no rollout
that was not needed, and what another policy cannot use expires by staleness. A policy whose trainer
makes no progress expires nothing, though, and its backlog would grow: nothing is admitted while any
unfinished policy has more than `BACKLOG_MAX` times the (S + 1) · B sequences that staleness could
ever let it use. Its trainer, once it runs, always brings it below that again: it has batches to
train on, and each one makes rows too old. So the bound delays, but never deadlocks.

**S = 0** needs nothing special: a policy has no demand from the moment batch v + 1 is made until
version v + 1 exists, so no order is admitted for it before the weights to play it with exist. Rows
that come from older weights all the same (a worker had not polled the new version, or the order was
admitted for another policy) expire, and expired rows raise the demand again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

YIELD_WEIGHT = 0.1
"""Least weight of the newest shard in a policy's yield."""
YIELD_GUESS = 4
"""Sequences an episode is expected to bring before any shard is finished: too many rather than too
few, because surplus rows of the first version would all expire together. What is then missing is
ordered after the first shards.
"""
YIELD_GUESS_SHARDS = 3
"""Weight of the guess, in shards: a first shard without a row to train on must not admit a flood of
orders.
"""
YIELD_SHARE_MIN = 1 / 16
"""Least expected yield, as a share of `samples_per_prompt`: a bound for when nothing is kept."""
BACKLOG_MAX = 4
"""Sequences of one policy that may wait or be outstanding before others have to wait for it, in
multiples of (S + 1) · B.
"""

LAG_WEIGHT = 0.1
"""Weight of the newest shard in a policy's lag."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The counts of one policy."""

    steps: int
    """Batches to make in all."""
    batches: int
    """Batches made."""
    version: int | None
    """Newest version; None while there is none, and then nothing is admitted."""
    batch_size: int
    waiting: int
    """Waiting rows."""
    groups: int
    """Groups of outstanding orders that are not ingested for this policy."""
    group_yield: float
    """Sequences a group is expected to bring, after filtering."""
    lag: int = 0
    """Versions that an order's oldest token is expected to lie behind the newest version at the
    order's admission.
    """


@dataclass
class Yield:
    """Sequences per group that one policy keeps: the mean over the guess and the first shards, then
    an exponential average.
    """

    samples_per_prompt: int
    _average: float = field(init=False)
    _num_shards: int = 0

    def __post_init__(self) -> None:
        self._average = float(YIELD_GUESS * self.samples_per_prompt)

    def observe(self, num_groups: int, num_kept: int) -> None:
        """Record that a shard of `num_groups` groups brought `num_kept` rows."""
        if num_groups:
            self._num_shards += 1
            weight = max(YIELD_WEIGHT, 1 / (YIELD_GUESS_SHARDS + self._num_shards))
            self._average += weight * (num_kept / num_groups - self._average)

    @property
    def value(self) -> float:
        return max(self._average, YIELD_SHARE_MIN * self.samples_per_prompt)


@dataclass
class Lag:
    """Versions between the weights that were newest when an order was admitted and the oldest that
    played it: an exponential average over shards, rounded up, because a row that is too old by one
    version is lost as a whole.
    """

    _average: float = 0.0

    def observe(self, admitted: int, played: int) -> None:
        """Record that an order of version `admitted` was played with weights as old as `played`."""
        self._average += LAG_WEIGHT * (max(0, admitted - played) - self._average)

    @property
    def value(self) -> int:
        return math.ceil(self._average - LAG_WEIGHT / 2)


def orders_to_admit(needs: Sequence[Need], max_staleness: int, prompts_per_order: int) -> int:
    """Return how many more orders to write now.

    Example: one policy with a demand of 20 sequences, 1 outstanding group of yield 8, and 2 prompts
    an order: 1 more order, after which 24 sequences are outstanding.
    """
    unfinished = [need for need in needs if need.batches < need.steps]
    if not unfinished or any(need.version is None for need in unfinished):
        return 0
    num_short = max(_groups_short(need, max_staleness) for need in unfinished)
    num_allowed = min(_groups_below_backlog(need, max_staleness) for need in unfinished)
    return max(0, math.ceil(min(num_short, num_allowed) / prompts_per_order))


def demand(need: Need, max_staleness: int) -> int:
    """Return how many sequences sampled from now on the policy can use, outstanding ones included;
    may be negative.
    """
    last_batch = (need.version or 0) + 1 + max(0, max_staleness - need.lag)
    num_batches = min(last_batch, need.steps) - need.batches
    return num_batches * need.batch_size - need.waiting


def _groups_short(need: Need, max_staleness: int) -> float:
    return demand(need, max_staleness) / need.group_yield - need.groups


def _groups_below_backlog(need: Need, max_staleness: int) -> float:
    backlog_max = BACKLOG_MAX * (max_staleness + 1) * need.batch_size
    return (backlog_max - need.waiting) / need.group_yield - need.groups
