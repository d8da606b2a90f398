"""A frozen model with trained low-rank matrices beside its linear layers, by the library peft.

x ──▶ W (frozen) ──────────▶ + ──▶ y         {layer}.weight         W [outputs, inputs]
└───▶ A ──▶ B ──▶ scale ─────┘               {layer}.lora_A.weight  A [rank, inputs], random
                                             {layer}.lora_B.weight  B [outputs, rank], first 0
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from storage.errors import ConfigError, CorruptError
from storage.formats.adapters import LORA_A, LORA_B, WEIGHT, is_adapter, merge
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.adapters import Lora
from trainer.engines.torch.hf.model import HfModel, Whole
from trainer.engines.torch.host_tensors import to_torch

PEFT_NAMES = re.compile(r"\.base_layer(?=\.)|(?<=\.lora_[AB])\.default(?=\.)")
"""Parts of peft's names of tensors that ours do not have. A module with two adapted parameters,
such as fused experts, is wrapped twice.
"""


class LoraModel(HfModel):
    """Float32 weights of which only the adapter's are trained."""

    def __init__(
        self,
        model_config: Json,
        weights: Mapping[str, HostTensor],
        adapter: Lora,
        **settings: Any,
    ) -> None:
        """Build the base model and its adapter.

        `weights` are those of the base model, and of the adapter where it was trained before; A of
        a new one is drawn from torch's generator. Other arguments and errors: `HfModel`.

        Raises:
            CorruptError: `weights` have a part of an adapter, or one of another shape.
            ConfigError: the model has no linear layers with the names of `adapter.targets`, or no
                matrix of them has the rank.
        """
        base = {name: each for name, each in weights.items() if not is_adapter(name)}
        super().__init__(model_config, base, **settings)
        self._adapter = adapter
        self._base = {name: base[name] for name in self.tensors()}
        targets = _targets(self.model, self.head, adapter)
        _check_rank(self.model, targets, adapter.rank)
        _inject(self.model, adapter, targets)
        self._restore({name: each for name, each in weights.items() if is_adapter(name)})

    def parameters(self) -> dict[str, nn.Parameter]:
        named = self.model.named_parameters()
        return {_our_name(name): each for name, each in named if each.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        return {_our_name(name): tensor for name, tensor in super().tensors().items()}

    def saved(self, whole: Whole) -> Iterator[tuple[str, Tensor | HostTensor]]:
        """Yield the base's tensors as they were given, and the adapter's masters."""
        yield from self._base.items()
        for name, parameter in self.parameters().items():
            yield name, whole(name, parameter)

    def published(self, whole: Whole) -> Iterator[tuple[str, Tensor | HostTensor]]:
        if self._adapter.publish == "adapter":
            yield from self.saved(whole)
            return
        tensors, scale = self.tensors(), self._adapter.form().scale
        for name in self._base:
            weight = whole(name, tensors[name]).detach()
            layer = name.removesuffix(WEIGHT)
            if layer + LORA_A in tensors:
                a, b = (whole(layer + each, tensors[layer + each]) for each in (LORA_A, LORA_B))
                weight = merge(weight, a.detach(), b.detach(), scale)
            yield name, weight

    def base_logprobs(
        self,
        tokens_BT: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        positions_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute what `logprobs` does by the base model, with the adapter off; no gradient."""
        layers = _adapted(self.model)
        try:
            for layer in layers:
                layer.enable_adapters(False)
            with torch.no_grad():
                return self.logprobs(tokens_BT, source_N, target_N, temperature_N, positions_BT)
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def _restore(self, given: Mapping[str, HostTensor]) -> None:
        """Copy the adapter's tensors into the model; without any, it is new."""
        own = self.parameters()
        if not given:
            return
        if given.keys() != own.keys() or any(
            given[name].shape != tuple(each.shape) for name, each in own.items()
        ):
            raise CorruptError(
                "the weights have an adapter of other layers or another rank than train.adapter "
                "selects; resume with the settings that it was trained with"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(to_torch(given[name]))


def _targets(model: Any, head: nn.Module, adapter: Lora) -> list[str]:
    """Return the names of the linear layers to adapt, never the head, which may be the embedding.

    ConfigError where the model lacks one of `adapter.targets`, or has no linear layers.
    """
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    kinds = {name.rpartition(".")[2] for name in linear}
    wanted = kinds if adapter.targets is None else set(adapter.targets)
    if unknown := sorted(wanted - kinds) or ([] if kinds else ["linear layers"]):
        raise ConfigError(
            f"train.adapter.targets: a model of type {model.config.model_type} has no "
            f"{', '.join(unknown)}; its linear layers, without the output head, are "
            f"{', '.join(sorted(kinds)) or 'none'}"
        )
    return [name for name in linear if name.rpartition(".")[2] in wanted]


def _check_rank(model: Any, targets: list[str], rank: int) -> None:
    """Raise ConfigError for a rank that no adapted matrix can have: A and B of every layer would be
    larger than W, by any factor.
    """
    layers = (model.get_submodule(name) for name in targets)
    largest = max(min(layer.in_features, layer.out_features) for layer in layers)
    if rank > largest:
        raise ConfigError(
            f"train.adapter.rank: {rank:,} is more than the rank of every adapted layer; at most "
            f"{largest:,} is of use for this model"
        )


def _inject(model: Any, adapter: Lora, targets: list[str]) -> None:
    """Put A and B beside each target, float32 on its device, and freeze everything else."""
    from peft import LoraConfig, inject_adapter_in_model  # seconds to import

    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # any number works
        use_rslora=adapter.rslora,
        lora_dropout=0.0,
        bias="none",
        target_modules=targets,
    )
    inject_adapter_in_model(config, model)


def _adapted(model: Any) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _our_name(name: str) -> str:
    return PEFT_NAMES.sub("", name)
