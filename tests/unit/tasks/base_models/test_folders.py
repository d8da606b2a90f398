"""Reading model folders: accepted files, rounding, and errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import huggingface_hub
import numpy as np
import pytest
from pydantic import ValidationError

from storage.errors import ConfigError
from storage.formats.safetensors import to_safetensors
from storage.records.weights import HostTensor
from tasks.base_models.config import HubModel
from tasks.base_models.folders import INDEX, WEIGHTS, folder_config, read_model_folder, snapshot
from tests.support.patience import PATIENCE_S


def bf16(*values: int) -> HostTensor:
    return HostTensor("BF16", (len(values),), np.array(values, np.uint16))


def silent(stage: str, share: float) -> None:
    """A progress callback that does nothing."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_weights_are_read_in_bf16_and_the_other_files_unchanged(folder: Path):
    one_and_a_bit = HostTensor(
        "F32", (2,), np.array([0x3F800000, 0x3F808001], np.uint32)
    )  # 1.0 and 1.00390637
    counter = HostTensor("I64", (1,), np.array([7]))
    (folder / WEIGHTS).write_bytes(
        to_safetensors({"w": one_and_a_bit, "b": bf16(0x3F80), "n": counter})
    )
    (folder / "tokenizer.json").write_text("{1}")
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "README.md").write_text("not the model's")
    tensors, files = read_model_folder(folder, silent)
    assert tensors["w"].dtype == "BF16"
    assert tensors["w"].bits.tolist() == [0x3F80, 0x3F81]
    assert tensors["b"].bits.tolist() == [0x3F80]
    assert (tensors["n"].dtype, tensors["n"].bits.tolist()) == ("I64", [7])
    assert files == {
        "config.json": b"{}",
        "tokenizer.json": b"{1}",
        "chat_template.jinja": b"{{ x }}",
    }


def test_several_files_are_read_by_their_index_with_progress(folder: Path):
    (folder / "a.safetensors").write_bytes(to_safetensors({"x": bf16(1)}))
    (folder / "b.safetensors").write_bytes(to_safetensors({"y": bf16(2), "z": bf16(3)}))
    weight_map = {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    reported: list[tuple[str, float]] = []
    tensors, files = read_model_folder(folder, lambda stage, share: reported.append((stage, share)))
    assert {name: tensor.bits.tolist() for name, tensor in tensors.items()} == {
        "x": [1],
        "y": [2],
        "z": [3],
    }
    assert reported[:2] == [("reading a.safetensors", 0.0), ("reading b.safetensors", 0.5)]
    assert reported[-1][1] == 1.0
    assert INDEX not in files


def test_a_tensor_in_two_files_is_refused(folder: Path):
    (folder / "a.safetensors").write_bytes(to_safetensors({"x": bf16(1), "y": bf16(2)}))
    (folder / "b.safetensors").write_bytes(to_safetensors({"y": bf16(3)}))
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    )
    with pytest.raises(
        ConfigError, match=r"b\.safetensors holds the tensor 'y', which another file of the folder"
    ):
        read_model_folder(folder, silent)


def test_a_folder_that_is_not_a_model_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        read_model_folder(tmp_path / "nowhere", silent)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model_folder(tmp_path, silent)


def test_weights_in_another_format_give_an_error_with_a_remedy(folder: Path):
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds neither .* save the model with save_pretrained"):
        read_model_folder(folder, silent)


@pytest.mark.parametrize("name", ["gone.safetensors", "../config.json"])
def test_an_index_of_files_outside_the_folder_is_refused(folder: Path, name: str):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ConfigError, match="which is not in the folder"):
        read_model_folder(folder, silent)


@pytest.mark.parametrize("text", ["no json", "[]", '{"weight_map": [1]}', "[" * 100_000])
def test_a_broken_index_is_named(folder: Path, text: str):
    (folder / INDEX).write_text(text)
    with pytest.raises(ConfigError, match="is not an index of safetensors files"):
        read_model_folder(folder, silent)


def test_truncated_weights_are_named(folder: Path):
    (folder / WEIGHTS).write_bytes(to_safetensors({"x": bf16(1, 2, 3)})[:-1])
    with pytest.raises(
        ConfigError, match=r"model\.safetensors cannot be read .* fetch the model again"
    ):
        read_model_folder(folder, silent)


@pytest.mark.parametrize("hub", ["https://me:secret@huggingface.co/x", "https://h/x?token=secret"])
def test_a_hub_model_with_a_credential_in_its_name_is_refused(hub: str) -> None:
    with pytest.raises(ValidationError, match="contains a user, a password or a token"):
        HubModel(hub=hub)


