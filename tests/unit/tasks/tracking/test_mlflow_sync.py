import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.errors import ConfigError
from storage.records.progress import RolloutProgress
from tasks.recipes.stored_config import flatten
from tasks.tracking import mlflow_sync
from tasks.tracking.mlflow_client import PARAMS_MAX, PARENT, Board, MlflowError
from tasks.tracking.mlflow_sync import Tracker, tracking_uri
from tests.support.runs.small_run import RECIPE, RUN_ID, SmallRun

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # MLflow's own imports and database layer warn; none of it is ours


class Seen:
    """The run's data in MLflow, read through its own client."""

    def __init__(self, uri: str) -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        (self.experiment,) = [
            item for item in self.client.search_experiments() if item.name == "astraflow"
        ]
        runs = self.client.search_runs([self.experiment.experiment_id])
        self.runs: dict[str, Any] = {
            run.data.tags.get("astraflow.policy", "parent"): run for run in runs
        }
        self.count = len(runs)

    def curve(self, who: str, key: str) -> list[tuple[int, float]]:
        history = self.client.get_metric_history(self.runs[who].info.run_id, key)
        return sorted((point.step, point.value) for point in history)


def trained(name: str, steps: int = 2) -> SmallRun:
    small_run = SmallRun(name)
    for policy in ("solver", "verifier"):
        small_run.version(policy, 0, {"config.json": b"{}"})
        for step in range(1, steps + 1):
            one_step(small_run, policy, step)
    return small_run


def one_step(small_run: SmallRun, policy: str, step: int) -> None:
    small_run.batch(policy, step, reward__mean=0.25 * step)
    small_run.version(policy, step, loss=float(step), ratio=float("nan"))


def test_evaluations_after_a_strangers_key_that_sorts_last_are_logged(uri: str) -> None:
    small_run = trained("tracking-stranger")
    small_run.run.put("evals/zzz.arrow", b"x")
    tracker = Tracker(small_run.run, RUN_ID, small_run.config, uri, clock=lambda: 1001.0)
    for version in (0, 2):
        small_run.evaluation(version, [1, 1], [1, 1])
        assert tracker.sync()
    curves = [Seen(uri).curve("parent", key) for key in Seen(uri).runs["parent"].data.metrics]
    assert [0, 2] in [[step for step, _ in curve] for curve in curves]


def test_a_sync_logs_every_step_evaluation_and_parameter(uri: str) -> None:
    small_run = trained("tracking-sync")
    small_run.evaluation(0, [0, 1], [1, 1])
    small_run.evaluation(2, [1, 1], [1, 1])
    small_run.beat(
        "rollout",
        "rollout-us-east-0",
        1000.0,
        region="us-east",
        progress=RolloutProgress(tokens_per_s=70.0),
        versions={"solver": 2},
    )
    tracker = Tracker(small_run.run, RUN_ID, small_run.config, uri, clock=lambda: 1001.0)
    assert tracker.sync()
    seen = Seen(uri)
    assert set(seen.runs) == {"parent", "solver", "verifier"}
    assert seen.runs["solver"].data.tags["mlflow.parentRunId"] == seen.runs["parent"].info.run_id
    assert seen.curve("solver", "trainer/loss") == [(1, 1.0), (2, 2.0)]
    assert seen.curve("verifier", "dataflow/reward/mean") == [(1, 0.25), (2, 0.5)]
    assert seen.curve("solver", "trainer/ratio") == []
    assert seen.curve("parent", "eval/chained_addition/single_turn/accuracy") == [
        (0, 0.5),
        (2, 1.0),
    ]
    assert seen.curve("parent", "eval/chained_addition/actor_and_verify/accuracy") == [
        (0, 1.0),
        (2, 1.0),
    ]
    assert seen.curve("parent", "rollout/us-east/tokens_per_s") == [(2, 70.0)]
    assert seen.runs["parent"].data.params["rollout.workflow.name"] == "actor_and_verify"
    assert seen.runs["solver"].data.params["batch_size"] == "2"


