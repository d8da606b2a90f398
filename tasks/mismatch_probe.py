"""Measure the mismatch of sampler and trainer before a run: `astraflow doctor --recipe`.

    base models ──▶ a temporary run ──▶ the workflow plays a few prompts with the rollout engines
                                               │ rows of each policy, by version 0
                                               ▼
                                        one step of the train engine, learning rate 0 ──▶ metrics

The same code as in a run computes both sides; only the weights never change.
"""

import time
from collections.abc import Mapping, Sequence

from data_ops.algorithms.policy_groups import route
from rollout.placement import worker_gpus
from rollout.service import event_loop
from rollout.service.agent_pool import open_agent_pool
from rollout.service.episode_runner import run_prompts
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError
from storage.formats.json_objects import parse
from storage.formats.model_config import MODEL_CONFIG
from storage.machine.gpu_locks import held_gpus
from storage.machine.temporary_folders import temporary_folder
from storage.records.batches import Batch, BatchRow
from storage.records.rollouts import Group, Shard
from storage.store.object_store import ObjectStore, open_store
from storage.weights import reader
from tasks.base_models.folders import Progress
from tasks.base_models.publishing import publish_base_models
from tasks.recipes.run_config import PolicyConfig, RunConfig
from trainer.engines.engine import make_engine
from trainer.losses.ppo_clip import PpoClip
from trainer.placement import rank_gpus

NUM_PROMPTS = 8
NEW_TOKENS_MAX = 64
"""Longest answer, in tokens; a recipe may allow less."""
ORDER = 0
HOLDER = "astraflow doctor"


def measure_mismatch(
    models: ObjectStore, config: RunConfig, progress: Progress
) -> dict[str, dict[str, float]]:
    """Return the metrics `trainer/mismatch/…` of each policy.

    `progress` is called with each stage and its finished share.

    A tiny base model is built in the store `models` if it is not there; everything else is in a
    temporary folder. ConfigError where a run would end with one, and when a policy sampled nothing
    that it can be trained on. GpuBusyError when another process uses a GPU of the engines.
    """
    with temporary_folder("astraflow-doctor-") as folder:
        run = open_store(str(folder))
        specs = {policy: spec.model for policy, spec in config.policies.items()}
        publish_base_models(models, run, specs, progress)
        progress(f"playing {NUM_PROMPTS} prompts", 0.0)
        shard = _as_shard(event_loop.run(_play(run, config)))
        routed = route(shard, list(config.policies), {})
        rows_of = {
            policy: [row for group in groups for row in group.rows if row.loss_mask.any()]
            for policy, groups in routed.items()
        }
        if silent := [policy for policy, rows in rows_of.items() if not rows]:
            raise ConfigError(_silence(silent, shard))
        metrics: dict[str, dict[str, float]] = {}
        for policy, spec in config.policies.items():
            progress(f"training {policy} for one step", len(metrics) / len(config.policies))
            metrics[policy] = _measured(run, policy, spec, rows_of[policy], config)
        return metrics


def _silence(policies: Sequence[str], shard: Shard) -> str:
    """Return that these policies sampled nothing, with the first error of an episode."""
    episodes = [episode for group in shard.groups for episode in group.episodes]
    errors = [episode.error for episode in episodes if episode.error is not None]
    why = f": {len(errors)} failed, the first with {errors[0]}" if errors else ""
    return f"{' and '.join(policies)} sampled no token to train on in {len(episodes)} episodes{why}"


async def _play(run: ObjectStore, config: RunConfig) -> tuple[Group, ...]:
    sampling = {
        policy: spec.sampling.model_copy(
            update={"max_new_tokens": min(spec.sampling.max_new_tokens, NEW_TOKENS_MAX)}
        )
        for policy, spec in config.policies.items()
    }
    prompts, _ = config.data.prompts.stream().take({}, NUM_PROMPTS)
    engine = config.rollout.engine
    with held_gpus(HOLDER, worker_gpus(engine, tuple(sampling)), engine.device_share):
        pool = await in_system_thread(open_agent_pool, run, config.rollout, sampling)
        try:
            await pool.load_newest(run)
            return await run_prompts(pool, prompts, 1, config.seed)
        finally:
            await pool.close()


def _as_shard(groups: tuple[Group, ...]) -> Shard:
    now_s = time.time()
    return Shard(
        order=ORDER,
        attempt=0,
        worker="doctor",
        region="",
        groups=groups,
        weights={},
        started_s=now_s,
        finished_s=now_s,
    )


def _measured(
    run: ObjectStore,
    policy: str,
    spec: PolicyConfig,
    rows: Sequence[BatchRow],
    config: RunConfig,
) -> dict[str, float]:
    train = spec.train.model_copy(
        update={"lr": 0.0, "minibatches": 1, "loss": PpoClip(), "reference": None}
    )
    base = reader.read(run, policy, 0)
    files: Mapping[str, bytes] = reader.fetch_files(run, policy)
    batch = Batch(
        policy=policy,
        step=1,
        rows=tuple(rows),
        ledger=(),
        waiting=(),
        shards=(ORDER,),
        closed_below=ORDER + 1,
        closed=(),
    )
    with held_gpus(HOLDER, rank_gpus(train), train.device_share):
        engine = make_engine(train, parse(files[MODEL_CONFIG], MODEL_CONFIG), config.seed)
        engine.set_weights(base.tensors)
        metrics = engine.step(batch)
    return {name: value for name, value in metrics.items() if name.startswith("trainer/mismatch/")}
