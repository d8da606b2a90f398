"""A store with foreign writers: names in its objects never lead out of the expected folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.agents import template_chat
from rollout.agents.chat import user
from rollout.agents.chat_process import ChatProcess
from rollout.agents.template_chat import load_chat
from storage import layout
from storage.errors import ConfigError, CorruptError
from storage.formats.json_objects import seal
from storage.formats.safetensors import file_digest
from storage.records.weights import MergedDelta, StoredDelta
from storage.run import base_models, batches, checkpoints
from storage.run.checkpoints import CheckpointState
from storage.run.runs import create_run, open_run, read_all, read_run
from storage.store.object_store import ObjectStore, open_store
from storage.verify.verify import verify
from storage.weights import manifests, publisher, reader
from storage.written_files import write_inside
from tasks.episodes.token_decoder import TokenDecoder
from tasks.maintenance.export import export_model
from tasks.recipes.run_terms import run_terms
from tests.support.runs.builders import tensors
from tests.support.runs.fakes import base_files
from tests.support.runs.small_run import SmallRun
from tests.support.runs.true_run import POLICIES, finished_run
from tests.support.stores.resealed import resealed
from tests.support.stores.stranger import WRITE_ID, sealed


def add_file(run: ObjectStore, policy: str, version: int, name: str, body: bytes) -> str:
    """Add one file to the version's manifest, seal and store it; return the manifest's key."""
    key = layout.manifest(layout.weights(policy, version))
    manifest = json.loads(run.get(key))
    manifest["files"].append({"name": name, "num_bytes": len(body), "digest": file_digest(body)})
    run.delete(key)
    run.create(key, sealed(manifest))
    run.put(f"{layout.weights(policy, version)}/{name}", body)
    return key


def evil_name(tmp_path: Path) -> str:
    """The text after its first dot is an absolute path."""
    return f"x.{tmp_path}/EVIL"


def test_an_export_never_writes_outside_its_folder(tmp_path: Path) -> None:
    small_run = SmallRun("hostile-export")
    small_run.version("solver", 0, {"config.json": b"{}"})
    add_file(small_run.run, "solver", 0, evil_name(tmp_path), b"evil")
    with pytest.raises(
        CorruptError, match=r"files\.2\.name: .*EVIL' is not the name of a data file"
    ):
        export_model(small_run.run, "solver", 0, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_report_never_writes_the_files_named_by_a_manifest(tmp_path: Path) -> None:
    small_run = SmallRun("hostile-report")
    small_run.version("solver", 0, {"tokenizer_config.json": b"{}"})
    add_file(small_run.run, "solver", 0, evil_name(tmp_path), b"evil")
    assert TokenDecoder(small_run.run, "solver").token(7) == "⟨7⟩"
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_tokenizer_does_not_prevent_the_report() -> None:
    small_run = SmallRun("hostile-tokenizer")
    small_run.version("solver", 0, {"tokenizer.json": b'{"model": 1}'})
    assert TokenDecoder(small_run.run, "solver").token(7) == "⟨7⟩"


def test_a_tokenizer_that_panics_does_not_prevent_the_report() -> None:
    # The decoder counts from the end of a token further than to its start.
    decoding = {"type": "Strip", "content": "a", "start": 0, "stop": 99}
    model = {"type": "WordLevel", "vocab": {"a": 7}, "unk_token": "a"}
    tokenizer = json.dumps({"version": "1.0", "decoder": decoding, "model": model}).encode()
    small_run = SmallRun("hostile-decoder")
    small_run.version("solver", 0, {"tokenizer.json": tokenizer})
    assert TokenDecoder(small_run.run, "solver").token(7) == "⟨7⟩"
    assert TokenDecoder(small_run.run, "solver").text([7, 7]) == "⟨7⟩⟨7⟩"


LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000}
ADDED = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
MULTIPLIED = {"type": "Sequence", "normalizers": [LONGER] * 5}
"""Makes a petabyte of one character."""
HOSTILE_TOKENIZERS = {
    # An added token is normalized when the file is loaded.
    "a long added token": {
        "normalizer": MULTIPLIED,
        "added_tokens": [{**ADDED, "id": 7, "content": "a", "normalized": True}],
    },
    "a panic": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
}
HOSTILE_TO_TEXTS = {
    "text without end": {"decoder": {"type": "Sequence", "decoders": [LONGER] * 5}},
    "tokens without end": {"normalizer": MULTIPLIED},
}


def hostile_files(hostile: dict[str, Any]) -> dict[str, bytes]:
    model = {"type": "WordLevel", "vocab": {"a": 7}, "unk_token": "a"}
    fields = {"version": "1.0", "added_tokens": [], "model": model, **hostile}
    return {**base_files(), "tokenizer.json": json.dumps(fields).encode()}


@pytest.mark.parametrize("name", HOSTILE_TOKENIZERS)
def test_a_hostile_tokenizer_is_not_used(name: str) -> None:
    files = hostile_files(HOSTILE_TOKENIZERS[name])
    small_run = SmallRun(f"hostile {name}".replace(" ", "-"))
    small_run.version("solver", 0, files)
    assert TokenDecoder(small_run.run, "solver").token(7) == "⟨7⟩"
    with pytest.raises(ConfigError, match="make no tokenizer"):
        ChatProcess(files, load_cpu_s=4.0)


async def test_a_hostile_decoder_makes_no_text() -> None:
    small_run = SmallRun("hostile-decoder-of-texts")
    files = hostile_files(HOSTILE_TO_TEXTS["text without end"])
    small_run.version("solver", 0, files)
    assert TokenDecoder(small_run.run, "solver").token(7) == "⟨7⟩"
    chat = ChatProcess(files)
    try:
        with pytest.raises(ConfigError, match=r"takes more than .* for an answer of 1 tokens"):
            await chat.text([7])
    finally:
        chat.close()


def test_a_hostile_normalizer_makes_no_tokens() -> None:
    """The chat's own first text, the end of a turn, has no `a`: so has the template here."""
    with pytest.raises(ConfigError, match="make no tokenizer"):
        ChatProcess(
            hostile_files(HOSTILE_TO_TEXTS["tokens without end"])
            | {"chat_template.jinja": b"{% for m in messages %}{{ m.content }}a{% endfor %}"},
            load_cpu_s=4.0,
        )


