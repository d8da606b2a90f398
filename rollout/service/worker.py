"""The rollout worker: a service that leases orders, plays them, and commits their shards, with weights that stay fresh.

    orders ──lease──▶ play (many episodes at once) ──▶ shard, created once
                        ▲
    weights ──refresh───┘            SIGTERM ──▶ drain: finish within drain_s, give the rest back

One event loop plays, renews leases and refreshes; every call on the store runs in one of a few threads. What the store
fails to answer is tried again: the service goes on. It knows nothing of batches, trainers and prompts' sources.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial

from rollout.config import RolloutConfig, SamplingConfig
from rollout.service.agent_pool import Cast, check_cast, open_cast
from rollout.service.ending import Ending
from rollout.service.episode_runner import play_prompts
from rollout.service.order_leasing import Claim, Claims
from rollout.service.throughput import Tally
from rollout.service.weight_sync import Refresher
from storage.coordination.heartbeats import Pulse
from storage.errors import AstraFlowError, ConflictError, CorruptError, NotFoundError, TransientError
from storage.records.rollouts import Episode, Group, Order, Shard
from storage.run import shards
from storage.store.object_store import ObjectStore
from storage.weights import manifests, replication, traffic
from storage.weights.manifests import Held
from storage.weights.read_through import near_first
from storage.weights.traffic import Counting

log = logging.getLogger(__name__)

STORE_THREADS_MAX = 8
"""Calls on the store that one worker makes at a time."""
STORE_PATIENCE_S = 5.0
"""A call on a failing store gives up after so long; the service then pauses and tries again, and meanwhile can be
stopped."""
BACKOFF_S = 1.0
"""Pause of the service after the store failed for longer than its patience."""
TELL_INTERVAL_S = 0.5
"""Pause between two updates of what the heartbeats say."""
RENEWALS_PER_TTL = 3


def work(
    run: ObjectStore,
    config: RolloutConfig,
    sampling: Mapping[str, SamplingConfig],
    region: str,
    pulse: Pulse,
    stop: threading.Event,
) -> None:
    """Serves `run` until it has ended, or until `stop` is set and the worker has drained.

    Raises ConfigError for a recipe, engine or model that cannot work, EngineFailedError when an engine broke.
    """
    patient, at_home = traffic.counted(replace(run, patience_s=min(run.patience_s, STORE_PATIENCE_S)))
    weights_from, at_mirror = _weights_of(patient, config, region)
    crossed = partial(traffic.progress, at_home, at_mirror)

    async def serve() -> None:
        threads = ThreadPoolExecutor(STORE_THREADS_MAX, thread_name_prefix="store")
        asyncio.get_running_loop().set_default_executor(threads)
        ending = Ending(patient, stop)
        opened = await _opened(weights_from, config, sampling, ending, pulse)
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
                    pulse,
                    held[policy],
                    config.refresh_memory_mb * 2**20,
                )
                for policy, engine in cast.engines.items()
            ]
            await Worker(patient, config, cast, refreshers, region, pulse, ending, crossed).serve()
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
    run: ObjectStore, config: RolloutConfig, sampling: Mapping[str, SamplingConfig], ending: Ending, pulse: Pulse
) -> tuple[Cast, dict[str, Held]] | None:
    """The cast and its newest weights, as soon as the base models are there; None when the end came first."""
    with pulse.span("wait"):
        while not await ending.within(0.0):
            pulse.update(state="waiting")
            try:
                async with AsyncExitStack() as on_failure:
                    cast = open_cast(run, config, sampling)
                    on_failure.push_async_callback(cast.close)
                    held = await cast.load_newest(run)
                    pulse.update(note="", versions={policy: own.manifest.version for policy, own in held.items()})
                    on_failure.pop_all()
                    return cast, held
            except NotFoundError as error:
                pulse.update(note=_awaited(run, sampling) or f"cannot open the models yet: {error}")
            except TransientError as error:
                pulse.update(note=f"cannot open the models, and tries again: {error}")
            await ending.within(BACKOFF_S)
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
        config: RolloutConfig,
        cast: Cast,
        refreshers: Sequence[Refresher],
        region: str,
        pulse: Pulse,
        ending: Ending,
        traffic: Callable[[], Mapping[str, float]],
    ) -> None:
        self._run = run
        self._config = config
        self._cast = cast
        self._refreshers = refreshers
        self._region = region
        self._pulse = pulse
        self._ending = ending
        self._name = pulse.last.id
        self._claims = Claims(run, self._name, region, config.lease_ttl_s)
        self._traffic = traffic
        self._tally = Tally()
        self._plays: dict[asyncio.Task[None], Claim] = {}
        """Every order in play, with the newest form of its lease."""

    async def serve(self) -> None:
        """Until the end is near; then drains. The first thing that fails for good ends all the rest, and is raised."""
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
        """Keeps `orders_ahead` orders in play until the end is near."""
        while not await self._ending.within(0.0):
            pause_s = self._config.poll_interval_s
            try:
                while len(self._plays) < self._config.orders_ahead:
                    claim = await asyncio.to_thread(self._claims.next)
                    if claim is None:
                        break
                    self._plays[asyncio.create_task(self._answer(claim))] = claim
            except TransientError as error:
                self._note(f"cannot look for orders, and tries again: {error}")
                pause_s = BACKOFF_S
            self._pulse.update(state="working" if self._plays else "waiting")
            with self._pulse.span("generate" if self._plays else "wait"):
                await self._any_done(pause_s)

    async def _any_done(self, pause_s: float) -> None:
        """Until an order is done, or `pause_s` has passed; raises what a play raised."""
        if not self._plays:
            await asyncio.sleep(pause_s)
            return
        done, _ = await asyncio.wait(self._plays, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        for play in done:
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
        """Commits the shard, however often the store must be asked; False when a twin was first."""
        while True:
            try:
                with self._pulse.span("store"):
                    return await asyncio.to_thread(shards.commit, self._run, shard)
            except TransientError as error:
                self._note(f"shard {shard.order} cannot be stored, and is tried again: {error}")
                await asyncio.sleep(BACKOFF_S)

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
        """Finishes what can be finished in `drain_s` and gives the rest back; gives all of it back where the run is
        over."""
        self._pulse.update(state="draining")
        end_s = time.monotonic() + self._config.drain_s
        while self._plays and not self._ending.run_over and (left_s := end_s - time.monotonic()) > 0:
            await self._any_done(min(left_s, self._config.poll_interval_s))
            await self._ending.within(0.0)
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
