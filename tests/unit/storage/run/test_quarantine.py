import pytest

from storage.run.quarantine import is_quarantined, quarantine_object, read_quarantine
from storage.store.object_store import ObjectStore
from tests.support.stores.killed_store import Killed, killed_at

KEY = "shards/00000007.arrow"


def test_the_copy_and_the_reason_are_stored_and_the_original_stays(
    memory_store: ObjectStore,
) -> None:
    memory_store.create("shards/00000007.arrow", b"garbage")
    quarantine_object(memory_store, "shards/00000007.arrow", "is no readable Arrow file")
    assert memory_store.get("shards/00000007.arrow") == b"garbage"
    assert memory_store.get("quarantine/shards/00000007.arrow") == b"garbage"
    assert read_quarantine(memory_store) == {"shards/00000007.arrow": "is no readable Arrow file"}


def test_an_existing_reason_stays(memory_store: ObjectStore) -> None:
    memory_store.create("shards/00000007.arrow", b"garbage")
    quarantine_object(memory_store, "shards/00000007.arrow", "first")
    quarantine_object(memory_store, "shards/00000007.arrow", "second")
    assert read_quarantine(memory_store) == {"shards/00000007.arrow": "first"}


def test_json_objects_can_be_quarantined_too(memory_store: ObjectStore) -> None:
    memory_store.create("orders/00000001.json", b"{")
    memory_store.create("leases/00000001.0000.json", b'{"format": 1, "key": "a", "reason": "b"}')
    quarantine_object(memory_store, "orders/00000001.json", "is not JSON")
    quarantine_object(memory_store, "leases/00000001.0000.json", "odd")
    assert read_quarantine(memory_store) == {
        "orders/00000001.json": "is not JSON",
        "leases/00000001.0000.json": "odd",
    }


def test_a_vanished_object_has_a_reason_in_quarantine_and_no_copy(
    memory_store: ObjectStore,
) -> None:
    quarantine_object(memory_store, "shards/00000007.arrow", "vanished")
    assert read_quarantine(memory_store) == {"shards/00000007.arrow": "vanished"}
    assert not memory_store.exists("quarantine/shards/00000007.arrow")


def test_an_empty_quarantine_is_empty(memory_store: ObjectStore) -> None:
    assert read_quarantine(memory_store) == {}


def test_the_copy_is_created_before_the_reason(
    memory_store: ObjectStore,
) -> None:
    memory_store.create(KEY, b"garbage")
    dying, backend = killed_at(memory_store, 2)
    with pytest.raises(Killed):
        quarantine_object(dying, KEY, "is no readable Arrow file")
    assert backend.changes == [f"create quarantine/{KEY}", f"create quarantine/{KEY}.json"]
    assert memory_store.get(f"quarantine/{KEY}") == b"garbage"
    assert read_quarantine(memory_store) == {}
    quarantine_object(memory_store, KEY, "again")
    assert read_quarantine(memory_store) == {KEY: "again"}


def test_an_existing_copy_stays(memory_store: ObjectStore) -> None:
    memory_store.create(KEY, b"garbage")
    quarantine_object(memory_store, KEY, "first")
    memory_store.put(KEY, b"other garbage")
    quarantine_object(memory_store, KEY, "second")
    assert memory_store.get(f"quarantine/{KEY}") == b"garbage"


def test_a_reason_at_the_key_of_another_object_is_ignored(
    memory_store: ObjectStore,
) -> None:
    memory_store.create(KEY, b"garbage")
    quarantine_object(memory_store, KEY, "unreadable")
    misplaced = memory_store.get(f"quarantine/{KEY}.json")
    memory_store.create("quarantine/shards/00000008.arrow.json", misplaced)
    memory_store.create("quarantine/shards/00000009.arrow.json", b"{")
    assert read_quarantine(memory_store) == {KEY: "unreadable"}


def test_an_object_is_quarantined_as_soon_as_its_reason_is_stored(
    memory_store: ObjectStore,
) -> None:
    memory_store.create(f"quarantine/{KEY}", b"the copy")
    assert not is_quarantined(memory_store, KEY)
    quarantine_object(memory_store, KEY, "torn")
    assert is_quarantined(memory_store, KEY)
    assert not is_quarantined(memory_store, "shards/00000008.arrow")
