"""A trainer gives its engine the version that `train.reference` names, also when it resumes."""

from collections.abc import Mapping

import numpy as np
import pytest

from storage import layout
from storage.errors import ConfigError
from storage.formats.adapters import merged
from storage.records.batches import Batch
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.run import batches
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher, reader, retention
from storage.weights.retention import Retention
from tests.support.runs.adapter_versions import LORA, A, B, W, publish_adapters
from tests.support.runs.builders import batch
from tests.support.runs.lifetimes import lifetime_of
from trainer.config import TrainConfig
from trainer.losses.reference_kl import ReferenceKl
from trainer.service.reference import read_reference
from trainer.service.trainer import train

POLICY = "solver"
CALLS: list[str] = []
"""What the engines of a test were called with."""


def weight_of(value: int) -> dict[str, HostTensor]:
    return {"weight": HostTensor("U8", (1,), np.array([value], dtype=np.uint8))}


class SimpleEngine:
    """Its one weight after batch n is n."""

    def __init__(self, config: TrainConfig, model_config: Json, seed: int) -> None:
        self.value = -1

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        CALLS.append("set_weights")
        self.value = int(tensors["weight"].bits[0])

    def step(self, batch: Batch) -> dict[str, float]:
        CALLS.append(f"step {batch.step}")
        self.value = batch.step
        return {"trainer/tokens": 3.0}

    def weights(self) -> dict[str, HostTensor]:
        return weight_of(self.value)

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        return weight_of(self.value), {}

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        CALLS.append("load")
        self.value = int(tensors["weight"].bits[0])


class NearEngine(SimpleEngine):
    def set_reference(self, tensors: Mapping[str, HostTensor]) -> None:
        CALLS.append(f"set_reference {int(tensors['weight'].bits[0])}")


def config(engine: type[SimpleEngine], version: int | None) -> TrainConfig:
    return TrainConfig(
        engine=f"{__name__}:{engine.__name__}",
        reference=None if version is None else ReferenceKl(version=version),
        poll_interval_s=0.01,
        anchor_every=1,
    )


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    """A base model of weight 40, and three batches."""
    CALLS.clear()
    files = {"config.json": b'{"model_type": "counting"}'}
    publisher.publish(memory_store, POLICY, 0, weight_of(40), extra_files=files)
    for step in (1, 2, 3):
        batches.create(memory_store, batch(policy=POLICY, step=step))
    return memory_store


def trained(run: ObjectStore, steps: int, settings: TrainConfig) -> None:
    train(lifetime_of(run, "trainer"), POLICY, settings, steps, 0, batch_size=1, max_tokens=512)


def test_the_engine_has_the_reference_before_its_first_step_and_again_when_it_resumes(
    run: ObjectStore,
) -> None:
    trained(run, 1, config(NearEngine, 0))
    assert CALLS == ["set_weights", "set_reference 40", "step 1"]
    CALLS.clear()
    trained(run, 2, config(NearEngine, 0))
    assert CALLS == ["load", "set_reference 40", "step 2"]


def test_a_later_version_is_the_reference_of_a_trainer_that_starts_after_it(
    run: ObjectStore,
) -> None:
    trained(run, 2, config(NearEngine, None))
    CALLS.clear()
    trained(run, 3, config(NearEngine, 1))
    assert CALLS == ["load", "set_reference 1", "step 3"]


def test_an_adapter_of_the_reference_is_merged(memory_store: ObjectStore) -> None:
    publish_adapters(memory_store, 2)
    stored = reader.read(memory_store, POLICY, 1)
    expected = merged(LORA, stored.tensors).tensors
    for tensors in (
        read_reference(memory_store, POLICY, 1),
        read_reference(memory_store, POLICY, 1, stored),
    ):
        assert tensors.keys() == expected.keys() == stored.tensors.keys() - {A, B}
        assert np.array_equal(tensors[W].bits, expected[W].bits)
    assert not np.array_equal(expected[W].bits, stored.tensors[W].bits)


def test_a_version_that_does_not_exist_fails_the_run_by_its_number(run: ObjectStore) -> None:
    with pytest.raises(ConfigError) as caught:
        trained(run, 1, config(NearEngine, 7))
    assert str(caught.value).startswith(
        "policies.solver.train.reference.version: version 7 of solver cannot be read: "
    )
    assert str(caught.value).endswith("use 0, the base model, in a new run")
    assert not manifests.exists(run, POLICY, 1)


def test_a_version_whose_data_was_deleted_fails_the_run_with_the_reason(run: ObjectStore) -> None:
    trained(run, 3, config(NearEngine, None))
    planned = retention.plan(run, POLICY, Retention(last=1, every=0, grace_s=0.0), 1e12)
    retention.retire(run, planned)
    assert run.exists(layout.retired(POLICY, 1))
    with pytest.raises(ConfigError, match=r"version 1 of solver cannot be read: .*retired"):
        trained(run, 4, config(NearEngine, 1))


def test_an_engine_without_a_place_for_it_is_refused_and_needs_none_otherwise(
    run: ObjectStore,
) -> None:
    with pytest.raises(ConfigError) as caught:
        trained(run, 1, config(SimpleEngine, 0))
    assert str(caught.value) == (
        f"train.reference: {__name__}:SimpleEngine has no set_reference; a train engine with a "
        "reference is a class with set_reference(tensors) (docs/extending/train_engine.md)"
    )
    trained(run, 1, config(SimpleEngine, None))
    assert CALLS == ["set_weights", "step 1"]
