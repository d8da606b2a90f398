import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rollout.agents.chat import user
from rollout.agents.failures import ModelFailedError
from rollout.agents.seeds import derived_seed
from rollout.agents.template_chat import load_chat
from rollout.agents.workflow import Agent, CallCounter, Player
from rollout.engines.engine import Generation, GenerationAbortedError, SamplingParams, VersionSpan
from storage.errors import ConfigError
from tests.support.runs.fakes import (
    END_ID,
    LocalChat,
    ScriptedEngine,
    base_files,
    lines,
    scripted_player,
)


def agent_of(player: Player, seed: int = 7) -> Agent:
    return Agent(player, seed, CallCounter())


async def test_a_turn_has_the_output_of_the_engine() -> None:
    turn = await agent_of(scripted_player("solver", lines("approve"))).respond(
        [user("?")], name="attempt"
    )
    assert turn.text == "approve"
    assert turn.tokens == (349, END_ID)
    assert turn.finish_reason == "stop"
    assert turn.context.tokens[-2:] == [349, END_ID]
    assert turn.context.name == "attempt"


async def test_an_engine_request_has_the_policys_sampling_and_the_chats_stop_tokens() -> None:
    player = scripted_player("solver", lines("approve"), temperature=0.7)
    await agent_of(player, seed=7).respond([user("?")])
    assert isinstance(player.engine, ScriptedEngine)
    tokens, params = player.engine.asked[0]
    assert tokens == (355, 30, END_ID, 356)
    assert params == SamplingParams(
        temperature=0.7,
        top_p=1.0,
        top_k=0,
        max_new_tokens=64,
        stop_ids=(END_ID,),
        seed=derived_seed(7, 0),
    )


async def test_each_call_of_an_episode_has_its_own_random_numbers() -> None:
    calls = CallCounter()
    solver, verifier = (
        scripted_player("solver", lines("a", "b")),
        scripted_player("verifier", lines("c")),
    )
    for player in (solver, verifier, solver):
        await Agent(player, 7, calls).respond([user("?")])
    assert isinstance(solver.engine, ScriptedEngine)
    assert isinstance(verifier.engine, ScriptedEngine)
    seeds = [params.seed for _, params in (*solver.engine.asked, *verifier.engine.asked)]
    assert seeds == [derived_seed(7, 0), derived_seed(7, 2), derived_seed(7, 1)]
    assert len(set(seeds)) == 3


async def test_a_second_turn_sends_the_first_answer_unchanged() -> None:
    player = scripted_player("solver", lines("approve", "reject"))
    agent = agent_of(player)
    first = await agent.respond([user("?")])
    second = await agent.respond([user("?")], context=first.context)
    assert isinstance(player.engine, ScriptedEngine)
    assert player.engine.asked[1][0] == (355, 30, END_ID, 356, 349, END_ID, 355, 30, END_ID, 356)
    assert second.context is first.context
    assert second.tokens == (350, END_ID)


async def test_messages_without_space_for_an_answer_leave_the_context_as_it_was() -> None:
    player = scripted_player("solver", lines("approve", "reject"))
    agent = agent_of(player)
    turn = await agent.respond([user("?")])
    tokens = list(turn.context.tokens)
    assert isinstance(player.engine, ScriptedEngine)
    player.engine.tokens_max = 10
    with pytest.raises(ModelFailedError, match="10 tokens"):
        await agent.respond([user("?")], context=turn.context)
    sequence = turn.context.sequence(1.0)
    assert sequence.tokens.tolist() == turn.context.tokens == tokens
    assert len(sequence.owners) == len(sequence.versions) == len(sequence.logprobs) == 6
    player.engine.tokens_max = 11
    turn = await agent.respond([user("?")], context=turn.context)
    assert turn.tokens == (350, END_ID)


async def test_a_context_of_another_tokenizer_is_refused() -> None:
    turn = await agent_of(scripted_player("solver", lines("a"))).respond([user("?")], name="plan")
    other = replace(
        scripted_player("verifier", lines("b")), chat=LocalChat(load_chat(base_files()))
    )
    with pytest.raises(ConfigError, match="policy verifier cannot continue context 'plan'"):
        await agent_of(other).respond([user("?")], context=turn.context)


async def test_two_concurrent_answers_in_one_context_are_refused() -> None:
    agent = agent_of(scripted_player("solver", lines("a", "b", "c"), delay_s=0.01))
    turn = await agent.respond([user("?")], name="plan")
    turns = [agent.respond([user("?")], context=turn.context) for _ in range(2)]
    results = await asyncio.gather(*turns, return_exceptions=True)
    assert [type(result) for result in results if isinstance(result, BaseException)] != []


async def test_an_aborted_answer_raises_an_error() -> None:
    class Closing(ScriptedEngine):
        async def generate(self, tokens: object, sampling: SamplingParams) -> Generation:
            return Generation(
                np.array([40], np.int32), np.zeros(1, np.float32), (VersionSpan(0, 0, 1),), "abort"
            )

    player = scripted_player("solver", lines())
    closing = Closing.__new__(Closing)
    with pytest.raises(
        GenerationAbortedError, match="the engine of policy solver ended the request after 1 tokens"
    ):
        await agent_of(replace(player, engine=closing)).respond([user("?")])
