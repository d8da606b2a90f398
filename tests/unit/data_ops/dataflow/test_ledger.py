from collections.abc import Callable
from dataclasses import replace

import pytest

from data_ops.algorithms.samplers import Draft, Edf, Fifo
from data_ops.dataflow import ledger as ledger_module
from data_ops.dataflow.ledger import Ledger
from storage.errors import ConfigError
from storage.records.batches import Batch, BatchRow, LedgerEntry, SequenceKey
from tests.support.runs.builders import row


def key(order: int, place: int = 0) -> SequenceKey:
    return SequenceKey(order, 0, place, 0)


def rows(order: int, *versions: int) -> tuple[BatchRow, ...]:
    return tuple(row(key(order, place), version=version) for place, version in enumerate(versions))


def new_ledger(max_staleness: int = 8) -> Ledger:
    return Ledger("solver", batch_size=2, max_staleness=max_staleness)


def no_rows(count: int) -> tuple[BatchRow, ...]:
    return ()


def assemble(ledger: Ledger) -> Batch | None:
    return ledger.assemble([Edf()], 0, no_rows)


def made(ledger: Ledger) -> Batch:
    """Assemble the next batch and mark it as committed."""
    batch = assemble(ledger)
    assert batch is not None
    ledger.advance(batch)
    return batch


def test_a_batch_has_exactly_its_size_and_the_rest_waits() -> None:
    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0))
    assert assemble(ledger) is None
    ledger.ingest(1, rows(1, 0, 0))
    batch = made(ledger)
    assert [taken.key for taken in batch.rows] == [key(0), key(1)]
    assert batch.waiting == (key(1, 1),)
    assert (batch.step, batch.policy, batch.shards) == (1, "solver", (0, 1))


def test_no_row_is_used_before_the_batch_is_committed() -> None:
    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0), [LedgerEntry(key(0, 9), "filtered", "zero_advantage")])
    first, second = assemble(ledger), assemble(ledger)
    assert first is not None
    assert second is not None
    assert [taken.key for taken in first.rows] == [taken.key for taken in second.rows]
    assert first.ledger == second.ledger == (LedgerEntry(key(0, 9), "filtered", "zero_advantage"),)


def test_the_ledger_of_a_batch_has_only_fates_since_the_previous_batch() -> None:
    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0), [LedgerEntry(key(0, 9), "filtered", "zero_advantage")])
    made(ledger)
    ledger.ingest(1, rows(1, 1, 1))
    second = made(ledger)
    assert (second.step, second.ledger, second.shards) == (2, (), (1,))


def test_closed_orders_are_a_bound_and_the_few_numbers_above_it() -> None:
    ledger = new_ledger()
    for order in (3, 0, 5):
        ledger.ingest(order, rows(order, 0))
    batch = made(ledger)
    assert (batch.closed_below, batch.closed, batch.shards) == (1, (3, 5), (3, 0, 5))
    assert [ledger.is_closed(order) for order in range(6)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    ledger.ingest(1)
    ledger.ingest(2)
    assert ledger.closed_below == 4


def test_an_order_is_ingested_once() -> None:
    ledger = new_ledger()
    assert ledger.ingest(0, rows(0, 0))
    assert not ledger.ingest(0, rows(0, 0, 0))
    assert ledger.num_waiting == 1


def test_rows_at_the_staleness_bound_are_used_and_older_ones_expire() -> None:
    ledger = new_ledger(max_staleness=2)
    ledger.ingest(0, rows(0, 0, 0, 0, 0, 0, 0, 0))
    for step in (1, 2, 3):  # staleness 0, 1, 2
        assert made(ledger).step == step
    assert assemble(ledger) is None  # staleness would be 3
    ledger.ingest(1, rows(1, 3, 3))
    assert made(ledger).ledger == (LedgerEntry(key(0, 6), "expired", "max_staleness"),)


def test_a_synchronous_ledger_uses_only_rows_of_the_newest_version() -> None:
    ledger = new_ledger(max_staleness=0)
    ledger.ingest(0, rows(0, 0, 0, 0))
    made(ledger)
    ledger.ingest(1, rows(1, 0, 1, 1))
    assert [taken.key for taken in made(ledger).rows] == [key(1, 1), key(1, 2)]


def test_a_ledger_is_restored_from_the_newest_batch_and_the_shards_with_waiting_rows() -> None:
    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0))
    ledger.ingest(4, rows(4, 0))
    ledger.ingest(2, rows(2, 0))
    newest = made(ledger)
    requested: list[int] = []

    def rows_of(order: int) -> dict[SequenceKey, BatchRow]:
        requested.append(order)
        return {found.key: found for found in rows(order, 0, 0)}

    restored = Ledger.restore("solver", 2, 8, newest, rows_of)
    assert requested == [2, 4]
    assert [waiting.key for waiting in restored.waiting] == [key(4), key(2)]
    assert (restored.last_step, restored.closed_below) == (1, 1)
    assert [restored.is_closed(order) for order in range(5)] == [True, False, True, False, True]
    assert restored.entries == ()


