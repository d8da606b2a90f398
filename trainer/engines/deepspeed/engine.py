"""The train engine `deepspeed`: ZeRO shares the optimizer's state, gradients and weights out.

Everything but weights and optimizer is that of the engine `torch`: losses, minibatches, the form of
a checkpoint. A checkpoint of one is read by the other, on any number of ranks.
"""

import importlib.util
from collections.abc import Mapping

from storage.errors import ConfigError
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig
from trainer.engines.torch.engine import TorchTrainEngine
from trainer.engines.torch.one_process import OneProcess


class DeepspeedTrainEngine(TorchTrainEngine):
    """The engine of one rank (contract: `trainer/engines/engine.py`)."""

    def __init__(self, config: TrainConfig, model_config: Json, seed: int) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                "train.engine: deepspeed needs the package deepspeed, which is not installed; "
                "install astraflow[deepspeed] where trainers run (docs/extending/train_engine.md)"
            )
        if config.optimizer.name != "adamw":
            raise ConfigError(
                f"train.optimizer: {config.optimizer.name} cannot be used by the engine deepspeed, "
                "which updates flat parts of the weights; use adamw, or train.engine: torch"
            )
        super().__init__(config, model_config, seed)

    def _make_trained(self, weights: Mapping[str, HostTensor]) -> OneProcess:
        from trainer.engines.deepspeed.zero import Zero  # seconds to import

        return Zero(self._config, self._model_config, weights)
