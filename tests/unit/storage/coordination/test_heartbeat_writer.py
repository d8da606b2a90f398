import contextvars
import json
import logging
import os
import re
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage import layout
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.heartbeats import encode, readable
from storage.errors import ConfigError, TransientError
from storage.records.control import Heartbeat, ServiceState, WaitReason
from storage.records.progress import (
    RolloutProgress,
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
    (beat,) = readable(store)
    return beat


def test_a_heartbeat_is_written_at_the_start_and_at_the_end(memory_store: ObjectStore) -> None:
    with HeartbeatWriter(memory_store, "trainer", "trainer-solver", 3, IDLE_S, region="us-east"):
        pass
    beat = only(memory_store)
    assert (beat.kind, beat.id, beat.attempt, beat.state, beat.beats) == (
        "trainer",
        "trainer-solver",
        3,
        "done",
        2,
    )
    assert (beat.pid, beat.host, beat.region) == (os.getpid(), socket.gethostname(), "us-east")
    assert beat.started_s <= beat.beat_s
    assert beat.seconds["cpu"] > 0
    assert memory_store.list() == ["heartbeats/trainer/trainer-solver.json"]


def test_cpu_seconds_are_those_of_the_process_and_of_its_children(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "times", lambda: os.times_result((1.0, 20.0, 300.0, 4000.0, 0.0)))
    with HeartbeatWriter(memory_store, "trainer", "trainer-solver", 3, IDLE_S):
        pass
    assert only(memory_store).seconds["cpu"] == 4321.0


def test_a_heartbeat_has_the_age_of_its_process_by_the_monotonic_clock(
    memory_store: ObjectStore,
) -> None:
    now_s = 1000.0
    writer = HeartbeatWriter(
        memory_store, "trainer", "trainer-solver", 3, IDLE_S, clock=lambda: now_s
    )
    now_s = 1002.5
    with writer:
        assert only(memory_store).alive_s == 2.5
        now_s = 1060.0
    assert only(memory_store).alive_s == 60.0


def test_heartbeats_are_written_at_the_interval(memory_store: ObjectStore) -> None:
    with HeartbeatWriter(memory_store, "dataflow", "dataflow", 0, interval_s=0.01) as heartbeat:
        until(lambda: heartbeat.last.beats >= 5)


def test_an_update_changes_the_given_fields_and_merges_versions(memory_store: ObjectStore) -> None:
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


def test_spans_add_up_also_when_they_raise(
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


def test_spans_of_many_threads_lose_nothing(
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
        )  # every span took at least one tick of the counting clock


def test_a_failing_service_says_why(memory_store: ObjectStore) -> None:
    with (
        pytest.raises(ValueError, match="broken"),
        HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S),
    ):
        raise ValueError("broken")
    assert (only(memory_store).state, only(memory_store).note) == ("failed", "ValueError: broken")


class Failing:
    """A backend whose writes all fail."""

    error: Exception = TransientError("away")

    def write(self, key: str, body: bytes) -> None:
        raise self.error

    def list(self, prefix: str, start_after: str) -> Keys:
        return []


def test_a_failing_store_never_breaks_the_service_and_is_logged_once_per_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = Failing()
    store = ObjectStore(url="failing", backend=backend, patience_s=0.01)  # type: ignore[arg-type]  # the writer only writes
    caplog.set_level(logging.WARNING, logger="storage.coordination.heartbeat_writer")
    with HeartbeatWriter(store, "trainer", "t", 0, interval_s=0.01) as heartbeat:
        until(lambda: heartbeat.last.beats >= 3)
        backend.error = ConfigError("disk full")
        until(lambda: heartbeat.last.beats >= 6)
    assert [
        record.getMessage()
        for record in caplog.records
        if record.name == "storage.coordination.heartbeat_writer"
    ] == [
        "t continues without heartbeats: away",
        "t continues without heartbeats: disk full",
    ]


def test_a_store_that_is_away_at_the_first_heartbeat_is_logged_and_the_service_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ObjectStore(url="failing", backend=Failing(), patience_s=0.01)  # type: ignore[arg-type]  # the writer only writes
    with HeartbeatWriter(store, "trainer", "t", 0, IDLE_S):
        assert "t continues without heartbeats: away" in caplog.text


def test_heartbeats_do_not_keep_a_process_alive_that_has_ended_otherwise(
    memory_store: ObjectStore,
) -> None:
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S):
        assert {t.name: t.daemon for t in threading.enumerate()}["heartbeat-t"]


