import asyncio
import gc
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from data_ops.algorithms.policy_groups import ModelLimits, route_group
from rollout.agents.chat import user
from rollout.agents.episode_time import stopped_time
from rollout.agents.failures import (
    EnvironmentFailedError,
    ModelFailedError,
    RewardFailedError,
    ToolFailedError,
)
from rollout.agents.workflow import Agent
from rollout.engines.engine import EngineFailedError, GenerationAbortedError
from rollout.rewards.judge_process import JudgeFailedError, JudgeTimeoutError
from rollout.rewards.math_reward import MathReward
from rollout.rewards.reward import Judgement, make_reward
from rollout.service import event_loop
from rollout.service.episode_runner import run_episode, run_group, run_prompts
from rollout.workflows.single_turn import SingleTurn
from storage.errors import ConfigError, CorruptError, TransientError
from storage.records.rollouts import Episode, FailureKind, Prompt, Sequence
from tests.support.patience import PATIENCE_S
from tests.support.runs import builders
from tests.support.runs.fakes import (
    ScriptedEngine,
    fail,
    guess,
    lines,
    pool_of,
    scripted_player,
    solve,
)
from tests.support.time_leaps import pass_by

PROMPT = Prompt("chained_addition/train/17", {"question": "7+8-3=?", "answer": "12"})


UNSTORABLE = "ValueError: the workflow returned an episode that cannot be stored: "


def sequence(**changes: object) -> Sequence:
    """A sequence that the policy of these tests sampled, with `changes`."""
    return replace(builders.sequence(policies=("solver",)), **changes)  # type: ignore[arg-type]  # the tests choose the fields


class Plays:
    """A workflow with a given effect."""

    roles: tuple[str, ...] = ("solver",)

    def __init__(
        self, episode: object = None, error: BaseException | None = None, hangs: bool = False
    ) -> None:
        self.episode, self.error, self.hangs = episode, error, hangs
        self.started = asyncio.Event()

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        self.started.set()
        if self.error:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        return self.episode  # type: ignore[return-value]  # the very thing under test


class Holds:
    """A workflow whose failing calls are in cycles of references with what they hold."""

    roles: tuple[str, ...] = ("solver",)

    def __init__(self) -> None:
        self.held: list[weakref.ref[Episode]] = []

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        episode = Episode(sequences=(), reward=0.0)
        self.held.append(weakref.ref(episode))
        error = ValueError("no answer")
        try:
            raise error
        except ValueError as cause:
            kept = cause
            raise ModelFailedError(f"{kept}, and {episode.reward}") from cause


async def test_a_failed_episode_keeps_nothing_that_its_workflow_held() -> None:
    workflow = Holds()
    pool = pool_of(workflow, solver=scripted_player("solver", solve))
    gc.disable()
    try:
        episode = await run_episode(pool, PROMPT, seed=0)
        assert [held() for held in workflow.held] == [None]
    finally:
        gc.enable()
    assert episode.failure_kind is FailureKind.MODEL


class Lookups:
    """A workflow whose episodes share a task, which answers them and passes its errors on."""

    roles: tuple[str, ...] = ("solver",)

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, asyncio.Future[int]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        self._task = self._task or asyncio.create_task(self._serve())
        answer = asyncio.get_running_loop().create_future()
        await self._queue.put((prompt.id, answer))
        return Episode(sequences=(sequence(),), reward=float(await answer))

    async def _serve(self) -> None:
        while True:
            name, answer = await self._queue.get()
            try:
                if name == "unknown":
                    raise ToolFailedError("there is no such entry")
                answer.set_result(len(name))
            except ToolFailedError as error:
                answer.set_exception(error)


async def test_a_failed_episode_leaves_the_task_that_its_error_comes_from_running() -> None:
    pool = pool_of(Lookups(), solver=scripted_player("solver", solve))
    failed = await run_episode(pool, replace(PROMPT, id="unknown"), 0)
    assert failed.error == "ToolFailedError: there is no such entry"
    assert (await run_episode(pool, replace(PROMPT, id="four"), 0)).reward == 4.0


async def test_an_exception_of_an_episode_is_recorded_and_the_others_continue() -> None:
    player = scripted_player("solver", lines("\\boxed{12}", "\\boxed{13}"))
    engine = player.engine
    assert isinstance(engine, ScriptedEngine)
    answers = engine.script
    engine.script = lambda prompt, seed: (
        answers(prompt, seed) if len(engine.asked) != 2 else fail(prompt, seed)
    )
    group = await run_group(pool_of(SingleTurn(MathReward(5.0)), solver=player), PROMPT, 3, seed=0)
    assert [episode.error for episode in group.episodes] == [
        None,
        "ValueError: the script has no answer",
        None,
    ]
    assert [episode.reward for episode in group.episodes] == [1.0, 0.0, 0.0]
    assert [len(episode.sequences) for episode in group.episodes] == [1, 0, 1]


