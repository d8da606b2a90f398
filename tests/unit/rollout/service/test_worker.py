import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import ModuleType

import pytest

from rollout.agents.chat import user
from rollout.agents.seeds import derived_seed
from rollout.agents.workflow import Agent
from rollout.config import RegionConfig
from rollout.engines.engine import EngineFailedError
from rollout.rewards.reward import Reward
from rollout.service import event_loop, worker_setup
from rollout.service import worker as worker_module
from storage import layout
from storage.coordination import leases
from storage.errors import ConfigError, TransientError
from storage.formats import arrow_sizes
from storage.formats.json_objects import encode
from storage.records.control import Lease, Stop, WaitReason
from storage.records.progress import RolloutProgress
from storage.records.rollouts import NOT_SAMPLED, Episode, FailureKind, Prompt
from storage.run import orders, runs, shards
from storage.store.backend import Backend
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher, replication
from tests.support.patience import PATIENCE_S, until
from tests.support.runs import builders
from tests.support.runs.builders import mirror_next
from tests.support.runs.fakes import publish_base
from tests.support.runs.lifetimes import progress_of
from tests.support.runs.workers import RunningWorker, answered, config, write_orders

pytestmark = pytest.mark.usefixtures("shared_chats")
OVER = Stop("completed", "all steps done", 0.0)


def engine_breaks(prompt: str, seed: int) -> str:
    """Break the engine in order 1."""
    if "1+" in prompt:
        raise EngineFailedError("out of memory")
    return "0"


def held(run: ObjectStore, order: int) -> Lease:
    lease = leases.read_newest(run, order)
    assert lease is not None
    return lease


def version_bytes(run: ObjectStore, policy: str) -> int:
    """Bytes that a worker reads of version 0: its files once, its manifest for them and for the
    tensors.
    """
    keys = run.list(layout.weights(policy, 0))
    return sum(len(run.get(key)) * (2 if key.endswith("/manifest.json") else 1) for key in keys)


