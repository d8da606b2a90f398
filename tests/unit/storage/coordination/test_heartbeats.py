import json
import logging
import os
import re
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import layout
from storage.coordination.heartbeats import HeartbeatWriter, look, parse, read_all
from storage.errors import ConfigError, CorruptError, TransientError
from storage.records.control import Heartbeat, ServiceState, WaitReason
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
from storage.store.backend import Keys
from storage.store.object_store import ObjectStore
from tests.support.patience import PATIENCE_S, until
from tests.support.runs import builders

IDLE_S = 3600.0
KEY = layout.heartbeat("trainer", "t")


def only(store: ObjectStore) -> Heartbeat:
    """The heartbeat of the store's only member."""
    (heartbeat,) = read_all(store)
    return heartbeat


def test_a_heartbeat_is_written_at_the_start_and_at_the_end(memory_store: ObjectStore) -> None:
    with HeartbeatWriter(memory_store, "trainer", "trainer-solver", 3, IDLE_S, region="us-east"):
        pass
    heartbeat = only(memory_store)
    assert (heartbeat.kind, heartbeat.id, heartbeat.attempt, heartbeat.state, heartbeat.beats) == (
        "trainer",
        "trainer-solver",
        3,
        "done",
        2,
    )
    assert (heartbeat.pid, heartbeat.host, heartbeat.region) == (
        os.getpid(),
        socket.gethostname(),
        "us-east",
    )
    assert heartbeat.started_s <= heartbeat.beat_s
    assert heartbeat.seconds["cpu"] > 0
    assert memory_store.list() == ["heartbeats/trainer/trainer-solver.json"]


def test_heartbeats_are_written_at_the_interval(memory_store: ObjectStore) -> None:
    with HeartbeatWriter(memory_store, "dataflow", "dataflow", 0, interval_s=0.01) as heartbeat:
        until(lambda: heartbeat.last.beats >= 5)


def test_an_update_changes_only_the_given_fields_and_merges_versions(
    memory_store: ObjectStore,
) -> None:
    with HeartbeatWriter(memory_store, "rollout", "rollout-us-east-0", 0, IDLE_S) as heartbeat:
        heartbeat.update(
            state=ServiceState.WORKING,
            note="order 3",
            progress=RolloutProgress(orders_done=2),
            versions={"solver": 1},
        )
        progress = RolloutProgress(orders_done=3, tokens_per_s=5.0, refresh_s={"solver": 0.5})
        heartbeat.update(progress=progress, versions={"verifier": 2})
        beat = heartbeat.last
    assert (beat.state, beat.note) == (ServiceState.WORKING, "order 3")
    assert beat.versions == {"solver": 1, "verifier": 2}
    assert only(memory_store).progress == progress


def test_a_new_state_clears_the_wait_reason(memory_store: ObjectStore) -> None:
    heartbeat = HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S)
    heartbeat.update(state=ServiceState.WAITING, wait_reason=WaitReason.BATCH)
    heartbeat.update(note="no batch yet")
    assert heartbeat.last.wait_reason is WaitReason.BATCH
    heartbeat.update(wait_reason=WaitReason.STORE)
    assert (heartbeat.last.state, heartbeat.last.wait_reason) == ("waiting", "store")
    heartbeat.update(state=ServiceState.WORKING)
    assert heartbeat.last.wait_reason is WaitReason.NONE


def test_a_service_cannot_write_the_progress_of_another_kind(memory_store: ObjectStore) -> None:
    heartbeat = HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S)
    with pytest.raises(TypeError, match="trainer has no RolloutProgress"):
        heartbeat.update(progress=RolloutProgress())


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
    assert only(memory_store) == builders.heartbeat(kind, "member", progress=progress)


def test_spans_are_summed_also_when_they_raise(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    def fail_after(seconds: float) -> None:
        now_s[0] += seconds
        raise KeyError

    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S) as heartbeat:
        with heartbeat.span("wait"):
            now_s[0] += 1.5
        with pytest.raises(KeyError), heartbeat.span("wait"):
            fail_after(0.25)
        with heartbeat.span("step"):
            now_s[0] += 4.0
    beat = only(memory_store)
    assert (beat.seconds["wait"], beat.seconds["step"]) == (1.75, 4.0)


