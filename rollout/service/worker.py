"""The rollout worker: a service that leases orders, plays them, and commits their shards, with weights that stay fresh.

    orders ──lease──▶ play (many episodes at once) ──▶ shard, created once
                        ▲
    weights ──refresh───┘            SIGTERM ──▶ drain: finish within drain_s, give the rest back

One event loop plays, renews leases and refreshes; every call on the store runs in one of a few threads. What the store
fails to answer is tried again. It knows nothing of batches, trainers and prompts' sources.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from rollout.config import RolloutConfig, SamplingConfig
from rollout.service.agent_pool import Cast, check_cast, open_cast
from rollout.service.episode_runner import play_prompts
from rollout.service.order_leasing import Claim, Claims
from rollout.service.throughput import Tally
from rollout.service.weight_sync import Refresher
from storage.coordination.lifetime import Lifetime, backoff_s, stop_reason
from storage.errors import AstraFlowError, ConflictError, CorruptError, NotFoundError, TransientError
from storage.records.rollouts import Episode, Group, Order, Shard
from storage.run import orders, shards
from storage.store.object_store import ObjectStore
from storage.weights import manifests, replication, traffic
from storage.weights.manifests import Held
from storage.weights.read_through import near_first
from storage.weights.traffic import Counting

log = logging.getLogger(__name__)

STORE_THREADS_MAX = 8
"""Calls on the store that one worker makes at a time."""
STORE_PATIENCE_S = 5.0
"""A call on a failing store gives up after this time; the service pauses then, and can be stopped."""
OPEN_INTERVAL_S = 1.0
"""Pause between two looks for the base models."""
TELL_INTERVAL_S = 0.5
"""Pause between two updates of what the heartbeats say."""
RENEWALS_PER_TTL = 3


def end_reason(run: ObjectStore) -> str:
    """Why no worker is needed: the run ended, or its last shard was made; empty otherwise."""
    return stop_reason(run) or ("the dataflow needs no further shard" if orders.ended(run) else "")


def work(lifetime: Lifetime, config: RolloutConfig, sampling: Mapping[str, SamplingConfig], region: str) -> None:
    """Serve the run until no worker is needed, or until the worker must stop and has drained.

    Args:
        lifetime: is over for `end_reason`.

    Raises:
        ConfigError: a recipe, engine or model cannot work.
        EngineFailedError: an engine broke.
    """
    run = replace(lifetime.run, patience_s=min(lifetime.run.patience_s, STORE_PATIENCE_S))
    run, at_home = traffic.counted(run)
    weights_from, at_mirror = _weights_of(run, config, region)
    crossed = partial(traffic.progress, at_home, at_mirror)

    async def serve() -> None:
        threads = ThreadPoolExecutor(STORE_THREADS_MAX, thread_name_prefix="store")
        asyncio.get_running_loop().set_default_executor(threads)
        opened = await _opened(weights_from, config, sampling, lifetime)
        if opened is None:
            return
        cast, held = opened
        try:
            refreshers = [
                Refresher(
                    weights_from,
                    policy,
                    engine,
                    config.refresh_interval_s,
                    lifetime.heartbeat,
                    held[policy],
                    config.refresh_memory_mb * 2**20,
                )
                for policy, engine in cast.engines.items()
            ]
            await Worker(run, lifetime, config, cast, refreshers, region, crossed).serve()
        finally:
            await cast.close()

    check_cast(config, sampling)
    asyncio.run(serve())


def _weights_of(run: ObjectStore, config: RolloutConfig, region: str) -> tuple[ObjectStore, Counting | None]:
    """Where the region's workers read weights: its mirror, where it has one, with what counts there."""
    spec = config.regions.get(region)
    if not (spec and spec.mirror):
        return run, None
    mirror, at_mirror = traffic.counted(replication.of_run(run, spec.mirror))
    return near_first(run, mirror), at_mirror


