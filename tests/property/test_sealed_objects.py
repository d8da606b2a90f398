"""Objects with correct digests and any content: readers return them or raise one of the project's
errors; `verify` and readers of many objects still read the other objects.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import layout
from storage.coordination import heartbeats, leases
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import AstraFlowError, ConfigError
from storage.formats.safetensors import file_digest
from storage.records.control import Stop
from storage.records.progress import TrainerProgress
from storage.records.weights import HostTensor
from storage.run import (
    base_models,
    batches,
    checkpoints,
    evaluation_samples,
    evaluations,
    orders,
    quarantine,
    runs,
    shards,
)
from storage.run.checkpoints import CheckpointState
from storage.run.evaluation_samples import EvaluationSample
from storage.run.evaluations import Evaluation
from storage.store.object_store import ObjectStore, open_store
from storage.verify.verify import verify
from storage.verify.violations import Findings
from storage.verify.weights import WeightsAudit
from storage.weights import compaction, manifests, publisher, reader, tags, update_path
from storage.weights.manifests import LoadedWeights
from tasks.recipes.run_terms import run_terms
from tests.support.runs import builders
from tests.support.runs.true_run import finished_run
from tests.support.stores.resealed import ZEROS, arrow_file, replace_file, resealed_text

HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 127, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 10**400, 1.5, 1e308, "", "NaN",
    "x" * 300, "../x", "\0", "\ud800", "BF16", "0" * 32, [], {}, [[]], [0], [-1], [2**40] * 70, {"": 0},
    json.loads("[" * 150 + "]" * 150),
)  # fmt: skip
SCHEMAS = {
    "shards": (shards.SCHEMA, shards.KIND),
    "batches": (batches.SCHEMA, batches.KIND),
    "evals": (evaluations.SCHEMA, evaluations.KIND),
    "eval_samples": (shards.SCHEMA, evaluation_samples.KIND),
}


def whole_run(store: ObjectStore) -> ObjectStore:
    """A run with an object of every kind."""
    run = finished_run(store)
    runs.request_stop(run, Stop("completed", "every policy reached version 4", 0.0))
    leases.take(run, 0, "rollout-us-east-0", "us-east", leases.LeaseWatch(1.0))
    with HeartbeatWriter(run, "trainer", "trainer-solver", 0, 60.0) as heartbeat_writer:
        heartbeat_writer.update(progress=TrainerProgress(step=3), versions={"solver": 2})
    tags.create(run, "best", "solver", 2)
    checkpoints.save(run, "solver", 4, builders.tensors(4), CheckpointState({"format": 1}, 120.0))
    scores = np.array([1, 0], dtype=np.float32)
    kept = (builders.group(builders.episode(builders.sequence(version=4))),)
    evaluation_samples.create(
        run, EvaluationSample(versions={"solver": 4, "verifier": 4}, groups=kept)
    )
    evaluations.create(
        run,
        Evaluation(
            versions={"solver": 4, "verifier": 4},
            dataset="held_out",
            workflow="single_turn",
            rows=("a", "b"),
            first_attempt=scores,
            final=scores,
            num_kept=1,
        ),
    )
    quarantine.quarantine_object(run, layout.order(10**6), "not there")
    base_models.save_model(
        store, "8c1f", builders.tensors(0), {"config.json": b"{}"}, {"accuracy": 0.5}
    )
    loaded: LoadedWeights | None = None
    for version in range(9):  # one more policy, whose versions are deltas
        bits = np.arange(500, dtype=np.uint16)
        bits[: 7 * version] += 1
        tensors = {
            "w": HostTensor("BF16", (500,), bits),
            "b": HostTensor("F32", (), np.array(version, dtype=np.uint32)),
        }
        loaded = LoadedWeights(
            publisher.publish(run, "third", version, tensors, base=loaded), tensors
        )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compaction, "BYTES_MIN", 0)
        patched.setattr(compaction, "SHARE_MAX", 1e9)
        assert compaction.merge(run, "third", 8, 0)
    return run


STORE = open_store("memory://sealed-objects")
RUN = whole_run(STORE)
RUN_PREFIX = layout.run_prefix("true")
ALL = {key: STORE.get(key) for key in STORE.list()}
JSON_KEYS = sorted(key for key in ALL if key.endswith(".json") and b'"format"' in ALL[key])
ARROW_KEYS = sorted(key for key in ALL if key.endswith(".arrow"))
SEQUENCES = verify(RUN, run_terms(RUN)).sequences


def readers() -> Iterator[Callable[[], object]]:
    """Call every reader of objects of the run."""
    yield lambda: [orders.read(RUN, number) for number in range(3)]
    yield lambda: shards.read(RUN, 0)
    yield lambda: [batches.read(RUN, "solver", step) for step in range(1, 5)]
    yield lambda: reader.fetch(RUN, "third", 8)
    yield lambda: reader.fetch_files(RUN, "solver")
    yield lambda: update_path.apply_path(
        RUN,
        manifests.read_manifest(RUN, "third", 8),
        [merged_delta()],
        reader.read(RUN, "third", 0),
    )
    yield lambda: checkpoints.newest(RUN, "solver")
    yield lambda: base_models.load_model(STORE, "8c1f")
    yield lambda: heartbeats.readable(RUN)
    yield lambda: leases.read_newest(RUN, 0)
    yield lambda: tags.require_all(RUN)
    yield lambda: evaluations.read_all(RUN)
    yield lambda: evaluation_samples.read(RUN, {"solver": 4, "verifier": 4})
    yield lambda: runs.read_run(RUN)
    yield lambda: runs.read_stop(RUN)
    yield lambda: quarantine.read_quarantine(RUN)
    yield lambda: compaction.merge(RUN, "third", 8, 1)


def merged_delta() -> Any:
    return update_path.merged_path_delta(manifests.read_merged(RUN, "third", 8, 0))


def read_everything(key: str = "") -> None:
    """Read everything after the object `key` was changed."""
    try:
        for read in readers():
            with suppress(AstraFlowError):
                read()
        WeightsAudit(RUN, "third", Findings()).audit(8, lambda what, share: None)
        assert (
            verify(RUN, run_terms(RUN)).sequences >= SEQUENCES - 16
        )  # at most one shard cannot be read
    except ConfigError:
        assert key.endswith("/run.json")
    finally:
        restore()


def restore() -> None:
    """Restore the initial content of the store."""
    for key in set(STORE.list()) | ALL.keys():
        if key not in ALL:
            STORE.delete(key)
        elif STORE.get(key) != ALL[key]:
            STORE.put(key, ALL[key])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a JSON value."""
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, child in children:
        yield (*path, name)
        yield from places(child, (*path, name))


