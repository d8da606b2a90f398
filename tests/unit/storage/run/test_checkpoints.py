import json
from dataclasses import replace

import pytest

from storage.errors import ConflictError, CorruptError, NotFoundError, TransientError
from storage.run import checkpoints
from storage.run.checkpoints import CheckpointState
from storage.store.object_store import ObjectStore
from tests.support.runs import builders
from tests.support.stores.stranger import sealed


def state(step: int) -> CheckpointState:
    return CheckpointState({"rng": [1, 2**64 - 1], "name": "ä"}, 3.0 * step)


def save(store: ObjectStore, step: int) -> None:
    checkpoints.save(
        store,
        "solver",
        step,
        builders.tensors(step),
        state(step),
    )


def newest_step(store: ObjectStore) -> int:
    newest = checkpoints.newest(store, "solver")
    assert newest is not None
    return newest.step


def test_a_saved_checkpoint_is_loaded_unchanged(memory_store: ObjectStore) -> None:
    save(memory_store, 10)
    tensors, loaded = checkpoints.load(memory_store, "solver", 10)
    assert tensors["model.weight"].bits.tolist() == [[10, 11, 12], [13, 14, 15]]
    assert loaded == CheckpointState({"rng": [1, 2**64 - 1], "name": "ä"}, 30.0)


def test_the_newest_is_the_last_complete_checkpoint(memory_store: ObjectStore) -> None:
    assert checkpoints.newest(memory_store, "solver") is None
    for step in (10, 20, 30):
        save(memory_store, step)
    memory_store.delete("checkpoints/solver/00000030/manifest.json")
    assert newest_step(memory_store) == 20
    assert checkpoints.newest(memory_store, "verifier") is None


def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(memory_store: ObjectStore) -> None:
    for step in (10, 20):
        save(memory_store, step)
    (data,) = (
        key
        for key in memory_store.list("checkpoints/solver/00000020")
        if key.endswith(".safetensors")
    )
    memory_store.put(data, b"torn")
    newest = checkpoints.newest(memory_store, "solver")
    assert newest is not None
    assert (newest.step, newest.state.tokens_trained, newest.damaged) == (10, 30.0, {20})
    memory_store.put("checkpoints/solver/00000010/manifest.json", b"torn")
    with pytest.raises(
        CorruptError,
        match=r"no checkpoint of solver can be read: .*checkpoints/solver/00000020/.*; put the file "
        r"back, or delete memory://.*/checkpoints/solver: the trainer then repeats every step",
    ):
        checkpoints.newest(memory_store, "solver")


def test_a_checkpoint_that_lists_no_tensors_is_skipped_for_the_previous_one(
    memory_store: ObjectStore,
) -> None:
    for step in (10, 20):
        save(memory_store, step)
    key = "checkpoints/solver/00000020/manifest.json"
    fields = json.loads(memory_store.get(key)) | {"tensors": {}, "files": []}
    memory_store.put(key, sealed(fields))
    assert newest_step(memory_store) == 10
    with pytest.raises(CorruptError, match=rf"^{key} lists no tensors$"):
        checkpoints.read_manifest(memory_store, "solver", 20)


def test_a_checkpoint_without_its_data_is_skipped_for_the_previous_one(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        save(memory_store, step)
    (data,) = [
        key for key in memory_store.list("checkpoints/solver/00000020") if "model-00000" in key
    ]
    checkpoints.check_complete(memory_store, "solver", 20)
    memory_store.delete(data)
    with pytest.raises(CorruptError, match=f"{data} is missing, though its manifest lists it"):
        checkpoints.check_complete(memory_store, "solver", 20)
    with pytest.raises(NotFoundError):
        checkpoints.check_complete(memory_store, "solver", 30)
    assert newest_step(memory_store) == 10
    assert "checkpoint of step 20 of solver is damaged, an older one is tried" in caplog.text


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, "state.engine: Field required; state.tokens_trained: Field required"),
        ({"engine": {}}, "state.tokens_trained: Field required"),
        ({"engine": [], "tokens_trained": 1.0}, "state.engine: Input should be an object"),
        (
            {"engine": {}, "tokens_trained": "NaN"},
            "state.tokens_trained: Input should be a valid number",
        ),
        (
            {"engine": {}, "tokens_trained": []},
            "state.tokens_trained: Input should be a valid number",
        ),
        (
            {"engine": {}, "tokens_trained": -5.0},
            "state.tokens_trained: Input should be greater than or equal to 0",
        ),
        (
            {"engine": {}, "tokens_trained": 1e300},
            "state.tokens_trained: Input should be less than or equal to",
        ),
    ],
)
def test_a_checkpoint_with_a_state_of_another_form_is_corrupt(
    memory_store: ObjectStore, fields: dict[str, object], fault: str
) -> None:
    save(memory_store, 10)
    save(memory_store, 20)
    key = "checkpoints/solver/00000020/manifest.json"
    memory_store.put(key, sealed({**json.loads(memory_store.get(key)), "state": fields}))
    with pytest.raises(CorruptError, match=f"{key} is not a CheckpointManifest: {fault}"):
        checkpoints.load(memory_store, "solver", 20)
    assert newest_step(memory_store) == 10


