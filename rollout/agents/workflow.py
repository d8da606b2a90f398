"""The contract of a workflow, and the agents through which it uses policies.

    workflow ──messages──▶ Agent ──tokens──▶ engine
             ◀───Turn────        ◀─tokens, log-probabilities, versions──

A workflow handles messages, answers and rewards. Tokens, log-probabilities and weights versions go
from the engine into the turn's context, and from there into the stored sequence.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.agents.chat import Chat, Message
from rollout.agents.context import Context
from rollout.agents.failures import ModelFailedError
from rollout.agents.seeds import derived_seed
from rollout.config import SamplingConfig
from rollout.engines.engine import (
    ContextFullError,
    Engine,
    GenerationAbortedError,
    SamplingParams,
)
from storage.errors import ConfigError
from storage.records.rollouts import Episode, FinishReason, Prompt


@dataclass(frozen=True)
class AgentTurn:
    """One answer of an agent."""

    text: str
    """The answer without special tokens."""
    tokens: tuple[int, ...]
    """The generated tokens, the stop token included."""
    finish_reason: FinishReason
    context: Context
    """The context that ends with the answer: `respond` continues it, `sequence(reward)` stores it.
    """


@dataclass(frozen=True)
class Player:
    """A policy in this process: its engine, its chat and its sampling settings."""

    policy: str
    engine: Engine
    chat: Chat
    sampling: SamplingConfig


class Agent:
    """A policy in one role of one episode."""

    def __init__(self, player: Player, episode_seed: int, calls: "CallCounter") -> None:
        self._player = player
        self._seed = episode_seed
        self._calls = calls

    @property
    def policy(self) -> str:
        return self._player.policy

    async def respond(
        self, messages: Sequence[Message], name: str = "", context: Context | None = None
    ) -> AgentTurn:
        """Answer `messages`: in a new context called `name`, or as the next turn of `context`.

        Raises:
            ModelFailedError: the episode's answers so far fill the longest context.
            GenerationAbortedError: the engine ended the request.
            ConfigError, RequestRefusedError, EngineFailedError: as `Engine.generate`.
        """
        player = self._player
        if context is None:
            context = Context(player.chat, name)
        elif context.chat is not player.chat:
            raise ConfigError(
                f"policy {player.policy} cannot continue context {context.name!r}, which was begun "
                "with another tokenizer; give it a new context, or base both policies on one "
                "tokenizer"
            )
        await context.extend(messages)
        tokens = tuple(context.tokens)
        call = self._calls.next()
        try:
            generation = await player.engine.generate(
                tokens, self._params(derived_seed(self._seed, call))
            )
        except ContextFullError as error:
            context.withdraw()  # a workflow may still store what was answered
            if call == 0:
                raise  # the prompt alone is too long: a matter of the recipe
            raise ModelFailedError(str(error)) from error
        if generation.finish_reason == "abort":
            raise GenerationAbortedError(
                f"the engine of policy {player.policy} ended the request after "
                f"{len(generation.tokens)} tokens"
            )
        if len(context.tokens) != len(tokens):
            raise RuntimeError(
                f"context {context.name!r} was continued twice at once; its turns must follow one "
                "another"
            )
        text = await player.chat.text(generation.tokens.tolist())
        context.add(player.policy, generation, text, player.sampling.temperature)
        return AgentTurn(text, tuple(generation.tokens.tolist()), generation.finish_reason, context)

    def _params(self, seed: int) -> SamplingParams:
        sampling = self._player.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=self._player.chat.stop_ids,
            seed=seed,
        )


class CallCounter:
    """Number the calls of one episode 0, 1, 2, …, over all agents: each draws other randoms."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def next(self) -> int:
        return next(self._numbers)


class Workflow(Protocol):
    """An agent program. Built once as `Name(reward, **args)`; plays many episodes concurrently.

    It keeps no state of an episode.
    """

    roles: tuple[str, ...]
    """Names by which `play` calls policies. A class attribute: recipes are checked against it."""

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        """Play one episode for `prompt`; `agents` has one agent for each role.

        Any exception makes the episode a failed one; `docs/extending/workflows.md` lists the kinds.
        """
        ...