def test_an_order_of_more_episodes_than_those_of_the_run_is_not_played(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver", "verifier"])
    write_orders(memory_store, 1, samples=3)
    write_orders(memory_store, 1, start=1)
    with RunningWorker(memory_store, config("actor_and_verify"), episodes_max=4) as worker:
        until(lambda: shards.exists(memory_store, 1))
        until(lambda: "has 6 episodes; at most 4 are allowed" in worker.beat.note)
    assert not shards.exists(memory_store, 0)


def test_each_order_becomes_a_shard_of_the_episodes_of_its_prompts(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver", "verifier"])
    write_orders(memory_store, 3)
    with RunningWorker(memory_store, config("actor_and_verify")) as worker:
        until(answered(memory_store, 3))
        until(lambda: progress_of(worker.beat, RolloutProgress).orders_done == 3)
        runs.request_stop(memory_store, OVER)
        heartbeat = worker.join()
    digest = manifests.read_manifest(memory_store, "solver", 0).digest
    for number in range(3):
        shard = shards.read(memory_store, number)
        assert (shard.order, shard.attempt, shard.worker, shard.region) == (
            number,
            0,
            "rollout-us-east-0",
            "us-east",
        )
        assert [group.prompt.id for group in shard.groups] == [f"p/{number}/0", f"p/{number}/1"]
        episodes = [episode for group in shard.groups for episode in group.episodes]
        assert [episode.reward for episode in episodes] == [1.0] * 4
        assert [[sequence.name for sequence in episode.sequences] for episode in episodes] == [
            ["attempt", "verdict"]
        ] * 4
        assert [episode.sequences[0].starts_episode for episode in episodes] == [True] * 4
        assert shard.weights == {"solver": {0: digest}, "verifier": {0: digest}}
        assert shard.started_s <= shard.finished_s
    sampled = sum(
        int((sequence.owners != NOT_SAMPLED).sum())
        for number in range(3)
        for group in shards.read(memory_store, number).groups
        for episode in group.episodes
        for sequence in episode.sequences
    )
    policies = ("solver", "verifier")
    assert heartbeat.progress == RolloutProgress(
        orders_done=3,
        episodes=12,
        tokens=sampled,
        shard_bytes=sum(len(memory_store.get(layout.shard(number))) for number in range(3)),
        weights_bytes_home={policy: version_bytes(memory_store, policy) for policy in policies},
        refresh_failures=dict.fromkeys(policies, 0),
    )
    assert heartbeat.versions == {"solver": 0, "verifier": 0}
    assert {"wait", "generate", "store"} <= set(heartbeat.seconds)


def test_a_worker_with_a_mirror_reports_the_bytes_read_from_it(memory_store: ObjectStore) -> None:
    run, url = memory_store.sub("runs/one"), "memory://a-mirror-of-a-worker"
    publish_base(run, ["solver"])
    write_orders(run, 1)
    copied = mirror_next(run, replication.of_run(run, url))
    with RunningWorker(run, config(regions={"us-east": RegionConfig(mirror=url)})) as worker:
        until(answered(run, 1))
        worker.stop()
        progress = progress_of(worker.join(), RolloutProgress)
    manifest_bytes = len(run.get(layout.manifest(layout.weights("solver", 0))))
    assert copied is not None
    assert progress.weights_bytes_mirror["solver"] == copied.num_bytes - manifest_bytes
    assert progress.weights_bytes_home["solver"] == 2 * manifest_bytes
    assert progress.shard_bytes == len(run.get(layout.shard(0)))


def test_two_workers_process_each_order_exactly_once(local_store: ObjectStore) -> None:
    publish_base(local_store, ["solver"], delay_s=0.02)
    settings = config()
    with ExitStack() as stack:
        workers = []
        for name in ("a", "b"):
            workers.append(stack.enter_context(RunningWorker(local_store, settings, name)))
            until(lambda: workers[-1].beat.wait_reason is WaitReason.ORDERS)
        write_orders(local_store, 20)
        until(answered(local_store, 20))
        runs.request_stop(local_store, OVER)
        beats = [worker.join() for worker in workers]
    assert sum(progress_of(heartbeat, RolloutProgress).orders_done for heartbeat in beats) == 20
    assert all(progress_of(heartbeat, RolloutProgress).orders_done > 0 for heartbeat in beats)
    assert [held(local_store, number).attempt for number in range(20)] == [0] * 20
    assert {shards.read(local_store, number).worker for number in range(20)} == {"a", "b"}


class Held:
    """A workflow whose episodes wait until `released`."""

    roles: tuple[str, ...] = ("solver",)
    released = threading.Event()

    def __init__(self, reward: Reward) -> None: ...

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        await asyncio.to_thread(self.released.wait, PATIENCE_S)
        turn = await agents["solver"].respond([user(prompt.fields["question"])])
        return Episode(sequences=(turn.context.sequence(1.0),), reward=1.0)


@pytest.fixture
def release() -> Iterator[Callable[[], None]]:
    """Lets the episodes of `Held` go on, from then on."""
    Held.released.clear()
    yield Held.released.set
    Held.released.set()


def test_a_late_twin_is_discarded(memory_store: ObjectStore, release: Callable[[], None]) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, config(f"{__name__}:Held")) as worker:
        until(lambda: memory_store.exists(layout.lease(0, 0)))
        assert shards.create(memory_store, builders.shard(order=0))
        release()
        until(lambda: "answered by another worker" in worker.beat.note)
        worker.stop()
        assert progress_of(worker.join(), RolloutProgress).orders_done == 0
    assert shards.read(memory_store, 0).groups[0].prompt.id == "chained_addition/train/17"


def test_an_order_whose_lease_is_lost_is_dropped(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver"], delay_s=PATIENCE_S)
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, config(lease_ttl_s=0.3)) as worker:
        until(lambda: progress_of(worker.beat, RolloutProgress).running == 4)
        # The shard keeps the worker from taking the order again when the rival's lease expires.
        shards.create(memory_store, builders.shard(order=0))
        competitor = Lease(
            order=0, attempt=1, worker="rollout-eu-west-0", region="eu-west", write_id="rival"
        )
        memory_store.create(layout.lease(0, 1), encode(competitor))
        until(lambda: "order 0 is another worker's now" in worker.beat.note)
        until(lambda: progress_of(worker.beat, RolloutProgress).running == 0)
        worker.stop()
        worker.join()
    assert held(memory_store, 0) == competitor


def test_a_lease_is_renewed_while_its_order_is_processed(
    memory_store: ObjectStore, release: Callable[[], None]
) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, config(f"{__name__}:Held", lease_ttl_s=0.3)):
        until(lambda: memory_store.exists(layout.lease(0, 0)))
        until(lambda: held(memory_store, 0).renewals >= 2)
        release()
        until(answered(memory_store, 1))
    lease = held(memory_store, 0)
    assert lease.attempt == 0
    assert lease.renewals >= 2


