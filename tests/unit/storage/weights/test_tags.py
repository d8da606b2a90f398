"""Tags: names for versions, created once, which gc respects."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from storage import layout
from storage.errors import ConfigError, CorruptError
from storage.formats.json_objects import seal
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore
from storage.weights import publisher, reader, retention, tags
from storage.weights.manifests import LoadedWeights
from storage.weights.retention import Retention
from storage.weights.tags import Tag
from tests.support.stores.hiding_store import hides

NOTHING_ELSE = Retention(last=1, every=0, grace_s=0.0)
NOW_S = 4e9


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    """Versions 0 to 5; 0 and 3 are anchors."""
    loaded: LoadedWeights | None = None
    for version in range(6):
        base = loaded if version % 3 else None
        loaded = LoadedWeights(
            publisher.publish(memory_store, "solver", version, model(version), base=base),
            model(version),
        )
    return memory_store


def model(version: int) -> Mapping[str, HostTensor]:
    bits = np.arange(4000, dtype=np.uint16)
    bits[: 3 * version] += 1
    return {"w": HostTensor("BF16", (4000,), bits)}


def test_a_tag_is_read_back_and_can_be_removed(run: ObjectStore) -> None:
    given = tags.create(run, "best", "solver", 4)
    assert tags.create(run, "best", "solver", 4) == given
    same = tags.create(run, "same", "solver", 4)
    assert tags.require_all(run) == [given, same]
    assert tags.delete(run, "best") == given
    assert [tag.name for tag in tags.require_all(run)] == ["same"]


def test_a_tag_belongs_to_one_version(run: ObjectStore) -> None:
    tags.create(run, "best", "solver", 4)
    with pytest.raises(
        ConfigError,
        match="the name best belongs to solver@4; choose another, or remove it first",
    ):
        tags.create(run, "best", "solver", 5)
    assert [tag.version for tag in tags.require_all(run)] == [4]


@pytest.mark.parametrize(
    ("name", "policy", "version", "words"),
    [
        ("a/b", "solver", 4, "'a/b' cannot name"),
        ("best", "solver", 6, "has no version 6 of 'solver'; `astraflow weights` lists"),
        ("best", "prover", 4, "has no version 4 of 'prover'"),
        ("best", "../x", 4, "'../x' cannot name"),
        ("40", "solver", 4, "'40' would be taken for a version"),
    ],
)
def test_an_invalid_tag_request_is_named(
    run: ObjectStore, name: str, policy: str, version: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        tags.create(run, name, policy, version)
    assert tags.require_all(run) == []


def test_removing_an_unknown_tag_lists_the_existing_tags(run: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="no version is tagged 'best'; tags of the run: none"):
        tags.delete(run, "best")
    tags.create(run, "first", "solver", 0)
    with pytest.raises(ConfigError, match="tags of the run: first"):
        tags.delete(run, "best")


@pytest.mark.parametrize(
    "word",
    ["solver", "solver@", "@4", "solver@4x", "solver@-1", "solver@٤", "solver@" + "9" * 5000],
)
def test_an_invalid_version_name_is_reported(word: str) -> None:
    with pytest.raises(ConfigError, match="names no version; write POLICY@VERSION"):
        tags.parse(word)


def test_a_tagged_version_and_its_update_path_are_kept(run: ObjectStore) -> None:
    assert sorted(retention.plan(run, "solver", NOTHING_ELSE, NOW_S).kept) == [0, 3, 4, 5]
    tags.create(run, "good", "solver", 2)
    planned = retention.plan(run, "solver", NOTHING_ELSE, NOW_S)
    assert planned.kept[2] == "tagged good"
    assert planned.kept[1] == "leads to version 2"
    assert planned.retired == {}


def test_a_retired_version_cannot_be_tagged(run: ObjectStore) -> None:
    retention.retire(run, retention.plan(run, "solver", NOTHING_ELSE, NOW_S))
    with pytest.raises(ConfigError, match="the data of version 2 of solver was retired"):
        tags.create(run, "good", "solver", 2)
    assert tags.require_all(run) == []


def test_a_tag_created_after_the_plan_stops_gc_before_data_is_deleted(
    run: ObjectStore,
) -> None:
    planned = retention.plan(run, "solver", NOTHING_ELSE, NOW_S)
    tags.create(run, "good", "solver", 2)
    with pytest.raises(
        ConfigError, match="solver@2 was tagged good while this was planned; run gc again"
    ):
        retention.retire(run, planned)
    assert weights_digest(reader.fetch(run, "solver", 2)) == weights_digest(model(2))
    assert tags.create(run, "good", "solver", 2) == tags.read(run, "good"), (
        "what was begun takes no tag away"
    )
    again = retention.plan(run, "solver", NOTHING_ELSE, NOW_S)
    assert again.returned == (1, 2)
    retention.retire(run, again)
    assert weights_digest(reader.fetch(run, "solver", 2)) == weights_digest(model(2))
    assert [key for key in run.list(layout.WEIGHTS) if key.endswith(layout.RETIRED)] == []


def test_foreign_keys_and_concurrently_removed_tags_do_not_stop_gc(
    run: ObjectStore,
) -> None:
    tags.create(run, "good", "solver", 2)
    for stray in ("tags/.DS_Store", "tags/best", "tags/best.json.old", "tags/sub/best.json"):
        run.put(stray, b"")
    assert [tag.name for tag in tags.require_all(run)] == ["good"]


def test_an_unreadable_tag_keeps_every_version(run: ObjectStore) -> None:
    run.put(layout.tag("good"), b"{}")
    with pytest.raises(CorruptError, match=r"tags/good\.json"):
        retention.plan(run, "solver", NOTHING_ELSE, NOW_S)


def test_a_tag_that_is_listed_and_not_found_keeps_every_version(run: ObjectStore) -> None:
    tags.create(run, "best", "solver", 4)
    with pytest.raises(CorruptError, match=r"tags/best\.json is listed, but cannot be read"):
        retention.plan(hides(run, layout.tag("best")), "solver", NOTHING_ELSE, NOW_S)


def test_a_damaged_tag_stops_gc_hides_no_other_tag_and_can_be_removed(run: ObjectStore) -> None:
    best = tags.create(run, "best", "solver", 4)
    run.put("tags/torn.json", b"{")
    seen = tags.read_all(run)
    assert seen.readable == (best,)
    assert list(seen.unreadable) == ["tags/torn.json"]
    assert seen.unreadable["tags/torn.json"].startswith("tags/torn.json is not JSON")
    assert tags.resolve(run, "solver", "best") == 4
    with pytest.raises(CorruptError, match=r"tags/torn\.json is not JSON"):
        tags.resolve(run, "solver", "torn")
    with pytest.raises(CorruptError, match=r"what it keeps is not known: .*tag RUN --remove torn"):
        retention.plan(run, "solver", NOTHING_ELSE, NOW_S)
    assert tags.delete(run, "torn") is None
    assert tags.require_all(run) == [best]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"version": -1},
        {"at_s": float("nan")},
        {"at_s": 1e300},
        {"version": True},
    ],
)
def test_a_tag_with_another_name_or_an_extreme_number_is_damaged(
    run: ObjectStore, change: dict[str, Any]
) -> None:
    run.put(
        "tags/best.json",
        seal(replace(Tag(name="best", policy="solver", version=4, at_s=5.0), **change)),
    )
    assert (tags.read_all(run).readable, list(tags.read_all(run).unreadable)) == (
        (),
        ["tags/best.json"],
    )


def test_a_version_is_written_as_its_policy_and_its_number() -> None:
    assert tags.parse("solver@40") == ("solver", 40)
