import json
import logging
import os
import socket
import threading
import time
from dataclasses import replace

import pytest

from storage import layout
from storage.coordination.heartbeats import HeartbeatWriter, look, parse, read_all
from storage.errors import ConfigError, CorruptError, TransientError
from storage.formats.json_objects import encode
from storage.records.control import Heartbeat
from storage.store.backend import Keys
from storage.store.object_store import ObjectStore
from tests.patience import PATIENCE_S, until

IDLE_S = 3600.0


def only(store: ObjectStore) -> Heartbeat:
    (beat,) = read_all(store)
    return beat


def test_a_member_beats_when_it_enters_and_when_it_leaves(memory_store: ObjectStore) -> None:
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


def test_beats_go_on_by_themselves(memory_store: ObjectStore) -> None:
    with HeartbeatWriter(memory_store, "dataflow", "dataflow", 0, interval_s=0.01) as pulse:
        until(lambda: pulse.last.beats >= 5)


def test_updates_merge(memory_store: ObjectStore) -> None:
    with HeartbeatWriter(memory_store, "rollout", "rollout-us-east-0", 0, IDLE_S) as pulse:
        pulse.update(
            state="working", note="order 3", progress={"orders_done": 3}, versions={"solver": 1}
        )
        pulse.update(
            progress={"tokens": 10.0}, rates={"tokens_per_s": 5.0}, versions={"verifier": 2}
        )
        beat = pulse.last
    assert (beat.state, beat.note) == ("working", "order 3")
    assert beat.progress == {"orders_done": 3, "tokens": 10.0}
    assert beat.rates == {"tokens_per_s": 5.0}
    assert beat.versions == {"solver": 1, "verifier": 2}
    assert only(memory_store).progress == {"orders_done": 3, "tokens": 10.0}


def test_spans_add_up_also_when_they_raise(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    def fail_after(seconds: float) -> None:
        now_s[0] += seconds
        raise KeyError

    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S) as pulse:
        with pulse.span("wait"):
            now_s[0] += 1.5
        with pytest.raises(KeyError), pulse.span("wait"):
            fail_after(0.25)
        with pulse.span("step"):
            now_s[0] += 4.0
    beat = only(memory_store)
    assert (beat.seconds["wait"], beat.seconds["step"]) == (1.75, 4.0)


def test_spans_of_many_threads_lose_nothing(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", iter(range(1_000_000)).__next__)
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S) as pulse:

        def work() -> None:
            for number in range(100):
                pulse.update(progress={threading.current_thread().name: number})
                with pulse.span("wait"):
                    pass

        threads = [threading.Thread(target=work, name=f"thread-{number}") for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pulse.last.progress == {f"thread-{number}": 99 for number in range(8)}
        assert (
            pulse.last.seconds["wait"] >= 800
        )  # every span took at least one tick of the counting clock


def test_a_failing_service_says_why(memory_store: ObjectStore) -> None:
    with (
        pytest.raises(ValueError, match="broken"),
        HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S),
    ):
        raise ValueError("broken")
    assert (only(memory_store).state, only(memory_store).note) == ("failed", "ValueError: broken")


class Failing:
    """A backend whose writes fail in turn."""

    def __init__(self) -> None:
        self.errors: list[Exception] = [ConfigError("disk full"), *[TransientError("away")] * 20]

    def write(self, key: str, body: bytes) -> None:
        raise self.errors.pop(0) if self.errors else ConfigError("still full")

    def list(self, prefix: str, start_after: str) -> Keys:
        return []


def test_a_failing_store_never_breaks_the_service_and_is_logged_once_per_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ObjectStore(url="failing", backend=Failing(), patience_s=0.01)  # type: ignore[arg-type]  # the pulse only writes
    caplog.set_level(logging.WARNING, logger="storage.coordination.heartbeats")
    with HeartbeatWriter(store, "trainer", "t", 0, interval_s=0.01) as pulse:
        until(lambda: pulse.last.beats >= 6)
    assert [
        record.getMessage()
        for record in caplog.records
        if record.name == "storage.coordination.heartbeats"
    ] == [
        "t goes on without heartbeats: disk full",
        "t goes on without heartbeats: away",
    ]


def test_numpy_numbers_are_written_and_nan_is_left_out(memory_store: ObjectStore) -> None:
    import numpy as np

    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S) as pulse:
        pulse.update(rates={"loss": float("nan"), "tokens_per_s": np.float32(2.5)})  # type: ignore[dict-item]  # services do pass such
    assert json.loads(memory_store.get("heartbeats/trainer/t.json"))["rates"] == {
        "tokens_per_s": 2.5
    }


def test_an_unreadable_beat_hides_no_other(memory_store: ObjectStore) -> None:
    for member in ("a", "b"):
        with HeartbeatWriter(memory_store, "rollout", member, 0, IDLE_S):
            pass
    memory_store.put("heartbeats/rollout/a.json", b"{")
    assert [beat.id for beat in read_all(memory_store)] == ["b"]
    assert read_all(replace(memory_store, prefix="elsewhere/")) == []


KEY = layout.heartbeat("trainer", "t")


def stands(store: ObjectStore, attempt: int) -> bytes:
    body = encode(
        Heartbeat(
            kind="trainer",
            id="t",
            attempt=attempt,
            beats=9,
            beat_s=1.0,
            started_s=1.0,
            pid=1,
            host="there",
            state="working",
        )
    )
    store.put(KEY, body)
    return body