def test_spans_of_concurrent_threads_are_all_counted(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", iter(range(1_000_000)).__next__)
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S) as heartbeat:

        def work() -> None:
            for number in range(100):
                heartbeat.update(versions={threading.current_thread().name: number})
                with heartbeat.span("wait"):
                    pass

        threads = [threading.Thread(target=work, name=f"thread-{number}") for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert heartbeat.last.versions == {f"thread-{number}": 99 for number in range(8)}
        assert (
            heartbeat.last.seconds["wait"] >= 800
        )  # each span took at least one tick of the counting clock


def test_the_heartbeat_of_a_failed_service_has_the_error(memory_store: ObjectStore) -> None:
    with (
        pytest.raises(ValueError, match="broken"),
        HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S),
    ):
        raise ValueError("broken")
    assert (only(memory_store).state, only(memory_store).note) == ("failed", "ValueError: broken")


class Failing:
    """A backend whose every write fails."""

    error: Exception = TransientError("away")

    def write(self, key: str, body: bytes) -> None:
        raise self.error

    def list(self, prefix: str, start_after: str) -> Keys:
        return []


def test_a_failing_store_never_stops_the_service_and_is_logged_once_per_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = Failing()
    store = ObjectStore(url="failing", backend=backend, patience_s=0.01)  # type: ignore[arg-type]  # the writer only writes
    caplog.set_level(logging.WARNING, logger="storage.coordination.heartbeats")
    with HeartbeatWriter(store, "trainer", "t", 0, interval_s=0.01) as heartbeat:
        until(lambda: heartbeat.last.beats >= 3)
        backend.error = ConfigError("disk full")
        until(lambda: heartbeat.last.beats >= 6)
    assert [
        record.getMessage()
        for record in caplog.records
        if record.name == "storage.coordination.heartbeats"
    ] == [
        "t goes on without heartbeats: away",
        "t goes on without heartbeats: disk full",
    ]


def test_a_first_heartbeat_that_cannot_be_written_stops_the_service_with_the_reason(
    local_store: ObjectStore, tmp_path: Path
) -> None:
    local_store.put(f"{KEY}/x", b"a file in a folder in the place of the heartbeat")
    with (
        pytest.raises(ConfigError) as refused,
        HeartbeatWriter(local_store, "trainer", "t", 0, IDLE_S),
    ):
        raise AssertionError("the service began")
    assert re.fullmatch(
        rf"cannot write the heartbeat {KEY}: /.*/{KEY} cannot be an object \(.*\); "
        "a file is where a folder belongs, or the reverse; "
        "correct that, then start the run again with the same run id",
        str(refused.value),
    )


def test_numpy_numbers_are_written_and_nan_is_omitted(memory_store: ObjectStore) -> None:
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S) as heartbeat:
        rates = {"tokens_per_s": np.float32(2.5), "wait_fraction": float("nan")}
        heartbeat.update(progress=TrainerProgress(step=3, **rates))  # type: ignore[arg-type]  # services do pass such
    stored = json.loads(memory_store.get("heartbeats/trainer/t.json"))["progress"]
    assert stored == {"step": 3, "tokens_trained": 0, "tokens_per_s": 2.5, "wait_fraction": 0.0}


def test_an_unreadable_heartbeat_does_not_hide_the_others(memory_store: ObjectStore) -> None:
    for member in ("a", "b"):
        with HeartbeatWriter(memory_store, "rollout", member, 0, IDLE_S):
            pass
    memory_store.put("heartbeats/rollout/a.json", b"{")
    assert [heartbeat.id for heartbeat in read_all(memory_store)] == ["b"]
    assert read_all(replace(memory_store, prefix="elsewhere/")) == []


def stands(store: ObjectStore, attempt: int) -> bytes:
    """Replace the trainer's heartbeat by one of another attempt."""
    builders.put_heartbeat(store, builders.heartbeat("trainer", "t", attempt=attempt))
    return store.get(KEY)