def test_the_order_of_a_dead_worker_is_leased_after_the_ttl_of_the_recipe(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 1)
    leases.take(memory_store, 0, "gone", "", leases.LeaseWatch(60.0))
    with RunningWorker(memory_store, config(lease_ttl_s=0.2)) as worker:
        until(answered(memory_store, 1))
        worker.stop()
        worker.join()
    assert shards.read(memory_store, 0).attempt == 1


class IgnoresCancellation:
    """A workflow that continues after every cancellation."""

    roles: tuple[str, ...] = ("solver",)

    def __init__(self, reward: Reward) -> None: ...

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


def test_a_worker_leaves_although_its_workflow_ignores_cancellation(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "CANCEL_LIMIT_S", 0.05)
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 2)
    settings = config(f"{__name__}:IgnoresCancellation", drain_s=0.0)
    with RunningWorker(memory_store, settings) as worker:
        until(lambda: progress_of(worker.beat, RolloutProgress).running == 8)
        worker.stop()
        worker.join()
    assert [held(memory_store, number).released for number in range(2)] == [True, True]
    assert [shards.exists(memory_store, number) for number in range(2)] == [False, False]


class CallsThreads:
    """A workflow that calls a tool in a thread. In the first order, the tool does not return."""

    roles: tuple[str, ...] = ("solver",)
    hung = list[str]()
    released = threading.Event()

    def __init__(self, reward: Reward) -> None: ...

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        def tool() -> None:
            if prompt.id.startswith("p/0/"):
                self.hung.append(prompt.id)
                self.released.wait()

        await asyncio.to_thread(tool)
        turn = await agents["solver"].respond([user(prompt.fields["question"])])
        return Episode(sequences=(turn.context.sequence(1.0),), reward=1.0)


def test_calls_of_a_workflow_that_never_return_hold_no_lease_no_other_order_and_no_exit(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 2, samples=8)
    settings = config(f"{__name__}:CallsThreads", lease_ttl_s=0.3, drain_s=0.0)
    try:
        with RunningWorker(memory_store, settings) as worker:
            until(lambda: len(CallsThreads.hung) == 16)
            renewals = held(memory_store, 0).renewals
            until(lambda: shards.exists(memory_store, 1))
            until(lambda: held(memory_store, 0).renewals >= renewals + 2)
            worker.stop()
            worker.join()
    finally:
        CallsThreads.released.set()
    assert (held(memory_store, 0).attempt, held(memory_store, 0).released) == (0, True)
    assert not shards.exists(memory_store, 0)
    episodes = [group.episodes for group in shards.read(memory_store, 1).groups]
    assert [[episode.error for episode in group] for group in episodes] == [[None] * 8] * 2


class Spoils:
    """A workflow whose episodes of the first prompt of an order cannot be stored."""

    roles: tuple[str, ...] = ("solver",)

    def __init__(self, reward: Reward) -> None: ...

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        turn = await agents["solver"].respond([user(prompt.fields["question"])])
        sequence = turn.context.sequence(1.0)
        if prompt.id == "p/0/0":
            sequence = replace(sequence, name="\udc80", policies=("judge",))
        return Episode(sequences=(sequence,), reward=1.0)


def test_an_episode_that_cannot_be_stored_does_not_spoil_its_shard(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, config(f"{__name__}:Spoils")) as worker:
        until(answered(memory_store, 1))
        worker.stop()
        worker.join()
    bad, good = shards.read(memory_store, 0).groups
    assert [episode.failure_kind for episode in bad.episodes] == [FailureKind.WORKFLOW_BUG] * 2
    assert [(episode.error, episode.reward) for episode in good.episodes] == [(None, 1.0)] * 2