def test_names_of_data_sets_become_parts_of_a_metrics_name(uri: str) -> None:
    small_run = trained("tracking-datasets")
    small_run.evaluation(2, [1, 1], [1, 1], dataset="s3://b/AIME 25.jsonl")
    Tracker(small_run.run, RUN_ID, small_run.config, uri).sync()
    key = "eval/s3___b_AIME_25.jsonl/single_turn/accuracy"
    assert Seen(uri).curve("parent", key) == [(2, 1.0)]


def test_the_last_value_of_a_rate_is_its_mean_over_the_run(uri: str) -> None:
    small_run = trained("tracking-means")
    for name, region, tokens, alive_s in (
        ("rollout-eu-0", "eu", 900, 3.0),
        ("rollout-eu-1", "eu", 500, 5.0),
        ("rollout-us-0", "us", 70, 7.0),
        ("rollout-us-1", "us", 70, 0.0),
    ):
        small_run.beat(
            "rollout",
            name,
            1000.0,
            region=region,
            alive_s=alive_s,
            progress=RolloutProgress(tokens=tokens, tokens_per_s=0.0),
        )
    Tracker(small_run.run, RUN_ID, small_run.config, uri, clock=lambda: 1e9).finish("completed")
    metrics = Seen(uri).runs["parent"].data.metrics
    assert metrics["rollout/eu/tokens_per_s"] == 400.0
    assert metrics["rollout/us/tokens_per_s"] == 10.0


def test_the_parent_has_the_tags_that_say_where_a_run_is_from(uri: str) -> None:
    small_run = trained("tracking-tags")
    tags = {"mlflow.user": "ada", "astraflow.release": "1.2"}
    Tracker(small_run.run, RUN_ID, small_run.config, uri, tags=tags).sync()
    seen = Seen(uri).runs
    assert tags.items() <= seen["parent"].data.tags.items()
    assert "astraflow.release" not in seen["solver"].data.tags


def test_a_restarted_tracker_continues_in_the_same_mlflow_runs(uri: str) -> None:
    small_run = trained("tracking-restart")
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri).sync()
    one_step(small_run, "solver", 3)
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri).sync()
    seen = Seen(uri)
    assert seen.count == 3
    assert seen.curve("solver", "trainer/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_steps_logged_before_a_crash_are_not_logged_twice(uri: str) -> None:
    small_run = trained("tracking-crash")
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri).sync()
    seen = Seen(uri)
    seen.client.set_tag(seen.runs["solver"].info.run_id, "astraflow.next_step", "0")
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri).sync()
    assert Seen(uri).curve("solver", "trainer/loss") == [(1, 1.0), (2, 2.0)]


def test_an_unreachable_server_costs_little_time_and_loses_no_metrics(
    uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    small_run = trained("tracking-away")
    tracker = Tracker(small_run.run, RUN_ID, small_run.config, "http://127.0.0.1:9")
    with caplog.at_level("WARNING", logger="tasks.tracking.mlflow_sync"):
        assert not tracker.sync()
        assert not tracker.sync()
    assert caplog.text.count("tracking is delayed, the run is not") == 1
    one_step(small_run, "solver", 3)
    tracker.uri = uri
    assert tracker.sync()
    assert Seen(uri).curve("solver", "trainer/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_steps_that_a_server_did_not_take_are_logged_by_the_next_sync(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run = trained("tracking-busy")
    tracker = Tracker(small_run.run, RUN_ID, small_run.config, uri)
    assert tracker.sync()
    one_step(small_run, "solver", 3)

    def busy(*given: object) -> None:
        raise MlflowError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Board, "log", busy)
        assert not tracker.sync()
    assert tracker.sync()
    assert Seen(uri).curve("solver", "trainer/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_the_end_of_a_run_waits_longer_for_each_answer_than_its_syncs(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run = trained("tracking-patient")
    tracker = Tracker(small_run.run, RUN_ID, small_run.config, uri)
    log = Board.log
    timeouts_s: list[int] = []

    def noting(board: Board, *given: Any) -> None:
        timeouts_s.append(int(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]))
        log(board, *given)

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setattr(Board, "log", noting)
    assert tracker.sync()
    assert set(timeouts_s) == {5}
    timeouts_s.clear()
    tracker.finish("cancelled")
    tracker.sync()
    assert timeouts_s[0] == 60
    assert timeouts_s[-1] == 5


def test_the_end_of_a_run_logs_the_report_the_models_and_the_status(
    uri: str, tmp_path: Path
) -> None:
    small_run = trained("tracking-end")
    small_run.run.put(layout.REPORT, b"<h1>report</h1>")
    tracker = Tracker(small_run.run, RUN_ID, small_run.config, uri)
    assert tracker.finish("completed") is None
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri).finish("completed") is None
    seen = Seen(uri)
    assert {run.info.status for run in seen.runs.values()} == {"FINISHED"}
    assert seen.curve("solver", "trainer/loss") == [(1, 1.0), (2, 2.0)]
    (version,) = seen.client.search_model_versions("name='astraflow-solver'")
    assert version.tags["astraflow.version"] == "2"
    folder = Path(version.source.removeprefix("file://"))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    files = {item.path for item in seen.client.list_artifacts(seen.runs["parent"].info.run_id)}
    assert files == {"config.json", "report.html"}


