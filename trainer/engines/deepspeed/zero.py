"""A model with float32 masters and AdamW, shared out over ranks by DeepSpeed's ZeRO.

    stage 1    the optimizer's state      each rank updates a part of the weights
    stage 2    and gradients              each rank keeps the gradient of its part
    stage 3    and weights                gathered module by module, and freed again

Every rank builds the whole model in host memory first, as in `torch/fsdp.py`.
"""

import logging
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from storage.errors import CorruptError
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig
from trainer.engines.ranks.collectives import Distributed
from trainer.engines.ranks.process_group import rank_device
from trainer.engines.torch.hf.model import HfModel
from trainer.engines.torch.host_tensors import to_host
from trainer.engines.torch.one_process import OneProcess, built_model, check_products
from trainer.engines.torch.optimizer import (
    MOMENTS,
    adamw_settings,
    parameter_groups,
    set_learning_rate,
)
from trainer.engines.torch.saved_state import OptimizerProgress
from trainer.memory import bucket_elements


class _AdamW(torch.optim.AdamW):
    """AdamW that leaves weights of a learning rate 0 as they are: a step would make 0.0 of −0.0."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
        if any(group["lr"] for group in self.param_groups):
            super().step(closure)


class _Logprobs(nn.Module):
    """The model as DeepSpeed runs it: a forward pass gives log-probabilities."""

    def __init__(self, model: HfModel) -> None:
        super().__init__()
        self.model = model.model
        self._logprobs = model.logprobs

    def forward(
        self,
        tokens_BT: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        positions_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return self._logprobs(tokens_BT, source_N, target_N, temperature_N, positions_BT)


class Zero(OneProcess):
    """What `train_step` trains on ranks of DeepSpeed (protocol `Trained`)."""

    one_block_passes = True

    def __init__(
        self, config: TrainConfig, model_config: Json, weights: Mapping[str, HostTensor]
    ) -> None:
        check_products(config)
        deepspeed = _imported(config.device)
        num_ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        device = torch.device(rank_device(config, rank))
        self._num_ranks, self._stage = num_ranks, config.deepspeed.stage
        self._model = built_model(config, model_config, weights, "cpu")
        self._model.device = device
        self.parameters = self._model.parameters()
        self.shapes = {name: tuple(each.shape) for name, each in self.parameters.items()}
        optimizer = _AdamW(
            parameter_groups(self.parameters.values(), config),
            **adamw_settings(config) | {"lr": 0.0},  # stage 3 takes a step while it starts
        )
        _align_ids(device)
        self._engine, self._zero, *_ = deepspeed.initialize(
            model=_Logprobs(self._model),
            optimizer=optimizer,
            config=_settings(config, sum(map(math.prod, self.shapes.values()))),
            dist_init_required=False,
        )
        self.collectives = Distributed(device)
        self._create_moments(0)

    def _create_moments(self, num_updates: int) -> None:
        """Create the state of all parts: DeepSpeed would link that of the first group only."""
        for part in self._parts():
            self._zero.optimizer.state[part] = {
                "step": torch.tensor(float(num_updates), device=part.device),
                **{moment: torch.zeros_like(part) for moment in MOMENTS},
            }
        if self._stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def logprobs(
        self,
        tokens_BT: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        positions_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = self._engine(
            tokens_BT, source_N, target_N, temperature_N, positions_BT
        )
        return pair

    def zero_grad(self) -> None:
        """Do nothing: each update leaves the gradients empty."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed takes the mean over the ranks; the gradient of a minibatch is the sum.
        self._engine.backward(loss * self._num_ranks)

    def update(self, lr: float) -> float:
        set_learning_rate(self._zero.optimizer, lr)
        self._engine.step()
        # Where the norm is not finite, DeepSpeed takes no step.
        return math.inf if self._zero.overflow else float(self._engine.get_global_grad_norm())

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        # Below stage 3 every rank has the whole; a sum over the ranks would make 0.0 of −0.0.
        if self._stage < 3 or name not in self.parameters:
            return tensor
        whole: Tensor = safe_get_full_fp32_param(tensor).view(self.shapes[name])
        return whole

    def saved_state(self) -> tuple[dict[str, HostTensor], OptimizerProgress]:
        from deepspeed.utils import safe_get_full_optimizer_state

        num_updates = max(int(self._zero.optimizer.state[part]["step"]) for part in self._parts())
        tensors: dict[str, HostTensor] = {}
        for name, parameter in self.parameters.items() if num_updates else ():
            for moment in MOMENTS:
                whole = safe_get_full_optimizer_state(parameter, moment)
                if self.collectives.rank == 0:
                    tensors[f"{name}/{moment}"] = to_host(whole.view(self.shapes[name]))
        updates = dict.fromkeys(self.parameters, num_updates) if num_updates else {}
        return tensors, OptimizerProgress(updates=updates)

    def restore_state(
        self, moments: Mapping[str, Mapping[str, Tensor]], progress: OptimizerProgress
    ) -> None:
        if progress.moments:
            raise CorruptError(
                "the optimizer's state is not one of AdamW, which the engine deepspeed uses; "
                "resume with the engine that saved it"
            )
        self._create_moments(max(progress.updates.values(), default=0))
        for name, of_parameter in moments.items():
            for moment, whole in of_parameter.items():
                self._set_moment(self.parameters[name], moment, whole.to(self.device))

    def _set_moment(self, parameter: Tensor, moment: str, whole: Tensor) -> None:
        from deepspeed.utils import (
            safe_get_local_optimizer_state,
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        if self._stage < 3:
            safe_set_full_optimizer_state(parameter, whole, moment)
            return
        # DeepSpeed's own function for stage 3 fails where ranks do not divide the elements.
        size = safe_get_local_optimizer_state(parameter, moment).numel()
        padded = whole.new_zeros(size * self._num_ranks)
        padded[: whole.numel()] = whole.flatten()
        own = padded[size * self.collectives.rank :][:size]
        safe_set_local_optimizer_state(parameter, own, moment)

    def _parts(self) -> list[Tensor]:
        """Return the flat float32 parts of this rank, which the optimizer updates."""
        zero = self._zero
        parts: list[Tensor] = (
            zero.single_partition_of_fp32_groups
            if self._stage < 3
            else zero.fp32_partitioned_groups_flat
        )
        return parts


def _imported(device: str) -> Any:
    """Import DeepSpeed so that it neither compiles anything nor writes to the standard output."""
    # DeepSpeed uses names that torch is about to replace.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)
    warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    # Nothing is compiled at the start, nor tried: it takes minutes, and needs a compiler.
    vars(deepspeed.ops)["__compatible_ops__"] = defaultdict(bool)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def _align_ids(device: torch.device) -> None:
    """Let all ranks number modules and parameters from the same ids.

    Stage 3 compares the ids of the ranks, and a process counts on from those of its earlier
    engines: rank 0 may have trained with other ranks before.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    # DeepSpeed counts modules in a list that is the default value of an argument.
    (modules,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    newest = torch.tensor([modules[0], Init.param_id], device=device)
    torch.distributed.all_reduce(newest, torch.distributed.ReduceOp.MAX)
    modules[0], Init.param_id = newest.tolist()


def _settings(config: TrainConfig, parameters: int) -> Json:
    """Return DeepSpeed's own configuration for a model with so many parameters."""
    zero: Json = {
        "stage": config.deepspeed.stage,
        "reduce_bucket_size": bucket_elements(parameters),
    }
    if config.deepspeed.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # without effect: passes are counted by the caller
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.grad_clip or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
