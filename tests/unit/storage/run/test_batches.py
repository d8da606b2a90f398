import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from storage.errors import ConflictError, CorruptError, NotFoundError
from storage.formats import arrow_files
from storage.records.batches import Batch, LedgerEntry, SequenceKey
from storage.run import batches
from storage.run.batches import REASON_MAX
from storage.store.object_store import ObjectStore
from tests.support.runs import builders
from tests.support.stores.damaging_store import damages_first_reads
from tests.support.stores.resealed import arrow_file


def key(order: int, sequence: int = 0) -> SequenceKey:
    return SequenceKey(order, 1, 2, sequence)


def round_trip(batch: Batch) -> Batch:
    return batches.decode(batches.encode(batch))


def with_row(**changes: object) -> Batch:
    """A batch whose row 1 is a default one with `changes`."""
    return builders.batch(builders.row(), replace(builders.row(key(1)), **changes))  # type: ignore[arg-type]  # chosen below


def test_a_batch_is_read_back_with_every_value() -> None:
    batch = builders.batch(
        builders.row(key(5), version=3, advantage=-1.5, logprob=-0.25, reward=0.5),
        builders.row(key(2, 1), prompt=(), answer=(7,), replay=True),
        policy="verifier",
        step=9,
        ledger=(
            LedgerEntry(key(4), "filtered", "zero_advantage"),
            LedgerEntry(key(3), "expired", "max_staleness"),
        ),
        waiting=(key(9), key(6), key(2**33)),
        shards=(5, 4, 7),
        closed_below=6,
        closed=(7, 9),
        metrics={"dataflow/staleness/max": 2.0, "dataflow/odd": float("nan")},
    )
    loaded = round_trip(batch)
    assert (loaded.policy, loaded.step, loaded.created_s) == ("verifier", 9, 1700000000.0)
    assert (loaded.shards, loaded.closed_below, loaded.closed) == ((5, 4, 7), 6, (7, 9))
    assert loaded.ledger == batch.ledger
    assert loaded.waiting == batch.waiting
    assert loaded.metrics["dataflow/staleness/max"] == 2.0
    assert np.isnan(loaded.metrics["dataflow/odd"])
    first, second = loaded.rows
    assert (first.key, first.prompt_id) == (SequenceKey(5, 1, 2, 0), "chained_addition/train/17")
    assert first.tokens.tolist() == [11, 12, 40, 41, 2]
    assert first.loss_mask.tolist() == [False, False, True, True, True]
    assert first.logprobs.tolist() == [0.0, 0.0, -0.25, -0.25, -0.25]
    assert first.versions.tolist() == [-1, -1, 3, 3, 3]
    assert first.advantages.tolist() == [0.0, 0.0, -1.5, -1.5, -1.5]
    assert (first.reward, first.temperature, first.min_version, first.replay) == (
        0.5,
        1.0,
        3,
        False,
    )
    assert (second.key, second.tokens.tolist(), second.replay) == (
        SequenceKey(2, 1, 2, 1),
        [7],
        True,
    )


def of_one_tuple_hash(number: int) -> list[SequenceKey]:
    """Keys (order, group, 0, 0) whose tuples share one hash in CPython, computed backwards.

    For each item: state = rotated left by 31 bits (state + item · P2) · P1, modulo 2^64.
    """
    p1, p2, p5, modulus = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64
    inverse_1, inverse_2 = pow(p1, -1, modulus), pow(p2, -1, modulus)

    def rotated_right(state: int) -> int:
        return (state >> 31 | state << 33) % modulus

    after_group = rotated_right(1 * inverse_1 % modulus)
    keys: list[SequenceKey] = []
    group = 0
    while len(keys) < number:
        after_order = rotated_right((after_group - group * p2) * inverse_1 % modulus)
        order = (after_order - p5) * inverse_2 % modulus
        if order < 2**61 - 1:  # the hash of such an integer is itself
            keys.append(SequenceKey(order, group, 0, 0))
        group += 1
    return keys


def test_keys_whose_tuples_share_one_hash_have_different_ones() -> None:
    """A set of thousands of equal hashes takes the square of their number."""
    keys = of_one_tuple_hash(100)
    assert len({hash(tuple(each)) for each in keys}) == 1
    ledger = tuple(builders.entry(each) for each in keys)
    loaded = round_trip(builders.batch(ledger=ledger, waiting=tuple(keys)))
    assert loaded.ledger == ledger
    assert len({hash(each) for each in loaded.waiting}) == 100


def test_a_batch_with_a_ledger_and_no_rows_is_read_back() -> None:
    books = replace(builders.batch(waiting=(key(1),), ledger=(builders.entry(key(0)),)), rows=())
    loaded = round_trip(books)
    assert (loaded.rows, loaded.ledger, loaded.waiting) == ((), books.ledger, books.waiting)