def test_the_second_writer_of_a_checkpoint_loses(memory_store: ObjectStore) -> None:
    save(memory_store, 10)
    with pytest.raises(ConflictError):
        save(memory_store, 10)


def test_prune_keeps_the_newest_and_deletes_all_others(memory_store: ObjectStore) -> None:
    for step in (10, 20, 30, 40):
        save(memory_store, step)
    memory_store.delete("checkpoints/solver/00000010/manifest.json")  # as left by a killed writer
    checkpoints.prune(memory_store, "solver", keep=2, newest_step=40)
    left = {key.split("/")[2] for key in memory_store.list("checkpoints/solver")}
    assert left == {"00000030", "00000040"}
    assert checkpoints.load(memory_store, "solver", 30)[1].tokens_trained == 90.0


def test_prune_keeps_incomplete_newer_checkpoints(memory_store: ObjectStore) -> None:
    save(memory_store, 10)
    save(memory_store, 20)
    memory_store.delete(
        "checkpoints/solver/00000020/manifest.json"
    )  # in progress, by another trainer
    checkpoints.prune(memory_store, "solver", keep=1, newest_step=30)
    assert len(memory_store.list("checkpoints/solver/00000020")) == 1
    assert newest_step(memory_store) == 10


def test_prune_deletes_manifests_before_their_data(memory_store: ObjectStore) -> None:
    for step in (10, 20, 30):
        save(memory_store, step)
    deleted: list[str] = []
    backend = memory_store.backend

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(backend, name)

        def delete(self, key: str) -> None:
            deleted.append(key)
            backend.delete(key)

    checkpoints.prune(
        ObjectStore(url="watched", backend=Watched()), "solver", keep=1, newest_step=30
    )  # type: ignore[arg-type]  # delegates the rest
    manifests = [key.endswith("manifest.json") for key in deleted]
    assert manifests == [True, True, False, False]


def test_prune_of_nothing_does_nothing(memory_store: ObjectStore) -> None:
    checkpoints.prune(memory_store, "solver", keep=1, newest_step=30)


def test_missing_and_misplaced_checkpoints_raise_different_errors(
    memory_store: ObjectStore,
) -> None:
    with pytest.raises(NotFoundError):
        checkpoints.load(memory_store, "solver", 10)
    save(memory_store, 10)
    memory_store.put(
        "checkpoints/solver/00000011/manifest.json",
        memory_store.get("checkpoints/solver/00000010/manifest.json"),
    )
    with pytest.raises(CorruptError, match="is the checkpoint of solver step 10"):
        checkpoints.load(memory_store, "solver", 11)


def test_the_second_trainer_of_a_step_loses_and_leaves_no_files(memory_store: ObjectStore) -> None:
    save(memory_store, 10)
    stored = memory_store.list()
    with pytest.raises(ConflictError):
        save(memory_store, 10)
    assert memory_store.list() == stored


def test_prune_does_not_count_incomplete_checkpoints(memory_store: ObjectStore) -> None:
    for step in (10, 20, 30):
        save(memory_store, step)
    whole = memory_store.get("checkpoints/solver/00000030/manifest.json")
    for step in ("00000098", "00000099", "9223372036854775807"):
        memory_store.put(f"checkpoints/solver/{step}/manifest.json", whole)  # that of another step
    memory_store.put("checkpoints/solver/00000097/manifest.json", b"{")
    save(memory_store, 96)
    (data,) = (
        key
        for key in memory_store.list("checkpoints/solver/00000096")
        if key.endswith(".safetensors")
    )
    memory_store.delete(data)
    checkpoints.prune(memory_store, "solver", keep=2, newest_step=2**63)
    assert [step for step in checkpoints.steps(memory_store, "solver") if step < 96] == [20, 30]
    assert newest_step(memory_store) == 30


