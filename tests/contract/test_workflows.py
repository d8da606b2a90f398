"""The contract of all workflows, and rewards of the built-in ones against values worked out by
hand.
"""

from collections.abc import Mapping

import pytest

from rollout.config import WorkflowConfig
from rollout.rewards.math_reward import MathReward
from rollout.rewards.reward import Judgement
from rollout.service.episode_runner import run_episode
from rollout.workflows import WORKFLOWS, make_workflow, policies_by_role
from rollout.workflows.actor_and_verify import ActorAndVerify, read_verdict
from rollout.workflows.single_turn import SingleTurn
from storage.errors import ConfigError
from storage.records.rollouts import NOT_SAMPLED, Episode, Prompt
from tests.support.runs.fakes import (
    ScriptedEngine,
    lines,
    pool_of,
    scripted_player,
    solve,
    tiny_chat,
)

PROMPT = Prompt("chained_addition/train/17", {"question": "7+8-3=?", "answer": "12"})
RIGHT, WRONG, MUTE = "7+8=15\n15-3=12\n\\boxed{12}", "\\boxed{13}", "no idea"
APPROVE, REJECT = "<verify>approve</verify>", "15-3=12:12n\n<verify>reject</verify>"


async def team(solver: tuple[str, ...], verifier: tuple[str, ...]) -> tuple[Episode, list[str]]:
    """Run one episode of `actor_and_verify`; return it and the prompts of both roles."""
    players = {
        "solver": scripted_player("solver", lines(*solver), version=3),
        "verifier": scripted_player("verifier", lines(*verifier), version=5),
    }
    episode = await run_episode(pool_of(ActorAndVerify(MathReward(5.0)), **players), PROMPT, seed=0)
    tokenizer = tiny_chat().local._tokenizer
    requested: list[str] = []
    for player in players.values():
        assert isinstance(player.engine, ScriptedEngine)
        requested += [tokenizer.decode(list(tokens)) for tokens, _ in player.engine.asked]
    return episode, requested


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
async def test_each_sampled_token_and_no_other_has_a_policy_and_a_version(
    name: str,
) -> None:
    workflow = make_workflow(WorkflowConfig(name=name), MathReward(5.0))
    players = {role: scripted_player(role, solve, version=4) for role in workflow.roles}
    episode = await run_episode(pool_of(workflow, **players), PROMPT, seed=0)
    assert episode.error is None
    assert [sequence.starts_episode for sequence in episode.sequences] == [True] + [False] * (
        len(episode.sequences) - 1
    )
    assert {"first_attempt", "final"} <= set(episode.metrics)
    for sequence in episode.sequences:
        (policy,) = sequence.policies
        answer = players[policy].engine.asked[0][0]  # type: ignore[attr-defined]  # a ScriptedEngine
        prompt_length = len(answer)
        assert sequence.tokens[:prompt_length].tolist() == list(answer)
        assert sequence.owners.tolist() == [NOT_SAMPLED] * prompt_length + [0] * (
            len(sequence.tokens) - prompt_length
        )
        assert set(sequence.versions[prompt_length:].tolist()) == {4}
        assert sequence.loss_mask.tolist() == (sequence.owners == 0).tolist()
        assert set(sequence.logprobs[prompt_length:].tolist()) == {-0.5}


async def test_a_single_turn_has_the_reward_of_its_answer() -> None:
    for answer, worth in ((RIGHT, 1.0), (WRONG, 0.0), (MUTE, 0.0)):
        pool = pool_of(SingleTurn(MathReward(5.0)), solver=scripted_player("solver", lines(answer)))
        episode = await run_episode(pool, PROMPT, seed=0)
        assert [sequence.reward for sequence in episode.sequences] == [worth]
        assert episode.reward == worth
        assert episode.metrics == {"first_attempt": worth, "final": worth}


@pytest.mark.parametrize(
    ("solver", "verifier", "rewards", "first", "final", "verdict_correct", "rejected"),
    [
        ((RIGHT,), (APPROVE,), {"attempt": 1, "verdict": 1}, 1, 1, 1, 0),
        ((WRONG,), (APPROVE,), {"attempt": 0, "verdict": 0}, 0, 0, 0, 0),
        ((WRONG, RIGHT), (REJECT,), {"attempt": 0, "verdict": 1, "retry": 1}, 0, 1, 1, 1),
        ((WRONG, WRONG), (REJECT,), {"attempt": 0, "verdict": 1, "retry": 0}, 0, 0, 1, 1),
        ((RIGHT, WRONG), (REJECT,), {"attempt": 1, "verdict": 0, "retry": 0}, 1, 0, 0, 1),
        ((RIGHT, RIGHT), (REJECT,), {"attempt": 1, "verdict": 0, "retry": 1}, 1, 1, 0, 1),
        ((RIGHT,), ("looks good",), {"attempt": 1, "verdict": 0}, 1, 1, 0, 0),
        ((WRONG,), ("<verify>no</verify>",), {"attempt": 0, "verdict": 0}, 0, 0, 0, 0),
        ((MUTE,), (APPROVE,), {"attempt": 0, "verdict": 0}, 0, 0, 0, 0),
    ],
)
async def test_each_sequence_of_the_team_gets_its_own_reward(
    solver: tuple[str, ...],
    verifier: tuple[str, ...],
    rewards: dict[str, float],
    first: float,
    final: float,
    verdict_correct: float,
    rejected: float,
) -> None:
    episode, _ = await team(solver, verifier)
    assert {sequence.name: sequence.reward for sequence in episode.sequences} == rewards
    assert episode.reward == final
    assert episode.metrics["first_attempt"] == first
    assert episode.metrics["final"] == final
    assert episode.metrics["verdict_correct"] == verdict_correct
    assert (episode.metrics["rejected"], episode.metrics["retried"]) == (rejected, rejected)
    policies = {sequence.name: sequence.policies for sequence in episode.sequences}
    assert policies == {
        name: ("verifier",) if name == "verdict" else ("solver",) for name in rewards
    }


