"""Traces of an evaluation's episodes in a real MLflow: found by filters, linked, stored once."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.errors import TransientError
from storage.records.rollouts import Episode, FailureKind, Group
from storage.run import evaluation_samples, evaluations
from storage.run.evaluation_samples import EvaluationSample
from storage.store.backend import Backend
from storage.weights import publisher
from tasks.base_models.tiny_tokenizer import tokenizer, tokenizer_files
from tasks.tracking import evaluation_traces, mlflow_sync
from tasks.tracking.episode_traces import EpisodeTrace, episode_traces
from tasks.tracking.evaluation_traces import EvaluationTraces
from tasks.tracking.mlflow_client import PARENT, Board, MlflowError
from tasks.tracking.mlflow_sync import Tracker
from tests.support.runs import builders
from tests.support.runs.evaluations import evaluation
from tests.support.runs.small_run import RUN_ID, TENSORS, SmallRun

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # MLflow's own imports and database layer warn; none of it is ours


def played(small_run: SmallRun, version: int, *episodes: Episode) -> None:
    """Add an evaluation that keeps these episodes, each of a problem of its own."""
    versions = dict.fromkeys(small_run.config.policies, version)
    groups = tuple(
        builders.group(episode, prompt_id=f"test/{index}") for index, episode in enumerate(episodes)
    )
    evaluation_samples.create(small_run.run, EvaluationSample(versions=versions, groups=groups))
    evaluations.create(
        small_run.run, replace(evaluation(versions), num_kept=len(episodes), created_s=100.0)
    )


def run_with(name: str, *versions: int, episodes: int = 2) -> SmallRun:
    small_run = SmallRun(name)
    for policy in small_run.config.policies:
        small_run.version(policy, 0, {"config.json": b"{}"})
    for version in versions:
        played(small_run, version, *(answered(version) for _ in range(episodes)))
    return small_run


def answered(version: int, **metrics: float) -> Episode:
    return builders.episode(builders.sequence(version=version), **metrics)


def tracker_of(small_run: SmallRun, uri: str) -> Tracker:
    return Tracker(small_run.run, RUN_ID, small_run.config, uri)


def search(uri: str, where: str | None = None) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("astraflow")
    return list(
        client.search_traces(
            locations=[experiment.experiment_id], filter_string=where, max_results=500
        )
    )


def parent(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("astraflow")
    (found,) = [
        run
        for run in client.search_runs([experiment.experiment_id])
        if "astraflow.policy" not in run.data.tags
    ]
    return found


def test_an_episode_is_a_trace_with_a_span_for_each_turn_and_is_found_by_its_tags(uri: str) -> None:
    small_run = SmallRun("traces-found")
    for policy in small_run.config.policies:
        files = {"config.json": b"{}", **tokenizer_files()}
        publisher.publish(small_run.run, policy, 0, TENSORS, extra_files=files)
    prompt, answer = (tokenizer().encode(text).ids for text in ("7+8=?", "\\boxed{15} für Ü"))
    attempt = builders.sequence(prompt, answer, version=0)
    verdict = builders.sequence(
        prompt, answer[:1], policy="verifier", name="verdict", starts_episode=False
    )
    failed = builders.episode(error="timeout after 60 s", failure_kind=FailureKind.TIMEOUT)
    played(
        small_run, 0, builders.episode(attempt, verdict, final=1.0), answered(0, final=0.0), failed
    )
    assert tracker_of(small_run, uri).sync()
    assert len(search(uri)) == 3
    (right,) = search(
        uri,
        "tags.`astraflow.run_id` = 'tiny-1' AND tags.`astraflow.dataset` = 'held_out' AND "
        "tags.`astraflow.workflow` = 'actor_and_verify' AND tags.`astraflow.version` = '0' AND "
        "tags.`astraflow.result` = 'right' AND tags.`astraflow.reward` = '1'",
    )
    (same,) = search(uri, "tags.`astraflow.prompt_id` = 'test/0'")
    assert right.info.trace_id == same.info.trace_id
    (error,) = search(uri, "attributes.status = 'ERROR'")
    assert error.info.tags["astraflow.prompt_id"] == "test/2"
    assert len(search(uri, f"attributes.run_id = '{parent(uri).info.run_id}'")) == 3
    root, first, second = right.data.spans
    assert (root.parent_id, first.parent_id, second.parent_id) == (None, root.span_id, root.span_id)
    assert [span.name for span in right.data.spans] == ["actor_and_verify", "attempt", "verdict"]
    assert [span.span_type for span in right.data.spans] == ["AGENT", "LLM", "LLM"]
    assert root.inputs == {"question": "7+8-3=?", "answer": "12"}
    assert (first.inputs, first.outputs) == ({"context": "7+8=?"}, "\\boxed{15} für Ü")
    assert first.attributes["astraflow.policy"] == "solver"
    assert first.attributes["astraflow.logprob_mean"] == -0.5
    assert first.attributes["mlflow.chat.tokenUsage"]["output_tokens"] == len(answer)
    assert root.attributes["astraflow.reward"] == 1.0
    assert root.start_time_ns == 99_500_000_000
    assert right.info.token_usage["output_tokens"] == len(answer) + 1


def test_a_trace_is_stored_once_however_often_it_is_sent(uri: str) -> None:
    small_run = run_with("traces-once", 0, 2)
    assert tracker_of(small_run, uri).sync()
    first = {trace.info.trace_id: trace.to_dict() for trace in search(uri)}
    assert len(first) == 4
    assert len({span.span_id for trace in search(uri) for span in trace.data.spans}) == 8
    from mlflow.tracking import MlflowClient

    # As after a crash before the cursor moved.
    MlflowClient(tracking_uri=uri).set_tag(parent(uri).info.run_id, "astraflow.traced", "")
    assert tracker_of(small_run, uri).sync()
    assert {trace.info.trace_id: trace.to_dict() for trace in search(uri)} == first


class Sent:
    """A board that counts the traces that it takes, and refuses those of some problems."""

    def __init__(self, refused: Sequence[str] = ()) -> None:
        self.taken: list[str] = []
        self.asked: list[str] = []
        self.cursor: str | None = None
        self.refused = refused

    def tag(self, who: str, key: str) -> str | None:
        assert (who, key) == (PARENT, "astraflow.traced")
        return self.cursor

    def log(self, who: str, points: list[Any], tags: dict[str, str]) -> None:
        assert (who, points) == (PARENT, [])
        self.cursor = tags["astraflow.traced"]

    def log_trace(self, who: str, trace: EpisodeTrace) -> None:
        assert who == PARENT
        self.asked.append(trace.identity)
        if any(trace.identity.endswith(place) for place in self.refused):
            raise MlflowError("refused")
        self.taken.append(trace.identity)


def sender(small_run: SmallRun, clock: Any = lambda: 0.0) -> EvaluationTraces:
    return EvaluationTraces(small_run.run, RUN_ID, clock=clock)


def send(traces: EvaluationTraces, board: Sent) -> None:
    traces.send(board)  # type: ignore[arg-type]  # the part of a Board that it uses


def vector(version: int) -> str:
    return f"solver-{version}_verifier-{version}"


def key_of(version: int) -> str:
    return layout.evaluation({"solver": version, "verifier": version})


def test_a_restarted_tracker_goes_on_behind_the_last_complete_evaluation() -> None:
    small_run = run_with("traces-cursor", 0, 2)
    board = Sent()
    send(sender(small_run), board)
    assert board.cursor == key_of(2)
    played(small_run, 4, answered(4))
    send(sender(small_run), board)
    assert board.asked == [
        f"{vector(v)}/{n}/0" for v, n in ((0, 0), (0, 1), (2, 0), (2, 1), (4, 0))
    ]


def test_one_call_ends_after_its_time_and_the_next_goes_on() -> None:
    """The cursor moves when the whole evaluation is sent, not before."""
    small_run = run_with("traces-time", 0, episodes=3)
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += evaluation_traces.SEND_S / 2
        return now_s[0]

    board, traces = Sent(), sender(small_run, clock)
    send(traces, board)
    assert (len(board.taken), board.cursor, traces.is_behind) == (2, None, True)
    send(traces, board)
    assert (len(board.taken), board.cursor, traces.is_behind) == (3, key_of(0), False)
    assert len(set(board.taken)) == 3


def test_each_trace_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call needs the sample no more."""
    monkeypatch.setattr(evaluation_traces, "SEND_S", 0.0)
    small_run = run_with("traces-made-once", 0, episodes=3)
    board, traces = Sent(refused=["/1/0"]), sender(small_run)
    send(traces, board)
    small_run.run.delete(layout.evaluation_sample({"solver": 0, "verifier": 0}))
    for _ in range(4):
        send(traces, board)
    assert board.asked == [f"{vector(0)}/{place}/0" for place in (0, 1, 1, 2)]
    assert (board.cursor, traces.is_behind) == (key_of(0), False)


