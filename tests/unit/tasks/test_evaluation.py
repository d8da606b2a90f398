"""Which vectors are evaluated, when the evaluation ends, which weights are used, and how episodes
are scored.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from data_ops.prompts.window import DataWindow, WindowPrompts
from rollout.agents.seeds import derived_seed
from rollout.config import EngineConfig
from storage import layout
from storage.coordination.lifetime import CHECK_INTERVAL_S, Lifetime
from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.records.control import Stop, WaitReason
from storage.records.progress import EvaluationProgress
from storage.records.rollouts import Episode, Prompt
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.run import evaluation_samples, evaluations, runs
from storage.run.evaluations import Accuracy
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from tasks import evaluation as evaluation_module
from tasks.evaluation import EVALUATION_SEED, Evaluate, evaluate_versions, follow
from tasks.recipes import loader
from tasks.recipes.run_config import RunConfig
from tests.support.runs.builders import tensors
from tests.support.runs.busy_gpus import busy_gpu
from tests.support.runs.dataflow_world import OutageBackend
from tests.support.runs.evaluations import evaluation
from tests.support.runs.fakes import LOGPROB, ScriptedEngine, base_files, total
from tests.support.runs.frozen_windows import frozen_window
from tests.support.runs.lifetimes import (
    ScriptedLifetime,
    heartbeat_writer_of,
    lifetime_of,
    progress_of,
)

pytestmark = pytest.mark.usefixtures("shared_chats")


@pytest.fixture
def config() -> RunConfig:
    return loader.load("multi_policy_tiny", {"steps": 2, "evaluation.every": 1})


class Player:
    """A fake evaluator: stores a result for each vector, until it is interrupted."""

    def __init__(self, run: ObjectStore, interrupted_at: int | None = None) -> None:
        self.run, self.interrupted_at = run, interrupted_at
        self.asked: list[dict[str, int]] = []

    def as_task(self, evaluate: Evaluate) -> Evaluate:
        return self.play

    def play(self, versions: Mapping[str, int]) -> bool:
        self.asked.append(dict(versions))
        if len(self.asked) - 1 == self.interrupted_at:
            return False
        evaluations.create(self.run, evaluation(dict(versions)))
        return True


def vectors(*versions: int) -> list[dict[str, int]]:
    return [{"solver": version, "verifier": version} for version in versions]


def publish(run: ObjectStore, *versions: int) -> None:
    for policy in ("solver", "verifier"):
        for version in versions:
            publisher.publish(run, policy, version, tensors(version))


def serve(run: ObjectStore, config: RunConfig, player: Player) -> None:
    follow(lifetime_of(run, "evaluation"), config, player.as_task)


def test_each_due_vector_is_evaluated_once_also_over_restarts(
    memory_store: ObjectStore, config: RunConfig
) -> None:
    publish(memory_store, 0, 1, 2)
    evaluations.create(memory_store, evaluation(*vectors(1)))
    player = Player(memory_store)
    serve(memory_store, config, player)
    assert player.asked == vectors(0, 2)


def test_no_evaluation_follows_an_interrupted_one(
    memory_store: ObjectStore, config: RunConfig
) -> None:
    publish(memory_store, 0, 1, 2)
    player = Player(memory_store, interrupted_at=1)
    serve(memory_store, config, player)
    assert player.asked == vectors(0, 1)


def test_no_evaluation_starts_after_the_runs_stop(
    memory_store: ObjectStore, config: RunConfig
) -> None:
    publish(memory_store, 0)
    runs.request_stop(memory_store, Stop("cancelled", "enough", 1.0))
    player = Player(memory_store)
    serve(memory_store, config, player)
    assert player.asked == []


class RecordedEngine(ScriptedEngine):
    """A scripted engine that records its requests and the versions that answered them."""

    made: list["RecordedEngine"] = []

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        super().__init__(config, model_config)
        self.loaded: list[tuple[int, str]] = []
        self.made.append(self)

    async def load(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        await super().load(version, tensors)
        self.loaded.append((version, self.digest(version)))


def scripted(prompt: str, seed: int) -> str:
    """Solver and verifier: wrong at first on an odd sum, rejected, and then right; no answer to
    prompts with `FAILS_ON`.
    """
    if "<verify>" in prompt:
        return f"\\boxed{{{total(prompt)}}}"
    if "boxed" in prompt:
        return f"<verify>{'reject' if total(prompt) % 2 else 'approve'}</verify>"
    if FAILS_ON and FAILS_ON in prompt:
        raise ValueError("the script has no answer")
    return f"\\boxed{{{total(prompt) + total(prompt) % 2}}}"


FAILS_ON = ""
PROMPTS = 6
ENGINE = f"{__name__}:RecordedEngine"


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A recipe whose policies follow a script, on a few problems of the test set."""
    monkeypatch.setattr(RecordedEngine, "made", [])
    settings = {
        "steps": 2,
        "seed": 9,
        "evaluation.every": 1,
        "evaluation.temperature": 0.25,
        "rollout.engine.name": ENGINE,
    }
    return loader.load(
        "multi_policy_tiny",
        {**settings, "evaluation.prompts.limit": PROMPTS, "evaluation.max_concurrent": 3},
    )


