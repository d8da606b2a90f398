"""The supervisor with a hand-written launcher and a manual clock: which members are launched,
replaced and given up.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from storage import layout
from storage.errors import ConfigError
from storage.records.control import RunEnd, Stop
from storage.run import runs
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tasks.recipes import loader
from tasks.supervision import supervisor
from tasks.supervision.launcher import Launched
from tasks.supervision.members import FlowRunPhase
from tests.support.patience import PATIENCE_S
from tests.support.runs import builders
from tests.support.runs.builders import tensors
from tests.support.runs.supervised import World
from tests.support.stores.strange_objects import STRANGE, link, take_place


@pytest.fixture
def world(memory_store: ObjectStore) -> World:
    return World(memory_store)


def test_each_member_is_launched_once(world: World) -> None:
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


def test_every_decision_is_logged_once_at_info_or_above(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tasks.supervision.supervisor")
    world.look(rounds=2)
    assert caplog.messages == [
        f"{member}: attempt 0 is launched" for member, _ in world.launcher.launched
    ]
    caplog.clear()
    world.run_all()
    world.beat(1)
    for policy in ("solver", "verifier"):
        publisher.publish(world.run, policy, 0, tensors(0))
    world.look()
    assert caplog.messages == ["base-model has done its work"]
    caplog.clear()
    world.look(rounds=3)
    assert caplog.messages == ["base-model has done its work and not left: cancelling it"]
    caplog.clear()
    world.beat(2)
    world.look()
    world.look(seconds=world.config.supervise.heartbeat_limit_s + 1)
    assert "dataflow is lost: attempt 0 is silent" in caplog.messages
    assert "dataflow: attempt 1 is launched" in caplog.messages


def test_the_last_words_of_a_member_that_died_are_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.look()
    world.launcher.words["trainer-solver-0"] = ["step 7", "malloc failed"]
    world.launcher.set(
        "trainer-solver",
        FlowRunPhase.ENDED,
        "Flow run process exited with non-zero status code -9.",
    )
    caplog.clear()
    world.look(rounds=2)
    assert [message for message in caplog.messages if "wrote last" in message] == [
        "trainer-solver: attempt 0 ended: Flow run process exited with non-zero status code -9. "
        "(SIGKILL). It wrote last:"
        "\n  | step 7\n  | malloc failed"
    ]


def test_a_member_that_wrote_nothing_is_logged_with_its_state(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.look()
    world.launcher.set("dataflow", FlowRunPhase.ENDED)
    caplog.clear()
    world.look()
    assert "dataflow: attempt 0 ended: ended. It wrote last: nothing" in caplog.messages


def test_a_member_that_ended_before_this_supervisor_began_has_no_last_words(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.look()
    world.launcher.set("dataflow", FlowRunPhase.ENDED)
    world.supervisor = world.restarted()
    caplog.clear()
    world.look()
    assert ("dataflow", 1) in world.launcher.launched
    assert not [message for message in caplog.messages if "wrote last" in message]


def test_the_end_of_a_run_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tasks.supervision.supervisor")
    runs.request_stop(world.run, Stop("cancelled", "by a person", 1.0))
    asyncio.run(world.supervisor.supervise())
    assert "the run is cancelled: by a person" in caplog.messages


def test_a_crashed_member_is_launched_again_with_the_next_attempt(world: World) -> None:
    world.look()
    world.launcher.set("rollout-us-east-0", FlowRunPhase.ENDED)
    world.look()
    assert world.launcher.launched[-1] == ("rollout-us-east-0", 1)
    assert world.launcher.buried == ["rollout-us-east-0-0"]


def test_a_member_without_heartbeats_is_declared_crashed_and_replaced(world: World) -> None:
    world.look()
    world.launcher.set("dataflow", FlowRunPhase.RUNNING)
    world.look(seconds=world.config.supervise.launch_timeout_s + 1)
    assert "dataflow-0" in world.launcher.crashed
    assert ("dataflow", 1) in world.launcher.launched


def test_a_member_that_falls_silent_is_replaced_and_one_with_heartbeats_is_kept(
    world: World,
) -> None:
    world.look()
    world.run_all()
    limit_s = world.config.supervise.heartbeat_limit_s
    world.beat(1, "trainer-solver", "trainer-verifier")
    world.look()
    world.beat(2, "trainer-solver")
    world.look(seconds=limit_s - 1)
    world.look(seconds=2)
    assert world.launcher.crashed == ["trainer-verifier-0"]


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE.keys())
def test_a_folder_in_place_of_a_heartbeat_is_logged_once_and_stops_nothing(
    local_store: ObjectStore,
    tmp_path: Path,
    make: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(local_store)
    world.look()
    world.run_all()
    world.beat(1)
    world.look()
    (beat,) = (tmp_path / "store").rglob("heartbeats/trainer/trainer-solver.json")
    take_place(beat, make)
    world.beat(2, *(member for member in world.launcher.runs if member != "trainer-solver"))
    for _ in range(3):
        assert world.look() is None
    assert world.launcher.crashed == []
    (said,) = (
        record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()
    )
    assert said.startswith(
        f"a heartbeat cannot be read, its member is taken for silent: {beat} is "
    )
    if make is not STRANGE["a full folder"]:
        world.beat(3)
        world.look()
        assert world.supervisor.watches["trainer-solver"].beat == (0, 3)


def test_heartbeats_that_cannot_be_listed_fail_the_run_with_the_reason(
    local_store: ObjectStore, tmp_path: Path
) -> None:
    world = World(local_store)
    world.look()
    world.beat(1)
    (heartbeats,) = (tmp_path / "store").rglob("heartbeats")
    take_place(heartbeats, link)
    stop = world.look()
    assert stop is not None
    assert (stop.state, stop.reason.startswith(f"{heartbeats} is a symbolic link")) == (
        "failed",
        True,
    )


def test_a_member_without_a_prefect_worker_is_waited_for(world: World) -> None:
    world.look()
    world.look(rounds=20, seconds=world.config.supervise.launch_timeout_s)
    assert world.launcher.crashed == []
    assert len(world.launcher.launched) == 7
    world.launcher.set("dataflow", FlowRunPhase.PENDING)
    world.look(seconds=0.9 * world.config.supervise.launch_timeout_s)
    assert world.launcher.crashed == [], "its process has only begun to start"
    world.look(seconds=0.2 * world.config.supervise.launch_timeout_s)
    assert world.launcher.crashed == ["dataflow-0"]


def test_a_silent_member_is_kept_while_its_process_works_and_replaced_once_it_is_idle(
    world: World,
) -> None:
    limit_s = world.config.supervise.heartbeat_limit_s
    world.look()
    world.run_all()
    world.beat(1)
    world.look()
    for round_ in range(1, 16):
        world.cpu_s["trainer-solver-0"] = 0.3 * round_
        world.beat(
            1 + round_, *(member for member in world.launcher.runs if member != "trainer-solver")
        )
        world.look(seconds=limit_s / 4)
    assert world.launcher.crashed == [], "60 s of silence, three times the limit"
    for round_ in range(2):
        world.beat(
            20 + round_, *(member for member in world.launcher.runs if member != "trainer-solver")
        )
        world.look(seconds=limit_s / 4)
    assert world.launcher.crashed == world.terminated == ["trainer-solver-0"]


def test_a_starved_process_is_idle_only_after_half_of_the_limit(
    world: World,
) -> None:
    """The member is measured while it waits for a server that is equally slow."""
    limit_s = world.config.supervise.launch_timeout_s
    world.look()
    world.launcher.set("dataflow", FlowRunPhase.PENDING)
    for round_ in range(1, 30):
        world.cpu_s["dataflow-0"] = float(round_ // 4)
        world.look(seconds=limit_s / 10)
    assert world.launcher.crashed == []
    world.look(rounds=5, seconds=limit_s / 10)
    assert world.launcher.crashed == world.terminated == ["dataflow-0"]


def test_a_starting_process_is_waited_for_while_it_works(world: World) -> None:
    limit_s = world.config.supervise.launch_timeout_s
    world.look()
    world.launcher.set("dataflow", FlowRunPhase.PENDING)
    world.launcher.set("evaluation", FlowRunPhase.PENDING)
    for round_ in range(12):
        world.cpu_s["dataflow-0"] = 2.0 * round_
        world.look(seconds=limit_s / 4)
    assert world.launcher.crashed == ["evaluation-0"]


def test_work_during_an_earlier_silence_does_not_count_for_this_one(world: World) -> None:
    limit_s = world.config.supervise.heartbeat_limit_s
    others = [
        "rollout-us-east-0",
        "rollout-eu-west-0",
        "trainer-verifier",
        "base-model",
        "dataflow",
        "evaluation",
    ]
    world.look(rounds=2)
    world.run_all()
    world.beat(1)
    world.look()
    world.cpu_s["trainer-solver-0"] = 1.0
    world.beat(2, *others)
    world.look(seconds=0.6 * limit_s)
    world.cpu_s["trainer-solver-0"] = 100.0  # it was slow, and then continued
    world.beat(3)
    world.look(rounds=1, seconds=1)
    world.beat(4, *others)
    world.look(seconds=0.6 * limit_s)
    world.beat(5, *others)
    world.look(seconds=0.5 * limit_s)
    assert world.launcher.crashed == ["trainer-solver-0"]


def test_the_note_names_waiting_members_and_what_each_waits_for(world: World) -> None:
    note = lambda: world.supervisor.heartbeat.last.note  # noqa: E731 - read again and again
    world.look()
    assert note() == (
        "waiting for: base-model, dataflow, trainer-solver, trainer-verifier, rollout-us-east-0, "
        "rollout-eu-west-0 and 1 more "
        "(no worker has taken it, 0 s)"
    )
    world.run_all()
    world.launcher.set("trainer-solver", FlowRunPhase.PENDING)
    world.beat(
        1,
        *(
            member
            for member in world.launcher.runs
            if member not in ("trainer-solver", "rollout-us-east-0")
        ),
    )
    world.look(seconds=12)
    assert note() == ("waiting for: trainer-solver, rollout-us-east-0 (process starting, 12 s)")
    heartbeat = builders.heartbeat("trainer", "trainer-solver", state="starting")
    builders.put_heartbeat(world.run, heartbeat)
    world.look(seconds=3)
    assert (
        note()
        == "waiting for: rollout-us-east-0 (process starting, 15 s), trainer-solver (loading, 15 s)"
    )
    world.beat(2)
    world.look()
    assert note() == ""


def test_the_note_shows_how_to_start_a_worker_in_a_region_without_one(
    memory_store: ObjectStore,
) -> None:
    world = World(memory_store, **{"rollout.regions.mars.workers": 1})
    world.look()
    world.run_all()
    world.launcher.set("rollout-mars-0", FlowRunPhase.SCHEDULED)
    world.beat(1, *(member for member in world.launcher.runs if member != "rollout-mars-0"))
    world.look(seconds=75)
    assert world.supervisor.heartbeat.last.note == (
        "waiting for: rollout-mars-0 (no worker has taken it, 75 s; "
        "start one: astraflow worker --pool rollout --region mars)"
    )


def test_the_note_lists_the_base_model_first_and_the_dataflow_last(
    world: World,
) -> None:
    def says(member: str, beats: int, words: str) -> None:
        kind = world.supervisor.watches[member].member.kind
        heartbeat = builders.heartbeat(kind, member, beats=beats, note=words)
        builders.put_heartbeat(world.run, heartbeat)

    world.look()
    world.run_all()
    world.beat(1, *(member for member in world.launcher.runs if member != "evaluation"))
    says("base-model", 2, "teaching the skill")
    says("dataflow", 2, "nothing to train on")
    world.look()
    assert world.supervisor.heartbeat.last.note == "teaching the skill"
    for policy in ("solver", "verifier"):
        publisher.publish(world.run, policy, 0, tensors())
    world.look()
    assert world.supervisor.heartbeat.last.note == (
        "waiting for: evaluation (process starting, 2 s); nothing to train on"
    )


def test_after_the_last_order_the_note_names_unfinished_members_and_their_work(
    world: World,
) -> None:
    world.look()
    world.run_all()
    world.beat(1)
    for policy in ("solver", "verifier"):
        publisher.publish(world.run, policy, 0, tensors())
        publisher.publish(world.run, policy, 1, tensors(1))
        builders.checkpoint(world.run, policy, 1)
    world.run.create(layout.orders_end(), b"{}")
    heartbeat = builders.heartbeat("evaluation", "evaluation", beats=7, note="evaluating solver 1")
    builders.put_heartbeat(world.run, heartbeat)
    world.look()
    assert world.supervisor.heartbeat.last.note == "waiting for: evaluation (evaluating solver 1)"


def test_after_the_end_the_heartbeat_names_the_remaining_members(world: World) -> None:
    world.look()
    world.run_all()
    for member in world.launcher.runs:
        if member not in ("evaluation", "dataflow"):
            world.launcher.set(member, FlowRunPhase.ENDED)
    assert not asyncio.run(world.supervisor.shutdown(Stop("completed", "over", 1.0)).all_left(0.0))
    last = world.supervisor.heartbeat.last
    assert (last.state, last.note) == ("leaving", "dataflow, evaluation")


@pytest.mark.parametrize(
    ("state", "cancelled"),
    [
        ("completed", []),
        ("exhausted", []),
        ("suspended", []),
        ("cancelled", ["evaluation-0"]),
        ("failed", ["evaluation-0"]),
    ],
)
def test_after_a_planned_end_a_working_member_has_more_time_to_end(
    world: World, state: RunEnd, cancelled: list[str]
) -> None:
    world.look()
    world.run_all()
    for member in world.launcher.runs:
        if member != "evaluation":
            world.launcher.set(member, FlowRunPhase.ENDED)
    newest, polls = world.launcher.newest, [0]

    async def leaves_late() -> Mapping[str, Launched] | None:
        polls[0] += 1
        world.now_s += 6.0
        world.cpu_s["evaluation-0"] = float(polls[0])
        if polls[0] == 8:
            world.launcher.set("evaluation", FlowRunPhase.ENDED)
        return await newest()

    world.launcher.newest = leaves_late  # type: ignore[method-assign]  # for the end of the run
    world.supervisor.leave_within_s = 20.0
    asyncio.run(world.supervisor.shutdown(Stop(state, "over", 1.0)).run())
    assert world.launcher.cancelled == cancelled


def with_a_successor(world: World) -> None:
    """Attempt 0 of trainer-solver fell silent, and attempt 1 has replaced it."""
    world.look()
    world.run_all()
    world.beat(5)
    world.look()
    world.beat(6, *(member for member in world.launcher.runs if member != "trainer-solver"))
    world.look(seconds=world.config.supervise.heartbeat_limit_s + 1)
    assert world.launcher.launched[-1] == ("trainer-solver", 1)
    world.run_all()


def test_an_older_attempt_that_still_runs_does_not_stop_its_successor(
    world: World,
) -> None:
    with_a_successor(world)
    for round_ in range(100):
        world.beat(10 + round_)
        world.beat(10 + round_, "trainer-solver", attempt=1 if round_ % 3 else 0)
        world.look(seconds=2)
    assert world.launcher.crashed == ["trainer-solver-0"]


def test_heartbeats_of_an_older_attempt_do_not_keep_a_silent_successor(world: World) -> None:
    with_a_successor(world)
    world.beat(10)
    world.beat(1, "trainer-solver", attempt=1)
    for round_ in range(15):
        world.look(seconds=2)
        world.beat(20 + round_)
    assert world.launcher.crashed == ["trainer-solver-0", "trainer-solver-1"]


def test_while_prefect_is_unreachable_no_member_is_launched_or_lost(world: World) -> None:
    world.look()
    before = list(world.launcher.launched)
    world.launcher.away = True
    world.look(rounds=5, seconds=1000)
    assert world.launcher.launched == before
    assert world.launcher.crashed == []


def test_an_unreachable_store_ends_no_supervisor(world: World) -> None:
    world.look()
    before = list(world.launcher.launched)
    world.backend.away = True

    async def supervise() -> Stop:
        supervising = asyncio.create_task(world.supervisor.supervise())
        assert await asyncio.to_thread(world.backend.lasted.wait, PATIENCE_S)
        world.backend.away = False
        for member in world.launcher.runs:
            world.launcher.set(member, FlowRunPhase.ENDED)
        runs.request_stop(world.run, Stop("cancelled", "enough", 1.0))
        return await asyncio.wait_for(supervising, PATIENCE_S)

    assert asyncio.run(supervise()).state == "cancelled"
    assert world.launcher.launched == before


def test_an_unreadable_stop_ends_the_run_through_prefect(world: World) -> None:
    world.look()
    world.run.put(layout.STOP, b"{}")
    stop = world.look()
    assert stop is not None
    assert stop.state == "failed"
    assert layout.STOP in stop.reason
    asyncio.run(world.supervisor.shutdown(stop).run())
    assert len(world.launcher.cancelled) == len(world.launcher.launched)


def test_an_outage_of_the_store_does_not_count_as_silence(world: World) -> None:
    limit_s = world.config.supervise.heartbeat_limit_s
    world.look()
    world.run_all()
    world.beat(1)
    world.look()
    world.backend.away = True
    world.look(seconds=2)
    world.look(rounds=5, seconds=limit_s / 2)
    world.backend.away = False
    world.look(seconds=2)
    assert world.launcher.crashed == []
    world.beat(2, *(member for member in world.launcher.runs if member != "dataflow"))
    world.look(seconds=2)
    world.look(seconds=limit_s / 2)
    assert world.launcher.crashed == []
    world.look(seconds=limit_s / 2 - 2)
    assert world.launcher.crashed == ["dataflow-0"]
    world.look(seconds=limit_s / 2)
    assert len(world.launcher.crashed) == 7, "after the outage, silence is silence again"
    world.launcher.set("dataflow", FlowRunPhase.RUNNING)
    world.look(seconds=world.config.supervise.launch_timeout_s + 1)
    assert "dataflow-1" in world.launcher.crashed


def test_an_outage_does_not_count_against_starting_and_ending_members(world: World) -> None:
    world.look()
    world.run_all()
    for policy in ("solver", "verifier"):
        publisher.publish(world.run, policy, 0, tensors())
    world.look()
    world.backend.away = True
    world.look(seconds=0.001)
    world.look(rounds=2, seconds=world.config.supervise.launch_timeout_s)
    world.backend.away = False
    world.look(seconds=0.001)
    assert (world.launcher.crashed, world.launcher.cancelled) == ([], [])


def test_a_poll_delayed_by_a_slow_store_does_not_count_as_silence(world: World) -> None:
    world.look()
    world.run_all()
    world.beat(1)
    world.look()
    read, slow_s = runs.read_stop, world.config.supervise.heartbeat_limit_s * 2

    def slowly(run: ObjectStore) -> Stop | None:
        world.now_s += slow_s
        return read(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "read_stop", slowly)
        world.look()
    assert world.launcher.crashed == []


def test_a_restarted_supervisor_uses_the_existing_flow_runs(world: World) -> None:
    world.look()
    before = list(world.launcher.launched)
    world.supervisor = world.restarted()
    world.look(rounds=3)
    assert world.launcher.launched == before


def test_a_member_silent_during_the_absence_of_a_supervisor_is_replaced_within_the_limit(
    world: World,
) -> None:
    world.look()
    world.run_all()
    world.beat(1)
    world.supervisor = world.restarted()
    world.look(seconds=1000)
    world.beat(2, *(member for member in world.launcher.runs if member != "dataflow"))
    world.look(seconds=world.config.supervise.heartbeat_limit_s - 1)
    assert world.launcher.crashed == []
    world.look(seconds=2)
    assert world.launcher.crashed == ["dataflow-0"]


def test_attempt_numbers_continue_from_the_store_when_prefect_has_lost_them(
    world: World,
) -> None:
    world.beat(7, "trainer-solver", attempt=4)
    world.look()
    assert ("trainer-solver", 5) in world.launcher.launched
    world.run_all()
    world.look(seconds=world.config.supervise.heartbeat_limit_s + 1)
    assert world.launcher.crashed == [], "what a former life left is not the silence of this one"


def test_a_heartbeat_of_an_attempt_that_cannot_have_been_launched_is_ignored(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The attempt after it could write no heartbeat that is read."""
    world.look()
    world.run_all()
    world.beat(1)
    world.beat(7, "trainer-solver", attempt=2**63 - 1)
    world.look(rounds=3)
    assert [each for each in caplog.messages if "cannot be read" in each] == [
        "a heartbeat cannot be read, its member is taken for silent: "
        "heartbeats/trainer/trainer-solver.json is of attempt 9223372036854775807, which was not "
        "launched"
    ]
    world.beat(8, "trainer-solver", attempt=0)  # the living attempt overwrites it
    world.look()
    world.launcher.set("trainer-solver", FlowRunPhase.ENDED)
    world.look()
    assert world.launcher.launched[-1] == ("trainer-solver", 1)