class ManySequences:
    """A workflow whose episodes of the first order have three sequences, the others one."""

    roles: tuple[str, ...] = ("solver",)

    def __init__(self, reward: Reward) -> None: ...

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        turn = await agents["solver"].respond([user(prompt.fields["question"])])
        count = 3 if prompt.id.startswith("p/0/") else 1
        return Episode(sequences=(turn.context.sequence(1.0),) * count, reward=1.0)


def test_an_order_whose_shard_is_too_large_is_answered_with_failed_episodes(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_sizes, "ROWS_MAX", 8)
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 2)
    with RunningWorker(memory_store, config(f"{__name__}:ManySequences")) as worker:
        until(answered(memory_store, 2))
        until(lambda: "order 0 is answered with failed episodes: " in worker.beat.note)
        assert "a shard of 12 rows and " in worker.beat.note
        worker.stop()
        worker.join()
    large, small = shards.read(memory_store, 0), shards.read(memory_store, 1)
    episodes = [episode for group in large.groups for episode in group.episodes]
    assert [group.prompt.id for group in large.groups] == ["p/0/0", "p/0/1"]
    assert [episode.failure_kind for episode in episodes] == [FailureKind.WORKFLOW_BUG] * 4
    reason = "the episodes' shard cannot be stored: a shard of 12 rows and "
    assert [(episode.error or "")[: len(reason)] for episode in episodes] == [reason] * 4
    assert (large.weights, list(small.weights)) == ({}, ["solver"])
    assert [len(episode.sequences) for group in small.groups for episode in group.episodes] == [
        1
    ] * 4