def test_rows_of_a_shard_that_became_unreadable_are_filtered_with_this_reason() -> None:
    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0, 0))
    restored = Ledger.restore("solver", 2, 8, made(ledger), lambda order: {})
    assert restored.num_waiting == 0
    assert restored.entries == (LedgerEntry(key(0, 2), "filtered", "unreadable_shard"),)


def test_samplers_are_composed_and_the_last_one_breaks_ties_last() -> None:
    class ByPlace:
        def arrange(self, draft: Draft) -> Draft:
            return replace(
                draft, rows=tuple(sorted(draft.rows, key=lambda waiting: -waiting.key.episode))
            )

    ledger = new_ledger()
    ledger.ingest(0, rows(0, 1, 0, 0, 1))
    batch = ledger.assemble([Edf(), ByPlace()], 0, no_rows)
    assert batch is not None
    assert [taken.key.episode for taken in batch.rows] == [2, 1]


def test_replays_are_marked_and_use_no_waiting_row() -> None:
    class Again:
        def arrange(self, draft: Draft) -> Draft:
            return replace(draft, replays=draft.trained(1))

    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0))
    first = made(ledger)
    ledger.ingest(1, rows(1, 1, 1))
    batch = ledger.assemble([Again(), Fifo()], 0, lambda count: first.rows[:count])
    assert batch is not None
    ledger.advance(batch)
    assert [(taken.key, taken.replay) for taken in batch.rows] == [(key(0), True), (key(1), False)]
    assert ledger.num_waiting == 1


def test_more_replays_than_a_batch_are_cut() -> None:
    class All:
        def arrange(self, draft: Draft) -> Draft:
            return replace(draft, replays=draft.trained(99))

    ledger = new_ledger()
    ledger.ingest(1, rows(1, 0, 0, 0))
    batch = ledger.assemble([All()], 0, lambda count: rows(0, 0, 0, 0)[:count])
    assert batch is not None
    assert [(taken.key, taken.replay) for taken in batch.rows] == [
        (key(0, 0), True),
        (key(0, 1), True),
    ]
    assert batch.waiting == (key(1, 0), key(1, 1), key(1, 2))


@pytest.mark.parametrize("fault", ["twice", "invented", "changed"])
def test_a_sampler_cannot_use_a_row_twice_or_one_that_is_not_waiting(fault: str) -> None:
    class Cheat:
        def arrange(self, draft: Draft) -> Draft:
            if fault == "twice":
                return replace(draft, rows=draft.rows[:1] * 2)
            if fault == "invented":
                return replace(draft, rows=rows(99, 0, 0))
            return replace(draft, rows=tuple(replace(row, reward=9.0) for row in draft.rows))

    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0, 0))
    with pytest.raises(ConfigError, match=r"data\.sample"):
        ledger.assemble([Cheat()], 0, no_rows)


def test_a_sampler_that_raises_is_named() -> None:
    class Wrong:
        def arrange(self, draft: Draft) -> Draft:
            raise KeyError("oops")

    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0))
    with pytest.raises(
        ConfigError, match=r"^data\.sample: arrange of Wrong failed: KeyError: 'oops'$"
    ):
        ledger.assemble([Wrong()], 0, no_rows)


@pytest.mark.parametrize("rows_of", [lambda draft: draft.rows, lambda draft: draft.trained(1)])
@pytest.mark.parametrize("name", ["tokens", "loss_mask", "logprobs", "versions", "advantages"])
def test_a_sampler_that_writes_into_rows_is_named(
    name: str, rows_of: Callable[[Draft], tuple[BatchRow, ...]]
) -> None:
    class Writes:
        def arrange(self, draft: Draft) -> Draft:
            getattr(rows_of(draft)[0], name)[:1] = 0
            return draft

    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0))
    expected = r"^data\.sample: arrange of Writes failed: assignment destination is read-only$"
    with pytest.raises(ConfigError, match=expected):
        ledger.assemble([Writes()], 0, lambda count: rows(1, 0)[:count])


@pytest.mark.parametrize(
    "replays",
    [
        lambda draft: draft.trained(1) * 2,
        lambda draft: draft.trained(1) + tuple(replace(row) for row in draft.trained(1)),
        lambda draft: tuple(replace(row, reward=9.0) for row in draft.trained(1)),
        lambda draft: rows(9, 0),
        lambda draft: draft.rows[:1],
    ],
)
def test_a_sampler_can_only_replay_each_trained_row_once_and_as_it_was(
    replays: Callable[[Draft], tuple[BatchRow, ...]],
) -> None:
    class Cheat:
        def arrange(self, draft: Draft) -> Draft:
            return replace(draft, replays=replays(draft))

    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0, 0))
    first = made(ledger)
    ledger.ingest(1, rows(1, 1, 1))
    with pytest.raises(ConfigError, match=r"the sampler Cheat of data\.sample replays a row twice"):
        ledger.assemble([Cheat(), Fifo()], 0, lambda count: first.rows[:count])


