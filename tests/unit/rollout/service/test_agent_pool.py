import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import pytest

from rollout.config import (
    EngineConfig,
    RolloutConfig,
    SamplingConfig,
    SglangConfig,
    WorkflowConfig,
)
from rollout.engines.engine import make_engine
from rollout.rewards.math_reward import MathReward
from rollout.rewards.reward import Judgement, Reward
from rollout.service import agent_pool
from rollout.service.agent_pool import check_agent_pool, open_agent_pool
from rollout.service.episode_runner import run_prompts
from rollout.workflows import make_workflow
from rollout.workflows.single_turn import SingleTurn
from storage import layout
from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.formats.safetensors import weights_digest
from storage.records.rollouts import Prompt
from storage.records.types import Json
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tests.support.runs.builders import tensors
from tests.support.runs.fakes import (
    ScriptedEngine,
    base_files,
    pool_of,
    publish_base,
    scripted_player,
    solve,
)
from tests.support.stores.damaged_weights import spoil

SAMPLING = {"solver": SamplingConfig(), "verifier": SamplingConfig(temperature=0.5)}
CONFIG = RolloutConfig(
    workflow=WorkflowConfig(name="actor_and_verify"),
    engine=EngineConfig(name="tests.support.runs.fakes:ScriptedEngine"),
)


