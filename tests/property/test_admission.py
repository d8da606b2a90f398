"""Admission stays within its budget and never blocks permanently, for any yields and speeds."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from data_ops.dataflow.admission import BACKLOG_MAX, Need, demand, orders_to_admit

PROMPTS_PER_ORDER = 2


@dataclass(kw_only=True)
class Policy:
    """A policy as admission models it; groups arrive complete and contribute `group_yield` rows of
    the newest version.
    """

    batch_size: int
    group_yield: int
    steps: int
    version: int = 0
    batches: int = 0
    groups: int = 0
    rows: list[int] = field(default_factory=list)
    """Version of each waiting row."""

    def need(self) -> Need:
        return Need(
            steps=self.steps,
            batches=self.batches,
            version=self.version,
            batch_size=self.batch_size,
            waiting=len(self.rows),
            groups=self.groups,
            group_yield=float(self.group_yield),
        )

    def make_batches(self, max_staleness: int) -> None:
        while True:
            self.rows = [
                version for version in self.rows if self.batches - version <= max_staleness
            ]
            if (
                self.batches >= self.steps
                or self.batches > self.version
                or len(self.rows) < self.batch_size
            ):
                return
            self.rows = sorted(self.rows)[self.batch_size :]
            self.batches += 1


policies = st.builds(
    Policy, batch_size=st.integers(1, 40), group_yield=st.integers(1, 16), steps=st.integers(1, 6)
)


@settings(max_examples=150)
@given(st.lists(policies, min_size=1, max_size=3), st.integers(0, 4), st.data())
def test_every_policy_gets_its_batches_within_the_budget(
    everyone: list[Policy], max_staleness: int, data: st.DataObject
) -> None:
    for _ in range(4000):
        if all(policy.batches == policy.steps for policy in everyone):
            return
        admitted = orders_to_admit(
            [policy.need() for policy in everyone], max_staleness, PROMPTS_PER_ORDER
        )
        if admitted:
            unfinished = [policy for policy in everyone if policy.batches < policy.steps]
            for policy in everyone:
                policy.groups += admitted * PROMPTS_PER_ORDER
            # At most one order exceeds the budget of the policy with the largest demand.
            assert any(
                (policy.groups - PROMPTS_PER_ORDER) * policy.group_yield
                < demand(policy.need(), max_staleness)
                for policy in unfinished
            )
            for policy in unfinished:
                backlog_max = BACKLOG_MAX * (max_staleness + 1) * policy.batch_size
                excess = (
                    len(policy.rows)
                    + (policy.groups - PROMPTS_PER_ORDER) * policy.group_yield
                    - backlog_max
                )
                assert excess < 1e-6
        if data.draw(st.booleans()) or not any(policy.groups for policy in everyone):
            for policy in everyone:
                if policy.batches > policy.version:
                    policy.version += 1
        for policy in everyone:
            if policy.groups:
                policy.groups -= 1
                policy.rows += [policy.version] * policy.group_yield
            policy.make_batches(max_staleness)
    raise AssertionError(f"livelock: {everyone}")