def test_a_restarted_supervisor_launches_no_member_before_prefect_lists_the_flow_runs(
    world: World,
) -> None:
    world.look()
    before = list(world.launcher.launched)
    world.supervisor = world.restarted()
    world.launcher.newest, newest = _nothing, world.launcher.newest  # type: ignore[method-assign]  # Prefect's reads fail alone
    world.look()
    world.launcher.newest = newest  # type: ignore[method-assign]
    world.look()
    assert world.launcher.launched == before


async def _nothing() -> None:
    return None


def test_an_ended_attempt_counts_as_one_failure_however_often_a_launch_is_refused(
    world: World,
) -> None:
    world.look()
    world.launcher.refuses = True
    world.launcher.set("trainer-solver", FlowRunPhase.ENDED)
    assert world.look(rounds=30, seconds=2) is None
    assert world.launcher.buried == ["trainer-solver-0"]
    world.launcher.refuses = False
    world.look()
    assert world.launcher.launched[-1] == ("trainer-solver", 1)


def test_the_early_failures_of_a_member_are_reset_after_a_long_life(world: World) -> None:
    long_s = 3 * world.config.supervise.heartbeat_limit_s + 1
    for attempt in range(8):
        world.beat(2 * attempt)
        assert world.look(seconds=4) is None
        assert world.launcher.launched[-1][1] == attempt
        if attempt % 2:
            world.beat(2 * attempt + 1)
            world.beat(1, "trainer-solver", attempt=attempt)
            world.look(seconds=long_s)
        world.launcher.set("trainer-solver", FlowRunPhase.ENDED)
    assert world.launcher.crashed == []


