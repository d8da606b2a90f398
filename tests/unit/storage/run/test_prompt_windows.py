import hashlib
import random
from dataclasses import replace

import pyarrow as pa
import pytest

from storage import layout
from storage.errors import ConfigError, CorruptError
from storage.formats import arrow_files
from storage.formats.safetensors import file_digest
from storage.records.rollouts import Prompt
from storage.records.windows import PromptWindow
from storage.run import prompt_windows, runs
from storage.store.object_store import ObjectStore
from tests.support.stores.resealed import arrow_file

PROMPTS = [
    Prompt("s3://b/a.jsonl/0", {"question": "1+1", "answer": "2", "more": {"n": [1, 2.5, None]}}),
    Prompt("s3://b/a.jsonl/7", {"question": "2+2", "answer": "4", "big": 2**100}),
]


def window(digest: str, rows: int = 2) -> PromptWindow:
    return PromptWindow(
        since_s=0.0, until_s=None, date_column=None, files=(), rows=rows, digest=digest
    )


def frozen(run: ObjectStore) -> tuple[PromptWindow, str]:
    found = window(prompt_windows.create(run, PROMPTS))
    return found, layout.prompts(found.digest)


def test_prompts_are_read_back_in_their_order(store: ObjectStore) -> None:
    found, key = frozen(store)
    read = prompt_windows.read(store, found)
    assert [read.prompt(index) for index in range(2)] == PROMPTS
    assert read.key == key


def test_an_object_is_named_after_the_digest_of_its_bytes(memory_store: ObjectStore) -> None:
    found, key = frozen(memory_store)
    digits = hashlib.sha256(memory_store.get(key)).hexdigest()
    assert (found.digest, key) == (f"sha256:{digits}", f"prompts/{digits}.arrow")


def test_the_same_prompts_are_one_object_and_others_another(memory_store: ObjectStore) -> None:
    first = prompt_windows.create(memory_store, PROMPTS)
    assert prompt_windows.create(memory_store, PROMPTS) == first
    assert len(memory_store.list()) == 1
    assert prompt_windows.create(memory_store, PROMPTS[::-1]) != first
    assert len(memory_store.list()) == 2


def test_a_damaged_object_is_not_taken_for_that_of_the_same_prompts(
    memory_store: ObjectStore,
) -> None:
    _, key = frozen(memory_store)
    memory_store.put(key, b"torn")
    with pytest.raises(CorruptError, match=rf"{key} is damaged: .*delete it"):
        prompt_windows.create(memory_store, PROMPTS)


def test_a_missing_or_changed_object_is_named_by_its_key(memory_store: ObjectStore) -> None:
    found, key = frozen(memory_store)
    other = layout.prompts(prompt_windows.create(memory_store, PROMPTS[:1]))
    memory_store.put(key, memory_store.get(other))  # valid, and another digest
    with pytest.raises(CorruptError, match=rf"{key} does not have the digest sha256:"):
        prompt_windows.read(memory_store, found)
    memory_store.delete(key)
    with pytest.raises(CorruptError, match=rf"{key} is missing: .*put it back"):
        prompt_windows.read(memory_store, found)


def test_another_number_of_rows_than_the_run_names_is_refused(memory_store: ObjectStore) -> None:
    found, key = frozen(memory_store)
    with pytest.raises(CorruptError, match=rf"{key} has 2 rows; run.json says 3"):
        prompt_windows.read(memory_store, replace(found, rows=3))
    empty = prompt_windows.create(memory_store, [])
    with pytest.raises(CorruptError, match="has 0 rows"):
        prompt_windows.read(memory_store, window(empty, rows=0))


def stored(run: ObjectStore, body: bytes) -> PromptWindow:
    """A window whose object has these bytes, with their digest."""
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    run.create(layout.prompts(digest), body)
    return window(digest, rows=1)


