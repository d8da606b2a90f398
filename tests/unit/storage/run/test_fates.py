from storage.records.batches import SequenceKey
from storage.run.fates import BatchFates, ledger_counts, of_batch, sequences_by_policy
from tests.support.runs import builders

ONE, TWO, THREE = (SequenceKey(order, 0, 0, 0) for order in (1, 2, 3))


def test_a_batch_is_counted_by_fate_and_reason() -> None:
    batch = builders.batch(
        builders.row(ONE),
        builders.row(TWO, replay=True),
        ledger=(
            builders.entry(TWO, "filtered", "zero_advantage"),
            builders.entry(THREE, "filtered", "zero_advantage"),
            builders.entry(ONE, "expired", "max_staleness"),
        ),
        waiting=(THREE, THREE, ONE),
        shards=(1, 2),
    )
    assert of_batch(batch) == BatchFates(
        {
            ("trained", ""): 1,
            ("replayed", ""): 1,
            ("filtered", "zero_advantage"): 2,
            ("expired", "max_staleness"): 1,
        },
        waiting=2,
        ingested=(1, 2),
    )


def test_sequences_of_shards_that_no_batch_ingested_wait_too() -> None:
    counted = [
        BatchFates({("trained", ""): 4, ("filtered", "a"): 1}, waiting=9, ingested=(0,)),
        BatchFates({("trained", ""): 4, ("filtered", "b"): 2}, waiting=3, ingested=(2,)),
    ]
    counts = ledger_counts(3, counted, {0: 100, 1: 20, 2: 100, 3: 5})
    assert (counts.batches, counts.trained, counts.filtered) == (3, 8, 3)
    assert counts.reasons == {"a": 1, "b": 2}
    assert counts.waiting == 3 + 20 + 5


def test_before_the_first_batch_all_sequences_wait() -> None:
    counts = ledger_counts(0, [], {0: 4})
    assert (counts.trained, counts.waiting) == (0, 4)


def test_a_policy_is_counted_only_where_it_sampled_a_token() -> None:
    shard = builders.shard(
        builders.group(
            builders.episode(
                builders.sequence(policy="solver"), builders.sequence(policy="verifier")
            ),
            builders.episode(builders.sequence(policy="solver")),
            builders.episode(error="timeout after 60 s"),
        )
    )
    assert sequences_by_policy(shard) == {"solver": 2, "verifier": 1}
