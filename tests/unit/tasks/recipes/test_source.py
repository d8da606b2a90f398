from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.errors import ConfigError
from tasks.recipes.source import (
    KeyPath,
    SourceLine,
    _merge,
    find,
    override,
    parse,
    parse_assignments,
    read_source,
)


def test_a_small_number_in_scientific_notation_is_a_number() -> None:
    assert parse("lr: 5e-5\nsteps: 80\nversion: 1.2.3\n", "r").data == {
        "lr": 5e-05,
        "steps": 80,
        "version": "1.2.3",
    }


def test_places_are_the_lines_of_keys_and_list_items() -> None:
    source = parse("a:\n  b: 1\n  c:\n    - x\n    - y\n", "r.yaml")
    assert str(source.place(("a", "b"))) == "r.yaml, line 2"
    assert str(source.place(("a", "c", "1"))) == "r.yaml, line 5"
    assert str(source.place(("a", "missing"))) == "r.yaml, line 1"
    assert str(source.place(("nowhere",))) == "r.yaml"


def test_a_repeated_key_names_both_lines() -> None:
    with pytest.raises(
        ConfigError, match=r"^r, line 3: a\.b: written twice \(first on line 2\); keep one$"
    ):
        parse("a:\n  b: 1\n  b: 2\n", "r")


def test_broken_yaml_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"^r, line 2: not valid YAML: "):
        parse("a: 1\nb: [1, 2\n", "r")


def test_a_list_is_not_a_recipe() -> None:
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


def test_a_recipe_that_extends_a_list_is_refused_without_quoting_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"extends: [{'base, ' * 1_000}]\n")
    with pytest.raises(
        ConfigError, match=r"line 1: extends: must be the name of one recipe, not .{100}…$"
    ):
        read_source(str(tmp_path / "mine.yaml"), (tmp_path,))


def test_keys_are_merged_without_a_look_at_the_places_of_all_others() -> None:
    class Counted(UserDict[KeyPath, SourceLine]):
        looks = 0

        def __iter__(self) -> Iterator[KeyPath]:
            Counted.looks += 1
            return super().__iter__()

    base = parse("".join(f"k{number}: {{a: [0]}}\n" for number in range(100)), "base")
    mine = parse("".join(f"k{number}: {{a: [1, 2]}}\n" for number in range(100)), "mine")
    for source in (base, mine):
        source.places = Counted(source.places)  # type: ignore[assignment]
    _merge(base, mine.data, mine.places, ())
    override(base, {"*": [1]})
    assert base.data == {f"k{number}": [1] for number in range(100)}
    assert str(base.place(("k7", "0"))) == "--set *"
    assert Counted.looks == 0


