import json
from dataclasses import replace
from typing import Any

import pytest

from storage import layout
from storage.errors import ConfigError, CorruptError
from storage.formats.json_objects import seal
from storage.records.control import Stop
from storage.records.rollouts import Prompt
from storage.records.types import Json
from storage.records.weights import Origin
from storage.records.windows import WINDOWS_MAX
from storage.run import runs
from storage.run.runs import (
    check_restart,
    clear_stop,
    create_run,
    open_run,
    read_all,
    read_run,
    read_run_config,
    read_stop,
    request_stop,
    sibling,
)
from storage.store.object_store import ObjectStore
from tests.support.runs.frozen_windows import frozen_window
from tests.support.stores.resealed import resealed

CONFIG = {"seed": 0, "data": {"max_staleness": 8, "betas": [0.9, 0.999]}}


def test_the_configuration_of_a_run_is_read_back(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "tiny-1", CONFIG, deployment="multi-policy")
    assert read_run_config(open_run(memory_store, "tiny-1")) == CONFIG
    record = read_run(run)
    assert (record.run_id, record.deployment) == ("tiny-1", "multi-policy")
    stored = json.loads(memory_store.get("runs/tiny-1/run.json"))
    assert {
        "format",
        "write_id",
        "checksum",
        "run_id",
        "created_s",
        "deployment",
        "config",
        "origins",
        "windows",
    } == stored.keys()


def test_a_run_of_an_earlier_release_has_no_origins(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "tiny-1", CONFIG)
    body = run.get("run.json")
    run.delete("run.json")
    run.create("run.json", resealed(body, lambda fields: fields.pop("origins")))
    assert read_run(run).origins == {}


@pytest.mark.parametrize(
    "changed", [{"run": "../x"}, {"run": ""}, {"policy": "a/b"}, {"version": -1}]
)
def test_an_origin_with_an_invalid_name_is_corrupt(
    memory_store: ObjectStore, changed: dict[str, str | int]
) -> None:
    run = create_run(memory_store, "tiny-1", CONFIG)
    origin = {"run": "one", "policy": "solver", "version": 3, "digest": "sha256:0"}

    def put_origin(fields: dict[str, Any]) -> None:
        fields["origins"] = {"solver": {**origin, **changed}}

    body = run.get("run.json")
    run.delete("run.json")
    run.create("run.json", resealed(body, put_origin))
    with pytest.raises(CorruptError, match="origins"):
        read_run(run)


def test_a_run_that_exists_keeps_its_origins(memory_store: ObjectStore) -> None:
    first = Origin(run="one", policy="solver", version=3, digest="sha256:0")
    run = create_run(memory_store, "tiny-1", CONFIG, origins={"solver": first})
    create_run(memory_store, "tiny-1", CONFIG, origins={"solver": replace(first, version=4)})
    assert read_run(run).origins == {"solver": first}


def test_another_run_of_the_store_is_found_from_a_run(memory_store: ObjectStore) -> None:
    one, two = (create_run(memory_store, run_id, CONFIG) for run_id in ("one", "two"))
    assert sibling(one, "two") == two
    with pytest.raises(ConfigError, match="cannot be a run id"):
        sibling(one, "../two")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        sibling(memory_store, "two")


def test_the_same_id_with_the_same_config_joins_the_run(memory_store: ObjectStore) -> None:
    first = create_run(memory_store, "tiny-1", CONFIG)
    created_s = read_run(first).created_s
    again = create_run(
        memory_store, "tiny-1", {**CONFIG, "data": {"max_staleness": 8, "betas": (0.9, 0.999)}}
    )
    assert read_run(again).created_s == created_s


def test_the_same_id_with_another_config_names_the_differences(memory_store: ObjectStore) -> None:
    create_run(memory_store, "tiny-1", CONFIG)
    other = {"seed": 0, "data": {"max_staleness": 4, "betas": [0.9, 0.999]}, "steps": 3}
    with pytest.raises(ConfigError) as caught:
        create_run(memory_store, "tiny-1", other)
    assert str(caught.value) == (
        "run 'tiny-1' exists with another configuration: data.max_staleness is 8 there, 4 here; "
        "steps is 'absent' there, 3 here; use the same settings to resume it, or another run id"
    )


