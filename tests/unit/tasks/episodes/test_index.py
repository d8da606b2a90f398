"""The index has every episode of every readable shard, with the fates that `verify` counts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from storage import layout
from storage.records.batches import SequenceKey
from storage.records.rollouts import FailureKind
from storage.run import batches, orders, shards
from storage.run.quarantine import quarantine_object
from storage.store.object_store import ObjectStore
from storage.verify.verify import verify
from tasks.episodes.index import EpisodeIndex, PlayedEpisode
from tasks.episodes.sequence_fates import SequenceFate
from tasks.recipes.run_terms import run_terms
from tests.support.runs import builders
from tests.support.runs.dataflow_world import world
from tests.support.runs.small_run import SmallRun
from tests.support.runs.true_run import POLICIES, STEPS, finished_run


def counted(run: ObjectStore) -> dict[str, Counter[str]]:
    """Return policy → fate → sequences of the index."""
    fates: dict[str, Counter[str]] = {}
    for episode in EpisodeIndex(run).episodes():
        for sequence in episode.sequences:
            fates.setdefault(sequence.policy, Counter())[sequence.fate.fate] += 1
    return fates


def assert_counts_are_those_of_verify(run: ObjectStore) -> None:
    of_verify = verify(run, run_terms(run)).policies
    fates = counted(run)
    assert fates.keys() == of_verify.keys()
    for policy, counts in of_verify.items():
        assert dict(fates[policy]) == {
            fate: number
            for fate in ("trained", "filtered", "expired", "waiting")
            if (number := getattr(counts, fate))
        }


def test_the_fates_of_a_finished_run_are_those_of_verify(memory_store: ObjectStore) -> None:
    run = finished_run(memory_store)
    number = orders.next_number(run)
    orders.create(run, replace(orders.read(run, 0), number=number))
    shards.create(run, replace(shards.read(run, 0), order=number))
    assert_counts_are_those_of_verify(run)
    last = [each for each in EpisodeIndex(run).episodes() if each.order == number]
    fates = {sequence.fate for each in last for sequence in each.sequences}
    assert fates == {SequenceFate("waiting", "not_ingested", 0, ())}


def test_the_fates_of_a_run_that_goes_on_are_those_of_verify(memory_store: ObjectStore) -> None:
    simulation = world(memory_store)
    dataflow = simulation.dataflow()
    seen: set[str] = set()
    for round_number in range(30):
        dataflow.round()
        simulation.play(simulation.open_orders()[:2], behind=round_number % 3)
        for policy in simulation.policies:
            simulation.train(policy)
        if round_number % 10 in (0, 5):
            assert_counts_are_those_of_verify(simulation.run)
            seen |= {fate for each in counted(simulation.run).values() for fate in each}
    assert seen >= {"trained", "filtered", "waiting"}


def test_every_trained_sequence_names_its_batch(memory_store: ObjectStore) -> None:
    run = finished_run(memory_store)
    of_index = {
        (sequence.policy, sequence.fate.batch, episode.id, sequence.place)
        for episode in EpisodeIndex(run).episodes()
        for sequence in episode.sequences
        if sequence.fate.fate == "trained"
    }
    of_batches = {
        (policy, step, f"{row.key.order}.{row.key.group}.{row.key.episode}", row.key.sequence)
        for policy in POLICIES
        for step in range(1, STEPS + 1)
        for row in batches.read(run, policy, step).rows
    }
    assert of_index == of_batches


def small(name: str) -> tuple[SmallRun, PlayedEpisode]:
    """A run with one episode of two turns, of which a later batch replays the first."""
    run = SmallRun(name)
    first = builders.sequence(answer=(40, 41, 2), version=3, reward=0.25)
    first = replace(first, versions=np.array([-1, -1, 3, 4, 4], dtype=np.int32))
    second = builders.sequence(answer=(50,), policy="verifier", version=2, name="verdict")
    play = builders.episode(first, second, reward=0.5)
    shards.create(run.run, builders.shard(builders.group(play)))
    key = builders.FIRST
    for batch in (
        builders.batch(builders.row(key)),
        builders.batch(builders.row(key, replay=True), step=2, shards=()),
        builders.batch(
            builders.row(SequenceKey(0, 7, 0, 0)),
            policy="verifier",
            ledger=(builders.entry(key._replace(sequence=1), "filtered", "not_finite"),),
        ),
    ):
        batches.create(run.run, batch)
    (only,) = EpisodeIndex(run.run).episodes()
    return run, only


def test_an_episode_has_what_each_policy_sampled_and_what_became_of_it() -> None:
    _, only = small("index-episode")
    assert (only.id, only.prompt_id, only.region, only.worker, only.reward, only.failure) == (
        "0.0.0",
        "chained_addition/train/17",
        "us-east",
        "rollout-us-east-0",
        0.5,
        "",
    )
    solver, verifier = only.sequences
    assert (solver.policy, solver.name, solver.place, solver.tokens) == ("solver", "attempt", 0, 3)
    assert (solver.min_version, solver.max_version, solver.reward) == (3, 4, 0.25)
    assert solver.fate == SequenceFate("trained", "", 1, (2,))
    assert (verifier.policy, verifier.place, verifier.tokens) == ("verifier", 1, 1)
    assert verifier.fate == SequenceFate("filtered", "not_finite", 1, ())
    assert only.versions() == {"solver": (3, 4), "verifier": (2, 2)}


def test_a_batch_that_replays_a_sequence_many_times_is_named_once() -> None:
    run, _ = small("index-replays")
    for step in (3, 4):
        rows = [builders.row(builders.FIRST, replay=True)] * 3
        batches.create(run.run, builders.batch(*rows, step=step, shards=()))
    (only,) = EpisodeIndex(run.run).episodes()
    assert only.sequences[0].fate == SequenceFate("trained", "", 1, (2, 3, 4))


def test_a_sequence_that_no_readable_batch_has_is_of_unknown_fate() -> None:
    run, _ = small("index-unknown")
    run.run.put(layout.batch("solver", 1), b"damage")
    index = EpisodeIndex(run.run)
    (only,) = index.episodes()
    # Batch 1 is damaged, so that no batch names the ingestion of the order either.
    assert only.sequences[0].fate == SequenceFate("unknown", "not_listed", 0, (2,))
    assert len(index.problems) == 1
    assert "batches/solver/00000001.arrow" in index.problems[0]


def test_a_sequence_that_an_ingesting_batch_does_not_list_is_of_unknown_fate() -> None:
    run = SmallRun("index-vanished")
    run.shard(0)
    batches.create(run.run, builders.batch(builders.row(SequenceKey(0, 0, 0, 0)), shards=(0,)))
    first, second = EpisodeIndex(run.run).episodes()
    assert first.sequences[0].fate == SequenceFate("trained", "", 1, ())
    assert second.sequences[0].fate == SequenceFate("unknown", "not_listed", 0, ())


def test_a_failed_episode_has_its_kind() -> None:
    run = SmallRun("index-failed")
    plays = (
        builders.episode(error="timeout after 60 s", failure_kind=FailureKind.TIMEOUT),
        builders.episode(error="ValueError: x"),
    )
    shards.create(run.run, builders.shard(builders.group(*plays)))
    listed = list(EpisodeIndex(run.run).episodes())
    assert [each.failure for each in listed] == ["timeout", "not_recorded"]
    assert [each.sequences for each in listed] == [(), ()]


def test_damaged_and_quarantined_shards_are_named_and_skipped() -> None:
    run = SmallRun("index-damaged")
    for number in range(5):
        run.shard(number)
    run.run.put(layout.shard(1), b"damage")
    quarantine_object(run.run, layout.shard(2), "damage")
    quarantine_object(run.run, layout.order(3), "damage")
    index = EpisodeIndex(run.run)
    assert [each.shard.order for each in index.shards()] == [0, 4]
    assert [layout.shard(number) in " ".join(index.problems) for number in range(5)] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_the_newest_order_may_come_first() -> None:
    run = SmallRun("index-newest")
    for number in range(3):
        run.shard(number)
    index = EpisodeIndex(run.run)
    assert [each.shard.order for each in index.shards()] == [0, 1, 2]
    assert [each.shard.order for each in index.shards(newest_first=True)] == [2, 1, 0]


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_reader_that_stops_reads_no_further_shards(newest_first: bool) -> None:
    run = SmallRun(f"index-lazy-{newest_first}")
    for number in range(100):
        run.shard(number)
    index = EpisodeIndex(run.run)
    for number in range(40, 60):
        run.run.put(layout.shard(number), b"damage")
    next(index.episodes(newest_first))
    assert index.problems == []


def test_a_run_without_shards_has_no_episodes() -> None:
    index = EpisodeIndex(SmallRun("index-empty").run)
    assert list(index.episodes()) == []
    assert index.problems == []