async def _opened(
    run: ObjectStore, config: RolloutConfig, sampling: Mapping[str, SamplingConfig], lifetime: Lifetime
) -> tuple[Cast, dict[str, Held]] | None:
    """The cast and its newest weights, once the base models exist; None when it must stop first."""
    heartbeat, failures = lifetime.heartbeat, 0
    with heartbeat.span("wait"):
        while not await lifetime.async_should_stop():
            heartbeat.update(state="waiting")
            try:
                async with AsyncExitStack() as on_failure:
                    cast = open_cast(run, config, sampling)
                    on_failure.push_async_callback(cast.close)
                    held = await cast.load_newest(run)
                    versions = {policy: weights.manifest.version for policy, weights in held.items()}
                    heartbeat.update(note="", versions=versions)
                    on_failure.pop_all()
                    return cast, held
            except NotFoundError as error:
                failures = 0
                heartbeat.update(note=_awaited(run, sampling) or f"cannot open the models yet: {error}")
            except TransientError as error:
                failures += 1
                heartbeat.update(note=f"cannot open the models, and tries again: {error}")
            await lifetime.async_wait(max(OPEN_INTERVAL_S, backoff_s(failures)))
    return None


def _awaited(run: ObjectStore, policies: Iterable[str]) -> str:
    """Which base models are not there yet; empty where all are, or the store does not tell."""
    with suppress(TransientError):
        if lacking := [policy for policy in policies if not manifests.exists(run, policy, 0)]:
            return f"waits for the base model of {', '.join(lacking)}"
    return ""


