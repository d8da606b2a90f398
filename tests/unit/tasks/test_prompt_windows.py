"""The data windows of a run are frozen when it is created, and never read again."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_ops.prompts.frozen import stream_of
from storage import layout
from storage.errors import ConfigError, EmptyWindowError
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks import prompt_windows
from tasks.prompt_windows import freeze
from tasks.recipes import loader
from tasks.recipes.run_config import RunConfig
from tasks.supervision import supervisor
from tests.support.stores.killed_store import Killed, killed_at

NIGHT_S = 1_793_491_200.0
"""2026-11-01T00:00Z."""


def write(path: Path, *questions: str, modified_s: float = NIGHT_S) -> None:
    rows = [{"question": each, "answer": "2"} for each in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(path, (modified_s, modified_s))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    write(tmp_path / "a.jsonl", "1", "2")
    write(tmp_path / "b.jsonl", "3")
    write(tmp_path / "held.jsonl", "4")
    return recipe(tmp_path)


def recipe(folder: Path, **more: Any) -> RunConfig:
    settings = {
        "data.prompts": {"window": {"files": [f"{folder}/[ab].jsonl"], "since": "2026-11-01"}},
        "evaluation.prompts": {"window": {"files": [f"{folder}/held.jsonl"]}},
        **more,
    }
    return loader.load("multi_policy_tiny", settings)


def questions(run: ObjectStore, config: RunConfig) -> tuple[list[str], list[str]]:
    """Of the training and of the evaluation."""
    assert config.evaluation is not None
    places = {"data.prompts": config.data.prompts, "evaluation.prompts": config.evaluation.prompts}
    training, evaluation = (
        [prompt.fields["question"] for prompt in stream_of(run, place, source).all()]
        for place, source in places.items()
    )
    return training, evaluation


def test_a_new_run_names_the_bounds_the_files_and_the_rows_of_each_place(
    memory_store: ObjectStore, config: RunConfig, tmp_path: Path
) -> None:
    run = supervisor.start(memory_store, "one", config, "")
    windows = runs.read_run(run).windows
    assert list(windows) == ["data.prompts", "evaluation.prompts"]
    training, evaluation = windows.values()
    assert (training.since_s, training.until_s, training.date_column) == (NIGHT_S, None, None)
    assert [(Path(file.name).name, file.rows) for file in training.files] == [
        ("a.jsonl", 2),
        ("b.jsonl", 1),
    ]
    assert (training.rows, evaluation.rows) == (3, 1)
    keys = sorted(layout.prompts(window.digest) for window in windows.values())
    assert run.list(layout.PROMPTS) == keys
    assert questions(run, config) == (["1", "2", "3"], ["4"])


def test_a_resumed_run_does_not_look_at_the_files(
    memory_store: ObjectStore, config: RunConfig, tmp_path: Path
) -> None:
    run = supervisor.start(memory_store, "one", config, "")
    before = {key: run.get(key) for key in run.list()}
    write(tmp_path / "a.jsonl", "9")
    (tmp_path / "b.jsonl").unlink()
    assert supervisor.start(memory_store, "one", config, "").prefix == run.prefix
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "held.jsonl").unlink()
    supervisor.start(memory_store, "one", config, "")
    assert {key: run.get(key) for key in run.list()} == before
    assert questions(run, config) == (["1", "2", "3"], ["4"])
    with pytest.raises(EmptyWindowError):
        supervisor.start(memory_store, "two", config, "")


@pytest.mark.parametrize(
    ("emptied", "place"),
    [("[ab].jsonl", "data.prompts"), ("held.jsonl", "evaluation.prompts")],
)
def test_an_empty_window_stores_nothing_and_names_the_place(
    memory_store: ObjectStore, config: RunConfig, tmp_path: Path, emptied: str, place: str
) -> None:
    for path in tmp_path.glob(emptied):
        path.unlink()
    with pytest.raises(EmptyWindowError, match=rf"^{place}: no (row|file) "):
        supervisor.start(memory_store, "one", config, "")
    assert memory_store.list() == []


def test_a_file_that_cannot_be_used_stores_nothing_and_names_the_place(
    memory_store: ObjectStore, config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "held.jsonl").write_text("oops\n")
    with pytest.raises(
        ConfigError, match=r"^evaluation\.prompts: .*held\.jsonl: 1 of 1 lines"
    ) as caught:
        supervisor.start(memory_store, "one", config, "")
    assert type(caught.value) is ConfigError
    assert memory_store.list() == []


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dies_at", [1, 2, 3])
@pytest.mark.parametrize("changed", [False, True])
def test_a_creation_that_was_killed_is_completed_by_the_next_one(
    memory_store: ObjectStore,
    config: RunConfig,
    tmp_path: Path,
    dies_at: int,
    after: bool,
    changed: bool,
) -> None:
    """The changes are two objects of rows, then `run.json`."""
    dying, backend = killed_at(memory_store, dies_at, after)
    with pytest.raises(Killed):
        supervisor.start(dying, "one", config, "")
    assert len(backend.changes) == dies_at
    exists = memory_store.exists(f"runs/one/{layout.RUN}")
    assert exists == (dies_at == 3 and after)
    if changed:
        write(tmp_path / "a.jsonl", "7")
        write(tmp_path / "held.jsonl", "8")
    run = supervisor.start(memory_store, "one", config, "")
    new = changed and not exists
    assert questions(run, config) == ((["7", "3"], ["8"]) if new else (["1", "2", "3"], ["4"]))


def test_of_two_creators_with_different_files_the_first_run_is_whole(
    memory_store: ObjectStore, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second creator reads other files, and creates its run before the first one does."""
    frozen: Callable[..., Any] = freeze

    def overtaken(run: ObjectStore, config: RunConfig) -> Any:
        windows = frozen(run, config)
        monkeypatch.setattr(prompt_windows, "freeze", frozen)
        write(tmp_path / "a.jsonl", "7")
        write(tmp_path / "held.jsonl", "8")
        supervisor.start(memory_store, "one", config, "")
        return windows

    monkeypatch.setattr(prompt_windows, "freeze", overtaken)
    run = supervisor.start(memory_store, "one", config, "")
    assert questions(run, config) == (["7", "3"], ["8"])
    assert len(run.list(layout.PROMPTS)) == 4


def test_a_version_that_does_not_exist_is_refused_before_files_are_read(
    memory_store: ObjectStore, tmp_path: Path
) -> None:
    config = recipe(tmp_path, **{"policies.solver.model": {"run": "absent"}})
    with pytest.raises(ConfigError, match="there is no run 'absent'"):
        supervisor.start(memory_store, "one", config, "")


def test_a_recipe_without_a_window_freezes_nothing(memory_store: ObjectStore) -> None:
    config = loader.load("multi_policy_tiny")
    assert freeze(memory_store, config) == {}
    alone = config.model_copy(update={"evaluation": None})
    assert freeze(memory_store, alone) == {}
    assert memory_store.list() == []


def test_the_bounds_and_the_column_of_a_window_are_kept(
    memory_store: ObjectStore, tmp_path: Path
) -> None:
    row = {"question": "1", "answer": "2", "at": "2026-11-01"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    settings = {"files": [f"{tmp_path}/a.jsonl"], "until": "2026-11-02", "date_column": "at"}
    config = recipe(tmp_path, **{"data.prompts": {"window": settings}, "evaluation": None})
    (found,) = freeze(memory_store, config).values()
    assert (found.since_s, found.until_s, found.date_column) == (None, NIGHT_S + 86_400, "at")
