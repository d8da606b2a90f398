import re
from pathlib import Path

import pytest

from deployments import launch
from storage.errors import ConfigError


def test_a_run_is_named_after_its_recipe_and_the_moment() -> None:
    wanted = launch.prepare("astraflow/multi-policy", None, ["steps=3"], None)
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}", wanted.run_id)
    assert (wanted.recipe, wanted.overrides) == (None, {"steps": 3})


def test_a_deployment_may_be_named_without_its_flow() -> None:
    assert launch.prepare("single-policy", None, [], "mine").deployment == "astraflow/single-policy"


def test_a_deployment_of_somebody_else_is_not_judged_here() -> None:
    wanted = launch.prepare("theirs/special", None, [], None)
    assert wanted.run_id.startswith("special-")


def test_a_mistake_in_a_recipe_file_names_file_and_line(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: multi_policy_tiny\nsteps: many\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml, line 2: steps: must be a whole number"):
        launch.prepare("multi-policy", str(recipe), [], None)
