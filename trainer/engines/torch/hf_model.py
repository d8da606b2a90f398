"""A causal language model of the transformers library with given weights, cut into body and head.

    config.json ──▶ skeleton without memory ──shapes compared with the weights──▶ model

The body gives hidden states; the head is applied only to the positions that need it.

Shape legend: B rows, T padded tokens, N loss tokens, H hidden size, V vocabulary.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import Embedding
from torch.nn.modules.module import register_module_parameter_registration_hook

from storage.errors import AstraFlowError, ConfigError, CorruptError
from storage.formats.model_config import longest_context, without_code
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.engines.step.logprobs import token_logprobs
from trainer.engines.torch.compiled_layers import compile_layers
from trainer.engines.torch.host_tensors import to_torch

PROBE_TOKENS = 4
HEAD_TOLERANCE = 1e-4
PACKING_TOLERANCE = 1e-4
"""Largest relative difference of the hidden states of a packed row."""
NAMES_SHOWN_MAX = 5
PARAMETERS_SPARE = 1000
"""Parameters that a skeleton may have beyond the given ones, so that missing ones are named."""
TABLE_BYTES_MIN = 2**28
"""So many bytes a model may compute for itself, however small its weights are."""
Whole: TypeAlias = Callable[[str, Tensor], Tensor]
"""(name, tensor) → the whole tensor, of which a rank may hold a part; all ranks take part."""
_DROPOUT = re.compile("dropout|pdrop|layerdrop|drop_path|drop_rate|jitter_noise")
"""In the name of a setting of a model: the probability or the size of random changes in training.
"""


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
        were compared, so a `config.json` of absurd sizes allocates nothing.

        Raises:
            CorruptError: names or shapes of `weights` differ from the model's.
            ConfigError: the device cannot be used, the model cannot be built, it changes its logits
                after the head, or its packed rows see each other.
        """
        self.device = _usable_device(device)
        self._rounds = precision == "bf16"
        _check_attention(attention)
        check_fit(model_config, weights)
        self.model = _build(model_config).to(self.device)
        self.body = self.model.base_model
        self.head: torch.nn.Linear = self.model.get_output_embeddings()
        self.positions = longest_context(model_config)
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(to_torch(weights[name]))
        with _errors_of(model_config):
            self.vocab_size: int = self.model.config.get_text_config().vocab_size
            _check_head(self.model, self.vocab_size)
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
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._rounds):
            hidden_BTH: Tensor = self.body(
                input_ids=tokens_BT, position_ids=positions_BT, use_cache=False
            ).last_hidden_state
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
        return _untied(self.model)

    def saved(self, whole: Whole) -> Iterator[tuple[str, Tensor | HostTensor]]:
        """Yield what a checkpoint has of the model, by name."""
        for name, tensor in self.tensors().items():
            yield name, whole(name, tensor)

    def published(self, whole: Whole) -> Iterator[tuple[str, Tensor | HostTensor]]:
        """Yield the tensors of a version, by name."""
        return self.saved(whole)


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
        if _is_of_the_machine(error):
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
        if _is_of_the_machine(error):
            raise
        raise ConfigError(
            "train.activation_checkpointing cannot be used with models of type "
            f"{model.config.model_type}: {error}; set activation_checkpointing: false"
        ) from error


def _untied(model: Any) -> dict[str, Tensor]:
    """Return the state dict of `model` with each tensor once, by its first name."""
    first: dict[int, str] = {}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {
        name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name
    }


def check_fit(model_config: Json, weights: Mapping[str, HostTensor]) -> None:
    """Compare names and shapes of `weights` with those of the model of `model_config`.

    The model is built on the meta device, which allocates no memory for tensors.

    Raises:
        CorruptError: they differ.
        ConfigError: transformers makes no model of `model_config`.
    """
    try:
        with torch.device("meta"), _limited_parameters(2 * len(weights) + PARAMETERS_SPARE):
            skeleton = _build(model_config)
    except ConfigError as error:
        if type(error.__cause__) is not RuntimeError:  # torch: the number of elements overflows
            raise
        raise CorruptError(
            "the weights do not fit the model's config.json, whose sizes are absurd: "
            f"{error.__cause__}"
        ) from error
    _check_tables(skeleton, weights)
    tensors = _untied(skeleton)
    missing = tensors.keys() - weights.keys()
    unknown = weights.keys() - skeleton.state_dict().keys()
    misshapen = {
        name
        for name, tensor in tensors.items()
        if name in weights and tuple(tensor.shape) != weights[name].shape
    }
    for fault, names in (
        ("needs tensors that are not given", missing),
        ("has no place for", unknown),
        ("has other shapes for", misshapen),
    ):
        if names:
            raise CorruptError(
                f"the weights do not fit the model's config.json, which {fault}: {_listed(names)}"
            )