def test_prune_does_not_count_checkpoints_after_the_one_that_was_saved(
    memory_store: ObjectStore,
) -> None:
    for step in (10, 20, 30, 99):
        save(memory_store, step)
    checkpoints.prune(memory_store, "solver", keep=2, newest_step=30)
    assert checkpoints.steps(memory_store, "solver") == [20, 30, 99]


def test_prune_does_not_count_checkpoints_that_are_known_to_be_damaged(
    memory_store: ObjectStore,
) -> None:
    for step in (10, 20, 30):
        save(memory_store, step)
    checkpoints.prune(memory_store, "solver", keep=1, newest_step=30, damaged={30})
    assert checkpoints.steps(memory_store, "solver") == [20, 30]
    checkpoints.prune(memory_store, "solver", keep=1, newest_step=30, damaged={20})
    assert checkpoints.steps(memory_store, "solver") == [30]


def test_a_deleted_checkpoint_leaves_no_files_and_may_be_saved_again(
    memory_store: ObjectStore,
) -> None:
    save(memory_store, 10)
    stored = memory_store.list()
    save(memory_store, 20)
    checkpoints.delete(memory_store, "solver", 20)
    assert memory_store.list() == stored
    save(memory_store, 20)
    assert newest_step(memory_store) == 20


@pytest.mark.parametrize("deleted", ["manifest.json", ".safetensors"])
def test_a_checkpoint_deleted_while_it_is_read_is_a_transient_error(
    memory_store: ObjectStore, deleted: str
) -> None:
    for step in (10, 20):
        save(memory_store, step)
    backend = memory_store.backend

    class Pruned:
        """A store in which another trainer saves and prunes when a file is read."""

        def __getattr__(self, name: str) -> object:
            return getattr(backend, name)

        def read(self, key: str) -> bytes:
            if key.endswith(deleted) and not memory_store.exists(
                "checkpoints/solver/00000030/manifest.json"
            ):
                save(memory_store, 30)
                checkpoints.prune(memory_store, "solver", keep=1, newest_step=30)
            return backend.read(key)

    pruned = replace(memory_store, backend=Pruned())  # type: ignore[arg-type]  # delegates the rest
    with pytest.raises(
        TransientError,
        match=r"^the checkpoint of step 20 of solver was deleted while it was read: another trainer",
    ):
        checkpoints.newest(pruned, "solver")
    assert newest_step(pruned) == 30


def test_prune_deletes_nothing_while_too_few_checkpoints_are_complete(
    memory_store: ObjectStore,
) -> None:
    for step in (10, 20, 30):
        save(memory_store, step)
    for step in (20, 30):
        memory_store.put(f"checkpoints/solver/{step:08d}/manifest.json", b"{")
    stored = memory_store.list()
    checkpoints.prune(memory_store, "solver", keep=2, newest_step=30)
    assert memory_store.list() == stored


def test_prune_keeps_objects_that_are_not_checkpoints(memory_store: ObjectStore) -> None:
    save(memory_store, 20)
    strays = [
        f"checkpoints/solver/{name}"
        for name in ("00000010.bak/manifest.json", "000000000010/x", ".DS_Store")
    ]
    for stray in strays:
        memory_store.put(stray, b"")
    checkpoints.prune(memory_store, "solver", keep=1, newest_step=30)
    assert [key for key in memory_store.list() if "00000020" not in key] == sorted(strays)


def test_a_checkpoint_of_another_run_is_skipped_for_the_previous_one(
    memory_store: ObjectStore,
) -> None:
    own, other = memory_store.sub("runs/own"), memory_store.sub("runs/other")
    save(own, 10)
    save(other, 20)
    for key in other.list("checkpoints"):
        own.put(key, other.get(key))
    assert newest_step(other) == 20
    assert newest_step(own) == 10
    with pytest.raises(CorruptError, match=r"manifest\.json is a checkpoint of run 'other'"):
        checkpoints.check_complete(own, "solver", 20)


def test_a_copy_as_first_is_a_checkpoint_of_the_new_run(memory_store: ObjectStore) -> None:
    source, run = memory_store.sub("runs/source"), memory_store.sub("runs/new")
    save(source, 10)
    checkpoints.copy_as_first(source, "solver", 10, run, "pupil")
    newest = checkpoints.newest(run, "pupil")
    assert newest is not None
    assert newest.step == 0