class Judged:
    """A reward that takes time and then has no verdict or a score."""

    error: Exception | None = None

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self._seconds, self._error = seconds, error or self.error

    async def score(self, answer: str, prompt: Prompt) -> Judgement:
        async with stopped_time():
            await pass_by(self._seconds)
        if self._error:
            raise self._error
        return Judgement(1.0)

    def close(self) -> None: ...


async def test_an_answer_without_a_verdict_is_a_failed_episode_not_a_wrong_answer() -> None:
    workflow = SingleTurn(Judged(0.0, JudgeTimeoutError("no verdict within 5 s of CPU time")))
    player = scripted_player("solver", solve)
    group = await run_group(pool_of(workflow, solver=player), PROMPT, 2, seed=0)
    assert [episode.error for episode in group.episodes] == [
        "JudgeTimeoutError: no verdict within 5 s of CPU time"
    ] * 2
    routed = route_group(0, 0, group, "solver", ModelLimits())
    assert routed is None  # no value of it is part of a baseline or a batch


async def test_the_episode_clock_stops_while_the_judge_works() -> None:
    workflow = SingleTurn(Judged(2 * PATIENCE_S))
    pool = pool_of(workflow, timeout_s=PATIENCE_S, solver=scripted_player("solver", solve))
    episode = await run_episode(pool, PROMPT, seed=0)
    assert (episode.error, episode.reward) == (None, 1.0)


