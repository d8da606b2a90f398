from pathlib import Path

import pytest

from storage.errors import ConfigError
from tasks.recipe_source import override, parse, parse_assignments, read_source


def test_a_small_number_in_scientific_notation_is_a_number() -> None:
    assert parse("lr: 5e-5\nsteps: 80\nversion: 1.2.3\n", "r").data == {"lr": 5e-05, "steps": 80, "version": "1.2.3"}


def test_places_are_the_lines_of_keys_and_list_items() -> None:
    source = parse("a:\n  b: 1\n  c:\n    - x\n    - y\n", "r.yaml")
    assert str(source.place(("a", "b"))) == "r.yaml, line 2"
    assert str(source.place(("a", "c", "1"))) == "r.yaml, line 5"
    assert str(source.place(("a", "missing"))) == "r.yaml, line 1"
    assert str(source.place(("nowhere",))) == "r.yaml"


def test_a_repeated_key_names_both_lines() -> None:
    with pytest.raises(ConfigError, match=r"^r, line 3: a\.b: written twice \(first on line 2\); keep one$"):
        parse("a:\n  b: 1\n  b: 2\n", "r")


def test_broken_yaml_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"^r, line 2: not valid YAML: "):
        parse("a: 1\nb: [1, 2\n", "r")


def test_a_list_is_no_recipe() -> None:
    with pytest.raises(ConfigError, match=r"^r, line 1: a recipe is `key: value` lines$"):
        parse("- a\n- b\n", "r")


def test_a_document_that_contains_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="nested deeper than"):
        parse("a: &x\n  b: *x\n", "r")


def test_extends_merges_sections_and_replaces_lists(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a:\n  x: 1\n  y: [1, 2]\nb: 7\n")
    (tmp_path / "mine.yaml").write_text("extends: base\na:\n  y: [3]\n")
    source = read_source(str(tmp_path / "mine.yaml"), ())
    assert source.data == {"a": {"x": 1, "y": [3]}, "b": 7}
    assert source.place(("a", "x")).line == 2
    assert source.place(("a", "x")).source.endswith("base.yaml")
    assert source.place(("a", "y")).line == 3
    assert source.place(("a", "y")).source.endswith("mine.yaml")


def test_extending_with_another_source_takes_the_bases_choice_away(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data:\n  prompts: {builtin: chained_addition, split: train}\n")
    source = read_source("extends: base\ndata:\n  prompts: {hub: openai/gsm8k}\n", (tmp_path,))
    assert source.data == {"data": {"prompts": {"hub": "openai/gsm8k", "split": "train"}}}


def test_recipes_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b\n")
    (tmp_path / "b.yaml").write_text("extends: a\n")
    with pytest.raises(ConfigError, match="a recipe cannot extend itself"):
        read_source("a", (tmp_path,))


def test_overrides_reach_every_policy_with_a_star() -> None:
    source = parse("policies:\n  solver: {lr: 1}\n  verifier: {lr: 2}\n", "r")
    override(source, {"policies.*.lr": 3, "policies.solver.steps": 4})
    assert source.data == {"policies": {"solver": {"lr": 3, "steps": 4}, "verifier": {"lr": 3}}}
    assert str(source.place(("policies", "verifier", "lr"))) == "--set policies.*.lr"


def test_prompts_is_short_for_data_prompts() -> None:
    source = parse("data:\n  prompts: {builtin: chained_addition}\n", "r")
    override(source, {"prompts.path": "x.jsonl"})
    assert source.data == {"data": {"prompts": {"path": "x.jsonl"}}}


def test_a_key_with_an_empty_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--set a\.\.b: not a dotted key"):
        override(parse("a: 1\n", "r"), {"a..b": 1})


def test_assignments_are_read_as_yaml() -> None:
    assert parse_assignments(["steps=40", "lr=1e-4", "filter=[a, b]", "name=x=y", "on=true"]) == {
        "steps": 40,
        "lr": 1e-4,
        "filter": ["a", "b"],
        "name": "x=y",
        "on": True,
    }


def test_an_assignment_without_a_value_shows_how_to_write_it() -> None:
    with pytest.raises(ConfigError, match=r"^--set steps: write it as key=value"):
        parse_assignments(["steps"])
