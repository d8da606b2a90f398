"""From the shards to the batches of one policy: sources of replays, and metrics of shards and
fates.
"""

import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from data_ops.algorithms.policy_groups import ModelLimits
from data_ops.algorithms.samplers import Draft
from data_ops.config import DataConfig, PolicyData
from data_ops.dataflow import batch_assembly as assembly_module
from data_ops.dataflow.batch_assembly import UNTRAINABLE_GROUPS, BatchAssembly, stall_reason
from data_ops.dataflow.shard_ingest import IngestedGroups, IngestedShard
from storage import layout
from storage.errors import CorruptError
from storage.records.batches import BatchRow, LedgerEntry, SequenceKey
from storage.run import batches
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tests.support.runs import builders
from tests.support.runs.builders import row, shard, tensors
from tests.support.runs.workers import write_orders

POLICY = "solver"


class LastTrained:
    """A sampler that replays the two newest trained rows, and records every row that it gets in
    `asked`.
    """

    asked = 4
    found: list[list[SequenceKey]] = []

    def arrange(self, draft: Draft) -> Draft:
        result = draft.trained(self.asked)
        self.found.append([item.key for item in result])
        return replace(draft, replays=draft.trained(2))


def key(order: int, sample: int = 0) -> SequenceKey:
    return SequenceKey(order, 0, sample, 0)


def assembly_of(
    run: ObjectStore, *, steps: int = 9, size: int = 4, **config: object
) -> BatchAssembly:
    settings = DataConfig.model_validate(
        {"prompts": {"builtin": "chained_addition"}, "batches_ahead": 0, **config}
    )
    return BatchAssembly(
        run,
        POLICY,
        PolicyData(batch_size=size, steps=steps),
        settings,
        0,
        lambda order: None,
        limits=ModelLimits(),
        clock=lambda: 100.0,
    )


def ingest(
    assembly: BatchAssembly, order: int, *rows: BatchRow, finished_s: float = 90.0, **groups: object
) -> None:
    answer = replace(shard(order=order), finished_s=finished_s)
    ingested = IngestedGroups(rows=rows, num_groups=1, **groups)  # type: ignore[arg-type]
    assembly.ingest(IngestedShard.of(answer, {POLICY: ingested}))


