import json
from dataclasses import replace
from typing import Any

import pytest

from storage import layout
from storage.records.rollouts import Prompt
from storage.records.windows import PromptWindow
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from tasks.tracking import mlflow_sync, window_inputs
from tasks.tracking.mlflow_client import MlflowError
from tasks.tracking.mlflow_sync import Tracker
from tasks.tracking.window_inputs import dataset_inputs
from tests.support.runs.frozen_windows import FILE, frozen_window
from tests.support.runs.small_run import RUN_ID, SmallRun

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # MLflow's own imports and database layer warn; none of it is ours

PROMPTS = [Prompt("a/0", {"question": "1", "answer": "2"}), Prompt("a/1", {"question": "3"})]


def run_with(store: ObjectStore, **changes: Any) -> tuple[ObjectStore, PromptWindow]:
    window = replace(frozen_window(store, "r", PROMPTS), **changes)
    return runs.create_run(store, "r", {}, windows={"data.prompts": window}), window


def test_a_window_is_an_input_with_its_digest_bounds_and_files(memory_store: ObjectStore) -> None:
    run, window = run_with(memory_store)
    (found,) = dataset_inputs(run)
    digits = window.digest.removeprefix("sha256:")
    assert (found.name, found.digest, found.source_type) == ("data.prompts", digits[:36], "local")
    assert json.loads(found.source) == {
        "uri": f"{run.url}/{layout.prompts(window.digest)}",
        "digest": window.digest,
        "since": "2026-11-01T00:00:00+00:00",
        "until": "2026-11-02T00:00:00+00:00",
        "date_column": None,
        "files": [FILE.name],
    }
    assert json.loads(found.profile) == {"num_rows": 2, "num_files": 1}
    assert found.tags == {
        "mlflow.data.context": "training",
        "astraflow.since": "2026-11-01T00:00:00+00:00",
        "astraflow.until": "2026-11-02T00:00:00+00:00",
    }


def test_a_window_without_bounds_has_no_tags_of_them(memory_store: ObjectStore) -> None:
    run, _ = run_with(memory_store, since_s=None, until_s=None)
    assert dataset_inputs(run)[0].tags == {"mlflow.data.context": "training"}


def test_of_many_files_the_first_ones_are_named(memory_store: ObjectStore) -> None:
    names = [f"s3://bucket/{'x' * 100}/{number}.jsonl" for number in range(1_000)]
    run, _ = run_with(memory_store, files=tuple(replace(FILE, name=name) for name in names))
    (found,) = dataset_inputs(run)
    named = json.loads(found.source)["files"]
    assert named == names[: len(named)]
    assert 100 < len(named) < 1_000
    assert len(found.source) <= window_inputs.SOURCE_CHARACTERS_MAX
    assert json.loads(found.profile)["num_files"] == 1_000


@pytest.mark.s3
def test_the_source_of_a_run_on_s3_is_of_that_type(s3_store: ObjectStore) -> None:
    run, _ = run_with(s3_store)
    assert dataset_inputs(run)[0].source_type == "s3"


def logged(uri: str) -> list[tuple[str, str, str]]:
    """(name, context, source) of every input of the parent run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (experiment,) = [item for item in client.search_experiments() if item.name == "astraflow"]
    result = []
    for run in client.search_runs([experiment.experiment_id]):
        for each in client.get_run(run.info.run_id).inputs.dataset_inputs:
            assert "astraflow.policy" not in run.data.tags
            tags = {tag.key: tag.value for tag in each.tags}
            result.append((each.dataset.name, tags["mlflow.data.context"], each.dataset.source))
    return sorted(result)


def small_run(name: str) -> SmallRun:
    """A run with two data windows."""
    store = open_store(f"memory://{name}")
    windows = {
        "data.prompts": frozen_window(store, RUN_ID, PROMPTS),
        "evaluation.prompts": frozen_window(store, RUN_ID, PROMPTS[:1]),
    }
    return SmallRun(name, windows=windows)


def test_the_windows_of_a_run_are_logged_once_also_after_a_restart(uri: str) -> None:
    small = small_run("window-inputs")
    for _ in range(2):
        tracker = Tracker(small.run, RUN_ID, small.config, uri)
        assert tracker.sync()
        assert tracker.sync()
    sources = {each.name: each.source for each in dataset_inputs(small.run)}
    assert logged(uri) == [
        ("data.prompts", "training", sources["data.prompts"]),
        ("evaluation.prompts", "evaluation", sources["evaluation.prompts"]),
    ]


def test_an_mlflow_without_inputs_delays_no_metrics_and_gets_them_later(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_run("window-inputs-later")
    tracker = Tracker(small.run, RUN_ID, small.config, uri)
    attached: list[Any] = []

    def refuse(board: Any, who: str, inputs: Any) -> None:
        attached.append(board)
        raise MlflowError("no inputs")

    with monkeypatch.context() as patched:
        patched.setattr(mlflow_sync.Board, "log_inputs", refuse)
        small.version("solver", 0)
        small.batch("solver", 1)
        small.version("solver", 1, loss=1.0)
        assert not tracker.sync()
        assert attached[0].tag("solver", "astraflow.next_step") == "2"
        assert logged(uri) == []
    assert tracker.sync()
    assert len(logged(uri)) == 2


def test_a_very_long_name_of_a_column_is_cut(memory_store: ObjectStore) -> None:
    run, _ = run_with(memory_store, date_column="c" * 100_000)
    (found,) = dataset_inputs(run)
    assert json.loads(found.source)["date_column"] == "c" * 100


def test_a_very_long_name_of_a_window_is_cut(memory_store: ObjectStore) -> None:
    window = frozen_window(memory_store, "r", PROMPTS)
    run = runs.create_run(memory_store, "r", {}, windows={"x" * 501: window})
    (found,) = dataset_inputs(run)
    assert (found.name, found.tags["mlflow.data.context"]) == ("x" * 500, "x" * 500)
