import json
from dataclasses import replace
from typing import Any

import pytest

from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.heartbeats import parse, read_all, readable
from storage.errors import CorruptError
from storage.records.control import ServiceState, WaitReason
from storage.records.progress import (
    PROGRESS_OF,
    BaseModelProgress,
    DataflowProgress,
    EvaluationProgress,
    MirrorProgress,
    Progress,
    RolloutProgress,
    SupervisorProgress,
    TrainerProgress,
)
from storage.store.object_store import ObjectStore
from tests.support.runs import builders

IDLE_S = 3600.0


@pytest.mark.parametrize(
    "progress",
    [
        SupervisorProgress(members=9, members_done=2, closing_share=0.25),
        BaseModelProgress(base_model=0.75),
        BaseModelProgress(),
        DataflowProgress(closed_below=3, orders=5, batches={"solver": 2}, expired={"solver": 1}),
        RolloutProgress(orders_done=7, tokens_per_s=512.0, refresh_s={"solver": 1.25}),
        TrainerProgress(step=4, tokens_trained=99, wait_fraction=0.5),
        EvaluationProgress(episodes=8),
        MirrorProgress(mirrored_bytes={"solver": 2**53}),
    ],
)
def test_each_progress_record_is_read_back_unchanged(
    memory_store: ObjectStore, progress: Progress
) -> None:
    (kind,) = (kind for kind, record in PROGRESS_OF.items() if record is type(progress))
    builders.put_heartbeat(memory_store, builders.heartbeat(kind, "member", progress=progress))
    assert readable(memory_store) == [builders.heartbeat(kind, "member", progress=progress)]


@pytest.mark.parametrize(
    ("absurd", "read"),
    [
        (BaseModelProgress(base_model=2**53), BaseModelProgress(base_model=1.0)),
        (SupervisorProgress(closing_share=2**53), SupervisorProgress(closing_share=1.0)),
        (TrainerProgress(wait_fraction=1.5), TrainerProgress(wait_fraction=1.0)),
    ],
)
def test_a_share_above_one_is_read_as_one(
    memory_store: ObjectStore, absurd: Progress, read: Progress
) -> None:
    (kind,) = (kind for kind, record in PROGRESS_OF.items() if record is type(absurd))
    builders.put_heartbeat(memory_store, builders.heartbeat(kind, "member", progress=absurd))
    assert [beat.progress for beat in readable(memory_store)] == [read]


def test_an_unreadable_heartbeat_does_not_hide_the_others(memory_store: ObjectStore) -> None:
    for member in ("a", "b"):
        with HeartbeatWriter(memory_store, "rollout", member, 0, IDLE_S):
            pass
    memory_store.put("heartbeats/rollout/a.json", b"{")
    assert [beat.id for beat in readable(memory_store)] == ["b"]
    assert readable(replace(memory_store, prefix="elsewhere/")) == []


BEAT = {
    "format": 1, "write_id": "0" * 32, "kind": "rollout", "id": "rollout-us-east-0", "attempt": 0, "beats": 2, "beat_s": 5.0,
    "started_s": 1.0, "pid": 7, "host": "vm", "state": "waiting", "wait_reason": "orders", "region": "us-east",
    "progress": {"orders_done": 7, "tokens_per_s": 512.0}, "by_policy": {"refresh_s": {"solver": 1.5}}, "seconds": {"wait": 0.25},
    "versions": {"solver": 4}, "note": "",
}  # fmt: skip
WORKER_KEY = "heartbeats/rollout/rollout-us-east-0.json"
ABSURD = (
    '"NaN"',
    '"Infinity"',
    "1e308",
    "-1",
    "1" + "0" * 400,
    "true",
    '"many"',
    "null",
    "NaN",
    "[]",
)
NUMBERS = (
    *("attempt", "beats", "beat_s", "started_s", "pid"),
    *("progress.orders_done", "rates.tokens_per_s", "seconds.wait", "versions.solver"),
    *("by_policy.refresh_s", "by_policy.refresh_s.solver"),
)


def body(name: str = "", value: str = "") -> bytes:
    """A worker's heartbeat in which one field (a path with dots: `inner`) has the JSON `value`."""
    fields: Any = "PLACE"
    for part in reversed(name.split(".") if name else ()):
        fields = {part: fields}
    return json.dumps({**BEAT, **(fields if name else {})}).replace('"PLACE"', value).encode()


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_heartbeat_with_an_extreme_number_is_unreadable_and_the_field_is_named(
    memory_store: ObjectStore, name: str, value: str
) -> None:
    memory_store.put(WORKER_KEY, body(name, value))
    memory_store.put("heartbeats/rollout/rollout-us-east-1.json", body("id", '"rollout-us-east-1"'))
    found = read_all(memory_store)
    assert [beat.id for beat in found.beats] == ["rollout-us-east-1"]
    assert list(found.unreadable) == [WORKER_KEY]
    assert WORKER_KEY in found.unreadable[WORKER_KEY]


