"""A policy without a model: an engine whose answers come from a script, and the base model's files
for it.

    config.json {"script": "tests.support.runs.fakes:solve", "delay_s": 0.0}  ──▶  ScriptedEngine  ──▶  text of the script, as tokens

A script is `(prompt text, seed) → answer text`. What it raises, the engine raises.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pkgutil import resolve_name

import numpy as np

from rollout.agents.chat import Message
from rollout.agents.template_chat import TemplateChat, load_chat
from rollout.agents.workflow import Player, Workflow
from rollout.config import EngineConfig, SamplingConfig
from rollout.engines.engine import (
    NO_VERSION,
    ContextFullError,
    Generation,
    SamplingParams,
    VersionSpan,
)
from rollout.rewards.math_reward import MathReward
from rollout.rewards.reward import Reward
from rollout.service.agent_pool import AgentPool
from storage.formats.safetensors import weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tasks.base_models.tiny_tokenizer import END, tokenizer, tokenizer_files
from tests.support.runs.builders import tensors

LOGPROB = -0.5
"""Of every token a scripted engine says."""
END_ID = 354

Script = Callable[[str, int], str]


def solve(prompt: str, seed: int) -> str:
    """Solver and verifier in one: correct answer to the question, approval of any answer."""
    if "\n" in prompt:
        return "<verify>approve</verify>"
    return f"\\boxed{{{total(prompt)}}}"


def guess(prompt: str, seed: int) -> str:
    """Correct answer for an even seed, one too large for an odd one."""
    return f"\\boxed{{{total(prompt) + seed % 2}}}"


def fail(prompt: str, seed: int) -> str:
    raise ValueError("the script has no answer")


def total(prompt: str) -> int:
    """The sum in a prompt's text: `…7+8-3=?…` → 12."""
    return sum(int(term) for term in re.findall(r"[+-]?\d+", prompt.split("=")[0]))


class ScriptedEngine:
    """`rollout.engines.engine.Engine` by script. A swap during a generation takes effect in the
    middle of the answer.
    """

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        script = model_config.get("script", solve)
        self.script: Script = resolve_name(script) if isinstance(script, str) else script
        self.delay_s = float(model_config.get("delay_s", 0.0))
        self.asked: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.closed = False
        self.tokens_max = 100_000
        """A longer prompt is refused."""
        self.aborts = False
        """Whether every request is aborted before its first token."""
        self._capacity = config.max_concurrent
        self._version = NO_VERSION
        self._digests: dict[int, str] = {}

    @property
    def version(self) -> int:
        return self._version

    def capacity(self) -> int:
        return self._capacity

    def digest(self, version: int) -> str:
        return self._digests[version]

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams) -> Generation:
        self.asked.append((tuple(tokens), sampling))
        if len(tokens) >= self.tokens_max:
            raise ContextFullError(f"{len(tokens)} tokens")
        if self.aborts:
            nothing = np.empty(0, np.int32), np.empty(0, np.float32)
            return Generation(*nothing, (), "abort")
        first = self._version
        said = self.script(
            tokenizer().decode(list(tokens), skip_special_tokens=False), sampling.seed
        )
        await asyncio.sleep(self.delay_s)
        answer = (
            tokenizer().encode(said + END, add_special_tokens=False).ids[: sampling.max_new_tokens]
        )
        count, half = len(answer), len(answer) // 2
        spans: tuple[VersionSpan, ...] = (VersionSpan(first, 0, count),)
        if self._version != first:
            spans = (VersionSpan(first, 0, half), VersionSpan(self._version, half, count))
        return Generation(
            np.array(answer, dtype=np.int32),
            np.full(count, LOGPROB, dtype=np.float32),
            spans,
            "stop" if answer[-1] == END_ID else "length",
        )

    async def load(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        self._version = version
        self._digests[version] = weights_digest(tensors)

    async def close(self) -> None:
        self.closed = True


def base_files(
    script: str = "tests.support.runs.fakes:solve", delay_s: float = 0.0
) -> dict[str, bytes]:
    """The files of a base model with a scripted engine."""
    config = {"model_type": "qwen3", "eos_token_id": END_ID, "script": script, "delay_s": delay_s}
    return {**tokenizer_files(), "config.json": json.dumps(config).encode()}


def publish_base(
    run: ObjectStore,
    policies: Sequence[str],
    script: str = "tests.support.runs.fakes:solve",
    delay_s: float = 0.0,
) -> None:
    """Version 0 of every policy."""
    for policy in policies:
        publisher.publish(run, policy, 0, tensors(0), extra_files=base_files(script, delay_s))


class LocalChat:
    """A chat in this process: the tokenizer of scripted players is no stranger's."""

    def __init__(self, local: TemplateChat) -> None:
        self.local = local
        self.stop_ids = local.stop_ids

    async def opening(self, messages: Sequence[Message]) -> list[int]:
        return self.local.opening(messages)

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], last_token: int
    ) -> list[int]:
        return self.local.continuation(before, new, last_token)

    async def text(self, tokens: Sequence[int]) -> str:
        return self.local.text(tokens)

    def close(self) -> None:
        pass


@cache
def tiny_chat() -> LocalChat:
    return LocalChat(load_chat(base_files()))


def scripted_player(
    policy: str, script: Script, version: int = 0, *, temperature: float = 1.0, delay_s: float = 0.0
) -> Player:
    """A player whose engine has `version` loaded."""
    engine = ScriptedEngine(EngineConfig(), {"script": script, "delay_s": delay_s})
    engine._version = version
    engine._digests[version] = f"digest of version {version}"
    return Player(
        policy, engine, tiny_chat(), SamplingConfig(temperature=temperature, max_new_tokens=64)
    )


def lines(*answers: str) -> Script:
    """A script that returns the given answers in turn."""
    left = iter(answers)
    return lambda _prompt, _seed: next(left)


def pool_of(
    workflow: Workflow, reward: Reward | None = None, timeout_s: float = 60.0, **players: Player
) -> AgentPool:
    """A pool of the given players by role."""
    engines = {player.policy: player.engine for player in players.values()}
    return AgentPool(workflow, reward or MathReward(5.0), players, engines, timeout_s)