def test_a_heart_stops_for_good_when_a_newer_attempt_beats_and_says_why(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()
    caplog.set_level(logging.WARNING, logger="storage.coordination.heartbeats")
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
        "t: attempt 2 lives, so attempt 1 leaves"
    ]


@pytest.mark.parametrize("attempt", [0, 1])
def test_what_an_older_attempt_or_a_former_life_left_stops_nobody(
    memory_store: ObjectStore, attempt: int
) -> None:
    stands(memory_store, attempt)
    told = threading.Event()
    with HeartbeatWriter(memory_store, "trainer", "t", 1, IDLE_S, leave=told.set):
        pass
    assert not told.is_set()
    assert (only(memory_store).attempt, only(memory_store).state) == (1, "done")


def test_a_beat_that_cannot_be_read_stops_nobody(memory_store: ObjectStore) -> None:
    class Unreadable:
        """Writes well, and reads nothing."""

        error: Exception = TransientError("away")

        def write(self, key: str, body: bytes) -> None:
            memory_store.backend.write(key, body)

        def read(self, key: str) -> bytes:
            raise self.error

    told = threading.Event()
    unreadable = Unreadable()
    store = ObjectStore(url="unreadable", backend=unreadable, patience_s=0.01)  # type: ignore[arg-type]  # the pulse reads and writes
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


def test_a_pulse_that_nobody_fences_beats_over_a_higher_attempt(memory_store: ObjectStore) -> None:
    stands(memory_store, 7)
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S):
        pass
    assert only(memory_store).attempt == 0


BEAT = {
    "format": 1, "write_id": "0" * 32, "kind": "rollout", "id": "rollout-us-east-0", "attempt": 0, "beats": 2, "beat_s": 5.0,
    "started_s": 1.0, "pid": 7, "host": "vm", "state": "working", "region": "us-east", "progress": {"orders_done": 7},
    "rates": {"tokens_per_s": 512.0}, "seconds": {"wait": 0.25}, "versions": {"solver": 4}, "note": "",
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
)


def body(name: str = "", value: str = "") -> bytes:
    """A worker's beat in which one field, `inner` ones after a dot, has the JSON `value`."""
    outer, _, inner = name.partition(".")
    text = json.dumps(
        {**BEAT, **({outer: {inner: "PLACE"} if inner else "PLACE"} if outer else {})}
    )
    return text.replace('"PLACE"', value).encode()


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_beat_with_an_absurd_number_is_unreadable_and_says_where(
    memory_store: ObjectStore, name: str, value: str
) -> None:
    memory_store.put(WORKER_KEY, body(name, value))
    memory_store.put("heartbeats/rollout/rollout-us-east-1.json", body("id", '"rollout-us-east-1"'))
    found = look(memory_store)
    assert [beat.id for beat in found.beats] == ["rollout-us-east-1"]
    assert list(found.unreadable) == [WORKER_KEY]
    assert WORKER_KEY in found.unreadable[WORKER_KEY]


def test_the_largest_numbers_that_a_beat_may_hold_are_read(memory_store: ObjectStore) -> None:
    for name, most in (
        *((name, 2**63 - 1) for name in ("attempt", "beats", "pid", "versions.solver")),
        *((name, 2**53) for name in ("progress.orders_done", "rates.tokens_per_s", "seconds.wait")),
    ):
        assert parse(body(name, str(most)), WORKER_KEY).kind == "rollout"
        with pytest.raises(CorruptError, match=rf"{name.partition('.')[0]}.*less than"):
            parse(body(name, str(most + 2)), WORKER_KEY)
    assert parse(body("beat_s", "253402300799"), WORKER_KEY).beat_s == 253402300799.0
    with pytest.raises(CorruptError, match="beat_s"):
        parse(body("beat_s", "253402300800"), WORKER_KEY)


def test_a_beat_under_another_members_key_or_of_a_region_that_is_no_name_is_unreadable() -> None:
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


def test_a_long_text_of_a_beat_is_cut() -> None:
    assert parse(body("note", json.dumps("x" * 5_000)), WORKER_KEY).note == "x" * 2_000


def test_a_service_writes_no_number_or_text_that_a_reader_would_refuse(
    memory_store: ObjectStore,
) -> None:
    with HeartbeatWriter(memory_store, "trainer", "t", 0, IDLE_S) as pulse:
        pulse.update(
            progress={"step": 3, "loss": float("nan")},
            rates={"a": float("inf"), "b": -1.0, "c": 10**400, "d": 2.0},
        )
        pulse.update(note="\ud800" + "x" * 5_000)
    beat = only(memory_store)
    assert (beat.progress, beat.rates) == ({"step": 3.0}, {"d": 2.0})
    assert beat.note == "?" + "x" * 1_999


def test_a_rival_attempt_whose_beat_is_absurd_supersedes_nobody(memory_store: ObjectStore) -> None:
    left: list[str] = []
    memory_store.put(WORKER_KEY, body("attempt", "1" + "0" * 400))
    with HeartbeatWriter(
        memory_store, "rollout", "rollout-us-east-0", 0, IDLE_S, leave=lambda: left.append("left")
    ):
        pass
    assert (left, only(memory_store).state) == ([], "done")