def test_a_writer_stops_permanently_with_a_log_line_when_a_newer_attempt_is_alive(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    called = threading.Event()
    caplog.set_level(logging.WARNING, logger="storage.coordination.heartbeats")
    with HeartbeatWriter(memory_store, "trainer", "t", 1, interval_s=0.01, leave=called.set):
        deadline = time.monotonic() + PATIENCE_S
        while (
            not called.wait(0.02) and time.monotonic() < deadline
        ):  # a write in flight can still arrive
            successor = stands(memory_store, 2)
        memory_store.delete(KEY)  # it does not start again even now
        time.sleep(0.05)
        assert memory_store.list() == []
        memory_store.put(KEY, successor)
    assert memory_store.get(KEY) == successor
    assert [record.getMessage() for record in caplog.records] == [
        "t: attempt 2 lives, so attempt 1 leaves"
    ]


@pytest.mark.parametrize("attempt", [0, 1])
def test_the_heartbeat_of_an_older_or_the_same_attempt_is_overwritten(
    memory_store: ObjectStore, attempt: int
) -> None:
    stands(memory_store, attempt)
    called = threading.Event()
    with HeartbeatWriter(memory_store, "trainer", "t", 1, IDLE_S, leave=called.set):
        pass
    assert not called.is_set()
    assert (only(memory_store).attempt, only(memory_store).state) == (1, "done")


def test_an_unreadable_stored_heartbeat_does_not_stop_the_service(
    memory_store: ObjectStore,
) -> None:
    class Unreadable:
        """A backend that writes normally and fails every read."""

        error: Exception = TransientError("away")

        def write(self, key: str, body: bytes) -> None:
            memory_store.backend.write(key, body)

        def read(self, key: str) -> bytes:
            raise self.error

    called = threading.Event()
    unreadable = Unreadable()
    store = ObjectStore(url="unreadable", backend=unreadable, patience_s=0.01)  # type: ignore[arg-type]  # the heartbeat reads and writes
    for unreadable.error in (TransientError("away"), ConfigError("forbidden")):
        with HeartbeatWriter(
            replace(store, prefix=memory_store.prefix), "trainer", "t", 1, IDLE_S, leave=called.set
        ):
            pass
        assert only(memory_store).state == "done"
        memory_store.put(KEY, b"{")
    with HeartbeatWriter(memory_store, "trainer", "t", 1, IDLE_S, leave=called.set):
        pass
    assert only(memory_store).state == "done"
    assert not called.is_set()


def test_without_fencing_the_heartbeat_of_a_higher_attempt_is_overwritten(
    memory_store: ObjectStore,
) -> None:
    stands(memory_store, 7)
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S):
        pass
    assert only(memory_store).attempt == 0


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
    result = look(memory_store)
    assert [heartbeat.id for heartbeat in result.beats] == ["rollout-us-east-1"]
    assert list(result.unreadable) == [WORKER_KEY]
    assert WORKER_KEY in result.unreadable[WORKER_KEY]


def test_a_heartbeat_with_the_largest_allowed_numbers_is_read(memory_store: ObjectStore) -> None:
    for name, most in (
        *((name, 2**63 - 1) for name in ("attempt", "beats", "pid", "versions.solver")),
        *((name, 2**53) for name in ("progress.orders_done", "rates.tokens_per_s", "seconds.wait")),
        ("by_policy.refresh_s.solver", 2**53),
    ):
        assert parse(body(name, str(most)), WORKER_KEY).kind == "rollout"
        with pytest.raises(CorruptError, match=rf"{name.partition('.')[0]}.*less than"):
            parse(body(name, str(most + 2)), WORKER_KEY)
    assert parse(body("beat_s", "253402300799"), WORKER_KEY).beat_s == 253402300799.0
    with pytest.raises(CorruptError, match="beat_s"):
        parse(body("beat_s", "253402300800"), WORKER_KEY)


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


def test_a_service_writes_no_number_or_text_that_readers_refuse(
    memory_store: ObjectStore,
) -> None:
    with HeartbeatWriter(memory_store, "rollout", "r", 0, IDLE_S) as heartbeat:
        numbers = {"a": float("inf"), "b": -1.0, "c": 10**400, "d": 2.0}
        heartbeat.update(
            progress=RolloutProgress(
                orders_done=-1, tokens=2**53 + 1, episodes=3, refresh_s=numbers
            )
        )
        heartbeat.update(note="\ud800" + "x" * 5_000)
    beat = only(memory_store)
    assert beat.progress == RolloutProgress(episodes=3, refresh_s={"d": 2.0})
    assert beat.note == "?" + "x" * 1_999


def test_a_newer_attempt_with_an_invalid_heartbeat_does_not_stop_the_service(
    memory_store: ObjectStore,
) -> None:
    left: list[str] = []
    memory_store.put(WORKER_KEY, body("attempt", "1" + "0" * 400))
    with HeartbeatWriter(
        memory_store, "rollout", "rollout-us-east-0", 0, IDLE_S, leave=lambda: left.append("left")
    ):
        pass
    assert (left, only(memory_store).state) == ([], "done")
