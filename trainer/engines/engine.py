"""The contract of a train engine, which turns batch n into version n.

`docs/extending/train_engine.md` describes it in prose.

An engine does not use stores, runs or published versions; the service
(`trainer/service/trainer.py`) does not use models, losses or devices. Importing this module does
not import torch, so that an error in a recipe is reported without delay.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from storage.import_path import PluginKind, resolve
from storage.records.batches import Batch
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig


class TrainEngine(Protocol):
    """A model in training: weights, optimizer and random states."""

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        """Start from published weights, with a fresh optimizer and random states.

        Raises:
            CorruptError: names or shapes differ from the model's; the message names the tensors.
            ConfigError: the model or the device is not available.
        """

    def step(self, batch: Batch) -> dict[str, float]:
        """Train version `batch.step − 1` on `batch` to version `batch.step`; return its metrics.

        Metrics are named `trainer/…`; `trainer/tokens` (number of loss tokens) is required.
        CorruptError naming the row, with unchanged weights, when the model cannot train on a row.
        """

    def weights(self) -> dict[str, HostTensor]:
        """Return a copy of the weights for publication, by state-dict name, tied tensors once."""

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        """Return a copy of the state from which `load` resumes; the JSON has no NaN or infinity."""

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        """Restore the state that `save` returned. CorruptError when it does not fit the model."""


EngineFactory = Callable[[TrainConfig, Json, int], TrainEngine]
"""(config, content of the model's config.json, seed) → an engine before `set_weights` or `load`."""

ENGINES: dict[str, str] = {"torch": "trainer.engines.torch.engine:TorchTrainEngine"}
"""Import paths of the built-in engines, so that this table does not import torch."""


ENGINE = PluginKind(
    "train engine",
    TrainEngine,
    "docs/extending/train_engine.md",
    constructor_args=("config", "model_config", "seed"),
)


def make_engine(config: TrainConfig, model_config: Json, seed: int) -> TrainEngine:
    """Build the engine that `config.engine` names: a built-in, or a class by import path."""
    factory: EngineFactory = resolve(config.engine, ENGINES, ENGINE, "train.engine")
    return factory(config, model_config, seed)
