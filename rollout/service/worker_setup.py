"""Setup of the rollout worker: opens the models, then runs `Worker` until it must stop.

policies of the recipe ─▶ base models ─▶ agent pool with the newest weights ─▶ Worker.serve
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

from rollout.config import RolloutConfig, SamplingConfig
from rollout.placement import worker_gpus
from rollout.service import event_loop
from rollout.service.agent_pool import AgentPool, check_agent_pool, open_agent_pool
from rollout.service.weight_sync import WeightSync
from rollout.service.worker import Worker
from storage.coordination.gpus_of_service import gpus_of_service
from storage.coordination.lifetime import Lifetime, backoff_s, stop_reason
from storage.coordination.system_threads import in_system_thread
from storage.errors import NotFoundError, TransientError
from storage.records.control import ServiceState, WaitReason
from storage.run import orders
from storage.store.object_store import ObjectStore
from storage.weights import manifests, replication, traffic
from storage.weights.manifests import LoadedWeights
from storage.weights.read_through import read_through_mirror
from storage.weights.traffic import Counting

STORE_PATIENCE_S = 5.0
"""Time after which a call on a failing store raises; the service then pauses and can be stopped."""
OPEN_INTERVAL_S = 1.0
"""Pause between two polls for the base models."""


def end_reason(run: ObjectStore) -> str:
    """Return why no worker is needed: the run ended, or has all shards. Empty if one is needed."""
    return stop_reason(run) or (
        "the dataflow needs no further shard" if orders.has_ended(run) else ""
    )


def work(
    lifetime: Lifetime,
    config: RolloutConfig,
    sampling: Mapping[str, SamplingConfig],
    region: str,
    *,
    episodes_max: int,
) -> None:
    """Serve the run until no worker is needed, or until the worker must stop and has drained.

    Args:
        lifetime: ends for `end_reason`.
        episodes_max: of an order of the run; those with more are damaged.

    Raises:
        ConfigError: the recipe, an engine or a model cannot work.
        EngineFailedError: an engine broke.
    """
    run = replace(lifetime.run, patience_s=min(lifetime.run.patience_s, STORE_PATIENCE_S))
    run, at_home = traffic.counted(run)
    weights_from, at_mirror = _weights_store(run, config, region)

    async def serve() -> None:
        opened = await _open_models(weights_from, config, sampling, policies, lifetime)
        if opened is None:
            return
        pool, loaded = opened
        try:
            weight_syncs = [
                WeightSync(
                    weights_from,
                    policy,
                    loader,
                    config.refresh_interval_s,
                    lifetime.heartbeat,
                    loaded[policy],
                    config.refresh_memory_mb * 2**20,
                )
                for policy, loader in pool.loaders.items()
            ]
            await Worker(
                run, lifetime, config, pool, weight_syncs, region, at_home, at_mirror, episodes_max
            ).serve()
        finally:
            await pool.close()

    policies = check_agent_pool(config, sampling)
    gpus = worker_gpus(config.engine, tuple(sampling))
    with gpus_of_service(lifetime, gpus, config.engine.device_share) as are_held:
        if are_held:
            event_loop.run(serve(), lambda note: lifetime.heartbeat.update(note=note))


def _weights_store(
    run: ObjectStore, config: RolloutConfig, region: str
) -> tuple[ObjectStore, Counting | None]:
    """Return the store from which the region reads weights, and its mirror's counter, if any."""
    spec = config.regions.get(region)
    if not (spec and spec.mirror):
        return run, None
    mirror, at_mirror = traffic.counted(replication.of_run(run, spec.mirror))
    return read_through_mirror(run, mirror), at_mirror


async def _open_models(
    run: ObjectStore,
    config: RolloutConfig,
    sampling: Mapping[str, SamplingConfig],
    policies: Sequence[str],
    lifetime: Lifetime,
) -> tuple[AgentPool, dict[str, LoadedWeights]] | None:
    """Wait for the base models; return the pool and the newest weights, or None to stop."""
    heartbeat, failures = lifetime.heartbeat, 0
    with heartbeat.span("wait"):
        while not await lifetime.async_should_stop():
            try:
                async with AsyncExitStack() as on_failure:
                    pool = await in_system_thread(open_agent_pool, run, config, sampling)
                    on_failure.push_async_callback(pool.close)
                    loaded = await pool.load_newest(run)
                    versions = {
                        policy: weights.manifest.version for policy, weights in loaded.items()
                    }
                    heartbeat.update(state=ServiceState.STARTING, note="", versions=versions)
                    on_failure.pop_all()
                    return pool, loaded
            except NotFoundError as error:
                failures = 0
                missing = _missing_base_models(run, policies)
                heartbeat.update(
                    state=ServiceState.WAITING,
                    wait_reason=WaitReason.BASE_MODEL if missing else WaitReason.DAMAGED_OBJECT,
                    note=f"waits for the base model of {', '.join(missing)}"
                    if missing
                    else f"cannot open the models yet: {error}",
                )
            except TransientError as error:
                failures += 1
                heartbeat.update(
                    state=ServiceState.WAITING,
                    wait_reason=WaitReason.STORE,
                    note=f"cannot open the models; retrying: {error}",
                )
            await lifetime.async_wait(max(OPEN_INTERVAL_S, backoff_s(failures)))
    return None


def _missing_base_models(run: ObjectStore, policies: Iterable[str]) -> list[str]:
    """Return the policies without version 0; none if the store does not respond."""
    with suppress(TransientError):
        return [policy for policy in policies if not manifests.exists(run, policy, 0)]
    return []
