"""Names that become parts of keys and paths: no record with an invalid name is built."""

import json

import pytest

from storage import layout, plain_names
from storage.coordination.heartbeats import Heartbeat
from storage.errors import ConfigError, CorruptError
from storage.formats.json_objects import decode, seal, unseal
from storage.records.weights import FileInfo, Manifest, MergedDelta, StoredDelta, TensorInfo
from storage.run.checkpoints import CheckpointManifest
from storage.run.runs import RunRecord
from storage.store.object_store import ObjectStore
from storage.weights import tags
from storage.weights.tags import Tag
from tests.support.stores.stranger import sealed

ID = "0123456789abcdef" * 2
BAD_FILES = [
    ("", "is empty"),
    ("/tmp/EVIL", "has a separator"),
    ("a/b.json", "has a separator"),
    ("..\\b.json", "has a separator"),
    ("..", "begins with a dot"),
    (".bashrc", "begins with a dot"),
    ("a\0.json", "cannot be printed"),
    ("a\n.json", "cannot be printed"),
    ("a\x1b[2J.json", "cannot be printed"),
    ("a\u202e.json", "cannot be printed"),
    ("\ud800.json", "cannot be printed"),
    ("C:x.json", "has one of the characters"),
    ("a.json ", "ends with a dot or a space"),
    ("a.json.", "ends with a dot or a space"),
    ("con.json", "is the name of a device"),
    ("LPT9", "is the name of a device"),
    ("ä" * 128, "is longer than 255 bytes"),
]
BAD_DATA_FILES = [
    *(f"{ID}.{name}" for name, _ in BAD_FILES),
    "x./tmp/EVIL",
    "config.json",
    f"{ID}",
    f"{ID[:-1]}.config.json",
    f"{ID.upper()}.config.json",
    f"../{ID}.config.json",
    f"{ID}.modeling_evil.py",
    f"{ID}.pytorch_model.bin",
    f"{ID}.evil.pkl",
    f"{ID}.CONFIG.JSON.so",
    f"{ID}." + "a" * 220 + ".json",
]
GOOD_DATA_FILES = [
    f"{ID}.model-00000.safetensors",
    f"{ID}.config.json",
    f"{ID}.chat_template.jinja",
    f"{ID}.tokenizer.model",
    f"{ID}.merges.txt",
    f"{ID}.sentencepiece.bpe.model",
    f"{ID}.käse 1.json",
]
TENSOR = {"dtype": "F32", "shape": [1], "digest": "xxh3_128:0"}


@pytest.mark.parametrize(("name", "why"), BAD_FILES)
def test_an_invalid_file_name_gives_the_reason(name: str, why: str) -> None:
    assert why in plain_names.fault(name)


@pytest.mark.parametrize(
    "name", ["config.json", "a", "1.5", "a..b", "käse", "ä" * 127, "console.json", "a b"]
)
def test_a_plain_name_has_no_fault(name: str) -> None:
    assert plain_names.fault(name) == ""


@pytest.mark.parametrize("name", GOOD_DATA_FILES)
def test_the_name_of_a_data_file_is_parsed(name: str) -> None:
    fields = {"name": name, "num_bytes": 1, "digest": "sha256:0"}
    assert unseal(FileInfo, sealed(fields), "it").name == name
    assert plain_names.without_write_id(name) == name[33:]


def manifest(**changed: object) -> dict[str, object]:
    own = {
        "policy": "solver",
        "version": 0,
        "parent": None,
        "batch": None,
        "kind": "anchor",
        "base": None,
        "digest": "sha256:0",
    }
    return {**own, "tensors": {}, "files": [], "step": None, **changed}


@pytest.mark.parametrize("name", BAD_DATA_FILES)
def test_a_manifest_with_another_file_name_is_refused(name: str) -> None:
    file = {"name": name, "num_bytes": 1, "digest": "sha256:0"}
    step = {"base": 0, "tensors": {}, "files": [file]}
    checkpoint = {"policy": "solver", "step": 1, "state": {}, "tensors": {}, "files": [file]}
    for record, fields in (
        (Manifest, manifest(files=[file])),
        (Manifest, manifest(step=step)),
        (MergedDelta, {"policy": "solver", "version": 1, "step": step}),
        (CheckpointManifest, checkpoint),
    ):
        with pytest.raises(
            CorruptError, match=r"files\.0\.name: .* is not the name of a data file|is not JSON"
        ):
            unseal(record, sealed(json.loads(json.dumps(fields))), "it")


