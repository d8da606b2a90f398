"""The surroundings of the supervisor: its background sync with MLflow, which never fails the run;
cancellation and suspension in Prefect; other supervisors of the run.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from uuid import UUID

import pytest
from prefect.exceptions import Pause, TerminationSignal

from storage import layout
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import ConfigError
from storage.records.control import Heartbeat, RunEnd, Stop
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.recipes import loader
from tasks.supervision import lifecycle, supervisor, suspension
from tasks.supervision.automatic_restart import Start
from tasks.supervision.launcher import Rival
from tasks.supervision.shutdown import Shutdown
from tests.support.patience import PATIENCE_S
from tests.support.runs import builders
from tests.support.runs.flow_run_states import FlowRunStates, history
from tests.support.runs.supervised import World


class SlowTracker:
    """Counts concurrent calls of `sync`."""

    def __init__(self, trouble: Exception | None = None) -> None:
        self.trouble = trouble
        self.began, self.let_go = threading.Event(), threading.Event()
        self.finished = 0

    def sync(self) -> bool:
        self.began.set()
        assert self.let_go.wait(PATIENCE_S)
        self.finished += 1
        if self.trouble is not None:
            raise self.trouble
        return True


async def leave_during_a_sync(tracker: SlowTracker) -> None:
    async with lifecycle._syncing(tracker, 60.0):  # type: ignore[arg-type]  # all that is asked of a tracker here
        await asyncio.to_thread(tracker.began.wait)
        asyncio.get_running_loop().call_later(0.02, tracker.let_go.set)
    tracker.finished += 10


def test_the_last_sync_begins_after_the_sync_in_flight() -> None:
    tracker = SlowTracker()
    asyncio.run(leave_during_a_sync(tracker))
    assert tracker.finished == 11


def test_an_error_of_the_mlflow_client_is_logged_and_the_run_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "tasks.supervision.lifecycle"):
        asyncio.run(leave_during_a_sync(SlowTracker(RuntimeError("a surprise"))))
    assert "tracking ended early" in caplog.text
    assert "a surprise" in caplog.text


class Live:
    """Counts updates; the one after the block never ends."""

    def __init__(self) -> None:
        self.updates, self.in_block = 0, True
        self.repeated = asyncio.Event()

    async def update(self) -> None:
        self.updates += 1
        if self.updates == 3:
            self.repeated.set()
        if not self.in_block:
            await asyncio.Event().wait()


def test_the_artifacts_are_updated_in_the_block_and_once_after_it_within_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "LAST_UPDATE_S", 0.01)
    live = Live()

    async def supervise() -> int:
        async with lifecycle._showing(live, 0.001):  # type: ignore[arg-type]  # all that is asked of artifacts here
            await live.repeated.wait()
            live.in_block = False
            return live.updates

    before = asyncio.run(asyncio.wait_for(supervise(), PATIENCE_S))
    assert live.updates == before + 1


@pytest.mark.parametrize(
    ("run_id", "name", "named"),
    [(None, "math-baseline", "math-baseline"), ("tiny-1", "math-baseline", "tiny-1")],
)
def test_a_run_without_an_id_has_the_name_of_its_flow_run(
    run_id: str | None,
    name: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(run: ObjectStore, run_id: str, config: object, begun: object) -> None:
        raise ConfigError(f"{run.prefix} {run_id}")

    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path))
    monkeypatch.setattr(lifecycle.flow_run, "get_name", lambda: name)
    monkeypatch.setattr(lifecycle, "_wait_for_others", refuse)
    with pytest.raises(ConfigError, match=f"runs/{named}/? {named}$"):
        asyncio.run(lifecycle.run_training(run_id, "multi_policy_tiny", {}))


@pytest.mark.parametrize(
    ("begun", "last"), [(Start.REQUESTED, []), (Start.AUTOMATIC, ["continue the end"])]
)
def test_a_run_begins_with_a_checked_store_and_without_earlier_suspended_flow_runs(
    begun: Start, last: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step has tests of its own; this one is about which are taken, and when."""
    steps: list[str] = []

    def step(name: str) -> Callable[..., Awaitable[None]]:
        async def taken(*_: object) -> None:
            assert (tmp_path / layout.run_prefix("tiny-1") / layout.RUN).exists()
            steps.append(name)

        return taken

    async def how() -> Start:
        return begun

    async def none(*_: object) -> None:
        return None

    def stop(_: ObjectStore) -> bool:
        raise ConfigError("far enough")

    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path))
    monkeypatch.setattr(lifecycle.store_credentials, "load", lambda: steps.append("credentials"))
    monkeypatch.setattr(lifecycle.object_store, "check_store", lambda _: steps.append("store"))
    monkeypatch.setattr(lifecycle.automatic_restart, "read_start", how)
    monkeypatch.setattr(lifecycle, "rival", none)
    monkeypatch.setattr(lifecycle, "introduce", none)
    monkeypatch.setattr(suspension, "retire_suspended", step("retire suspended"))
    monkeypatch.setattr(lifecycle, "_continue_end", step("continue the end"))
    monkeypatch.setattr(lifecycle, "_has_begun", stop)
    with pytest.raises(ConfigError, match="far enough"):
        asyncio.run(lifecycle.run_training("tiny-1", "multi_policy_tiny", {}))
    assert steps == ["credentials", "store", "retire suspended", *last]


