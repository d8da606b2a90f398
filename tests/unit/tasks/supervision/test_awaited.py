from deployments.registration import pools
from tasks.supervision.awaited import ROLLOUT_POOL, Awaited, words
from tasks.supervision.members import FlowRunPhase


def test_members_are_grouped_by_what_they_wait_for_with_the_longest_wait() -> None:
    awaited = [
        Awaited(id="evaluation", phase=FlowRunPhase.RUNNING, since_s=9.0, loading=True),
        Awaited(id="dataflow", phase=FlowRunPhase.PENDING, since_s=12.0),
        Awaited(id="trainer-solver", phase=FlowRunPhase.RUNNING, since_s=14.0),
        Awaited(id="rollout-mars-0", phase=FlowRunPhase.SCHEDULED, since_s=5.0, queue="mars"),
        Awaited(id="rollout-moon-0", phase=FlowRunPhase.SCHEDULED, since_s=7.0, queue="moon"),
    ]
    assert words(awaited) == (
        "waiting for: rollout-mars-0, rollout-moon-0 (no worker has taken it, 7 s), "
        "dataflow, trainer-solver (process starting, 14 s), evaluation (loading, 9 s)"
    )
    assert words([]) == ""


def test_after_a_minute_a_region_without_a_worker_is_reported_with_the_start_command() -> None:
    awaited = [
        Awaited(id="trainer-solver", phase=FlowRunPhase.SCHEDULED, since_s=75.0),
        Awaited(id="rollout-mars-0", phase=FlowRunPhase.SCHEDULED, since_s=60.0, queue="mars"),
        Awaited(id="rollout-mars-1", phase=FlowRunPhase.SCHEDULED, since_s=75.0, queue="mars"),
        Awaited(id="rollout-moon-0", phase=FlowRunPhase.SCHEDULED, since_s=59.0, queue="moon"),
        Awaited(id="rollout-mars-2", phase=FlowRunPhase.PENDING, since_s=75.0, queue="mars"),
        Awaited(
            id="rollout-mars-3",
            phase=FlowRunPhase.RUNNING,
            since_s=75.0,
            loading=True,
            queue="mars",
        ),
    ]
    assert words(awaited) == (
        "waiting for: trainer-solver, rollout-moon-0 (no worker has taken it, 75 s), "
        "rollout-mars-0, rollout-mars-1 (no worker has taken it, 75 s; "
        "start one: astraflow worker --pool rollout --region mars), "
        "rollout-mars-2 (process starting, 75 s), rollout-mars-3 (loading, 75 s)"
    )


def test_the_command_names_a_registered_pool() -> None:
    assert ROLLOUT_POOL in set(pools.load())