def test_a_first_heartbeat_that_cannot_be_written_ends_the_service_with_the_reason(
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


def test_numpy_numbers_are_written_and_nan_is_left_out(memory_store: ObjectStore) -> None:
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S) as heartbeat:
        rates = {"tokens_per_s": np.float32(2.5), "wait_fraction": float("nan")}
        heartbeat.update(progress=TrainerProgress(step=3, **rates))  # type: ignore[arg-type]  # services do pass such
    stored = json.loads(memory_store.get("heartbeats/trainer/t.json"))["progress"]
    assert stored == {"step": 3, "tokens_trained": 0, "tokens_per_s": 2.5, "wait_fraction": 0.0}


def stands(store: ObjectStore, attempt: int) -> bytes:
    """Put the heartbeat of another attempt into the trainer's place."""
    builders.put_heartbeat(store, builders.heartbeat("trainer", "t", attempt=attempt))
    return store.get(KEY)


def test_a_writer_stops_for_good_when_a_newer_attempt_is_alive_and_logs_why(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()
    caplog.set_level(logging.WARNING, logger="storage.coordination.heartbeat_writer")
    with HeartbeatWriter(memory_store, "trainer", "t", 1, interval_s=0.01, leave=told.set):
        deadline = time.monotonic() + PATIENCE_S
        while (
            not told.wait(0.02) and time.monotonic() < deadline
        ):  # a write in flight may fall on the successor's beat
            successor = stands(memory_store, 2)
        memory_store.delete(KEY)  # not even now does it begin again
        time.sleep(0.05)
        assert memory_store.list() == []
        memory_store.put(KEY, successor)
    assert memory_store.get(KEY) == successor
    assert [record.getMessage() for record in caplog.records] == [
        "t: attempt 2 is running, so attempt 1 stops"
    ]


@pytest.mark.parametrize("attempt", [0, 1])
def test_the_heartbeat_of_an_older_or_the_same_attempt_is_overwritten(
    memory_store: ObjectStore, attempt: int
) -> None:
    stands(memory_store, attempt)
    told = threading.Event()
    with HeartbeatWriter(memory_store, "trainer", "t", 1, IDLE_S, leave=told.set):
        pass
    assert not told.is_set()
    assert (only(memory_store).attempt, only(memory_store).state) == (1, "done")


def test_a_stored_heartbeat_that_cannot_be_read_stops_no_service(memory_store: ObjectStore) -> None:
    class Unreadable:
        """Writes well, and reads nothing."""

        error: Exception = TransientError("away")

        def write(self, key: str, body: bytes) -> None:
            memory_store.backend.write(key, body)

        def read(self, key: str) -> bytes:
            raise self.error

    told = threading.Event()
    unreadable = Unreadable()
    store = ObjectStore(url="unreadable", backend=unreadable, patience_s=0.01)  # type: ignore[arg-type]  # the heartbeat reads and writes
    for unreadable.error in (TransientError("away"), ConfigError("forbidden")):
        with HeartbeatWriter(
            replace(store, prefix=memory_store.prefix), "trainer", "t", 1, IDLE_S, leave=told.set
        ):
            pass
        assert only(memory_store).state == "done"
        memory_store.put(KEY, b"{")
    with HeartbeatWriter(memory_store, "trainer", "t", 1, IDLE_S, leave=told.set):
        pass
    assert only(memory_store).state == "done"
    assert not told.is_set()


def test_without_fencing_the_heartbeat_of_a_higher_attempt_is_overwritten(
    memory_store: ObjectStore,
) -> None:
    stands(memory_store, 7)
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S):
        pass
    assert only(memory_store).attempt == 0


