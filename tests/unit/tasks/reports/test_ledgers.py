"""The ledgers of the report are those of `verify`."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from storage import layout
from storage.run import batches, orders, shards
from storage.run.fates import LedgerCounts
from storage.run.quarantine import quarantine_object
from storage.store.object_store import ObjectStore
from storage.verify.verify import verify
from tasks.monitoring.training_curves import read_history
from tasks.recipes.run_terms import run_terms
from tasks.reports import ledgers
from tasks.reports.ledgers import LedgerRow
from tasks.reports.shard_log import read_shard_log
from tests.support.runs.true_run import POLICIES, STEPS, finished_run

Counts = Mapping[str, LedgerCounts]


def report_and_verify(run: ObjectStore, steps_max: int = 2000) -> tuple[Counts, Counts]:
    """Return policy → counts, of the report and of `verify`."""
    read = {}
    for policy in POLICIES:
        history = read_history(run, policy, STEPS, steps_max)
        read[policy] = ledgers.read_batch_fates(run, history, {})
    log = read_shard_log(run)
    of_report = {policy: ledgers.counts(policy, read[policy], log) for policy in POLICIES}
    return of_report, verify(run, run_terms(run)).policies


def with_a_shard_that_no_batch_ingested(store: ObjectStore) -> ObjectStore:
    """A finished run with one more order and shard, as workers leave them at the end of a run."""
    run = finished_run(store)
    number = orders.next_number(run)
    orders.create(run, replace(orders.read(run, 0), number=number))
    shards.create(run, replace(shards.read(run, 0), order=number))
    return run


@pytest.mark.parametrize("steps_max", [2000, 2], ids=["all steps", "a sample of the curves"])
def test_the_report_counts_what_verify_counts(memory_store: ObjectStore, steps_max: int) -> None:
    run = with_a_shard_that_no_batch_ingested(memory_store)
    of_report, of_verify = report_and_verify(run, steps_max)
    assert of_report == of_verify


def test_waiting_includes_shards_that_no_batch_ingested(memory_store: ObjectStore) -> None:
    run = with_a_shard_that_no_batch_ingested(memory_store)
    listed = len(batches.read(run, "solver", STEPS).waiting)
    of_report, _ = report_and_verify(run)
    assert of_report["solver"].waiting > listed


def test_the_counts_agree_for_a_damaged_run(memory_store: ObjectStore) -> None:
    run = with_a_shard_that_no_batch_ingested(memory_store)
    run.put(layout.shard(0), b"damage")
    quarantine_object(run, layout.shard(1), "damage")
    quarantine_object(run, layout.order(2), "damage")
    run.put(layout.batch("verifier", 2), b"damage")
    of_report, of_verify = report_and_verify(run)
    assert of_report["solver"] == of_verify["solver"]
    assert of_report["verifier"] == replace(of_verify["verifier"], batches=STEPS - 1)


def test_a_later_reading_reads_new_batches_alone(memory_store: ObjectStore) -> None:
    run = finished_run(memory_store)
    nothing = read_history(run, "solver", 0)
    known = ledgers.read_batch_fates(run, nothing, {})
    assert list(known) == list(range(1, STEPS + 1))
    for step in known:
        run.put(layout.batch("solver", step), b"never read again")
    assert ledgers.read_batch_fates(run, nothing, known) == known


def test_rows_are_sorted_by_frequency_with_waiting_at_the_end() -> None:
    ledger = LedgerCounts(
        trained=10, filtered=30, waiting=60, reasons={"zero_advantage": 25, "partial_group": 5}
    )
    assert ledgers.rows("solver", ledger) == [
        LedgerRow("solver", "filtered: zero_advantage", 25, 0.25),
        LedgerRow("solver", "trained", 10, 0.1),
        LedgerRow("solver", "filtered: partial_group", 5, 0.05),
        LedgerRow("solver", "waiting", 60, 0.6),
    ]