def test_a_run_that_used_up_its_budget_is_finished_and_registers_its_newest_models(
    uri: str,
) -> None:
    small_run = trained("tracking-exhausted")
    Tracker(small_run.run, RUN_ID, small_run.config, uri).finish("exhausted")
    seen = Seen(uri)
    assert {run.info.status for run in seen.runs.values()} == {"FINISHED"}
    (version,) = seen.client.search_model_versions("name='astraflow-solver'")
    assert version.tags["astraflow.version"] == "2"


@pytest.mark.parametrize(("state", "status"), [("cancelled", "KILLED"), ("suspended", "SCHEDULED")])
def test_a_run_that_was_stopped_registers_no_model(uri: str, state: str, status: str) -> None:
    small_run = trained(f"tracking-{state}")
    Tracker(small_run.run, RUN_ID, small_run.config, uri).finish(state)
    seen = Seen(uri)
    assert {run.info.status for run in seen.runs.values()} == {status}
    assert seen.client.search_model_versions("name='astraflow-solver'") == []


def test_a_resumed_run_has_the_status_running_again(uri: str) -> None:
    small_run = trained("tracking-resumed")
    Tracker(small_run.run, RUN_ID, small_run.config, uri).finish("cancelled")
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri).sync()
    assert {run.info.status for run in Seen(uri).runs.values()} == {"RUNNING"}


def test_the_end_of_a_run_does_not_wait_for_an_unreachable_server() -> None:
    small_run = trained("tracking-gone")
    assert (
        Tracker(small_run.run, RUN_ID, small_run.config, "http://127.0.0.1:9").finish("completed")
        is None
    )


def test_importing_the_tracker_does_not_import_mlflow() -> None:
    code = "import sys, tasks.tracking.mlflow_sync; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    assert tracking_uri() == "http://host:5000"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tracking_uri() is None


def test_nested_settings_become_dotted_parameters() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == {"a.b": 1, "a.c": {}, "d": [1, 2]}


def test_of_very_many_settings_the_first_ones_are_parameters() -> None:
    """MLflow reads all stored ones for each request: 10,000 took it 12 s, 50,000 five minutes."""
    logged: list[int] = []

    class Client:
        def log_batch(self, run_id: str, params: list[Any]) -> None:
            logged.append(len(params))

    board = object.__new__(Board)  # without a server
    board._client, board._ids = Client(), {PARENT: "abc"}
    board.log_params(PARENT, {str(number): number for number in range(PARAMS_MAX + 1)})
    assert sum(logged) == PARAMS_MAX


def test_a_setting_whose_name_mlflow_refuses_gets_another_name(uri: str) -> None:
    small_run = trained("tracking-settings")
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri).sync()
    board = Board(uri, "astraflow", RUN_ID, ["solver", "verifier"])
    board.log_params("solver", {"prices.C++": 1, "a[b]": 2, "x//y/..": 3, "ü": 4})
    params = Seen(uri).runs["solver"].data.params
    assert (params["prices.C__"], params["a_b_"], params["x__y_.."], params["ü"]) == tuple("1234")


def test_a_page_is_linked_without_a_credential() -> None:
    board = object.__new__(Board)  # without a server
    board.uri, board.experiment_id, board._ids = (
        "https://me:s3cr3t@mlflow.example/",
        "7",
        {PARENT: "abc"},
    )
    assert board.link == "https://mlflow.example/#/experiments/7/runs/abc/model-metrics"


