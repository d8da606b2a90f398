"""A causal language model of the transformers library with given weights, cut into body and head.

    tokens ──body──▶ hidden states ──head──▶ log-probabilities

The body gives hidden states; the head is applied only to the positions that need it.

Shape legend: B rows, T padded tokens, N loss tokens, H hidden size, V vocabulary.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import Embedding

from storage.errors import ConfigError
from storage.formats.model_config import longest_context
from storage.formats.plain_model import is_plain
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.engines.step.logprobs import token_logprobs
from trainer.engines.torch.compiled_layers import compile_layers
from trainer.engines.torch.hf.building import (
    build,
    check_fit,
    errors_of,
    is_of_the_machine,
    untied,
    wrong_value,
)
from trainer.engines.torch.hf.forward_size import check_forward_size
from trainer.engines.torch.host_tensors import to_torch

PROBE_TOKENS = 4
HEAD_TOLERANCE = 1e-4
PACKING_TOLERANCE = 1e-4
"""Largest relative difference of the hidden states of a packed row."""
_OF_VALUES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(NotImplementedError, TypeError, ValueError),
)
"""What transformers raises for a wrong value, and torch for no broken machine."""
_OF_SHAPES = re.compile("must match|shapes? |out of range|out of bounds")
"""In a RuntimeError of torch: that of tensors that do not fit together."""
Whole: TypeAlias = Callable[[str, Tensor], Tensor]
"""(name, tensor) → the whole tensor, of which a rank may hold a part; all ranks take part."""


class HfModel:
    """Float32 master weights and how to run them.

    Dropout is off, whatever the model's configuration: the sampler has none, and the ratio of a
    token that was sampled by these weights must be 1.
    """

    def __init__(
        self,
        model_config: Json,
        weights: Mapping[str, HostTensor],
        device: str,
        activation_checkpointing: bool,
        precision: Literal["fp32", "bf16"] = "fp32",
        attention: str = "sdpa",
        packed: bool = False,
        compiled: bool = False,
    ) -> None:
        """Build the model that `model_config` describes, with `weights` rounded to float32.

        With `precision` bf16, the operands of matrix products are rounded to it. `attention` is
        transformers' name of an implementation. `packed`: rows will be packed (see `packing.py`).
        `compiled`: compile the layers (see `compiled_layers.py`).

        Names of tied tensors may be given or left out. Memory is allocated after names and shapes
        were compared.

        Raises:
            CorruptError: names or shapes of `weights` differ from the model's.
            ConfigError: the device cannot be used, the model cannot be built, it changes its logits
                after the head, it computes far more than models with such weights do, or its packed
                rows see each other.
        """
        self.device = _usable_device(device)
        self._rounds = precision == "bf16"
        self._model_config = model_config
        _check_attention(attention)
        check_fit(model_config, weights)
        self.model = build(model_config).to(self.device)
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(to_torch(weights[name]))
        with errors_of(model_config):
            self.body = self.model.base_model
            self.head: torch.nn.Linear = self.model.get_output_embeddings()
            self.vocab_size: int = self.model.config.get_text_config().vocab_size
            self.positions = _positions(self.model, model_config)
            if not is_plain(model_config):
                self.model.train()
                check_forward_size(self.model, self.vocab_size, self.positions)
            _check_head(self.model, self.vocab_size)
            _run_at_last_positions(self.model, self.vocab_size, self.positions or PROBE_TOKENS)
            _run_as_trained(self.model, self.vocab_size)
            if packed:
                _check_packing(self.model, self.vocab_size)
        _set_attention(self.model, attention)
        self.model.train()  # gradient checkpointing is off in eval()
        if activation_checkpointing:
            _recompute_activations(self.model)
        if compiled:
            compile_layers(self.model)

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """[B, T] → [B, T, H]. Without positions, rows are right-padded (see `packing.py`).

        The causal mask alone excludes the padding. Given positions that begin again, transformers
        makes the mask of packed rows from them.
        """
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._rounds):
                hidden_BTH: Tensor = self.body(
                    input_ids=tokens_BT, position_ids=positions_BT, use_cache=False
                ).last_hidden_state
        except Exception as error:  # transformers raises anything for a wrong value
            if not _is_of_values(error):
                raise
            # Of a value that is read for rows of some lengths only.
            raise wrong_value(self._model_config, error) from error
        return hidden_BTH

    def logprobs(
        self,
        tokens_BT: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        positions_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probability and entropy of each target, at the flat position before it.

        The head is applied only to positions that predict a loss token, not to prompts.
        """
        hidden_BTH = self.hidden(tokens_BT, positions_BT)
        hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, source_N)
        operands = torch.bfloat16 if self._rounds else torch.float32
        return token_logprobs(hidden_NH, self.head, target_N, temperature_N, operands)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained tensors by name, tied ones once."""
        return dict(self.model.named_parameters())

    def embeddings(self) -> list[Tensor]:
        """Return the matrices with a row for each token or position, the output head among them."""
        tables = [module for module in self.model.modules() if isinstance(module, Embedding)]
        return [self.head.weight, *(table.weight for table in tables)]

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by state-dict name, tied ones by the first."""
        return untied(self.model)

    def saved(self, whole: Whole) -> Iterator[tuple[str, Tensor | HostTensor]]:
        """Yield what a checkpoint has of the model, by name."""
        for name, tensor in self.tensors().items():
            yield name, whole(name, tensor)

    def published(self, whole: Whole) -> Iterator[tuple[str, Tensor | HostTensor]]:
        """Yield the tensors of a version, by name."""
        return self.saved(whole)


