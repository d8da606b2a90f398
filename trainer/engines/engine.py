"""The contract of a train engine, which turns batch n into version n.

`docs/extending/train_engine.md` describes it in prose.

An engine does not use stores, runs or published versions; the service
(`trainer/service/trainer.py`) does not use models, losses or devices. Importing this module does
not import torch, so that an error in a recipe is reported without delay.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from storage.import_path import PluginKind, resolve
from storage.records.batches import Batch
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig
from trainer.engines.custom import CustomTrainEngine

if TYPE_CHECKING:
    from trainer.engines.ranks.rendezvous import Rendezvous


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


@runtime_checkable
class ReferenceEngine(Protocol):
    """The optional part of a train engine: what it needs for `train.reference`."""

    def set_reference(self, tensors: Mapping[str, HostTensor]) -> None:
        """Keep published weights as the frozen reference of the KL penalty (`config.reference`).

        Called where the recipe has `train.reference`, after each `set_weights` or `load` that a
        trainer starts with, and before its first step. Neither a step nor `save` changes or has it.
        CorruptError as for `set_weights`.
        """


EngineFactory = Callable[[TrainConfig, Json, int], TrainEngine]
"""(config, content of the model's config.json, seed) → an engine before `set_weights` or `load`."""

ENGINES: dict[str, str] = {
    "torch": "trainer.engines.torch.engine:TorchTrainEngine",
    "deepspeed": "trainer.engines.deepspeed.engine:DeepspeedTrainEngine",
}
"""Import paths of the built-in engines, so that this table does not import torch."""

SERVICE_METRICS = (
    "trainer/wait_s",
    "trainer/step_s",
    "trainer/publish_s",
    "trainer/publish_wait_s",
    "trainer/tokens_per_s",
    "trainer/wait_fraction",
)
"""What the service adds to the metrics of a step."""

ENGINE = PluginKind(
    "train engine",
    TrainEngine,
    "docs/extending/train_engine.md",
    constructor_args=("config", "model_config", "seed"),
)

REFERENCE_ENGINE = PluginKind(
    "train engine with a reference", ReferenceEngine, "docs/extending/train_engine.md"
)


def make_engine(
    config: TrainConfig, model_config: Json, seed: int, rendezvous: "Rendezvous | None" = None
) -> TrainEngine:
    """Build the engine that `config.engine` names: a built-in, or a class by import path.

    Built-in engines of several ranks start their processes, and join those of other nodes by the
    rendezvous. A class by import path reads `config.ranks` itself.
    """
    if config.engine == "deepspeed" or (config.num_ranks > 1 and config.engine in ENGINES):
        from trainer.engines.ranks.engine import RankedEngine

        return RankedEngine(config, model_config, seed, rendezvous)
    return make_rank_engine(config, model_config, seed)


def make_rank_engine(config: TrainConfig, model_config: Json, seed: int) -> TrainEngine:
    """Build the engine of this rank alone; of several, all ranks make the same calls."""
    factory: EngineFactory = resolve(config.engine, ENGINES, ENGINE, "train.engine")
    if config.reference is not None:
        resolve(config.engine, ENGINES, REFERENCE_ENGINE, "train.reference")
    if config.engine in ENGINES:
        return factory(config, model_config, seed)
    return CustomTrainEngine(factory, config, model_config, seed)
