"""The section `gate` of a recipe: what is refused, and where the error points."""

import re
from pathlib import Path

import pytest

from storage.errors import ConfigError
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.promotion import gate_checks
from tasks.recipes import stored_config, yaml_file
from tasks.recipes.loader import absolute_paths, load
from tasks.recipes.run_config import ContestConfig
from tests.support.checkout import ROOT

RECIPE = """\
steps: 4
policies:
  solver: {model: {tiny: {}}}
data:
  prompts: {builtin: chained_addition}
evaluation:
  prompts: {builtin: chained_addition, split: test, limit: 60}
  dataset: held_out
"""
HARD = {"builtin": "chained_addition", "split": "test", "limit": 80, "seed": 3}


def error_of(**overrides: object) -> str:
    with pytest.raises(ConfigError) as raised:
        load(RECIPE, overrides)
    return str(raised.value)


def test_a_recipe_without_the_section_has_no_gate_and_an_empty_section_has_the_defaults() -> None:
    assert load(RECIPE).gate is None
    gate = load(RECIPE + "gate: {}\n").gate
    assert gate == ContestConfig()
    assert (gate.samples, gate.datasets, gate.min_problems) == (1, {}, 50)


def test_all_settings_of_the_gate_can_be_written() -> None:
    text = RECIPE + (
        "gate:\n"
        "  test: {name: paired_bootstrap, resamples: 2000}\n"
        "  confidence: 0.9\n"
        "  gain_on: hard\n"
        "  max_loss_on: {easy: 0.02}\n"
        "  samples: 4\n"
        "  datasets:\n"
        "    easy: {builtin: chained_addition, split: test, limit: 90}\n"
        "    hard: {builtin: chained_addition, split: test, limit: 90, seed: 3}\n"
    )
    gate = load(text).gate
    assert gate is not None
    assert (gate.samples, list(gate.datasets), gate.gain_on) == (4, ["easy", "hard"], "hard")
    assert gate.allowed_loss("easy") == 0.02


def test_a_gate_without_an_evaluation_is_refused() -> None:
    text = RECIPE.split("evaluation:")[0] + "gate: {}\n"
    with pytest.raises(ConfigError) as raised:
        load(text)
    assert str(raised.value) == (
        "recipe, line 6: gate: compares the best evaluated version, and the recipe has no "
        "evaluation; add the section evaluation, or remove gate"
    )


def test_mcnemar_needs_one_sample_of_each_problem() -> None:
    message = error_of(gate={"test": "mcnemar", "samples": 2})
    assert "gate.samples: the test mcnemar compares right and wrong answers, and 2" in message
    assert load(RECIPE, {"gate": {"test": "mcnemar"}}).gate is not None
    assert load(RECIPE, {"gate": {"test": "paired_bootstrap", "samples": 2}}).gate is not None


def test_a_custom_test_is_imported_when_the_recipe_is_read() -> None:
    message = error_of(gate={"test": "no_such_module:Test"})
    assert "gate.test: " in message
    assert "no_such_module" in message


@pytest.mark.parametrize("name", ["a.b", "a/b", "", "é", "x" * 101])
def test_a_name_of_a_data_set_that_no_override_can_name_is_refused(name: str) -> None:
    message = error_of(gate={"datasets": {name: HARD}})
    assert "a data set has a name of up to 100 letters, digits, - and _" in message


def test_no_data_set_is_a_data_window() -> None:
    """Its rows are those of one run. A `run.json` with a hundred of them had them read as often."""
    window = {"window": {"files": ["/data/*.jsonl"]}}
    message = error_of(gate={"datasets": {"new": window}})
    assert "gate.datasets.new: is a data window, which is frozen with a run" in message
    gate = ContestConfig.model_validate({"datasets": {"new": window}})
    stored = load(RECIPE).model_copy(update={"gate": gate})
    assert [path for path, _ in gate_checks.faults(stored)] == [("gate", "datasets", "new")]


def test_no_data_set_has_the_name_of_all_of_them() -> None:
    assert "gate.datasets.pooled: pooled names all data sets" in error_of(
        gate={"datasets": {"pooled": HARD}}
    )
    message = error_of(gate={}, **{"evaluation.dataset": "pooled"})
    assert "evaluation.dataset: pooled names all data sets" in message
    assert load(RECIPE, {"evaluation.dataset": "pooled"}).gate is None
    both = {"gate": {"datasets": {"hard": HARD}}, "evaluation.dataset": "pooled"}
    assert load(RECIPE, both).gate is not None


def test_data_sets_with_very_long_names_are_listed_briefly() -> None:
    """A stored recipe may name hundreds, of megabytes together."""
    losses = {f"d{number}": 0.1 for number in range(100)}
    message = error_of(gate={"max_loss_on": losses}, **{"evaluation.dataset": "a" * 50_000})
    assert f"the gate has no data set 'd0'; it has {'a' * 80}…" in message
    assert len(message) < 10_000
    message = error_of(gate={"max_loss_on": losses | {"d100": 0.1, "d101": 0.1}})
    assert "gate.max_loss_on: must have at most 101 items" in message


