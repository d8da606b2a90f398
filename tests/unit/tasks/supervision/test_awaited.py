from deployments.registration.work_pools import POOLS
from tasks.supervision.awaited import ROLLOUT_POOL, Awaited, words
from tasks.supervision.members import Phase


def test_members_are_grouped_by_what_they_lack_with_the_longest_wait_of_each_group() -> None:
    awaited = [
        Awaited("evaluation", Phase.RUNNING, 9.0, loading=True),
        Awaited("dataflow", Phase.PENDING, 12.0),
        Awaited("trainer-solver", Phase.RUNNING, 14.0),
        Awaited("rollout-mars-0", Phase.SCHEDULED, 5.0, queue="mars"),
        Awaited("rollout-moon-0", Phase.SCHEDULED, 7.0, queue="moon"),
    ]
    assert words(awaited) == (
        "waiting for: rollout-mars-0, rollout-moon-0 (no worker has taken it, 7 s), "
        "dataflow, trainer-solver (process starting, 14 s), evaluation (loading, 9 s)"
    )
    assert words([]) == ""


def test_after_a_minute_a_region_without_a_worker_is_told_with_the_command_that_starts_one() -> None:
    awaited = [
        Awaited("trainer-solver", Phase.SCHEDULED, 75.0),
        Awaited("rollout-mars-0", Phase.SCHEDULED, 60.0, queue="mars"),
        Awaited("rollout-mars-1", Phase.SCHEDULED, 75.0, queue="mars"),
        Awaited("rollout-moon-0", Phase.SCHEDULED, 59.0, queue="moon"),
        Awaited("rollout-mars-2", Phase.PENDING, 75.0, queue="mars"),
        Awaited("rollout-mars-3", Phase.RUNNING, 75.0, loading=True, queue="mars"),
    ]
    assert words(awaited) == (
        "waiting for: trainer-solver, rollout-moon-0 (no worker has taken it, 75 s), "
        "rollout-mars-0, rollout-mars-1 (no worker has taken it, 75 s; "
        "start one: prefect worker start --type process --pool rollout --work-queue mars), "
        "rollout-mars-2 (process starting, 75 s), rollout-mars-3 (loading, 75 s)"
    )


def test_the_command_names_a_pool_that_is_registered() -> None:
    assert ROLLOUT_POOL in {pool.name for pool in POOLS}
