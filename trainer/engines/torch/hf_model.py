"""A causal language model of the transformers library: built from its config, cut into body and
head.

Knows nothing of losses and optimizers. The body gives hidden states; the head is applied to the few
that are needed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from storage.errors import ConfigError, CorruptError
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.engines.torch.host_tensors import to_torch

PROBE_TOKENS = 4
HEAD_TOLERANCE = 1e-4


class HfModel:
    """Float32 master weights and how to run them.

    Shape legend: B rows, T padded tokens, H hidden size, V vocabulary, N tokens.
    """

    def __init__(self, model_config: Json, device: str, activation_checkpointing: bool) -> None:
        self.model = _build(model_config).to(device)
        self.body = self.model.base_model
        self.head = self.model.get_output_embeddings()
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.device = torch.device(device)
        _check_head(self.model, self.vocab_size)
        self.model.train()
        if activation_checkpointing:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """[B, T] → [B, T, H]. Rows are right-padded, so causality alone keeps padding out: no mask
        (`packing.py`).
        """
        hidden_BTH: Tensor = self.body(input_ids=tokens_BT, use_cache=False).last_hidden_state
        return hidden_BTH

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by name, tied ones once."""
        return dict(self.model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by the state dict's names, tied ones once (the first
        name).
        """
        first: dict[int, str] = {}
        state: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        return {
            name: tensor
            for name, tensor in state.items()
            if first.setdefault(id(tensor), name) == name
        }

    def assign(self, given: Mapping[str, HostTensor]) -> None:
        """Overwrite every tensor in place. CorruptError when names or shapes differ; tied names may
        be given or not.
        """
        own = self.tensors()
        missing = sorted(own.keys() - given.keys())
        unknown = sorted(given.keys() - self.model.state_dict().keys())
        misshapen = sorted(
            name for name in own if name in given and tuple(own[name].shape) != given[name].shape
        )
        for word, names in (
            ("lacks", missing),
            ("does not know", unknown),
            ("has other shapes for", misshapen),
        ):
            if names:
                raise CorruptError(
                    f"the weights do not fit the model's config.json, which {_fault(word, names)}"
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(to_torch(given[name]))


def _fault(word: str, names: list[str]) -> str:
    phrase = "wants tensors that are not given" if word == "lacks" else word
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{phrase}: {shown}"


def _build(model_config: Json) -> Any:
    from transformers import (  # seconds to import: only when a model is really built
        AutoConfig,
        AutoModelForCausalLM,
    )

    try:
        config = AutoConfig.for_model(**model_config)
        build = AutoModelForCausalLM.from_config
        # A config.json may name code of its own (auto_map): a model is data, so that is never run,
        # nor offered to be.
        return build(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )  # type: ignore[no-untyped-call]  # theirs
    except (KeyError, TypeError, ValueError) as error:
        kind = model_config.get("model_type", "unnamed")
        raise ConfigError(
            f"config.json of the base model (model_type {kind}) gives no causal language model: "
            f"{error}; "
            "use a model type that the installed transformers knows"
        ) from error


def _check_head(model: Any, vocab_size: int) -> None:
    """Some models scale or cap their logits after the head. Cut in two, such a model would silently
    be another one.
    """
    model.eval()
    device = next(model.parameters()).device
    probe = torch.arange(PROBE_TOKENS, device=device)[None] % vocab_size
    with torch.no_grad():
        whole = model(input_ids=probe, use_cache=False).logits
        parts = model.get_output_embeddings()(
            model.base_model(input_ids=probe, use_cache=False).last_hidden_state
        )
    if not torch.allclose(whole, parts, atol=HEAD_TOLERANCE, rtol=HEAD_TOLERANCE):
        kind = model.config.model_type
        raise ConfigError(
            f"models of type {kind} change their logits after the output head, which train.engine: "
            "torch does not "
            "follow; choose another model, or another engine by its import path"
        )
