"""The contract of a train engine: what turns batch n into version n. `docs/train_engine.md` says it
in prose.

An engine knows nothing of stores, runs or what is published already; the service
(`trainer/service/trainer.py`) knows nothing of models, losses or devices. Free of torch, so that a
person's typing error is found before heavy imports.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from storage.import_path import PluginKind, resolve
from storage.records.batches import Batch
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig


class TrainEngine(Protocol):
    """One model in training: weights, optimizer and random states."""

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        """Start from published weights, with a fresh optimizer and random states.

        CorruptError, naming the tensors, when they are not exactly what the model wants.
        """

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on `batch`, turning version `batch.step − 1` into version `batch.step`; returns
        `trainer/…` metrics.

        `trainer/tokens` (loss tokens trained on) is always among them. CorruptError, naming the
        row, when a row cannot be trained on by this model; the weights are then as before.
        """

    def weights(self) -> dict[str, HostTensor]:
        """A copy of the weights as they are published: names of the model's state dict, tied
        tensors once.
        """

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        """Everything `load` needs to go on as if nothing had happened; a copy, with no NaN or
        infinity in the JSON.
        """

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        """Put back what `save` gave. CorruptError when it does not fit the model."""


EngineFactory = Callable[[TrainConfig, Json, int], TrainEngine]
"""(config, content of the model's config.json, seed) → an engine that still wants `set_weights` or
`load`.
"""

ENGINES: dict[str, str] = {"torch": "trainer.engines.torch.engine:TorchTrainEngine"}
"""Built-in engines by import path: a name here costs no import of torch."""


ENGINE = PluginKind(
    "train engine",
    TrainEngine,
    "docs/train_engine.md",
    made_with=("config", "model_config", "seed"),
)


def make_engine(config: TrainConfig, model_config: Json, seed: int) -> TrainEngine:
    """The engine that `config.engine` names: a built-in, or the import path `package.module:Name`
    of a class.
    """
    factory: EngineFactory = resolve(config.engine, ENGINES, ENGINE, "train.engine")
    return factory(config, model_config, seed)