def _check_tables(skeleton: Any, weights: Mapping[str, HostTensor]) -> None:
    """Raise CorruptError when the buffers of `skeleton` take far more memory than the weights.

    A model computes them when it is built: masks, positions. They may grow with the square of a
    size in `config.json`.
    """
    held = sum(tensor.bits.nbytes for tensor in weights.values())
    needed = sum(buffer.nbytes for buffer in skeleton.buffers())
    if needed > max(held, TABLE_BYTES_MIN):
        raise CorruptError(
            f"the weights do not fit the model's config.json: {held} bytes of weights, and tables "
            f"of {needed} bytes that the model computes"
        )


@contextmanager
def _limited_parameters(num_max: int) -> Iterator[None]:
    """Raise CorruptError where more than `num_max` parameters are created in the block.

    A tied parameter counts twice.
    """
    num_created = 0

    def count(*_: object) -> None:
        nonlocal num_created
        num_created += 1
        if num_created > num_max:
            raise CorruptError(
                "the weights do not fit the model's config.json, which needs more than "
                f"{num_max} tensors"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _listed(names: set[str]) -> str:
    """Return the first names in alphabetical order, and the number of the others."""
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(sorted(names)[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def auto_classes() -> tuple[Any, Any]:
    """Return AutoConfig and AutoModelForCausalLM of transformers, which take seconds to import.

    transformers imports scikit-learn where that is installed, and SciPy and pandas with it, for one
    way of generating text: a fifth of the time, and nothing that training uses.
    """
    import transformers.utils

    utils: Any = transformers.utils
    available = getattr(utils, "is_sklearn_available", None)  # private in this form
    utils.is_sklearn_available = lambda: False
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    finally:
        utils.is_sklearn_available = available
    return AutoConfig, AutoModelForCausalLM


@contextmanager
def _errors_of(model_config: Json) -> Iterator[None]:
    """Translate what transformers raises for a wrong value of a `config.json` into ConfigError.

    Some values are found when the model is built, others when it runs.
    """
    try:
        yield
    except AstraFlowError:
        raise
    except Exception as error:  # transformers raises anything for a wrong value
        if _is_of_the_machine(error):
            raise
        kind = model_config.get("model_type", "unnamed")
        code = "; its own code (auto_map) is never run" if "auto_map" in model_config else ""
        raise ConfigError(
            f"config.json of the base model (model_type {kind}) gives no causal language model: "
            f"{type(error).__name__}: {error}; correct this value, or use a model type that the "
            f"installed transformers has{code}"
        ) from error


def _is_of_the_machine(error: Exception) -> bool:
    """Return whether this may end otherwise in another process: a full memory, a file that the
    operating system does not read. transformers' own OSError (no such model) has no number.
    """
    if isinstance(error, OSError):
        return error.errno is not None
    # torch's words, on the CPU. Errors of other types may quote them from the file.
    is_full = type(error) is RuntimeError and "can't allocate memory" in str(error)
    return is_full or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _build(model_config: Json) -> Any:
    """Build a float32 model without dropout, with random weights, on the current default device.

    Raises ConfigError for a `config.json` that transformers makes no model of.
    """
    AutoConfig, AutoModelForCausalLM = auto_classes()
    with _errors_of(model_config):
        config = AutoConfig.for_model(**without_code(model_config))
        _switch_off_dropout(config)
        config.return_dict = True
        # A config.json may name code of its own (auto_map): a model is data, so that is never run,
        # nor offered to be.
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def _switch_off_dropout(config: Any) -> None:
    """Set every dropout probability of a configuration, and of its parts, to 0.

    Attention reads its probability from the configuration, not from a module.
    """
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _switch_off_dropout(value)
        elif _DROPOUT.search(name) and type(value) in (int, float):
            setattr(config, name, type(value)(0))


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