def test_an_export_never_writes_through_a_symbolic_link(tmp_path: Path) -> None:
    small_run = SmallRun("hostile-link")
    small_run.version("solver", 0, {"config.json": b"{}"})
    (tmp_path / "theirs").write_bytes(b"theirs")
    export_model(small_run.run, "solver", 0, tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "theirs")
    export_model(small_run.run, "solver", 0, tmp_path / "out")
    assert (tmp_path / "theirs").read_bytes() == b"theirs"
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"


def test_the_tokenizer_of_a_worker_consists_of_its_own_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []

    def write(folder: Path, name: str, body: bytes) -> None:
        written.append(name)
        write_inside(folder, name, body)

    monkeypatch.setattr(template_chat, "write_inside", write)
    others = ("../tokenizer.json", "/tmp/tokenizer.json", ".tokenizer.json", "config.json")
    load_chat({**base_files(), **dict.fromkeys(others, b"{}")})
    assert sorted(written) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    "name", ["modeling_evil.py", "pytorch_model.bin", "evil.so", "tokenizer.pkl", "../config.json"]
)
def test_code_beside_the_tensors_of_a_model_is_neither_stored_nor_read(
    memory_store: ObjectStore, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be stored in .*: the name "):
        publisher.publish(
            memory_store,
            "solver",
            0,
            tensors(0),
            extra_files={"config.json": b"{}", name: b"import os"},
        )
    assert memory_store.list() == []
    small_run = SmallRun(f"hostile-code-{name.replace('/', '-')}")
    small_run.version("solver", 0, {"config.json": b"{}"})
    add_file(small_run.run, "solver", 0, f"{WRITE_ID}.{name}", b"import os")
    with pytest.raises(CorruptError, match="is not the name of a data file"):
        reader.fetch_files(small_run.run, "solver")


def test_a_file_that_is_listed_twice_is_corrupt() -> None:
    small_run = SmallRun("hostile-twice")
    small_run.version("solver", 0, {"config.json": b"{}"})
    add_file(small_run.run, "solver", 0, f"{WRITE_ID}.config.json", b"[]")
    with pytest.raises(
        CorruptError, match=r"lists the file 'config\.json', whose name is listed twice"
    ):
        reader.fetch_files(small_run.run, "solver")


def test_a_manifest_that_lists_a_file_twice_is_corrupt(memory_store: ObjectStore) -> None:
    """Bytes of a file count once in limits, and it is read once."""
    run = create_run(memory_store, "r", {})
    publisher.publish(run, "solver", 0, tensors(0))
    checkpoints.save(run, "solver", 1, tensors(0), CheckpointState({}, 0.0))
    base_models.save_model(run, "b" * 64, tensors(0), {}, {})
    folder, digits = layout.weights("solver", 0), layout.model_prefix("b" * 64)
    first = manifests.read_manifest(run, "solver", 0)
    merged = MergedDelta(
        policy="solver", version=8, step=StoredDelta(0, first.tensors, 2 * first.files)
    )
    run.create(layout.merged_delta("solver", 8, 0), seal(merged))
    for key in (folder, layout.checkpoint("solver", 1), digits):
        body = run.get(layout.manifest(key))
        change = resealed(body, lambda fields: fields.update(files=2 * fields["files"]))
        run.put(layout.manifest(key), change)
    expected = "manifest.json is not a .*: files: a file is listed twice"
    with pytest.raises(CorruptError, match=expected):
        manifests.read_manifest(run, "solver", 0)
    with pytest.raises(CorruptError, match=expected):
        checkpoints.read_manifest(run, "solver", 1)
    with pytest.raises(CorruptError, match=expected):
        base_models.read_model_manifest(run, "b" * 64)
    with pytest.raises(CorruptError, match=r"step\.files: a file is listed twice"):
        manifests.read_merged(run, "solver", 8, 0)


def test_verify_reports_an_object_with_an_invalid_name_and_checks_all_others(
    memory_store: ObjectStore, tmp_path: Path
) -> None:
    run = finished_run(memory_store)
    where = add_file(run, "solver", 2, evil_name(tmp_path), b"evil")
    batch = layout.batch("verifier", 2)
    run.delete(batch)
    run.create(batch, batches.encode(batches.read(run, "verifier", 1)))
    documented = {
        (item.invariant, item.where): item.what for item in verify(run, run_terms(run)).violations
    }
    assert "EVIL' is not the name of a data file" in documented[3, where]
    assert documented[1, batch] == f"{batch} holds batch 1 of 'verifier'"


def test_verify_reports_only_the_checkpoint_with_an_invalid_name_or_step(
    memory_store: ObjectStore,
) -> None:
    run = finished_run(memory_store)
    for step in (1, 2, 3):
        checkpoints.save(run, "solver", step, tensors(step), CheckpointState({}, 0.0))
    keys = [layout.manifest(layout.checkpoint("solver", step)) for step in (1, 2, 3)]
    manifest, second = json.loads(run.get(keys[0])), run.get(keys[1])
    manifest["files"][0]["name"] = "x./tmp/EVIL"
    for key, body in ((keys[0], sealed(manifest)), (keys[2], second)):
        run.delete(key)
        run.create(key, body)
    violations = verify(run, run_terms(run)).violations
    assert [(item.invariant, item.where) for item in violations] == [(3, keys[0]), (3, keys[2])]
    assert "'x./tmp/EVIL' is not the name of a data file" in violations[0].what
    assert violations[1].what == f"{keys[2]} is the checkpoint of solver step 2"


def test_verify_reports_an_invalid_policy_name_and_checks_the_others(
    memory_store: ObjectStore,
) -> None:
    run = finished_run(memory_store)
    record = json.loads(run.get(layout.RUN))
    record["config"]["policies"] |= {
        "../../x": {"batch_size": 1},
        "a/b": {"batch_size": 1},
        "\x1b[2J": {"batch_size": 1},
    }
    run.delete(layout.RUN)
    run.create(layout.RUN, sealed(record))
    run.delete(layout.batch("solver", 2))
    verdict = verify(run, run_terms(run))
    named = sorted(item.what for item in verdict.violations if item.where == layout.RUN)
    assert named == [
        r"names the policy '../../x', of which there can be no batch and no version",
        r"names the policy '\x1b[2J', of which there can be no batch and no version",
        r"names the policy 'a/b', of which there can be no batch and no version",
    ]
    assert any(item.where == layout.batch("solver", 2) for item in verdict.violations)
    assert sorted(verdict.policies) == sorted(POLICIES)


def test_a_record_under_the_id_of_another_run_is_corrupt(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "mine", {})
    body = create_run(memory_store, "theirs", {}).get(layout.RUN)
    run.delete(layout.RUN)
    run.create(layout.RUN, body)
    with pytest.raises(CorruptError, match=r"runs/mine/run\.json is the record of run theirs"):
        read_run(run)


def test_folders_with_invalid_run_ids_are_not_runs(
    local_store: ObjectStore, tmp_path: Path
) -> None:
    create_run(local_store, "mine", {})
    root = Path(local_store.url.removeprefix("file://"))
    for name in ("a b", "\x1b[2J", ".hidden", "x" * 101):
        (root / "runs" / name).mkdir()
        record = {"run_id": name, "created_s": 1.0, "deployment": "", "config": {}}
        (root / "runs" / name / "run.json").write_bytes(sealed(record))
    assert read_all(local_store).ids == ("mine",)
    with pytest.raises(ConfigError, match=r"there is no run '../mine'"):
        open_run(local_store, "../mine")


@pytest.mark.parametrize(
    "key",
    ["heartbeats/../x.json", "evals//a.arrow", "tags/\x1b[2J.json", "heartbeats/.tmp-x", "./a"],
)
def test_an_invalid_key_is_not_listed(key: str) -> None:
    """A foreign writer of a bucket can give an object any name; listing it and then reading it
    would end a command.
    """
    store = open_store(f"memory://hostile-keys-{key.encode().hex()}")
    store.create("heartbeats/a.json", b"{}")
    store.backend.write(key, b"{}")
    assert store.list() == ["heartbeats/a.json"]
    verbs: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.exists(key),
        lambda: store.delete(key),
    ]
    for verb in verbs:
        with pytest.raises(ConfigError, match="cannot be a key"):
            verb()


@pytest.fixture
def shown_prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompt that transformers shows at the terminal; the simulated user agrees to everything."""
    questions: list[str] = []

    def agree(question: str) -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    return questions


def test_a_config_that_names_code_neither_runs_it_nor_shows_a_prompt(
    shown_prompts: list[str],
) -> None:
    from trainer.engines.torch.hf.model import HfModel

    config = {
        "model_type": "vit",
        "hidden_size": 16,
        "auto_map": {"AutoModelForCausalLM": "evil/code--modeling_evil.Evil"},
    }
    with pytest.raises(ConfigError, match=r"no causal language model: [\s\S]* is never run$"):
        HfModel(config, {}, "cpu", False)
    assert shown_prompts == []


def test_a_tokenizer_that_names_code_neither_runs_it_nor_shows_a_prompt(
    shown_prompts: list[str],
) -> None:
    named = {
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["evil/code--evil.Evil", "evil/code--evil.Evil"]},
    }
    files = base_files()
    expected = load_chat(files).opening([user("7+8-3=?")])
    settings = json.loads(files["tokenizer_config.json"]) | named
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    assert load_chat(files).opening([user("7+8-3=?")]) == expected
    assert shown_prompts == []
