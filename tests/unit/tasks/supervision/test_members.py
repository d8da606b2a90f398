"""The supervisor's decision about a member, as a table; and the members of a run."""

import pytest

from storage import layout
from storage.run.runs import create_run
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tasks.recipes import loader
from tasks.supervision.members import Decision, FlowRunPhase, Seen, decide, is_done, members_of
from tests.support.runs import builders
from tests.support.runs.builders import tensors

LIMITS = {"launch_timeout_s": 60.0, "heartbeat_limit_s": 10.0, "stop_timeout_s": 30.0}


@pytest.mark.parametrize(
    ("done", "phase", "since_launch_s", "silent_s", "since_done_s", "expected"),
    [
        (False, FlowRunPhase.NONE, 0, None, 0, Decision.LAUNCH),
        (False, FlowRunPhase.ENDED, 5, 1, 0, Decision.LAUNCH),
        (False, FlowRunPhase.ENDED, 5, None, 0, Decision.LAUNCH),
        (False, FlowRunPhase.SCHEDULED, 59, None, 0, Decision.KEEP),
        (False, FlowRunPhase.SCHEDULED, 6100, None, 0, Decision.KEEP),
        (False, FlowRunPhase.SCHEDULED, 61, 11, 0, Decision.KEEP),
        (False, FlowRunPhase.PENDING, 59, None, 0, Decision.KEEP),
        (False, FlowRunPhase.PENDING, 61, None, 0, Decision.LOST),
        (False, FlowRunPhase.RUNNING, 59, None, 0, Decision.KEEP),
        (False, FlowRunPhase.RUNNING, 61, None, 0, Decision.LOST),
        (False, FlowRunPhase.RUNNING, 500, 9, 0, Decision.KEEP),
        (False, FlowRunPhase.RUNNING, 500, 11, 0, Decision.LOST),
        (True, FlowRunPhase.NONE, 0, None, 5, Decision.KEEP),
        (True, FlowRunPhase.ENDED, 500, 400, 500, Decision.KEEP),
        (True, FlowRunPhase.RUNNING, 500, 400, 29, Decision.KEEP),
        (True, FlowRunPhase.RUNNING, 500, 1, 31, Decision.RETIRE),
    ],
)
def test_decision(
    done: bool,
    phase: FlowRunPhase,
    since_launch_s: float,
    silent_s: float | None,
    since_done_s: float,
    expected: Decision,
) -> None:
    assert (
        decide(
            Seen(
                done=done,
                phase=phase,
                since_launch_s=since_launch_s,
                silent_s=silent_s,
                since_done_s=since_done_s,
            ),
            **LIMITS,
        )
        is expected
    )


@pytest.mark.parametrize(
    ("phase", "since_launch_s", "silent_s", "expected"),
    [
        (FlowRunPhase.PENDING, 599, None, Decision.KEEP),
        (FlowRunPhase.PENDING, 601, None, Decision.LOST),
        (FlowRunPhase.RUNNING, 5000, 99, Decision.KEEP),
        (FlowRunPhase.RUNNING, 5000, 101, Decision.LOST),
        (FlowRunPhase.ENDED, 5000, 50, Decision.LAUNCH),
    ],
)
def test_a_silent_member_with_a_working_process_is_slow_up_to_ten_times_the_limit(
    phase: FlowRunPhase, since_launch_s: float, silent_s: float | None, expected: Decision
) -> None:
    assert (
        decide(
            Seen(
                done=False,
                phase=phase,
                since_launch_s=since_launch_s,
                silent_s=silent_s,
                works=True,
            ),
            **LIMITS,
        )
        is expected
    )


@pytest.mark.parametrize(("failures", "factor"), [(0, 1), (1, 1), (2, 2), (3, 4), (9, 10)])
def test_an_attempt_may_be_silent_for_longer_the_more_attempts_before_it_ended_soon(
    failures: int, factor: int
) -> None:
    def lost(since_launch_s: float, silent_s: float | None) -> bool:
        seen = Seen(
            done=False,
            phase=FlowRunPhase.RUNNING,
            since_launch_s=since_launch_s,
            silent_s=silent_s,
            failures=failures,
        )
        return decide(seen, **LIMITS) is Decision.LOST

    assert not lost(60 * factor - 1, None)
    assert lost(60 * factor + 1, None)
    assert not lost(6000, 10 * factor - 1)
    assert lost(6000, 10 * factor + 1)