def test_a_very_long_reason_is_cut_when_a_batch_is_read() -> None:
    entries = (builders.entry(key(0), reason="x" * 100_000), builders.entry(key(1)))
    loaded = round_trip(replace(builders.batch(), ledger=entries))
    assert [entry.reason for entry in loaded.ledger] == ["x" * REASON_MAX, "zero_advantage"]


def test_an_empty_batch_is_read_back() -> None:
    loaded = round_trip(replace(builders.batch(), rows=(), shards=()))
    assert (loaded.rows, loaded.ledger, loaded.waiting, loaded.shards) == ((), (), (), ())


def test_one_arrow_table_has_the_rows_and_the_ledger() -> None:
    import pyarrow as pa

    body = batches.encode(builders.batch(ledger=(builders.entry(key(4)),), waiting=(key(6),)))
    table = pa.ipc.open_file(body).read_all()
    assert table.column("fate").to_pylist() == ["trained", "filtered", "waiting"]
    assert table.column("reason").to_pylist() == ["", "zero_advantage", ""]
    assert table.column("order").to_pylist() == [0, 4, 6]
    assert table.column("tokens").to_pylist() == [[11, 12, 40, 41, 2], [], []]


def array(values: list[float], kind: type) -> NDArray[Any]:
    return np.array(values, dtype=kind)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"advantages": array([0] * 4, np.float32)},
            "row 1: advantages and tokens differ in length",
        ),
        (
            {"versions": array([-1, -1, 0, 0, -1], np.int32)},
            "row 1, token 4: versions are negative",
        ),
        (
            {"versions": array([3, -1, 0, 0, 0], np.int32)},
            "row 1, token 0: versions name one on a token that is not",
        ),
        ({"logprobs": array([0, 1, 0, 0, 0], np.float32)}, "row 1, token 1: logprobs are not 0"),
        (
            {"advantages": array([0, np.nan, 0, 0, 0], np.float32)},
            "row 1, token 1: advantages are not 0",
        ),
        ({"key": SequenceKey(-1, 0, 0, 0)}, "row 1: order is negative"),
        ({"tokens": array([-1, 12, 40, 41, 2], np.int32)}, "row 1, token 0: tokens are negative"),
        ({"min_version": 1}, "row 1, token 2: versions are older than the row's min_version"),
        ({"min_version": -1}, "row 1: min_version is negative"),
        ({"temperature": float("nan")}, "row 1: the temperature is nan"),
        ({"temperature": float("inf")}, "row 1: the temperature is inf"),
        ({"temperature": -0.5}, "row 1: the temperature is -0.5; it is 0, or from 1e-12 to"),
    ],
)
def test_a_row_that_violates_its_schema_is_corrupt(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(CorruptError, match=sentence):
        round_trip(with_row(**changes))


def test_the_smallest_allowed_values_are_read_back() -> None:
    lowest = with_row(tokens=array([0] * 5, np.int32), key=SequenceKey(0, 0, 0, 0), min_version=0)
    loaded = round_trip(lowest).rows[1]
    assert (loaded.tokens.tolist(), loaded.key, loaded.min_version) == (
        [0] * 5,
        SequenceKey(0, 0, 0, 0),
        0,
    )


def test_a_row_may_have_a_min_version_below_its_trained_tokens() -> None:
    """A masked token of the policy was sampled by version 2, the trained ones by version 5."""
    versions = array([-1, -1, 5, 5, 5], np.int32)
    assert round_trip(with_row(versions=versions, min_version=2)).rows[1].min_version == 2


def test_a_batch_that_arrives_damaged_once_is_read_again(memory_store: ObjectStore) -> None:
    batches.create(memory_store, builders.batch())
    assert batches.read(damages_first_reads(memory_store), "solver", 1).step == 1


def test_the_region_of_each_order_is_read_back() -> None:
    rows = [
        replace(builders.row(key(order, number)), region=region)
        for number, (order, region) in enumerate([(7, "eu"), (2, ""), (5, "us-east"), (3, "eu")])
    ]
    body = batches.encode(builders.batch(*rows, builders.row(key(7, 9))))
    assert b'"regions":{"eu":[3,7],"us-east":[5]}' in body
    regions = [row.region for row in batches.decode(body).rows]
    assert regions == ["eu", "", "us-east", "eu", "eu"]  # a shard, so an order, has one region


def test_the_first_region_of_an_order_is_stored() -> None:
    rows = [replace(builders.row(key(7)), region=region) for region in ("us-east", "eu")]
    assert [row.region for row in round_trip(builders.batch(*rows)).rows] == ["us-east", "us-east"]


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ({"../eu": (0,)}, "a batch has the region '../eu', which is not a valid name"),
        ({"eu": (0,), "us": (1, 0)}, "a batch has order 0 in two regions"),
    ],
)
def test_invalid_regions_are_corrupt(
    regions: dict[str, tuple[int, ...]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_regions", lambda rows: regions)
    body = batches.encode(builders.batch())
    with pytest.raises(CorruptError, match=message):
        batches.decode(body)


def test_unknown_and_misplaced_fates_are_corrupt() -> None:
    with pytest.raises(CorruptError, match=r"a batch has the unknown fate 'lost'"):
        round_trip(builders.batch(ledger=(LedgerEntry(key(1), "lost", ""),)))  # type: ignore[arg-type]  # the fault under test
    with pytest.raises(CorruptError, match="not in the order trained, ledger, waiting"):
        round_trip(
            builders.batch(
                ledger=(LedgerEntry(key(1), "waiting", ""), LedgerEntry(key(2), "expired", ""))
            )
        )


def test_a_trained_fate_in_the_ledger_is_corrupt_at_any_position() -> None:
    with pytest.raises(CorruptError, match="row 1: is trained on, yet has no tokens"):
        round_trip(builders.batch(ledger=(LedgerEntry(key(2), "trained", ""),)))
    with pytest.raises(CorruptError, match="not in the order trained, ledger, waiting"):
        round_trip(
            builders.batch(ledger=(builders.entry(key(1)), LedgerEntry(key(2), "trained", "")))
        )


def test_the_second_dataflow_loses(memory_store: ObjectStore) -> None:
    batches.create(memory_store, builders.batch())
    with pytest.raises(ConflictError):
        batches.create(memory_store, builders.batch())


def test_the_next_step_follows_the_last_batch(memory_store: ObjectStore) -> None:
    assert batches.next_step(memory_store, "solver") == 1
    for step in (1, 2, 3):
        batches.create(memory_store, builders.batch(step=step))
    assert batches.next_step(memory_store, "solver") == 4
    assert batches.next_step(memory_store, "solver", start=3) == 4
    assert batches.next_step(memory_store, "verifier") == 1
    assert batches.exists(memory_store, "solver", 3)
    assert not batches.exists(memory_store, "solver", 4)


def test_unreadable_and_misplaced_batches_are_named(memory_store: ObjectStore) -> None:
    with pytest.raises(NotFoundError):
        batches.read(memory_store, "solver", 1)
    memory_store.put("batches/solver/00000001.arrow", batches.encode(builders.batch(step=2)))
    with pytest.raises(
        CorruptError, match=r"batches/solver/00000001\.arrow holds batch 2 of 'solver'"
    ):
        batches.read(memory_store, "solver", 1)
    memory_store.put("batches/solver/00000001.arrow", b"")
    with pytest.raises(
        CorruptError, match=r"batches/solver/00000001\.arrow: a batch file of 0 bytes"
    ):
        batches.read(memory_store, "solver", 1)


@pytest.mark.parametrize(
    ("prompts", "samples", "orders"), [(8, 8, 300), (8, 16, 200), (64, 16, 40)]
)
def test_a_long_ledger_of_equal_fates_is_read_back(prompts: int, samples: int, orders: int) -> None:
    ledger = tuple(
        LedgerEntry(SequenceKey(order, group, sample, 0), "filtered", "zero_advantage")
        for order in range(1, orders)
        for group in range(prompts)
        for sample in range(samples)
    )
    batch = builders.batch(builders.row(key(0)), ledger=ledger, shards=tuple(range(orders)))
    body = batches.encode(batch)
    assert len(ledger) > max(2**14, len(body)), "it is longer than a limit of one row per byte"
    assert batches.decode(body).ledger == ledger


@pytest.mark.parametrize(("num_rows", "is_read"), [(2**14, True), (2**14 + 1, False)])
def test_very_many_rows_to_train_on_in_few_bytes_are_not_read(num_rows: int, is_read: bool) -> None:
    """Each of them is a kilobyte of Python objects. zstd compresses their offsets, lz4 does not."""
    rows = [builders.row(prompt=(), answer=(7,))] * num_rows
    table, header = arrow_files.decode(
        batches.encode(builders.batch(*rows)), batches.SCHEMA, "batch"
    )
    parts, zstd = [table.replace_schema_metadata(None)], pa.Codec("zstd", compression_level=19)
    body = arrow_file(batches.SCHEMA, parts, "batch", json.loads(header), zstd)
    assert len(body) < 8 * 2**14
    if is_read:
        assert len(batches.decode(body).rows) == num_rows
        return
    with pytest.raises(CorruptError, match=r"of \d+ bytes has 16385 sequences; that is too many"):
        batches.decode(body)


def test_a_batch_before_an_existing_one_is_lost_and_the_next_one_is_not(
    memory_store: ObjectStore,
) -> None:
    for step in (1, 2, 4):
        batches.create(memory_store, builders.batch(step=step))
    assert batches.steps(memory_store, "solver") == [1, 2, 4]
    assert [step for step in range(1, 7) if batches.is_lost(memory_store, "solver", step)] == [3]
