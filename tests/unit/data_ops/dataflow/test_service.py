import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_ops.algorithms.policy_groups import ModelLimits
from data_ops.config import DataConfig, PolicyData
from data_ops.dataflow import ledger as ledger_module
from data_ops.dataflow import service as service_module
from data_ops.dataflow.batch_assembly import UNTRAINABLE_GROUPS, BatchAssembly, stall_reason
from data_ops.dataflow.ledger import UNREADABLE_SHARD
from data_ops.dataflow.service import Dataflow, serve
from data_ops.dataflow.shard_ingest import IngestedGroups, IngestedShard, ingest_shard
from data_ops.prompts import BuiltinPrompts
from storage import layout
from storage.coordination import leases
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.lifetime import SAME_FAILURES
from storage.errors import ConfigError, CorruptError, TransientError
from storage.records.batches import LedgerEntry, SequenceKey
from storage.records.control import Stop
from storage.records.progress import DataflowProgress
from storage.records.rollouts import FailureKind, Order, Prompt, Shard
from storage.run import batches, orders, runs, shards
from storage.run.quarantine import quarantine_object, read_quarantine
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tests.support.runs.builders import episode, group, row, sequence, shard, tensors
from tests.support.runs.dataflow_world import (
    MAX_TOKENS,
    POLICIES,
    OutageBackend,
    UnreachableBackend,
    World,
    world,
    write_invalid_shard,
)
from tests.support.runs.lifetimes import ScriptedLifetime, lifetime_of, progress_of
from tests.support.stores.strange_objects import STRANGE, take_place

ONE = {"solver": PolicyData(batch_size=4, steps=3), "verifier": PolicyData(batch_size=4, steps=3)}
SIX_STEPS = {
    "solver": PolicyData(batch_size=6, steps=6),
    "verifier": PolicyData(batch_size=6, steps=6),
}


def rounds(dataflow: Dataflow, count: int = 3) -> None:
    for _ in range(count):
        dataflow.round()


def test_a_run_ends_with_every_batch_and_a_balanced_ledger(memory_store: ObjectStore) -> None:
    simulation = world(memory_store)
    dataflow = simulation.dataflow()
    simulation.finish(dataflow)
    simulation.check()
    assert simulation.run.exists(layout.orders_end())
    assert dataflow.progress().batches["solver"] == 4
    assert dataflow.progress().trained["solver"] == 24


def test_each_order_has_the_sampled_tokens_of_all_shards_before_it_also_after_restarts(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store)
    dataflow = simulation.dataflow()
    for _ in range(4):
        dataflow.round()
        simulation.play(simulation.open_orders())
        dataflow.round()  # the shards are ingested, and are in no order's `seen` yet
        dataflow = simulation.dataflow()
    simulation.finish(dataflow)
    seen: list[int] = []
    for order in simulation.orders():
        seen += order.seen
        sampled = sum(shards.read(simulation.run, number).num_sampled for number in seen)
        assert order.tokens == sampled
    assert order.tokens > 0


def test_two_runs_of_the_same_world_make_the_same_batches(memory_store: ObjectStore) -> None:
    first, second = world(memory_store.sub("a")), world(memory_store.sub("b"))
    first.finish(first.dataflow())
    second.finish(second.dataflow())
    for policy in POLICIES:
        assert first.trained(policy) == second.trained(policy)
        for item, other in zip(first.batches(policy), second.batches(policy), strict=True):
            assert item.metrics == other.metrics
            for mine, twin in zip(item.rows, other.rows, strict=True):
                np.testing.assert_array_equal(mine.advantages, twin.advantages)


def test_no_order_is_written_before_every_policy_has_weights(memory_store: ObjectStore) -> None:
    simulation = world(memory_store)
    simulation.run.delete(layout.manifest(layout.weights("verifier", 0)))
    dataflow = simulation.dataflow()
    assert not dataflow.round()
    assert simulation.orders() == []
    simulation.run.create(layout.manifest(layout.weights("verifier", 0)), b"{}")
    assert dataflow.round()
    assert simulation.orders() != []


def test_the_first_orders_are_few_and_more_follow_as_shards_arrive(
    memory_store: ObjectStore,
) -> None:
    # The solver has a demand of (0 + 1 + 3) · 6 = 24 sequences; 2 samples of 2 prompts yield up to
    # 16 per order.
    simulation = world(memory_store, max_staleness=3, filter=[])
    dataflow = simulation.dataflow()
    rounds(dataflow)
    assert [order.number for order in simulation.orders()] == [0, 1]
    # One shard yields 2 per group, so (3 · 8 + 2) / 4 = 6.5 are expected: (24 − 4) / 6.5 − 2
    # outstanding groups = 1.1 groups.
    simulation.play([0])
    rounds(dataflow)
    assert [order.number for order in simulation.orders()] == [0, 1, 2]


def test_batches_precede_the_trainer_by_the_configured_number(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store, max_staleness=8, batches_ahead=1)
    dataflow = simulation.dataflow()
    for _ in range(8):
        dataflow.round()
        simulation.play(simulation.open_orders())
    assert batches.next_step(simulation.run, "solver") == 3  # version 0: batch 1 and one ahead
    simulation.train("solver")
    rounds(dataflow)
    assert batches.next_step(simulation.run, "solver") == 4


