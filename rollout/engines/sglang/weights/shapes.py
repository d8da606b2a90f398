"""The names and shapes of a model's tensors, to check weights that no server would refuse: SGLang
ignores unknown names, and keeps what it has for missing ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from storage.errors import ConfigError, CorruptError
from storage.formats.json_objects import dump
from storage.formats.model_config import check_sizes, without_code
from storage.formats.plain_model import is_plain
from storage.machine.child_limits import MEMORY_BYTES_MAX
from storage.machine.kept_process import answered, result
from storage.machine.limited_process import ProcessDiedError, ProcessTimeoutError
from storage.records.types import Json
from storage.records.weights import HostTensor

SHAPES_CHILD: Final = "rollout.engines.sglang.weights.shapes_child"
BUILD_CPU_S: Final = 20.0
"""CPU seconds in which a model is built without memory for tensors. Common ones take a few."""
NAMES_SHOWN_MAX = 5
SPARE_TENSORS = 1000
"""So many more may be built than the weights have, so that missing ones are named."""

Shapes = Mapping[str, tuple[int, ...]]


def model_shapes(
    model_config: Json, given: Sequence[tuple[int, ...]]
) -> tuple[Shapes, frozenset[str]]:
    """Return name → shape of all tensors, and the names that may be absent because they are tied.

    The model is built on the meta device, without memory for tensors, unless its sizes cannot be
    those of tensors with the shapes `given`: absurd ones take neither memory nor time. One whose
    configuration is not plain is built in a child process.

    Raises:
        ConfigError: transformers cannot build the model, or needs too much time or memory for it,
            or its sizes are absurd.
    """
    try:
        check_sizes(dump(model_config), given, "config.json")
    except CorruptError as error:
        raise ConfigError(str(error)) from error
    if is_plain(model_config):
        return built_shapes(model_config, len(given))
    return _built_in_process(model_config, len(given))


def _built_in_process(model_config: Json, num_tensors: int) -> tuple[Shapes, frozenset[str]]:
    """Call `built_shapes` in a child process with limits."""
    from rollout.engines.sglang.weights.shapes_child import ERRORS

    question = {"model_config": model_config, "num_tensors": num_tensors, "cpu_s": BUILD_CPU_S}
    try:
        shapes, tied = result(answered(SHAPES_CHILD, question), ERRORS)
    except (ProcessTimeoutError, ProcessDiedError) as error:
        raise ConfigError(
            f"transformers cannot build the model of this config.json within {BUILD_CPU_S:g} s of "
            f"CPU time and {MEMORY_BYTES_MAX >> 20:,} MiB beside its tensors: {error}"
        ) from error
    return {name: tuple(shape) for name, shape in shapes.items()}, frozenset(tied)


def built_shapes(model_config: Json, num_tensors: int) -> tuple[Shapes, frozenset[str]]:
    """Return what `model_shapes` returns; `num_tensors` limits the parameters that are made."""
    with _limited_parameters(num_tensors):
        model = _skeleton(model_config)
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    tied = {name for name, tensor in state.items() if first.setdefault(id(tensor), name) != name}
    return {name: tuple(tensor.shape) for name, tensor in state.items()}, frozenset(tied)


def _skeleton(model_config: Json) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = without_code(model_config)
    try:
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        with torch.device("meta"):
            # By name, because a config.json may name a kernel of the hub instead, which is code.
            return AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=False
            )  # type: ignore[no-untyped-call]
    except ConfigError:
        raise
    except Exception as error:  # transformers raises anything, by model
        raise ConfigError(
            f"transformers cannot build the model of this config.json: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def _limited_parameters(num_tensors: int) -> Iterator[None]:
    """Raise ConfigError where far more than `num_tensors` parameters are created in the block."""
    from torch.nn.modules.module import register_module_parameter_registration_hook

    num_max = 2 * num_tensors + SPARE_TENSORS  # a tied tensor counts twice
    created = 0

    def count(*_: object) -> None:
        nonlocal created
        created += 1
        if created > num_max:
            raise ConfigError(
                f"there are {num_tensors} tensors, and the model of their config.json has more "
                f"than {num_max}"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def check_tensors(tensors: Mapping[str, HostTensor], shapes: Shapes, tied: frozenset[str]) -> None:
    """Raise ConfigError for missing, unknown or misshapen tensors."""
    if lacking := sorted(shapes.keys() - tensors.keys() - tied):
        raise ConfigError(f"the weights lack {_shown(lacking)}, which the model has")
    if unknown := sorted(tensors.keys() - shapes.keys()):
        raise ConfigError(f"the weights have {_shown(unknown)}, which the model lacks")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise ConfigError(
                f"{name} has shape {list(tensor.shape)}, and the model's is {list(shapes[name])}"
            )


def _shown(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {rest} more" if rest > 0 else "")