def changed(draw: st.DataObject, fields: Any) -> None:
    """Replace, remove or add one or two values anywhere."""
    for _ in range(draw.draw(st.integers(1, 2))):
        there = list(places(fields))
        if not there:
            return
        *path, last = draw.draw(st.sampled_from(there))
        inner = fields
        for name in path:
            inner = inner[name]
        how = draw.draw(st.sampled_from(["set", "set", "set", "delete", "add"]))
        if how == "set" or isinstance(inner, list):
            inner[last] = deepcopy(draw.draw(st.sampled_from(HOSTILE)))
        elif how == "delete":
            del inner[last]
        else:
            inner[draw.draw(st.sampled_from(["", "w2", "\0", "-1", "9" * 30]))] = inner[last]


def text_of(fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":"))


modest = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@modest
@given(st.data())
def test_a_changed_json_object_is_read_or_corrupt(draw: st.DataObject) -> None:
    key = draw.draw(st.sampled_from(JSON_KEYS))
    fields = json.loads(ALL[key])
    is_sealed = "checksum" in fields
    changed(draw, fields)
    if is_sealed and isinstance(fields, dict) and "checksum" in fields:
        fields["checksum"] = ZEROS
    STORE.put(key, resealed_text(text_of(fields)))
    read_everything(key)


