import numpy as np
import pytest

from rollout.agents.chat import user
from rollout.agents.context import Context
from rollout.engines.engine import Generation, VersionSpan
from storage.errors import ConfigError
from storage.records.rollouts import FinishReason
from tests.support.runs.fakes import END_ID, tiny_chat

USER, ASSISTANT, MARK = 355, 356, 30
"""MARK is the token of `?`."""


def said(
    tokens: list[int], *spans: VersionSpan, finish_reason: FinishReason = "stop"
) -> Generation:
    logprobs = np.array([-0.25 * (index + 1) for index in range(len(tokens))], dtype=np.float32)
    return Generation(np.array(tokens, dtype=np.int32), logprobs, spans, finish_reason)


async def asked(name: str = "") -> Context:
    """A context that begins with a question."""
    context = Context(tiny_chat(), name)
    await context.extend([user("?")])
    return context


async def test_an_answer_has_its_policy_versions_and_log_probabilities() -> None:
    context = await asked("attempt")
    context.add(
        "solver", said([40, 41, END_ID], VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)), "HI", 1.0
    )
    sequence = context.sequence(reward=0.5)
    assert sequence.tokens.tolist() == [USER, MARK, END_ID, ASSISTANT, 40, 41, END_ID]
    assert sequence.owners.tolist() == [-1, -1, -1, -1, 0, 0, 0]
    assert sequence.versions.tolist() == [-1, -1, -1, -1, 4, 5, 5]
    assert sequence.loss_mask.tolist() == [False] * 4 + [True] * 3
    assert sequence.logprobs.tolist() == [0, 0, 0, 0, -0.25, -0.5, -0.75]
    assert (sequence.policies, sequence.name, sequence.reward) == (("solver",), "attempt", 0.5)
    assert (sequence.finish_reason, sequence.temperature) == ("stop", 1.0)


async def test_two_policies_can_share_a_context_and_messages_have_no_policy() -> None:
    context = await asked()
    context.add("planner", said([40, END_ID], VersionSpan(2, 0, 2)), "H", 0.8)
    await context.extend([user("?")])
    context.add("solver", said([41], VersionSpan(7, 0, 1), finish_reason="length"), "I", 0.8)
    sequence = context.sequence(reward=1.0)
    assert sequence.tokens.tolist() == [
        USER,
        MARK,
        END_ID,
        ASSISTANT,
        40,
        END_ID,
        USER,
        MARK,
        END_ID,
        ASSISTANT,
        41,
    ]
    assert sequence.owners.tolist() == [-1, -1, -1, -1, 0, 0, -1, -1, -1, -1, 1]
    assert sequence.versions.tolist() == [-1, -1, -1, -1, 2, 2, -1, -1, -1, -1, 7]
    assert sequence.policies == ("planner", "solver")
    assert (sequence.temperature, sequence.finish_reason) == (0.8, "length")
    assert sequence.min_version("solver") == 7


async def test_greedy_tokens_are_kept_but_not_trained_on() -> None:
    context = await asked()
    context.add("solver", said([40], VersionSpan(0, 0, 1)), "H", 0.0)
    sequence = context.sequence(reward=1.0)
    assert sequence.owners.tolist() == [-1, -1, -1, -1, 0]
    assert not sequence.loss_mask.any()


async def test_a_context_that_waits_for_an_answer_refuses_messages() -> None:
    context = await asked()
    with pytest.raises(RuntimeError, match="waits for an answer"):
        await context.extend([user("?")])


async def test_messages_that_the_chat_refuses_leave_the_context_as_it_was() -> None:
    context = await asked()
    context.add("planner", said([40, END_ID], VersionSpan(2, 0, 2)), "H", 0.8)
    before = list(context.tokens)
    with pytest.raises(ConfigError, match="refuses a conversation of user, assistant, judge"):
        await context.extend([{"role": "judge", "content": "?"}])
    assert context.tokens == before
    await context.extend([user("?")])
    assert context.tokens == [*before, USER, MARK, END_ID, ASSISTANT]


async def test_one_context_has_one_temperature() -> None:
    context = await asked()
    context.add("planner", said([40], VersionSpan(0, 0, 1)), "H", 0.5)
    with pytest.raises(ConfigError, match=r"0\.5 and 1\.0"):
        context.add("solver", said([40], VersionSpan(0, 0, 1)), "H", 1.0)