def publish_scripted(run: ObjectStore, *versions: int) -> None:
    files = base_files(f"{__name__}:scripted")
    for place, policy in enumerate(("solver", "verifier")):
        for version in versions:
            publisher.publish(
                run,
                policy,
                version,
                tensors(10 * place + version),
                extra_files={} if version else files,
            )


def problems(config: RunConfig) -> list[tuple[str, int]]:
    """(id, sum) of every held-out problem."""
    assert config.evaluation is not None
    prompts = config.evaluation.prompts.stream().all(PROMPTS)
    return [(prompt.id, total(prompt.fields["question"])) for prompt in prompts]


def test_an_evaluation_uses_its_exact_versions_temperature_and_seed(
    memory_store: ObjectStore, played: RunConfig
) -> None:
    publish_scripted(memory_store, 0, 1, 2)
    evaluate_versions(memory_store, played, {"solver": 1, "verifier": 2})
    solver, verifier = RecordedEngine.made
    digests = [
        manifests.read_manifest(memory_store, *item).digest
        for item in (("solver", 1), ("verifier", 2))
    ]
    assert (solver.loaded, verifier.loaded) == ([(1, digests[0])], [(2, digests[1])])
    assert [(engine.closed, engine.capacity()) for engine in (solver, verifier)] == [
        (True, 3),
        (True, 3),
    ]
    first = {
        derived_seed(derived_seed(derived_seed(EVALUATION_SEED, place), 0), 0)
        for place in range(PROMPTS)
    }
    assert {params.seed for _, params in solver.asked} >= first
    for engine, tokens in ((solver, 44), (verifier, 52)):
        assert {(params.temperature, params.max_new_tokens) for _, params in engine.asked} == {
            (0.25, tokens)
        }


def test_each_evaluation_of_each_run_uses_the_same_random_numbers(
    memory_store: ObjectStore, played: RunConfig
) -> None:
    publish_scripted(memory_store, 0, 1)
    for version, config in ((0, played), (1, played.model_copy(update={"seed": 4}))):
        evaluate_versions(memory_store, config, {"solver": version, "verifier": 0})
    requested = [
        sorted((tokens, params.seed) for tokens, params in engine.asked)
        for engine in RecordedEngine.made
    ]
    assert requested[0] == requested[2]
    assert requested[1] == requested[3]


