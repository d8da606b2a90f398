"""`verify` finds no violation in a valid run and reports every kind of damage, with its object and
the broken invariant.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import layout
from storage.errors import ConfigError, TransientError
from storage.formats.json_objects import seal
from storage.records.batches import Batch, BatchRow, LedgerEntry, SequenceKey
from storage.records.control import RunEnd, Stop
from storage.records.rollouts import Shard
from storage.run import (
    batches,
    checkpoints,
    evaluation_samples,
    evaluations,
    orders,
    quarantine,
    shards,
)
from storage.run.checkpoints import CheckpointState
from storage.run.evaluation_samples import EvaluationSample
from storage.run.runs import create_run, request_stop
from storage.store.object_store import ObjectStore
from storage.verify.shards import row_digest
from storage.verify.verify import Verdict, verify
from storage.verify.violations import (
    MORE,
    TEXT_MAX,
    VIOLATIONS_MAX,
    Findings,
    Invariant,
    Violation,
)
from storage.weights import manifests, publisher, tags
from tasks.recipes.run_terms import run_terms
from tests.support.runs import builders
from tests.support.runs.builders import tensors
from tests.support.runs.evaluations import evaluation
from tests.support.runs.true_run import BATCH_SIZE, MAX_STALENESS, STEPS, finished_run
from tests.support.stores.resealed import resealed
from tests.support.stores.stranger import sealed

CONFIG = {"steps": 2, "policies": {"solver": {"batch_size": 4}}, "data": {"max_staleness": 8}}


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    return finished_run(memory_store)


def rewrite(run: ObjectStore, key: str, body: bytes) -> None:
    run.delete(key)
    run.create(key, body)


def change_batch(
    run: ObjectStore, step: int, change: Callable[[Batch], Batch], policy: str = "solver"
) -> str:
    """Replace a batch by a changed one; return its key."""
    rewrite(
        run, layout.batch(policy, step), batches.encode(change(batches.read(run, policy, step)))
    )
    return layout.batch(policy, step)


def change_first_row(run: ObjectStore, step: int, change: Callable[[BatchRow], BatchRow]) -> str:
    return change_batch(
        run, step, lambda batch: replace(batch, rows=(change(batch.rows[0]), *batch.rows[1:]))
    )


def verified(run: ObjectStore) -> Verdict:
    return verify(run, run_terms(run))


def all_violations(run: ObjectStore) -> list[tuple[int, str, str]]:
    """All violations."""
    return [tuple(violation) for violation in verified(run).violations]


def one_more_order(run: ObjectStore) -> int:
    """Add an order without a shard; return its number."""
    number = orders.next_number(run)
    orders.create(run, replace(orders.read(run, 0), number=number))
    return number


def named(key: SequenceKey) -> str:
    return f"order {key.order}, prompt {key.group}, episode {key.episode}, sequence {key.sequence}"


def broken_invariants(run: ObjectStore) -> set[tuple[int, str]]:
    """(invariant, where) of each violation."""
    return {(violation.invariant, violation.where) for violation in verified(run).violations}


def test_a_valid_run_has_no_violations_and_its_counts_add_up(run: ObjectStore) -> None:
    verdict = verified(run)
    assert verdict.violations == ()
    assert verdict.ok
    assert verdict.orders >= verdict.shards > 0
    assert (
        verdict.sequences == verdict.shards * 16
    )  # 2 prompts, 4 samples, an attempt and a verdict each
    for policy in ("solver", "verifier"):
        books = verdict.policies[policy]
        assert books.batches == STEPS
        assert books.trained == STEPS * 6
        assert books.filtered > 0
        assert books.trained + books.filtered + books.expired + books.waiting == verdict.shards * 8


def test_a_run_with_only_a_config_has_no_violations(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "empty", CONFIG)
    verdict = verified(run)
    assert verdict.ok
    assert (verdict.orders, verdict.shards, verdict.policies["solver"].batches) == (0, 0, 0)


def test_a_missing_batch_is_named_once(run: ObjectStore) -> None:
    run.delete(layout.batch("solver", 2))
    batch = layout.batch("solver", 2)
    assert [found for found in all_violations(run) if found[1] == batch] == [
        (1, batch, f"batch 2 is missing, batch {STEPS} exists")
    ]


def test_a_missing_newest_batch_is_named(run: ObjectStore) -> None:
    run.delete(layout.batch("solver", STEPS))
    what = f"batch {STEPS} is missing, version {STEPS} was made of it"
    assert all_violations(run) == [(1, layout.batch("solver", STEPS), what)]


def test_a_missing_order_is_named(run: ObjectStore) -> None:
    run.delete(layout.order(1))
    assert (1, layout.order(1)) in broken_invariants(run)


def test_an_object_with_a_very_large_number_gives_a_limited_list_of_gaps(run: ObjectStore) -> None:
    far = 10**12
    run.put(layout.order(far), run.get(layout.order(0)))
    run.put(layout.batch("solver", far), run.get(layout.batch("solver", 1)))
    run.put(
        layout.manifest(layout.weights("solver", far)),
        run.get(layout.manifest(layout.weights("solver", 1))),
    )
    orders_there = verified(run).orders - 1
    violations = all_violations(run)
    assert len(violations) < 350
    more = f"and {far - orders_there - 100:,} more orders are missing, order {far} exists"
    assert (1, layout.ORDERS, more) in violations
    assert (
        1,
        layout.order(orders_there),
        f"order {orders_there} is missing, order {far} exists",
    ) in violations
    more = f"and {far - STEPS - 1 - 100:,} more"
    for kind, folder in (("batch", "batches"), ("version", "weights")):
        plural = {"batch": "batches", "version": "versions"}[kind]
        assert (1, f"{folder}/solver", f"{more} {plural} are missing") in violations
        assert [
            what
            for _, _, what in violations
            if what == f"{kind} {STEPS + 1} is missing, {kind} {far} exists"
        ]


def test_each_stage_reports_its_progress_after_each_object(run: ObjectStore) -> None:
    shares: dict[str, list[float]] = {}
    verdict = verify(
        run, run_terms(run), lambda stage, share: shares.setdefault(stage, []).append(share)
    )
    counts = {"orders": verdict.orders, "shards": verdict.shards}
    counts |= {f"batches of {policy}": STEPS for policy in ("solver", "verifier")}
    counts |= {f"weights of {policy}": STEPS + 1 for policy in ("solver", "verifier")}
    counts |= {"leases and rounds": 2}  # usage and the end of the orders; it has no others
    assert shares == {
        stage: [(at + 1) / count for at in range(count)] for stage, count in counts.items()
    }


@pytest.mark.parametrize(
    "key",
    [
        layout.order(1),
        layout.shard(1),
        layout.batch("verifier", 2),
        layout.manifest(layout.weights("solver", 1)),
        layout.STOP,
    ],
)
def test_an_unreachable_store_is_an_error_and_no_violation(run: ObjectStore, key: str) -> None:
    class Away:
        def __getattr__(self, verb: str) -> Any:
            return getattr(run.backend, verb)

        def read(self, path: str) -> bytes:
            if path.endswith(key):
                raise TransientError("no route")
            return run.backend.read(path)

    with pytest.raises(TransientError, match="no route"):
        verify(replace(run, backend=Away(), patience_s=1e-6), run_terms(run))


def test_a_batch_or_a_version_at_the_key_of_another_is_reported(run: ObjectStore) -> None:
    rewrite(run, layout.batch("solver", 2), run.get(layout.batch("verifier", 2)))
    key = layout.manifest(layout.weights("solver", 2))
    rewrite(run, key, run.get(layout.manifest(layout.weights("solver", 1))))
    violations = all_violations(run)
    batch = layout.batch("solver", 2)
    assert (1, batch, f"{batch} holds batch 2 of 'verifier'") in violations
    wrong = f"{key} is the manifest of solver version 1; put a good copy of it back"
    assert (3, key, wrong) in violations


def test_a_shard_whose_order_is_missing_is_named(run: ObjectStore) -> None:
    run.delete(layout.order(1))
    last = orders.next_number(run, 2) - 1
    assert all_violations(run) == [
        (1, layout.order(1), f"order 1 is missing, order {last} exists"),
        (1, layout.shard(1), "answers order 1, which does not exist"),
    ]


def test_a_missing_version_is_named(run: ObjectStore) -> None:
    run.delete(layout.manifest(layout.weights("solver", 2)))
    assert (1, layout.weights("solver", 2)) in broken_invariants(run)


def test_a_shard_deleted_after_ingestion_is_reported(run: ObjectStore) -> None:
    run.delete(layout.shard(0))
    what = [
        violation for violation in verified(run).violations if "took in shard 0" in violation.what
    ]
    assert {violation.where for violation in what} == {
        layout.batch("solver", 1),
        layout.batch("verifier", 1),
    }


def test_one_changed_byte_of_weights_is_named(local_store: ObjectStore, tmp_path: Path) -> None:
    run = finished_run(local_store)
    name = manifests.read_manifest(run, "solver", 3).files[0].name
    key = f"{layout.weights('solver', 3)}/{name}"
    body = bytearray(run.get(key))
    body[-1] ^= 1
    rewrite(run, key, bytes(body))
    assert broken_invariants(run) == {(3, layout.weights("solver", 3))}


def test_a_missing_data_file_of_an_unretired_version_is_reported(run: ObjectStore) -> None:
    (file,) = manifests.read_manifest(run, "solver", 3).files
    key = f"{layout.weights('solver', 3)}/{file.name}"
    run.delete(key)
    assert all_violations(run) == [
        (
            3,
            layout.weights("solver", 3),
            f"{run.url}/{key} is missing, though its manifest lists it",
        )
    ]


def test_a_false_digest_in_a_manifest_is_named(run: ObjectStore) -> None:
    key = layout.manifest(layout.weights("verifier", 2))
    manifest = json.loads(run.get(key))
    manifest["digest"] = "sha256:" + "0" * 64
    rewrite(run, key, sealed(manifest))
    assert (3, key) in broken_invariants(run)


def test_a_false_parent_is_named(run: ObjectStore) -> None:
    key = layout.manifest(layout.weights("solver", 3))
    manifest = json.loads(run.get(key))
    manifest["parent"] = 1
    rewrite(run, key, sealed(manifest))
    violations = verified(run).violations
    assert [(violation.invariant, violation.where) for violation in violations] == [(3, key)]
    assert violations[0].what == "names parent 1; the parent of version 3 is 2"


def test_weights_replaced_after_sampling_are_reported(run: ObjectStore) -> None:
    for key in run.list(layout.weights("solver", 1)):
        run.delete(key)
    publisher.publish(run, "solver", 1, tensors(99))
    violations = [violation for violation in verified(run).violations if violation.invariant == 4]
    assert violations
    assert all("but version 1 of solver is" in violation.what for violation in violations)


def test_a_sequence_trained_twice_is_reported(run: ObjectStore) -> None:
    again = batches.read(run, "solver", 1).rows[0]
    where = change_batch(run, 2, lambda batch: replace(batch, rows=(again, *batch.rows[1:])))
    assert (2, where) in broken_invariants(run)
    assert f"{named(again.key)} is trained, but batches/solver/00000001.arrow had settled it" in [
        what for invariant, _, what in all_violations(run) if invariant == 2
    ]


def test_a_replay_of_a_trained_sequence_is_no_violation(run: ObjectStore) -> None:
    again = replace(batches.read(run, "solver", 1).rows[0], replay=True)
    change_last_row(run, again)
    verdict = verified(run)
    assert verdict.violations == ()
    assert verdict.policies["solver"].replayed == 1


def change_last_row(run: ObjectStore, row: BatchRow) -> str:
    """`row` replaces the last trained one, which stays waiting."""

    def change(batch: Batch) -> Batch:
        return replace(
            batch, rows=(*batch.rows[:-1], row), waiting=(*batch.waiting, batch.rows[-1].key)
        )

    return change_batch(run, STEPS, change)


@pytest.mark.parametrize("fate", ["filtered", "waiting"])
def test_a_replay_of_an_untrained_sequence_is_reported(run: ObjectStore, fate: str) -> None:
    ledger = [entry for n in range(1, STEPS + 1) for entry in batches.read(run, "solver", n).ledger]
    filtered = next(entry.key for entry in ledger if entry.fate == "filtered")
    key = filtered if fate == "filtered" else batches.read(run, "solver", STEPS).waiting[0]
    where = change_last_row(
        run, replace(batches.read(run, "solver", 1).rows[0], key=key, replay=True)
    )
    assert (2, where, f"replays {named(key)}, which was never trained on") in all_violations(run)


def test_a_sequence_above_the_staleness_bound_is_reported_and_one_at_the_bound_is_not(
    run: ObjectStore,
) -> None:
    """The valid run reaches the bound. A row with another version also differs from its shard, so
    invariant 7 is broken too.
    """
    bound = STEPS - 1 - MAX_STALENESS
    assert batches.read(run, "solver", STEPS).rows[0].min_version == bound
    assert broken_invariants(run) == set()

    def aged(row: BatchRow) -> BatchRow:
        versions = np.where(row.loss_mask, np.int32(bound - 1), row.versions).astype(np.int32)
        return replace(row, versions=versions, min_version=bound - 1)

    where = change_first_row(run, STEPS, aged)
    assert broken_invariants(run) == {(5, where), (7, where)}


def test_a_sequence_of_a_later_version_is_reported(run: ObjectStore) -> None:
    def newer(row: BatchRow) -> BatchRow:
        return replace(
            row, versions=np.where(row.loss_mask, np.int32(2), row.versions).astype(np.int32)
        )

    where = change_first_row(run, 2, newer)
    assert broken_invariants(run) == {(5, where), (7, where)}
    assert (
        "has tokens of version 2, which batch 2 cannot know"
        in next(iter(verified(run).violations)).what
    )


def test_a_row_with_another_staleness_than_its_shard_is_reported(run: ObjectStore) -> None:
    def older(batch: Batch) -> Batch:
        last = batch.rows[-1]
        assert last.min_version == STEPS - 2
        return replace(batch, rows=(*batch.rows[:-1], replace(last, min_version=STEPS - 3)))

    where = change_batch(run, STEPS, older)
    assert broken_invariants(run) == {(7, where)}


def test_a_changed_order_is_reported(run: ObjectStore) -> None:
    key = layout.order(0)
    assert run.get(key).count(b'"samples_per_prompt":4') == 1
    rewrite(run, key, run.get(key).replace(b'"samples_per_prompt":4', b'"samples_per_prompt":2'))
    violations = verified(run).violations
    assert [(violation.invariant, violation.where) for violation in violations] == [(1, key)]
    assert "does not have the checksum it carries" in violations[0].what


def test_a_changed_order_is_reported_before_it_has_a_shard(run: ObjectStore) -> None:
    key = layout.order(one_more_order(run))
    rewrite(run, key, run.get(key).replace(b'"seed":', b'"seed":1'))
    assert broken_invariants(run) == {(1, key)}


def test_a_group_with_too_few_episodes_is_named(run: ObjectStore) -> None:
    order = orders.read(run, 0)
    rewrite(run, layout.order(0), seal(replace(order, samples_per_prompt=5)))
    assert {(violation.where, violation.what) for violation in verified(run).violations} == {
        (layout.shard(0), f"has 4 episodes of {prompt.id}, its order asked for 5")
        for prompt in order.prompts
    }


def test_a_changed_or_missing_config_needs_repair_by_the_user(run: ObjectStore) -> None:
    rewrite(
        run, "run.json", run.get("run.json").replace(b'"max_staleness":2', b'"max_staleness":9')
    )
    with pytest.raises(
        ConfigError,
        match=r"its run\.json cannot be read: .* the checksum .*; put it back from a copy",
    ):
        verified(run)
    run.delete("run.json")
    with pytest.raises(ConfigError, match=r"its run\.json cannot be read"):
        verified(run)


def test_a_token_of_a_version_that_does_not_exist_is_named(run: ObjectStore) -> None:
    shard = shards.read(run, 0)
    false = replace(shard, weights={**shard.weights, "solver": {77: shard.weights["solver"][0]}})
    rewrite(run, layout.shard(0), shards.encode(_with_version(false, 77)))
    found = (4, layout.shard(0), "has tokens of version 77 of solver, which does not exist")
    assert found in all_violations(run)


def _with_version(shard: Shard, version: int) -> Shard:
    """Set the version of all tokens of the solver to `version`."""

    def moved(sequence):  # type: ignore[no-untyped-def]  # as above
        own = sequence.owners == sequence.policies.index("solver")
        return replace(
            sequence, versions=np.where(own, np.int32(version), sequence.versions).astype(np.int32)
        )

    groups = tuple(
        replace(
            group,
            episodes=tuple(
                replace(play, sequences=tuple(map(moved, play.sequences)))
                for play in group.episodes
            ),
        )
        for group in shard.groups
    )
    return replace(shard, groups=groups)


def with_last(values: np.ndarray, value: float) -> np.ndarray:  # type: ignore[type-arg]  # of any dtype
    """The array with another last value."""
    changed = values.copy()
    changed[-1] = value
    return changed


def moved_mask(row: BatchRow) -> BatchRow:
    """Train on the last token of the prompt instead of the last one of the answer, with the same
    values.
    """

    def moved(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]  # as above
        return np.roll(values, -1)

    return replace(
        row,
        loss_mask=moved(row.loss_mask),
        logprobs=moved(row.logprobs),
        versions=moved(row.versions),
        advantages=moved(row.advantages),
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda row: replace(row, prompt_id="another"),
        lambda row: replace(row, tokens=with_last(row.tokens, 9)),
        moved_mask,
        lambda row: replace(row, logprobs=with_last(row.logprobs, -0.75)),
        lambda row: replace(row, versions=with_last(row.versions, STEPS - 2)),
        lambda row: replace(row, reward=-99.0),
        lambda row: replace(row, temperature=3.0),
    ],
    ids=["prompt_id", "tokens", "loss_mask", "logprobs", "versions", "reward", "temperature"],
)
def test_a_row_that_differs_from_its_shard_is_reported(
    run: ObjectStore, change: Callable[[BatchRow], BatchRow]
) -> None:
    where = change_first_row(run, STEPS, change)
    key = batches.read(run, "solver", STEPS).rows[0].key
    assert all_violations(run) == [(7, where, f"{named(key)} is not as its shard holds it")]


def _in_region(region: str) -> Callable[[Batch], Batch]:
    return lambda batch: replace(
        batch, rows=tuple(replace(row, region=region) for row in batch.rows)
    )


def test_a_batch_that_names_another_region_than_its_shards_is_reported(run: ObjectStore) -> None:
    where = change_batch(run, STEPS, _in_region("eu-west"))
    used = sorted({row.key.order for row in batches.read(run, "solver", STEPS).rows})
    assert all_violations(run) == [
        (7, where, f"names the region 'eu-west' for order {order}, and its shard 'us-east'")
        for order in used
    ]


def test_a_batch_that_leaves_out_the_region_of_one_order_is_reported(run: ObjectStore) -> None:
    first = batches.read(run, "solver", STEPS).rows[0].key.order

    def change(batch: Batch) -> Batch:
        rows = [replace(row, region="") if row.key.order == first else row for row in batch.rows]
        return replace(batch, rows=tuple(rows))

    where = change_batch(run, STEPS, change)
    assert all_violations(run) == [
        (7, where, f"names the region '' for order {first}, and its shard 'us-east'")
    ]


def test_a_batch_of_an_earlier_release_names_no_region(run: ObjectStore) -> None:
    change_batch(run, STEPS, _in_region(""))
    assert all_violations(run) == []


def test_the_region_of_an_order_whose_shard_is_in_quarantine_is_not_compared(
    run: ObjectStore,
) -> None:
    where = change_batch(run, STEPS, _in_region("eu-west"))
    for order in {row.key.order for row in batches.read(run, "solver", STEPS).rows}:
        quarantine.quarantine_object(run, layout.shard(order), "damaged")
    assert not [each for each in all_violations(run) if each[1] == where and "region" in each[2]]


def test_a_region_that_cannot_be_a_name_counts_as_unknown(run: ObjectStore) -> None:
    order = batches.read(run, "solver", STEPS).rows[0].key.order
    shard = replace(shards.read(run, order), region="[/]")
    rewrite(run, layout.shard(order), shards.encode(shard))
    named_before = [each for each in all_violations(run) if "region" in each[2]]
    assert {each[2] for each in named_before} == {
        f"names the region 'us-east' for order {order}, and its shard ''"
    }


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_advantage_that_is_not_finite_is_named(run: ObjectStore, value: float) -> None:
    where = change_first_row(
        run, 2, lambda row: replace(row, advantages=with_last(row.advantages, value))
    )
    key = batches.read(run, "solver", 2).rows[0].key
    assert all_violations(run) == [
        (7, where, f"{named(key)} has an advantage that is not a finite number")
    ]


def test_a_batch_of_another_size_is_named(run: ObjectStore) -> None:
    def shorter(batch: Batch) -> Batch:
        return replace(batch, rows=batch.rows[1:], waiting=(*batch.waiting, batch.rows[0].key))

    where = change_batch(run, STEPS, shorter)
    assert all_violations(run) == [
        (1, where, f"has {BATCH_SIZE - 1} rows; every batch of solver has {BATCH_SIZE}")
    ]


def test_missing_objects_of_a_completed_run_are_reported_and_those_of_a_running_one_are_not(
    run: ObjectStore,
) -> None:
    for key in run.list(layout.weights("solver", STEPS)):
        run.delete(key)
    assert all_violations(run) == []
    request_stop(run, Stop("completed", "all steps done", 0.0))
    version = (
        1,
        layout.weights("solver", STEPS),
        f"version {STEPS} is missing, and the run is completed",
    )
    assert all_violations(run) == [version]
    run.delete(layout.batch("solver", STEPS))
    assert all_violations(run) == [
        (1, layout.batch("solver", STEPS), f"batch {STEPS} is missing, and the run is completed"),
        version,
    ]


def test_every_object_is_missing_in_an_empty_completed_run(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "empty", CONFIG)
    request_stop(run, Stop("completed", "all steps done", 0.0))
    assert [violation.where for violation in verified(run).violations] == [
        "batches/solver/00000001.arrow",
        "batches/solver/00000002.arrow",
        "weights/solver/00000000",
        "weights/solver/00000001",
        "weights/solver/00000002",
    ]


@pytest.mark.parametrize("state", ["cancelled", "failed", "exhausted", "suspended"])
def test_a_run_that_ended_early_has_no_missing_objects(
    memory_store: ObjectStore, state: RunEnd
) -> None:
    run = create_run(memory_store, "early", CONFIG)
    request_stop(run, Stop(state, "early", 0.0))
    assert verified(run).ok


def test_an_unreadable_end_of_the_run_is_reported(run: ObjectStore) -> None:
    run.put(layout.STOP, b"{")
    assert broken_invariants(run) == {(1, layout.STOP)}


def test_a_missing_setting_of_a_config_needs_repair_by_the_user(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "bare", {**CONFIG, "policies": {"solver": {}}})
    with pytest.raises(
        ConfigError, match=r"its run\.json has no whole number 'policies\.solver\.batch_size'"
    ):
        verified(run)


def test_keys_without_a_pattern_are_ignored(run: ObjectStore) -> None:
    for key in (
        ".DS_Store",
        "orders/x.json",
        "orders/00000099.txt",
        "shards/foo.arrow",
        "shards/.DS_Store",
        "batches/solver/.DS_Store",
        "batches/solver/00000009x.arrow",
        "weights/solver/old/manifest.json",
        "weights/solver/manifest.json",
    ):
        run.put(key, b"x")
    assert all_violations(run) == []
    run.put("orders/1.json", run.get(layout.order(1)))
    run.delete(layout.order(1))
    assert (1, layout.order(1)) in broken_invariants(run)


def test_a_shard_ingested_twice_is_reported(run: ObjectStore) -> None:
    where = change_batch(run, 2, lambda batch: replace(batch, shards=(*batch.shards, 0)))
    assert all_violations(run) == [(6, where, "takes in shard 0 a second time")]


def test_closed_orders_that_differ_from_the_ingested_ones_are_reported(run: ObjectStore) -> None:
    where = change_batch(run, 2, lambda batch: replace(batch, closed=(*batch.closed, 99)))
    assert broken_invariants(run) == {(6, where)}


def test_an_ingested_order_may_be_listed_instead_of_counted(run: ObjectStore) -> None:
    last = batches.read(run, "solver", 2).closed_below - 1
    change_batch(
        run, 2, lambda batch: replace(batch, closed_below=last, closed=(last, *batch.closed))
    )
    assert all_violations(run) == []


def test_a_waiting_sequence_with_a_final_fate_is_reported(run: ObjectStore) -> None:
    key = batches.read(run, "solver", STEPS).rows[0].key
    where = change_batch(run, STEPS, lambda batch: replace(batch, waiting=(*batch.waiting, key)))
    assert all_violations(run) == [
        (6, where, f"{named(key)} is listed as waiting, but it is settled or was never taken in")
    ]


def test_a_version_without_a_digest_in_its_shard_is_reported(run: ObjectStore) -> None:
    shard = shards.read(run, 0)
    rewrite(
        run, layout.shard(0), shards.encode(replace(shard, weights={**shard.weights, "solver": {}}))
    )
    assert broken_invariants(run) == {(4, layout.shard(0))}
    what = "sequence 0 of episode 1 of prompt 1 has tokens of version 0 of solver, whose weights it does not name"
    assert (4, layout.shard(0), what) in all_violations(run)


def test_a_shard_with_other_prompts_than_its_order_is_reported(run: ObjectStore) -> None:
    order = orders.read(run, 0)
    rewrite(run, layout.order(0), seal(replace(order, prompts=order.prompts[::-1])))
    violations = verified(run).violations
    assert [(violation.invariant, violation.where) for violation in violations] == [
        (1, layout.shard(0))
    ]
    assert violations[0].what.startswith("answers the prompts ")


def test_a_false_batch_in_a_manifest_is_named(run: ObjectStore) -> None:
    key = layout.manifest(layout.weights("solver", 3))
    manifest = json.loads(run.get(key))
    manifest["batch"] = 1
    rewrite(run, key, sealed(manifest))
    assert all_violations(run) == [(3, key, "names batch 1; version 3 is made of batch 3")]


def test_a_missing_sequence_unbalances_the_ledger(run: ObjectStore) -> None:
    step = next(n for n in range(1, STEPS + 1) if batches.read(run, "solver", n).ledger)
    where = change_batch(run, step, lambda batch: replace(batch, ledger=batch.ledger[1:]))
    violations = verified(run).violations
    assert [(violation.invariant, violation.where) for violation in violations] == [(6, where)]
    assert "has vanished" in violations[0].what


def test_a_sequence_with_two_fates_unbalances_the_ledger(run: ObjectStore) -> None:
    def add(batch: Batch) -> Batch:
        return replace(
            batch,
            ledger=(*batch.ledger, LedgerEntry(batch.rows[0].key, "filtered", "zero_advantage")),
        )

    where = change_batch(run, 1, add)
    assert broken_invariants(run) == {(6, where)}


def test_a_fate_of_a_sequence_that_does_not_exist_is_reported(run: ObjectStore) -> None:
    strange = SequenceKey(0, 0, 0, 9)
    where = change_batch(
        run,
        1,
        lambda batch: replace(batch, ledger=(*batch.ledger, LedgerEntry(strange, "expired", ""))),
    )
    assert all_violations(run) == [
        (6, where, f"{named(strange)} is expired, but no shard taken in so far holds it")
    ]


def test_an_invalid_policy_name_is_reported(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "strange", {**CONFIG, "policies": {"a/b": {"batch_size": 4}}})
    told_of = "names the policy 'a/b', of which there can be no batch and no version"
    assert all_violations(run) == [(1, layout.RUN, told_of)]


def test_an_unreadable_shard_is_a_violation_until_it_is_in_quarantine(run: ObjectStore) -> None:
    number = one_more_order(run)
    run.create(layout.shard(number), b"no arrow file")
    assert broken_invariants(run) == {(6, layout.shard(number))}
    quarantine.quarantine_object(run, layout.shard(number), "truncated")
    verdict = verified(run)
    assert verdict.ok
    assert verdict.quarantined == 1


def test_sequences_of_a_shard_that_was_used_before_it_went_into_quarantine_are_accepted(
    run: ObjectStore,
) -> None:
    row = batches.read(run, "solver", 2).rows[0]
    before = verified(run)
    run.put(layout.shard(row.key.order), b"torn")
    quarantine.quarantine_object(run, layout.shard(row.key.order), "torn")
    after = verified(run)
    assert after.ok
    assert after.quarantined == 1
    assert after.policies["solver"].trained == before.policies["solver"].trained
    where = change_batch(run, 3, lambda batch: replace(batch, rows=(row, *batch.rows[1:])))
    assert (
        2,
        where,
        f"{named(row.key)} is trained, but {layout.batch('solver', 2)} had settled it",
    ) in all_violations(run)


def test_a_sequence_of_a_quarantined_shard_that_waits_after_its_fate_is_reported(
    run: ObjectStore,
) -> None:
    key = batches.read(run, "solver", 2).rows[0].key
    run.put(layout.shard(key.order), b"torn")
    quarantine.quarantine_object(run, layout.shard(key.order), "torn")
    where = change_batch(run, STEPS, lambda batch: replace(batch, waiting=(*batch.waiting, key)))
    assert all_violations(run) == [
        (6, where, f"{named(key)} is listed as waiting, but it is settled or was never taken in")
    ]


def test_a_shard_with_the_wrong_number_is_reported(run: ObjectStore) -> None:
    number = one_more_order(run)
    run.create(layout.shard(number), run.get(layout.shard(0)))
    assert (6, layout.shard(number)) in broken_invariants(run)


def test_violations_are_reported_once_and_in_order(run: ObjectStore) -> None:
    run.delete(layout.batch("solver", 2))
    run.delete(layout.order(1))
    violations = verified(run).violations
    assert list(violations) == sorted(set(violations))
    assert isinstance(violations[0], Violation)


def test_damaged_evaluations_and_tags_are_reported_with_the_reason(run: ObjectStore) -> None:
    run.put("evals/solver-00000001_verifier-00000001.arrow", b"torn")
    run.put("tags/best.json", b"{")
    violations = all_violations(run)
    assert [(invariant, where) for invariant, where, _ in violations] == [
        (4, "evals/solver-00000001_verifier-00000001.arrow"),
        (4, "tags/best.json"),
    ]
    assert (
        "cannot be read: evals/solver-00000001_verifier-00000001.arrow: a evaluation file of 4 "
        "bytes" in violations[0][2]
    )
    assert violations[1][2].startswith("cannot be read: tags/best.json is not JSON")


def test_an_evaluation_that_was_damaged_after_it_was_read_is_reported(run: ObjectStore) -> None:
    versions = {"solver": 1, "verifier": 1}
    evaluations.create(run, evaluation(versions))
    assert evaluations.read(run, versions).versions == versions
    assert len(evaluations.read_all(run).readable) == 1
    run.put(layout.evaluation(versions), b"torn")
    (violation,) = verify(run, run_terms(run)).violations
    assert (violation.invariant, violation.where) == (4, layout.evaluation(versions))
    assert violation.what.startswith(
        "cannot be read: evals/solver-00000001_verifier-00000001.arrow"
    )


def test_a_checkpoint_without_its_data_is_reported(run: ObjectStore) -> None:
    for step in (1, 2):
        checkpoints.save(run, "solver", step, tensors(step), CheckpointState({}, 0.0))
    (lost,) = [key for key in run.list(layout.checkpoint("solver", 2)) if "model-00000" in key]
    run.delete(lost)
    assert verify(run, run_terms(run)).violations == (
        Violation(
            Invariant.LINEAGE,
            layout.manifest(layout.checkpoint("solver", 2)),
            f"{run.url}/{lost} is missing, though its manifest lists it",
        ),
    )


def test_an_evaluation_or_a_tag_of_a_missing_version_is_reported(run: ObjectStore) -> None:
    evaluations.create(run, evaluation({"solver": 1, "verifier": 99}))
    run.create("tags/best.json", seal(tags.Tag(name="best", policy="nobody", version=1, at_s=5.0)))
    assert all_violations(run) == [
        (
            4,
            "evals/solver-00000001_verifier-00000099.arrow",
            "names version 99 of verifier, which does not exist",
        ),
        (4, "tags/best.json", "names version 1 of nobody, which does not exist"),
    ]


def with_sample(run: ObjectStore, version: int) -> str:
    """Add an evaluation that keeps an episode; return the key of its sample."""
    versions = {"solver": version, "verifier": version}
    kept = (builders.group(builders.episode(builders.sequence(version=version))),)
    evaluation_samples.create(run, EvaluationSample(versions=versions, groups=kept))
    evaluations.create(run, replace(evaluation(versions), num_kept=1))
    return layout.evaluation_sample(versions)


def test_a_missing_sample_of_an_evaluation_is_reported(run: ObjectStore) -> None:
    key = with_sample(run, 1)
    run.delete(key)
    evaluations.create(run, evaluation({"solver": 2, "verifier": 2}))  # keeps no episode
    assert all_violations(run) == [
        (
            4,
            key,
            "is missing; evals/solver-00000001_verifier-00000001.arrow says that it has 1 episodes",
        )
    ]


def test_a_damaged_sample_is_reported_and_the_others_are_read(run: ObjectStore) -> None:
    key = with_sample(run, 1)
    with_sample(run, 77)
    run.put(key, b"torn")
    violations = all_violations(run)
    assert [(number, where) for number, where, _ in violations] == [
        (4, key),
        *((4, f"eval_samples/solver-{77:08d}_verifier-{77:08d}.arrow"),) * 2,
        *((4, f"evals/solver-{77:08d}_verifier-{77:08d}.arrow"),) * 2,
    ]
    assert violations[0][2].startswith(f"cannot be read: {key}: a evaluation_sample file of 4")
    assert violations[1][2] == "names version 77 of solver, which does not exist"


def test_a_sample_whose_evaluation_was_interrupted_is_no_violation(run: ObjectStore) -> None:
    key = with_sample(run, 1)
    run.delete(layout.evaluation({"solver": 1, "verifier": 1}))
    assert run.exists(key)
    assert all_violations(run) == []


def test_valid_evaluations_and_tags_have_no_violations(run: ObjectStore) -> None:
    with_sample(run, 1)
    tags.create(run, "best", "solver", 1)
    assert all_violations(run) == []


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({**CONFIG, "steps": True}, "whole number 'steps'"),
        ({**CONFIG, "steps": 1e30}, "whole number 'steps'"),
        ({**CONFIG, "steps": 2**100}, "whole number 'steps'"),
        ({**CONFIG, "steps": "many"}, "whole number 'steps'"),
        ({**CONFIG, "data": None}, "section 'data'"),
        ({**CONFIG, "data": {"max_staleness": -1}}, "whole number 'data.max_staleness'"),
        ({**CONFIG, "policies": []}, "section 'policies'"),
        ({**CONFIG, "policies": {"solver": 3}}, "section 'policies.solver'"),
    ],
)
def test_a_config_with_wrong_types_gives_an_error_of_one_sentence(
    memory_store: ObjectStore, config: dict[str, Any], missing: str
) -> None:
    run = create_run(memory_store, "strange", config)
    with pytest.raises(ConfigError, match=re.escape(f"run.json has no {missing}")):
        verified(run)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_damaged_or_lost_order_is_a_violation_until_it_is_in_quarantine(
    run: ObjectStore, is_lost: bool
) -> None:
    number = one_more_order(run)
    one_more_order(run)
    run.delete(layout.order(number))
    if not is_lost:
        run.create(layout.order(number), b"torn")
    assert broken_invariants(run) == {(1, layout.order(number))}
    quarantine.quarantine_object(run, layout.order(number), "torn")
    verdict = verified(run)
    assert verdict.ok
    assert verdict.quarantined == 1


def test_the_shard_of_a_quarantined_order_has_no_part_in_the_ledger(run: ObjectStore) -> None:
    number = one_more_order(run)
    quarantine.quarantine_object(run, layout.order(number), "torn")
    before = verified(run)
    run.create(layout.shard(number), b"no arrow file")
    after = verified(run)
    assert after.ok
    assert after.policies == before.policies


@pytest.mark.parametrize("make", ["file", "link"])
@pytest.mark.parametrize(
    ("folder", "where"),
    [
        (layout.ORDERS, layout.ORDERS),
        (layout.SHARDS, layout.SHARDS),
        (layout.LEASES, layout.LEASES),
        (layout.BATCHES, "batches/solver"),
        (layout.WEIGHTS, "weights/solver"),
        ("checkpoints/solver", "checkpoints/solver"),
        ("rounds/solver", "rounds/solver"),
        (layout.QUARANTINE, layout.QUARANTINE),
        (layout.EVALS, layout.EVALS),
    ],
)
def test_a_folder_that_cannot_be_listed_is_a_violation_and_hides_no_other(
    local_store: ObjectStore, tmp_path: Path, folder: str, where: str, make: str
) -> None:
    run = finished_run(local_store)
    run.put(layout.USAGE, b"{}")
    (place,) = (path.parent / folder for path in tmp_path.rglob("run.json"))
    if place.exists():
        place.rename(tmp_path / "moved")
    place.parent.mkdir(exist_ok=True)
    if make == "link":
        place.symlink_to(tmp_path / "moved")
    else:
        place.write_bytes(b"x")
    found = broken_invariants(run)
    assert (Invariant.READABLE, layout.USAGE) in found
    assert where in {key for _, key in found}


def test_a_violation_of_a_very_long_stored_text_is_cut(run: ObjectStore) -> None:
    body = resealed(
        run.get(layout.order(0)), lambda order: order["prompts"][0].update(id="x" * 100_000)
    )
    run.put(layout.order(0), body)
    (violation,) = verified(run).violations
    assert violation.where == layout.shard(0)
    assert len(violation.what) == TEXT_MAX


class OnceHashed(str):
    """A text that is never copied."""

    __slots__ = ()

    def encode(self, *_: str) -> bytes:
        raise AssertionError("the text is encoded again for each row that has it")


def test_an_id_that_many_rows_share_is_hashed_once() -> None:
    rows = [replace(builders.row(), prompt_id=id_) for id_ in (OnceHashed("a"), "a", "b")]
    first, same, other = map(row_digest, rows)
    assert first == same != other


def test_versions_without_a_digest_are_one_violation_of_each_sequence(run: ObjectStore) -> None:
    answer = [40] * 2000
    sequence = builders.sequence(answer=answer)
    sequence.versions[sequence.loss_mask] = np.arange(1000, 3000)
    group = builders.group(builders.episode(*[sequence] * 1500))
    rewrite(run, layout.shard(0), shards.encode(builders.shard(group)))
    found = [
        violation.what
        for violation in verified(run).violations
        if (violation.invariant, violation.where) == (4, layout.shard(0))
    ]
    assert len(found) == VIOLATIONS_MAX + 1
    what = "tokens of version 1000 and 1999 more of solver, whose weights it does not name"
    assert all(text.endswith(what) for text in found[:-1])
    assert found[-1] == MORE


def test_violations_of_one_object_do_not_hide_those_of_another() -> None:
    findings = Findings()
    for number in range(VIOLATIONS_MAX + 5):
        findings.add(Invariant.LEDGER, "a", str(number))
    findings.add(Invariant.LEDGER, "b", "wrong")
    findings.add(Invariant.LEDGER, "b", "wrong")
    listed = findings.violations()
    assert [each.what for each in listed[-2:]] == [MORE, "wrong"]
    assert len(listed) == VIOLATIONS_MAX + 2


def test_a_violation_that_is_listed_already_is_not_one_more() -> None:
    findings = Findings()
    for number in range(VIOLATIONS_MAX):
        findings.add(Invariant.LEDGER, "a", str(number))
    findings.add(Invariant.LEDGER, "a", "7")
    assert len(findings.violations()) == VIOLATIONS_MAX


def test_ingested_orders_are_not_compared_one_by_one_with_every_batch(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compared(int):
        count = 0

        def __ge__(self, other: int) -> bool:
            Compared.count += 1
            return int(self) >= other

    read = batches.read

    def many_shards(run: ObjectStore, policy: str, step: int) -> Batch:
        batch = read(run, policy, step)
        more = tuple(map(Compared, range(1_000, 2_000))) if step == 1 else ()
        return replace(batch, shards=batch.shards + more)

    monkeypatch.setattr(batches, "read", many_shards)
    found = [each for each in verified(run).violations if "1999, which does not" in each.what]
    assert len(found) == 2  # one for each policy
    assert not Compared.count
