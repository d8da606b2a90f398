"""What one process needs to run a workflow: the workflow, and an engine and a chat per policy.

    recipe ──▶ workflow, reward
    version 0 of each policy ──▶ chats, engines (without weights until `load`)

Rollout workers keep the weights of the engines fresh; the evaluation loads exact versions.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import wait
from contextlib import ExitStack, asynccontextmanager
from contextvars import copy_context
from functools import partial

from rollout.agents.chat import Chat
from rollout.agents.chat_process import ChatProcess
from rollout.agents.workflow import Player, Workflow
from rollout.config import EngineConfig, RolloutConfig, SamplingConfig
from rollout.engines.engine import Engine, make_engine
from rollout.placement import placed
from rollout.rewards.reward import Reward, make_reward
from rollout.service.user_threads import UserThreads
from rollout.service.weight_loader import WeightLoader
from rollout.workflows import find_workflow, make_workflow, policies_by_role
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.formats.json_objects import parse
from storage.store.object_store import ObjectStore
from storage.weights import manifests, reader
from storage.weights.manifests import LoadedWeights

log = logging.getLogger(__name__)

EPISODES_PER_ENGINE_SLOT = 2
"""Concurrent episodes for each request that an engine decodes at a time: while one episode waits
for a reward or for another policy, the other one generates.
"""
CLOSE_LIMIT_S = 60.0
"""How long `close` of a reward, which is users' code, may take."""


