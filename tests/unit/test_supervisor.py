"""The supervisor over a hand-written launcher and a clock that only moves when told: who is launched, replaced, given up."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from storage import layout, runs, weights
from storage.errors import ConfigError
from storage.heartbeats import Pulse
from storage.json_objects import encode
from storage.objects import ObjectStore
from storage.records import Heartbeat, Stop
from tasks import recipes, supervisor
from tasks.config import RunConfig
from tasks.launcher import Launched
from tasks.members import Member, Phase
from tests.builders import tensors


class ScriptedLauncher:
    """Flow runs as a dict that the test changes."""

    def __init__(self) -> None:
        self.runs: dict[str, Launched] = {}
        self.launched: list[tuple[str, int]] = []
        self.cancelled: list[str] = []
        self.crashed: list[str] = []
        self.buried: list[str] = []
        self.away = False

    async def launch(self, member: Member, attempt: int) -> Launched | None:
        if self.away:
            return None
        self.launched.append((member.id, attempt))
        self.runs[member.id] = Launched(attempt, Phase.PENDING, f"{member.id}-{attempt}", "Scheduled")
        return self.runs[member.id]

    async def newest(self) -> Mapping[str, Launched] | None:
        return None if self.away else dict(self.runs)

    async def declare_crashed(self, launched: Launched, reason: str) -> None:
        self.crashed.append(launched.flow_run_id)

    async def cancel(self, launched: Launched) -> None:
        self.cancelled.append(launched.flow_run_id)
        for member, found in self.runs.items():
            if found == launched and found.phase is Phase.PENDING:
                self.set(member, Phase.ENDED)

    async def bury(self, ended: Sequence[Launched]) -> None:
        self.buried += [launched.flow_run_id for launched in ended]

    def set(self, member: str, phase: Phase) -> None:
        self.runs[member] = replace(self.runs[member], phase=phase, state_name=phase.value)


class World:
    def __init__(self, store: ObjectStore) -> None:
        overrides = {
            "steps": 1,
            "supervise.restarts_max": 2,
            "supervise.stop_timeout_s": 0.01,
            "supervise.poll_interval_s": 0.01,
        }
        self.config: RunConfig = recipes.load("multi_policy_tiny", overrides)
        self.run = supervisor.start(store, "run", self.config, "")
        self.now_s = 1000.0
        self.launcher = ScriptedLauncher()
        self.supervisor = self.restarted()

    def restarted(self) -> supervisor.Supervisor:
        pulse = Pulse(self.run, "supervisor", "supervisor", 0, 60.0)
        return supervisor.Supervisor(self.run, self.config, pulse, self.launcher, clock=lambda: self.now_s)

    def look(self, rounds: int = 1, seconds: float = 1.0) -> Stop | None:
        stop = None
        for _ in range(rounds):
            self.now_s += seconds
            stop = asyncio.run(self.supervisor._look())
        return stop


@pytest.fixture
def world(memory_store: ObjectStore) -> World:
    return World(memory_store)


def test_every_member_is_launched_once(world: World) -> None:
    world.look(rounds=3)
    assert sorted(world.launcher.launched) == [
        ("base-model", 0),
        ("dataflow", 0),
        ("evaluation", 0),
        ("rollout-eu-west-0", 0),
        ("rollout-us-east-0", 0),
        ("trainer-solver", 0),
        ("trainer-verifier", 0),
    ]


def test_a_crashed_member_is_launched_again_with_the_next_attempt(world: World) -> None:
    world.look()
    world.launcher.set("rollout-us-east-0", Phase.ENDED)
    world.look()
    assert world.launcher.launched[-1] == ("rollout-us-east-0", 1)
    assert world.launcher.buried == ["rollout-us-east-0-0"]


def test_a_member_that_never_beats_is_declared_crashed_and_replaced(world: World) -> None:
    world.look()
    world.launcher.set("dataflow", Phase.RUNNING)
    world.look(seconds=world.config.supervise.launch_timeout_s + 1)
    assert "dataflow-0" in world.launcher.crashed
    assert ("dataflow", 1) in world.launcher.launched


def test_a_member_whose_heart_stops_is_replaced_and_one_that_beats_is_kept(world: World) -> None:
    world.look()
    for member in world.launcher.runs:
        world.launcher.set(member, Phase.RUNNING)
    limit_s = world.config.supervise.heartbeat_limit_s
    for name in ("trainer-solver", "trainer-verifier"):
        beat(world, name, beats=1)
    world.look()
    beat(world, "trainer-solver", beats=2)
    world.look(seconds=limit_s - 1)
    world.look(seconds=2)
    assert world.launcher.crashed == ["trainer-verifier-0"]


def beat(world: World, member: str, beats: int) -> None:
    heartbeat = Heartbeat("trainer", member, 0, beats, 1.0, 1.0, 1, "here", "working")
    world.run.put(layout.heartbeat("trainer", member), encode(heartbeat))


def test_while_prefect_is_away_nothing_is_launched_or_lost(world: World) -> None:
    world.look()
    before = list(world.launcher.launched)
    world.launcher.away = True
    world.look(rounds=5, seconds=1000)
    assert world.launcher.launched == before
    assert world.launcher.crashed == []


def test_a_restarted_supervisor_attaches_to_the_flow_runs_it_finds(world: World) -> None:
    world.look()
    before = list(world.launcher.launched)
    world.supervisor = world.restarted()
    world.look(rounds=3)
    assert world.launcher.launched == before


def test_a_member_that_keeps_dying_fails_the_run_and_is_named(world: World) -> None:
    stop = None
    for _ in range(10):
        stop = world.look(seconds=40)
        if stop is not None:
            break
        world.launcher.set("dataflow", Phase.ENDED)
    assert stop is not None
    assert stop.state == "failed"
    assert "dataflow ended 3 times in a row" in stop.reason
    assert runs.read_stop(world.run) == stop


def test_one_worker_that_keeps_dying_does_not_fail_a_run_that_has_another(world: World) -> None:
    for _ in range(10):
        assert world.look(seconds=5) is None
        world.launcher.set("rollout-us-east-0", Phase.ENDED)
    attempts = [attempt for member, attempt in world.launcher.launched if member == "rollout-us-east-0"]
    assert attempts == [0, 1, 2]


def test_the_run_is_completed_when_every_members_work_is_in_the_store(world: World) -> None:
    from tasks import evals
    from tests.evaluations import evaluation

    for policy in ("solver", "verifier"):
        weights.publish(world.run, policy, 0, tensors())
        weights.publish(world.run, policy, 1, tensors(1))
    world.run.create(layout.orders_end(), b"{}")
    assert world.look() is None
    evals.commit(world.run, evaluation({"solver": 1, "verifier": 1}))
    stop = world.look()
    assert stop is not None
    assert (stop.state, runs.read_stop(world.run)) == ("completed", stop)


def test_after_the_stop_who_waits_is_not_begun_and_who_does_not_leave_is_cancelled(world: World) -> None:
    world.look()
    for member in ("dataflow", "trainer-solver"):
        world.launcher.set(member, Phase.RUNNING)
    runs.request_stop(world.run, Stop("cancelled", "enough", 1.0))
    first_asked: list[str] = []

    async def supervise() -> Stop:
        async def tick() -> None:
            while True:
                world.now_s += 1
                await asyncio.sleep(0.005)
                if len(world.launcher.cancelled) == 5 and not first_asked:
                    first_asked.extend(world.launcher.cancelled)
                    world.launcher.set("dataflow", Phase.ENDED)

        ticking = asyncio.create_task(tick())
        try:
            return await world.supervisor.supervise()
        finally:
            ticking.cancel()

    world.supervisor.leave_within_s = 20.0
    assert asyncio.run(supervise()).state == "cancelled"
    assert sorted(first_asked) == [
        "base-model-0",
        "evaluation-0",
        "rollout-eu-west-0-0",
        "rollout-us-east-0-0",
        "trainer-verifier-0",
    ]
    assert world.launcher.cancelled[5:] == ["trainer-solver-0"]
    assert "dataflow-0" in world.launcher.buried


def test_a_stopped_run_is_taken_up_again_and_a_completed_one_is_refused(world: World, memory_store: ObjectStore) -> None:
    runs.request_stop(world.run, Stop("cancelled", "enough", 1.0))
    supervisor.start(memory_store, "run", world.config, "")
    assert runs.read_stop(world.run) is None
    runs.request_stop(world.run, Stop("completed", "done", 2.0))
    with pytest.raises(ConfigError, match="run run is completed"):
        supervisor.start(memory_store, "run", world.config, "")


def test_the_same_run_id_with_another_configuration_names_what_differs(world: World, memory_store: ObjectStore) -> None:
    other = recipes.load("multi_policy_tiny", {"steps": 2})
    with pytest.raises(ConfigError, match=r"steps is 1 there, 2 here"):
        supervisor.start(memory_store, "run", other, "")