@modest
@given(st.data())
def test_a_changed_arrow_header_is_read_or_corrupt(draw: st.DataObject) -> None:
    key = draw.draw(st.sampled_from(ARROW_KEYS))
    schema, kind = SCHEMAS[key.removeprefix(f"{RUN_PREFIX}/").split("/")[0]]
    reader = pa.ipc.open_file(ALL[key])
    header = json.loads(reader.schema.metadata[b"astraflow.header"])
    changed(draw, header)
    table = reader.read_all().combine_chunks()
    batch = (
        table.to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], schema=schema)
    )
    compression = draw.draw(st.sampled_from(["lz4", "zstd", None]))
    STORE.put(
        key, arrow_file(schema, [batch.replace_schema_metadata(None)], kind, header, compression)
    )
    read_everything(key)


@modest
@given(st.data())
def test_changed_bytes_of_an_arrow_file_are_read_or_corrupt(draw: st.DataObject) -> None:
    key = draw.draw(st.sampled_from(ARROW_KEYS))
    body = bytearray(ALL[key])
    digest = pa.ipc.open_file(ALL[key]).schema.metadata[b"astraflow.digest"]
    first, last = body.find(digest), body.rfind(digest)
    for _ in range(draw.draw(st.integers(1, 4))):
        place = draw.draw(st.integers(0, len(body) - 1))
        if not any(start <= place < start + 32 for start in (first, last)):
            body[place] = draw.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, body[place] ^ 1]))
    body[first : first + 32] = body[last : last + 32] = ZEROS.encode()
    digits = xxhash.xxh3_128_hexdigest(bytes(body)).encode()
    body[first : first + 32] = body[last : last + 32] = digits
    STORE.put(key, bytes(body))
    read_everything(key)


@modest
@given(st.data())
def test_a_changed_tensor_file_is_read_or_corrupt(draw: st.DataObject) -> None:
    policy, version = draw.draw(
        st.sampled_from([("third", version) for version in range(9)] + [("solver", 0)])
    )

    def change(body: bytes) -> bytes:
        length = int.from_bytes(body[:8], "little")
        if draw.draw(st.booleans()):
            header = json.loads(body[8 : 8 + length])
            changed(draw, header)
            text = text_of(header).encode()
            return len(text).to_bytes(8, "little") + text + body[8 + length :]
        raw = bytearray(body)
        for _ in range(draw.draw(st.integers(1, 4))):
            place = draw.draw(
                st.integers(0, len(raw) - 1)
                | st.integers(8 + length, max(8 + length, len(raw) - 1))
            )
            raw[min(place, len(raw) - 1)] = draw.draw(st.integers(0, 255))
        return bytes(raw[: draw.draw(st.integers(0, len(raw)) | st.just(len(raw)))])

    replace_file(RUN, policy, version, change)
    read_everything()


@modest
@given(st.data())
def test_a_changed_checkpoint_or_merged_delta_is_read_or_corrupt(draw: st.DataObject) -> None:
    folder = draw.draw(
        st.sampled_from([layout.checkpoint("solver", 4), layout.weights("third", 8)])
    )
    manifest = (
        layout.manifest(folder) if "checkpoints" in folder else layout.merged_delta("third", 8, 0)
    )
    fields = json.loads(ALL[f"{RUN_PREFIX}/{manifest}"])
    files = fields["files"] if "files" in fields else fields["step"]["files"]
    key = f"{folder}/{files[0]['name']}"
    raw = bytearray(RUN.get(key))
    for _ in range(draw.draw(st.integers(1, 3))):
        raw[draw.draw(st.integers(0, len(raw) - 1))] = draw.draw(st.integers(0, 255))
    RUN.put(key, bytes(raw))
    files[0] |= {"digest": file_digest(bytes(raw)), "num_bytes": len(raw)}
    RUN.put(manifest, resealed_text(text_of({**fields, "checksum": ZEROS})))
    read_everything()