class FullOnce:
    """A backend whose disk has no space for the first shard."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._is_full = backend, True

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def create(self, path: str, body: bytes) -> bool:
        if "shards/" in path and self._is_full:
            self._is_full = False
            raise ConfigError("no space left to write the shard")
        return self._backend.create(path, body)


def test_a_store_that_cannot_be_written_ends_the_worker_and_the_order_stays_open(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 1)
    run = replace(memory_store, backend=FullOnce(memory_store.backend))  # type: ignore[arg-type]  # delegates the rest
    with RunningWorker(run, config()) as worker:
        until(lambda: worker.error is not None or shards.exists(memory_store, 0))
    assert isinstance(worker.error, ConfigError)
    assert str(worker.error) == "no space left to write the shard"
    assert not shards.exists(memory_store, 0)


def test_workers_end_when_the_dataflow_needs_no_more_shards(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver"], delay_s=30.0)
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, config(drain_s=1000.0)) as worker:
        until(lambda: memory_store.exists(layout.lease(0, 0)))
        orders.create_end(memory_store, 1)
        assert worker.join().state == "draining"
    assert held(memory_store, 0).released
    assert not shards.exists(memory_store, 0)


def test_draining_finishes_active_orders_renews_their_leases_and_leases_no_new_ones(
    memory_store: ObjectStore, release: Callable[[], None]
) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 8)
    settings = config(f"{__name__}:Held", orders_ahead=2, drain_s=PATIENCE_S, lease_ttl_s=0.3)
    with RunningWorker(memory_store, settings) as worker:
        until(lambda: memory_store.exists(layout.lease(1, 0)))
        worker.stop()
        until(lambda: worker.beat.state == "draining")
        renewals = held(memory_store, 1).renewals
        until(lambda: held(memory_store, 1).renewals >= renewals + 2)
        release()
        worker.join()
    assert [shards.exists(memory_store, number) for number in range(8)] == [True, True] + [
        False
    ] * 6
    assert not memory_store.exists(layout.lease(2, 0))


def test_orders_that_draining_cannot_finish_are_released_immediately(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver"], delay_s=30.0)
    write_orders(memory_store, 2)
    with RunningWorker(memory_store, config(drain_s=0.1)) as worker:
        until(lambda: memory_store.exists(layout.lease(1, 0)))
        worker.stop()
        worker.join()
    assert [held(memory_store, number).released for number in range(2)] == [True, True]
    watch = leases.LeaseWatch(ttl_s=1000.0)
    assert leases.take(memory_store, 0, "b", "eu-west", watch) is not None


def test_orders_are_released_unfinished_at_the_end_of_the_run(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver"], delay_s=30.0)
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, config(drain_s=1000.0)) as worker:
        until(lambda: memory_store.exists(layout.lease(0, 0)))
        runs.request_stop(memory_store, OVER)
        worker.join()
    assert held(memory_store, 0).released


def test_an_order_that_killed_too_many_workers_is_answered_with_failed_episodes(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 1)
    lost = Lease(order=0, attempt=6, worker="gave-back", region="us-east", lost=2, released=True)
    memory_store.create(layout.lease(0, 0), encode(replace(lost, attempt=0, lost=0)))
    for attempt in range(1, 7):
        memory_store.create(layout.lease(0, attempt), encode(replace(lost, attempt=attempt)))
    with RunningWorker(memory_store, config(lease_attempts_max=2)):
        until(answered(memory_store, 1))
    shard = shards.read(memory_store, 0)
    assert shard.attempt == 7
    assert [group.prompt.id for group in shard.groups] == ["p/0/0", "p/0/1"]
    episodes = [episode for group in shard.groups for episode in group.episodes]
    assert [(episode.error, episode.failure_kind) for episode in episodes] == [
        ("gave up after 2 lost leases", FailureKind.INFRASTRUCTURE)
    ] * 4


def test_an_order_released_repeatedly_is_still_processed(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 1)
    for attempt in range(3):
        memory_store.create(
            layout.lease(0, attempt),
            encode(
                Lease(order=0, attempt=attempt, worker="told-to-leave", region="eu", released=True)
            ),
        )
    with RunningWorker(memory_store, config(lease_attempts_max=2)):
        until(answered(memory_store, 1))
    shard = shards.read(memory_store, 0)
    assert shard.attempt == 3
    assert [episode.error for group in shard.groups for episode in group.episodes] == [None] * 4


def test_failed_episodes_are_counted_and_the_shard_is_written(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver"], script="tests.support.runs.fakes:fail")
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, config()) as worker:
        until(answered(memory_store, 1))
        worker.stop()
        heartbeat = worker.join()
    assert (
        progress_of(heartbeat, RolloutProgress).episodes,
        progress_of(heartbeat, RolloutProgress).episodes_failed,
    ) == (4, 4)
    assert (
        shards.read(memory_store, 0).groups[0].episodes[0].error
        == "ValueError: the script has no answer"
    )


def test_new_weights_are_loaded_in_the_middle_of_an_answer(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver"], delay_s=1.0)
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, config()):
        until(lambda: memory_store.exists(layout.lease(0, 0)))
        publisher.publish(memory_store, "solver", 1, builders.tensors(1))
        until(answered(memory_store, 1))
    shard = shards.read(memory_store, 0)
    digests = {
        version: manifests.read_manifest(memory_store, "solver", version).digest
        for version in (0, 1)
    }
    assert shard.weights == {"solver": digests}
    versions = shard.groups[0].episodes[0].sequences[0].versions
    assert versions[versions != NOT_SAMPLED].tolist() == [0, 0, 1, 1]  # \boxed{ · 0 · } · the end


def test_a_temporary_failure_of_the_store_stops_no_worker(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver"], delay_s=0.05)
    write_orders(memory_store, 6)
    backend = Absent(memory_store.backend)
    with RunningWorker(replace(memory_store, backend=backend, patience_s=0.01), config()) as worker:
        until(answered(memory_store, 1))
        backend.away = True
        until(lambda: "retrying" in worker.beat.note)
        backend.away = False
        until(answered(memory_store, 6))
        worker.stop()
        worker.join()


@pytest.mark.parametrize(
    ("module", "only"),
    [
        (worker_module, "exists shards/"),
        (worker_module, "create shards/"),
        (worker_setup, "read weights/"),
    ],
    ids=["orders", "a shard", "base models"],
)
def test_pauses_grow_while_the_store_fails(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, module: ModuleType, only: str
) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 1)
    backend = Absent(memory_store.backend, only=only)
    backend.away = True
    failures_seen: list[int] = []

    def recorded(failures: int) -> float:
        failures_seen.append(failures)
        if failures == 4:
            backend.away = False
        return 0.0

    monkeypatch.setattr(module, "backoff_s", recorded)
    monkeypatch.setattr(worker_setup, "OPEN_INTERVAL_S", 0.0)
    run = replace(memory_store, backend=backend, patience_s=1e-6)
    with RunningWorker(run, config()) as worker:
        until(answered(memory_store, 1))
        worker.stop()
        worker.join()
    # 0: a poll for orders succeeded, which goes on beside a shard
    assert [failures for failures in failures_seen if failures][:4] == [1, 2, 3, 4]


def _seed_of(order: int, prompt: int, sample: int) -> int:
    """The seed of an episode's first request; that of the order is its number."""
    return derived_seed(derived_seed(derived_seed(order, prompt), sample), 0)


