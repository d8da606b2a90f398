"""Base models that are versions of other runs of the store."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from storage.errors import ConfigError
from storage.formats import adapters
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor, Origin
from storage.run import checkpoints, runs
from storage.run.checkpoints import CheckpointState
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher, reader, tags
from storage.weights.manifests import LoadedWeights
from tasks.base_models.publishing import ensure_base_model, publish_base_models, publish_origin
from tasks.base_models.stored import RunModel, resolve
from tasks.recipes import loader
from tasks.supervision import supervisor
from tests.support.runs.adapter_versions import LORA, publish_adapters
from tests.support.runs.builders import tensors
from tests.support.runs.small_run import RECIPE

FILES = {"config.json": b"{}"}
NEWEST = 3


@pytest.fixture
def store(memory_store: ObjectStore) -> ObjectStore:
    """The run `one` with versions 0 to 3 of solver, and checkpoints of steps 1 and 3."""
    run = runs.create_run(memory_store, "one", {})
    loaded: LoadedWeights | None = None
    for version in range(NEWEST + 1):
        manifest = publisher.publish(
            run, "solver", version, tensors(version), base=loaded,
            extra_files={} if version else FILES,
        )  # fmt: skip
        loaded = LoadedWeights(manifest, tensors(version))
    for step in (1, 3):
        master = {"model/w": HostTensor("F32", (2,), np.array([step, 5], dtype=np.uint32))}
        state = CheckpointState({"format": 1, "updates": {"w": step}}, 24.0 * step)
        checkpoints.save(run, "solver", step, master, state)
    return memory_store


def model(**settings: Any) -> RunModel:
    return RunModel(**{"run": "one", "policy": "solver", **settings})


def test_the_latest_version_is_found_once_and_later_versions_change_nothing(store: ObjectStore):
    origin = resolve(store, {"solver": model()})["solver"]
    assert (origin.run, origin.policy, origin.version) == ("one", "solver", NEWEST)
    assert origin.digest == weights_digest(tensors(NEWEST))
    two = runs.create_run(store, "two", {}, origins={"solver": origin})
    publisher.publish(store.sub("runs/one"), "solver", NEWEST + 1, tensors(9))
    publish_origin(two, "solver", model(), None, origin)
    assert weights_digest(reader.fetch(two, "solver", 0)) == origin.digest


def test_a_recipe_names_the_policy_of_the_same_name_unless_it_names_another():
    recipe = RECIPE.replace("{tiny: {}}", "{run: one, version: 3}", 1)
    models = {
        name: each.model
        for name, each in loader.load(recipe, {"policies.verifier.model": {"run": "one", "policy": "solver"}}).policies.items()
    }  # fmt: skip
    assert models == {
        "solver": RunModel(run="one", version="3", policy="solver"),
        "verifier": RunModel(run="one", version="latest", policy="solver"),
    }


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{run: ../one}", r"policies\.solver\.model\.run: '\.\./one' is no run id"),
        ("{run: one, version: a/b}", r"model\.version: 'a/b' is no version; write its number"),
        ("{run: one, version: -1}", r"model\.version: '-1' is no version"),
        ("{run: one, policy: ../x}", r"model\.policy: '\.\./x' is no name of a policy"),
        (
            "{run: one, tiny: {}}",
            "needs exactly one of tiny, path, hub, custom, run and registered",
        ),
        ("{registered: models:/x}", r"model\.registered: 'models:/x' names no registered model"),
        ('{registered: "runs:/x@y"}', r"'runs:/x@y' names no registered model; write models:/NAME"),
    ],
)
def test_a_section_that_names_no_version_is_refused(written: str, message: str):
    with pytest.raises(ConfigError, match=message):
        loader.load(RECIPE.replace("{tiny: {}}", written, 1))


def test_the_error_of_a_version_that_cannot_be_used_names_the_policy(store: ObjectStore):
    with pytest.raises(
        ConfigError, match=r"policies\.judge\.model: there is no version 7 of solver of run one"
    ):
        resolve(store, {"judge": model(version="7")})


def test_a_run_is_created_with_its_origins_and_keeps_them_when_it_is_restarted(store: ObjectStore):
    one = store.sub("runs/one")
    tags.create(one, "best", "solver", 1)
    best = loader.load(RECIPE, {"policies.solver.model": {"run": "one", "version": "best"}})
    two = supervisor.start(store, "two", best, "")
    expected = Origin(run="one", policy="solver", version=1, digest=weights_digest(tensors(1)))
    assert runs.read_run(two).origins == {"solver": expected}
    tags.delete(one, "best")
    tags.create(one, "best", "solver", 2)
    supervisor.start(store, "two", best, "")
    assert runs.read_run(two).origins == {"solver": expected}
    tags.delete(one, "best")
    supervisor.start(store, "two", best, "")  # not even the tag is needed
    with pytest.raises(ConfigError, match=r"policies\.solver\.model: 'best' is no version"):
        supervisor.start(store, "three", best, "")
    assert not store.sub("runs/three").exists("run.json")


def test_with_optimizer_needs_a_checkpoint_of_exactly_that_version(store: ObjectStore):
    with pytest.raises(
        ConfigError,
        match=r"with_optimizer: run one has no checkpoint of solver at step 2; it has 1, 3",
    ):
        model(version="2", with_optimizer=True).origin(store)
    chosen = model(version="1", with_optimizer=True)
    origin = chosen.origin(store)
    two = runs.create_run(store, "two", {}, origins={"solver": origin})
    for _ in range(2):
        publish_origin(two, "solver", chosen, None, origin)
    assert checkpoints.steps(two, "solver") == [0]
    newest = checkpoints.newest(two, "solver")
    assert newest is not None
    assert newest.tensors["model/w"].bits.tolist() == [1, 5]
    assert newest.state == CheckpointState({"format": 1, "updates": {"w": 1}}, 0.0)
    assert checkpoints.read_manifest(store.sub("runs/one"), "solver", 1).step == 1


def test_a_checkpoint_that_was_pruned_meanwhile_fails_with_its_step(store: ObjectStore):
    chosen = model(version="1", with_optimizer=True)
    origin = chosen.origin(store)
    two = runs.create_run(store, "two", {}, origins={"solver": origin})
    checkpoints.delete(store.sub("runs/one"), "solver", 1)
    with pytest.raises(ConfigError, match=r"with_optimizer: the checkpoint of step 1 of solver in"):
        publish_origin(two, "solver", chosen, None, origin)
    assert not manifests.exists(two, "solver", 0)


def test_in_another_store_the_version_is_copied(store: ObjectStore, local_store: ObjectStore):
    """As `astraflow doctor --recipe` does, which has a store of its own."""
    publish_base_models(store, local_store, {"solver": model(version="2")}, lambda a, b: None)
    manifest = manifests.read_manifest(local_store, "solver", 0)
    assert manifest.origin is None
    assert weights_digest(reader.fetch(local_store, "solver", 0)) == weights_digest(tensors(2))
    assert reader.fetch_files(local_store, "solver") == FILES


def test_the_copy_of_a_version_with_an_adapter_is_merged(memory_store: ObjectStore):
    run = runs.create_run(memory_store, "one", {})
    publish_adapters(run)
    loaded = reader.read(run, "solver", 2)
    copied = ensure_base_model(memory_store, model(), lambda a, b: None)
    assert copied.digest == weights_digest(adapters.merged(LORA, loaded.tensors).tensors)


def test_a_version_that_is_not_finite_is_refused(memory_store: ObjectStore):
    run = runs.create_run(memory_store, "one", {})
    bad: Mapping[str, HostTensor] = {
        "w": HostTensor("BF16", (2,), np.array([0x7FC0, 1], dtype=np.uint16))
    }
    publisher.publish(run, "solver", 0, bad, extra_files=FILES)
    origin = model().origin(memory_store)
    two = runs.create_run(memory_store, "two", {}, origins={"solver": origin})
    with pytest.raises(ConfigError, match=r"solver@0 of run one.* not finite in 'w'"):
        publish_origin(two, "solver", model(), None, origin)