def test_a_missing_deployment_fails_the_run_and_its_members_end(world: World) -> None:
    world.launcher.lacks = ("rollout/worker",)
    stop = asyncio.run(world.supervisor.supervise())
    assert (stop.state, stop.reason) == ("failed", "no deployment 'rollout/worker'")
    assert runs.read_stop(world.run) == stop
    assert len(world.launcher.cancelled) == len(world.launcher.launched) > 0


def test_the_reason_of_a_runs_end_is_kept_until_it_is_stored(world: World) -> None:
    world.launcher.lacks = ("rollout/worker",)
    world.backend.read_only = True
    assert world.look(rounds=3) is None
    world.launcher.lacks = ()
    world.backend.read_only = False
    stop = world.look()
    assert stop is not None
    assert stop.reason == "no deployment 'rollout/worker'"
    assert runs.read_stop(world.run) == stop


def test_a_stop_request_during_a_poll_is_not_lost(world: World) -> None:
    newest = world.launcher.newest

    async def asked_meanwhile() -> Mapping[str, Launched] | None:
        world.supervisor.over = Stop("cancelled", "enough", 1.0)
        return await newest()

    world.launcher.newest = asked_meanwhile  # type: ignore[method-assign]  # for one look
    stop = world.look()
    assert stop is not None
    assert stop.reason == "enough"