def test_settings_of_data_sets_name_data_sets_of_the_gate() -> None:
    message = error_of(gate={"gain_on": "math", "datasets": {"hard": HARD}})
    assert "gate.gain_on: the gate has no data set 'math'; it has hard" in message
    message = error_of(gate={"max_loss_on": {"hard": 0.1}})
    assert "gate.max_loss_on.hard: the gate has no data set 'hard'; it has held_out" in message
    assert load(RECIPE, {"gate": {"gain_on": "held_out"}}).gate is not None
    assert load(RECIPE, {"gate": {"gain_on": "pooled"}}).gate is not None


def test_a_data_set_that_is_smaller_than_the_gate_needs_is_refused() -> None:
    message = error_of(gate={"min_problems": 81, "datasets": {"hard": HARD}})
    assert "gate.datasets.hard.limit: 80 problems are fewer than gate.min_problems, 81" in message
    assert load(RECIPE, {"gate": {"min_problems": 80, "datasets": {"hard": HARD}}}).gate is not None
    message = error_of(gate={"min_problems": 61})
    assert "evaluation.prompts.limit: 60 problems are fewer than gate.min_problems, 61" in message


def test_more_episodes_than_are_played_are_refused() -> None:
    message = error_of(gate={"samples": 1_667})
    assert "gate.samples: 60 problems with 1,667 samples each are 100,020 episodes" in message
    assert load(RECIPE, {"gate": {"samples": 1_666}}).gate is not None
    most = {**HARD, "limit": 100_000}
    assert load(RECIPE, {"gate": {"datasets": {"hard": most}}}).gate is not None
    many = {**HARD, "limit": 100_001}
    message = error_of(gate={"datasets": {"hard": many}})
    assert "gate.datasets.hard.limit: 100,001 problems with 1 samples" in message


def test_data_sets_have_at_most_as_many_problems_together_as_one_may_have() -> None:
    def gate(far: int) -> dict[str, object]:
        return {"datasets": {"near": {**HARD, "limit": 99_920}, "far": {**HARD, "limit": far}}}

    read = load(RECIPE, {"gate": gate(80)}).gate
    assert read
    assert [source.limit for source in read.datasets.values()] == [99_920, 80]
    message = error_of(gate=gate(81))
    assert "gate.datasets: have 100,001 problems together, and at most 100,000" in message


def test_the_problems_of_a_gate_are_checked_as_those_of_the_evaluation(tmp_path: Path) -> None:
    def message(source: dict[str, object]) -> str:
        return error_of(gate={"datasets": {"hard": source}})

    endless = {"builtin": "chained_addition", "split": "test"}
    assert "gate.datasets.hard: a built-in source is endless; set limit" in message(endless)
    training = {"builtin": "chained_addition", "limit": 80}
    assert "gate.datasets.hard: is the training set itself (split train)" in message(training)
    missing = {"path": str(tmp_path / "no.jsonl")}
    assert "no.jsonl does not exist" in message(missing)
    assert "gate.datasets.hard.path: " in message(missing)
    assert "gate.datasets.hard.custom: " in message({"custom": "no_such_module:Prompts"})


def test_the_paths_of_a_gate_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hard.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    config = load(
        RECIPE, {"gate": {"min_problems": 1, "datasets": {"hard": {"path": "hard.jsonl"}}}}
    )
    assert absolute_paths(config) == {"gate.datasets.hard.path": str(tmp_path / "hard.jsonl")}


def test_the_example_of_the_page_is_a_valid_section() -> None:
    page = (ROOT / "docs" / "promotion.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(gate:.*?)```", page, re.DOTALL)
    gate = ContestConfig.model_validate(yaml_file.read(example, "the page").value["gate"])
    assert list(gate.datasets) == ["gsm8k", "math"]
    assert (gate.samples, gate.gain_on, gate.allowed_loss("gsm8k")) == (4, "math", 0.02)


def test_a_run_that_was_stored_before_the_section_existed_is_resumed_by_the_same_recipe(
    memory_store: ObjectStore,
) -> None:
    config = load(RECIPE).model_dump(mode="json")
    earlier = {key: value for key, value in config.items() if key != "gate"}
    runs.create_run(memory_store, "one", earlier)
    runs.create_run(memory_store, "one", config, fill_defaults=stored_config.filled)
    gated = load(RECIPE, {"gate": {}}).model_dump(mode="json")
    with pytest.raises(ConfigError, match="gate is None there"):
        runs.create_run(memory_store, "one", gated, fill_defaults=stored_config.filled)