def test_first_attempts_and_final_answers_are_scored_and_failed_episodes_have_no_score(
    memory_store: ObjectStore, played: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_scripted(memory_store, 0)
    result = problems(played)
    assert {number % 2 for _, number in result} == {0, 1}  # otherwise the script would show nothing
    assert played.evaluation is not None
    question = played.evaluation.prompts.stream().all(PROMPTS)[2].fields["question"]
    monkeypatch.setattr(f"{__name__}.FAILS_ON", question)
    episodes: list[Episode] = []
    made = evaluate_versions(memory_store, played, {"solver": 0, "verifier": 0}, episodes.append)
    assert made.rows == tuple(name for name, _ in result)
    expected = [float(number % 2 == 0) for _, number in result]
    expected[2] = np.nan
    np.testing.assert_array_equal(made.first_attempt, np.array(expected, np.float32))
    final = [1.0] * PROMPTS
    final[2] = np.nan
    np.testing.assert_array_equal(made.final, np.array(final, np.float32))
    assert len(episodes) == PROMPTS
    assert sum(episode.error is not None for episode in episodes) == 1
    assert evaluations.scores(made) == (
        Accuracy("single_turn", float(np.nansum(expected)) / PROMPTS, PROMPTS),
        Accuracy("actor_and_verify", (PROMPTS - 1) / PROMPTS, PROMPTS),
    )
    stored = evaluations.read(memory_store, {"solver": 0, "verifier": 0})
    np.testing.assert_array_equal(stored.final, made.final)
    assert (stored.dataset, stored.workflow, dict(stored.versions)) == (
        "chained_addition",
        "actor_and_verify",
        {"solver": 0, "verifier": 0},
    )
    assert 0 <= stored.seconds <= stored.created_s


def test_the_same_problems_are_kept_of_every_evaluation_with_what_was_played(
    memory_store: ObjectStore, played: RunConfig
) -> None:
    publish_scripted(memory_store, 0, 1)
    assert played.evaluation is not None
    evaluated = played.evaluation.model_copy(update={"kept_episodes": 2})
    config = played.model_copy(update={"evaluation": evaluated})
    kept = []
    for versions in vectors(0, 1):
        assert evaluate_versions(memory_store, config, versions).num_kept == 2
        kept.append(evaluation_samples.read(memory_store, versions))
        assert evaluations.read(memory_store, versions).num_kept == 2
    first, second = kept
    names = [group.prompt.id for group in first.groups]
    assert [group.prompt.id for group in second.groups] == names
    assert set(names) < {name for name, _ in problems(config)}
    for sample, version in zip(kept, (0, 1), strict=True):
        for group in sample.groups:
            (episode,) = group.episodes
            assert episode.metrics["final"] == 1.0
            assert group.prompt.fields["question"]
            owners = [sequence.policies[sequence.owners.max()] for sequence in episode.sequences]
            assert owners[:2] == ["solver", "verifier"]
            for sequence in episode.sequences:
                assert set(sequence.versions.tolist()) == {-1, version}
                assert set(sequence.logprobs.tolist()) == {0.0, LOGPROB}


def test_an_evaluation_that_keeps_no_episode_writes_one_object(
    memory_store: ObjectStore, played: RunConfig
) -> None:
    publish_scripted(memory_store, 0)
    assert played.evaluation is not None
    evaluated = played.evaluation.model_copy(update={"kept_episodes": 0})
    config = played.model_copy(update={"evaluation": evaluated})
    (vector,) = vectors(0)
    assert evaluate_versions(memory_store, config, vector).num_kept == 0
    assert evaluation_samples.keys(memory_store) == []


@pytest.mark.parametrize("number", [-1, 201, True, 1.5])
def test_a_number_of_kept_episodes_out_of_bounds_is_refused(number: float) -> None:
    with pytest.raises(ConfigError, match="kept_episodes"):
        loader.load("multi_policy_tiny", {"evaluation.kept_episodes": number})
    config = loader.load("multi_policy_tiny", {"evaluation.kept_episodes": 200})
    assert config.evaluation is not None
    assert config.evaluation.kept_episodes == 200


def test_the_first_of_two_evaluations_of_one_vector_stays(
    memory_store: ObjectStore, played: RunConfig
) -> None:
    publish_scripted(memory_store, 0)
    (vector,) = vectors(0)
    first = evaluation(vector)
    evaluations.create(memory_store, first)
    assert evaluate_versions(memory_store, played, vector).rows == first.rows


def test_a_damaged_evaluation_of_the_vector_that_is_played_does_not_end_the_service(
    memory_store: ObjectStore, played: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    publish_scripted(memory_store, *range(0, played.steps + 1))

    def damaged(evaluate: Evaluate) -> Evaluate:
        def wrapped(versions: Mapping[str, int]) -> bool:
            if versions == vectors(0)[0]:
                memory_store.create(layout.evaluation(versions), b"damaged")
            return evaluate(versions)

        return wrapped

    follow(lifetime_of(memory_store, "evaluation"), played, damaged)
    due = [dict(versions) for versions in played.evaluated_versions()]
    assert len(due) > 1
    assert evaluations.read(memory_store, due[-1]).versions == due[-1]
    assert "is damaged: evals/solver-00000000_verifier-00000000.arrow" in caplog.text


def test_missing_or_damaged_versions_are_errors_and_the_engines_are_closed(
    memory_store: ObjectStore, played: RunConfig
) -> None:
    publish_scripted(memory_store, 0, 1)
    with pytest.raises(NotFoundError):
        evaluate_versions(memory_store, played, {"solver": 0, "verifier": 7})
    (data,) = [
        key
        for key in memory_store.list("weights/verifier/00000001")
        if key.endswith(".safetensors")
    ]
    memory_store.put(data, memory_store.get(data)[:-1])
    with pytest.raises(CorruptError):
        evaluate_versions(memory_store, played, {"solver": 0, "verifier": 1})
    assert [engine.closed for engine in RecordedEngine.made] == [True] * 4
    assert evaluations.keys(memory_store) == []


MANY = 60
"""Problems of which only a few are played at a time."""


@pytest.fixture
def played_in_turn(played: RunConfig) -> RunConfig:
    assert played.evaluation is not None
    prompts = played.evaluation.prompts.model_copy(update={"limit": MANY})
    evaluated = played.evaluation.model_copy(update={"prompts": prompts, "max_concurrent": 1})
    return played.model_copy(update={"evaluation": evaluated})


def test_a_running_evaluation_is_cancelled_at_a_stop_request(
    memory_store: ObjectStore, played_in_turn: RunConfig
) -> None:
    publish_scripted(memory_store, 0, 1, 2)
    stop = threading.Event()
    requested: list[Mapping[str, int]] = []

    def as_task(evaluate: Evaluate) -> Evaluate:
        def told_in_between(versions: Mapping[str, int]) -> bool:
            requested.append(dict(versions))
            if len(requested) == 2:
                stop.set()
            return evaluate(versions)

        return told_in_between

    lifetime = lifetime_of(memory_store, "evaluation", stop)
    follow(lifetime, played_in_turn, as_task)
    assert requested == vectors(0, 1)
    assert [evaluations.exists(memory_store, vector) for vector in vectors(0, 1, 2)] == [
        True,
        False,
        False,
    ]
    assert MANY < progress_of(lifetime.heartbeat.last, EvaluationProgress).episodes < 2 * MANY


def test_a_running_evaluation_is_cancelled_when_the_run_stops(
    memory_store: ObjectStore, played_in_turn: RunConfig
) -> None:
    publish_scripted(memory_store, 0, 1, 2)
    ticks = count()
    heartbeat_writer = heartbeat_writer_of(memory_store, "evaluation")
    lifetime = Lifetime(
        memory_store, heartbeat_writer, threading.Event(), clock=lambda: float(next(ticks))
    )

    def as_task(evaluate: Evaluate) -> Evaluate:
        runs.request_stop(memory_store, Stop("cancelled", "enough", 1.0))
        return evaluate

    follow(lifetime, played_in_turn, as_task)
    assert evaluations.keys(memory_store) == []
    assert 0 < progress_of(lifetime.heartbeat.last, EvaluationProgress).episodes < MANY
    assert CHECK_INTERVAL_S < 5.0  # a long evaluation stops soon


def test_an_evaluation_without_its_gpu_plays_nothing_and_can_be_stopped(
    memory_store: ObjectStore, played: RunConfig, tmp_path: Path
) -> None:
    publish_scripted(memory_store, 0, 1, 2)
    engine = played.rollout.engine.model_copy(update={"device": "cuda"})
    rollout = played.rollout.model_copy(update={"engine": engine})

    def on_wait(_seconds: float) -> bool:
        return lifetime.heartbeat.last.wait_reason is WaitReason.GPU

    lifetime = ScriptedLifetime(memory_store, "evaluation", on_wait)
    with busy_gpu(tmp_path):
        follow(lifetime, played.model_copy(update={"rollout": rollout}))
    assert RecordedEngine.made == []


def test_the_heartbeat_names_the_versions_in_evaluation(
    memory_store: ObjectStore, played: RunConfig
) -> None:
    publish_scripted(memory_store, 0, 1, 2)
    lifetime = lifetime_of(memory_store, "evaluation")
    messages: list[tuple[str, str, dict[str, int]]] = []

    def as_task(evaluate: Evaluate) -> Evaluate:
        heartbeat = lifetime.heartbeat.last
        messages.append((heartbeat.state, heartbeat.note, dict(heartbeat.versions)))
        return evaluate

    follow(lifetime, played, as_task)
    assert messages == [
        (
            "working",
            f"evaluating solver {version}, verifier {version}",
            {"solver": version, "verifier": version},
        )
        for version in range(3)
    ]
    assert progress_of(lifetime.heartbeat.last, EvaluationProgress).episodes == 3 * PROMPTS


def test_a_vector_is_waited_for_until_all_its_versions_exist(
    memory_store: ObjectStore, config: RunConfig
) -> None:
    publish(memory_store, 0)
    publisher.publish(memory_store, "solver", 1, tensors(1))
    player = Player(memory_store)

    def on_wait(seconds: float) -> bool:
        """The verifier's version is published in the second pause; the service must stop in the
        fourth.
        """
        assert lifetime.heartbeat.last.state == "waiting"
        if len(lifetime.waits_s) == 2:
            assert player.asked == vectors(0)
            publisher.publish(memory_store, "verifier", 1, tensors(1))
        return len(lifetime.waits_s) == 4

    lifetime = ScriptedLifetime(memory_store, "evaluation", on_wait)
    follow(lifetime, config, player.as_task)
    assert player.asked == vectors(0, 1)
    assert lifetime.waits_s == [evaluation_module.POLL_INTERVAL_S] * 4


def test_an_evaluation_waits_for_an_unreachable_store_and_can_be_stopped_meanwhile(
    memory_store: ObjectStore, config: RunConfig
) -> None:
    publish(memory_store, 0)
    flicker = OutageBackend(memory_store.backend)
    unreachable = replace(memory_store, backend=flicker, patience_s=1e-6)
    player = Player(memory_store)

    notes: list[str] = []

    class Pauses(threading.Event):
        """Pauses take no time. The store is reachable again at the second one, and unreachable at
        the third.
        """

        pauses_s: list[float] = []

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            self.pauses_s.append(timeout)
            notes.append(lifetime.heartbeat.last.note)
            match len(self.pauses_s):
                case 2:
                    flicker.down.clear()
                case 3:
                    flicker.down.set()
                case 4:
                    self.set()
            return self.is_set()

    flicker.down.set()
    stop = Pauses()
    heartbeat_writer = heartbeat_writer_of(unreachable, "evaluation")
    lifetime = Lifetime(unreachable, heartbeat_writer, stop, clock=lambda: sum(stop.pauses_s))
    follow(lifetime, config, player.as_task)
    assert player.asked == vectors(0)
    assert stop.pauses_s == [0.5, 1.0, evaluation_module.POLL_INTERVAL_S, 0.5]
    assert notes[1::2] == [
        "looking for versions failed and is retried in 1 s: the store is away",
        "looking for versions failed and is retried in 0.5 s: the store is away",
    ]


def test_the_duration_of_an_evaluation_is_valid_when_the_clock_is_set_back(
    memory_store: ObjectStore, played: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_scripted(memory_store, 0)
    times = count(1_800_000_000, -60)
    monkeypatch.setattr("tasks.evaluation.time.time", lambda: float(next(times)))
    evaluate_versions(memory_store, played, {"solver": 0, "verifier": 0})
    stored = evaluations.read(memory_store, {"solver": 0, "verifier": 0})
    assert 0 <= stored.seconds < 600


def test_no_prompt_is_made_of_an_evaluation_that_is_too_large(
    memory_store: ObjectStore, played: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: object) -> Prompt:
        raise AssertionError("a prompt was made")

    assert played.evaluation is not None
    prompts = played.evaluation.prompts.model_copy(update={"limit": 100_001})
    evaluation = played.evaluation.model_copy(update={"prompts": prompts})
    monkeypatch.setattr("data_ops.prompts.builtin.problem", make)
    with pytest.raises(ConfigError, match="has 100,001 prompts, and at most 100,000 are played"):
        evaluate_versions(
            memory_store, played.model_copy(update={"evaluation": evaluation}), {"solver": 0}
        )


def test_an_evaluation_of_a_data_window_plays_the_frozen_rows(
    memory_store: ObjectStore, played: RunConfig
) -> None:
    assert played.evaluation is not None
    rows = played.evaluation.prompts.stream().all(3)
    window = WindowPrompts(window=DataWindow(files=["/absent/*.jsonl"]))
    evaluation_config = played.evaluation.model_copy(update={"prompts": window})
    config = played.model_copy(update={"evaluation": evaluation_config})
    frozen = {
        "data.prompts": frozen_window(memory_store, "one", rows[:1]),
        "evaluation.prompts": frozen_window(memory_store, "one", rows[1:]),
    }
    run = runs.create_run(memory_store, "one", {}, windows=frozen)
    publish_scripted(run, 0)
    stored = evaluate_versions(run, config, {"solver": 0, "verifier": 0})
    assert stored.rows == tuple(prompt.id for prompt in rows[1:])