def test_a_service_writes_no_number_or_text_that_a_reader_would_refuse(
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


@pytest.mark.parametrize("attempt", [10**400, 2**63 - 1, 1_001])
def test_an_absurd_heartbeat_of_a_rival_attempt_supersedes_no_service(
    memory_store: ObjectStore, attempt: int
) -> None:
    left: list[str] = []
    rival = json.loads(stands(memory_store, 2)) | {"attempt": attempt}
    memory_store.put(KEY, json.dumps(rival).encode())
    with HeartbeatWriter(
        memory_store, "trainer", "t", 0, IDLE_S, leave=lambda: left.append("left")
    ):
        pass
    assert (left, only(memory_store).state) == ([], "done")


def test_heartbeats_are_observed_from_the_second_on_also_when_they_cannot_be_written(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[Heartbeat] = []
    writer = HeartbeatWriter(memory_store, "trainer", "t", 0, 0.01, observe=observed.append)

    def fail(self: ObjectStore, key: str, body: bytes) -> None:
        raise TransientError("the store is away")

    with writer:
        until(lambda: bool(observed))
        assert observed[0].beats >= 2
        monkeypatch.setattr(ObjectStore, "put", fail)
        so_far = len(observed)
        until(lambda: len(observed) > so_far + 1)
    assert observed[-1].state == ServiceState.DONE


def test_an_observer_that_fails_stops_no_heartbeat(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(beat: Heartbeat) -> None:
        raise ZeroDivisionError("no tokens")

    with HeartbeatWriter(memory_store, "trainer", "t", 0, 0.01, observe=fail):
        until(lambda: only(memory_store).beats > 3)
    assert only(memory_store).state == ServiceState.DONE
    assert caplog.messages == ["heartbeats of t are written, but not shown"]


def test_a_superseded_writer_is_no_longer_observed(memory_store: ObjectStore) -> None:
    observed: list[Heartbeat] = []
    left = threading.Event()
    with HeartbeatWriter(
        memory_store, "trainer", "t", 0, 0.01, leave=left.set, observe=observed.append
    ):
        memory_store.put(KEY, encode(builders.heartbeat("trainer", "t", attempt=1, beats=1)))
        assert left.wait(PATIENCE_S)
        so_far = len(observed)
    assert len(observed) == so_far


def test_observers_have_the_context_of_the_code_that_made_the_writer(
    memory_store: ObjectStore,
) -> None:
    flow_run: contextvars.ContextVar[str] = contextvars.ContextVar("flow_run", default="")
    observed: list[str] = []
    flow_run.set("the flow run")
    with HeartbeatWriter(
        memory_store, "trainer", "t", 0, 0.01, observe=lambda beat: observed.append(flow_run.get())
    ):
        until(lambda: bool(observed))
    assert set(observed) == {"the flow run"}


@pytest.mark.parametrize("reward", [-0.5, 0.0, 2.0])
def test_a_reward_may_be_negative(memory_store: ObjectStore, reward: float) -> None:
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S) as heartbeat:
        heartbeat.update(progress=TrainerProgress(step=3, reward_mean=reward))
    assert only(memory_store).progress == TrainerProgress(step=3, reward_mean=reward)


def test_a_reward_out_of_bounds_is_left_out(memory_store: ObjectStore) -> None:
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S) as heartbeat:
        for reward in (float("nan"), float("-inf"), -(2.0**54), 2.0**54):
            heartbeat.update(progress=TrainerProgress(step=3, reward_mean=reward))
            assert heartbeat.last.progress == TrainerProgress(step=3)
