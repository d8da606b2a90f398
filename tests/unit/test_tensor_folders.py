from dataclasses import replace

import pytest

from storage import tensor_folders
from storage.errors import ConfigError, CorruptError
from storage.objects import ObjectStore
from storage.tensor_folders import Contents, read_files, read_tensors, write
from tests import builders
from tests.damaging_store import damages_first_reads

ID = "0" * 32


def stored(store: ObjectStore) -> Contents:
    return write(store, builders.tensors(1), {"config.json": b"{}", "tokenizer.model": b"\x00\x01"}, ID)


def test_tensors_and_files_come_back(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    assert {info.name for info in contents.files} == {
        f"{ID}.model-00000.safetensors",
        f"{ID}.config.json",
        f"{ID}.tokenizer.model",
    }
    found = read_tensors(memory_store, contents)
    assert found["model.weight"].bits.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert read_files(memory_store, contents) == {"config.json": b"{}", "tokenizer.model": b"\x00\x01"}


def test_many_tensors_are_spread_over_files(memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_folders, "FILE_BYTES_MAX", 12)
    contents = write(memory_store, builders.tensors(1), {}, ID)
    assert contents.tensors["model.scale"].file == f"{ID}.model-00000.safetensors"
    assert contents.tensors["model.weight"].file == f"{ID}.model-00001.safetensors"
    assert read_tensors(memory_store, contents).keys() == {"model.scale", "model.weight"}


def test_no_tensors_at_all_is_a_folder_too(memory_store: ObjectStore) -> None:
    assert read_tensors(memory_store, write(memory_store, {}, {}, ID)) == {}


def flipped(body: bytes, place: int) -> bytes:
    return body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]


def test_every_single_flipped_bit_of_a_tensor_file_is_found(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    key = f"{ID}.model-00000.safetensors"
    body = memory_store.get(key)
    for place in range(len(body)):
        memory_store.put(key, flipped(body, place))
        with pytest.raises(CorruptError, match="is not what its manifest lists"):
            read_tensors(memory_store, contents)


def test_a_changed_file_is_found(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    memory_store.put(f"{ID}.config.json", b"[]")
    with pytest.raises(CorruptError, match=rf"{ID}\.config\.json is not what its manifest lists"):
        read_files(memory_store, contents)


def test_a_missing_file_is_corrupt_and_named(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    memory_store.delete(f"{ID}.model-00000.safetensors")
    with pytest.raises(CorruptError, match=r"model-00000\.safetensors is missing, though its manifest lists it"):
        read_tensors(memory_store, contents)


def test_a_file_swapped_for_another_valid_one_is_found(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    other = write(memory_store, builders.tensors(2), {}, "f" * 32)
    memory_store.put(f"{ID}.model-00000.safetensors", memory_store.get(other.files[0].name))
    with pytest.raises(CorruptError, match="is not what its manifest lists"):
        read_tensors(memory_store, contents)


def test_a_false_tensor_digest_is_found_even_when_the_file_is_right(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    other = write(memory_store, builders.tensors(2), {}, "f" * 32)
    false = replace(contents.tensors["model.scale"], digest=other.tensors["model.scale"].digest)
    swapped = {**contents.tensors, "model.scale": false}
    with pytest.raises(CorruptError, match=r"the tensor model\.scale in .* is not the one its manifest lists"):
        read_tensors(memory_store, Contents(swapped, contents.files))


def test_a_file_that_arrives_damaged_once_is_fetched_again(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    assert read_tensors(damages_first_reads(memory_store), contents)["model.scale"].bits.tolist() == 1
    assert read_files(damages_first_reads(memory_store), contents)["config.json"] == b"{}"


@pytest.mark.parametrize("name", ["model-00000.safetensors", "model-123456.safetensors"])
def test_a_file_that_would_overwrite_the_tensors_is_refused(memory_store: ObjectStore, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} in .* would overwrite the tensors; store the file by another name"):
        write(memory_store, builders.tensors(1), {name: b"{}"}, ID)
    assert memory_store.list() == []


def test_a_file_that_is_only_called_like_one_of_tensors_is_stored(memory_store: ObjectStore) -> None:
    contents = write(memory_store, builders.tensors(1), {"model-00000.safetensors.json": b"x"}, ID)
    assert read_files(memory_store, contents) == {"model-00000.safetensors.json": b"x"}


def test_files_beside_the_tensors_are_as_few_and_as_small_as_a_model_has_them(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = stored(memory_store)
    grown = tuple(replace(info, num_bytes=2**26 + 1) if info.name.endswith("config.json") else info for info in listed.files)
    with pytest.raises(
        CorruptError, match=r"config\.json' with 67,108,865 bytes; a file without tensors has at most 67,108,864$"
    ):
        read_files(memory_store, replace(listed, files=grown))
    many = tuple(replace(listed.files[-1], name=f"{ID}.{number}.txt") for number in range(65))
    with pytest.raises(CorruptError, match=r"lists 66 files beside its tensors; at most 64 are read"):
        read_files(memory_store, replace(listed, files=listed.files[:2] + many))
    monkeypatch.setattr(tensor_folders, "OTHER_FILE_BYTES_MAX", 3)
    before = memory_store.list()
    with pytest.raises(ConfigError, match=r"2 files, of which tokenizer\.json have more than 3 bytes, cannot be stored"):
        write(memory_store, builders.tensors(1), {"config.json": b"{ }", "tokenizer.json": b"{  }"}, "1" * 32)
    assert memory_store.list() == before
