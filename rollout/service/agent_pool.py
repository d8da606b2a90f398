"""Everything one process needs to play a run's workflow: the workflow itself, and an engine and a
chat for each policy it asks for.

    recipe ──▶ workflow, reward           run's version 0 ──▶ chats, engines (without weights until `load`)

Used by rollout workers, which keep their engines fresh, and by the evaluation, which loads exact
versions.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from rollout.agents.chat import Chat, load_chat
from rollout.agents.workflow import Player, Workflow
from rollout.config import EngineConfig, RolloutConfig, SamplingConfig
from rollout.engines.engine import Engine, make_engine
from rollout.rewards.math_reward import Reward, make_reward
from rollout.workflows import make_workflow, policies_by_role
from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.formats.json_objects import parse
from storage.store.object_store import ObjectStore
from storage.weights import manifests, reader
from storage.weights.manifests import LoadedWeights

log = logging.getLogger(__name__)

PLAYS_PER_PLACE = 2
"""Episodes played at once for each place in an engine: while one waits for a reward or another
policy, its place is used.
"""


class AgentPool:
    """A workflow with its players. At most `PLAYS_PER_PLACE` episodes for each place of its engines
    are played at once.
    """

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
        self.timeout_s = timeout_s
        """Longest play of one episode."""
        self.running = 0
        """Episodes being played."""
        self._reward = reward
        self._memory_bytes = memory_bytes
        self._places = asyncio.Semaphore(
            PLAYS_PER_PLACE * sum(engine.capacity() for engine in engines.values())
        )

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits, first come first served, until one more episode may be played."""
        async with self._places:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1

    async def load(self, run: ObjectStore, versions: Mapping[str, int]) -> dict[str, LoadedWeights]:
        """Loads one exact version of each policy named, verified, and returns what was read; raises
        what `storage.weights.read` raises.
        """
        loaded: dict[str, LoadedWeights] = {}
        for policy, version in versions.items():
            loaded[policy] = await asyncio.to_thread(
                reader.read, run, policy, version, memory_bytes=self._memory_bytes
            )
            await self.engines[policy].load(version, loaded[policy].tensors)
        return loaded

    async def load_newest(self, run: ObjectStore) -> dict[str, LoadedWeights]:
        """Loads the newest version of every policy that can be read, and returns it; CorruptError
        when none can.
        """
        loaded: dict[str, LoadedWeights] = {}
        for policy in self.engines:
            newest = await asyncio.to_thread(manifests.latest, run, policy)
            loaded[policy] = await self._load_below(run, policy, newest or 0)
        return loaded

    async def _load_below(self, run: ObjectStore, policy: str, newest: int) -> LoadedWeights:
        damage: CorruptError | None = None
        for version in range(newest, -1, -1):
            try:
                return (await self.load(run, {policy: version}))[policy]
            except CorruptError as error:
                damage = damage or error
                log.warning("%s begins with an older version: %s", policy, error)
            except NotFoundError:
                if version == 0 and damage is None:
                    raise  # there is no base model yet; any other version was retired
        raise damage or NotFoundError(
            f"no version of {policy} can be read: the data of all of them was let go"
        )

    async def close(self) -> None:
        """Ends the engines and the reward's processes."""
        for engine in self.engines.values():
            await engine.close()
        await asyncio.to_thread(self._reward.close)


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
        reward.close()


def open_agent_pool(
    run: ObjectStore, config: RolloutConfig, sampling: Mapping[str, SamplingConfig]
) -> AgentPool:
    """The cast of a run whose policies all have a version 0. The engines hold no weights yet:
    `load` them.

    Raises ConfigError for a workflow, reward, engine or tokenizer that cannot work, NotFoundError
    before version 0.
    """
    reward = make_reward(config.workflow.reward, config.workflow.reward_timeout_s)
    workflow = make_workflow(config.workflow, reward)
    played_by = policies_by_role(workflow, config.workflow, sampling)
    files = {
        policy: reader.fetch_files(run, policy) for policy in dict.fromkeys(played_by.values())
    }
    chats: dict[frozenset[tuple[str, bytes]], Chat] = {}
    players: dict[str, Player] = {}
    for policy, own in files.items():
        content = frozenset(own.items())
        if (
            content not in chats
        ):  # policies with the same files share one chat, and may go on in each other's contexts
            chats[content] = load_chat(own)
        players[policy] = Player(
            policy, _engine(config.engine, policy, own), chats[content], sampling[policy]
        )
    engines = {policy: player.engine for policy, player in players.items()}
    by_role = {role: players[policy] for role, policy in played_by.items()}
    return AgentPool(
        workflow,
        reward,
        by_role,
        engines,
        config.workflow.timeout_s,
        config.refresh_memory_mb * 2**20,
    )


def _engine(config: EngineConfig, policy: str, files: Mapping[str, bytes]) -> Engine:
    if "config.json" not in files:
        raise ConfigError(
            f"the base model of policy {policy} has no config.json, so no engine can be made for it"
        )
    return make_engine(
        config, parse(files["config.json"], f"config.json of the base model of {policy}")
    )
