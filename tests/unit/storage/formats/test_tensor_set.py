from collections import UserDict
from collections.abc import Callable, ItemsView
from dataclasses import replace

import numpy as np
import pytest

from storage.errors import ConfigError, CorruptError
from storage.formats import tensor_set
from storage.formats.tensor_set import Contents, check, read_extra_files, read_tensors, write
from storage.records.weights import HostTensor, TensorInfo
from storage.store.object_store import ObjectStore
from tests.support.runs import builders
from tests.support.stores.damaging_store import damages_first_reads

ID = "0" * 32


def stored(store: ObjectStore) -> Contents:
    return write(
        store, builders.tensors(1), {"config.json": b"{}", "tokenizer.model": b"\x00\x01"}, ID
    )


def test_tensors_and_files_are_read_back(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    assert {info.name for info in contents.files} == {
        f"{ID}.model-00000.safetensors",
        f"{ID}.config.json",
        f"{ID}.tokenizer.model",
    }
    loaded = read_tensors(memory_store, contents)
    assert loaded["model.weight"].bits.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert read_extra_files(memory_store, contents) == {
        "config.json": b"{}",
        "tokenizer.model": b"\x00\x01",
    }


def test_many_tensors_are_spread_over_files(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_set, "FILE_BYTES_MAX", 12)
    contents = write(memory_store, builders.tensors(1), {}, ID)
    assert contents.tensors["model.scale"].file == f"{ID}.model-00000.safetensors"
    assert contents.tensors["model.weight"].file == f"{ID}.model-00001.safetensors"
    assert read_tensors(memory_store, contents).keys() == {"model.scale", "model.weight"}


def test_the_tensors_are_looked_through_once_for_all_files(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counted(UserDict[str, TensorInfo]):
        looks = 0

        def items(self) -> ItemsView[str, TensorInfo]:
            Counted.looks += 1
            return super().items()

    monkeypatch.setattr(tensor_set, "FILE_BYTES_MAX", 1)
    tensors = {str(number): builders.tensors(1)["model.scale"] for number in range(20)}
    contents = write(memory_store, tensors, {}, ID)
    assert len(contents.files) == 20
    read_tensors(memory_store, replace(contents, tensors=Counted(contents.tensors)))
    assert Counted.looks == 1


def test_a_folder_without_tensors_is_valid(memory_store: ObjectStore) -> None:
    assert read_tensors(memory_store, write(memory_store, {}, {}, ID)) == {}


def flipped(body: bytes, place: int) -> bytes:
    return body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]


def test_every_single_flipped_bit_of_a_tensor_file_is_detected(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    key = f"{ID}.model-00000.safetensors"
    body = memory_store.get(key)
    for place in range(len(body)):
        memory_store.put(key, flipped(body, place))
        with pytest.raises(CorruptError, match="is not what its manifest lists"):
            read_tensors(memory_store, contents)


READS = pytest.mark.parametrize("read", [read_tensors, check])


def test_a_changed_file_is_detected(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    memory_store.put(f"{ID}.config.json", b"[]")
    with pytest.raises(CorruptError, match=rf"{ID}\.config\.json is not what its manifest lists"):
        read_extra_files(memory_store, contents)


@READS
def test_a_missing_file_is_corrupt_and_named(
    memory_store: ObjectStore, read: Callable[[ObjectStore, Contents], object]
) -> None:
    contents = stored(memory_store)
    memory_store.delete(f"{ID}.model-00000.safetensors")
    with pytest.raises(
        CorruptError, match=r"model-00000\.safetensors is missing, though its manifest lists it"
    ):
        read(memory_store, contents)


def test_a_file_that_was_replaced_by_another_valid_one_is_detected(
    memory_store: ObjectStore,
) -> None:
    contents = stored(memory_store)
    other = write(memory_store, builders.tensors(2), {}, "f" * 32)
    memory_store.put(f"{ID}.model-00000.safetensors", memory_store.get(other.files[0].name))
    with pytest.raises(CorruptError, match="is not what its manifest lists"):
        read_tensors(memory_store, contents)


@READS
def test_a_wrong_tensor_digest_is_detected_even_with_a_correct_file_digest(
    memory_store: ObjectStore, read: Callable[[ObjectStore, Contents], object]
) -> None:
    contents = stored(memory_store)
    other = write(memory_store, builders.tensors(2), {}, "f" * 32)
    false = replace(contents.tensors["model.scale"], digest=other.tensors["model.scale"].digest)
    swapped = {**contents.tensors, "model.scale": false}
    with pytest.raises(
        CorruptError, match=r"the tensor model\.scale in .* is not the one its manifest lists"
    ):
        read(memory_store, Contents(swapped, contents.files))


def test_a_file_that_arrives_damaged_once_is_fetched_again(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    assert (
        read_tensors(damages_first_reads(memory_store), contents)["model.scale"].bits.tolist() == 1
    )
    assert read_extra_files(damages_first_reads(memory_store), contents)["config.json"] == b"{}"


@pytest.mark.parametrize("name", ["model-00000.safetensors", "model-123456.safetensors"])
def test_a_file_that_would_overwrite_the_tensors_is_refused(
    memory_store: ObjectStore, name: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{name} in .* would overwrite the tensors; store the file by another name",
    ):
        write(memory_store, builders.tensors(1), {name: b"{}"}, ID)
    assert memory_store.list() == []


def test_a_file_with_a_name_similar_to_a_tensor_file_is_stored(
    memory_store: ObjectStore,
) -> None:
    contents = write(memory_store, builders.tensors(1), {"model-00000.safetensors.json": b"x"}, ID)
    assert read_extra_files(memory_store, contents) == {"model-00000.safetensors.json": b"x"}


def test_the_number_and_the_size_of_extra_files_are_limited(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = stored(memory_store)
    grown = tuple(
        replace(info, num_bytes=2**26 + 1) if info.name.endswith("config.json") else info
        for info in listed.files
    )
    with pytest.raises(
        CorruptError,
        match=r"config\.json' with 67,108,865 bytes; a file without tensors has at most 67,108,864$",
    ):
        read_extra_files(memory_store, replace(listed, files=grown))
    many = tuple(replace(listed.files[-1], name=f"{ID}.{number}.txt") for number in range(65))
    with pytest.raises(
        CorruptError, match=r"lists 66 files beside its tensors; at most 64 are read"
    ):
        read_extra_files(memory_store, replace(listed, files=listed.files[:2] + many))
    monkeypatch.setattr(tensor_set, "EXTRA_FILE_BYTES_MAX", 3)
    before = memory_store.list()
    with pytest.raises(
        ConfigError,
        match=r"2 files, of which tokenizer\.json have more than 3 bytes, cannot be stored",
    ):
        write(
            memory_store,
            builders.tensors(1),
            {"config.json": b"{ }", "tokenizer.json": b"{  }"},
            "1" * 32,
        )
    assert memory_store.list() == before


def of_bytes(**sizes: int) -> dict[str, HostTensor]:
    return {
        name: HostTensor("U8", (size,), np.arange(size, dtype=np.uint8))
        for name, size in sizes.items()
    }


@pytest.mark.parametrize(
    ("memory_bytes", "places"), [(48, [0, 0, 1, 1]), (47, [0, 1, 2, 2]), (31, [0, 1, 2, 3])]
)
def test_tensors_share_a_file_up_to_its_size_limit(
    memory_store: ObjectStore, memory_bytes: int, places: list[int]
) -> None:
    """In the order of their names: 4 and 8 bytes fit 12, 4 and 4 fit 11, and nothing fits beside 4
    into 7.
    """
    tensors = of_bytes(d=4, c=4, b=8, a=4)
    contents = write(memory_store, tensors, {}, ID, memory_bytes=memory_bytes)
    assert [len(memory_store.get(file.name)) for file in contents.files] == [
        file.num_bytes for file in contents.files
    ]
    assert {name: info.file for name, info in contents.tensors.items()} == {
        name: contents.files[place].name for name, place in zip("abcd", places, strict=True)
    }
    assert len(contents.files) == places[-1] + 1
    assert {
        name: item.bits.tolist() for name, item in read_tensors(memory_store, contents).items()
    } == {name: item.bits.tolist() for name, item in tensors.items()}


def test_a_tensor_file_that_the_manifest_does_not_list_is_named(memory_store: ObjectStore) -> None:
    contents = stored(memory_store)
    with pytest.raises(
        CorruptError,
        match=rf"/manifest\.json does not list its tensor files {ID}\.model-00000\.safetensors",
    ):
        read_tensors(memory_store, Contents(contents.tensors, contents.files[1:]))


def test_a_file_with_other_tensors_than_the_manifest_lists_for_it_is_refused(
    memory_store: ObjectStore,
) -> None:
    contents = write(memory_store, of_bytes(a=4, b=4), {}, ID)
    less = {"a": contents.tensors["a"]}
    more = {**contents.tensors, "c": contents.tensors["a"]}
    for listed, name in ((less, "b"), (more, "c")):
        with pytest.raises(
            CorruptError, match=f"holds other tensors than its manifest lists: {name}$"
        ):
            read_tensors(memory_store, Contents(listed, contents.files))


def test_a_tensor_with_another_dtype_or_shape_than_in_the_manifest_is_rejected(
    memory_store: ObjectStore,
) -> None:
    contents = write(memory_store, of_bytes(a=4, b=4), {}, ID)
    for changed in ({"dtype": "I8"}, {"shape": (2, 2)}):
        listed = {**contents.tensors, "b": replace(contents.tensors["b"], **changed)}
        with pytest.raises(
            CorruptError, match=r"the tensor b in .* is not the one its manifest lists"
        ):
            read_tensors(memory_store, Contents(listed, contents.files))
