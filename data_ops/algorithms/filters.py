"""Built-in filters: which (prompt, policy) groups are kept after rollout (`protocols.Filter`)."""

from typing import Literal

from data_ops.algorithms.advantages import rewards_equal
from data_ops.algorithms.named import Named
from data_ops.algorithms.policy_groups import PolicyGroup


class ZeroAdvantage(Named):
    """DAPO's dynamic sampling (arXiv 2503.14476): drop a group whose rewards are all equal.

    Equal up to rounding (`rewards_equal`), as in the advantages. Rewards are compared as the
    workflow gave them, before any length penalty. A group of one is always dropped: its advantage
    is 0.
    """

    name: Literal["zero_advantage"] = "zero_advantage"

    def make(self, key: str) -> "ZeroAdvantage":
        """Return the filter."""
        return self

    def keep(self, group: PolicyGroup) -> bool:
        return not rewards_equal(group.rewards)
