"""A service as the body of a flow: its heartbeat, how it stops, and errors that fail the run."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from uuid import uuid4

import pytest
from prefect.exceptions import TerminationSignal

from storage import layout
from storage.coordination import heartbeats
from storage.coordination.machine_monitor import MachineMonitor
from storage.errors import ConfigError
from storage.records.control import Stop
from storage.records.machine_use import MachineUse
from storage.run import orders, runs
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests, publisher, replication
from tasks.recipes import loader
from tasks.services import parallel_ingest, run_service, sigterm
from tests.support.patience import PATIENCE_S
from tests.support.runs import builders
from tests.support.runs.builders import tensors


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The run `r` of the default recipe, in the store of the environment."""
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path))
    return runs.create_run(
        open_store(str(tmp_path)), "r", loader.load("multi_policy_tiny").model_dump(mode="json")
    )


def test_a_config_error_fails_the_run_immediately_with_its_message(
    run: ObjectStore,
) -> None:
    with pytest.raises(ConfigError):
        run_service.run_trainer("r", "trainer-nobody", 0, "nobody")
    stop = runs.read_stop(run)
    assert stop is not None
    assert stop.state == "failed"
    assert stop.reason == "trainer-nobody: run r has no policy 'nobody'; it has solver, verifier"
    (beat,) = heartbeats.readable(run)
    assert (beat.kind, beat.id, beat.attempt, beat.state) == (
        "trainer",
        "trainer-nobody",
        0,
        "failed",
    )


def test_services_get_the_sizes_of_the_recipe(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, int] = {}
    monkeypatch.setattr(
        "rollout.service.worker_setup.work", lambda *_, **sizes: given.update(sizes)
    )
    monkeypatch.setattr("trainer.service.trainer.train", lambda *_, **sizes: given.update(sizes))
    run_service.run_rollout("r", "rollout-us-east-0", 0, "us-east")
    run_service.run_trainer("r", "trainer-solver", 0, "solver")
    config = loader.load("multi_policy_tiny")
    assert given == {
        "episodes_max": config.data.prompts_per_order * config.data.samples_per_prompt,
        "batch_size": config.policies["solver"].batch_size,
        "max_tokens": config.rollout.engine.max_tokens,
    }


def test_the_heartbeat_of_a_service_has_what_its_machine_has_in_use(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = MachineUse(cpu_percent=37.5, memory_bytes=1.0, memory_total_bytes=2.0)
    monkeypatch.setattr(MachineMonitor, "last", lambda monitor: use)
    runs.request_stop(run, Stop("cancelled", "enough", 1.0))
    run_service.run_evaluation("r", "evaluation", 0)
    assert [beat.machine for beat in heartbeats.readable(run)] == [use]


def test_a_service_logs_its_process_and_its_last_progress(
    run: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    runs.request_stop(run, Stop("cancelled", "enough", 1.0))
    run_service.run_evaluation("r", "evaluation", 3)
    first, *_, last = caplog.messages
    assert first == f"attempt 3 runs on {socket.gethostname()}, pid {os.getpid()}"
    assert last.startswith("done; 0 episodes, waited ")


def test_a_recipe_with_the_log_level_warning_has_no_lines_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path))
    quiet = loader.load("multi_policy_tiny", {"log_level": "WARNING"}).model_dump(mode="json")
    run = runs.create_run(open_store(str(tmp_path)), "quiet", quiet)
    runs.request_stop(run, Stop("cancelled", "enough", 1.0))
    run_service.run_evaluation("quiet", "evaluation", 3)
    assert caplog.messages == []


@pytest.mark.parametrize("node", [0, 2])
def test_a_node_that_the_trainer_does_not_have_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path))
    config = loader.load("single_policy_tiny", {"policies.solver.train.nodes": 2})
    run = runs.create_run(open_store(str(tmp_path)), "r", config.model_dump(mode="json"))
    with pytest.raises(ConfigError, match=f"the trainer of solver in run r has no node {node}"):
        run_service.run_trainer_node("r", f"trainer-solver-node-{node}", 0, "solver", node)
    stop = runs.read_stop(run)
    assert stop is not None
    assert stop.state == "failed"


@pytest.mark.parametrize("end", ["stopped", "done"])
def test_a_node_ends_with_its_run_or_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path))
    nodes = {"steps": 1, "policies.solver.train.nodes": 2}
    config = loader.load("multi_policy_tiny", nodes)
    run = runs.create_run(open_store(str(tmp_path)), "r", config.model_dump(mode="json"))
    if end == "stopped":
        runs.request_stop(run, Stop("cancelled", "enough", 1700000000.0))
    for version in (0, 1) if end == "done" else ():  # the last checkpoint ends the work
        publisher.publish(run, "solver", version, tensors(version))
        builders.checkpoint(run, "solver", version)
    assert run_service.run_trainer_node("r", "trainer-solver-node-1", 0, "solver", 1) is None
    (beat,) = heartbeats.readable(run)
    assert (beat.kind, beat.id, beat.state) == ("trainer_node", "trainer-solver-node-1", "done")