def test_synchronous_training_uses_only_the_newest_weights_and_never_stalls(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store, max_staleness=0, batches_ahead=0)
    simulation.finish(simulation.dataflow())
    simulation.check()
    for policy in POLICIES:
        for batch in simulation.batches(policy):
            assert {row.min_version for row in batch.rows} == {batch.step - 1}


def test_a_lagging_worker_costs_only_the_expired_rows(memory_store: ObjectStore) -> None:
    simulation = world(memory_store, max_staleness=0, batches_ahead=0)
    dataflow = simulation.dataflow()
    for turn in range(300):
        dataflow.round()
        if dataflow.done:
            break
        simulation.play(simulation.open_orders(), behind=turn % 2)
        for policy in POLICIES:
            simulation.train(policy)
    simulation.check()
    assert any(
        entry.fate == "expired" for batch in simulation.batches("solver") for entry in batch.ledger
    )


def test_rows_too_old_for_the_next_batch_are_removed_from_the_budget_immediately(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store, max_staleness=0, batches_ahead=0)
    dataflow = simulation.dataflow()
    while not (simulation.batches("solver") and simulation.batches("verifier")):
        dataflow.round()
        simulation.play(simulation.open_orders())
    dataflow.round()
    assert dataflow.progress().waiting == {"solver": 0, "verifier": 0}


def test_an_unreadable_shard_is_quarantined_with_its_reason_and_the_run_continues(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store)
    dataflow = simulation.dataflow()
    dataflow.round()
    write_invalid_shard(simulation.run, 0)
    simulation.finish(dataflow)
    simulation.check()
    reasons = read_quarantine(simulation.run)
    assert list(reasons) == ["shards/00000000.arrow"]
    assert 0 in simulation.batches("solver")[0].shards
    assert 0 in [number for order in simulation.orders() for number in order.seen]


