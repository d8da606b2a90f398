"""The stored usage of a budget is read back as it was written; a damaged one is named."""

import json
from typing import Any

import pytest

from storage import layout
from storage.errors import CorruptError
from storage.records.control import CountedLife, Usage
from storage.run import usage
from storage.store.object_store import ObjectStore
from tests.support.stores.damaging_store import damages_first_reads

USED = Usage(
    limits={"hours": 8.0},
    used={"hours": 2.5, "tokens": 1e9, "cost": 31.25},
    members={"trainer-solver": CountedLife(attempt=1, started_s=5.5, alive_s=60.25)},
)


def test_a_usage_is_read_back_and_overwritten(memory_store: ObjectStore) -> None:
    assert usage.read(memory_store) is None
    usage.write(memory_store, USED)
    assert usage.read(memory_store) == USED
    assert usage.read(damages_first_reads(memory_store)) == USED
    empty = Usage(limits={}, used={})
    usage.write(memory_store, empty)
    assert usage.read(memory_store) == empty


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("limits", "hours"), -1.0),
        (("used", "cost"), "NaN"),
        (("used", "cost"), 2.0**54),
        (("used", "days"), 1.0),
        (("members", "../x"), {"attempt": 0, "started_s": 1.0, "alive_s": 1.0}),
        (("members", "trainer-solver", "attempt"), -1),
        (("members", "trainer-solver", "alive_s"), 1e300),
        (("used",), []),
    ],
)
def test_a_damaged_usage_is_named_with_what_to_do(
    memory_store: ObjectStore, path: tuple[str, ...], value: Any
) -> None:
    usage.write(memory_store, USED)
    fields = json.loads(memory_store.get(layout.USAGE))
    section = fields
    for part in path[:-1]:
        section = section[part]
    section[path[-1]] = value
    memory_store.put(layout.USAGE, json.dumps(fields).encode())
    with pytest.raises(CorruptError) as caught:
        usage.read(memory_store)
    assert "usage.json is not a Usage: " in str(caught.value)
    assert "/usage.json back from a copy, or delete it: " in str(caught.value)


def test_a_usage_that_is_too_large_is_refused(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage.write(memory_store, USED)
    num_bytes = len(memory_store.get(layout.USAGE))
    monkeypatch.setattr(usage, "BYTES_MAX", num_bytes)
    assert usage.read(memory_store) == USED
    monkeypatch.setattr(usage, "BYTES_MAX", num_bytes - 1)
    with pytest.raises(CorruptError, match=rf"usage\.json has {num_bytes} bytes; it has at most"):
        usage.read(memory_store)
