import time

import pytest

from storage.errors import NotFoundError
from storage.run import base_models
from storage.store.object_store import ObjectStore
from tests.support.runs import builders
from tests.support.stores.damaging_store import damages_first_reads


def test_a_saved_model_is_loaded_unchanged(memory_store: ObjectStore) -> None:
    assert not base_models.has_model(memory_store, "abc")
    started_s = time.time()
    base_models.save_model(
        memory_store, "abc", builders.tensors(2), {"config.json": b"{}"}, {"accuracy": 0.5}
    )
    assert base_models.has_model(memory_store, "abc")
    tensors, files = base_models.load_model(memory_store, "abc")
    assert tensors["model.scale"].bits.tolist() == 2
    assert files == {"config.json": b"{}"}
    manifest = base_models.read_model_manifest(memory_store, "abc")
    assert manifest.metrics == {"accuracy": 0.5}
    assert started_s <= manifest.created_s <= time.time()
    assert base_models.load_model(damages_first_reads(memory_store), "abc")[1] == files


def test_the_first_builders_model_stays_and_the_second_leaves_no_files(
    memory_store: ObjectStore,
) -> None:
    base_models.save_model(memory_store, "abc", builders.tensors(1), {}, {})
    stored = memory_store.list()
    base_models.save_model(memory_store, "abc", builders.tensors(2), {}, {})
    assert memory_store.list() == stored
    assert base_models.load_model(memory_store, "abc")[0]["model.scale"].bits.tolist() == 1


def test_a_model_that_was_not_saved_is_not_found(memory_store: ObjectStore) -> None:
    with pytest.raises(NotFoundError):
        base_models.load_model(memory_store, "abc")