@pytest.mark.parametrize("run_id", ["", "a/b", "..", "-x", "a b", "x" * 101, "a\n"])
def test_an_id_that_is_not_a_plain_name_is_refused(memory_store: ObjectStore, run_id: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a run id"):
        create_run(memory_store, run_id, CONFIG)


def test_an_unknown_run_names_similar_ones(memory_store: ObjectStore) -> None:
    create_run(memory_store, "tiny-1", CONFIG)
    with pytest.raises(
        ConfigError, match=r"there is no run 'tinny-1' in memory://.*; did you mean tiny-1\?"
    ):
        open_run(memory_store, "tinny-1")


def test_an_unknown_run_in_an_empty_store_gives_its_own_message(local_store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="the store holds no run yet"):
        open_run(local_store, "../x")


def test_runs_are_listed_oldest_first(memory_store: ObjectStore) -> None:
    for run_id in ("zebra", "ant", "bee"):
        create_run(memory_store, run_id, CONFIG)
    memory_store.put("runs/no-run/loose", b"x")
    assert read_all(memory_store).ids == ("zebra", "ant", "bee")


def test_more_data_windows_than_a_recipe_has_places_are_corrupt(
    memory_store: ObjectStore,
) -> None:
    """`verify` reads the rows of each: thousands that named one object took it minutes."""
    window = frozen_window(memory_store, "r", [Prompt("p", {"question": "?"})])
    windows = {f"place {number}": window for number in range(WINDOWS_MAX)}
    run = create_run(memory_store, "r", {}, windows=windows)
    assert read_run(run).windows == windows
    run = create_run(memory_store, "s", {}, windows={**windows, "one more": window})
    with pytest.raises(CorruptError, match="windows: Dictionary should have at most 16 items"):
        read_run(run)


def test_an_existing_stop_stays(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "a", CONFIG)
    assert read_stop(run) is None
    cancelled = Stop("cancelled", "asked by a person", 5.0)
    assert request_stop(run, cancelled) == cancelled
    assert request_stop(run, Stop("completed", "", 6.0)) == cancelled
    assert read_stop(run) == cancelled


def test_a_run_with_a_cleared_stop_continues_and_can_be_stopped_again(
    memory_store: ObjectStore,
) -> None:
    run = create_run(memory_store, "a", CONFIG)
    request_stop(run, Stop("failed", "x", 1.0))
    clear_stop(run)
    clear_stop(run)
    assert read_stop(run) is None
    assert request_stop(run, Stop("completed", "", 2.0)).state == "completed"


def test_a_changed_config_is_corrupt_and_does_not_hide_other_runs(
    memory_store: ObjectStore,
) -> None:
    run = create_run(memory_store, "changed", CONFIG)
    create_run(memory_store, "whole", CONFIG)
    memory_store.put(
        "runs/changed/run.json",
        run.get("run.json").replace(b'"max_staleness":8', b'"max_staleness":9'),
    )
    with pytest.raises(CorruptError, match=r"run\.json does not have the checksum it carries"):
        read_run_config(run)
    assert read_all(memory_store).ids == ("whole",)


def test_a_changed_stop_is_corrupt(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "stopped", CONFIG)
    request_stop(run, Stop("failed", "out of memory", 1.0))
    memory_store.put("runs/stopped/stop.json", run.get("stop.json").replace(b"memory", b"melody"))
    with pytest.raises(CorruptError, match=r"stop\.json does not have the checksum it carries"):
        read_stop(run)


def test_a_default_of_a_later_release_does_not_prevent_a_resume(
    memory_store: ObjectStore,
) -> None:
    def filled(config: Json) -> Json:
        return {"anchor_every": 20, **config}

    create_run(memory_store, "old", CONFIG)
    create_run(memory_store, "old", {**CONFIG, "anchor_every": 20}, fill_defaults=filled)
    assert check_restart(memory_store, "old", {**CONFIG, "anchor_every": 20}, filled) is None
    with pytest.raises(ConfigError, match="anchor_every is 20 there, 5 here"):
        create_run(memory_store, "old", {**CONFIG, "anchor_every": 5}, fill_defaults=filled)


def test_a_restart_is_checked_before_anything_is_started(memory_store: ObjectStore) -> None:
    assert check_restart(memory_store, "new", CONFIG) is None
    run = create_run(memory_store, "mine", CONFIG)
    with pytest.raises(ConfigError, match="seed is 0 there, 1 here"):
        check_restart(memory_store, "mine", {**CONFIG, "seed": 1})
    cancelled = request_stop(run, Stop("cancelled", "asked by a person", 5.0))
    assert check_restart(memory_store, "mine", CONFIG) == cancelled
    with pytest.raises(ConfigError, match="seed is 0 there, 1 here"):
        check_restart(memory_store, "mine", {**CONFIG, "seed": 1})
    clear_stop(run)
    request_stop(run, Stop("completed", "", 6.0))
    for config in (CONFIG, None):
        with pytest.raises(ConfigError, match="run mine is completed; choose another run id"):
            check_restart(memory_store, "mine", config)
    with pytest.raises(ConfigError, match="cannot be a run id"):
        check_restart(memory_store, "a/b", CONFIG)


def test_an_error_for_a_dissimilar_run_id_lists_the_last_three_runs(
    memory_store: ObjectStore,
) -> None:
    for run_id in ("a-1", "b-2", "c-3", "d-4", "e-5"):
        create_run(memory_store, run_id, CONFIG)
    with pytest.raises(ConfigError, match=r"did you mean c-3 or d-4 or e-5\?$"):
        open_run(memory_store, "zzzzzz")


def test_a_reason_is_truncated_when_it_is_written_and_when_it_is_read(
    memory_store: ObjectStore,
) -> None:
    assert (
        len(runs.request_stop(memory_store, Stop("failed", "x" * 20_000, 1.0)).reason)
        == runs.REASON_MAX
        == 10_000
    )
    memory_store.put(layout.STOP, seal(Stop("failed", "y" * 20_000, 1.0)))
    assert runs.read_stop(memory_store) == Stop("failed", "y" * 10_000, 1.0)


def test_a_run_end_of_megabytes_is_not_parsed(memory_store: ObjectStore) -> None:
    body = seal(Stop("failed", "z" * runs.STOP_BYTES_MAX, 1.0))
    memory_store.put(layout.STOP, body)
    with pytest.raises(
        CorruptError,
        match=rf"stop\.json has {len(body):,} bytes; it has at most 1,000,000; put .* delete it",
    ):
        runs.read_stop(memory_store)


def test_only_a_suspension_is_replaced_by_another_stop(memory_store: ObjectStore) -> None:
    cancelled, failed = Stop("cancelled", "by a person", 2.0), Stop("failed", "why", 3.0)
    assert runs.request_stop(memory_store, Stop("suspended", "for a while", 1.0))
    assert runs.replace_suspension(memory_store, cancelled) == cancelled
    assert runs.replace_suspension(memory_store, failed) == cancelled
    assert runs.read_stop(memory_store) == cancelled
