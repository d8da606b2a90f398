from dataclasses import replace

import pytest

from data_ops.dataflow.admission import Lag, Need, Yield, demand, orders_to_admit

NEED = Need(steps=80, batches=0, version=0, batch_size=8, waiting=0, groups=0, group_yield=4.0)
"""Two groups fill a batch."""


def test_the_first_admission_covers_all_steps_within_the_staleness() -> None:
    # (0 + 1 + 3 − 0) · 8 = 32 sequences = 8 groups = 4 orders of 2
    assert orders_to_admit([NEED], max_staleness=3, prompts_per_order=2) == 4


def test_outstanding_and_waiting_sequences_reduce_the_budget() -> None:
    # demand 32 − 12 = 20 = 5 groups; 3 are outstanding; 2 groups = 1 order
    assert orders_to_admit([replace(NEED, waiting=12, groups=3)], 3, 2) == 1
    assert orders_to_admit([replace(NEED, waiting=12, groups=5)], 3, 2) == 0


def test_the_last_order_overshoots_the_budget_by_less_than_one_order() -> None:
    # 1 sequence short: one order of 2 groups, although it yields 8 sequences
    assert orders_to_admit([replace(NEED, waiting=31)], 3, 2) == 1
    assert orders_to_admit([replace(NEED, waiting=32)], 3, 2) == 0


def test_each_new_version_admits_one_more_batch() -> None:
    full = replace(NEED, batches=1, waiting=24)
    assert demand(full, max_staleness=3) == 0
    assert demand(replace(full, version=1), max_staleness=3) == 8


def test_the_lag_of_workers_reduces_the_budget() -> None:
    # (0 + 1 + 3 − 2 − 0) · 8 = 16 sequences: rows would be too old for batches 3 and 4
    assert demand(replace(NEED, lag=2), max_staleness=3) == 16
    # the next batch is always in demand: rows that are too old expire and are ordered again
    assert demand(replace(NEED, lag=5), max_staleness=3) == 8
    assert demand(replace(NEED, lag=1), max_staleness=0) == 8


def test_the_lag_is_an_average_of_versions_rounded_up() -> None:
    measured = Lag()
    assert measured.value == 0
    measured.observe(admitted=5, played=5)
    measured.observe(
        admitted=5, played=7
    )  # newer weights do not reduce the demand: the next order may have a lower yield
    assert measured.value == 0
    measured.observe(admitted=5, played=4)
    assert measured.value == 1
    for _ in range(100):
        measured.observe(admitted=5, played=3)
    assert measured.value == 2


def test_one_late_shard_raises_the_lag_by_a_tenth_of_its_own_and_fades() -> None:
    measured = Lag()
    measured.observe(admitted=12, played=0)
    assert measured.value == 2  # 1.2, of which 0.05 is rounded down
    for _ in range(30):
        measured.observe(admitted=12, played=12)
    assert measured.value == 1  # 1.2 · 0.9³⁰ = 0.051
    measured.observe(admitted=12, played=12)
    assert measured.value == 0


def test_admission_stops_at_the_remaining_steps() -> None:
    # 2 of 80 batches are missing: 16 sequences = 4 groups = 2 orders
    assert orders_to_admit([replace(NEED, batches=78, version=77)], 8, 2) == 2


def test_a_lower_yield_admits_more() -> None:
    # 32 sequences at 2 a group = 16 groups = 8 orders
    assert orders_to_admit([replace(NEED, group_yield=2.0)], 3, 2) == 8


def test_without_a_version_nothing_is_admitted() -> None:
    assert orders_to_admit([NEED, replace(NEED, version=None)], 3, 2) == 0


def test_a_finished_policy_is_ignored_with_or_without_a_version() -> None:
    finished = replace(NEED, batches=80, version=None)
    assert orders_to_admit([finished], 3, 2) == 0
    assert orders_to_admit([NEED, finished], 3, 2) == 4


def test_a_policy_short_of_sequences_is_served_although_another_has_enough() -> None:
    enough = replace(NEED, waiting=40)
    assert orders_to_admit([enough], 3, 2) == 0
    assert orders_to_admit([NEED, enough], 3, 2) == 4


def test_a_policy_with_a_large_backlog_stops_admission_for_all() -> None:
    # 4 · (3 + 1) · 8 = 128 sequences is the maximum for one policy
    assert orders_to_admit([NEED, replace(NEED, waiting=128)], 3, 2) == 0
    # 120 waiting: 2 more groups = 1 order
    assert orders_to_admit([NEED, replace(NEED, waiting=120)], 3, 2) == 1


def test_synchronous_training_admits_one_batch_per_version() -> None:
    assert orders_to_admit([NEED], max_staleness=0, prompts_per_order=2) == 1
    assert orders_to_admit([replace(NEED, batches=1)], 0, 2) == 0
    assert orders_to_admit([replace(NEED, batches=1, version=1)], 0, 2) == 1


def test_the_yield_starts_high_and_follows_the_kept_share() -> None:
    measured = Yield(samples_per_prompt=8)
    assert measured.value == 32.0  # four sequences per episode
    measured.observe(num_groups=4, num_kept=16)
    assert measured.value == pytest.approx(
        (3 * 32 + 4) / 4
    )  # the initial estimate has the weight of three shards
    measured.observe(num_groups=4, num_kept=32)
    assert measured.value == pytest.approx((3 * 32 + 4 + 8) / 5)
    measured.observe(num_groups=0, num_kept=0)
    assert measured.value == pytest.approx((3 * 32 + 4 + 8) / 5)
    for _ in range(200):
        measured.observe(num_groups=1, num_kept=6)
    measured.observe(num_groups=1, num_kept=7)
    assert measured.value == pytest.approx(6 + 0.1 * 1)


def test_shards_without_rows_change_the_yield_by_a_limited_amount() -> None:
    measured = Yield(samples_per_prompt=8)
    measured.observe(num_groups=4, num_kept=0)
    assert measured.value == 24.0
    for _ in range(1000):
        measured.observe(num_groups=4, num_kept=0)
    assert measured.value == 0.5  # never 0


def test_the_yield_never_falls_below_its_floor() -> None:
    measured = Yield(samples_per_prompt=8)
    for _ in range(200):
        measured.observe(num_groups=1, num_kept=0)
    assert measured.value == 0.5
