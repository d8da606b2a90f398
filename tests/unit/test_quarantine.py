from storage.objects import ObjectStore
from storage.quarantine import quarantine, quarantined


def test_the_copy_and_the_reason_stand_and_the_original_stays(memory_store: ObjectStore) -> None:
    memory_store.create("shards/00000007.arrow", b"garbage")
    quarantine(memory_store, "shards/00000007.arrow", "is no readable Arrow file")
    assert memory_store.get("shards/00000007.arrow") == b"garbage"
    assert memory_store.get("quarantine/shards/00000007.arrow") == b"garbage"
    assert quarantined(memory_store) == {"shards/00000007.arrow": "is no readable Arrow file"}


def test_the_first_reason_stands(memory_store: ObjectStore) -> None:
    memory_store.create("shards/00000007.arrow", b"garbage")
    quarantine(memory_store, "shards/00000007.arrow", "first")
    quarantine(memory_store, "shards/00000007.arrow", "second")
    assert quarantined(memory_store) == {"shards/00000007.arrow": "first"}


def test_json_objects_can_be_quarantined_too(memory_store: ObjectStore) -> None:
    memory_store.create("orders/00000001.json", b"{")
    memory_store.create("leases/00000001.0000.json", b'{"format": 1, "key": "a", "reason": "b"}')
    quarantine(memory_store, "orders/00000001.json", "is not JSON")
    quarantine(memory_store, "leases/00000001.0000.json", "odd")
    assert quarantined(memory_store) == {"orders/00000001.json": "is not JSON", "leases/00000001.0000.json": "odd"}


def test_what_vanished_leaves_its_reason(memory_store: ObjectStore) -> None:
    quarantine(memory_store, "shards/00000007.arrow", "vanished")
    assert quarantined(memory_store) == {"shards/00000007.arrow": "vanished"}
    assert not memory_store.exists("quarantine/shards/00000007.arrow")


def test_an_empty_quarantine_is_empty(memory_store: ObjectStore) -> None:
    assert quarantined(memory_store) == {}