def test_a_name_that_cannot_be_a_run_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path))
    monkeypatch.setattr(lifecycle.flow_run, "get_name", lambda: "my first run")
    with pytest.raises(ConfigError, match="'my first run' cannot be a run id; use up to 100"):
        asyncio.run(lifecycle.run_training(None, "multi_policy_tiny", {}))


def test_a_run_cancelled_during_a_store_outage_is_cancelled_after_it(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "is_being_cancelled", lambda: True)
    world = World(memory_store)
    world.look()
    world.backend.away = True

    async def supervise() -> str:
        supervising = asyncio.create_task(lifecycle._supervise(world.supervisor))
        assert await asyncio.to_thread(world.backend.noticed.wait, PATIENCE_S)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.to_thread(world.backend.lasted.wait, PATIENCE_S)
        world.backend.away = False
        return (await asyncio.wait_for(supervising, PATIENCE_S)).state

    assert asyncio.run(supervise()) == "cancelled"
    stop = runs.read_stop(world.run)
    assert stop is not None
    assert stop.reason == "its flow run was cancelled in Prefect"
    assert len(world.launcher.cancelled) == len(world.launcher.launched)


def test_a_sigterm_without_a_cancellation_in_prefect_does_not_end_the_run(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "is_being_cancelled", lambda: False)
    world = World(memory_store)
    world.look()
    world.run_all()
    world.beat(1)
    before = dict(world.launcher.runs)

    async def supervise() -> None:
        supervising = asyncio.create_task(lifecycle._supervise(world.supervisor))
        await asyncio.sleep(0)  # it begins
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        await supervising

    with pytest.raises(TerminationSignal):
        asyncio.run(supervise())
    assert runs.read_stop(world.run) is None
    assert (world.launcher.runs, world.launcher.cancelled, world.launcher.crashed) == (
        before,
        [],
        [],
    )
    launched = list(world.launcher.launched)
    world.supervisor = world.restarted()
    world.look(rounds=2)
    assert world.launcher.launched == launched, (
        "the next supervisor of the run takes its members over"
    )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _suspend_at(world: World, prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch) -> UUID:
    """Begin a supervisor whose members run; return its flow run, which a person has suspended."""
    world.look()
    world.run_all()
    own = prefect.add("Pending", "Running", "Suspended")
    monkeypatch.setattr(suspension, "own_flow_runs", lambda: (own,))
    return own