async def test_an_episode_that_hangs_is_cancelled_by_its_timeout() -> None:
    pool = pool_of(Plays(hangs=True), timeout_s=0.05, solver=scripted_player("solver", solve))
    episode = await run_episode(pool, PROMPT, seed=0)
    assert (episode.error, episode.sequences, episode.reward) == ("timeout after 0.05 s", (), 0.0)
    assert episode.failure_kind == FailureKind.TIMEOUT


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ModelFailedError("no code"), FailureKind.MODEL, "ModelFailedError: no code"),
        (
            EnvironmentFailedError("no browser"),
            FailureKind.ENVIRONMENT,
            "EnvironmentFailedError: no browser",
        ),
        (ToolFailedError("no shell"), FailureKind.TOOL, "ToolFailedError: no shell"),
        (RewardFailedError("no tests"), FailureKind.REWARD, "RewardFailedError: no tests"),
        (JudgeFailedError("it died"), FailureKind.REWARD, "JudgeFailedError: it died"),
        (JudgeTimeoutError("5 s"), FailureKind.TIMEOUT, "JudgeTimeoutError: 5 s"),
        (TimeoutError("a server"), FailureKind.TIMEOUT, "TimeoutError: a server"),
        (
            GenerationAbortedError("after 3 tokens"),
            FailureKind.INFRASTRUCTURE,
            "GenerationAbortedError: after 3 tokens",
        ),
        (
            ConnectionResetError("by peer"),
            FailureKind.INFRASTRUCTURE,
            "ConnectionResetError: by peer",
        ),
        (TransientError("S3"), FailureKind.INFRASTRUCTURE, "TransientError: S3"),
        (CorruptError("a file"), FailureKind.INFRASTRUCTURE, "CorruptError: a file"),
        (ConfigError("a role"), FailureKind.WORKFLOW_BUG, "ConfigError: a role"),
        (KeyError("answer"), FailureKind.WORKFLOW_BUG, "KeyError: 'answer'"),
        (FileNotFoundError("tests.py"), FailureKind.WORKFLOW_BUG, "FileNotFoundError: tests.py"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_the_exception_of_a_workflow_determines_the_failure_kind(
    error: Exception, kind: FailureKind, message: str
) -> None:
    pool = pool_of(Plays(error=error), solver=scripted_player("solver", solve))
    episode = await run_episode(pool, PROMPT, seed=0)
    assert (episode.failure_kind, episode.error) == (kind, message)


class Diary:
    """A workflow with turns until the context is full."""

    roles: tuple[str, ...] = ("solver",)

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        turn = await agents["solver"].respond([user(prompt.fields["question"])])
        while True:
            turn = await agents["solver"].respond([user("go on")], context=turn.context)


@pytest.mark.parametrize(
    ("tokens_max", "kind", "error"),
    [
        (60, FailureKind.MODEL, "ModelFailedError"),
        (3, FailureKind.WORKFLOW_BUG, "ContextFullError"),
    ],
)
async def test_a_context_filled_by_answers_is_a_model_failure_and_a_long_prompt_is_not(
    tokens_max: int, kind: FailureKind, error: str
) -> None:
    player = scripted_player("solver", solve)
    assert isinstance(player.engine, ScriptedEngine)
    player.engine.tokens_max = tokens_max
    episode = await run_episode(pool_of(Diary(), solver=player), PROMPT, seed=0)
    assert episode.failure_kind == kind
    assert episode.error == f"{error}: {len(player.engine.asked[-1][0])} tokens"


async def test_a_request_aborted_by_the_engine_is_an_infrastructure_failure() -> None:
    player = scripted_player("solver", solve)
    assert isinstance(player.engine, ScriptedEngine)
    player.engine.aborts = True
    episode = await run_episode(pool_of(Diary(), solver=player), PROMPT, seed=0)
    assert episode.failure_kind == FailureKind.INFRASTRUCTURE
    assert episode.error == (
        "GenerationAbortedError: the engine of policy solver ended the request after 0 tokens"
    )


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (KeyError("tests"), FailureKind.REWARD, "RewardFailedError: KeyError: 'tests'"),
        (ConnectionError("judge"), FailureKind.REWARD, "RewardFailedError: ConnectionError: judge"),
        (TimeoutError("30 s"), FailureKind.TIMEOUT, "TimeoutError: 30 s"),
        (JudgeTimeoutError("5 s"), FailureKind.TIMEOUT, "JudgeTimeoutError: 5 s"),
        (JudgeFailedError("it died"), FailureKind.REWARD, "JudgeFailedError: it died"),
        (
            ConfigError("install math-verify"),
            FailureKind.WORKFLOW_BUG,
            "ConfigError: install math-verify",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_exceptions_of_rewards_and_of_workflows_have_different_failure_kinds(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: FailureKind, message: str
) -> None:
    monkeypatch.setattr(Judged, "error", raised)
    workflow = SingleTurn(make_reward(f"{__name__}:Judged", 1.0))
    pool = pool_of(workflow, solver=scripted_player("solver", solve))
    episode = await run_episode(pool, PROMPT, seed=0)
    assert (episode.failure_kind, episode.error) == (kind, message)


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (None, "TypeError: the workflow returned NoneType, not an Episode"),
        (
            Episode(sequences=(), reward=float("nan")),
            "ValueError: the workflow's reward is nan; it must be a finite number",
        ),
        (
            Episode(sequences=(), reward=float("-inf")),
            "ValueError: the workflow's reward is -inf; it must be a finite number",
        ),
        (
            Episode(sequences=(), reward=0.0, metrics={"x": float("nan")}),
            "ValueError: the workflow's metric x is nan; it must be a finite number",
        ),
        (
            Episode(
                sequences=(builders.sequence(), builders.sequence(reward=float("inf"))), reward=0.0
            ),
            "ValueError: the workflow's reward of sequence 1 is inf; it must be a finite number",
        ),
        (
            Episode(sequences=(), reward=0.0, error="no"),
            "ValueError: the workflow returned an episode with only one of error and failure_kind; "
            "a failed episode has both",
        ),
        (
            Episode(sequences=(), reward=0.0, failure_kind=FailureKind.TOOL),
            "ValueError: the workflow returned an episode with only one of error and failure_kind; "
            "a failed episode has both",
        ),
        (
            Episode(sequences=(), reward=0.0, metrics={"x": float("inf")}),
            "ValueError: the workflow's metric x is inf; it must be a finite number",
        ),
        (
            Episode(sequences=(sequence(temperature=float("nan")),), reward=0.0),
            "ValueError: the workflow's temperature of sequence 0 is nan; it must be a finite number",
        ),
        (
            Episode(sequences=(), reward=0.0, error="bad \udc80", failure_kind=FailureKind.TOOL),
            f"{UNSTORABLE}error has the lone surrogate U+DC80 as character 5, which is no text",
        ),
        (
            Episode(sequences=(), reward=0.0, error=ValueError("x"), failure_kind=FailureKind.TOOL),  # type: ignore[arg-type]  # the very thing under test
            f"{UNSTORABLE}error is of the type ValueError; it must be text",
        ),
        (
            Episode(sequences=(), reward=0.0, error="x", failure_kind="mine"),  # type: ignore[arg-type]  # the very thing under test
            f"{UNSTORABLE}the failure kind 'mine' is none of model, environment, tool, reward, "
            "timeout, infrastructure, workflow_bug",
        ),
        (
            Episode(sequences=(), reward=0.0, metrics={"a\udc80": 1.0}),
            f"{UNSTORABLE}the name of a metric has the lone surrogate U+DC80 as character 2, which "
            "is no text",
        ),
        (
            Episode(sequences=(), reward=0.0, metrics=dict.fromkeys(map(str, range(1_001)), 1.0)),
            f"{UNSTORABLE}1,001 metrics are more than the limit of 1,000; sum up those of turns or "
            "tokens",
        ),
        (
            Episode(sequences=(sequence(name="a\udc80"),), reward=0.0),
            f"{UNSTORABLE}row 0: name has the lone surrogate U+DC80 as character 2, which is no text",
        ),
        (
            Episode(sequences=(sequence(), sequence(name=None)), reward=0.0),
            f"{UNSTORABLE}row 1: name is of the type NoneType; it must be text",
        ),
        (
            Episode(sequences=(sequence(temperature=-1.0),), reward=0.0),
            f"{UNSTORABLE}row 0: the temperature is -1; it is 0, or from 1e-12 to 1e+12",
        ),
        (
            Episode(sequences=(sequence(loss_mask=np.array([False, True])),), reward=0.0),
            f"{UNSTORABLE}row 0: loss_mask and tokens differ in length",
        ),
        (
            Episode(sequences=(sequence(loss_mask=np.array([True] * 5)),), reward=0.0),
            f"{UNSTORABLE}row 0, token 0: loss_mask is True on a token that was not sampled",
        ),
        (
            Episode(sequences=(sequence(policies=("judge",)),), reward=0.0),
            "ValueError: sequence 0 of the workflow names the policy judge; the workflow's policies "
            "are solver",
        ),
        (
            Episode(sequences=(sequence(versions=np.array([-1, -1, 0, 3, 3])),), reward=0.0),
            "ValueError: sequence 0 of the workflow names version 3 of solver, which was not loaded "
            "here; use the versions of the answers",
        ),
    ],
)
async def test_an_episode_that_cannot_be_stored_is_a_failed_episode(
    returned: object, error: str
) -> None:
    pool = pool_of(Plays(returned), solver=scripted_player("solver", solve))
    episode = await run_episode(pool, PROMPT, seed=0)
    assert (episode.error, episode.failure_kind) == (error, FailureKind.WORKFLOW_BUG)


