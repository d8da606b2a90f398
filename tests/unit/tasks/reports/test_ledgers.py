"""The ledgers of the report are those of `verify`, and it names what it leaves out."""

import re
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
from tasks.reports.page import SeenObjects, render_report
from tasks.reports.shard_log import read_shard_log
from tests.support.runs.small_run import RUN_ID, SmallRun
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


def failures(small_run: SmallRun, seen: SeenObjects | None = None) -> list[str]:
    page = render_report(small_run.run, RUN_ID, seen)
    return re.findall(r'<p class="failed">([^<]*)</p>', page)


def trained_run(name: str, steps: int = 3) -> SmallRun:
    """A run whose solver has made `steps` steps, and has the next batch."""
    small_run = SmallRun(name)
    small_run.version("solver", 0)
    for step in range(1, steps + 1):
        small_run.batch("solver", step)
        small_run.version("solver", step)
    small_run.batch("solver", steps + 1)
    for number in range(7):
        small_run.order(number)
        small_run.shard(number)
    return small_run


def test_an_undamaged_run_leaves_out_nothing_before_its_first_version_and_while_it_goes_on() -> (
    None
):
    assert failures(SmallRun("left-out-new")) == []
    assert failures(trained_run("left-out-none")) == []


def test_a_report_names_the_shards_and_the_steps_that_it_leaves_out() -> None:
    small_run, seen = trained_run("left-out-some"), SeenObjects()
    assert failures(small_run, seen) == []
    small_run.run.put(layout.shard(4), b"x")
    small_run.run.put(layout.batch("solver", 2), b"x")
    small_run.run.put(layout.manifest(layout.weights("solver", 0)), b"x")
    expected = [
        f"this page leaves out the unreadable shard 4: see `astraflow verify {RUN_ID}`",
        "this page leaves out the batch or the version of steps 0, 2 of solver, which is "
        f"unreadable or missing: see `astraflow verify {RUN_ID}`",
    ]
    assert failures(small_run) == expected
    assert failures(small_run, seen) == [], "it has read them before they were damaged"


def test_a_report_names_few_of_many_damaged_shards() -> None:
    small_run = trained_run("left-out-many")
    for number in range(7):
        small_run.run.put(layout.shard(number), b"x")
    assert failures(small_run) == [
        "this page leaves out the unreadable shards 0, 1, 2, 3, 4 and 2 more: see `astraflow "
        f"verify {RUN_ID}`"
    ]


def test_a_report_counts_the_steps_below_a_version_of_any_number() -> None:
    small_run = trained_run("left-out-beyond")
    for exponent in range(2, 41):  # where the search for the newest version looks
        for number in (2**exponent - 1, 2**exponent, 2**exponent + 1):
            small_run.run.put(layout.manifest(layout.weights("solver", number)), b"x")
    newest, left_out = failures(small_run)
    assert newest.startswith(f"batch {2**40 + 1} of solver cannot be read")
    assert left_out.startswith(
        "this page leaves out the batch or the version of steps 5, 6, 7, 8, 9 and "
        f"{2**40 - 8} more of solver"
    )