@pytest.fixture
def trained(memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Three batches of the solver; batch 2 replays a row of batch 1."""
    monkeypatch.setattr(LastTrained, "found", [])
    rows = [
        (row(key(1)), row(key(2))),
        (row(key(1), replay=True), row(key(3))),
        (row(key(4)), row(key(5))),
    ]
    write_orders(memory_store, 8)
    for step, own in enumerate(rows, start=1):
        batches.create(memory_store, builders.batch(*own, step=step, shards=(), closed_below=6))
    for version in range(4):
        publisher.publish(memory_store, POLICY, version, tensors(version))
    return memory_store


def next_batch(
    run: ObjectStore, asked: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[SequenceKey, bool]]:
    """(key, replay) of each row of batch 4, whose sampler requests the given number of trained
    rows.
    """
    monkeypatch.setattr(LastTrained, "asked", asked)
    assembly = assembly_of(run, sample=[f"{__name__}:LastTrained"], max_staleness=8)
    assembly.poll_version()
    ingest(assembly, 6, row(key(6), version=3), row(key(6, 1), version=3))
    assert assembly.make_batches() == 1
    return [(item.key, item.replay) for item in batches.read(run, POLICY, 4).rows]


def test_replays_are_taken_from_the_newest_batch_first_and_never_replayed_again(
    trained: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = next_batch(trained, 99, monkeypatch)
    assert rows == [(key(4), True), (key(5), True), (key(6), False), (key(6, 1), False)]
    assert LastTrained.found == [[key(4), key(5), key(3), key(1), key(2)]]


def test_a_draft_has_at_most_the_requested_trained_rows(
    trained: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_batch(trained, 1, monkeypatch)
    assert LastTrained.found == [[key(4)]]


def test_batches_beyond_the_limit_are_not_read_for_replays(
    trained: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly_module, "REPLAY_BATCHES_MAX", 2)
    trained.put("batches/solver/00000001.arrow", b"torn")
    next_batch(trained, 99, monkeypatch)
    assert LastTrained.found == [[key(4), key(5), key(3)]]


def test_only_the_needed_number_of_batches_is_read_for_replays(
    trained: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.put("batches/solver/00000002.arrow", b"torn")
    next_batch(trained, 2, monkeypatch)
    assert LastTrained.found == [[key(4), key(5)]]


def test_batches_beyond_the_steps_of_the_run_are_ignored(
    trained: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    trained.put("batches/solver/00000010.arrow", b"")
    trained.put("batches/solver/00100000.arrow", b"")
    assert assembly_of(trained, steps=9).ledger.last_step == 3
    assert caplog.messages == [
        "batches/solver/00000010.arrow is ignored: the run has 9 steps, and it is none of them"
    ]


def test_a_long_gap_between_batches_is_counted_and_not_listed(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    step = 10**6
    batches.create(memory_store, builders.batch(step=step, shards=(), closed_below=0))
    tracemalloc.start()
    try:
        assert assembly_of(memory_store, steps=step).ledger.last_step == step
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 * 2**20
    assert [message.split(":")[0] for message in caplog.messages] == [
        "batches/solver/00000001.arrow (and 999998 more) is lost, batch 1000000 exists"
    ]


def test_a_lost_batch_is_named_when_its_rows_are_replayed(
    trained: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.delete(layout.batch(POLICY, 2))
    with pytest.raises(
        CorruptError, match=r"^batches/solver/00000002\.arrow is lost, and data\.sample replays it"
    ):
        next_batch(trained, 99, monkeypatch)
    assert not batches.exists(trained, POLICY, 4)


def test_the_first_batch_has_no_replays(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LastTrained, "found", [])
    assembly = assembly_of(memory_store, sample=[f"{__name__}:LastTrained"], size=2)
    publisher.publish(memory_store, POLICY, 0, tensors(0))
    assembly.poll_version()
    ingest(assembly, 0, row(key(0)), row(key(0, 1)))
    assert assembly.make_batches() == 1
    assert LastTrained.found == [[]]


def test_fates_are_counted_as_batches_are_made(
    trained: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = assembly_of(trained, sample=[f"{__name__}:LastTrained"], max_staleness=1)
    assembly.poll_version()
    ingest(
        assembly, 6, row(key(6), version=3), row(key(6, 1), version=3), row(key(6, 2), version=1)
    )
    ingest(assembly, 7, entries=(builders.entry(key(7)), builders.entry(key(7, 1))))
    assert assembly.totals == {}
    assembly.make_batches()
    assert assembly.totals == {"trained": 2, "replayed": 2, "filtered": 2, "expired": 1}


def test_a_batch_has_metrics_of_the_waiting_time_of_its_shards(memory_store: ObjectStore) -> None:
    assembly = assembly_of(memory_store, size=2)
    publisher.publish(memory_store, POLICY, 0, tensors(0))
    assembly.poll_version()
    ingest(assembly, 0, row(key(0)), finished_s=93.0)
    ingest(assembly, 1, row(key(1)), finished_s=60.0)
    assembly.make_batches()
    metrics = batches.read(memory_store, POLICY, 1).metrics
    assert [metrics[f"dataflow/shard_to_batch_s/{stat}"] for stat in ("min", "p50", "max")] == [
        7.0,
        23.5,
        40.0,
    ]
    assert batches.read(memory_store, POLICY, 1).created_s == 100.0


def test_a_shard_without_rows_of_the_policy_closes_its_order(
    memory_store: ObjectStore,
) -> None:
    assembly = assembly_of(memory_store)
    assembly.ingest(IngestedShard.of(shard(), {}))
    assert assembly.ledger.is_closed(0)
    assembly.ingest(IngestedShard(order=1, problem="cannot be read"))
    assert assembly.ledger.is_closed(1)
    assert assembly.ledger.num_waiting == 0


def refused(*reasons: str) -> tuple[LedgerEntry, ...]:
    return tuple(LedgerEntry(key(0), "filtered", reason) for reason in reasons)


@pytest.mark.parametrize(
    ("reasons", "why"),
    [
        (("zero_advantage", "zero_advantage", "too_long"), "all of a group's rewards were equal"),
        (("too_long", "my:Filter", "my:Filter"), "128 of 192 sequences .* the reason my:Filter$"),
        ((), "the workflow recorded no sequence in which the policy sampled a token$"),
    ],
)
def test_a_stall_reason_has_the_reason_for_which_most_sequences_were_filtered(
    memory_store: ObjectStore, reasons: tuple[str, ...], why: str
) -> None:
    assembly = assembly_of(memory_store)
    ingest(assembly, 0, entries=refused(*["not_finite"] * 999))
    ingest(assembly, 1, row(key(1)))
    for order in range(2, 2 + UNTRAINABLE_GROUPS):
        ingest(assembly, order, entries=refused(*reasons))
    assert re.search(
        f"the last 64 groups held nothing to train solver on: {why}", stall_reason([assembly])
    )


class LeavesOut:
    """A sampler that leaves out all rows of the orders below 4."""

    def arrange(self, draft: Draft) -> Draft:
        return replace(draft, rows=tuple(row for row in draft.rows if row.key.order >= 4))


def test_a_sampler_that_leaves_out_too_many_rows_for_a_batch_is_a_stall_reason(
    memory_store: ObjectStore,
) -> None:
    publisher.publish(memory_store, POLICY, 0, tensors(0))
    assembly = assembly_of(memory_store, size=2, sample=["fifo", f"{__name__}:LeavesOut", "edf"])
    ingest(assembly, 1, row(key(1)))
    assert assembly.make_batches() == 0
    assert stall_reason([assembly]) == ""  # there are too few rows yet
    ingest(assembly, 2, row(key(2)))
    assert assembly.make_batches() == 0
    assert stall_reason([assembly]) == (
        "2 sequences of solver wait, and data.sample (LeavesOut) leaves out so many of them that "
        "no batch of 2 can be made"
    )
    write_orders(memory_store, 6)
    ingest(assembly, 4, row(key(4)), row(key(4, 1)))
    assert assembly.make_batches() == 1
    assert stall_reason([assembly]) == ""


def test_metrics_of_a_batch_cover_the_shards_since_the_previous_batch(
    memory_store: ObjectStore,
) -> None:
    assembly = assembly_of(memory_store, size=1)
    for order, reward in enumerate((1.0, 0.25)):
        publisher.publish(memory_store, POLICY, order, tensors(order))
        assembly.poll_version()
        ingest(assembly, order, row(key(order), version=1), rewards=np.array([reward]))
        assert assembly.make_batches() == 1
    means = [
        batches.read(memory_store, POLICY, step).metrics["dataflow/reward/mean"] for step in (1, 2)
    ]
    assert means == [1.0, 0.25]


def test_time_of_the_store_and_of_the_algorithms_is_measured_separately(
    memory_store: ObjectStore,
) -> None:
    measured: list[str] = []

    @contextmanager
    def span(component: str) -> Iterator[None]:
        measured.append(component)
        yield

    settings = DataConfig.model_validate({"prompts": {"builtin": "chained_addition"}})
    made = BatchAssembly(
        memory_store,
        POLICY,
        PolicyData(batch_size=1, steps=1),
        settings,
        0,
        lambda order: None,
        limits=ModelLimits(),
        span=span,
    )
    publisher.publish(memory_store, POLICY, 0, tensors(0))
    made.poll_version()
    ingest(made, 0, row(key(0)))
    made.make_batches()
    assert measured == ["algorithms", "store"]
