"""Models of the transformers library, built of a `config.json`, which is untrusted.

    config.json ──▶ skeleton without memory ──names and shapes compared with the weights──▶ model

A `config.json` of absurd sizes allocates nothing. The skeleton of one that is not plain is made in
a child process (`fit_child.py`) first, with limits: this process has none.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from storage.errors import AstraFlowError, ConfigError, CorruptError
from storage.formats.model_config import without_code
from storage.formats.plain_model import is_plain
from storage.machine.child_limits import MEMORY_BYTES_MAX
from storage.machine.kept_process import answered, result
from storage.machine.limited_process import ProcessDiedError, ProcessTimeoutError
from storage.machine.transformers_import import light_imports
from storage.records.types import Json
from storage.records.weights import HostTensor

FIT_CHILD: Final = "trainer.engines.torch.hf.fit_child"
BUILD_CPU_S: Final = 20.0
"""CPU seconds in which a model is built without memory for tensors. Common ones take a few."""
NAMES_SHOWN_MAX = 5
PARAMETERS_SPARE = 1000
"""Parameters that a skeleton may have beyond the given ones, so that missing ones are named."""
TABLE_BYTES_MIN = 2**28
"""So many bytes a model may compute for itself, however small its weights are."""
_DROPOUT = re.compile("dropout|pdrop|layerdrop|drop_path|drop_rate|jitter")
"""In the name of a setting of a model: the probability or the size of random changes in training.
"""


def auto_classes() -> tuple[Any, Any]:
    """Return AutoConfig and AutoModelForCausalLM of transformers, which take seconds to import."""
    import transformers.utils

    with light_imports(transformers.utils):
        from transformers import AutoConfig, AutoModelForCausalLM
    return AutoConfig, AutoModelForCausalLM


def build(model_config: Json) -> Any:
    """Build a float32 model without dropout, with random weights, on the current default device.

    Raises ConfigError for a `config.json` that transformers makes no model of.
    """
    AutoConfig, AutoModelForCausalLM = auto_classes()
    with errors_of(model_config):
        _check_type(model_config.get("model_type"))
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


def _check_type(model_type: object) -> None:
    """Raise ValueError for a type without a causal language model, before its class of
    configurations is built: most of transformers' classes are of other models.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"transformers has no causal language model of type {model_type}")


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


@contextmanager
def errors_of(model_config: Json) -> Iterator[None]:
    """Translate what transformers raises for a wrong value of a `config.json` into ConfigError.

    Some values are found when the model is built, others when it runs.
    """
    try:
        yield
    except AstraFlowError:
        raise
    except Exception as error:  # transformers raises anything for a wrong value
        if is_of_the_machine(error):
            raise
        raise wrong_value(model_config, error) from error


def wrong_value(model_config: Json, error: Exception) -> ConfigError:
    """Return the error for a `config.json` with which transformers raises `error`."""
    kind = model_config.get("model_type", "unnamed")
    code = "; its own code (auto_map) is never run" if "auto_map" in model_config else ""
    return ConfigError(
        f"config.json of the base model (model_type {kind}) gives no causal language model: "
        f"{type(error).__name__}: {error}; correct this value, or use a model type that the "
        f"installed transformers has{code}"
    )


def is_of_the_machine(error: Exception) -> bool:
    """Return whether this may end otherwise in another process: a full memory, a file that the
    operating system does not read. transformers' own OSError (no such model) has no number.
    """
    if isinstance(error, OSError):
        return error.errno is not None
    # torch's words, on the CPU. Errors of other types may quote them from the file.
    is_full = type(error) is RuntimeError and "can't allocate memory" in str(error)
    return is_full or isinstance(error, MemoryError | torch.OutOfMemoryError)


def check_fit(model_config: Json, weights: Mapping[str, HostTensor]) -> None:
    """Compare names and shapes of `weights` with those of the model of `model_config`.

    The model is built on the meta device, which allocates no memory for tensors. One whose
    configuration is not plain is built in a child process first.

    Raises:
        CorruptError: they differ.
        ConfigError: transformers makes no model of `model_config`, or needs too much time or
            memory.
    """
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    num_bytes = sum(tensor.bits.nbytes for tensor in weights.values())
    if not is_plain(model_config):
        _check_in_process(model_config, shapes, num_bytes)
    check_shapes(model_config, shapes, num_bytes)


def _check_in_process(
    model_config: Json, shapes: Mapping[str, tuple[int, ...]], num_bytes: int
) -> None:
    """Call `check_shapes` in a child process with limits."""
    from trainer.engines.torch.hf.fit_child import ERRORS

    question = {
        "model_config": model_config,
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "num_bytes": num_bytes,
        "cpu_s": BUILD_CPU_S,
    }
    try:
        answer = answered(FIT_CHILD, question)
    except (ProcessTimeoutError, ProcessDiedError) as error:
        raise ConfigError(
            f"config.json of the base model (model_type {model_config.get('model_type')}) gives no "
            f"model within {BUILD_CPU_S:g} s of CPU time and {MEMORY_BYTES_MAX >> 20:,} MiB beside "
            f"its tensors: {error}; correct it"
        ) from error
    result(answer, ERRORS)


def check_shapes(model_config: Json, shapes: Mapping[str, tuple[int, ...]], num_bytes: int) -> None:
    """Compare `shapes` by name, and the bytes of the tensors, with the model of `model_config`.

    Raises as `check_fit`.
    """
    try:
        with torch.device("meta"), _limited_parameters(2 * len(shapes) + PARAMETERS_SPARE):
            skeleton = build(model_config)
    except ConfigError as error:
        if type(error.__cause__) is not RuntimeError:  # torch: the number of elements overflows
            raise
        raise CorruptError(
            "the weights do not fit the model's config.json, whose sizes are absurd: "
            f"{error.__cause__}"
        ) from error
    _check_tables(skeleton, num_bytes)
    tensors = untied(skeleton)
    missing = tensors.keys() - shapes.keys()
    unknown = shapes.keys() - skeleton.state_dict().keys()
    misshapen = {
        name
        for name, tensor in tensors.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
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


def _check_tables(skeleton: Any, held: int) -> None:
    """Raise CorruptError when the buffers of `skeleton` take far more memory than the weights.

    A model computes them when it is built: masks, positions. They may grow with the square of a
    size in `config.json`.
    """
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


def untied(model: Any) -> dict[str, Tensor]:
    """Return the state dict of `model` with each tensor once, by its first name."""
    first: dict[int, str] = {}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {
        name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name
    }
