"""The rollout worker: leases orders, runs their episodes and creates their shards.

    orders ──lease──▶ run (many concurrent episodes) ──▶ shard, created once
                        ▲
    weights ──refresh───┘        SIGTERM ──▶ drain: finish within drain_s, give back the rest

One event loop runs episodes, renews leases and refreshes weights; calls on the store run in a few
threads (`system_threads`). Calls that fail because of the store are retried.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from rollout.config import RolloutConfig
from rollout.service.agent_pool import AgentPool
from rollout.service.episode_runner import run_prompts
from rollout.service.event_loop import cancel, gather
from rollout.service.order_leasing import LeasedOrder, OrderLeasing
from rollout.service.throughput import Throughput
from rollout.service.weight_sync import WeightSync
from storage.coordination.lifetime import Lifetime, backoff_s
from storage.coordination.system_threads import in_system_thread
from storage.errors import (
    AstraFlowError,
    ConflictError,
    CorruptError,
    ObjectTooLargeError,
    TransientError,
)
from storage.records.control import ServiceState, WaitReason
from storage.records.progress import RolloutProgress
from storage.records.rollouts import Episode, FailureKind, Group, Order, Shard
from storage.run import shards
from storage.store.object_store import ObjectStore
from storage.weights.traffic import Counting

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.5
"""Pause between two updates of the progress in the heartbeat."""
RENEWALS_PER_TTL = 3
"""Renewals of a lease in its time to live."""
RENEWALS_CONCURRENT_MAX = 6
"""Leases renewed at a time; fewer than `SYSTEM_THREADS_MAX`."""


class Worker:
    """The service from the time at which its models are open (`worker_setup`)."""

    def __init__(
        self,
        run: ObjectStore,
        lifetime: Lifetime,
        config: RolloutConfig,
        pool: AgentPool,
        weight_syncs: Sequence[WeightSync],
        region: str,
        at_home: Counting,
        at_mirror: Counting | None,
        episodes_max: int,
    ) -> None:
        """Create the worker.

        Args:
            run: the store of `lifetime`, with shorter patience.
            episodes_max: of an order of the run; those with more are damaged.
            at_home, at_mirror: counters of the bytes read and written at home and at the mirror.
        """
        self._run = run
        self._lifetime = lifetime
        self._config = config
        self._pool = pool
        self._weight_syncs = weight_syncs
        self._region = region
        self._heartbeat = lifetime.heartbeat
        self._name = self._heartbeat.last.id
        self._leasing = OrderLeasing(
            run, self._name, region, config.lease_ttl_s, episodes_max=episodes_max
        )
        self._problem = ""  # the one that the last heartbeat reported
        self._at_home, self._at_mirror = at_home, at_mirror
        self._throughput = Throughput()
        self._tasks: dict[asyncio.Task[None], LeasedOrder] = {}
        """Orders in progress, each with its newest lease."""

    async def serve(self) -> None:
        """Run orders until the worker must stop, then drain; raise the first permanent error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                services = [
                    self._renew_leases(),
                    self._report_progress(),
                    *(sync.serve() for sync in self._weight_syncs),
                ]
                background = [tasks.create_task(service) for service in services]
                await self._run_orders()
                await self._drain()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            for task in self._tasks:
                task.cancel()
            self._heartbeat.update(progress=replace(self._progress(), tokens_per_s=0.0, running=0))

    async def _run_orders(self) -> None:
        """Keep `orders_ahead` orders in progress until the worker must stop."""
        failures = 0
        while not await self._lifetime.async_should_stop():
            try:
                while len(self._tasks) < self._config.orders_ahead:
                    leased = await in_system_thread(self._leasing.next)
                    if leased is None:
                        break
                    self._tasks[asyncio.create_task(self._run_order(leased))] = leased
                failures = 0
            except TransientError as error:
                failures += 1
                self._note(f"cannot poll for orders; retrying: {error}")
            pause_s = max(self._config.poll_interval_s, backoff_s(failures))
            self._report_state(store_unreachable=failures > 0)
            with self._heartbeat.span("generate" if self._tasks else "wait"):
                await self._wait_for_order(self._lifetime.async_wait(pause_s))

    async def _wait_for_order(self, pause: Coroutine[Any, Any, object]) -> None:
        """Wait until an order is done or `pause` has returned; raise the error of an order."""
        pausing = asyncio.create_task(pause)
        try:
            done, _ = await asyncio.wait(
                {pausing, *self._tasks}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            pausing.cancel()
        for task in self._tasks.keys() & done:
            leased = self._tasks.pop(task)
            if not task.cancelled():
                task.result()
            elif not task.cancelling():  # by something else than the loss of its lease
                self._note(f"order {leased.order.number} was cancelled by its own code")
                await self._give_back(leased)

    async def _run_order(self, leased: LeasedOrder) -> None:
        """Run an order and create its shard.

        Cancelled when the lease is lost, and at the end of draining.
        """
        order, lease = leased.order, leased.lease
        started_s = time.time()
        if lease.lost >= self._config.lease_attempts_max:
            error = f"gave up after {lease.lost} lost leases"
            groups = _failed_groups(order, error, FailureKind.INFRASTRUCTURE)
            self._note(
                f"order {order.number} is answered with failed episodes, after {lease.lost} lost "
                "leases"
            )
        else:
            samples = order.samples_per_prompt
            groups = await run_prompts(
                self._pool, order.prompts, samples, order.seed, self._throughput.episode
            )
        shard = Shard(
            order=order.number,
            attempt=lease.attempt,
            worker=self._name,
            region=self._region,
            groups=groups,
            weights=self._digests(groups),
            started_s=started_s,
            finished_s=time.time(),
        )
        try:
            is_first = await self._create_shard(shard)
        except ObjectTooLargeError as error:
            reason = f"the episodes' shard cannot be stored: {error}"
            groups = _failed_groups(order, reason, FailureKind.WORKFLOW_BUG)
            is_first = await self._create_shard(replace(shard, groups=groups, weights={}))
            self._note(f"order {order.number} is answered with failed episodes: {error}")
        if is_first:
            self._throughput.order_done()
        else:
            self._note(f"order {order.number} had been answered by another worker already")
        await in_system_thread(self._leasing.done, leased)

    async def _create_shard(self, shard: Shard) -> bool:
        """Create the shard; False when another worker was first. Retried until cancelled.

        Unlike `Lifetime.retry` it continues while the worker drains.

        Raises:
            ObjectTooLargeError: the shard is larger than readers accept.
            ConfigError: a person must make the store writable; the order stays open.
        """
        for failures in count(1):
            try:
                with self._heartbeat.span("store"):
                    return await in_system_thread(shards.create, self._run, shard)
            except TransientError as error:
                self._note(f"shard {shard.order} cannot be stored; retrying: {error}")
                await asyncio.sleep(backoff_s(failures))
        raise AssertionError("it is retried without end")

    def _digests(self, groups: tuple[Group, ...]) -> dict[str, dict[int, str]]:
        """Return policy → version → digest of the weights that sampled a token of `groups`."""
        digests: dict[str, dict[int, str]] = {}
        episodes = (episode for group in groups for episode in group.episodes)
        for sequence in (sequence for episode in episodes for sequence in episode.sequences):
            for index, policy in enumerate(sequence.policies):
                loader = self._pool.loaders[policy]
                for version in set(sequence.versions[sequence.owners == index].tolist()):
                    digests.setdefault(policy, {})[version] = loader.digest(version)
        return digests

    async def _renew_leases(self) -> None:
        """Renew the leases of all orders in progress, in rounds that begin a pause apart."""
        slots = asyncio.Semaphore(RENEWALS_CONCURRENT_MAX)
        while True:
            renewals = [self._renew(task, leased, slots) for task, leased in self._tasks.items()]
            pause_s = self._config.lease_ttl_s / RENEWALS_PER_TTL
            await gather([asyncio.sleep(pause_s), *renewals])

    async def _renew(
        self, task: asyncio.Task[None], leased: LeasedOrder, slots: asyncio.Semaphore
    ) -> None:
        """Renew the lease of an order in progress; cancel the order if the lease is lost."""
        number = leased.order.number
        async with slots:
            if task not in self._tasks:
                return  # it is done, or was given back meanwhile
            try:
                renewed = await in_system_thread(self._leasing.renew, leased)
            except (ConflictError, CorruptError) as error:
                if task not in self._tasks:
                    return
                self._note(f"order {number} is another worker's now: {error}")
                task.cancel()
                await in_system_thread(self._leasing.lost, leased)
            except TransientError as error:
                self._note(f"the lease of order {number} cannot be renewed; retrying: {error}")
            else:
                if task in self._tasks:
                    self._tasks[task] = renewed

    async def _drain(self) -> None:
        """Finish orders for `drain_s`, give back the rest; give back all if no worker is needed."""
        self._heartbeat.update(state=ServiceState.DRAINING)
        end_s = time.monotonic() + self._config.drain_s
        while self._tasks and not await self._lifetime.async_is_over():
            if (remaining_s := end_s - time.monotonic()) <= 0:
                break
            await self._wait_for_order(
                asyncio.sleep(min(remaining_s, self._config.poll_interval_s))
            )
        await cancel(self._tasks)
        while self._tasks:
            task, leased = self._tasks.popitem()
            if task.done() and not task.cancelled():
                task.result()
            else:
                await self._give_back(leased)

    async def _give_back(self, leased: LeasedOrder) -> None:
        """Release the lease of an order without a shard."""
        try:
            await in_system_thread(self._leasing.give_back, leased)
        except AstraFlowError as error:
            self._note(
                f"order {leased.order.number} could not be given back; its lease will expire: "
                f"{error}"
            )

    async def _report_progress(self) -> None:
        """Update the progress in the heartbeat, periodically."""
        while True:
            self._heartbeat.update(progress=self._progress())
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    def _progress(self) -> RolloutProgress:
        syncs = {sync.policy: sync for sync in self._weight_syncs}
        return replace(
            self._throughput.progress(),
            running=self._pool.running,
            shard_bytes=self._at_home.shards(),
            weights_bytes_home=self._at_home.weights(),
            weights_bytes_mirror=self._at_mirror.weights() if self._at_mirror else {},
            refresh_s={
                policy: sync.refresh_s
                for policy, sync in syncs.items()
                if sync.refresh_s is not None
            },
            refresh_failures={policy: sync.failures for policy, sync in syncs.items()},
        )

    def _report_state(self, store_unreachable: bool) -> None:
        """Put the state between two polls for orders into the heartbeat."""
        state = ServiceState.WORKING if self._tasks else ServiceState.WAITING
        problem = self._leasing.problem
        waits_for = WaitReason.DAMAGED_OBJECT if problem else WaitReason.ORDERS
        idle = WaitReason.NONE if self._tasks else waits_for
        faults = [sync.wait_reason for sync in self._weight_syncs if sync.wait_reason]
        reason = WaitReason.STORE if store_unreachable else next(iter(faults), idle)
        note = problem if problem != self._problem else None  # None keeps the note
        self._problem = problem
        self._heartbeat.update(state=state, wait_reason=reason, note=note)

    def _note(self, note: str) -> None:
        log.warning("%s: %s", self._name, note)
        self._heartbeat.update(note=note)


def _failed_groups(order: Order, error: str, kind: FailureKind) -> tuple[Group, ...]:
    """Return failed episodes for a whole order: its leases were lost, or its shard is too large."""
    failed = Episode(sequences=(), reward=0.0, error=error, failure_kind=kind)
    return tuple(Group(prompt, (failed,) * order.samples_per_prompt) for prompt in order.prompts)
