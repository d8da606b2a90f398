"""What surrounds a service: its heartbeat, and what becomes of a run that only a person can mend."""

from pathlib import Path

import pytest

from storage import heartbeats, runs
from storage.errors import ConfigError
from storage.objects import ObjectStore, open_store
from storage.records import Stop
from tasks import recipes, services


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The run `r` of the default recipe, in the store that the environment names."""
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path))
    return runs.create_run(open_store(str(tmp_path)), "r", recipes.load("multi_policy_tiny").model_dump(mode="json"))


def test_what_only_a_person_can_mend_fails_the_run_at_once_with_the_sentence_that_says_how(run: ObjectStore) -> None:
    with pytest.raises(ConfigError):
        services.run_trainer("r", "trainer-nobody", 0, "nobody")
    stop = runs.read_stop(run)
    assert stop is not None
    assert stop.state == "failed"
    assert stop.reason == "trainer-nobody: run r has no policy 'nobody'; it has solver, verifier"
    (beat,) = heartbeats.read_all(run)
    assert (beat.kind, beat.id, beat.attempt, beat.state) == ("trainer", "trainer-nobody", 0, "failed")


def test_a_service_of_a_stopped_run_returns_and_its_heartbeat_says_so(run: ObjectStore) -> None:
    runs.request_stop(run, Stop("cancelled", "enough", 1.0))
    assert services.run_evaluation("r", "evaluation", 3) is None
    (beat,) = heartbeats.read_all(run)
    assert (beat.id, beat.attempt, beat.state) == ("evaluation", 3, "done")