def test_a_folder_in_place_of_a_heartbeat_fails_the_run_immediately_and_is_named(
    run: ObjectStore,
) -> None:
    run.put("heartbeats/evaluation/evaluation.json/x", b"")
    with pytest.raises(ConfigError):
        run_service.run_evaluation("r", "evaluation", 0)
    stop = runs.read_stop(run)
    assert stop is not None
    assert stop.state == "failed"
    assert stop.reason.startswith(
        "evaluation: cannot write the heartbeat heartbeats/evaluation/evaluation.json: /"
    )
    assert stop.reason.endswith(
        "a file is where a folder belongs, or the reverse; "
        "correct that, then start the run again with the same run id"
    )


def test_a_service_of_a_stopped_run_returns_with_the_heartbeat_state_done(
    run: ObjectStore,
) -> None:
    runs.request_stop(run, Stop("cancelled", "enough", 1.0))
    assert run_service.run_evaluation("r", "evaluation", 3) is None
    (beat,) = heartbeats.readable(run)
    assert (beat.id, beat.attempt, beat.state) == ("evaluation", 3, "done")


@pytest.mark.parametrize(
    "serve",
    [run_service.run_evaluation, run_service.run_dataflow_window, run_service.run_base_model],
)
def test_an_attempt_with_a_live_successor_stops_as_on_sigterm(
    serve: Callable[[str, str, int], object], run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sigterm, "is_being_cancelled", lambda: False)
    kind = serve.__name__.removeprefix("run_").removesuffix("_window")
    successor = heartbeats.encode(
        builders.heartbeat(kind, kind, attempt=4, beats=9)  # type: ignore[arg-type]  # one of them
    )
    run.put(layout.heartbeat(kind, kind), successor)
    deadline = threading.Timer(
        PATIENCE_S, runs.request_stop, (run, Stop("failed", "it does not leave", 1.0))
    )
    deadline.start()
    if serve is run_service.run_dataflow_window:
        assert serve("r", kind, 3) == "stopped"
    else:
        with pytest.raises(TerminationSignal):
            serve("r", kind, 3)
    deadline.cancel()
    assert run.get(layout.heartbeat(kind, kind)) == successor


def test_a_window_of_the_dataflow_ends_after_its_share_of_tasks(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_ingest, "TASKS_PER_WINDOW_MAX", 0)
    assert run_service.run_dataflow_window("r", "dataflow", 0) == "full"
    (beat,) = heartbeats.readable(run)
    assert (beat.state, beat.note) == ("done", "the next window begins")


def test_a_worker_returns_after_the_last_shard_of_its_run(run: ObjectStore) -> None:
    orders.create_end(run, 4)
    deadline = threading.Timer(
        PATIENCE_S, runs.request_stop, (run, Stop("failed", "it does not stop", 1.0))
    )
    deadline.start()
    assert run_service.run_rollout("r", "rollout-us-east-0", 0, "us-east") is None
    deadline.cancel()
    (beat,) = heartbeats.readable(run)
    assert (beat.state, beat.note) == ("done", "the dataflow needs no further shard")


@pytest.mark.parametrize("state", [None, "completed"])
def test_a_mirror_stops_after_the_last_version_even_after_the_runs_end(
    state: Literal["completed"] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "home"))
    mirror = f"memory://{uuid4().hex}"
    config = loader.load(
        "single_policy_tiny", {"steps": 2, "rollout.regions.us-east.mirror": mirror}
    )
    run = runs.create_run(open_store(str(tmp_path / "home")), "r", config.model_dump(mode="json"))
    for version in range(2):
        publisher.publish(run, "solver", version, tensors(version))
    if state is not None:
        runs.request_stop(run, Stop(state, "all policies reached version 2", 1.0))
    last = threading.Timer(1.0, publisher.publish, (run, "solver", 2, tensors(2)))
    last.start()
    assert run_service.run_mirror("r", "mirror-us-east", 0, "us-east") is None
    last.join()
    assert manifests.latest(replication.of_run(run, mirror), "solver") == 2


def test_a_mirror_of_a_cancelled_run_stops_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "home"))
    config = loader.load(
        "single_policy_tiny", {"rollout.regions.us-east.mirror": str(tmp_path / "mirror")}
    )
    run = runs.create_run(open_store(str(tmp_path / "home")), "r", config.model_dump(mode="json"))
    runs.request_stop(run, Stop("cancelled", "enough", 1.0))
    assert run_service.run_mirror("r", "mirror-us-east", 0, "us-east") is None
