import json
from pathlib import Path

import pytest

from data_ops.prompts import BuiltinPrompts
from data_ops.prompts.frozen import stream_of
from data_ops.prompts.window import DataWindow, WindowPrompts
from storage import layout
from storage.errors import ConfigError, CorruptError
from storage.records.rollouts import Prompt
from storage.run import runs
from storage.store.object_store import ObjectStore
from tests.support.runs.frozen_windows import frozen_window

SOURCE = WindowPrompts(window=DataWindow(files=["/absent/*.jsonl"]), seed=3)
PLACES = ("data.prompts", "evaluation.prompts")


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    """A run with three frozen rows for the training and one for the evaluation."""
    prompts = [Prompt(str(n), {"question": f"{n}?", "answer": str(n)}) for n in range(4)]
    windows = {"data.prompts": prompts[:3], "evaluation.prompts": prompts[3:]}
    frozen = {place: frozen_window(memory_store, "r", rows) for place, rows in windows.items()}
    return runs.create_run(memory_store, "r", {}, windows=frozen)


def test_each_place_has_its_own_frozen_rows(run: ObjectStore) -> None:
    training, evaluation = (stream_of(run, place, SOURCE) for place in PLACES)
    assert [prompt.id for prompt in training.all()] == ["0", "1", "2"]
    assert evaluation.all() == [Prompt("3", {"question": "3?", "answer": "3"})]


def test_frozen_rows_are_shuffled_by_the_seed_of_the_source(run: ObjectStore) -> None:
    orders = set()
    for seed in range(10):
        stream = stream_of(run, "data.prompts", SOURCE.model_copy(update={"seed": seed}))
        taken, cursor = stream.take({}, 3)
        assert sorted(prompt.id for prompt in taken) == ["0", "1", "2"]
        assert cursor == {"epoch": 0, "position": 3}
        orders.add(tuple(prompt.id for prompt in taken))
    assert len(orders) > 1


def test_another_source_is_read_itself(memory_store: ObjectStore) -> None:
    source = BuiltinPrompts(builtin="chained_addition", seed=7)
    assert stream_of(memory_store, "data.prompts", source).all(2) == source.stream().all(2)


def test_a_window_without_frozen_rows_is_refused(memory_store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "1", "answer": "1"}))
    source = WindowPrompts(window=DataWindow(files=[f"{tmp_path}/*.jsonl"]))
    run = runs.create_run(memory_store, "r", {})
    with pytest.raises(
        ConfigError, match=r"data\.prompts is a data window, and .*r/run\.json names no"
    ):
        stream_of(run, "data.prompts", source)


def test_changed_rows_are_refused_with_their_key(run: ObjectStore) -> None:
    digests = [runs.read_run(run).windows[place].digest for place in PLACES]
    training, evaluation = map(layout.prompts, digests)
    run.put(training, run.get(evaluation))
    with pytest.raises(CorruptError, match=f"{training} does not have the digest"):
        stream_of(run, "data.prompts", SOURCE)
    assert len(stream_of(run, "evaluation.prompts", SOURCE).all()) == 1