def test_what_replaces_a_section_leaves_none_of_its_places(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: {b: {c: 1}, d: [1, 2]}\n")
    (tmp_path / "mine.yaml").write_text("extends: ./base.yaml\n\na:\n  b: 1\n  d: [3]\n")
    source = read_source(str(tmp_path / "mine.yaml"), (tmp_path,))
    places = {".".join(path): place.line for path, place in source.places.items()}
    assert places == {"a": 3, "a.b": 4, "a.d": 5, "a.d.0": 5}


def test_another_source_than_the_bases_drops_the_bases_source(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "data:\n  prompts: {builtin: chained_addition, split: train}\n"
    )
    source = read_source("extends: base\ndata:\n  prompts: {hub: openai/gsm8k}\n", (tmp_path,))
    assert source.data == {"data": {"prompts": {"hub": "openai/gsm8k", "split": "train"}}}


def test_recipes_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b\n")
    (tmp_path / "b.yaml").write_text("extends: a\n")
    with pytest.raises(ConfigError, match="a recipe cannot extend itself"):
        read_source("a", (tmp_path,))


def test_overrides_with_a_star_apply_to_every_policy() -> None:
    source = parse("policies:\n  solver: {lr: 1}\n  verifier: {lr: 2}\n", "r")
    override(source, {"policies.*.lr": 3, "policies.solver.steps": 4})
    assert source.data == {"policies": {"solver": {"lr": 3, "steps": 4}, "verifier": {"lr": 3}}}
    assert str(source.place(("policies", "verifier", "lr"))) == "--set policies.*.lr"


def test_the_key_prompts_is_short_for_data_prompts() -> None:
    source = parse("data:\n  prompts: {builtin: chained_addition}\n", "r")
    override(source, {"prompts.path": "x.jsonl"})
    assert source.data == {"data": {"prompts": {"path": "x.jsonl"}}}


def test_a_value_from_a_form_is_nested_as_deep_as_one_of_a_file() -> None:
    nested: Any = 1
    for _ in range(900):
        nested = {"a": nested}
    with pytest.raises(ConfigError, match=r"^--set data: nested deeper than 32 sections$"):
        override(parse("steps: 80", "r"), {"data": nested})


def test_a_large_value_at_thousands_of_places_is_refused_before_it_is_written() -> None:
    source = parse("".join(f"k{number}: 0\n" for number in range(1_000)), "r")
    override(source, {"*": [1] * 98})
    with pytest.raises(
        ConfigError, match=r"^--set \*: with .* before it, more than 100,000 values"
    ):
        override(source, {"k1": [1], "*": [1] * 99, "k2": [1]})
    with pytest.raises(ConfigError, match=r"^--set k2: with the overrides before it"):
        override(source, {"k1": [1] * 50_000, "k2": [1] * 50_000})
    assert str(source.place(("k1", "49999"))) == "--set k1"


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


def test_an_assignment_without_a_value_shows_the_correct_form() -> None:
    with pytest.raises(ConfigError, match=r"^--set steps: write it as key=value"):
        parse_assignments(["steps"])


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ...]:
    """The folder of built-in recipes with `tiny`, and `recipes` in the working directory, where all
    files are named `tiny`.
    """
    (tmp_path / "ours").mkdir()
    (tmp_path / "work" / "recipes").mkdir(parents=True)
    (tmp_path / "ours" / "tiny.yaml").write_text("steps: 1\n")
    (tmp_path / "ours" / "long.yaml").write_text("extends: tiny\nname: long\n")
    for name in ("tiny", "tiny.yaml", "tiny.yml", "recipes/tiny.yaml", "recipes/mine.yaml"):
        (tmp_path / "work" / name).write_text(f"steps: 666\nname: {name}\n")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "ours", tmp_path / "work" / "recipes"


