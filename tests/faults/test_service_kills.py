"""Services without their own loops, killed at each of their changes in turn: the last attempt ends
as without a kill.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage import layout
from storage.formats.safetensors import weights_digest
from storage.run import evaluation_samples, evaluations, runs
from storage.run.base_models import load_model
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests, publisher, reader, replication
from storage.weights.retention import Retention
from tasks.base_models.config import TinyBase, TinyModel
from tasks.base_models.publishing import build_digest, publish_base_models
from tasks.evaluation import evaluate_versions
from tasks.maintenance import garbage_collection
from tasks.recipes import loader
from tasks.recipes.run_config import RunConfig
from tests.support.runs.builders import mirror_next, tensors
from tests.support.runs.fakes import publish_base
from tests.support.stores.killed_store import Killed, killed_at

SMALL = TinyBase(
    hidden=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate=16,
    skill_iterations=1,
    habit_iterations=1,
    batch_size=4,
)


def each_kill(store: ObjectStore, after: bool, work: Callable[[ObjectStore], None]) -> int:
    """Run `work` on a store again and again, killed at its first change, then at its second, and so
    on, until it finishes. Objects of each attempt stay. Return the number of kills.
    """
    for number in range(1, 200):
        dying, _ = killed_at(store, number, after)
        try:
            work(dying)
        except Killed:
            continue
        return number - 1
    raise AssertionError("it never comes to its end")


@pytest.mark.parametrize("after", [False, True])
def test_a_base_model_is_published_completely_after_repeated_kills_of_its_builder(
    memory_store: ObjectStore, after: bool
) -> None:
    models = {policy: TinyModel(tiny=SMALL) for policy in ("solver", "verifier")}

    def build(store: ObjectStore) -> None:
        publish_base_models(store, store.sub("runs/r"), models, lambda stage, share: None)

    kills = each_kill(memory_store, after, build)
    assert kills >= 4, "files of the model and of two policies"
    built, _ = load_model(memory_store, build_digest(SMALL))
    for policy in models:
        assert weights_digest(
            reader.fetch(memory_store.sub("runs/r"), policy, 0)
        ) == weights_digest(built)


@pytest.mark.parametrize(("write", "after"), [(1, False), (1, True), (2, False), (2, True)])
def test_an_evaluation_killed_during_its_commit_is_repeated_or_complete(
    memory_store: ObjectStore, write: int, after: bool
) -> None:
    """Its first write is the sample, the second one the evaluation that counts its episodes."""
    settings = {
        "evaluation.prompts.limit": 3,
        "evaluation.kept_episodes": 2,
        "rollout.engine.name": "tests.support.runs.fakes:ScriptedEngine",
    }
    config = loader.load("multi_policy_tiny", settings)
    publish_base(memory_store, ["solver", "verifier"])
    vector = {"solver": 0, "verifier": 0}
    dying, _ = killed_at(memory_store, write, after)
    with pytest.raises(Killed):
        evaluate_versions(dying, config, vector)
    assert evaluations.exists(memory_store, vector) is (write == 2 and after)
    samples = {key: memory_store.get(key) for key in evaluation_samples.keys(memory_store)}
    assert bool(samples) is (write == 2 or after)
    made = evaluate_versions(memory_store, config, vector)
    assert made.final.tolist() == [1.0] * 3
    assert evaluations.read(memory_store, vector).rows == made.rows
    assert made.num_kept == evaluation_samples.read(memory_store, vector).num_episodes == 2
    assert samples.items() <= {key: memory_store.get(key) for key in memory_store.list()}.items()


@pytest.mark.parametrize("after", [False, True])
def test_a_mirror_has_every_version_after_repeated_kills_of_its_copier(
    memory_store: ObjectStore, after: bool
) -> None:
    home, mirror = memory_store.sub("home"), memory_store.sub("mirror")
    for version in range(3):
        publisher.publish(home, "solver", version, tensors(version))

    def copy(target: ObjectStore) -> None:
        while mirror_next(home, target) is not None:
            pass

    assert each_kill(mirror, after, copy) >= 3
    for version in range(3):
        assert weights_digest(reader.fetch(mirror, "solver", version)) == weights_digest(
            tensors(version)
        )
    assert manifests.latest(mirror, "solver") == 2


def collected(folder: Path) -> tuple[ObjectStore, ObjectStore, RunConfig]:
    """A run of six versions, its mirror, and its recipe."""
    config = loader.load(
        "single_policy_tiny",
        {"evaluation": None, "rollout.regions.eu-west.mirror": str(folder / "eu")},
    )
    run = runs.create_run(open_store(str(folder / "home")), "one", config.model_dump(mode="json"))
    for version in range(6):
        publisher.publish(run, "solver", version, tensors(version))
    copy = replication.of_run(run, str(folder / "eu"))
    while mirror_next(run, copy) is not None:
        pass
    run.put(f"{layout.weights('solver', 5)}/{'0' * 32}.model-00000.safetensors", b"cut off")
    return run, copy, config


@pytest.mark.parametrize("after", [False, True])
def test_gc_killed_repeatedly_deletes_all_planned_objects_and_no_others(
    tmp_path: Path, after: bool
) -> None:
    run, copy, config = collected(tmp_path)

    def collect(store: ObjectStore) -> None:
        assert (
            garbage_collection.remove(
                garbage_collection.survey(
                    store, "one", config, Retention(last=2, every=0, grace_s=0.0)
                )
            )
            == {}
        )

    assert each_kill(run, after, collect) >= 3, "records of versions, and their files"
    for store in (run, copy):
        held = {
            key.split("/")[2]
            for key in store.list("weights/solver")
            if key.endswith(".safetensors")
        }
        assert held == {f"{version:08d}" for version in (0, 4, 5)}
    for version in (0, 4, 5):
        assert weights_digest(reader.fetch(run, "solver", version)) == weights_digest(
            tensors(version)
        )
