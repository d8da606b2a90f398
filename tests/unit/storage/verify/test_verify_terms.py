"""A run whose configuration is no configuration cannot be verified, and a person is told so."""

import pytest

from storage.errors import ConfigError
from storage.records.control import Stop
from storage.records.types import Json
from storage.run.runs import create_run, request_stop
from storage.store.object_store import ObjectStore
from storage.verify.verify import verify

GOOD: Json = {"steps": 2, "policies": {"solver": {"batch_size": 4}}, "data": {"max_staleness": 8}}


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "2"},
        {"steps": None},
        {"data": []},
        {"data": {"max_staleness": True}},
        {"policies": {"solver": None}},
        {"policies": ["solver"]},
        {"policies": {"solver": {"batch_size": [4]}}},
    ],
)
def test_settings_of_another_type_are_told(change: Json, memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "r", {**GOOD, **change})
    request_stop(run, Stop("completed", "", 0.0))
    with pytest.raises(
        ConfigError, match=r"cannot be verified, because the config in its run.json"
    ):
        verify(run)


def test_no_staleness_at_all_is_a_setting_like_another(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "r", {**GOOD, "data": {"max_staleness": 0}})
    assert list(verify(run).policies) == ["solver"]
