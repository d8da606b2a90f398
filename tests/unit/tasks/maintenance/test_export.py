import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from storage.errors import ConfigError, CorruptError
from storage.store.object_store import ObjectStore
from tasks.maintenance import export_folder
from tasks.maintenance.export import export_model
from tests.support.runs.adapter_versions import A, B, W, drawn, publish_adapters
from tests.support.runs.small_run import SmallRun
from trainer.engines.torch.host_tensors import to_torch


def test_an_exported_folder_has_the_weights_of_its_version_and_the_extra_files(
    tmp_path: Path,
) -> None:
    small_run = SmallRun("export")
    small_run.version("solver", 0, {"config.json": b'{"model_type": "qwen3"}'})
    small_run.version("solver", 1)
    assert export_model(small_run.run, "solver", None, tmp_path / "out") == 1
    assert (tmp_path / "out" / "config.json").read_bytes() == b'{"model_type": "qwen3"}'
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "written_by": "astraflow export"}
        assert file.keys() == ["w"]
        assert file.get_tensor("w").view(dtype=torch.int16).tolist() == [1, 2]


def test_an_export_names_no_code_and_no_other_adapter(tmp_path: Path) -> None:
    code = {"auto_map": {"AutoConfig": "someone/model--code.Config"}}
    private = {"_attn_implementation_internal": "someone/kernel"}
    nested = {"custom_pipelines": {}, "size": 1, **private}
    config = {"model_type": "qwen3", "nested": [nested], "__dict__": private, **code}
    kernels = {"attn_implementation": "someone/kernel", "experts_implementation": "sonicmoe"}
    small_run = SmallRun("export-code")
    files = {
        "config.json": json.dumps({**config, **kernels}).encode(),
        "tokenizer_config.json": json.dumps({**code, "model_max_length": 10**30}).encode(),
        "generation_config.json": b"no JSON",
        "adapter_config.json": b'{"base_model_name_or_path": "someone/else"}',
        "Adapter_Config.json": b"{}",
        "added_tokens.json": json.dumps(code).encode(),
    }
    small_run.version("solver", 0, files)
    assert export_model(small_run.run, "solver", 0, tmp_path) == 0
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    del written["model.safetensors"]
    assert json.loads(written.pop("config.json")) == {
        "model_type": "qwen3",
        "nested": [{"size": 1}],
    }
    assert json.loads(written.pop("tokenizer_config.json")) == {"model_max_length": 10**30}
    unchanged = ("generation_config.json", "added_tokens.json")
    assert written == {name: files[name] for name in unchanged}


def test_an_export_names_no_files_outside_of_it(tmp_path: Path) -> None:
    files = {
        "config.json": {
            "transformers_weights": "/other/model.safetensors",
            "task_specific_params": {"text-generation": {"num_beams": 20_000}},
            "size": 1,
        },
        "tokenizer_config.json": {"tokenizer_file": "/other/tokenizer.json", "vocab": "/x", "a": 1},
        "special_tokens_map.json": {"parts": [{"merges": "/other/merges.txt"}], "b": 2},
        "tokenizer.json": {"vocab": {"a": 1}},
    }
    small_run = SmallRun("export-files")
    small_run.version(
        "solver", 0, {name: json.dumps(body).encode() for name, body in files.items()}
    )
    assert export_model(small_run.run, "solver", 0, tmp_path) == 0
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert written == {
        "config.json": {"size": 1},
        "tokenizer_config.json": {"a": 1},
        "special_tokens_map.json": {"parts": [{}], "b": 2},
        "tokenizer.json": {"vocab": {"a": 1}},
    }


def test_a_configuration_that_is_nested_too_deeply_is_not_exported(tmp_path: Path) -> None:
    small_run = SmallRun("export-nested")
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    small_run.version("solver", 0, {"tokenizer_config.json": deep})
    with pytest.raises(CorruptError, match=r"tokenizer_config.json of the model is nested too"):
        export_model(small_run.run, "solver", 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_exported_merged(tmp_path: Path, memory_store: ObjectStore) -> None:
    base = publish_adapters(memory_store)
    assert export_model(memory_store, "solver", 2, tmp_path) == 2
    w, a, b = (to_torch({**base, **drawn(seed=2), W: base[W]}[name]).float() for name in (W, A, B))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == [W, "norm.weight"]
        assert torch.allclose(file.get_tensor(W).float(), w + 1.5 * (b @ a), rtol=0.01, atol=1e-3)
        assert file.get_tensor(W).dtype == torch.bfloat16


def test_an_export_of_a_missing_version_names_the_newest(tmp_path: Path) -> None:
    small_run = SmallRun("export-absent")
    small_run.version("solver", 0)
    with pytest.raises(ConfigError, match="solver has no version 7; its newest is 0"):
        export_model(small_run.run, "solver", 7, tmp_path)
    with pytest.raises(ConfigError, match="nobody has no published weights"):
        export_model(small_run.run, "nobody", None, tmp_path)


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    small_run = SmallRun("export-unwritable")
    small_run.version("solver", 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        export_model(small_run.run, "solver", 0, tmp_path / "file")


def test_an_earlier_export_is_replaced_and_no_other_file_remains(tmp_path: Path) -> None:
    small_run = SmallRun("export-again")
    small_run.version("solver", 0, {"config.json": b"{}"})
    out = tmp_path / "out"
    out.mkdir()
    assert export_model(small_run.run, "solver", 0, out) == 0
    (out / "config.json").write_text("changed")
    (out / ".astraflow-killed").mkdir()  # of a killed export
    assert export_model(small_run.run, "solver", 0, out) == 0
    assert (out / "config.json").read_bytes() == b"{}"
    assert sorted(os.listdir(out)) == [".astraflow-killed", "config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "model.safetensors"])
def test_a_folder_with_a_foreign_file_is_refused_and_not_changed(name: str, tmp_path: Path) -> None:
    small_run = SmallRun(f"export-foreign-{name}")
    small_run.version("solver", 0, {"config.json": b"{}"})
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"{tmp_path} contains {name}, which .* new or an empty"):
        export_model(small_run.run, "solver", 0, tmp_path)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_foreign_file_is_named_with_its_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    small_run = SmallRun("export-foreign-bytes")
    small_run.version("solver", 0, {"config.json": b"{}"})
    (tmp_path / os.fsdecode(b"caf\xe9")).touch()
    with pytest.raises(ConfigError, match=rf"{tmp_path} contains caf\\xe9, which an export"):
        export_model(small_run.run, "solver", 0, tmp_path)


def test_a_file_added_to_an_earlier_export_is_refused_by_name(tmp_path: Path) -> None:
    small_run = SmallRun("export-beside")
    small_run.version("solver", 0)
    export_model(small_run.run, "solver", 0, tmp_path)
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"contains a\.txt and 1 other files, which an export"):
        export_model(small_run.run, "solver", 0, tmp_path)


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_write_leaves_no_part_of_an_export(exists: bool, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    if exists:
        out.mkdir(parents=True)
    files = {"config.json": b"{}", "x" * 300: b"", "model.safetensors": b""}
    with pytest.raises((OSError, CorruptError)):
        export_folder.write(out, files)
    assert out.exists() == exists
    assert not exists or os.listdir(out) == []
