"""A model with float32 masters and its optimizers in one process on one device.

`fsdp.py` shares its tensors out over several ranks.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.adapters import Lora
from trainer.config import TrainConfig
from trainer.cpu_bf16 import check_bf16
from trainer.engines.ranks.collectives import Alone, Collectives
from trainer.engines.torch.compiled_layers import check_compiler
from trainer.engines.torch.hf.model import HfModel
from trainer.engines.torch.lora import LoraModel
from trainer.engines.torch.optimizer import (
    clear_gradients,
    make_optimizers,
    restore_state,
    saved_state,
    set_learning_rate,
    take_step,
)
from trainer.engines.torch.saved_state import OptimizerProgress
from trainer.placement import leader_device


class OneProcess:
    """What `train_step` trains (protocol `Trained`), and its state by name."""

    collectives: Collectives = Alone()
    one_block_passes = False

    def __init__(
        self, config: TrainConfig, model_config: Json, weights: Mapping[str, HostTensor]
    ) -> None:
        """Build the model with `weights` and fresh optimizers (errors: `HfModel`).

        ConfigError where `config.compile` is set and nothing can be compiled here.
        """
        check_products(config)
        self._limit = math.inf if config.grad_clip is None else config.grad_clip
        self._model = self._built(config, model_config, weights)
        if config.compile:
            check_compiler(self._model.device)
        self.parameters = self._model.parameters()
        self.shapes = {name: tuple(each.shape) for name, each in self.parameters.items()}
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._optimizers = make_optimizers(
            self.parameters.values(), self._model.embeddings(), config
        )

    def _built(
        self, config: TrainConfig, model_config: Json, weights: Mapping[str, HostTensor]
    ) -> HfModel:
        return built_model(config, model_config, weights, leader_device(config))

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def positions(self) -> int | None:
        return self._model.positions

    def logprobs(
        self,
        tokens_BT: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        positions_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return self._model.logprobs(tokens_BT, source_N, target_N, temperature_N, positions_BT)

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            clear_gradients(optimizer)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        torch.autograd.backward(loss)

    def update(self, lr: float) -> float:
        norm = self._clip()
        if math.isfinite(norm) and lr:  # a step of length 0 would still make 0.0 of −0.0
            for optimizer in self._optimizers:
                set_learning_rate(optimizer, lr)
                take_step(optimizer)
        return norm

    def _clip(self) -> float:
        """Clip the gradient; return its norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._limit))

    def saved(self) -> Iterator[tuple[str, Tensor | HostTensor]]:
        """Yield what a checkpoint has of the model, by name; all ranks take part."""
        return self._model.saved(self._whole)

    def published(self) -> Iterator[tuple[str, Tensor | HostTensor]]:
        """Yield the tensors of a version, by name; all ranks take part."""
        return self._model.published(self._whole)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor, of which a rank may hold a part."""
        return tensor

    def saved_state(self) -> tuple[dict[str, HostTensor], OptimizerProgress]:
        """Return moments by `{parameter}/{moment}`, and what is not a tensor.

        All ranks take part; the tensors of others than rank 0 are not used.
        """
        return saved_state(self._optimizers, self._names)

    def restore_state(
        self, moments: Mapping[str, Mapping[str, Tensor]], progress: OptimizerProgress
    ) -> None:
        """Restore what `saved_state` returned, checked by `optimizer.checked_moments`."""
        restore_state(self._optimizers, self._names, moments, progress)


def built_model(
    config: TrainConfig, model_config: Json, weights: Mapping[str, HostTensor], device: str
) -> HfModel:
    """Build the model on a device, with the settings of `config` (errors: `HfModel`)."""
    settings: dict[str, Any] = {
        "device": device,
        "activation_checkpointing": config.activation_checkpointing,
        "precision": config.precision,
        "attention": config.attention,
        "packed": config.packing == "packed",
        "compiled": config.compile,
    }
    if isinstance(config.adapter, Lora):
        return LoraModel(model_config, weights, config.adapter, **settings)
    return HfModel(model_config, weights, **settings)


def check_products(config: TrainConfig) -> None:
    """Raise ConfigError where the settings need bf16 products that this machine's CPU lacks."""
    if config.device == "cpu" and config.precision == "bf16":
        check_bf16("train.precision: bf16")
    if config.device == "cpu" and config.optimizer.name == "muon":
        check_bf16("train.optimizer: muon")
