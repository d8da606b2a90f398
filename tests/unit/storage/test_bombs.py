"""Objects of `tests/support/stores/bombs.py` are rejected as corrupt, with the reason, before
memory is allocated.
"""

import json
import os
import re
import subprocess
import sys
from uuid import uuid4

import pytest

from data_ops.config import DataConfig, PolicyData
from data_ops.dataflow.service import Dataflow
from storage import layout
from storage.records.types import Json
from storage.run import batches, quarantine, runs, shards
from storage.store.object_store import ObjectStore, open_store
from storage.verify.verify import verify
from storage.weights import publisher
from tasks.recipes.run_terms import run_terms
from tests.support.checkout import ROOT
from tests.support.runs import builders
from tests.support.runs.true_run import finished_run
from tests.support.stores.resealed import rewritten

TOLD = {
    "a shard of 2e7 sequences": "a shard has 2 rows; its header lists 20000001 sequences",
    "a shard of 2^63 - 1 sequences": "a shard has 2 rows; its header lists 9223372036854775808 sequences",
    "a shard of -1 sequences": r"num_sequences: Input should be greater than or equal to 0",
    "a shard of 10^400 sequences": "a shard's header has an integer of 1329 bits; at most 128 are read",
    "columns of zeros under zstd": r"an Arrow file of \d{4} bytes claims to hold 134217728 bytes of columns; that is too many",
    "rows of zeros under zstd": r"an Arrow file of \d{4} bytes claims to hold 1048576 rows; that is too many",
    "too many record batches": "5000 record batches; one is read",
    "a change of 2^29 elements": "536870912 changes of 1000 elements",
    "a change of 2^32 elements": "4294967295 changes of 1000 elements",
    "a stream that is longer than its block": "a block of a delta cannot be applied: .*too small",
    "planes that are longer than their block": "a block of a delta cannot be applied: .*too small",
    "two thousand changes of one tensor": "00000001 has 2097152000 bytes of tensors that go back to 1048576 stored ones: more than 4 times",
    "five deltas of four changes of each tensor": "00000002 has 16777216 bytes of tensors that go back to 1048576 stored ones",
    "the same, one by one": "00000002 has 16777216 bytes of tensors that go back to 1048576 stored ones",
    "one tensor of an anchor under two thousand names": "00000000 has 2097152000 bytes of tensors that go back to 1048576 stored ones",
    f"a file of {2**60} bytes": rf"00000001/.*delta-00000.safetensors is not what its manifest lists: \d+ of {2**60} bytes",
    f"a file of {2**63 - 1} bytes": rf"00000001/.*is not what its manifest lists: \d+ of {2**63 - 1} bytes",
    "a manifest with a shape of a hundred thousand dimensions of 2^62": "shape: Tuple should have at most 64 items",
    "a manifest with a shape of sixty dimensions of 2^40": "lists tensors whose digests do not give its own digest",
    "a manifest with a shape of a boolean": "tensors.w.shape.0: Input should be a valid integer",
    "a manifest with a shape of a negative size": "tensors.w.shape.0: Input should be greater than or equal to 0",
    "a manifest with a shape of four thousand digits": "00000001/manifest.json has an integer of 13285 bits",
    "a manifest with a tensor of 2^2400 bytes": "lists the tensor 'w' with more than 2.63 bytes",
    "65 dimensions": r"the tensor x \(U8 \[1, 1, .*\) does not fit the bytes 0..1 of 1",
    "a hundred thousand dimensions": r"the tensor x \(U8 \[4611686018427387904, .*…\) does not fit the bytes 0..1 of 1",
    "a size of 2^70": "a safetensors header is not JSON as it should be: a number has 22 digits",
    "an empty tensor of 2^70": "a number has 22 digits",
    "an empty tensor of 2^62 x 2^62": "does not fit the bytes 0..0 of 0",
    "booleans as offsets": "the safetensors entry of x cannot be read: .*False, True",
    "a boolean as size": "the safetensors entry of x cannot be read: .*True",
    "nesting": "maximum recursion depth exceeded while decoding a JSON array",
    "nested objects": "maximum recursion depth exceeded while decoding a JSON object",
    "nesting that is nearly read": "the safetensors entry of x cannot be read",
    "a size of four thousand digits": "a number has 4000 digits",
    "an offset of five thousand digits": "a number has 5000 digits",
    "a name that is there twice": "'x' is there twice",
    "overlapping tensors": "tensors do not cover its 3 bytes exactly once",
    "a gap": "tensors do not cover its 3 bytes exactly once",
    "the same bytes many times": "tensors do not cover its 9 bytes exactly once",
    "a number that is none": "the safetensors entry of x cannot be read: .*nan",
    "half a character": "surrogates not allowed",
    "JSON with nested lists": "orders/00000000.json is not JSON: recursion limit exceeded",
    "JSON with nested objects": "orders/00000000.json is not JSON: recursion limit exceeded",
    "JSON with an integer of four thousand digits": "has an integer of 13288 bits; at most 128 are read",
    "JSON with an integer of five thousand digits": "orders/00000000.json is not JSON: number out of range",
    "JSON with an integer of 2^128": "has an integer of 129 bits; at most 128 are read",
    "JSON with three million lists": "has 6000015 JSON values in 9000190 bytes; at most 2097152 are read",
    "JSON with a million wrong objects": "orders/00000000.json is not a Order: prompts.0.id: Field required",
    "JSON with a count of 2^63": "seed: Input should be less than or equal to 9223372036854775807",
    "JSON with a negative count": "samples_per_prompt: Input should be greater than or equal to 0",
    "a checksum that is a number": r"orders/end.json has the checksum 1{32}, which is not 32 hex digits",
    "a heartbeat of a long number": "heartbeats/x has an integer of 13288 bits",
    "an order of 10^9 episodes": "orders/00000000.json has 1000000000 episodes; at most 65536 are allowed",
    "a checkpoint with nesting": "checkpoints/p/00000003/manifest.json is not JSON: recursion limit exceeded",
    "verify of a batch that closes 10^9 orders": "counts 1000000000 shards as taken in; the batches up to it name 0",
    "the dataflow after a batch that closes 10^9 orders": "00000001.arrow is .*ingested order 999999999, which does not exist",
}