def test_the_name_of_a_built_in_recipe_has_priority_over_local_files(
    folders: tuple[Path, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert read_source("tiny", folders).data == {"steps": 1}
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == (
        f"the recipe tiny is {folders[0]}/tiny.yaml; to use recipes/tiny.yaml or ./tiny or "
        "./tiny.yaml or ./tiny.yml, "
        "name it by this path"
    )


@pytest.mark.parametrize(
    "name", ["./tiny", "tiny.yaml", "./tiny.yaml", "tiny.yml", "recipes/tiny.yaml"]
)
def test_a_path_selects_the_file(
    name: str, folders: tuple[Path, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert read_source(name, folders).data == {"steps": 666, "name": name.removeprefix("./")}
    assert caplog.records == []


def test_a_local_recipe_can_be_named_without_its_path_if_no_built_in_one_has_its_name(
    folders: tuple[Path, ...],
) -> None:
    assert read_source("mine", folders).data == {"steps": 666, "name": "recipes/mine.yaml"}


@pytest.mark.parametrize("base", ["tiny", "long"])
def test_a_recipe_extends_a_built_in_one_by_name(
    base: str, folders: tuple[Path, ...], tmp_path: Path
) -> None:
    file = tmp_path / "work" / "recipes" / "above.yaml"
    file.write_text(f"extends: {base}\nseed: 5\n")
    assert read_source("recipes/above.yaml", folders).data | {"name": ""} == {
        "steps": 1,
        "name": "",
        "seed": 5,
    }
    assert read_source(f"extends: {base}\nseed: 5\n", folders).data | {"name": ""} == {
        "steps": 1,
        "name": "",
        "seed": 5,
    }


def test_an_extends_path_is_relative_to_the_recipe_and_then_to_the_working_directory(
    folders: tuple[Path, ...], tmp_path: Path
) -> None:
    (tmp_path / "work" / "recipes" / "above.yaml").write_text("extends: tiny.yaml\n")
    assert read_source("recipes/above.yaml", folders).data["name"] == "recipes/tiny.yaml"
    (tmp_path / "work" / "recipes" / "above.yaml").write_text("extends: tiny.yml\n")
    assert read_source("recipes/above.yaml", folders).data["name"] == "tiny.yml"


def test_a_file_name_without_its_path_gives_an_error_with_the_path(
    folders: tuple[Path, ...], tmp_path: Path
) -> None:
    (tmp_path / "work" / "other.yaml").write_text("steps: 7\n")
    with pytest.raises(
        ConfigError,
        match=r"^other: no such recipe; give a file, or one of .*; did you mean \./other\.yaml\?$",
    ):
        read_source("other", folders)
    with pytest.raises(ConfigError, match=r"^long\.yaml: no such recipe; .*; did you mean long\?$"):
        read_source("long.yaml", folders)


def test_the_file_of_a_built_in_recipe_does_not_conflict_with_its_name(
    folders: tuple[Path, ...], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders[0])
    assert read_source("tiny", folders[:1]).data == {"steps": 1}
    assert caplog.records == []


@pytest.mark.parametrize("name", ["é" * 150, f"{'é' * 150}/mine.yaml", f"./{'é' * 190}.yaml"])
def test_a_name_invalid_on_every_file_system_is_refused(name: str, tmp_path: Path) -> None:
    for read in (read_source, find):
        with pytest.raises(ConfigError, match="no such recipe"):
            read(name, (tmp_path,))


def test_keys_are_the_text_that_was_written() -> None:
    text = "a:\n  no: 1\n  off: 2\n  on: 3\n  1: 4\n  0x1: 5\n  null: 6\n  2024-01-01: 7\n"
    assert parse(text, "r").data == {
        "a": {"no": 1, "off": 2, "on": 3, "1": 4, "0x1": 5, "null": 6, "2024-01-01": 7}
    }
    assert parse("b: &x {yes: 1, c: 2}\nd: {<<: *x, c: 3}\n", "r").data == {
        "b": {"yes": 1, "c": 2},
        "d": {"yes": 1, "c": 3},
    }
    with pytest.raises(ConfigError, match=r"^r, line 2: 1: written twice \(first on line 1\)"):
        parse("1: a\n'1': b\n", "r")


def test_words_of_yaml_1_1_are_text_and_true_and_false_are_truth_values() -> None:
    written = ("a=no", "b=on", "c=Yes", "d=off", "e=2024-01-01", "f=true", "g=False", "h=TRUE")
    assert parse_assignments(written) == {
        "a": "no",
        "b": "on",
        "c": "Yes",
        "d": "off",
        "e": "2024-01-01",
        "f": True,
        "g": False,
        "h": True,
    }


def test_a_star_without_keys_to_stand_for_is_refused() -> None:
    source = parse("steps: 3\nempty: {}\n", "r")
    for dotted in ("steps.*", "empty.*", "missing.*", "missing.*.lr"):
        with pytest.raises(ConfigError, match=r"^--set .*: no section has keys that \* can stand"):
            override(source, {dotted: 1})
    assert source.data == {"steps": 3, "empty": {}}


def test_numbers_are_read_as_written_and_not_by_yaml_1_1_rules() -> None:
    written = (
        "a=010",
        "b=1:30",
        "c=190:20:30",
        "d=10",
        "e=0",
        "f=-5",
        "g=0x10",
        "h=1_000",
        "i=5e-5",
    )
    assert parse_assignments(written) == {
        "a": "010",
        "b": "1:30",
        "c": "190:20:30",
        "d": 10,
        "e": 0,
        "f": -5,
        "g": 16,
        "h": 1000,
        "i": 5e-5,
    }