async def test_arrays_of_other_types_are_stored_as_those_of_a_sequence() -> None:
    given = sequence(
        tokens=[11, 12, 40, 41, 2],
        owners=np.array([-1, -1, 0, 0, 0]),
        policies=["solver"],
    )
    failed = Episode(sequences=[given], reward=0.0, error="x", failure_kind="tool")  # type: ignore[arg-type]  # the very thing under test
    pool = pool_of(Plays(failed), solver=scripted_player("solver", solve))
    episode = await run_episode(pool, PROMPT, seed=0)
    assert (episode.error, episode.failure_kind) == ("x", FailureKind.TOOL)
    (stored,) = episode.sequences
    assert (stored.tokens.dtype, stored.tokens.tolist()) == (np.int32, [11, 12, 40, 41, 2])
    assert (stored.owners.dtype, stored.owners.tolist()) == (np.int8, [-1, -1, 0, 0, 0])
    assert stored.policies == ("solver",)


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no message")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("file \udc80"), "ValueError: file ?"),
        (
            UnreadableError(),
            "UnreadableError: its message cannot be read: __str__ raised AttributeError",
        ),
        (
            asyncio.CancelledError(),
            "CancelledError: something that the workflow awaited was cancelled",
        ),
        (BaseExceptionGroup("two", [SystemExit(1)]), "SystemExit: 1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_any_exception_of_a_workflow_is_a_failed_episode(
    error: BaseException, message: str
) -> None:
    pool = pool_of(Plays(error=error), solver=scripted_player("solver", solve))
    group = await run_group(pool, PROMPT, 2, seed=0)
    assert [(episode.error, episode.failure_kind) for episode in group.episodes] == [
        (message, FailureKind.WORKFLOW_BUG)
    ] * 2