def test_an_address_with_a_credential_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:s3cr3t@mlflow.example")
    with pytest.raises(
        ConfigError, match=r"beside the address https://mlflow\.example, .*MLFLOW_TRACKING_TOKEN"
    ) as refused:
        tracking_uri()
    assert "s3cr3t" not in str(refused.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    assert tracking_uri() == "https://mlflow.example"


def test_a_quotation_mark_in_the_experiment_name_is_escaped_in_searches(uri: str) -> None:
    small_run = SmallRun(
        "tracking-quoted", RECIPE + "tracking: {experiment: \"it's' or name like '%\"}\n"
    )
    small_run.version("solver", 0, {"config.json": b"{}"})
    small_run.version("verifier", 0, {"config.json": b"{}"})
    for _ in range(2):
        assert Tracker(small_run.run, RUN_ID, small_run.config, uri).finish("completed") is None
    from mlflow.tracking import MlflowClient

    result = MlflowClient(tracking_uri=uri, registry_uri=uri).search_model_versions()
    assert sorted((item.name, item.version) for item in result) == [
        (f"it's' or name like '%-{policy}", 1) for policy in ("solver", "verifier")
    ]


def test_a_metric_name_refused_by_mlflow_does_not_block_others(uri: str) -> None:
    small_run = trained("tracking-names", steps=1)
    small_run.batch("solver", 2, **{"[/]\x1b": 1.0, "reward/mean": 0.5, "x" * 300: 1.0})
    small_run.version("solver", 2, loss=2.0)
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri).sync()
    seen = Seen(uri)
    assert seen.curve("solver", "dataflow/reward/mean") == [(1, 0.25), (2, 0.5)]
    assert seen.curve("solver", "trainer/loss") == [(1, 1.0), (2, 2.0)]


def with_experiment(name: str, experiment: str) -> SmallRun:
    small_run = SmallRun(name, RECIPE + f"tracking: {{experiment: {experiment!r}}}\n")
    for policy in ("solver", "verifier"):
        small_run.version(policy, 0, {"config.json": b"{}"})
    return small_run


def states_and_models(uri: str, experiment: str) -> tuple[set[str], list[str]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    found = client.get_experiment_by_name(experiment)
    states = {run.info.status for run in client.search_runs([found.experiment_id])}
    return states, sorted(version.name for version in client.search_model_versions())


def test_a_path_as_the_experiments_name_names_its_models_with_hyphens(uri: str) -> None:
    small_run = with_experiment("tracking-path", "/team/math:v2")
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri).finish("completed") is None
    assert states_and_models(uri, "/team/math:v2") == (
        {"FINISHED"},
        ["-team-math-v2-solver", "-team-math-v2-verifier"],
    )


def test_a_model_that_mlflow_refuses_leaves_no_run_active(
    uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    small_run = with_experiment("tracking-refused", "..")
    Tracker(small_run.run, RUN_ID, small_run.config, uri).finish("completed")
    assert states_and_models(uri, "..") == ({"FINISHED"}, [])
    for policy in ("solver", "verifier"):
        assert f"MLflow has no model of {policy} from run {RUN_ID}, `astraflow" in caplog.text


def test_a_deleted_experiment_is_named_with_what_to_do(
    uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    deleted = client.create_experiment("gone", artifact_location=tmp_path.as_uri())
    client.delete_experiment(deleted)
    small_run = with_experiment("tracking-deleted", "gone")
    assert not Tracker(small_run.run, RUN_ID, small_run.config, uri).sync()
    assert (
        "the experiment 'gone' is deleted in MLflow; restore it (`mlflow experiments restore "
        f"--experiment-id {deleted}`), or set tracking.experiment to another name"
    ) in caplog.text
    client.restore_experiment(deleted)
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri).sync()


@pytest.mark.parametrize(
    ("tag", "step"),
    [(None, 0), ("", 0), ("7", 7), ("-7", 0), ("x", 0), ("1e3", 0), ("9" * 5000, 0)],
)
def test_a_cursor_that_somebody_else_wrote_counts_as_none(tag: str | None, step: int) -> None:
    assert mlflow_sync._step(tag) == step
