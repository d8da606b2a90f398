"""The checkpoint that a trainer would resume from is read; of older ones every file exists."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from storage import layout
from storage.run import checkpoints
from storage.run.checkpoints import CheckpointState
from storage.run.runs import create_run
from storage.store.object_store import ObjectStore
from storage.verify.verify import verify
from tasks.recipes.run_terms import run_terms
from tests.support.runs.builders import tensors
from tests.support.stores.stranger import sealed

CONFIG = {"steps": 0, "policies": {"solver": {"batch_size": 4}}, "data": {"max_staleness": 8}}


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    run = create_run(memory_store, "r", CONFIG)
    for step in (2, 4, 6):
        save(run, step)
    return run


def save(run: ObjectStore, step: int) -> None:
    checkpoints.save(run, "solver", step, tensors(step), CheckpointState({}, 0.0))


def data_file(run: ObjectStore, step: int) -> str:
    (key,) = (key for key in run.list(layout.checkpoint("solver", step)) if "model-00000" in key)
    return key


def change(run: ObjectStore, step: int) -> str:
    """Change the last byte of a checkpoint's data; return the key of its manifest."""
    body = run.get(data_file(run, step))
    run.put(data_file(run, step), body[:-1] + bytes([body[-1] ^ 1]))
    return layout.manifest(layout.checkpoint("solver", step))


def damaged(run: ObjectStore) -> list[str]:
    return [found.where for found in verify(run, run_terms(run)).violations]


def test_undamaged_checkpoints_are_no_violation(run: ObjectStore) -> None:
    assert damaged(run) == []


def test_a_changed_byte_of_the_newest_checkpoint_is_listed(run: ObjectStore) -> None:
    key = change(run, 6)
    assert damaged(run) == [key]


def test_a_truncated_file_of_the_newest_checkpoint_is_listed(run: ObjectStore) -> None:
    run.put(data_file(run, 6), run.get(data_file(run, 6))[:-1])
    assert damaged(run) == [layout.manifest(layout.checkpoint("solver", 6))]


def test_a_tensor_that_is_not_the_one_listed_is_reported(run: ObjectStore) -> None:
    key = layout.manifest(layout.checkpoint("solver", 6))
    manifest = json.loads(run.get(key))
    manifest["tensors"]["model.scale"]["digest"] = "xxh3_128:" + "0" * 32
    run.put(key, sealed(manifest))
    assert damaged(run) == [key]


def test_the_checkpoint_before_a_damaged_one_is_read_too(run: ObjectStore) -> None:
    assert damaged(run) == []
    keys = [change(run, 4), change(run, 6)]
    assert damaged(run) == keys


def test_the_files_of_checkpoints_that_no_resume_reads_are_not_read(run: ObjectStore) -> None:
    change(run, 4)
    assert damaged(run) == []
    run.delete(data_file(run, 2))
    assert damaged(run) == [layout.manifest(layout.checkpoint("solver", 2))]


@pytest.mark.parametrize("again", [True, False])
def test_a_checkpoint_that_a_trainer_deletes_or_replaces_meanwhile_is_no_violation(
    run: ObjectStore, again: bool
) -> None:
    change(run, 6)

    def trainer() -> None:
        checkpoints.delete(run, "solver", 6)
        if again:
            save(run, 6)

    during = replace(run, backend=_Meanwhile(run.backend, data_file(run, 6), trainer))
    assert damaged(during) == []


class _Meanwhile:
    """A backend that calls `act` after the first read of one key."""

    def __init__(self, inner: Any, key: str, act: Callable[[], None]) -> None:
        self._inner, self._key, self._acts = inner, key, [act]

    def read(self, key: str) -> bytes:
        body: bytes = self._inner.read(key)
        if key.endswith(self._key) and self._acts:
            self._acts.pop()()
        return body

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