class AwayFromVerifier:
    """A store in which the first read below the verifier's weights fails."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.failed = False

    def __getattr__(self, verb: str) -> object:
        return getattr(self.backend, verb)

    def read(self, key: str) -> bytes:
        if "weights/verifier" in key and not self.failed:
            self.failed = True
            raise TransientError("the store is away")
        return self.backend.read(key)


def test_traces_go_on_behind_the_one_at_which_the_store_failed() -> None:
    small_run = SmallRun("traces-store")
    for policy in small_run.config.policies:
        small_run.version(policy, 0, {"config.json": b"{}"})
    verdict = builders.episode(builders.sequence(policy="verifier"))
    played(small_run, 0, answered(0), verdict, answered(0))
    backend = AwayFromVerifier(small_run.run.backend)
    run = replace(small_run.run, backend=backend, patience_s=0.0)  # type: ignore[arg-type]  # delegates the rest
    board, traces = Sent(), EvaluationTraces(run, RUN_ID, clock=lambda: 0.0)
    with pytest.raises(TransientError):
        send(traces, board)
    send(traces, board)
    assert board.asked == [f"{vector(0)}/{place}/0" for place in (0, 1, 2)]
    assert board.cursor == key_of(0)


def test_an_evaluation_that_is_listed_before_the_current_one_is_sent_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation_traces, "SEND_S", 0.0)
    small_run = run_with("traces-before", 4)
    board, traces = Sent(), sender(small_run)
    send(traces, board)
    played(small_run, 2, answered(2), answered(2))
    for _ in range(5):
        send(traces, board)
    assert board.taken == [
        f"{vector(v)}/{n}/0" for v, n in ((4, 0), (2, 0), (2, 1), (4, 0), (4, 1))
    ]


def test_a_slow_mlflow_gets_at_least_one_trace_a_call() -> None:
    small_run = run_with("traces-slow", 0, episodes=3)
    ticks = iter(range(0, 10**6, 1000))
    board, traces = Sent(), sender(small_run, lambda: float(next(ticks)))
    send(traces, board)
    assert len(board.taken) == 1


def test_a_trace_that_is_refused_twice_is_left_out_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    versions = (0, 2, 4, 6)
    small_run = run_with("traces-refused", *versions, episodes=3)
    board, traces = Sent(refused=["/1/0"]), sender(small_run)
    for _ in range(2):
        send(traces, board)
        assert traces.is_behind
    assert board.asked == [f"{vector(0)}/{place}/0" for place in (0, 1, 1)]
    for _ in range(7):
        send(traces, board)
    assert not traces.is_behind
    assert board.taken == [f"{vector(version)}/{n}/0" for version in versions for n in (0, 2)]
    assert board.cursor == key_of(6)
    assert caplog.text.count("MLflow does not take the trace of") == 1


def test_a_server_without_traces_is_asked_a_few_times_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    small_run = run_with("traces-none", 0, episodes=9)
    board, traces = Sent(refused=["/0"]), sender(small_run)
    for _ in range(20):
        send(traces, board)
    assert len(board.asked) == evaluation_traces.TRIES_MAX * evaluation_traces.LEFT_OUT_MAX
    assert (traces.is_behind, board.cursor) == (False, None)
    assert caplog.text.count("no further trace of run tiny-1 is sent to MLflow") == 1


def test_a_damaged_or_missing_sample_is_logged_and_the_next_evaluation_is_traced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    small_run = run_with("traces-damaged", 0, 2, 4)
    for version, body in ((0, b"torn"), (2, None)):
        key = layout.evaluation_sample({"solver": version, "verifier": version})
        small_run.run.delete(key)
        if body:
            small_run.run.put(key, body)
    board = Sent()
    send(sender(small_run), board)
    assert board.taken == [f"{vector(4)}/0/0", f"{vector(4)}/1/0"]
    assert board.cursor == key_of(4)
    assert caplog.text.count("an evaluation has no traces in MLflow: ") == 2


def test_evaluations_after_a_strangers_key_that_sorts_last_are_traced() -> None:
    small_run = run_with("traces-stranger", 0, 2)
    small_run.run.put("evals/zzz.arrow", b"x")
    board = Sent()
    send(sender(small_run), board)
    assert board.cursor == key_of(2)
    assert len(board.taken) == 4


def test_an_evaluation_that_keeps_nothing_has_no_traces() -> None:
    small_run = run_with("traces-nothing")
    small_run.evaluation(0, [1, 0], [1, 1])
    board, traces = Sent(), sender(small_run)
    send(traces, board)
    assert (board.asked, board.cursor, traces.is_behind) == ([], key_of(0), False)


def test_an_mlflow_without_traces_delays_no_metric(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_run = run_with("traces-unsupported", 0)

    def unsupported(*args: object) -> None:
        raise NotImplementedError("log_spans is not supported")

    from mlflow.tracing.client import TracingClient

    monkeypatch.setattr(TracingClient, "log_spans", unsupported)
    tracker = tracker_of(small_run, uri)
    assert tracker.sync()
    assert "MLflow does not take traces: log_spans is not supported" in caplog.text
    assert parent(uri).data.metrics["eval/held_out/single_turn/accuracy"] == 0.5


def test_the_end_of_a_run_waits_for_its_traces(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_traces, "SEND_S", 0.0)  # one trace a sync
    small_run = run_with("traces-end", 0, episodes=4)
    tracker_of(small_run, uri).finish("cancelled")
    assert len(search(uri)) == 4


def test_the_end_of_a_run_does_not_wait_longer_than_its_limit(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(evaluation_traces, "SEND_S", 0.0)
    monkeypatch.setattr(mlflow_sync, "CATCH_UP_S", -1.0)
    small_run = run_with("traces-limit", 0, episodes=4)
    tracker_of(small_run, uri).finish("cancelled")
    assert len(search(uri)) == 1
    assert "MLflow is too slow" in caplog.text


def test_the_traces_of_two_runs_are_their_own(uri: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        small_run = run_with(f"traces-of-{name}", 0, episodes=1)
        Tracker(small_run.run, name, small_run.config, uri).sync()
    assert [len(search(uri, f"tags.`astraflow.run_id` = '{name}'")) for name in "ab"] == [1, 1]


def test_a_board_translates_the_errors_of_traces(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracing.client import TracingClient

    def broken(*args: object) -> None:
        raise OSError("the disk is full")

    small_run = run_with("traces-errors", 0, episodes=1)
    versions = {"solver": 0, "verifier": 0}
    (trace,) = episode_traces(
        RUN_ID,
        evaluations.read(small_run.run, versions),
        evaluation_samples.read(small_run.run, versions),
        lambda policy, tokens: "",
    )
    monkeypatch.setattr(TracingClient, "start_trace", broken)
    with pytest.raises(MlflowError, match="the disk is full"):
        Board(uri, "astraflow", RUN_ID, []).log_trace(PARENT, trace)


def test_a_group_without_episodes_has_no_trace() -> None:
    small_run = run_with("traces-empty")
    versions = {"solver": 0, "verifier": 0}
    group = Group(builders.group().prompt, ())
    evaluation_samples.create(small_run.run, EvaluationSample(versions=versions, groups=(group,)))
    evaluations.create(small_run.run, replace(evaluation(versions), num_kept=1))
    board = Sent()
    send(sender(small_run), board)
    assert (board.asked, board.cursor) == ([], key_of(0))