def test_without_a_network_the_hub_is_a_configuration_error(tmp_path: Path):
    """In its own process, because the hub's client reads its environment at import."""
    program = (
        "from storage.errors import ConfigError\n"
        "from tasks.base_models.folders import snapshot\n"
        "try: snapshot('some/model', lambda stage, share: None)\n"
        "except ConfigError as error: print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.startswith(
        "model.hub: some/model cannot be fetched from the Hugging Face hub ("
    )
    assert "set model.path to a local folder" in done.stdout


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private file that must not be stored with a model folder."""
    file = tmp_path_factory.mktemp("home") / "credentials"
    file.write_text("secret")
    return file


def complete(folder: Path) -> Path:
    (folder / WEIGHTS).write_bytes(to_safetensors({"x": bf16(1)}))
    return folder


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "model.safetensors", "vocab.txt"]
)
def test_a_symbolic_link_in_a_model_folder_is_refused_by_name(
    folder: Path, secret: Path, name: str
):
    complete(folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    if name == "config.json":
        secret.write_text("{}")
    with pytest.raises(
        ConfigError,
        match=rf"{folder}/{name} is a symbolic link to {secret}; replace it by the file",
    ):
        read_model_folder(folder, silent)


def test_a_link_within_the_folder_is_refused_too(folder: Path):
    complete(folder)
    (folder / "tokenizer.json").symlink_to("config.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a symbolic link to config\.json"):
        read_model_folder(folder, silent)


def test_a_link_to_itself_is_refused(folder: Path):
    complete(folder)
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a symbolic link to tokenizer\.json"):
        read_model_folder(folder, silent)


def test_files_that_are_not_read_and_the_folder_itself_can_be_links(
    folder: Path, secret: Path, tmp_path: Path
):
    complete(folder)
    (folder / "README.md").symlink_to(secret)
    (folder / ".hidden.json").symlink_to(secret)
    (folder / "._config.json").write_text("of a Mac")
    (folder / "pytorch_model.bin").symlink_to(secret)
    link = secret.parent / "link"
    link.symlink_to(folder)
    assert read_model_folder(link, silent)[1] == {"config.json": b"{}"}


def hub_cache(root: Path) -> Path:
    """A snapshot in the layout of the hub's client; return its folder."""
    model = root / "hub" / "models--openai--x"
    snapshot, blobs = model / "snapshots" / "0123abcd", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, body in (("config.json", b"{}"), (WEIGHTS, to_safetensors({"x": bf16(1)}))):
        (blobs / f"digest-of-{name}").write_bytes(body)
        (snapshot / name).symlink_to(f"../../blobs/digest-of-{name}")
    return snapshot


def test_a_snapshot_of_links_in_the_hub_cache_is_read(tmp_path: Path):
    snapshot = hub_cache(tmp_path)
    tensors, files = read_model_folder(snapshot, silent)
    assert tensors["x"].bits.tolist() == [1]
    assert files == {"config.json": b"{}"}


@pytest.mark.parametrize(
    "way", ["straight", "by a blob", "by the folder of blobs", "into another model"]
)
def test_a_snapshot_with_links_outside_its_models_blobs_is_refused(
    tmp_path: Path, secret: Path, way: str
):
    snapshot = hub_cache(tmp_path)
    blobs = snapshot.parent.parent / "blobs"
    link = snapshot / "tokenizer.json"
    if way == "straight":
        link.symlink_to(secret)
    elif way == "by a blob":
        (blobs / "t").symlink_to(secret)
        link.symlink_to("../../blobs/t")
    elif way == "by the folder of blobs":
        for name in ("config.json", WEIGHTS):
            (secret.parent / f"digest-of-{name}").write_bytes(
                (blobs / f"digest-of-{name}").read_bytes()
            )
        blobs.rename(tmp_path / "moved")
        blobs.symlink_to(secret.parent)
        link.symlink_to("../../blobs/credentials")
    else:
        other = tmp_path / "hub" / "models--openai--y" / "blobs"
        other.mkdir(parents=True)
        (other / "t").write_text("{}")
        link.symlink_to("../../../models--openai--y/blobs/t")
    with pytest.raises(ConfigError, match="is a symbolic link to"):
        read_model_folder(snapshot, silent)


@pytest.mark.parametrize("name", ["C:x.json", "a\nb.json", "nul.json"])
def test_a_file_with_an_invalid_name_is_refused_before_the_weights_are_read(
    folder: Path, name: str
):
    (folder / name).write_text("{}")
    with pytest.raises(ConfigError, match="; rename it, or remove it"):
        read_model_folder(folder, silent)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("the lock is held"),
        TimeoutError(),
        httpx.ProxyError("no such proxy"),
        OSError(28, "disk full"),
    ],
)
def test_each_failed_download_from_the_hub_is_a_configuration_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
):
    def fails(repository: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    messages: list[str] = []

    def progress(stage: str, share: float) -> None:
        messages.append(stage)
        assert len(messages) < 100, "it waits for what has ended"

    with pytest.raises(
        ConfigError,
        match=r"^model\.hub: some/model cannot be fetched .* set model\.path to a local folder$",
    ):
        snapshot("some/model", progress)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX])
def test_a_file_above_the_size_limit_is_refused_before_memory_is_full(
    folder: Path, name: str
) -> None:
    (folder / name).touch()
    os.truncate(folder / name, 2**42)
    with pytest.raises(
        ConfigError,
        match=rf"{name} is larger than 67108864 bytes; remove files that are not part of",
    ):
        read_model_folder(folder, silent)


@pytest.mark.parametrize(
    "text",
    ["[" * 500_000, "[" + "[]," * 3_000_000 + "1]", '{"weight_map": [1]}', "[1]"],
    ids=["nested", "many values", "no map", "a list"],
)
def test_an_index_above_the_size_limit_or_without_names_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(
        ConfigError, match=rf"{INDEX} is not an index of safetensors files; fetch the model again"
    ):
        read_model_folder(folder, silent)


def test_a_pipe_in_the_place_of_the_configuration_is_named_and_not_waited_for(
    folder: Path,
) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json is not a regular file"):
        folder_config(folder)


def test_a_folder_in_a_loop_of_links_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"model\.path: .*loop/config\.json cannot be read"):
        folder_config(tmp_path / "loop")
    with pytest.raises(ConfigError, match=r"model\.path: .*loop is not a folder"):
        read_model_folder(tmp_path / "loop", silent)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(13, "Permission denied"), "cannot be read: .*Permission denied"),
        (MemoryError(), "do not fit in the memory of this machine; start the base model on a"),
    ],
    ids=["permission", "memory"],
)
def test_weights_that_the_system_does_not_read_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def fail(path: Path) -> bytes:
        raise error

    (folder / WEIGHTS).write_bytes(b"")
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ConfigError, match=rf"model\.path: .*{folder.name}.* {sentence}"):
        read_model_folder(folder, silent)