async def test_a_pool_uses_the_exact_requested_versions(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver", "verifier"])
    publisher.publish(memory_store, "verifier", 1, tensors(1))
    pool = open_agent_pool(memory_store, CONFIG, SAMPLING)
    await pool.load(memory_store, {"solver": 0, "verifier": 1})
    groups = await run_prompts(
        pool, [Prompt("p/0", {"question": "7+8-3=?", "answer": "12"})], 1, seed=0
    )
    attempt, verdict = groups[0].episodes[0].sequences
    assert (attempt.versions.max(), verdict.versions.max()) == (0, 1)
    assert (attempt.temperature, verdict.temperature) == (1.0, 0.5)
    assert pool.engines["verifier"].digest(1) == weights_digest(tensors(1))
    await pool.close()


class TimedReward:
    """Keeps the time limit that it was made with."""

    limits_s: ClassVar[list[float]] = []

    def __init__(self, timeout_s: float) -> None:
        self.limits_s.append(timeout_s)

    async def score(self, answer: str, prompt: Prompt) -> Judgement:
        return Judgement(0.0)

    def close(self) -> None:
        pass


async def test_a_pool_has_the_limits_of_its_recipe(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimedReward, "limits_s", [])
    publish_base(memory_store, ["solver"])
    workflow = WorkflowConfig(
        timeout_s=71.0, reward=f"{__name__}:TimedReward", reward_timeout_s=3.5
    )
    engine = CONFIG.engine.model_copy(update={"max_concurrent": 3})
    pool = open_agent_pool(memory_store, RolloutConfig(workflow=workflow, engine=engine), SAMPLING)
    assert (pool.timeout_s, TimedReward.limits_s) == (71.0, [3.5])
    async with AsyncExitStack() as slots:
        for _ in range(6):  # two for each request that the engine decodes at a time
            await slots.enter_async_context(pool.slot())
        assert pool.running == 6
        waiting = asyncio.create_task(slots.enter_async_context(pool.slot()))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
    assert pool.running == 0
    await pool.close()


async def test_policies_with_the_same_base_model_share_one_tokenizer(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver", "verifier"])
    pool = open_agent_pool(memory_store, CONFIG, SAMPLING)
    assert pool.players["solver"].chat is pool.players["verifier"].chat
    assert pool.players["solver"].engine is not pool.players["verifier"].engine
    await pool.close()


class SharingScripted(ScriptedEngine):
    """An engine whose backend can serve several policies."""

    beside: "SharingScripted | None" = None

    def another(self, model_config: Json) -> "SharingScripted":
        other = SharingScripted(EngineConfig(), model_config)
        other.beside = self
        return other


@pytest.mark.parametrize("shared", [True, False])
async def test_the_policies_of_a_pool_share_servers_where_the_recipe_says_so(
    memory_store: ObjectStore, shared: bool
) -> None:
    publish_base(memory_store, ["solver", "verifier"])
    engine = EngineConfig(name=f"{__name__}:SharingScripted", sglang=SglangConfig(shared=shared))
    config = CONFIG.model_copy(update={"engine": engine})
    pool = open_agent_pool(memory_store, config, SAMPLING)
    solver, verifier = pool.engines["solver"], pool.engines["verifier"]
    assert isinstance(verifier, SharingScripted)
    assert verifier.beside is (solver if shared else None)
    assert pool.players["verifier"].engine is verifier
    await pool.close()


class Placed(ScriptedEngine):
    """Keeps the devices that it was made for."""

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        super().__init__(config, model_config)
        self.devices = config.devices


async def test_each_engine_has_its_own_devices(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver", "verifier"])
    engine = EngineConfig(name=f"{__name__}:Placed", device="cuda", devices=(2, 0))
    pool = open_agent_pool(memory_store, CONFIG.model_copy(update={"engine": engine}), SAMPLING)
    assert [each.devices for each in pool.engines.values()] == [(2,), (0,)]  # type: ignore[attr-defined]  # Placed
    await pool.close()


async def test_closing_the_pool_closes_every_engine(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver", "verifier"])
    pool = open_agent_pool(memory_store, CONFIG, SAMPLING)
    await pool.close()
    assert [engine.closed for engine in pool.engines.values()] == [True, True]  # type: ignore[attr-defined]  # ScriptedEngines


class NeverCloses:
    """A reward that waits for a call that does not return."""

    def __init__(self) -> None:
        self.released = threading.Event()

    async def score(self, answer: str, prompt: Prompt) -> Judgement:
        return Judgement(0.0)

    def close(self) -> None:
        self.released.wait()


async def test_a_reward_that_does_not_close_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_pool, "CLOSE_LIMIT_S", 0.01)
    reward = NeverCloses()
    pool = pool_of(SingleTurn(reward), reward, solver=scripted_player("solver", solve))
    await pool.close()
    assert caplog.messages == ["close() of the reward is abandoned after 0.01 s"]
    reward.released.set()


class NeverClosesTimed(NeverCloses):
    """A reward of a recipe that does not close."""

    ended: ClassVar[threading.Event]

    def __init__(self, timeout_s: float) -> None:
        self.released = self.ended


@pytest.fixture
def never_closes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(agent_pool, "CLOSE_LIMIT_S", 0.01)
    NeverClosesTimed.ended = threading.Event()
    yield f"{__name__}:NeverClosesTimed"
    NeverClosesTimed.ended.set()


def test_a_reward_that_does_not_close_hides_no_error_of_an_engine(
    memory_store: ObjectStore, never_closes: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish_base(memory_store, ["solver"])
    config = RolloutConfig(
        workflow=WorkflowConfig(reward=never_closes),
        engine=EngineConfig(name=f"{__name__}:WithCapacity"),
    )
    with pytest.raises(ConfigError, match="capacity"):
        open_agent_pool(memory_store, config, SAMPLING)
    assert caplog.messages == ["close() of the reward is abandoned after 0.01 s"]


def test_the_check_of_a_recipe_abandons_a_reward_that_does_not_close(
    never_closes: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_agent_pool(RolloutConfig(workflow=WorkflowConfig(reward=never_closes)), SAMPLING)
    assert caplog.messages == ["close() of the reward is abandoned after 0.01 s"]


async def test_the_newest_readable_version_is_loaded(memory_store: ObjectStore) -> None:
    publish_base(memory_store, ["solver", "verifier"])
    for version in (1, 2):
        publisher.publish(memory_store, "solver", version, tensors(version))
    spoil(memory_store, "solver", 2)
    pool = open_agent_pool(memory_store, CONFIG, SAMPLING)
    loaded = await pool.load_newest(memory_store)
    assert {policy: held.manifest.version for policy, held in loaded.items()} == {
        "solver": 1,
        "verifier": 0,
    }
    spoil(memory_store, "verifier", 0)
    with pytest.raises(CorruptError):
        await pool.load_newest(memory_store)
    await pool.close()


async def test_one_version_that_does_not_fit_the_model_is_passed_over_at_the_start(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    misfits = {3}
    load = ScriptedEngine.load

    async def picky(engine: ScriptedEngine, version: int, weights: Any) -> None:
        if version in misfits:
            raise ConfigError(f"version {version} has a tensor that the model lacks")
        await load(engine, version, weights)

    monkeypatch.setattr(ScriptedEngine, "load", picky)
    publish_base(memory_store, ["solver", "verifier"])
    for version in (1, 2, 3):
        publisher.publish(memory_store, "solver", version, tensors(version))
    spoil(memory_store, "solver", 2)
    pool = open_agent_pool(memory_store, CONFIG, SAMPLING)
    loaded = await pool.load_newest(memory_store)
    assert loaded["solver"].manifest.version == 1
    misfits.add(1)
    with pytest.raises(ConfigError, match="version 1 has a tensor"):
        await pool.load_newest(memory_store)
    misfits.clear()
    misfits.add(0)
    with pytest.raises(ConfigError, match="version 0 has a tensor"):
        await pool.load_newest(memory_store)  # of the verifier
    await pool.close()


def test_opening_a_pool_before_the_base_models_exist_raises_not_found(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver"])
    with pytest.raises(NotFoundError):
        open_agent_pool(memory_store, CONFIG, SAMPLING)


class CountedReward(TimedReward):
    """Counts the objects that were made and not closed."""

    made: ClassVar[int] = 0
    num_open: ClassVar[int] = 0

    def __init__(self, timeout_s: float) -> None:
        CountedReward.made += 1
        CountedReward.num_open += 1

    def close(self) -> None:
        CountedReward.num_open -= 1


async def test_a_pool_that_cannot_be_opened_leaves_no_reward(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountedReward, "made", 0)
    monkeypatch.setattr(CountedReward, "num_open", 0)
    config = RolloutConfig(
        workflow=WorkflowConfig(reward=f"{__name__}:CountedReward"),
        engine=EngineConfig(name=f"{__name__}:WithCapacity"),
    )
    with pytest.raises(NotFoundError):  # its worker waits, and tries again
        open_agent_pool(memory_store, config, SAMPLING)
    assert CountedReward.made == 0
    publish_base(memory_store, ["solver"])
    with pytest.raises(ConfigError, match="capacity"):
        open_agent_pool(memory_store, config, SAMPLING)
    assert (CountedReward.made, CountedReward.num_open) == (1, 0)


def test_a_base_model_without_a_config_is_refused(memory_store: ObjectStore) -> None:
    files = base_files()
    del files["config.json"]
    publisher.publish(memory_store, "solver", 0, tensors(0), extra_files=files)
    single = CONFIG.model_copy(update={"workflow": WorkflowConfig(name="single_turn")})
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_agent_pool(memory_store, single, SAMPLING)


def test_a_recipe_is_checked_without_a_store() -> None:
    check_agent_pool(CONFIG, SAMPLING)
    with pytest.raises(ConfigError, match="verifier"):
        check_agent_pool(CONFIG, {"solver": SamplingConfig()})
    with pytest.raises(ConfigError, match="'maths' is not known"):
        check_agent_pool(RolloutConfig(workflow=WorkflowConfig(reward="maths")), SAMPLING)


async def test_retired_versions_are_skipped_and_damage_is_reported(
    memory_store: ObjectStore,
) -> None:
    publish_base(memory_store, ["solver", "verifier"])
    for version in (1, 2, 3):
        publisher.publish(memory_store, "solver", version, tensors(version))
    for version in (0, 1, 2):
        memory_store.put(layout.retired("solver", version), b"{}")
        for key in memory_store.list(layout.weights("solver", version)):
            if key.endswith(".safetensors"):
                memory_store.delete(key)
    spoil(memory_store, "solver", 3)
    pool = open_agent_pool(memory_store, CONFIG, SAMPLING)
    with pytest.raises(CorruptError, match=r"weights/solver/00000003"):
        await pool.load_newest(memory_store)
    await pool.close()


class WithoutPrompt(SingleTurn):
    def __init__(self, reward: Reward) -> None:
        raise FileNotFoundError("no prompt.txt")


def test_an_error_of_the_constructor_names_the_workflow() -> None:
    config = WorkflowConfig(name=f"{__name__}:WithoutPrompt")
    with pytest.raises(
        ConfigError,
        match=rf"^rollout\.workflow\.args: the constructor of {config.name} failed: FileNotFoundError",
    ):
        make_workflow(config, MathReward(1.0))


class WithCapacity(ScriptedEngine):
    value: ClassVar[Any] = 0

    def capacity(self) -> int:
        if isinstance(self.value, Exception):
            raise self.value
        made: int = self.value
        return made


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (0, "returned 0; it must return the number of requests decoded together"),
        (-1, "returned -1; it must"),
        (None, "returned None; it must"),
        (True, "returned True; it must"),
        (KeyError("oops"), "failed: KeyError: 'oops'"),
    ],
)
def test_an_engine_without_capacity_is_named(
    monkeypatch: pytest.MonkeyPatch, value: Any, fault: str
) -> None:
    """A semaphore of 0 would start no episode, for ever."""
    monkeypatch.setattr(WithCapacity, "value", value)
    name = f"{__name__}:WithCapacity"
    with pytest.raises(
        ConfigError, match=rf"^rollout\.engine\.name: capacity\(\) of {name} {fault}"
    ):
        make_engine(EngineConfig(name=name), {})
