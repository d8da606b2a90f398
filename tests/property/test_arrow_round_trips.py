"""Valid shards and batches survive a round trip bit for bit; a truncated file is corrupt."""

import pytest
from hypothesis import given, settings

from storage.errors import CorruptError
from storage.records.batches import Batch
from storage.records.rollouts import Shard
from storage.run import batches, shards
from tests.property import strategies
from tests.property.same_bits import same_bits
from tests.support.runs import builders

EXAMPLES = 60


@settings(max_examples=EXAMPLES)
@given(strategies.shards)
def test_a_shard_survives_a_round_trip_bit_for_bit(shard: Shard) -> None:
    assert same_bits(shards.decode(shards.encode(shard)), shard)


@settings(max_examples=EXAMPLES)
@given(strategies.batches)
def test_a_batch_survives_a_round_trip_bit_for_bit(batch: Batch) -> None:
    assert same_bits(batches.decode(batches.encode(batch)), batch)


def test_a_shard_cut_anywhere_is_corrupt() -> None:
    body = shards.encode(builders.shard())
    for length in range(len(body)):
        with pytest.raises(CorruptError):
            shards.decode(body[:length])


def test_a_batch_cut_anywhere_is_corrupt() -> None:
    body = batches.encode(builders.batch())
    for length in range(len(body)):
        with pytest.raises(CorruptError):
            batches.decode(body[:length])


def test_a_shard_with_overwritten_bytes_anywhere_is_corrupt() -> None:
    body = shards.encode(builders.shard())
    for start in range(0, len(body), 7):
        with pytest.raises(CorruptError):
            shards.decode(body[:start] + b"\xaa" * 7 + body[start + 7 :])