def test_no_member_is_launched_after_a_stop_request(world: World) -> None:
    asked = runs.request_stop(world.run, Stop("cancelled", "enough", 1.0))
    assert world.look() == asked
    assert world.launcher.launched == []


def test_a_member_that_fails_repeatedly_fails_the_run_and_is_named(world: World) -> None:
    stop = None
    for _ in range(10):
        stop = world.look(seconds=40)
        if stop is not None:
            break
        world.launcher.set("dataflow", FlowRunPhase.ENDED)
    assert stop is not None
    assert stop.state == "failed"
    assert "dataflow ended 3 times in a row" in stop.reason
    assert runs.read_stop(world.run) == stop


def test_ends_before_a_new_supervisor_count_for_none_of_its_replacements(
    memory_store: ObjectStore,
) -> None:
    """A resumed run's members ended with the run, however often it was cancelled."""
    world = World(memory_store, **{"supervise.restarts_max": 0})
    for attempt in range(3):
        assert world.look(rounds=2) is None
        assert {launched.attempt for launched in world.launcher.runs.values()} == {attempt}
        for member in world.launcher.runs:
            world.launcher.set(member, FlowRunPhase.ENDED)
        world.supervisor = world.restarted()
    assert world.look() is None
    world.launcher.set("dataflow", FlowRunPhase.ENDED)
    stop = world.look(seconds=40)
    assert stop is not None
    assert stop.reason.startswith("dataflow ended 1 times in a row without finishing")
    assert ("dataflow", 4) not in world.launcher.launched


