"""A model with float32 masters and AdamW, shared out over ranks by FSDP2.

    rank 0   rank 1          each holds a part of every weight, gradient and moment
      └─ gather a layer ─┐   before its forward and backward pass; then freed
         scatter-add ────┘   the gradient, summed over the ranks

Every rank builds the whole model in host memory first, so that a machine needs memory for as many
copies; devices hold parts only.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig
from trainer.engines.ranks.collectives import Distributed
from trainer.engines.ranks.process_group import rank_device
from trainer.engines.torch.compiled_layers import layers_of
from trainer.engines.torch.hf.model import HfModel
from trainer.engines.torch.host_tensors import NOTHING, to_host
from trainer.engines.torch.one_process import OneProcess, built_model
from trainer.engines.torch.optimizer import saved_state
from trainer.engines.torch.saved_state import OptimizerProgress


class Fsdp(OneProcess):
    """What `train_step` trains on several ranks (protocol `Trained`); all make the same calls."""

    one_block_passes = True

    def _built(
        self, config: TrainConfig, model_config: Json, weights: Mapping[str, HostTensor]
    ) -> HfModel:
        model = built_model(config, model_config, weights, "cpu")
        share_out(model, config)
        self.collectives = Distributed(model.device)
        return model

    def logprobs(
        self,
        tokens_BT: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        positions_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return shared_logprobs(
            self._model, tokens_BT, source_N, target_N, temperature_N, positions_BT
        )

    def _clip(self) -> float:
        gradients = [
            parameter.grad for parameter in self.parameters.values() if parameter.grad is not None
        ]
        norm = _whole(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self._limit, norm)
        return float(norm)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        return _whole(tensor)

    def saved_state(self) -> tuple[dict[str, HostTensor], OptimizerProgress]:
        def copied(moment: Tensor) -> HostTensor:
            whole = _whole(moment)
            return to_host(whole) if self.collectives.rank == 0 else NOTHING

        return saved_state(self._optimizers, self._names, copied)

    def restore_state(
        self, moments: Mapping[str, Mapping[str, Tensor]], progress: OptimizerProgress
    ) -> None:
        parts = {
            name: {key: self._part(moment, self.parameters[name]) for key, moment in each.items()}
            for name, each in moments.items()
        }
        super().restore_state(parts, progress)

    def _part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return what this rank holds of a tensor that is shared out as `parameter` is."""
        if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
            return whole
        # Every rank has the whole, so that nothing is sent.
        return distribute_tensor(
            whole.to(self.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )


def share_out(
    model: HfModel, config: TrainConfig, reshard_after_forward: bool | None = None
) -> None:
    """Leave each rank its part of a model that was built on the CPU, on the rank's device.

    `reshard_after_forward`: see `fully_shard`; None keeps what the backward pass needs first.
    """
    num_ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    model.device = torch.device(rank_device(config, rank))
    mesh = init_device_mesh(model.device.type, (num_ranks,))
    model.model.token_logprobs = model.logprobs
    for module in (*layers_of(model.model), model.model):
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        # A sum over the ranks, not their mean; Gloo cannot scale.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model.model, "token_logprobs")


def shared_logprobs(model: HfModel, *block: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute what `HfModel.logprobs` does with a model that is shared out; all ranks take part."""
    pair: tuple[Tensor, Tensor] = model.model.token_logprobs(*block)
    return pair


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, of which this rank may hold a part; all ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