class Worker:
    """The service itself, once its models are open."""

    def __init__(
        self,
        run: ObjectStore,
        lifetime: Lifetime,
        config: RolloutConfig,
        cast: Cast,
        refreshers: Sequence[Refresher],
        region: str,
        traffic: Callable[[], Mapping[str, float]],
    ) -> None:
        """`run` is the store of `lifetime` with shorter patience; `traffic` counts what was read."""
        self._run = run
        self._lifetime = lifetime
        self._config = config
        self._cast = cast
        self._refreshers = refreshers
        self._region = region
        self._pulse = lifetime.heartbeat
        self._name = self._pulse.last.id
        self._claims = Claims(run, self._name, region, config.lease_ttl_s)
        self._traffic = traffic
        self._tally = Tally()
        self._plays: dict[asyncio.Task[None], Claim] = {}
        """Every order in play, with the newest form of its lease."""

    async def serve(self) -> None:
        """Play orders until the worker must stop, then drain. The first permanent error is raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [self._renew(), self._tell(), *(each.serve() for each in self._refreshers)]
                running = [tasks.create_task(each) for each in beside]
                await self._lead()
                await self._drain()
                for task in running:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            for play in self._plays:
                play.cancel()
            self._pulse.update(progress=self._progress(), rates={"tokens_per_s": 0.0, "running": 0.0})

    async def _lead(self) -> None:
        """Keep `orders_ahead` orders in play until the worker must stop."""
        failures = 0
        while not await self._lifetime.async_should_stop():
            try:
                while len(self._plays) < self._config.orders_ahead:
                    claim = await asyncio.to_thread(self._claims.next)
                    if claim is None:
                        break
                    self._plays[asyncio.create_task(self._answer(claim))] = claim
                failures = 0
            except TransientError as error:
                failures += 1
                self._note(f"cannot look for orders, and tries again: {error}")
            pause_s = max(self._config.poll_interval_s, backoff_s(failures))
            self._pulse.update(state="working" if self._plays else "waiting")
            with self._pulse.span("generate" if self._plays else "wait"):
                await self._any_done(self._lifetime.async_wait(pause_s))

    async def _any_done(self, pause: Coroutine[Any, Any, object]) -> None:
        """Wait until an order is done or `pause` has returned; raises what a play raised."""
        pausing = asyncio.create_task(pause)
        try:
            done, _ = await asyncio.wait({pausing, *self._plays}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pausing.cancel()
        for play in self._plays.keys() & done:
            del self._plays[play]
            if not play.cancelled():
                play.result()

    async def _answer(self, claim: Claim) -> None:
        """Plays an order and commits its shard. Cancelled when the lease is lost, and at the end of draining."""
        order, lease = claim.order, claim.lease
        started_s = time.time()
        if lease.lost >= self._config.lease_attempts_max:
            groups = _given_up(order, lease.lost)
            self._note(f"order {order.number} is answered with failed episodes, after {lease.lost} lost leases")
        else:
            samples = order.samples_per_prompt
            groups = await play_prompts(self._cast, order.prompts, samples, order.seed, self._tally.episode)
        shard = Shard(
            order.number, lease.attempt, self._name, self._region, groups, self._digests(groups), started_s, time.time()
        )
        if await self._stored(shard):
            self._tally.order_done()
        else:
            self._note(f"order {order.number} had been answered by another worker already")
        await asyncio.to_thread(self._claims.done, claim)

    async def _stored(self, shard: Shard) -> bool:
        """Commit the shard, retried until the play is cancelled; False when a twin was first.

        While the worker drains, too: `Lifetime.retry` would give up as soon as the worker must stop.
        """
        for failures in count(1):
            try:
                with self._pulse.span("store"):
                    return await asyncio.to_thread(shards.commit, self._run, shard)
            except TransientError as error:
                self._note(f"shard {shard.order} cannot be stored, and is tried again: {error}")
                await asyncio.sleep(backoff_s(failures))
        raise AssertionError("it is retried without end")

    def _digests(self, groups: tuple[Group, ...]) -> dict[str, dict[int, str]]:
        """policy → version → digest of the weights held, for every version that sampled a token of `groups`."""
        held: dict[str, dict[int, str]] = {}
        for sequence in (each for group in groups for episode in group.episodes for each in episode.sequences):
            for index, policy in enumerate(sequence.policies):
                for version in set(sequence.versions[sequence.owners == index].tolist()):
                    held.setdefault(policy, {})[version] = self._cast.engines[policy].digest(version)
        return held

    async def _renew(self) -> None:
        """Keeps the leases of all orders in play alive; drops the play of an order whose lease is lost."""
        while True:
            await asyncio.sleep(self._config.lease_ttl_s / RENEWALS_PER_TTL)
            for play, claim in list(self._plays.items()):
                number = claim.order.number
                try:
                    renewed = await asyncio.to_thread(self._claims.renew, claim)
                except (ConflictError, CorruptError) as error:
                    if play not in self._plays:
                        continue  # it was given back meanwhile
                    self._note(f"order {number} is another worker's now: {error}")
                    play.cancel()
                    await asyncio.to_thread(self._claims.lost, claim)
                except TransientError as error:
                    self._note(f"the lease of order {number} could not be renewed, and is tried again: {error}")
                else:
                    if play in self._plays:
                        self._plays[play] = renewed

    async def _drain(self) -> None:
        """Finish what can be finished in `drain_s` and give the rest back.

        Give all of it back at once when no worker is needed.
        """
        self._pulse.update(state="draining")
        end_s = time.monotonic() + self._config.drain_s
        while self._plays and not await self._lifetime.async_is_over():
            if (left_s := end_s - time.monotonic()) <= 0:
                break
            await self._any_done(asyncio.sleep(min(left_s, self._config.poll_interval_s)))
        while self._plays:
            play, claim = self._plays.popitem()
            play.cancel()
            await asyncio.wait([play])
            if not play.cancelled():
                play.result()
                continue
            try:
                await asyncio.to_thread(self._claims.give_back, claim)
            except AstraFlowError as error:
                self._note(f"order {claim.order.number} could not be given back; its lease will expire: {error}")

    async def _tell(self) -> None:
        """Keeps what the heartbeats say up to date."""
        while True:
            rates = {"tokens_per_s": self._tally.tokens_per_s(), "running": float(self._cast.running)}
            self._pulse.update(progress=self._progress(), rates=rates)
            await asyncio.sleep(TELL_INTERVAL_S)

    def _progress(self) -> dict[str, float]:
        return {**self._tally.progress(), **self._traffic()}

    def _note(self, note: str) -> None:
        log.warning("%s: %s", self._name, note)
        self._pulse.update(note=note)


def _given_up(order: Order, lost: int) -> tuple[Group, ...]:
    """Failed episodes for an order that took one worker after the other with it."""
    failed = Episode((), 0.0, error=f"gave up after {lost} lost leases")
    return tuple(Group(prompt, (failed,) * order.samples_per_prompt) for prompt in order.prompts)