def test_an_attempt_that_a_new_supervisor_saw_running_counts_when_it_ends(
    memory_store: ObjectStore,
) -> None:
    world = World(memory_store, **{"supervise.restarts_max": 0})
    world.look()
    world.run_all()
    world.supervisor = world.restarted()
    assert world.look() is None
    world.launcher.set("dataflow", FlowRunPhase.ENDED)
    stop = world.look()
    assert stop is not None
    assert stop.reason.startswith("dataflow ended 1 times in a row without finishing")


def test_pauses_between_launches_after_early_failures_double_up_to_a_limit(
    memory_store: ObjectStore,
) -> None:
    world = World(memory_store, **{"supervise.restarts_max": 20})
    at_s: list[float] = []
    for _ in range(500):
        world.look(seconds=0.25)
        if len(world.launcher.launched) and world.launcher.runs["dataflow"].attempt == len(at_s):
            at_s.append(world.now_s)
        world.launcher.set("dataflow", FlowRunPhase.ENDED)
    pauses = [later - earlier for earlier, later in pairwise(at_s)]
    assert pauses[:9] == [0.25, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_many_workers_of_a_region_are_launched_a_few_per_poll(
    memory_store: ObjectStore,
) -> None:
    world = World(
        memory_store, **{"rollout.regions.us-east.workers": 7, "rollout.regions.eu-west.workers": 2}
    )
    started = []
    for _ in range(4):
        before = len(world.launcher.launched)
        world.look()
        new = [
            member
            for member, _ in world.launcher.launched[before:]
            if member.startswith("rollout-us-east-")
        ]
        started.append(sorted(int(member.rpartition("-")[2]) for member in new))
    assert started == [[0, 1, 2], [3, 4, 5], [6], []]
    assert {"rollout-eu-west-0", "rollout-eu-west-1"} <= {
        member for member, _ in world.launcher.launched[:9]
    }


def test_one_worker_that_fails_repeatedly_does_not_fail_a_run_with_another_worker(
    world: World,
) -> None:
    for _ in range(10):
        assert world.look(seconds=5) is None
        world.launcher.set("rollout-us-east-0", FlowRunPhase.ENDED)
    attempts = [
        attempt for member, attempt in world.launcher.launched if member == "rollout-us-east-0"
    ]
    assert attempts == [0, 1, 2]


def test_the_run_is_completed_when_the_objects_of_every_member_exist(world: World) -> None:
    from storage.run import evaluations
    from tests.support.runs.evaluations import evaluation

    for policy in ("solver", "verifier"):
        publisher.publish(world.run, policy, 0, tensors())
        publisher.publish(world.run, policy, 1, tensors(1))
        builders.checkpoint(world.run, policy, 1)
    world.run.create(layout.orders_end(), b"{}")
    assert world.look() is None
    evaluations.create(world.run, evaluation({"solver": 1, "verifier": 1}))
    stop = world.look()
    assert stop is not None
    assert (stop.state, runs.read_stop(world.run)) == ("completed", stop)


def test_launches_and_losses_of_members_are_events_and_ends_of_done_members_are_not(
    world: World,
) -> None:
    world.look()
    world.run_all()
    world.beat(1)
    world.look()
    launched = world.supervisor.events.waiting()
    assert {each.name for each in launched} == {"member.launched"}
    assert len(launched) == len(world.launcher.launched)
    world.supervisor.events.sent(launched)
    world.launcher.set("trainer-solver", FlowRunPhase.ENDED)
    world.look()
    lost, again = world.supervisor.events.waiting()
    assert (lost.name, lost.key) == ("member.lost", "member.lost/trainer-solver/0")
    assert lost.payload == {
        "member": "trainer-solver",
        "attempt": 0,
        "flow_run": "trainer-solver-0",
        "reason": "ended",
    }
    assert again.key == "member.launched/trainer-solver/1"


def test_after_the_stop_waiting_members_are_cancelled_and_slow_ones_after_a_limit(
    world: World,
) -> None:
    """A process that is starting ends by itself: Prefect would let it run although its flow run is
    cancelled.
    """
    world.look()
    for member in ("dataflow", "trainer-solver"):
        world.launcher.set(member, FlowRunPhase.RUNNING)
    world.launcher.set("evaluation", FlowRunPhase.PENDING)
    runs.request_stop(world.run, Stop("cancelled", "enough", 1.0))
    first_asked: list[str] = []

    async def supervise() -> Stop:
        async def tick() -> None:
            while True:
                world.now_s += 1
                await asyncio.sleep(0.005)
                if len(world.launcher.cancelled) == 4 and not first_asked:
                    first_asked.extend(world.launcher.cancelled)
                    world.launcher.set("dataflow", FlowRunPhase.ENDED)
                    world.launcher.set("evaluation", FlowRunPhase.ENDED)

        ticking = asyncio.create_task(tick())
        try:
            return await world.supervisor.supervise()
        finally:
            ticking.cancel()

    world.supervisor.leave_within_s = 20.0
    assert asyncio.run(supervise()).state == "cancelled"
    assert sorted(first_asked) == [
        "base-model-0",
        "rollout-eu-west-0-0",
        "rollout-us-east-0-0",
        "trainer-verifier-0",
    ]
    assert world.launcher.cancelled[4:] == ["trainer-solver-0"]
    assert "dataflow-0" in world.launcher.buried


def test_a_stopped_run_is_resumed_and_a_completed_one_is_refused(
    world: World, memory_store: ObjectStore
) -> None:
    runs.request_stop(world.run, Stop("cancelled", "enough", 1.0))
    supervisor.start(memory_store, "run", world.config, "")
    assert runs.read_stop(world.run) is None
    runs.request_stop(world.run, Stop("completed", "done", 2.0))
    with pytest.raises(ConfigError, match="run run is completed"):
        supervisor.start(memory_store, "run", world.config, "")


def test_the_closing_steps_of_a_completed_run_are_taken_again_after_the_supervisors_death(
    world: World, memory_store: ObjectStore
) -> None:
    stop = runs.request_stop(world.run, Stop("completed", "done", 2.0))
    for state in ("leaving", "failed"):
        last = builders.heartbeat("supervisor", "supervisor", state=state)
        builders.put_heartbeat(world.run, last)
        supervisor.start(memory_store, "run", world.config, "")
        assert runs.read_stop(world.run) == stop
    assert world.look() == stop, "no member is launched again"
    assert world.launcher.launched == []
    done = builders.heartbeat("supervisor", "supervisor", state="done")
    builders.put_heartbeat(world.run, done)
    builders.put_heartbeat(world.run, builders.heartbeat("trainer", "trainer-solver"))
    with pytest.raises(ConfigError, match="run run is completed"):
        supervisor.start(memory_store, "run", world.config, "")


def test_the_same_run_id_with_another_configuration_names_the_differences(
    world: World, memory_store: ObjectStore
) -> None:
    other = loader.load("multi_policy_tiny", {"steps": 2})
    with pytest.raises(ConfigError, match=r"steps is 1 there, 2 here"):
        supervisor.start(memory_store, "run", other, "")