@pytest.fixture(scope="module")
def read() -> dict[str, list[str]]:
    """Name of each bomb → the error of reading it under a memory limit, and its message."""
    command = [sys.executable, "-m", "tests.support.stores.bombs"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    output: dict[str, list[str]] = json.loads(done.stdout)
    return output


@pytest.mark.parametrize("name", TOLD)
def test_a_small_object_that_requires_much_memory_is_corrupt(
    name: str, read: dict[str, list[str]]
) -> None:
    kind, message = read[name]
    assert (kind, re.search(TOLD[name], message) is not None) == ("CorruptError", True), message


def test_each_bomb_has_an_expected_error(read: dict[str, list[str]]) -> None:
    assert read.keys() == TOLD.keys()


def test_a_bomb_is_quarantined_while_training_continues_on_other_shards(
    memory_store: ObjectStore,
) -> None:
    """In the dataflow, and in `verify` of its results."""
    source = finished_run(open_store(f"memory://{uuid4().hex}"))
    config = runs.read_run_config(source)
    run = runs.create_run(memory_store, "r", config)
    data = DataConfig.model_validate(config["data"])
    publisher.publish(run, "solver", 0, builders.tensors(0), extra_files={"config.json": b"{}"})
    publisher.publish(run, "verifier", 0, builders.tensors(0), extra_files={"config.json": b"{}"})
    policies = dict.fromkeys(("solver", "verifier"), PolicyData(batch_size=6, steps=4))
    dataflow = Dataflow(run, data, policies, seed=0, max_tokens=512)
    dataflow.round()
    good = source.get(layout.shard(1))

    def change(header: Json) -> None:
        header["groups"][0]["episodes"][0]["num_sequences"] = 2 * 10**7

    run.create(
        layout.shard(0), rewritten(source.get(layout.shard(0)), shards.SCHEMA, shards.KIND, change)
    )
    run.create(layout.shard(1), good)
    for _ in range(3):
        dataflow.round()
    assert list(quarantine.read_quarantine(run)) == [layout.shard(0)]
    assert "its header lists 200000" in quarantine.read_quarantine(run)[layout.shard(0)]
    assert batches.read(run, "solver", 1).shards == (0, 1)
    assert {row.key.order for row in batches.read(run, "solver", 1).rows} == {1}
    verdict = verify(run, run_terms(run))
    assert (verdict.quarantined, verdict.sequences) == (1, 16)
    assert not [violation for violation in verdict.violations if violation.where == layout.shard(0)]
