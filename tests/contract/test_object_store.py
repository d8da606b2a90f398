"""The contract of every object store: each test runs on memory, a folder and S3."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any
from uuid import uuid4

import pytest

from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.store import backend, object_store, s3
from storage.store.object_store import ObjectStore, check_store, open_store
from storage.store.s3 import S3Objects
from tests.conftest import BUCKET

RIVALS = 32


def together(calls: list[Callable[[], bool]]) -> list[bool]:
    """Call all functions at the same moment, each on its own thread."""
    gate = Barrier(len(calls))

    def after_gate(call: Callable[[], bool]) -> bool:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(after_gate, calls))


def creates(store: ObjectStore, key: str, body: bytes) -> bool:
    try:
        store.create(key, body)
    except ConflictError:
        return False
    return True


def test_a_created_object_is_read_back(store: ObjectStore) -> None:
    store.create("orders/00000000.json", b'{"a": 1}\x00\xff')
    assert store.get("orders/00000000.json") == b'{"a": 1}\x00\xff'
    assert store.exists("orders/00000000.json")


def test_an_empty_object_is_read_back_empty(store: ObjectStore) -> None:
    store.create("empty", b"")
    assert store.get("empty") == b""
    with pytest.raises(ConflictError):
        store.create("empty", b"x")
    assert store.get("empty") == b""


def test_a_second_create_with_another_body_fails_and_changes_nothing(store: ObjectStore) -> None:
    store.create("run.json", b"first")
    with pytest.raises(ConflictError, match=r"run\.json exists with another body"):
        store.create("run.json", b"second")
    assert store.get("run.json") == b"first"


def test_creating_the_same_bytes_again_succeeds(store: ObjectStore) -> None:
    store.create("run.json", b"same")
    store.create("run.json", b"same")
    assert store.get("run.json") == b"same"


def test_exactly_one_of_many_writers_creates_the_object(store: ObjectStore) -> None:
    for round in range(5):
        key = f"shards/{round:08d}.arrow"
        bodies = [f"writer {competitor}".encode() * 1000 for competitor in range(RIVALS)]
        won = together([partial(creates, store, key, body) for body in bodies])
        assert won.count(True) == 1
        assert store.get(key) == bodies[won.index(True)]


def test_readers_during_a_race_get_no_object_or_the_whole_object(store: ObjectStore) -> None:
    size = 200_000

    def reads_whole() -> bool:
        for _ in range(30):
            try:
                body = store.get("race")
            except NotFoundError:
                continue
            if len(body) != size or len(set(body)) != 1:
                return False
        return True

    writers = [
        partial(creates, store, "race", bytes([competitor]) * size) for competitor in range(4)
    ]
    results = together([*writers, *[reads_whole] * 4])
    assert results[:4].count(True) == 1
    assert results[4:] == [True] * 4


def test_put_replaces_an_object(store: ObjectStore) -> None:
    store.put("heartbeats/rollout/a.json", b"1")
    store.put("heartbeats/rollout/a.json", b"22")
    assert store.get("heartbeats/rollout/a.json") == b"22"


def test_concurrent_puts_leave_one_whole_body(store: ObjectStore) -> None:
    bodies = [bytes([competitor]) * 100_000 for competitor in range(8)]

    def put(body: bytes) -> bool:
        store.put("hint", body)
        return True

    together([partial(put, body) for body in bodies])
    assert store.get("hint") in bodies


def test_reading_a_missing_object_raises_not_found(store: ObjectStore) -> None:
    assert not store.exists("orders/00000000.json")
    with pytest.raises(NotFoundError, match=r"orders/00000000\.json"):
        store.get("orders/00000000.json")


def test_reading_a_folder_raises_not_found(store: ObjectStore) -> None:
    store.create("orders/00000000.json", b"x")
    assert not store.exists("orders")
    with pytest.raises(NotFoundError):
        store.get("orders")


def test_list_is_sorted_and_stays_within_the_folder(store: ObjectStore) -> None:
    for key in ("b/2", "b/10", "b/1/deep", "bb/1", "a", "b/1.json"):
        store.create(key, key.encode())
    assert store.list("b") == ["b/1.json", "b/1/deep", "b/10", "b/2"]
    assert store.list("b/") == store.list("b")
    assert store.list() == ["a", "b/1.json", "b/1/deep", "b/10", "b/2", "bb/1"]
    assert store.list("absent") == []


def test_list_starts_after_a_key(store: ObjectStore) -> None:
    for number in range(5):
        store.create(f"orders/{number:08d}.json", b"x")
    assert store.list("orders", start_after="orders/00000002.json") == [
        "orders/00000003.json",
        "orders/00000004.json",
    ]
    assert store.list("orders", start_after="orders/00000004.json") == []
    assert store.list("orders", start_after="a")[0] == "orders/00000000.json"


def test_list_reads_several_pages(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PAGE_KEYS_MAX", 5)
    keys = [f"many/{number:02d}/x" for number in range(12)]
    for key in keys:
        store.put(key, b"")
    assert store.list("many") == keys
    assert store.list("many", start_after=keys[1]) == keys[2:]
    assert store.folders("many") == [f"{number:02d}" for number in range(12)]


def test_list_includes_the_latest_objects_of_other_writers(store: ObjectStore) -> None:
    assert store.list("orders") == []
    store.create("orders/00000000.json", b"x")
    assert store.list("orders") == ["orders/00000000.json"]
    store.delete("orders/00000000.json")
    assert store.list("orders") == []


def test_folders_are_listed_without_their_contents(store: ObjectStore) -> None:
    for key in (
        "runs/b/run.json",
        "runs/a/run.json",
        "runs/a/orders/1",
        "runs/loose",
        "models/m/x",
    ):
        store.create(key, b"x")
    assert store.folders("runs") == ["a", "b"]
    assert store.folders() == ["models", "runs"]
    assert store.folders("absent") == []


def test_delete_can_be_repeated(store: ObjectStore) -> None:
    store.create("stop.json", b"x")
    store.delete("stop.json")
    store.delete("stop.json")
    store.delete("never/was")
    assert not store.exists("stop.json")


def test_a_deleted_key_can_be_created_again(store: ObjectStore) -> None:
    store.create("stop.json", b"1")
    store.delete("stop.json")
    store.create("stop.json", b"2")
    assert store.get("stop.json") == b"2"


def test_a_sub_store_reads_and_writes_below_its_folder(store: ObjectStore) -> None:
    run = store.sub("runs/a")
    run.sub("weights").create("solver/manifest.json", b"x")
    assert store.get("runs/a/weights/solver/manifest.json") == b"x"
    assert run.list() == ["weights/solver/manifest.json"]
    assert run.list("weights", start_after="weights/solver/a") == ["weights/solver/manifest.json"]
    assert run.folders("weights") == ["solver"]
    assert run.url == f"{store.url}/runs/a"


def test_keys_that_could_leave_the_store_or_are_hidden_are_refused(store: ObjectStore) -> None:
    for key in ("", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".tmp-1", "a/.tmp-x", "a\0b"):
        with pytest.raises(ConfigError, match="cannot be a key"):
            store.create(key, b"x")
    assert store.list() == []


def test_keys_with_unusual_legal_characters_are_accepted(store: ObjectStore) -> None:
    for key in ("us east/ä ö%20.json", "a+b=c&d?e#f", "x.y.z/~_-"):
        store.create(key, key.encode())
        assert store.get(key) == key.encode()
        assert key in store.list()


def test_check_accepts_the_store_and_leaves_no_object(store: ObjectStore) -> None:
    check_store(store)
    assert store.list() == []


@pytest.mark.s3
def test_a_url_selects_its_own_endpoint(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    run = open_store(f"s3://{BUCKET}/{uuid4().hex}?endpoint={s3_server}").sub("runs/a")
    run.create("weights/manifest.json", b"x")
    assert open_store(run.address).list() == ["weights/manifest.json"]
    with pytest.raises(NotFoundError, match=rf"{run.url}/absent at {s3_server}$"):
        run.get("absent")
    with pytest.raises(
        ConfigError, match=f"the bucket no-such-bucket at {s3_server} does not exist"
    ):
        open_store(f"s3://no-such-bucket?endpoint={s3_server}").get("a")


@pytest.mark.s3
def test_a_profile_overrides_the_environment(
    s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store with its own keys, region and endpoint; the environment has those of another store."""
    (tmp_path / "config").write_text(
        f"[profile eu]\nregion = eu-west-1\nendpoint_url = {s3_server}\n"
    )
    (tmp_path / "credentials").write_text(
        "[eu]\naws_access_key_id = key-of-eu\naws_secret_access_key = secret-of-eu\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    seen: list[str] = []

    def note(request: Any, **named: Any) -> None:
        seen.append(request.headers["Authorization"].decode())

    store = open_store(f"s3://{BUCKET}/{uuid4().hex}?profile=eu")
    assert isinstance(store.backend, S3Objects)
    store.backend._fs().connect().meta.events.register("before-send.s3", note)
    store.create("a", b"x")
    assert "Credential=key-of-eu/" in seen[0]
    assert "/eu-west-1/s3/" in seen[0]


@pytest.mark.s3
def test_an_unknown_profile_is_a_config_error(
    s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(
        ConfigError,
        match=r"config profile \(eu\) could not be found; correct the profile eu in ~/\.aws",
    ):
        open_store(f"s3://{BUCKET}/x?profile=eu").get("a")


def test_a_large_object_is_read_completely_in_parts(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        object_store, "PART_BYTES_MIN", 1000
    )  # lowers the limit, so that a small object counts as a large one
    body = bytes(range(256)) * 1000
    store.put("large", body)
    parts: list[tuple[int, int]] = []
    read_part = store.backend.read_part

    def told_of(key: str, start: int, end: int) -> bytes:
        parts.append((start, end))
        return read_part(key, start, end)

    monkeypatch.setattr(store.backend, "read_part", told_of)
    assert store.get("large", len(body)) == body
    starts, ends = zip(*sorted(parts), strict=True)
    assert len(parts) == object_store.PARTS_MAX
    assert (starts[0], ends[-1], starts[1:]) == (0, len(body), ends[:-1])  # each byte is read once
    parts.clear()
    assert store.get("large") == store.get("large", 1000) == body
    assert parts == []  # unknown size, or small: one request
    for told in (len(body), len(body) - 1, 1001, 1000, 1):
        assert store.get("large", told)[:told] == body[:told]
    assert (
        store.get("large", len(body) + 70_000) == body
    )  # a truncated object is returned short; its digest detects that
    with pytest.raises(NotFoundError):
        store.get("not there", len(body))


def test_an_object_above_its_size_limit_is_neither_written_nor_read(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("stop.json", "shards/0.arrow"):
        store.create(key, b"12345")
    monkeypatch.setattr(backend, "BYTES_MAX", 5)
    monkeypatch.setattr(backend, "ARROW_BYTES_MAX", 4)
    assert store.get("stop.json") == b"12345"
    with pytest.raises(
        CorruptError, match=r"shards/0\.arrow.* has 5 bytes; an object of its kind has at most 4$"
    ):
        store.get("shards/0.arrow")
    with pytest.raises(
        ConfigError, match=r"shards/1\.arrow has 5 bytes; .* has at most 4, or readers reject it"
    ):
        store.create("shards/1.arrow", b"54321")
    with pytest.raises(ConflictError):
        store.create("shards/0.arrow", b"1234")
    assert store.list("shards") == ["shards/0.arrow"]
