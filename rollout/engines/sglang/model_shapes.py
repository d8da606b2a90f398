"""The names and shapes of a model's tensors, to check weights that no server would refuse: SGLang
ignores unknown names, and keeps what it has for missing ones.
"""

from collections.abc import Mapping

from storage.errors import ConfigError
from storage.records.types import Json
from storage.records.weights import HostTensor

NAMES_SHOWN_MAX = 5

Shapes = Mapping[str, tuple[int, ...]]


def model_shapes(model_config: Json) -> tuple[Shapes, frozenset[str]]:
    """Return name → shape of all tensors, and the names that may be absent because they are tied.

    The model is built on the meta device, without memory for tensors.

    Raises:
        ConfigError: transformers cannot build the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(model_config)
    try:
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:  # transformers raises anything, by model
        raise ConfigError(
            f"transformers cannot build the model of this config.json: "
            f"{type(error).__name__}: {error}"
        ) from error
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    tied = {name for name, tensor in state.items() if first.setdefault(id(tensor), name) != name}
    return {name: tuple(tensor.shape) for name, tensor in state.items()}, frozenset(tied)


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
