import fcntl
import json
import os
from pathlib import Path

import pytest

from storage.coordination.gpus_of_service import gpus_of_service
from storage.machine import gpu_locks
from storage.records.control import ServiceState, WaitReason
from storage.store.object_store import ObjectStore
from tests.support.runs.busy_gpus import held_by_another
from tests.support.runs.lifetimes import ScriptedLifetime


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "gpus").mkdir(mode=0o700)
    return tmp_path / "gpus"


def test_a_service_waits_for_its_gpu_and_says_who_uses_it(
    memory_store: ObjectStore, folder: Path
) -> None:
    beats = []

    def look(_: float) -> None:
        beats.append(lifetime.heartbeat.last)
        if len(beats) == 2:
            fcntl.flock(theirs, fcntl.LOCK_UN)

    lifetime = ScriptedLifetime(memory_store.sub("runs/tiny-1"), "rollout", look)
    lifetime.heartbeat.update(state=ServiceState.WORKING, note="as before")
    with held_by_another(folder, 1) as theirs, gpus_of_service(lifetime, [0, 1], 1.0) as are_held:
        assert are_held
        assert len(gpu_locks.descriptors()) == 2
    assert [(beat.state, beat.wait_reason) for beat in beats] == [
        (ServiceState.WAITING, WaitReason.GPU)
    ] * 2
    assert beats[0].note.startswith(
        "GPU 1 (1) is used by trainer-solver of runs/tiny-1 (process 4711 "
    )
    last = lifetime.heartbeat.last
    assert (last.state, last.wait_reason, last.note) == ("working", "", "as before")
    assert gpu_locks.descriptors() == ()


def test_a_service_that_must_stop_gets_no_gpu(memory_store: ObjectStore, folder: Path) -> None:
    lifetime = ScriptedLifetime(memory_store, "trainer", lambda _: True)
    with held_by_another(folder, 0), gpus_of_service(lifetime, [0], 1.0) as are_held:
        assert not are_held
    assert lifetime.waits_s == [2.0]


def test_the_record_names_the_service_and_its_run(memory_store: ObjectStore, folder: Path) -> None:
    lifetime = ScriptedLifetime(memory_store.sub("runs/tiny-1"), "trainer", lambda _: True)
    with gpus_of_service(lifetime, [3], 0.25):
        (path,) = folder.glob("3.*")
        assert json.loads(path.read_text()) == {
            "holder": "trainer of runs/tiny-1", "pid": os.getpid(), "share": 0.25
        }  # fmt: skip


def test_an_error_of_the_block_frees_the_gpus(memory_store: ObjectStore) -> None:
    lifetime = ScriptedLifetime(memory_store, "trainer", lambda _: True)
    with pytest.raises(ValueError, match="mine"), gpus_of_service(lifetime, [0], 1.0):
        raise ValueError("mine")
    assert gpu_locks.descriptors() == ()