@pytest.mark.parametrize("name", ["x./tmp/EVIL", "../config.json", "model.safetensors"])
def test_a_tensor_in_a_file_of_another_name_is_refused(name: str) -> None:
    with pytest.raises(CorruptError, match=r"tensors\.w\.file: .* is not the name of a data file"):
        unseal(Manifest, sealed(manifest(tensors={"w": {**TENSOR, "file": name}})), "it")


def test_a_tensor_without_a_file_is_parsed_and_may_have_any_name() -> None:
    name = "../../model\x1b.weight"
    loaded = unseal(
        Manifest, sealed(manifest(tensors={name: {**TENSOR, "file": "", "source": "a/b"}})), "it"
    )
    assert loaded.tensors == {
        name: TensorInfo(
            dtype="F32", shape=(1,), digest="xxh3_128:0", file="", entry="", source="a/b"
        )
    }


BAD_NAMES = ["", "a/b", "..", ".x", "a b", "solver\n", "a\x1b[2J", "[/]", "é", "a" * 101]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_record_with_an_invalid_policy_tag_or_member_name_is_refused(name: str) -> None:
    heartbeat = {
        "kind": "trainer",
        "attempt": 0,
        "beats": 1,
        "beat_s": 1.0,
        "started_s": 1.0,
        "pid": 1,
        "host": "h",
        "state": "done",
    }
    for record, fields, field in (
        (Manifest, manifest(policy=name), "policy"),
        (
            MergedDelta,
            {"policy": name, "version": 1, "step": {"base": 0, "tensors": {}, "files": []}},
            "policy",
        ),
        (
            CheckpointManifest,
            {"policy": name, "step": 1, "state": {}, "tensors": {}, "files": []},
            "policy",
        ),
        (Tag, {"name": name, "policy": "solver", "version": 1, "at_s": 1.0}, "name"),
        (Tag, {"name": "best", "policy": name, "version": 1, "at_s": 1.0}, "policy"),
    ):
        with pytest.raises(CorruptError, match=f"{field}: .* is not a name of up to 100 letters"):
            unseal(record, sealed(fields), "it")
    with pytest.raises(CorruptError, match=r"id: .* is not a name of up to 100 letters"):
        decode(
            Heartbeat,
            json.dumps({"format": 1, "write_id": ID, "id": name, **heartbeat}).encode(),
            "it",
        )


@pytest.mark.parametrize("run_id", ["", "a/b", "..", ".x", "a b", "r\n", "a" * 101])
def test_a_run_id_is_a_valid_part_of_a_key(memory_store: ObjectStore, run_id: str) -> None:
    with pytest.raises(CorruptError, match=r"run_id: .* is not a run id"):
        unseal(
            RunRecord,
            sealed({"run_id": run_id, "created_s": 1.0, "deployment": "", "config": {}}),
            "it",
        )
    with pytest.raises(ConfigError, match="cannot be a run id"):
        layout.run_prefix(run_id)


def test_a_tag_at_the_key_of_another_is_corrupt(memory_store: ObjectStore) -> None:
    memory_store.create(
        layout.tag("best"), seal(Tag(name="worst", policy="solver", version=1, at_s=1.0))
    )
    with pytest.raises(CorruptError, match=r"tags/best\.json holds the tag 'worst'"):
        tags.read(memory_store, "best")


def test_a_long_name_is_shortened_in_a_message() -> None:
    with pytest.raises(CorruptError) as raised:
        unseal(Manifest, sealed(manifest(policy="é" * 100_000)), "it")
    assert len(str(raised.value)) < 300


def test_a_sealed_merged_delta_keeps_its_delta() -> None:
    merged = MergedDelta(
        policy="solver",
        version=8,
        step=StoredDelta(0, {}, (FileInfo(GOOD_DATA_FILES[0], 5, "sha256:0"),)),
    )
    assert unseal(MergedDelta, seal(merged), "it").step == merged.step


def test_names_in_a_message_are_few_and_short() -> None:
    assert plain_names.listed([]) == ""
    assert plain_names.listed(["a", "b" * 80]) == f"a, {'b' * 80}"
    assert plain_names.listed(iter(["b" * 81])) == f"{'b' * 80}…"
    numbers = [str(number) for number in range(21)]
    assert plain_names.listed(numbers[:20]) == ", ".join(numbers[:20])
    assert plain_names.listed(numbers) == ", ".join(numbers[:20]) + ", …"
