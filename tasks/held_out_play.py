"""Play held-out problems with exact versions: what the evaluation and the gate have in common.

versions of each policy, of one run or of several ──▶ pool of agents ──▶ groups ──▶ accuracies
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import numpy as np

from rollout.config import SamplingConfig
from rollout.service.agent_pool import AgentPool, make_agent_pool
from storage.coordination.system_threads import in_system_thread
from storage.formats.adapters import is_adapter
from storage.formats.safetensors import weights_digest
from storage.records.rollouts import Episode
from storage.records.types import Float32
from storage.store.object_store import ObjectStore
from storage.weights import manifests, reader
from tasks.recipes.placement import evaluation_engine
from tasks.recipes.run_config import EvaluationConfig, RunConfig

Versions: TypeAlias = Mapping[str, tuple[ObjectStore, int]]
"""policy → the run that has it, and its version."""


def sampling_of(config: RunConfig, evaluation: EvaluationConfig) -> dict[str, SamplingConfig]:
    """Return the sampling of each policy, with the temperature of the evaluation."""
    return {
        name: spec.sampling.model_copy(update={"temperature": evaluation.temperature})
        for name, spec in config.policies.items()
    }


@asynccontextmanager
async def pool_with(
    versions: Versions, config: RunConfig, evaluation: EvaluationConfig
) -> AsyncIterator[AgentPool]:
    """Open a pool of agents that have these versions loaded, and close it after the block.

    The workflow, the engines and the reward are those of `config`; versions of several base models
    do not share a server.

    Raises:
        ConfigError: the workflow, the reward, an engine or a tokenizer cannot work.
        NotFoundError: a version does not exist.
        CorruptError: the bytes of a version do not have the digests in its manifest.
    """

    def fetch_files(policy: str) -> dict[str, bytes]:
        run, _ = versions[policy]
        return reader.fetch_files(run, policy)

    engine = evaluation_engine(config)
    if engine.sglang.shared and not await in_system_thread(_have_one_base, versions):
        own = engine.sglang.model_copy(update={"shared": False})
        engine = engine.model_copy(update={"sglang": own})
    rollout = config.rollout.model_copy(update={"engine": engine})
    pool = await in_system_thread(
        make_agent_pool, fetch_files, rollout, sampling_of(config, evaluation)
    )
    try:
        for policy in pool.engines:
            run, version = versions[policy]
            await pool.load(run, {policy: version})
        yield pool
    finally:
        await pool.close()


def _have_one_base(versions: Versions) -> bool:
    """Return whether the versions differ in their adapters only."""
    manifests_of = [
        manifests.read_manifest(run, policy, version) for policy, (run, version) in versions.items()
    ]
    bases = {
        weights_digest(
            {name: info for name, info in manifest.tensors.items() if not is_adapter(name)}
        )
        for manifest in manifests_of
    }
    return len(bases) == 1


def results(episodes: Sequence[Episode], metric: str) -> Float32:
    """[N] The metric of every episode, in [0, 1]; NaN where the episode failed.

    Where a workflow does not set the metric: 1 for a positive reward, else 0.
    """
    values = [
        np.nan if episode.error else episode.metrics.get(metric, float(episode.reward > 0))
        for episode in episodes
    ]
    return np.clip(np.asarray(values, np.float32), 0.0, 1.0)