def test_an_object_of_another_kind_is_refused_with_its_key(memory_store: ObjectStore) -> None:
    columns = {"id": ["a"], "fields": ["{}"]}
    body = arrow_files.encode(prompt_windows.SCHEMA, columns, "shard", {})
    with pytest.raises(
        CorruptError, match=r"prompts/[0-9a-f]{64}\.arrow: a prompts file of format"
    ):
        prompt_windows.read(memory_store, stored(memory_store, body))


def test_fields_that_are_no_object_are_refused_with_key_and_row(memory_store: ObjectStore) -> None:
    body = arrow_files.encode(
        prompt_windows.SCHEMA, {"id": ["a"], "fields": ["[1]"]}, prompt_windows.KIND, {}
    )
    read = prompt_windows.read(memory_store, stored(memory_store, body))
    with pytest.raises(CorruptError, match=r"prompts/[0-9a-f]{64}\.arrow, row 0, is a JSON list"):
        read.prompt(0)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ('{"x":NaN}', "its 'x' is nan"),
        ('{"x":1e999}', "its 'x' is inf"),
        ('{"x":' + "[" * 100 + "]" * 100 + "}", "is nested deeper than 32 levels"),
    ],
)
def test_fields_that_cannot_be_stored_again_are_refused_with_key_and_row(
    fields: str, fault: str
) -> None:
    frozen = prompt_windows.FrozenPrompts("prompts/a.arrow", ["p/0", "p/1"], ["{}", fields])
    assert frozen.prompt(0).fields == {}
    with pytest.raises(CorruptError, match=f"^prompts/a.arrow, row 1, cannot be .*{fault}"):
        frozen.prompt(1)