class Exits:
    """A workflow that calls `sys.exit()` in a task of its own, or in its own code."""

    roles: tuple[str, ...] = ("solver",)

    def __init__(self, in_task: bool) -> None:
        self._in_task = in_task

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        if not self._in_task:
            sys.exit(3)
        return (await asyncio.gather(Exits(False).play(prompt, agents)))[0]


@pytest.mark.parametrize("in_task", [False, True])
def test_sys_exit_in_a_workflow_is_a_failed_episode(in_task: bool) -> None:
    pool = pool_of(Exits(in_task), solver=scripted_player("solver", solve))
    group = event_loop.run(run_group(pool, PROMPT, 2, seed=0))
    assert [(episode.error, episode.failure_kind) for episode in group.episodes] == [
        ("RuntimeError: sys.exit(3) was called", FailureKind.WORKFLOW_BUG)
    ] * 2


async def test_an_exception_of_a_reward_without_a_message_is_a_failure_of_the_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Judged, "error", UnreadableError())
    workflow = SingleTurn(make_reward(f"{__name__}:Judged", 1.0))
    pool = pool_of(workflow, solver=scripted_player("solver", solve))
    episode = await run_episode(pool, PROMPT, seed=0)
    assert (episode.failure_kind, episode.error) == (
        FailureKind.REWARD,
        "RewardFailedError: UnreadableError: its message cannot be read: __str__ raised AttributeError",
    )


async def test_the_first_error_of_a_group_decides_kind_and_message() -> None:
    error = ExceptionGroup("two", [ToolFailedError("no shell"), ConnectionError("reset")])
    pool = pool_of(Plays(error=error), solver=scripted_player("solver", solve))
    episode = await run_episode(pool, PROMPT, seed=0)
    assert (episode.failure_kind, episode.error) == (
        FailureKind.TOOL,
        "ToolFailedError: no shell",
    )


class AwaitsCancelled:
    """A workflow that awaits a task of its own which was cancelled."""

    roles: tuple[str, ...] = ("solver",)

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        inner = asyncio.create_task(asyncio.Event().wait())
        inner.cancel()
        await inner
        raise AssertionError("the task was cancelled")


async def test_a_cancelled_task_of_a_workflow_is_a_failed_episode() -> None:
    pool = pool_of(AwaitsCancelled(), solver=scripted_player("solver", solve))
    (group,) = await run_prompts(pool, [PROMPT], 2, seed=0)
    assert [(episode.error, episode.failure_kind) for episode in group.episodes] == [
        (
            "CancelledError: something that the workflow awaited was cancelled",
            FailureKind.WORKFLOW_BUG,
        )
    ] * 2


async def test_the_cancellation_of_an_episode_is_no_failure() -> None:
    workflow = Plays(hangs=True)
    pool = pool_of(workflow, solver=scripted_player("solver", solve))
    ended: list[Episode] = []
    task = asyncio.create_task(run_episode(pool, PROMPT, 0, ended.append))
    await workflow.started.wait()
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), ended, pool.running) == (True, [], 0)


class IgnoresCancellation:
    """A workflow that continues after its cancellation, until `released`."""

    roles: tuple[str, ...] = ("solver",)

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        while not self.released.is_set():
            with suppress(asyncio.CancelledError):
                await self.released.wait()
        return Episode(sequences=(), reward=0.0)


async def test_a_workflow_that_ignores_its_time_limit_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "CANCEL_LIMIT_S", 0.01)
    workflow = IgnoresCancellation()
    pool = pool_of(workflow, timeout_s=0.01, solver=scripted_player("solver", solve))
    async with asyncio.timeout(PATIENCE_S):
        episode = await run_episode(pool, PROMPT, seed=0)
    workflow.released.set()
    assert (episode.error, episode.failure_kind) == ("timeout after 0.01 s", FailureKind.TIMEOUT)
    assert pool.running == 0


class ChangesPrompt:
    """A workflow that writes something into its prompt that cannot be stored."""

    roles: tuple[str, ...] = ("solver",)

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        prompt.fields["tries"] = [*prompt.fields.get("tries", ()), self]
        return Episode(sequences=(), reward=float(len(prompt.fields["tries"])))


async def test_a_workflow_cannot_change_the_prompt_of_its_group() -> None:
    prompt = Prompt("p/0", {"question": "7+8-3=?"})
    pool = pool_of(ChangesPrompt(), solver=scripted_player("solver", solve))
    group = await run_group(pool, prompt, 2, seed=0)
    assert group.prompt.fields == {"question": "7+8-3=?"}
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0]