async def test_team_prompts_use_the_words_of_the_tiny_base_models() -> None:
    _, asked = await team((WRONG, RIGHT), (REJECT,))
    assert asked == [
        "<|user|>7+8-3=?<|end|><|assistant|>",
        "<|user|>7+8-3=?\n15-3=12:12n\n<verify>reject</verify><|end|><|assistant|>",
        "<|user|>7+8-3=?\n\\boxed{13}<|end|><|assistant|>",
    ]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("<verify>approve</verify>", "approve"),
        ("<verify> reject\n</verify>", "reject"),
        ("<verify>approve</verify> no: <verify>reject</verify>", "reject"),
        ("<verify>reject</verify> hm <verify>maybe</verify>", None),
        ("<verify>reject</verify> hm <verify>appr", None),
        ("<verify>approve", None),
        ("<verify>approve or reject</verify>", None),
        ("approve", None),
        ("", None),
    ],
)
def test_the_last_verify_tag_is_the_verdict(text: str, verdict: str | None) -> None:
    assert read_verdict(text) == verdict


async def test_one_policy_may_play_both_roles() -> None:
    config = WorkflowConfig(name="actor_and_verify", roles={"verifier": "solver"})
    workflow = make_workflow(config, MathReward(5.0))
    assert policies_by_role(workflow, config, {"solver": None}) == {
        "solver": "solver",
        "verifier": "solver",
    }
    both = scripted_player("solver", lines(WRONG, REJECT, RIGHT))
    episode = await run_episode(pool_of(workflow, solver=both, verifier=both), PROMPT, seed=0)
    assert [sequence.policies for sequence in episode.sequences] == [("solver",)] * 3


async def test_counts_of_rewards_are_summed_over_an_episodes_answers() -> None:
    class Counting:
        async def score(self, answer: str, prompt: Prompt) -> Judgement:
            return Judgement(0.0, {"tests_run": 3.0})

        def close(self) -> None: ...

    players = {
        "solver": scripted_player("solver", lines(WRONG, WRONG)),
        "verifier": scripted_player("verifier", lines(REJECT)),
    }
    episode = await run_episode(pool_of(ActorAndVerify(Counting()), **players), PROMPT, seed=0)
    assert episode.metrics["tests_run"] == 6.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            WorkflowConfig(name="debate"),
            r"'debate' is not known; use one of actor_and_verify, single_turn",
        ),
        (
            WorkflowConfig(name="single_turn", args={"rounds": 3}),
            r"rollout\.workflow\.args\.rounds: the workflow single_turn takes no such argument; it "
            r"takes attempt_message",
        ),
        (
            WorkflowConfig(name="single_turn", args={"attempt_message": "{problem}"}),
            r"args\.attempt_message has a placeholder \{problem\}; it may have \{question\}",
        ),
        (
            WorkflowConfig(name="single_turn", args={"attempt_message": "{question} in \\boxed{"}),
            r"args\.attempt_message is no template",
        ),
        (  # would be a text of a gigabyte
            WorkflowConfig(name="single_turn", args={"attempt_message": "{question:1000000000}"}),
            r"args\.attempt_message has a placeholder \{question\} with a format; leave out what",
        ),
        (
            WorkflowConfig(name="actor_and_verify", args={"retry_message": "{question:{attempt}}"}),
            r"args\.retry_message has a placeholder \{question\} with a format",
        ),
        (
            WorkflowConfig(name="single_turn", args={"attempt_message": "{question!r}"}),
            r"args\.attempt_message has a placeholder \{question\} with a format",
        ),
        (
            WorkflowConfig(name="single_turn", args={"attempt_message": 17 * "{question}"}),
            r"args\.attempt_message has 17 placeholders; it may have at most 16",
        ),
    ],
)
def test_an_invalid_workflow_setting_is_named(config: WorkflowConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_workflow(config, MathReward(5.0))


@pytest.mark.parametrize(
    ("roles", "policies", "message"),
    [
        (
            {"critic": "solver"},
            {"solver": None, "verifier": None},
            r"roles\.critic: .* it has solver, verifier",
        ),
        (
            {},
            {"solver": None},
            r"needs policy verifier for the role verifier, which the recipe lacks",
        ),
        (
            {"verifier": "judge"},
            {"solver": None},
            r"needs policy judge for the role verifier, which the recipe lacks",
        ),
    ],
)
def test_a_role_without_a_policy_is_named(
    roles: dict[str, str], policies: Mapping[str, None], message: str
) -> None:
    config = WorkflowConfig(name="actor_and_verify", roles=roles)
    with pytest.raises(ConfigError, match=message):
        policies_by_role(make_workflow(config, MathReward(5.0)), config, policies)