def test_a_run_whose_flow_run_is_suspended_is_suspended(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, prefect = World(memory_store), FlowRunStates(monkeypatch)
    own = _suspend_at(world, prefect, monkeypatch)
    shutdown, states = supervisor.Supervisor.shutdown, list[str | None]()

    def note(self: supervisor.Supervisor, stop: Stop) -> Shutdown:
        states.append(prefect.last(own).name)
        return shutdown(self, stop)

    monkeypatch.setattr(supervisor.Supervisor, "shutdown", note)
    monkeypatch.setattr(Shutdown, "all_left", _left_after_another_suspension(prefect, own))
    stop = asyncio.run(asyncio.wait_for(lifecycle._supervise(world.supervisor), PATIENCE_S))
    assert (stop.state, stop.reason) == ("suspended", "its flow run was suspended in Prefect")
    assert runs.read_stop(world.run) == stop
    assert states == ["Suspending"]
    assert prefect.names(own)[-3:] == ["Suspending", "Suspended", "Suspending"]
    assert world.launcher.cancelled == []


def _left_after_another_suspension(
    prefect: FlowRunStates, own: UUID
) -> Callable[..., Awaitable[bool]]:
    """The wait for members during which a person suspends the flow run once more."""

    async def all_left(self: Shutdown, limit_s: float, patient: bool = False) -> bool:
        assert patient, "trainers save a checkpoint"
        prefect.states[own] += history("Suspended")
        while prefect.last(own).name == "Suspended":  # noqa: ASYNC110 - the answer is a state
            await asyncio.sleep(0)
        return True

    return all_left


@pytest.mark.parametrize("state", ["completed", "exhausted"])
def test_a_run_that_was_over_when_it_was_suspended_keeps_its_end(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, state: RunEnd
) -> None:
    world, prefect = World(memory_store), FlowRunStates(monkeypatch)
    over = Stop(state, "all done", 1.0)
    runs.request_stop(world.run, over)
    asyncio.run(world.supervisor.poll())
    own = prefect.add("Pending", "Running", "Suspended")
    monkeypatch.setattr(suspension, "own_flow_runs", lambda: (own,))
    assert asyncio.run(lifecycle._supervise(world.supervisor)) == over
    assert prefect.names(own)[-1] == "Closing"
    assert runs.read_stop(world.run) == over


def test_a_suspension_from_the_command_line_is_one_in_prefect_too(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second suspension changes neither the reason nor the flow run's state."""
    world, prefect = World(memory_store), FlowRunStates(monkeypatch)
    own = _suspend_at(world, prefect, monkeypatch)
    runs.request_stop(world.run, Stop("suspended", "by a command", 1.0))
    asyncio.run(world.supervisor.poll())
    monkeypatch.setattr(Shutdown, "all_left", _left_after_another_suspension(prefect, own))
    stop = asyncio.run(lifecycle._supervise(world.supervisor))
    assert stop.reason == "by a command"
    assert world.supervisor.over == stop
    assert prefect.names(own)[-1] == "Suspending"


def test_a_supervisor_whose_flow_run_got_another_process_leaves_the_members_to_it(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, prefect = World(memory_store), FlowRunStates(monkeypatch)
    own = _suspend_at(world, prefect, monkeypatch)
    prefect.states[own] += history("Resuming")
    with pytest.raises(Pause):
        asyncio.run(asyncio.wait_for(lifecycle._supervise(world.supervisor), PATIENCE_S))
    assert runs.read_stop(world.run) is None
    assert world.launcher.cancelled == []
    assert prefect.last(own).name == "Resuming"


@pytest.mark.parametrize("begun", Start)
def test_a_resumed_supervisor_waits_for_the_one_that_still_leaves(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, begun: Start
) -> None:
    config = loader.load("multi_policy_tiny", LIMITS)
    run, beats, polls = memory_store.sub("runs/tiny-1"), count(), count()
    last_beat = lifecycle._last_heartbeat

    async def alone(run_id: str) -> None:
        return None

    def look(run: ObjectStore) -> object:
        state = "working" if next(polls) < 30 else "done"
        builders.put_heartbeat(run, _beat(next(beats), state))
        return last_beat(run)

    monkeypatch.setattr(lifecycle, "rival", alone)
    monkeypatch.setattr(lifecycle, "_last_heartbeat", look)
    asyncio.run(lifecycle._wait_for_others(run, "tiny-1", config, begun))
    assert (next(polls) > 30) is (begun is Start.RESUMED)


@pytest.mark.parametrize("suspended", [True, False])
def test_a_supervisor_that_died_while_it_was_suspended_is_continued(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, suspended: bool
) -> None:
    prefect = FlowRunStates(monkeypatch)
    prefect.add("Running", *["Suspended"] * suspended, "Crashed")
    world = World(memory_store)
    asyncio.run(lifecycle._continue_end(world.run, "tiny-1", world.config))
    stop = runs.read_stop(world.run)
    assert (stop.state if stop else None) == ("suspended" if suspended else None)


@pytest.mark.parametrize("state", ["suspended", "cancelled", "failed", None])
@pytest.mark.parametrize("begun", Start)
def test_a_resumed_flow_run_ends_a_suspension_and_keeps_another_stop(
    memory_store: ObjectStore, begun: Start, state: RunEnd | None
) -> None:
    world = World(memory_store)
    if state is not None:
        runs.request_stop(world.run, Stop(state, "by a person", 1.0))
    kept = state in ("cancelled", "failed")
    assert lifecycle._takes_up(memory_store, "run", begun) is (
        begun is Start.REQUESTED or (begun is Start.RESUMED and not kept)
    )


def test_a_run_that_is_cancelled_while_it_is_being_suspended_is_cancelled(
    memory_store: ObjectStore,
) -> None:
    run = World(memory_store).run
    suspended = runs.request_stop(run, Stop("suspended", "by a person", 1.0))
    assert asyncio.run(lifecycle._last_stop(run, suspended)) == suspended
    cancelled = runs.replace_suspension(run, Stop("cancelled", "by another", 2.0))
    assert asyncio.run(lifecycle._last_stop(run, suspended)) == cancelled
    run.put(layout.STOP, b"{}")
    assert asyncio.run(lifecycle._last_stop(run, suspended)) == suspended


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_suspended_run_that_is_cancelled_while_mlflow_is_served_is_closed(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    run = World(memory_store).run
    suspended = runs.request_stop(run, Stop("suspended", "by a person", 1.0))
    last, closed = Stop("cancelled", "by another", 2.0), list[Stop]()

    class Slow:
        def finish(self, state: str) -> None:
            assert state == "suspended"
            if cancelled:
                runs.replace_suspension(run, last)

    def note(run_id: str, stop: Stop, *_: object) -> None:
        assert run_id == "run"
        closed.append(stop)

    monkeypatch.setattr(lifecycle.closing, "close", note)
    heartbeat = HeartbeatWriter(run, "supervisor", "supervisor", 0, 60.0)
    stop = asyncio.run(lifecycle._close(run, suspended, Slow(), heartbeat, 60.0))  # type: ignore[arg-type]  # all that is asked of a tracker here
    assert (stop, closed) == ((last, [last]) if cancelled else (suspended, []))


def test_a_suspended_run_that_is_started_again_goes_on_and_one_restarted_by_prefect_does_not(
    memory_store: ObjectStore,
) -> None:
    world = World(memory_store)
    runs.request_stop(world.run, Stop("suspended", "by a person", 1.0))
    supervisor.create(memory_store, "run", world.config, "")
    assert runs.read_stop(world.run) is not None
    supervisor.start(memory_store, "run", world.config, "")
    assert runs.read_stop(world.run) is None


LIMITS = {
    "supervise.heartbeat_interval_s": 0.01,
    "supervise.heartbeat_limit_s": 0.05,
    "rollout.lease_ttl_s": 1.0,
}


def _beside_another(
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    heartbeat: Callable[[ObjectStore], None],
    *,
    is_suspended: bool = False,
    is_shown: bool = True,
) -> None:
    """Start a run that Prefect shows as supervised by the flow run f-1, if `is_shown`; `beat` is
    called at every read of its heartbeat.
    """
    config = loader.load("multi_policy_tiny", LIMITS)
    last_beat = lifecycle._last_heartbeat

    async def shown(run_id: str) -> Rival | None:
        return Rival("f-1", is_suspended) if is_shown else None

    def look(run: ObjectStore) -> object:
        heartbeat(run)
        return last_beat(run)

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "rival", shown)
        patch.setattr(lifecycle, "_last_heartbeat", look)
        asyncio.run(lifecycle._refuse_second_supervisor(store.sub("runs/tiny-1"), "tiny-1", config))


def test_a_second_supervisor_is_refused_beside_one_with_fresh_heartbeats(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = count()

    def beat(run: ObjectStore) -> None:
        builders.put_heartbeat(run, _beat(next(beats), "working"))

    with pytest.raises(
        ConfigError,
        match="tiny-1 is supervised already, by the flow run f-1; `astraflow status tiny-1`",
    ):
        _beside_another(memory_store, monkeypatch, beat)


def test_a_silent_supervisor_that_prefect_shows_as_running_is_replaced(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[ObjectStore] = []
    _beside_another(memory_store, monkeypatch, polls.append)
    silent = len(polls)
    run = memory_store.sub("runs/tiny-1")
    builders.put_heartbeat(run, _beat(7, "working"))
    _beside_another(memory_store, monkeypatch, polls.append)
    assert len(polls) == 2 * silent == 12, (
        "one look before, and one a beat until it would count as lost"
    )


def test_a_suspended_flow_run_is_replaced_at_once_when_its_process_has_left(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[ObjectStore] = []
    run = memory_store.sub("runs/tiny-1")
    builders.put_heartbeat(run, _beat(7, "done"))
    _beside_another(memory_store, monkeypatch, polls.append, is_suspended=True)
    assert len(polls) == 1
    beats = count()
    with pytest.raises(ConfigError, match="supervised already"):
        _beside_another(
            memory_store,
            monkeypatch,
            lambda run: builders.put_heartbeat(run, _beat(next(beats), "working")),
            is_suspended=True,
        )


def test_a_silent_supervisor_with_a_local_process_is_slow(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle.flow_processes, "cpu_seconds", {"f-1": 3.5}.get)
    with pytest.raises(ConfigError, match="tiny-1 is supervised already, by the flow run f-1"):
        _beside_another(memory_store, monkeypatch, lambda run: None)


def test_a_second_supervisor_is_refused_beside_one_of_another_prefect_server(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = count()

    def beat(run: ObjectStore) -> None:
        builders.put_heartbeat(run, replace(_beat(next(beats), "working"), host="far"))

    beat(memory_store.sub("runs/tiny-1"))
    with pytest.raises(ConfigError, match="tiny-1 is supervised already, by a process on far, of"):
        _beside_another(memory_store, monkeypatch, beat, is_shown=False)


@pytest.mark.parametrize(("host", "looks"), [("far", 6), (socket.gethostname(), 0)])
def test_a_dead_supervisor_that_prefect_does_not_show_is_replaced_at_once_on_its_own_machine(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, host: str, looks: int
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    beat = replace(_beat(7, "working"), host=host, pid=ended.pid)
    builders.put_heartbeat(memory_store.sub("runs/tiny-1"), beat)
    polls: list[ObjectStore] = []
    _beside_another(memory_store, monkeypatch, polls.append, is_shown=False)
    assert len(polls) == looks


def test_a_supervisor_that_ends_meanwhile_is_replaced(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = iter([_beat(7, "working"), *[_beat(8, "done")] * 9])

    def beat(run: ObjectStore) -> None:
        builders.put_heartbeat(run, next(beats))

    _beside_another(memory_store, monkeypatch, beat)


def _beat(beats: int, state: str) -> Heartbeat:
    return builders.heartbeat("supervisor", "supervisor", beats=beats, state=state)