@pytest.mark.parametrize(
    ("since_done_s", "expected"), [(299, Decision.KEEP), (301, Decision.RETIRE)]
)
def test_a_done_member_may_end_slowly_while_its_process_works(
    since_done_s: float, expected: Decision
) -> None:
    assert (
        decide(
            Seen(
                done=True,
                phase=FlowRunPhase.RUNNING,
                since_launch_s=5000,
                silent_s=400,
                since_done_s=since_done_s,
                works=True,
            ),
            **LIMITS,
        )
        is expected
    )


def test_the_default_recipe_has_a_trainer_for_each_policy_and_a_worker_in_each_region() -> None:
    members = members_of(loader.load("multi_policy_tiny"))
    assert [member.id for member in members] == [
        "base-model",
        "dataflow",
        "trainer-solver",
        "trainer-verifier",
        "rollout-us-east-0",
        "rollout-eu-west-0",
        "evaluation",
    ]
    launched = [(member.deployment, member.queue) for member in members if member.kind == "rollout"]
    assert launched == [("rollout/worker", "us-east"), ("rollout/worker", "eu-west")]
    assert {member.queue for member in members if member.kind != "rollout"} == {""}


def test_members_of_a_region_are_launched_in_the_work_queue_of_its_name() -> None:
    regions = {
        "eu-west": {"workers": 0},
        "mars": {"workers": 2, "mirror": "memory://mars"},
        "moon": {"deployment": "rollout/gpu", "mirror": "memory://moon"},
    }
    members = members_of(loader.load("single_policy_tiny", {"rollout.regions": regions}))
    assert [
        (member.id, member.deployment, member.queue, member.parameters)
        for member in members
        if member.kind in ("rollout", "mirror")
    ] == [
        ("mirror-mars", "mirror/mirror", "mars", {"region": "mars"}),
        ("mirror-moon", "mirror/mirror", "moon", {"region": "moon"}),
        ("rollout-us-east-0", "rollout/worker", "us-east", {"region": "us-east"}),
        ("rollout-mars-0", "rollout/worker", "mars", {"region": "mars"}),
        ("rollout-mars-1", "rollout/worker", "mars", {"region": "mars"}),
        ("rollout-moon-0", "rollout/gpu", "", {"region": "moon"}),
    ]


def test_each_further_node_of_a_trainer_is_a_member(memory_store: ObjectStore) -> None:
    config = loader.load("multi_policy_tiny", {"steps": 1, "policies.solver.train.nodes": 3})
    nodes = [member for member in members_of(config) if member.kind == "trainer_node"]
    assert [(node.id, node.deployment, node.parameters, node.queue) for node in nodes] == [
        (
            f"trainer-solver-node-{node}",
            "train-node/trainer-node",
            {"policy": "solver", "node": node},
            "",
        )
        for node in (1, 2)
    ]
    run = create_run(memory_store, "run", config.model_dump(mode="json"))
    publisher.publish(run, "solver", 0, tensors())
    assert not any(is_done(run, config, node) for node in nodes)
    publisher.publish(run, "solver", 1, tensors(1))
    assert not any(is_done(run, config, node) for node in nodes), "the last checkpoint needs them"
    builders.checkpoint(run, "solver", 1)
    assert all(is_done(run, config, node) for node in nodes)


def test_a_member_is_done_when_its_objects_exist(memory_store: ObjectStore) -> None:
    config = loader.load("multi_policy_tiny", {"steps": 1})
    run = create_run(memory_store, "run", config.model_dump(mode="json"))
    members = {member.id: member for member in members_of(config)}
    assert not any(is_done(run, config, member) for member in members.values())
    for policy in ("solver", "verifier"):
        publisher.publish(run, policy, 0, tensors())
    for policy in ("solver", "verifier"):
        publisher.publish(run, policy, 1, tensors(1))
    builders.checkpoint(run, "solver", 1)
    run.create(layout.orders_end(), b"{}")
    done = {name for name, member in members.items() if is_done(run, config, member)}
    assert done == {
        "base-model",
        "trainer-solver",
        "dataflow",
        "rollout-us-east-0",
        "rollout-eu-west-0",
    }


def test_a_mirror_is_done_when_every_version_is_at_home(
    memory_store: ObjectStore,
) -> None:
    config = loader.load(
        "multi_policy_tiny", {"steps": 1, "rollout.regions.us-east.mirror": "memory://away"}
    )
    run = create_run(memory_store, "run", config.model_dump(mode="json"))
    (mirror,) = [member for member in members_of(config) if member.kind == "mirror"]
    for policy in ("solver", "verifier"):
        assert not is_done(run, config, mirror)
        for version in (0, 1):
            publisher.publish(run, policy, version, tensors(version))
    assert is_done(run, config, mirror)