def test_an_order_of_more_episodes_than_the_recipe_asks_for_is_quarantined(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store)
    dataflow = simulation.dataflow()
    dataflow.round()
    given = orders.read(simulation.run, 0)
    simulation.run.delete(layout.order(0))
    orders.create(simulation.run, replace(given, samples_per_prompt=given.samples_per_prompt + 1))
    while not read_quarantine(simulation.run):
        dataflow.round()
    assert list(read_quarantine(simulation.run)) == ["orders/00000000.json"]
    simulation.finish(dataflow)
    simulation.check()


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE.keys())
def test_a_shard_that_is_a_folder_is_quarantined_and_the_run_continues(
    local_store: ObjectStore, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    simulation = world(local_store)
    dataflow = simulation.dataflow()
    dataflow.round()
    simulation.play([0])
    (path,) = (tmp_path / "store").rglob("shards/00000000.arrow")
    take_place(path, make)
    simulation.finish(dataflow)
    simulation.check()
    assert list(read_quarantine(simulation.run)) == ["shards/00000000.arrow"]
    assert read_quarantine(simulation.run)["shards/00000000.arrow"].startswith(
        f"shards/00000000.arrow: {path} is "
    )


def test_a_shard_with_an_invalid_temperature_is_quarantined_and_the_run_continues(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store)
    dataflow = simulation.dataflow()
    dataflow.round()
    bad = shard(group(episode(replace(sequence(), temperature=float("nan")))), order=0)
    simulation.run.put("shards/00000000.arrow", shards.encode(bad))
    simulation.finish(dataflow)
    simulation.check()
    assert read_quarantine(simulation.run) == {
        "shards/00000000.arrow": "shards/00000000.arrow: row 0: the temperature is nan; it is 0, or from 1e-12 to 1e+12"
    }


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_waiting_row_of_a_damaged_or_lost_shard_is_filtered_after_a_restart(
    memory_store: ObjectStore, is_lost: bool
) -> None:
    simulation = world(memory_store)
    dataflow = simulation.dataflow()
    while not any(batch.waiting for batch in simulation.batches("solver")[-1:]):
        simulation.train("solver")
        dataflow.round()
        simulation.play(simulation.open_orders())
    lost = {key.order for key in simulation.batches("solver")[-1].waiting}
    assert lost
    for order in lost:
        if is_lost:
            simulation.run.delete(layout.shard(order))
        else:
            simulation.run.put(layout.shard(order), b"torn")
    simulation.train("solver")
    simulation.finish(simulation.dataflow())
    reasons = [entry.reason for batch in simulation.batches("solver") for entry in batch.ledger]
    assert UNREADABLE_SHARD in reasons
    assert set(read_quarantine(simulation.run)) == {layout.shard(order) for order in lost}
    simulation.check()


def test_a_restart_reads_no_shard_for_a_policy_that_has_all_its_batches(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store, filter=[])
    simulation.finish(simulation.dataflow())
    left = {key.order for policy in POLICIES for key in simulation.batches(policy)[-1].waiting}
    assert left
    for order in left:
        simulation.run.put(layout.shard(order), b"torn")
    assert simulation.dataflow().done
    assert read_quarantine(simulation.run) == {}


def test_fates_that_do_not_fit_a_batch_leave_the_ledger_balanced_after_restarts(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "TABLE_ROWS_MAX", 12)
    simulation = world(memory_store)
    for _ in range(40):
        dataflow = simulation.dataflow()
        rounds(dataflow, 2)
        simulation.play(simulation.open_orders())
        for policy in POLICIES:
            simulation.train(policy)
        if dataflow.done:
            break
    simulation.check()
    listed = [
        len(batch.rows) + len(batch.ledger) + len(batch.waiting)
        for policy in POLICIES
        for batch in simulation.batches(policy)
    ]
    assert max(listed) <= 12


@pytest.mark.parametrize("restarted", [False, True])
def test_waiting_rows_have_the_same_advantages_after_a_restart(
    memory_store: ObjectStore, restarted: bool
) -> None:
    """A sequence outside the vocabulary has the largest reward of its group."""
    config = DataConfig.model_validate(
        {"prompts": {"builtin": "chained_addition"}, "samples_per_prompt": 4, "filter": []}
    )
    settings = {"steps": 2, "policies": {"solver": {"batch_size": 4}}}
    run = runs.create_run(memory_store, "r", {**settings, "data": config.model_dump(mode="json")})
    simulation = World(run, config, {"solver": PolicyData(batch_size=4, steps=2)})
    files = {"config.json": b'{"vocab_size":64}'}
    digest = publisher.publish(run, "solver", 0, tensors(0), extra_files=files).digest
    inside = [group(*(episode(sequence(reward=reward)) for reward in (1.0, 0.0, 0.0, 1.0)))]
    outside = episode(sequence(answer=(40, 70, 2), reward=5.0))
    mixed = [group(*(episode(sequence(reward=reward)) for reward in (1.0, 0.0, 0.0)), outside)]

    dataflow = simulation.dataflow()
    dataflow.round()
    for number, groups in enumerate((inside + mixed, inside)):
        weights = {"solver": {0: digest}}
        shards.create(run, shard(*groups, order=number, weights=weights))
        dataflow.round()
        if restarted:
            dataflow = simulation.dataflow()
    second = batches.read(run, "solver", 2)
    assert [row.key for row in second.rows[:3]] == [
        SequenceKey(0, 1, place, 0) for place in (0, 1, 2)
    ]
    assert [float(row.advantages[-1]) for row in second.rows[:3]] == pytest.approx(
        [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], abs=1e-3
    )


def test_an_unreadable_newest_batch_is_an_error_that_names_it(memory_store: ObjectStore) -> None:
    simulation = world(memory_store)
    simulation.finish(simulation.dataflow())
    simulation.run.put(layout.batch("verifier", 4), b"torn")
    with pytest.raises(CorruptError, match=r"batches/verifier/00000004\.arrow is unreadable"):
        simulation.dataflow()


def test_a_batch_with_waiting_sequences_of_orders_that_were_never_written_is_refused(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store, SIX_STEPS, max_staleness=3, batches_ahead=0)
    train_to(simulation, simulation.dataflow(), version=5)
    newest = batches.read(simulation.run, "solver", 5)
    strangers = tuple(SequenceKey(order, 0, 0, 0) for order in range(1_000, 2_000))
    body = batches.encode(replace(newest, waiting=newest.waiting + strangers))
    simulation.run.put(layout.batch("solver", 5), body)
    with pytest.raises(
        CorruptError, match=r"solver/00000005.* ingested order 1999, which does not"
    ):
        simulation.dataflow()
    assert not read_quarantine(simulation.run)


def train_to(simulation: World, dataflow: Dataflow, version: int) -> None:
    """Train the solver to a version whose batch is its newest. Workers are one version behind in
    every second turn, so that a batch which is made again has other rows.
    """
    turn = 0
    while simulation.version("solver") < version:
        turn += 1
        dataflow.round()
        simulation.play(simulation.open_orders()[::-1][:1], behind=turn % 2)
        for policy in simulation.policies:
            simulation.train(policy)
    assert batches.steps(simulation.run, "solver")[-1] == version


def test_a_restart_without_the_batch_of_the_newest_version_names_it_and_makes_no_other(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store, SIX_STEPS, max_staleness=3, batches_ahead=0)
    train_to(simulation, simulation.dataflow(), version=5)
    key = layout.batch("solver", 5)
    body = simulation.run.get(key)
    simulation.run.delete(key)
    with pytest.raises(
        CorruptError,
        match=r"^batches/solver/00000005\.arrow is lost, and the run cannot go on without its ledger: "
        r"version 5 was made of it; put a good copy of the object back$",
    ):
        simulation.dataflow()
    assert batches.steps(simulation.run, "solver") == [1, 2, 3, 4]
    simulation.run.create(key, body)
    simulation.finish(simulation.dataflow())
    simulation.check()


def test_a_restart_continues_from_the_batch_after_a_lost_one_and_names_the_lost_one(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = world(memory_store, SIX_STEPS, max_staleness=3, batches_ahead=0)
    train_to(simulation, simulation.dataflow(), version=5)
    bodies = {
        key: simulation.run.get(key)
        for key in (layout.batch("solver", 2), layout.batch("solver", 4))
    }
    for key in bodies:
        simulation.run.delete(key)
    dataflow = simulation.dataflow()
    assert dataflow.progress().batches["solver"] == 5
    assert caplog.messages == [
        "batches/solver/00000002.arrow (and 1 more) is lost, batch 5 exists: put a good copy back, "
        "`astraflow verify` lists what is missing"
    ]
    simulation.finish(dataflow)
    assert batches.steps(simulation.run, "solver") == [1, 3, 5, 6]
    for key, body in bodies.items():
        simulation.run.create(key, body)
    simulation.check()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_version_of_an_unknown_batch_rebuilds_a_dataflow_which_names_a_lost_one(
    memory_store: ObjectStore, is_lost: bool
) -> None:
    simulation = world(memory_store, SIX_STEPS, max_staleness=3, batches_ahead=0)
    slower = simulation.dataflow()
    train_to(simulation, simulation.dataflow(), version=1)
    assert slower.progress().batches["solver"] == 0
    if is_lost:
        simulation.run.delete(layout.batch("solver", 1))
        with pytest.raises(CorruptError, match=r"^batches/solver/00000001\.arrow is lost"):
            slower.round()
        assert batches.steps(simulation.run, "solver") == []
    else:
        slower.round()
        assert slower.progress().batches["solver"] == 1
        simulation.finish(slower)
        simulation.check()


def test_shards_closed_by_one_policy_are_ingested_again_for_the_other_only(
    memory_store: ObjectStore,
) -> None:
    simulation = world(
        memory_store, policies={**ONE, "verifier": PolicyData(batch_size=64, steps=1)}
    )
    dataflow = simulation.dataflow()
    while not simulation.batches("solver"):
        dataflow.round()
        simulation.play(simulation.open_orders())
    closed = simulation.batches("solver")[0].closed_below
    assert closed > 0
    restarted = simulation.dataflow()
    requested: list[int] = []

    def ingest(numbers: Sequence[int]) -> list[IngestedShard]:
        requested.extend(numbers)
        return [
            ingest_shard(simulation.run, number, simulation.config, list(simulation.policies), {})
            for number in numbers
        ]

    restarted = Dataflow(
        simulation.run,
        simulation.config,
        simulation.policies,
        5,
        max_tokens=MAX_TOKENS,
        ingest=ingest,
    )
    rounds(restarted)
    assert requested[0] == 0
    simulation.finish(restarted)
    simulation.check()


def test_shards_may_be_ingested_anywhere_and_in_any_order(memory_store: ObjectStore) -> None:
    simulation = world(memory_store.sub("a"))
    inline = world(memory_store.sub("b"))

    def backwards(numbers: Sequence[int]) -> list[IngestedShard]:
        return [
            ingest_shard(simulation.run, number, simulation.config, list(simulation.policies), {})
            for number in reversed(numbers)
        ]

    simulation.finish(
        Dataflow(
            simulation.run,
            simulation.config,
            simulation.policies,
            5,
            max_tokens=MAX_TOKENS,
            ingest=backwards,
        )
    )
    inline.finish(inline.dataflow())
    assert simulation.trained("solver") == inline.trained("solver")


class SeenByCurator:
    """Refuses a prompt whose id ends like the number of a seen order."""

    needs_shards = True

    def __init__(self) -> None:
        self.endings: set[str] = set()

    def observe(self, order: Order, shard: Shard) -> None:
        self.endings.add(str(order.number)[-1])

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        return prompt.id[-1] not in self.endings


def test_a_curator_by_import_path_folds_the_shards_and_survives_a_restart(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store, curate=[f"{__name__}:SeenByCurator"])
    dataflow = simulation.dataflow()
    for _ in range(12):
        dataflow.round()
        simulation.play(simulation.open_orders()[:1])
        simulation.train("solver")
        simulation.train("verifier")
        dataflow = simulation.dataflow()
    seen: set[str] = set()
    for order in simulation.orders():
        seen |= {str(number)[-1] for number in order.seen}
        assert not {prompt.id[-1] for prompt in order.prompts} & seen
    assert len(seen) > 1
    simulation.finish(dataflow)
    simulation.check()


def test_a_trainer_is_starved_when_it_has_used_every_batch(memory_store: ObjectStore) -> None:
    simulation = world(memory_store)
    dataflow = simulation.dataflow()
    assert dataflow.starved  # there is nothing to train on yet
    for _ in range(8):
        dataflow.round()
        simulation.play(simulation.open_orders())
    assert not dataflow.starved  # two batches each, one of them ahead
    for starved in (False, True):
        simulation.train("solver")
        for assembly in dataflow._assemblies:  # the first read of a round
            assembly.poll_version()
        assert dataflow.starved is starved
    simulation.finish(dataflow)
    assert not dataflow.starved


def test_unusable_prompts_stop_the_run_before_anything_is_written(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store, prompts={"path": "/nowhere/train.jsonl"})
    with pytest.raises(ConfigError, match=r"/nowhere/train\.jsonl is not a file"):
        simulation.dataflow()


def service(simulation: World, run: ObjectStore, stop: threading.Event) -> HeartbeatWriter:
    config = simulation.config.model_copy(update={"poll_interval_s": 0.001})
    lifetime = lifetime_of(run, "dataflow", stop)
    serve(lifetime, config, simulation.policies, 5, max_tokens=MAX_TOKENS)
    return lifetime.heartbeat


def test_the_demand_of_a_policy_includes_the_lag_of_its_oldest_tokens(
    memory_store: ObjectStore,
) -> None:
    config = DataConfig(prompts=BuiltinPrompts(builtin="chained_addition"))
    assembly = BatchAssembly(
        memory_store,
        "solver",
        PolicyData(batch_size=4, steps=9),
        config,
        0,
        lambda order: None,
        limits=ModelLimits(),
    )
    assembly.version = 5
    for order in range(2):
        assembly.admit(order)
        rows = tuple(
            row(SequenceKey(order, 0, sample, 0), version=4 + sample) for sample in range(2)
        )
        assembly.ingest(
            IngestedShard.of(
                shard(order=order), {"solver": IngestedGroups(rows=rows, num_groups=1)}
            )
        )
    assert assembly.need(()).lag == 1


def test_orders_that_are_played_with_older_weights_than_at_their_admission_count_as_lag(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store)
    dataflow = simulation.dataflow()
    while simulation.version("solver") < 2:
        dataflow.round()
        simulation.play(simulation.open_orders())
        for policy in POLICIES:
            simulation.train(policy)
    dataflow.round()
    assert simulation.open_orders()
    assert max(assembly.need(()).lag for assembly in dataflow._assemblies) == 0
    simulation.play(simulation.open_orders(), behind=2)
    dataflow.round()
    assert max(assembly.need(()).lag for assembly in dataflow._assemblies) == 1


def test_shards_are_collected_while_no_trainer_is_starved(
    memory_store: ObjectStore,
) -> None:
    simulation = world(
        memory_store,
        {policy: PolicyData(batch_size=4, steps=9) for policy in POLICIES},
        max_staleness=8,
        filter=[],
    )
    dataflow = simulation.dataflow()
    dataflow.round()
    simulation.play(
        simulation.open_orders()[:3]
    )  # two batches of each policy, and rows for a third one
    rounds(dataflow)
    requested: list[list[int]] = []
    shard_of = simulation.open_orders()[0]

    def ingest(numbers: Sequence[int]) -> list[IngestedShard]:
        requested.append(list(numbers))
        return [
            ingest_shard(simulation.run, number, simulation.config, list(simulation.policies), {})
            for number in numbers
        ]

    def steps() -> list[int]:
        return [len(simulation.batches(policy)) for policy in POLICIES]

    def a_shard_comes_and_the_trainers_step() -> None:
        assert (steps(), requested) == ([2, 2], [])
        simulation.play([shard_of])
        assert [simulation.train(policy) for policy in POLICIES] == [True, True]

    def a_trainer_uses_up_all_its_batches() -> None:
        assert (steps(), requested) == ([3, 3], [])
        assert [simulation.train("solver") for _ in range(3)] == [True, True, False]

    def the_pause_before_the_next_round() -> None:
        pass

    config = simulation.config.model_copy(update={"gather_interval_s": 3600.0})
    script = (
        a_shard_comes_and_the_trainers_step,
        a_trainer_uses_up_all_its_batches,
        the_pause_before_the_next_round,
    )
    turns = iter(script)
    lifetime = ScriptedLifetime(
        simulation.run, "dataflow", lambda seconds: next(turns, lambda: True)()
    )
    serve(lifetime, config, simulation.policies, 5, ingest, max_tokens=MAX_TOKENS)
    assert (steps()[0], requested) == (4, [[shard_of]])


def test_the_service_ends_when_all_batches_exist(memory_store: ObjectStore) -> None:
    simulation = world(memory_store)
    simulation.finish(simulation.dataflow())
    heartbeat_writer = service(simulation, simulation.run, threading.Event())
    assert progress_of(heartbeat_writer.last, DataflowProgress).batches["verifier"] == 4
    assert progress_of(heartbeat_writer.last, DataflowProgress).orders == len(simulation.orders())
    end = orders.read_end(simulation.run)
    assert end is not None
    assert end.orders == len(simulation.orders())


def test_the_service_returns_when_the_run_or_the_service_is_stopped(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store)
    called = threading.Event()
    called.set()
    service(simulation, simulation.run, called)
    runs.request_stop(simulation.run, Stop("cancelled", "by hand", 0.0))
    service(simulation, simulation.run, threading.Event())
    assert orders.next_number(simulation.run) == 0


def test_an_unreachable_store_is_waited_for(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = world(memory_store)
    simulation.finish(simulation.dataflow())
    flicker = OutageBackend(simulation.run.backend, failures_max=50)
    flicker.down.set()
    unreachable = replace(simulation.run, backend=flicker, patience_s=1e-6)
    with pytest.raises(TransientError):
        Dataflow(unreachable, simulation.config, simulation.policies, 5, max_tokens=MAX_TOKENS)
    lifetime = ScriptedLifetime(unreachable, "dataflow", lambda _: False)
    serve(lifetime, simulation.config, simulation.policies, 5, max_tokens=MAX_TOKENS)
    assert not flicker.down.is_set()
    assert "the store is away" in caplog.text
    assert lifetime.heartbeat.last.note == ""
    assert progress_of(lifetime.heartbeat.last, DataflowProgress).batches["solver"] == 4


def test_pauses_double_during_a_store_outage_and_are_reset_after_it(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store)
    flicker = OutageBackend(simulation.run.backend)
    flicker.down.set()
    unreachable = replace(simulation.run, backend=flicker, patience_s=1e-6)

    def answers_for_a_while(seconds: float) -> bool:
        number = len(lifetime.waits_s)
        if number == 8:
            flicker.down.clear()
        if number == 10:
            flicker.down.set()
        return number == 11

    lifetime = ScriptedLifetime(unreachable, "dataflow", answers_for_a_while)
    config = simulation.config.model_copy(
        update={"poll_interval_s": 0.2, "gather_interval_s": 1e-9}
    )
    serve(lifetime, config, simulation.policies, 5, max_tokens=MAX_TOKENS)
    # eight failures; the first round, which writes orders, needs no pause; two rounds without work;
    # then another failure
    assert lifetime.waits_s == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 0.2, 0.2, 0.5]
    assert lifetime.heartbeat.last.note == "the store does not answer: the store is away"


@pytest.mark.parametrize("key", ["orders/00000001.json", "shards/00000000.arrow"])
def test_the_heartbeat_tells_what_to_do_while_one_object_keeps_failing(
    memory_store: ObjectStore, key: str
) -> None:
    simulation = world(memory_store)
    simulation.dataflow().round()
    simulation.play([0])
    backend = UnreachableBackend(simulation.run.backend, key)
    run = replace(simulation.run, backend=backend, patience_s=1e-6)
    notes: list[str] = []

    def keeps_failing(seconds: float) -> bool:
        notes.append(lifetime.heartbeat.last.note)
        if len(notes) == SAME_FAILURES:
            backend.key = ""
        return len(notes) == SAME_FAILURES + 1

    lifetime = ScriptedLifetime(run, "dataflow", keeps_failing)
    serve(lifetime, simulation.config, simulation.policies, 5, max_tokens=MAX_TOKENS)
    waits = f"the store does not answer: runs/r/{key} is away"
    advice = (
        "; if this object alone fails, put a good copy of it back; an order or shard can also be "
        "deleted, and then counts as lost"
    )
    assert notes == [waits] * (SAME_FAILURES - 1) + [waits + advice, ""]
    assert read_quarantine(simulation.run) == {}


def test_a_restarted_dataflow_does_not_wait_for_a_lost_shard_in_quarantine(
    memory_store: ObjectStore,
) -> None:
    """Workers do not roll its order out again."""
    simulation = world(memory_store, max_staleness=3, filter=[])
    simulation.dataflow().round()
    quarantine_object(simulation.run, layout.shard(0), "there is no object")
    dataflow = simulation.dataflow()
    assert 0 not in dataflow._outstanding
    simulation.finish(dataflow)
    simulation.check()
    assert 0 not in {key.order for key in simulation.trained("solver")}


def test_orders_after_many_unanswered_ones_are_found_in_turn(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "PROBES_MAX", 2)
    simulation = world(
        memory_store, {policy: PolicyData(batch_size=24, steps=9) for policy in POLICIES}
    )
    dataflow = simulation.dataflow()
    dataflow.round()
    opened = simulation.open_orders()
    assert len(opened) >= 5
    simulation.play([4])
    assert [dataflow._probe_shards() for _ in range(3)] == [[], [], [4]]
    simulation.play([0])
    rest = -(-(len(opened) - 5) // 2)  # the search continues after order 4 and then wraps around
    result = [dataflow._probe_shards() for _ in range(rest + 1)]
    assert [numbers for numbers in result if numbers] == [[0]]


def test_a_round_ingests_a_limited_number_of_shards_and_the_next_round_continues(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "SHARDS_PER_ROUND_MAX", 2)
    simulation = world(
        memory_store, {policy: PolicyData(batch_size=24, steps=9) for policy in POLICIES}
    )
    requested: list[list[int]] = []

    def ingest(numbers: Sequence[int]) -> list[IngestedShard]:
        requested.append(list(numbers))
        return [
            ingest_shard(simulation.run, number, simulation.config, list(simulation.policies), {})
            for number in numbers
        ]

    dataflow = Dataflow(
        simulation.run,
        simulation.config,
        simulation.policies,
        5,
        max_tokens=MAX_TOKENS,
        ingest=ingest,
    )
    dataflow.round()
    simulation.play(range(5))
    rounds(dataflow, 3)
    assert requested == [[0, 1], [2, 3], [4]]


def test_a_round_writes_a_limited_number_of_orders(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = world(
        memory_store, {policy: PolicyData(batch_size=24, steps=9) for policy in POLICIES}
    )
    monkeypatch.setattr(service_module, "ORDERS_PER_ROUND_MAX", 2)
    dataflow = simulation.dataflow()
    counts = []
    for _ in range(3):
        dataflow.round()
        counts.append(len(simulation.orders()))
    assert counts == [2, 4, 6]


EQUAL = LedgerEntry(SequenceKey(0, 0, 0, 0), "filtered", "zero_advantage")


def _assembly(store: ObjectStore, policy: str = "solver") -> BatchAssembly:
    config = DataConfig(prompts=BuiltinPrompts(builtin="chained_addition"))
    return BatchAssembly(
        store,
        policy,
        PolicyData(batch_size=4, steps=1),
        config,
        0,
        lambda order: None,
        limits=ModelLimits(),
    )


def test_a_run_without_trainable_rows_has_a_stall_reason(
    memory_store: ObjectStore,
) -> None:
    assembly = _assembly(memory_store)
    for order in range(UNTRAINABLE_GROUPS // 4):
        assert stall_reason([assembly]) == ""
        assembly.ingest(
            IngestedShard.of(
                shard(*[group()] * 4, order=order),
                {"solver": IngestedGroups(num_groups=4, entries=(EQUAL,) * 4)},
            )
        )
    assert stall_reason([assembly]) == (
        f"the last {UNTRAINABLE_GROUPS} groups held nothing to train solver on: all of a group's "
        "rewards were equal; prompts of "
        "another difficulty or more samples_per_prompt may help"
    )
    assembly.ingest(
        IngestedShard.of(shard(order=99), {"solver": IngestedGroups(rows=(row(),), num_groups=4)})
    )
    assert stall_reason([assembly]) == ""


def test_the_stall_reason_of_failed_episodes_has_their_number_and_the_commonest_error(
    memory_store: ObjectStore,
) -> None:
    """A workflow that raises immediately gives no sequence, and so no group of any policy."""
    assemblies = [_assembly(memory_store, "solver"), _assembly(memory_store, "verifier")]
    plays = [
        *[episode(error="KeyError: 'answer'", failure_kind=FailureKind.WORKFLOW_BUG)] * 2,
        episode(error="KeyError: 'answer'"),
        episode(error="TimeoutError: ", failure_kind=FailureKind.TIMEOUT),
    ]
    for order in range(UNTRAINABLE_GROUPS):
        for assembly in assemblies:
            assembly.ingest(
                IngestedShard.of(
                    shard(group(*plays), order=order), {assembly.policy: IngestedGroups()}
                )
            )
    assert stall_reason(assemblies) == (
        f"the last {UNTRAINABLE_GROUPS} groups held nothing to train solver or verifier on: "
        f"{4 * UNTRAINABLE_GROUPS} of "
        f"{4 * UNTRAINABLE_GROUPS} episodes failed ({2 * UNTRAINABLE_GROUPS} workflow_bug, "
        f"{UNTRAINABLE_GROUPS} not_recorded, {UNTRAINABLE_GROUPS} timeout), "
        f"{3 * UNTRAINABLE_GROUPS} of them with KeyError: 'answer'"
    )


def test_a_run_whose_orders_are_all_unreadable_has_a_stall_reason(
    memory_store: ObjectStore,
) -> None:
    simulation = world(
        memory_store,
        {policy: PolicyData(batch_size=UNTRAINABLE_GROUPS, steps=9) for policy in POLICIES},
    )
    dataflow = simulation.dataflow()
    groups = simulation.config.prompts_per_order
    while dataflow.progress().closed_below * groups < UNTRAINABLE_GROUPS:
        assert dataflow.stall_reason == ""
        for number in simulation.open_orders():
            if layout.order(number) not in read_quarantine(simulation.run):
                simulation.run.put(layout.order(number), b"damaged")
        dataflow.round()
    closed = dataflow.progress().closed_below
    assert dataflow.stall_reason.startswith(
        f"the last {closed * groups} groups held nothing to train solver or verifier on: {closed} "
        f"orders or their shards cannot be read, the last one because {layout.order(closed - 1)} "
    )
    assert "rewards" not in dataflow.stall_reason


def test_unreadable_orders_do_not_hide_why_other_groups_are_left_out(
    memory_store: ObjectStore,
) -> None:
    assembly = _assembly(memory_store)
    assembly.ingest(IngestedShard(order=0, problem="damaged"))
    assembly.ingest(IngestedShard(order=0, problem="damaged"))  # it is closed already
    for order in range(1, UNTRAINABLE_GROUPS):
        played = IngestedGroups(num_groups=1, entries=(EQUAL,))
        assembly.ingest(IngestedShard.of(shard(group(), order=order), {"solver": played}))
    per_order = DataConfig(prompts=BuiltinPrompts(builtin="chained_addition")).prompts_per_order
    assert stall_reason([assembly]) == (
        f"the last {UNTRAINABLE_GROUPS - 1 + per_order} groups held nothing to train solver on: "
        "1 orders or their shards cannot be read, the last one because damaged; all of a group's "
        "rewards were equal; prompts of another difficulty or more samples_per_prompt may help"
    )
    kept = IngestedGroups(rows=(row(),), num_groups=1)
    assembly.ingest(IngestedShard.of(shard(group(), order=998), {"solver": kept}))
    for order in range(1000, 1000 + UNTRAINABLE_GROUPS):
        played = IngestedGroups(num_groups=1)
        assembly.ingest(IngestedShard.of(shard(group(), order=order), {"solver": played}))
    assert "cannot be read" not in stall_reason([assembly])


def test_failures_before_a_trainable_group_are_not_part_of_the_stall_reason(
    memory_store: ObjectStore,
) -> None:
    assembly = _assembly(memory_store)
    early = episode(error="OSError: early", failure_kind=FailureKind.INFRASTRUCTURE)
    late = episode(error="KeyError: late", failure_kind=FailureKind.WORKFLOW_BUG)
    for order in range(3 * UNTRAINABLE_GROUPS):
        assembly.ingest(IngestedShard.of(shard(group(early), order=order), _groups()))
    kept = IngestedGroups(rows=(row(),), num_groups=1)
    assembly.ingest(IngestedShard.of(shard(group(early), order=998), {"solver": kept}))
    assert stall_reason([assembly]) == ""
    for order in range(UNTRAINABLE_GROUPS):
        assembly.ingest(IngestedShard.of(shard(group(late), order=1000 + order), _groups()))
    assert stall_reason([assembly]) == (
        f"the last {UNTRAINABLE_GROUPS} groups held nothing to train solver on: "
        f"{UNTRAINABLE_GROUPS} of {UNTRAINABLE_GROUPS} episodes failed ({UNTRAINABLE_GROUPS} "
        f"workflow_bug), {UNTRAINABLE_GROUPS} of them with KeyError: late"
    )


def _groups() -> dict[str, IngestedGroups]:
    return {"solver": IngestedGroups(num_groups=1)}


def damage_order(run: ObjectStore, number: int, is_lost: bool) -> None:
    if is_lost:
        run.delete(layout.order(number))
    else:
        run.put(layout.order(number), b"torn")


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_damaged_or_lost_order_is_closed_without_sequences_and_the_run_continues(
    memory_store: ObjectStore, is_lost: bool, restarted: bool
) -> None:
    simulation = world(memory_store, max_staleness=2)
    dataflow = simulation.dataflow()
    rounds(dataflow)
    damaged, *others = simulation.open_orders()
    assert others
    damage_order(simulation.run, damaged, is_lost)
    if restarted:
        dataflow = simulation.dataflow()
    for _ in range(8):
        simulation.play([number for number in simulation.open_orders() if number != damaged])
        dataflow.round()
    assert list(read_quarantine(simulation.run)) == [layout.order(damaged)]
    simulation.finish(dataflow)
    simulation.check()
    for policy in POLICIES:
        made = simulation.batches(policy)
        assert damaged in {order for batch in made for order in batch.shards}
        assert damaged not in {row.key.order for batch in made for row in batch.rows}


def test_a_leased_newest_order_that_is_lost_is_not_written_again(memory_store: ObjectStore) -> None:
    simulation = world(memory_store)
    simulation.dataflow().round()
    newest = orders.next_number(simulation.run) - 1
    assert leases.take(simulation.run, newest, "rollout-0", "", leases.LeaseWatch(9.0))
    damage_order(simulation.run, newest, is_lost=True)
    dataflow = simulation.dataflow()
    rounds(dataflow)
    assert not orders.exists(simulation.run, newest)
    assert list(read_quarantine(simulation.run)) == [layout.order(newest)]
    simulation.finish(dataflow)
    simulation.check()


@pytest.mark.parametrize("restarted", [False, True])
def test_the_shard_of_a_quarantined_order_is_not_ingested(
    memory_store: ObjectStore, restarted: bool
) -> None:
    """A worker had read the order before it was damaged."""
    simulation = world(memory_store, filter=[])
    dataflow = simulation.dataflow()
    dataflow.round()
    order = simulation.run.get(layout.order(0))
    damage_order(simulation.run, 0, is_lost=False)
    rounds(dataflow)
    assert list(read_quarantine(simulation.run)) == [layout.order(0)]
    simulation.run.put(layout.order(0), order)
    simulation.play([0])
    if restarted:
        dataflow = simulation.dataflow()
    simulation.finish(dataflow)
    simulation.check()
    for policy in POLICIES:
        assert 0 in simulation.batches(policy)[0].shards
        assert 0 not in {key.order for key in simulation.trained(policy)}


def test_an_answered_order_that_is_damaged_keeps_its_sequences(memory_store: ObjectStore) -> None:
    simulation = world(memory_store, filter=[])
    simulation.dataflow().round()
    simulation.play([0])
    damage_order(simulation.run, 0, is_lost=False)
    simulation.finish(simulation.dataflow())
    assert read_quarantine(simulation.run) == {}
    assert 0 in {key.order for key in simulation.trained("solver")}


def test_a_missing_run_folder_closes_no_order(memory_store: ObjectStore) -> None:
    simulation = world(memory_store)
    dataflow = simulation.dataflow()
    dataflow.round()
    number = simulation.open_orders()[0]
    kept = {key: simulation.run.get(key) for key in (layout.RUN, layout.order(number))}
    for key in kept:
        simulation.run.delete(key)
    rounds(dataflow)
    assert read_quarantine(simulation.run) == {}
    for key, body in kept.items():
        simulation.run.create(key, body)
    simulation.finish(dataflow)
    simulation.check()


def test_the_newest_closed_order_can_be_lost(memory_store: ObjectStore) -> None:
    simulation = world(memory_store, filter=[])
    dataflow = simulation.dataflow()
    while not simulation.batches("solver"):
        dataflow.round()
        simulation.play(simulation.open_orders())
    closed = simulation.batches("solver")[0]
    last = max(closed.closed_below - 1, *closed.closed, -1)
    for number in range(last, orders.next_number(simulation.run)):
        simulation.run.delete(layout.order(number))
    assert simulation.dataflow().progress().orders > last