def test_a_heartbeat_of_a_process_that_none_can_be_is_unreadable(memory_store: ObjectStore) -> None:
    memory_store.put(WORKER_KEY, body("pid", str(2**31)))
    assert list(read_all(memory_store).unreadable) == [WORKER_KEY]


def test_a_heartbeat_with_the_largest_allowed_numbers_is_read(memory_store: ObjectStore) -> None:
    for name, most in (
        *((name, 2**63 - 1) for name in ("attempt", "beats", "versions.solver")),
        ("pid", 2**31 - 1),
        *((name, 2**53) for name in ("progress.orders_done", "rates.tokens_per_s", "seconds.wait")),
        ("by_policy.refresh_s.solver", 2**53),
    ):
        assert parse(body(name, str(most)), WORKER_KEY).kind == "rollout"
        with pytest.raises(CorruptError, match=rf"{name.partition('.')[0]}.*less than"):
            parse(body(name, str(most + 2)), WORKER_KEY)
    assert parse(body("beat_s", "253402214400"), WORKER_KEY).beat_s == 253402214400.0
    with pytest.raises(CorruptError, match="beat_s"):
        parse(body("beat_s", "253402214401"), WORKER_KEY)


def test_a_heartbeat_at_a_wrong_key_or_of_an_invalid_region_is_unreadable() -> None:
    with pytest.raises(
        CorruptError,
        match=r"-0\.json holds the heartbeat of heartbeats/rollout/rollout-us-east-1\.json",
    ):
        parse(body("id", '"rollout-us-east-1"'), WORKER_KEY)
    with pytest.raises(CorruptError, match="is not a name of up to 100 letters"):
        parse(body("id", '"../../x"'), WORKER_KEY)
    with pytest.raises(CorruptError, match=r"names the region '\[/\]'"):
        parse(body("region", '"[/]"'), WORKER_KEY)
    with pytest.raises(CorruptError, match=r"has 1,000,001 bytes; a heartbeat has at most"):
        parse(body() + b" " * (1_000_001 - len(body())), WORKER_KEY)


def test_a_long_text_of_a_heartbeat_is_shortened() -> None:
    assert parse(body("note", json.dumps("x" * 5_000)), WORKER_KEY).note == "x" * 2_000


def test_a_heartbeat_of_an_earlier_release_is_read() -> None:
    """It has separate gauges, numbers by policy under names with the policy, and no wait reason."""
    changes = {
        "state": "working",
        "progress": {"orders_done": 7.0, "weights_bytes_home_my_solver": 12, "x_solver": 3},
        "rates": {"tokens_per_s": 512.0, "running": 2.0, "refresh_s_solver": 1.5},
    }
    old = {**BEAT, **changes}
    del old["by_policy"], old["wait_reason"]
    heartbeat = parse(json.dumps(old).encode(), WORKER_KEY)
    assert (heartbeat.state, heartbeat.wait_reason) == (ServiceState.WORKING, WaitReason.NONE)
    assert heartbeat.progress == RolloutProgress(
        orders_done=7,
        tokens_per_s=512.0,
        running=2,
        weights_bytes_home={"my_solver": 12},
        refresh_s={"solver": 1.5},
    )
    progress = {"batches/solver": 4, "filtered/solver": 2, "closed_below": 3}
    dataflow = {**old, "kind": "dataflow", "id": "dataflow", "progress": progress, "rates": {}}
    read = parse(json.dumps(dataflow).encode(), "heartbeats/dataflow/dataflow.json").progress
    assert read == DataflowProgress(closed_below=3, batches={"solver": 4}, filtered={"solver": 2})


def test_fields_and_states_of_a_newer_release_are_shown_or_ignored() -> None:
    changes = {
        "state": "hibernating",
        "wait_reason": "moonlight",
        "progress": {"orders_done": 7, "dreams": 3},
        "by_policy": {"dreams": {"solver": 2}},
        "mood": ["good"],
    }
    heartbeat = parse(json.dumps({**BEAT, **changes}).encode(), WORKER_KEY)
    assert (heartbeat.state, heartbeat.wait_reason, heartbeat.has_ended) == (
        "hibernating",
        "moonlight",
        False,
    )
    assert heartbeat.progress == RolloutProgress(orders_done=7)


@pytest.mark.parametrize(
    "changes",
    [
        {"progress": {"orders_done": 7.5}},
        {"by_policy": {"orders_done": {"solver": 1}}},
        {"by_policy": {"refresh_failures": {"../x": 1}}},
        {"rates": {"refresh_failures_../x": 1}, "by_policy": {}},
        {"progress": {"refresh_s": 1.0}, "by_policy": {"refresh_s": {"solver": -1}}},
    ],
)
def test_progress_of_another_record_type_is_unreadable(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match=WORKER_KEY):
        parse(json.dumps({**BEAT, **changes}).encode(), WORKER_KEY)
