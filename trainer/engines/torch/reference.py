"""A frozen version of the policy that computes log-probabilities and is never trained.

With several ranks it is shared out by FSDP2, whatever shares out the model in training: each rank
keeps a part of every weight, and a layer is gathered for its forward pass and freed again.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig
from trainer.engines.ranks.process_group import rank_device
from trainer.engines.torch.hf.model import HfModel


class Reference:
    """The log-probabilities of a version (protocol `Scorer` of `step/train_step.py`)."""

    def __init__(
        self, config: TrainConfig, model_config: Json, weights: Mapping[str, HostTensor]
    ) -> None:
        """Build the model; all ranks take part (errors: `HfModel`)."""
        self._model = HfModel(
            model_config,
            weights,
            device="cpu",
            activation_checkpointing=False,
            precision=config.precision,
            attention=config.attention,
            packed=config.packing == "packed",
            compiled=config.compile,
        )
        self._model.model.requires_grad_(False)
        if config.precision == "bf16":
            round_operands(self._model)
        self._is_shared_out = config.num_ranks > 1
        if self._is_shared_out:
            from trainer.engines.torch.fsdp import share_out  # imports torch.distributed

            share_out(self._model, config, reshard_after_forward=True)
        else:
            self._model.device = torch.device(rank_device(config, 0))
            self._model.model.to(self._model.device)

    @property
    def device(self) -> torch.device:
        return self._model.device

    def logprobs(
        self,
        tokens_BT: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        positions_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        block = tokens_BT, source_N, target_N, temperature_N, positions_BT
        if not self._is_shared_out:
            return self._model.logprobs(*block)
        from trainer.engines.torch.fsdp import shared_logprobs

        return shared_logprobs(self._model, *block)


def round_operands(model: HfModel) -> None:
    """Round to bf16 what each forward pass with `precision: bf16` would round again.

    These are the weights of linear layers, so that the log-probabilities are those of float32
    weights, bit for bit. A head that is tied to the embeddings stays float32, as they do.
    """
    embeddings = {
        id(module.weight) for module in model.model.modules() if isinstance(module, nn.Embedding)
    }
    for module in model.model.modules():
        if isinstance(module, nn.Linear) and module is not model.head:
            module.to(torch.bfloat16)
    if id(model.head.weight) not in embeddings:
        model.head.weight.data = model.head.weight.data.to(torch.bfloat16)