def test_the_seed_of_an_order_decides_its_episodes(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver"], script="tests.support.runs.fakes:guess")
    write_orders(memory_store, 3, samples=8)
    with RunningWorker(memory_store, config()) as worker:
        until(answered(memory_store, 3))
        worker.stop()
        worker.join()
    for number in range(3):
        expected = [
            [float(_seed_of(number, prompt, sample) % 2 == 0) for sample in range(8)]
            for prompt in range(2)
        ]
        found = [
            [episode.reward for episode in group.episodes]
            for group in shards.read(memory_store, number).groups
        ]
        assert found == expected


def test_a_draining_worker_stores_its_shard_as_soon_as_the_store_responds(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 1)
    backend = Absent(memory_store.backend, only="create shards/")
    backend.away = True
    run = replace(memory_store, backend=backend, patience_s=0.01)
    with RunningWorker(run, config(drain_s=PATIENCE_S)) as worker:
        until(lambda: "shard 0 cannot be stored" in worker.beat.note)
        worker.stop()
        until(lambda: worker.beat.state == "draining")
        backend.away = False
        worker.join()
    assert shards.exists(memory_store, 0)


@pytest.mark.parametrize("num_orders", [0, 1])
def test_a_stop_request_ends_the_pause_of_a_worker(
    memory_store: ObjectStore, num_orders: int
) -> None:
    publish_base(memory_store, ["solver"], delay_s=PATIENCE_S)
    write_orders(memory_store, num_orders)
    settings = config(poll_interval_s=2 * PATIENCE_S, drain_s=0.0)
    with RunningWorker(memory_store, settings) as worker:
        until(lambda: worker.beat.state == ("working" if num_orders else "waiting"))
        until(lambda: worker.beat.versions == {"solver": 0})
        worker.stop()
        worker.join()
    assert [held(memory_store, number).released for number in range(num_orders)] == [
        True
    ] * num_orders


def test_a_broken_engine_ends_the_worker(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver"], f"{__name__}:engine_breaks", delay_s=PATIENCE_S)
    write_orders(memory_store, 2)
    with (
        RunningWorker(memory_store, config()) as worker,
        pytest.raises(EngineFailedError, match="out of memory"),
    ):
        worker.join()
    assert progress_of(worker.beat, RolloutProgress).running == 0
    assert [shards.exists(memory_store, number) for number in range(2)] == [False, False]


class Absent:
    """A backend that fails while `away` is set: every call, or only those such as "create shards/"."""

    def __init__(self, backend: Backend, only: str = "") -> None:
        self.away = False
        self._backend, self._only = backend, only

    def __getattr__(self, name: str) -> object:
        method = getattr(self._backend, name)

        def call(*arguments: object) -> object:
            if self.away and self._only in f"{name} {arguments[0]}":
                raise TransientError("the store is away")
            return method(*arguments)

        return call


def test_a_lost_order_is_reported_and_later_orders_are_processed(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 3)
    memory_store.delete(layout.order(1))
    with RunningWorker(memory_store, config()) as worker:
        until(lambda: all(shards.exists(memory_store, number) for number in (0, 2)))
        until(lambda: worker.beat.wait_reason is WaitReason.DAMAGED_OBJECT)
        assert worker.beat.note.startswith("orders/00000001.json cannot be leased: ")
        worker.stop()
        worker.join()
