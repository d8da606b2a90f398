"""`docs/extending/workflows.md`: its example runs as written."""

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rollout.agents import failures
from rollout.rewards.reward import REWARDS, make_reward
from rollout.service.episode_failures import FAILURE_KINDS
from rollout.service.episode_runner import run_episode
from rollout.workflows import WORKFLOWS, make_workflow, policies_by_role
from storage.records.rollouts import Episode, FailureKind, Prompt
from tasks.base_models.tiny_tokenizer import tokenizer
from tasks.recipes.loader import load
from tests.support.checkout import ROOT
from tests.support.runs.fakes import lines, pool_of, scripted_player

PAGE = (ROOT / "docs" / "extending" / "workflows.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "guessing.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("guessing")


async def played(*answers: str, secret: str = "60") -> Episode:
    """Run an episode with the recipe of the page."""
    settings: Any = yaml.safe_load(blocks("yaml")[0])["rollout"]["workflow"]
    config = load("single_policy_tiny", {"rollout.workflow": settings})
    made = config.rollout.workflow
    workflow = make_workflow(made, make_reward(made.reward, made.reward_timeout_s))
    assert policies_by_role(workflow, made, config.policies) == {"guesser": "solver"}
    player = scripted_player("solver", lines(*answers))
    prompt = Prompt("g/0", {"question": "Guess.", "answer": secret})
    return await run_episode(pool_of(workflow, guesser=player), prompt, seed=0)


async def test_the_recipe_of_the_page_plays_the_workflow_of_the_page() -> None:
    episode = await played("50", "75", "I say 60", "61")
    assert (episode.error, episode.reward, episode.metrics) == (None, 1.0, {"turns": 3.0})
    (sequence,) = episode.sequences
    assert (sequence.name, sequence.reward, sequence.policies) == ("game", 1.0, ("solver",))
    text, trained = (
        tokenizer().decode(tokens.tolist(), skip_special_tokens=False)
        for tokens in (sequence.tokens, sequence.tokens[sequence.loss_mask])
    )
    assert f"\n    {text}\n" in PAGE
    assert trained == "50<|end|>75<|end|>I say 60<|end|>"


async def test_the_turns_of_the_recipe_are_a_limit() -> None:
    episode = await played(*["1"] * 7)
    assert (episode.reward, episode.metrics) == (0.0, {"turns": 6.0})


async def test_a_failure_of_the_environment_of_the_page_has_its_kind() -> None:
    episode = await played("50", secret="sixty")
    assert (episode.error, episode.failure_kind) == (
        "EnvironmentFailedError: 'sixty' is no number to guess",
        FailureKind.ENVIRONMENT,
    )


def test_the_page_lists_all_built_in_workflows_and_failure_kinds() -> None:
    for setting, table in (("name", WORKFLOWS), ("reward", REWARDS)):
        row = re.search(rf"^\| `{setting}` \| ([^|]*) \|", PAGE, flags=re.MULTILINE)
        assert row is not None
        assert re.findall(r"`(\w+)`", row[1]) == list(table)
    raised = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \| [^|]* \|$", PAGE, flags=re.MULTILINE))
    for kind in FailureKind:
        named = set(re.findall(r"`(\w+)`", raised[kind]))
        general = {"AstraFlowError", "ConfigError", "BaseException"}
        classes = {error.__name__ for error, of in FAILURE_KINDS if of == kind} - general
        assert named == classes, kind
    public = {name for name in vars(failures) if name.endswith("Error")}
    assert public <= {error.__name__ for error, _ in FAILURE_KINDS}