async def test_a_workflow_can_return_a_failed_episode_with_its_sequences() -> None:
    failed = Episode(
        sequences=(builders.sequence(policies=("solver",), starts_episode=False),),
        reward=0.0,
        error="no shell",
        failure_kind=FailureKind.TOOL,
    )
    pool = pool_of(Plays(failed), solver=scripted_player("solver", solve))
    episode = await run_episode(pool, PROMPT, seed=0)
    assert (episode.error, episode.failure_kind) == ("no shell", FailureKind.TOOL)
    assert [sequence.starts_episode for sequence in episode.sequences] == [True]


async def test_rewards_of_any_numeric_type_become_floats() -> None:
    pool = pool_of(
        Plays(Episode(sequences=(), reward=np.float32(0.5), metrics={"x": np.float64(1)})),
        solver=scripted_player("solver", solve),
    )  # type: ignore[arg-type]  # numpy's float32 is no float, and that is the point
    episode = await run_episode(pool, PROMPT, seed=0)
    assert (type(episode.reward), episode.reward, type(episode.metrics["x"])) == (float, 0.5, float)


async def test_a_broken_engine_is_not_an_episode_failure() -> None:
    def broken(_prompt: str, _seed: int) -> str:
        raise EngineFailedError("the engine ran out of memory")

    pool = pool_of(SingleTurn(MathReward(5.0)), solver=scripted_player("solver", broken))
    with pytest.raises(EngineFailedError, match="out of memory"):
        await run_prompts(pool, [PROMPT, PROMPT], 2, seed=0)


class HidesEngineErrors:
    """A workflow whose exception only has that of the engine in it."""

    roles: tuple[str, ...] = ("solver",)

    def __init__(self, way: str) -> None:
        self._way = way

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        answer = agents["solver"].respond([user(prompt.fields["question"])])
        if self._way == "group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(answer)
        try:
            await answer
        except EngineFailedError as error:
            if self._way == "cause":
                raise RuntimeError("the turn failed") from error
            raise RuntimeError("the turn failed") from None
        raise AssertionError("the engine is broken")


@pytest.mark.parametrize("way", ["group", "cause", "context"])
async def test_a_broken_engine_is_found_in_the_exception_of_a_workflow(way: str) -> None:
    def broken(_prompt: str, _seed: int) -> str:
        raise EngineFailedError("the engine ran out of memory")

    pool = pool_of(HidesEngineErrors(way), solver=scripted_player("solver", broken))
    with pytest.raises(EngineFailedError, match=r"^the engine ran out of memory$"):
        await run_prompts(pool, [PROMPT], 2, seed=0)


async def test_equal_seeds_give_equal_episodes_and_samples_differ() -> None:
    async def answers(seed: int) -> list[float]:
        pool = pool_of(SingleTurn(MathReward(5.0)), solver=scripted_player("solver", guess))
        groups = await run_prompts(pool, [PROMPT, PROMPT], 8, seed)
        return [episode.reward for group in groups for episode in group.episodes]

    first = await answers(3)
    assert first == await answers(3)
    assert first != await answers(4)
    assert set(first) == {0.0, 1.0}
    assert first[:8] != first[8:]


async def test_groups_are_in_prompt_order_and_each_episode_is_reported() -> None:
    reported: list[Episode] = []
    prompts = [Prompt(f"p/{n}", {"question": f"{n}+1=?", "answer": str(n + 1)}) for n in range(5)]
    pool = pool_of(SingleTurn(MathReward(5.0)), solver=scripted_player("solver", solve))
    groups = await run_prompts(pool, prompts, 2, seed=0, on_episode=reported.append)
    assert [group.prompt.id for group in groups] == ["p/0", "p/1", "p/2", "p/3", "p/4"]
    assert [episode.reward for group in groups for episode in group.episodes] == [1.0] * 10
    assert len(reported) == 10


async def test_the_number_of_concurrent_episodes_is_limited() -> None:
    class Counting:
        roles: tuple[str, ...] = ("solver",)
        most = 0

        async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
            self.most = max(self.most, pool.running)
            await agents["solver"].respond([user("1=?")])
            return Episode(sequences=(), reward=0.0)

    player = scripted_player("solver", solve)
    assert isinstance(player.engine, ScriptedEngine)
    player.engine._capacity = 3
    workflow = Counting()
    pool = pool_of(workflow, solver=player)
    await run_group(pool, PROMPT, 20, seed=0)
    assert workflow.most == 6  # two for each of the engine's three slots
    assert pool.running == 0