def test_too_many_rows_or_bytes_are_refused_before_they_are_stored(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(len(each.id) for each in PROMPTS)
    size += sum(len(prompt_windows.dump(each.fields)) for each in PROMPTS)
    monkeypatch.setattr(prompt_windows, "TEXT_BYTES_MAX", size - 1)
    with pytest.raises(ConfigError, match=f"2 rows of {size} bytes are too many .*set limit"):
        prompt_windows.create(memory_store, PROMPTS)
    monkeypatch.setattr(prompt_windows, "TEXT_BYTES_MAX", size)
    monkeypatch.setattr(prompt_windows, "ROWS_MAX", 1)
    with pytest.raises(ConfigError, match="at most 1 rows"):
        prompt_windows.create(memory_store, PROMPTS)
    assert memory_store.list() == []
    monkeypatch.setattr(prompt_windows, "ROWS_MAX", 2)
    prompt_windows.create(memory_store, PROMPTS)


def test_rows_that_share_a_long_text_are_refused_before_they_are_parsed(
    memory_store: ObjectStore,
) -> None:
    """A character beyond the first 65,536 gives each character of a row's text four bytes."""
    num_rows, text = 2**6, '{"question": "\U00020000%s"}' % ("x" * 2**20)
    ids, shared = [str(row) for row in range(num_rows)], pa.array([0] * num_rows, pa.int32())
    columns = [
        pa.array(ids).dictionary_encode(),
        pa.DictionaryArray.from_arrays(shared, pa.array([text])),
    ]
    rows = pa.RecordBatch.from_arrays(columns, schema=prompt_windows.SCHEMA)
    body = arrow_file(prompt_windows.SCHEMA, [rows], prompt_windows.KIND, {})
    found = window(file_digest(body), num_rows)
    memory_store.put(layout.prompts(found.digest), body)
    expected = r"64 rows have 67,1\d\d,\d{3} characters together in [\d,]+ bytes; at most 33,"
    with pytest.raises(CorruptError, match=rf"{layout.prompts(found.digest)}: {expected}"):
        prompt_windows.read(memory_store, found)


def test_rows_with_too_much_text_together_are_neither_read_nor_stored(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt(str(row), {"question": "x" * 81}) for row in range(1000, 1100)]
    digest = prompt_windows.create(memory_store, prompts)  # a hundred characters in each row
    size, found = len(memory_store.get(layout.prompts(digest))), window(digest, len(prompts))
    monkeypatch.setattr(prompt_windows, "TEXT_MIN", 10_000)
    monkeypatch.setattr(prompt_windows, "TEXT_PER_BYTE", 0)
    assert prompt_windows.read(memory_store, found).prompt(99) == prompts[99]
    monkeypatch.setattr(prompt_windows, "TEXT_MIN", 9_999)
    expected = r"100 rows have 10,000 characters together in [\d,]+ bytes; at most 9,999 are read"
    with pytest.raises(CorruptError, match=rf"{layout.prompts(digest)}: {expected}"):
        prompt_windows.read(memory_store, found)
    with pytest.raises(ConfigError, match=rf"{expected}; set limit, or a shorter window"):
        prompt_windows.create(memory_store, prompts)
    monkeypatch.setattr(prompt_windows, "TEXT_PER_BYTE", 10_000 // size + 1)
    assert prompt_windows.create(memory_store, prompts) == digest
    monkeypatch.setattr(prompt_windows, "TEXT_BYTES_MAX", 9_999)
    with pytest.raises(CorruptError, match="at most 9,999 are read"):
        prompt_windows.read(memory_store, found)


@pytest.mark.parametrize(("num_rows", "depth"), [(2**12, 600), (2**16, 38)])
def test_rows_that_share_a_text_of_many_objects_are_refused(
    memory_store: ObjectStore, num_rows: int, depth: int
) -> None:
    """Each of their 2.5 million values is a dictionary of 184 bytes or more."""
    shared = pa.array([0] * num_rows, pa.int32())
    columns = [
        pa.DictionaryArray.from_arrays(shared, pa.array([text]))
        for text in ("one id", '{"a":' * depth + "1" + "}" * depth)
    ]
    rows = pa.RecordBatch.from_arrays(columns, schema=prompt_windows.SCHEMA)
    padding = {"x": random.Random(0).randbytes(num_rows // 16).hex()}
    body = arrow_file(prompt_windows.SCHEMA, [rows], prompt_windows.KIND, padding)
    assert len(body) < 100_000
    found = window(file_digest(body), num_rows)
    memory_store.put(layout.prompts(found.digest), body)
    expected = rf"{num_rows:,} rows have 2,[45]\d\d,\d{{3}} JSON values together in {len(body):,} b"
    with pytest.raises(CorruptError, match=expected):
        prompt_windows.read(memory_store, found)


def test_rows_with_too_many_values_together_are_neither_read_nor_stored(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Commas in strings are no values.
    prompts = [Prompt(str(row), {"question": ",[{" * 90, "x": [0] * 90}) for row in range(40)]
    digest = prompt_windows.create(memory_store, prompts)  # 93 values in each row
    found = window(digest, len(prompts))
    monkeypatch.setattr(prompt_windows, "VALUES_MIN", 3_760)
    monkeypatch.setattr(prompt_windows, "VALUES_PER_BYTE", 0)
    assert prompt_windows.read(memory_store, found).prompt(39) == prompts[39]
    monkeypatch.setattr(prompt_windows, "VALUES_MIN", 3_600)
    expected = r"40 rows have 3,720 JSON values together in [\d,]+ bytes; at most 3,600 are read"
    with pytest.raises(CorruptError, match=rf"{layout.prompts(digest)}: {expected}"):
        prompt_windows.read(memory_store, found)
    with pytest.raises(ConfigError, match=rf"{expected}; set limit, or a shorter window"):
        prompt_windows.create(memory_store, [*prompts])
    monkeypatch.setattr(prompt_windows, "VALUES_PER_BYTE", 4)
    assert prompt_windows.create(memory_store, prompts) == digest


@pytest.mark.parametrize(
    "digest", ["sha256:../../../x", f"sha256:{'A' * 64}", f"md5:{'0' * 64}", f"sha256:{'0' * 63}"]
)
def test_a_run_with_a_digest_that_is_no_part_of_a_key_is_unreadable(
    memory_store: ObjectStore, digest: str
) -> None:
    run = runs.create_run(memory_store, "r", {}, windows={"data.prompts": window(digest)})
    with pytest.raises(CorruptError, match=r"windows.data\.prompts\.digest"):
        runs.read_run(run)