def _is_of_values(error: Exception) -> bool:
    """Return whether a wrong value of the configuration gives this error, and no broken machine."""
    of_shapes = type(error) is RuntimeError and _OF_SHAPES.search(str(error)) is not None
    return of_shapes or isinstance(error, _OF_VALUES)


def _usable_device(name: str) -> torch.device:
    """Return the torch device of this name; ConfigError when it cannot hold tensors here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the device "meta" has no values
    except torch.OutOfMemoryError:
        raise  # a device that is full now may serve a restarted trainer
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ConfigError(
            f"train.device {name!r} cannot be used here: {error}; use cpu, or a device of this "
            "machine, such as cuda"
        ) from error
    return device


def _check_attention(name: str) -> None:
    """Raise ConfigError where the package of this implementation of attention is missing."""
    from transformers.utils.import_utils import is_flash_attn_2_available

    if name == "flash_attention_2" and not is_flash_attn_2_available():
        raise ConfigError(
            "train.attention: flash_attention_2 needs the package flash-attn and a GPU, which are "
            "not available here; install it, or set attention: sdpa"
        )


def _set_attention(model: Any, name: str) -> None:
    """Select an implementation of attention; ConfigError where the model does not support it."""
    try:
        model.set_attn_implementation(name)
    except Exception as error:  # transformers raises anything for a value that it reads here
        if is_of_the_machine(error):
            raise
        raise ConfigError(
            f"train.attention: {name} cannot be used with models of type "
            f"{model.config.model_type}: {error}; set attention: sdpa"
        ) from error


def _recompute_activations(model: Any) -> None:
    """Keep no activations of the layers; ConfigError where the model does not support it."""
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except Exception as error:  # transformers raises anything, by model
        if is_of_the_machine(error):
            raise
        raise ConfigError(
            "train.activation_checkpointing cannot be used with models of type "
            f"{model.config.model_type}: {error}; set activation_checkpointing: false"
        ) from error


def _check_head(model: Any, vocab_size: int) -> None:
    """Raise ConfigError unless the logits are those of a linear output head, not scaled or capped.

    Cut into body and head, such a model would silently compute other logits. Called with the given
    weights: random ones may be so small that a scale or a cap makes no difference.
    """
    model.eval()
    device = next(model.parameters()).device
    probe_BT = torch.arange(PROBE_TOKENS, device=device)[None] % vocab_size
    head = model.get_output_embeddings()
    with torch.no_grad():
        logits_BTV = model(input_ids=probe_BT, use_cache=False).logits
        hidden_BTH = model.base_model(input_ids=probe_BT, use_cache=False).last_hidden_state
        followed = isinstance(head, torch.nn.Linear) and torch.allclose(
            logits_BTV, head(hidden_BTH), atol=HEAD_TOLERANCE, rtol=HEAD_TOLERANCE, equal_nan=True
        )
    if not followed:
        raise ConfigError(
            f"models of type {model.config.model_type} change their logits after a linear output "
            "head, or have no such head, "
            "which train.engine: torch does not follow; choose another model, or another engine "
            "by its import path"
        )


def _positions(model: Any, model_config: Json) -> int | None:
    """Return the tokens of the longest context, by `model_config` or the default of its class."""
    default = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    by_class = longest_context({"max_position_embeddings": default})
    return longest_context(model_config) or by_class


def _run_at_last_positions(model: Any, vocab_size: int, positions: int) -> None:
    """Run the body on a few tokens at the last positions of its context.

    Some values of a configuration are read for tokens far from the first: raises what transformers
    raises for wrong ones. Those of dynamic rotations are read when the model is built; run here,
    transformers would keep the rotations of these positions for all rows.
    """
    if any("dynamic" in str(getattr(module, "rope_type", "")) for module in model.modules()):
        return
    device = next(model.parameters()).device
    probe_BT = torch.arange(PROBE_TOKENS, device=device)[None] % vocab_size
    last_BT = torch.arange(-PROBE_TOKENS, 0, device=device)[None] + positions
    with torch.no_grad():
        model.base_model(input_ids=probe_BT, position_ids=last_BT.clamp(min=0), use_cache=False)


def _run_as_trained(model: Any, vocab_size: int) -> None:
    """Run the body on a few tokens as in training, where some settings are read that others are
    not: raises what transformers raises for wrong ones.
    """
    device = next(model.parameters()).device
    probe_BT = torch.arange(PROBE_TOKENS, device=device)[None] % vocab_size
    model.train()
    with torch.no_grad():
        model.base_model(input_ids=probe_BT, use_cache=False)
    model.eval()


def _check_packing(model: Any, vocab_size: int) -> None:
    """Raise ConfigError for a model whose packed rows see each other.

    Models with a mask of their own may ignore that positions begin again.
    """
    device = next(model.parameters()).device
    first, second = (
        torch.arange(start, start + PROBE_TOKENS, device=device) % vocab_size
        for start in (0, PROBE_TOKENS)
    )
    positions_BT = torch.arange(PROBE_TOKENS, device=device).repeat(2)[None]
    with torch.no_grad():
        packed_BTH, alone_BTH = (
            model.base_model(
                input_ids=tokens_BT, position_ids=positions_BT[:, : tokens_BT.shape[1]],
                use_cache=False,
            ).last_hidden_state
            for tokens_BT in (torch.cat([first, second])[None], second[None])
        )  # fmt: skip
    difference = (packed_BTH[:, PROBE_TOKENS:] - alone_BTH).norm()
    if difference > PACKING_TOLERANCE * alone_BTH.norm():
        raise ConfigError(
            f"train.packing: packed cannot be used with models of type {model.config.model_type}: "
            "packed rows change each other's hidden states; set packing: padded"
        )