class AgentPool:
    """A workflow with its policies, and a limit on concurrent episodes."""

    def __init__(
        self,
        workflow: Workflow,
        reward: Reward,
        players: Mapping[str, Player],
        engines: Mapping[str, Engine],
        timeout_s: float,
        memory_bytes: int = manifests.MEMORY_BYTES,
    ) -> None:
        self.workflow = workflow
        self.players = players
        """Role → player."""
        self.engines = engines
        """Policy → engine."""
        self.loaders = {policy: WeightLoader(engine) for policy, engine in engines.items()}
        """Policy → what loads versions into its engine."""
        self.timeout_s = timeout_s
        """Time limit of one episode."""
        self.running = 0
        """Episodes in progress."""
        self._reward = reward
        self._memory_bytes = memory_bytes
        self._slots = asyncio.Semaphore(
            EPISODES_PER_ENGINE_SLOT * sum(engine.capacity() for engine in engines.values())
        )

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait, first come first served, until one more episode may run; hold its slot."""
        async with self._slots:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1

    async def load(self, run: ObjectStore, versions: Mapping[str, int]) -> dict[str, LoadedWeights]:
        """Load one exact, verified version of each policy in `versions`; return the weights.

        Raises what `storage.weights.reader.read` raises.
        """
        loaded: dict[str, LoadedWeights] = {}
        for policy, version in versions.items():
            loaded[policy] = await in_system_thread(
                reader.read, run, policy, version, memory_bytes=self._memory_bytes
            )
            await self.loaders[policy].load(loaded[policy])
        return loaded

    async def load_newest(self, run: ObjectStore) -> dict[str, LoadedWeights]:
        """Load the newest readable version of every policy; CorruptError when there is none.

        ConfigError when two versions, or version 0, do not fit the model.
        """
        loaded: dict[str, LoadedWeights] = {}
        for policy in self.engines:
            newest = await in_system_thread(manifests.latest, run, policy)
            loaded[policy] = await self._load_up_to(run, policy, newest or 0)
        return loaded

    async def _load_up_to(self, run: ObjectStore, policy: str, newest: int) -> LoadedWeights:
        damage: CorruptError | ConfigError | None = None
        for version in range(newest, -1, -1):
            try:
                return (await self.load(run, {policy: version}))[policy]
            except (CorruptError, ConfigError) as error:
                misfits = [each for each in (error, damage) if isinstance(each, ConfigError)]
                if len(misfits) == 2 or (misfits and version == 0):
                    raise
                damage = misfits[0] if misfits else damage or error
                log.warning("%s starts from an older version: %s", policy, error)
            except NotFoundError:
                if version == 0 and damage is None:
                    raise  # there is no base model yet; any other version was retired
        raise damage or NotFoundError(
            f"no version of {policy} can be read: the data of all of them was deleted"
        )

    async def close(self) -> None:
        """End the engines, the chats, and the processes of the reward."""
        for engine in self.engines.values():
            await engine.close()
        for chat in {player.chat for player in self.players.values()}:
            await in_system_thread(chat.close)
        await in_system_thread(_close, self._reward)


def check_agent_pool(
    config: RolloutConfig, sampling: Mapping[str, SamplingConfig]
) -> tuple[str, ...]:
    """Return the policies that the workflow uses; needs no store and no model.

    Raises:
        ConfigError: the workflow, its arguments, its reward or its roles cannot work.
    """
    reward = make_reward(config.workflow.reward, config.workflow.reward_timeout_s)
    try:
        by_role = policies_by_role(
            make_workflow(config.workflow, reward), config.workflow, sampling
        )
        return tuple(dict.fromkeys(by_role.values()))
    finally:
        _close(reward)


def open_agent_pool(
    run: ObjectStore, config: RolloutConfig, sampling: Mapping[str, SamplingConfig]
) -> AgentPool:
    """Build the pool of a run whose policies all have a version 0. Its engines have no weights yet.

    Blocks for the store, imports and the starts of processes: an event loop calls it in a thread.

    Raises:
        ConfigError: the workflow, the reward, the engine or a tokenizer cannot work.
        NotFoundError: a policy has no version 0 yet.
    """
    return make_agent_pool(partial(reader.fetch_files, run), config, sampling)


def make_agent_pool(
    fetch_files: Callable[[str], Mapping[str, bytes]],
    config: RolloutConfig,
    sampling: Mapping[str, SamplingConfig],
) -> AgentPool:
    """Build a pool whose policies may be of several runs, as `open_agent_pool` does.

    Args:
        fetch_files: returns the files of a policy's base model.

    Raises:
        ConfigError: the workflow, the reward, the engine or a tokenizer cannot work.
        Exception: that of `fetch_files`.
    """
    # The files first: a worker that waits for them makes no reward at each try.
    workflow_class = find_workflow(config.workflow, "rollout.workflow.name")
    policy_of = policies_by_role(workflow_class, config.workflow, sampling)
    files_of = {policy: fetch_files(policy) for policy in dict.fromkeys(policy_of.values())}
    with ExitStack() as undo:
        reward = make_reward(config.workflow.reward, config.workflow.reward_timeout_s)
        undo.callback(_close, reward)
        workflow = make_workflow(config.workflow, reward)
        chats: dict[frozenset[tuple[str, bytes]], Chat] = {}
        players: dict[str, Player] = {}
        engine_of = placed(config.engine, tuple(sampling))
        for policy, files in files_of.items():
            content = frozenset(files.items())
            if content not in chats:
                # Policies with equal files share one chat, and may continue each other's contexts.
                chats[content] = ChatProcess(files)
                undo.callback(chats[content].close)
            beside = next((player.engine for player in players.values()), None)
            engine = _engine(engine_of[policy], policy, files, beside)
            players[policy] = Player(policy, engine, chats[content], sampling[policy])
        undo.pop_all()
    return AgentPool(
        workflow,
        reward,
        players={role: players[policy] for role, policy in policy_of.items()},
        engines={policy: player.engine for policy, player in players.items()},
        timeout_s=config.workflow.timeout_s,
        memory_bytes=config.refresh_memory_mb * 2**20,
    )


def _close(reward: Reward) -> None:
    """Close a reward; one whose `close` does not return is abandoned after CLOSE_LIMIT_S."""
    closing = UserThreads(1).submit(copy_context().run, reward.close)
    wait([closing], CLOSE_LIMIT_S)
    if closing.done():
        closing.result()
    else:
        log.warning("close() of the reward is abandoned after %g s", CLOSE_LIMIT_S)


def _engine(
    config: EngineConfig, policy: str, files: Mapping[str, bytes], beside: Engine | None
) -> Engine:
    if "config.json" not in files:
        raise ConfigError(
            f"the base model of policy {policy} has no config.json, so no engine can be made for it"
        )
    model_config = parse(files["config.json"], f"config.json of the base model of {policy}")
    return make_engine(config, model_config, beside)