@pytest.mark.parametrize(
    "changed",
    [
        lambda draft: None,
        lambda draft: replace(draft, rows=list(draft.rows)),
        lambda draft: replace(draft, replays=None),
        lambda draft: replace(draft, rows=(None,)),
    ],
)
def test_a_sampler_that_returns_no_draft_is_named(changed: Callable[[Draft], Draft]) -> None:
    class Wrong:
        def arrange(self, draft: Draft) -> Draft:
            return changed(draft)

    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0, 0))
    with pytest.raises(ConfigError, match=r"the sampler Wrong of data\.sample returned no Draft"):
        ledger.assemble([Wrong()], 0, no_rows)


def test_a_batch_with_a_gap_before_it_is_refused() -> None:
    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0))
    batch = made(ledger)
    with pytest.raises(ValueError, match="does not follow"):
        ledger.advance(batch)


def test_the_random_numbers_of_a_draft_depend_only_on_policy_and_step() -> None:
    assert (
        new_ledger().draft(7, no_rows).draw.random() == new_ledger().draft(7, no_rows).draw.random()
    )
    assert (
        new_ledger().draft(7, no_rows).draw.random() != new_ledger().draft(8, no_rows).draw.random()
    )
    assert (
        new_ledger().draft(7, no_rows).draw.random()
        != Ledger("verifier", 2, 8).draft(7, no_rows).draw.random()
    )
    later = new_ledger()
    later.last_step = 1
    assert new_ledger().draft(7, no_rows).draw.random() != later.draft(7, no_rows).draw.random()


def filtered(order: int, count: int) -> list[LedgerEntry]:
    return [
        LedgerEntry(key(order, 10 + place), "filtered", "zero_advantage") for place in range(count)
    ]


def test_fates_above_the_limit_of_a_batch_are_listed_in_the_next_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_module, "TABLE_ROWS_MAX", 8)
    ledger = new_ledger()
    for order in range(4):
        ledger.ingest(order, (), filtered(order, 3))
    ledger.ingest(4, rows(4, 0, 0))
    ledger.ingest(5, rows(5, 0, 0))
    first = made(ledger)
    assert [taken.key for taken in first.rows] == [key(4, 0), key(4, 1)]
    assert (first.shards, first.closed_below, first.closed) == ((0, 1, 4), 2, (4,))
    assert [entry.key.order for entry in first.ledger] == [0, 0, 0, 1, 1, 1]
    assert first.waiting == ()
    assert ledger.closed_below == 6
    second = made(ledger)
    assert [taken.key for taken in second.rows] == [key(5, 0), key(5, 1)]
    assert (second.shards, second.closed_below, second.closed) == ((2, 3, 5), 6, ())
    assert [entry.key.order for entry in second.ledger] == [2, 2, 2, 3, 3, 3]


def test_replays_count_towards_the_limit_of_fates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "TABLE_ROWS_MAX", 6)
    replayed = rows(9, 0, 0)

    class Replays:
        def arrange(self, draft: Draft) -> Draft:
            return replace(draft, replays=draft.trained(2))

    for samplers, listed in (([Edf()], (0, 2)), ([Edf(), Replays()], (2,))):
        ledger = Ledger("solver", batch_size=4 if len(samplers) == 2 else 2, max_staleness=8)
        ledger.ingest(0, (), filtered(0, 3))
        ledger.ingest(2, rows(2, 0, 0), filtered(2, 1))
        batch = ledger.assemble(samplers, 0, lambda count: replayed)
        assert batch is not None
        assert batch.shards == listed


def test_a_restart_ingests_the_orders_again_that_a_batch_left_to_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_module, "TABLE_ROWS_MAX", 4)
    ledger = new_ledger()
    ledger.ingest(0, rows(0, 0, 0))
    ledger.ingest(1, rows(1, 0), filtered(1, 3))
    ledger.ingest(2, rows(2, 0))
    first = made(ledger)
    assert (first.shards, first.closed_below, first.closed) == ((0, 2), 1, (2,))
    assert first.waiting == (key(2),)
    restored = Ledger.restore("solver", 2, 8, first, lambda order: {key(2): row(key(2))})
    assert [restored.is_closed(order) for order in range(3)] == [True, False, True]
    assert restored.ingest(1, rows(1, 0), filtered(1, 3))
    for each in (ledger, restored):
        batch = made(each)
        assert {taken.key for taken in batch.rows} == {key(1), key(2)}
        assert (batch.shards, batch.closed_below, len(batch.ledger)) == ((1,), 3, 3)
