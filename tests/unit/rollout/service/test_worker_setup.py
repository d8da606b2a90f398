import pytest

from rollout.config import EngineConfig, RolloutConfig, WorkflowConfig
from rollout.service.worker_setup import end_reason
from storage.errors import ConfigError
from storage.records.control import Stop
from storage.run import orders, runs
from storage.store.object_store import ObjectStore
from tests.support.patience import until
from tests.support.runs.fakes import publish_base
from tests.support.runs.workers import RunningWorker, answered, config, write_orders

OVER = Stop("completed", "all steps done", 0.0)


def test_a_worker_waits_for_the_base_models(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, config()) as worker:
        until(lambda: worker.beat.note == "waits for the base model of solver")
        publish_base(memory_store, ["solver"])
        until(answered(memory_store, 1))
        worker.stop()
        worker.join()


def test_a_worker_leaves_while_it_waits_for_the_base_models(memory_store: ObjectStore) -> None:
    with RunningWorker(memory_store, config()) as worker:
        until(lambda: worker.beat.state == "waiting")
        worker.stop()
        worker.join()


def test_no_worker_is_needed_once_the_run_ended_or_the_last_shard_was_made(
    memory_store: ObjectStore,
) -> None:
    assert end_reason(memory_store) == ""
    orders.create_end(memory_store, 4)
    assert end_reason(memory_store) == "the dataflow needs no further shard"
    runs.request_stop(memory_store, OVER)
    assert end_reason(memory_store) == "the run is completed: all steps done"


def test_a_recipe_that_cannot_work_is_refused_before_anything_starts(
    memory_store: ObjectStore,
) -> None:
    wrong = RolloutConfig(
        workflow=WorkflowConfig(name="debate"),
        engine=EngineConfig(name="tests.support.runs.fakes:ScriptedEngine"),
    )
    with RunningWorker(memory_store, wrong) as worker, pytest.raises(ConfigError, match="debate"):
        worker.join()
