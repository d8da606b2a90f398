import json
import uuid

import pytest

from storage import layout
from storage.run import evaluations
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from tasks.events import run_events
from tasks.events.run_events import OVERLAP, EventQueue, body
from tests.support.runs.builders import tensors
from tests.support.runs.evaluations import evaluation
from tests.support.stores.hiding_store import hides


def _told(queue: EventQueue) -> list[tuple[str, object]]:
    """(name, what it is about) of the waiting events, which then count as sent."""
    events = queue.waiting()
    queue.sent(events)
    return [
        (each.name, each.payload.get("version", each.payload.get("versions"))) for each in events
    ]


def _publish(run: ObjectStore, *versions: int) -> None:
    for version in versions:
        publisher.publish(run, "solver", version, tensors(version))


def _evaluate(run: ObjectStore, version: int) -> None:
    evaluations.create(run, evaluation({"solver": version}))


def test_versions_and_evaluations_are_announced_once_and_version_0_is_not(
    memory_store: ObjectStore,
) -> None:
    queue = EventQueue(memory_store, ["solver"])
    queue.look()
    assert _told(queue) == []
    _publish(memory_store, 0, 1, 2)
    _evaluate(memory_store, 0)
    queue.look()
    assert _told(queue) == [
        ("version.published", 1),
        ("version.published", 2),
        ("evaluation.done", {"solver": 0}),
    ]
    _publish(memory_store, 3)
    _evaluate(memory_store, 2)
    queue.look()
    queue.look()
    assert _told(queue) == [("version.published", 3), ("evaluation.done", {"solver": 2})]


def test_evaluations_after_a_strangers_key_that_sorts_last_are_announced(
    memory_store: ObjectStore,
) -> None:
    queue = EventQueue(memory_store, ["solver"])
    memory_store.put("evals/zzz.arrow", b"x")
    for version in (0, 1):
        _evaluate(memory_store, version)
        queue.look()
        assert _told(queue) == [("evaluation.done", {"solver": version})]


def test_a_new_supervisor_announces_the_last_ones_again_with_the_same_ids(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events, "OVERLAP", 2)
    _publish(memory_store, 0, 1, 2, 3)
    for version in (0, 1, 3):
        _evaluate(memory_store, version)
    first, second = (EventQueue(memory_store, ["solver"]) for _ in range(2))
    first.look()
    second.look()
    ids = [each.id(memory_store) for each in first.waiting()]
    assert [each.id(memory_store) for each in second.waiting()] == ids
    assert len(set(ids)) == 4
    assert _told(second) == [
        ("version.published", 2),
        ("version.published", 3),
        ("evaluation.done", {"solver": 1}),
        ("evaluation.done", {"solver": 3}),
    ]
    assert OVERLAP > 2


def test_a_damaged_manifest_is_passed_over(memory_store: ObjectStore) -> None:
    _publish(memory_store, 0)
    key = layout.manifest(layout.weights("solver", 1))
    memory_store.create(key, b"damaged")
    queue = EventQueue(memory_store, ["solver"])
    queue.look()
    assert _told(queue) == []
    assert manifests.exists(memory_store, "solver", 1)


def test_a_manifest_that_cannot_be_read_hides_no_other_event(memory_store: ObjectStore) -> None:
    _publish(memory_store, 0, 1, 2)
    publisher.publish(memory_store, "verifier", 0, tensors(0))
    publisher.publish(memory_store, "verifier", 1, tensors(1))
    _evaluate(memory_store, 0)
    hidden = layout.manifest(layout.weights("solver", 1))
    queue = EventQueue(hides(memory_store, hidden), ["solver", "verifier"])
    queue.look()
    assert _told(queue) == [
        ("version.published", 2),
        ("version.published", 1),
        ("evaluation.done", {"solver": 0}),
    ]


def test_the_oldest_events_are_dropped_when_prefect_takes_none(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_events, "QUEUE_MAX", 2)
    queue = EventQueue(memory_store, [])
    for number in range(4):
        queue.add("member.lost", str(number))
    assert [each.key for each in queue.waiting()] == ["member.lost/2", "member.lost/3"]
    assert caplog.text.count("does not take events") == 1


def test_an_event_has_the_run_as_resource_and_its_supervisor_as_related(
    memory_store: ObjectStore,
) -> None:
    queue = EventQueue(memory_store, [])
    queue.add("member.lost", "trainer-solver/2", 1700000000.25, member="trainer-solver")
    (event,) = queue.waiting()
    told = body(event, memory_store, "tiny-1", "5f")
    assert json.loads(json.dumps(told)) == {
        "id": str(event.id(memory_store)),
        "occurred": "2023-11-14T22:13:20.250000+00:00",
        "event": "astraflow.member.lost",
        "resource": {
            "prefect.resource.id": "astraflow.run.tiny-1",
            "prefect.resource.name": "tiny-1",
        },
        "related": [
            {
                "prefect.resource.id": "prefect.flow-run.5f",
                "prefect.resource.role": "flow-run",
            }
        ],
        "payload": {"run": "tiny-1", "member": "trainer-solver"},
    }
    assert body(event, memory_store, "tiny-1", "")["related"] == []
    assert event.id(memory_store) != event.id(memory_store.sub("other"))
    assert isinstance(event.id(memory_store), uuid.UUID)


def test_an_evaluation_tells_its_accuracies(memory_store: ObjectStore) -> None:
    _evaluate(memory_store, 1)
    queue = EventQueue(memory_store, [])
    queue.look()
    (event,) = queue.waiting()
    assert event.payload == {
        "versions": {"solver": 1},
        "dataset": "held_out",
        "accuracy": {"single_turn": 0.5, "actor_and_verify": 1.0},
    }
    assert event.occurred_s == 1.0
    json.dumps(body(event, memory_store, "r", ""), allow_nan=False)
