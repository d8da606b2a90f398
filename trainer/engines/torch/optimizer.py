"""The optimizers of the masters, and the form of their state in a checkpoint.

optimizer/{parameter}/{moment}    one tensor: exp_avg and exp_avg_sq of AdamW, momentum_buffer
                                  of Muon, and those that a custom optimizer has
"""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from storage.errors import ConfigError, CorruptError, TransientError
from storage.import_path import FOREIGN_ERRORS, construct, described, foreign_code
from storage.records.numbers import INTEGER_BITS, QUANTITY_MAX
from storage.records.weights import HostTensor
from trainer.config import TrainConfig
from trainer.device_errors import device_errors
from trainer.engines.torch.host_tensors import DTYPES, NAMES, to_host, to_torch
from trainer.engines.torch.saved_state import OptimizerProgress
from trainer.optimizers import AdamWOptimizer, CustomOptimizer

SECOND_MOMENT = "exp_avg_sq"
MOMENTS = ("exp_avg", SECOND_MOMENT)
MOMENTUM = "momentum_buffer"
STEP = "step"
_KNOWN: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: MOMENTS,
    torch.optim.Muon: (MOMENTUM,),
}
"""Moments of each parameter; those of a custom optimizer are not known."""


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: TrainConfig
) -> torch.optim.AdamW:
    """Create AdamW with weight decay on matrices only, not on norms and biases."""
    return torch.optim.AdamW(parameter_groups(parameters, config), **adamw_settings(config))


def adamw_settings(config: TrainConfig) -> dict[str, Any]:
    """Return AdamW's arguments.

    fused: one pass over each parameter instead of a dozen small operations, on CPU and GPU.
    """
    return {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}


def make_optimizers(
    parameters: Iterable[torch.nn.Parameter],
    embeddings: Iterable[Tensor],
    config: TrainConfig,
) -> list[torch.optim.Optimizer]:
    """Create the optimizers that `config.optimizer` selects; each parameter is in one of them.

    Args:
        embeddings: those that have a row for each token or position, the output head among them.

    Raises ConfigError where a custom optimizer cannot be built.
    """
    listed, chosen = list(parameters), config.optimizer
    if isinstance(chosen, CustomOptimizer):
        return [_custom(listed, chosen, config)]
    if isinstance(chosen, AdamWOptimizer):
        return [make_optimizer(listed, config)]
    apart = {id(parameter) for parameter in embeddings}
    hidden = [each for each in listed if each.dim() == 2 and id(each) not in apart]
    hidden_ids = {id(parameter) for parameter in hidden}
    muon = torch.optim.Muon(
        hidden,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=chosen.momentum,
        nesterov=chosen.nesterov,
        ns_steps=chosen.ns_steps,
        adjust_lr_fn=chosen.adjust_lr,
    )
    return [muon, make_optimizer([each for each in listed if id(each) not in hidden_ids], config)]


def _custom(
    parameters: list[torch.nn.Parameter], chosen: CustomOptimizer, config: TrainConfig
) -> torch.optim.Optimizer:
    groups = parameter_groups(parameters, config)
    made: torch.optim.Optimizer = construct(
        lambda: partial(chosen.find(), groups, lr=config.lr),
        chosen.path,
        chosen.args,
        ("train.optimizer.path", "train.optimizer.args"),
        *device_errors(),
    )
    with foreign_code(f"train.optimizer.path: param_groups of {chosen.path}"):
        owned = [each for group in made.param_groups for each in group["params"]]
    known = {id(parameter) for parameter in parameters}
    for parameter in owned:
        if id(parameter) not in known:
            raise ConfigError(
                f"train.optimizer: {chosen.path} has a parameter of shape {list(parameter.shape)} "
                "that is none of the model's; keep such a tensor in the state of a parameter"
            )
    return made


def parameter_groups(
    parameters: Iterable[torch.nn.Parameter], config: TrainConfig
) -> list[dict[str, object]]:
    """Return the optimizer's groups: matrices, then vectors, whose weights do not decay."""
    listed = list(parameters)
    matrices = [parameter for parameter in listed if parameter.dim() >= 2]
    vectors = [parameter for parameter in listed if parameter.dim() < 2]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Clear the gradients; ConfigError where a custom optimizer fails (`_calling`)."""
    with _calling(optimizer, "zero_grad()"):
        optimizer.zero_grad(set_to_none=True)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step; ConfigError where a custom optimizer fails (`_calling`), as with a state that it
    refuses.
    """
    advice = (
        "; correct the class or its args. If it was resumed, its saved state may be damaged: "
        "delete the newest checkpoint"
    )
    with _calling(optimizer, "step()", advice):
        optimizer.step()


def _calling(
    optimizer: torch.optim.Optimizer, what: str, advice: str = ""
) -> AbstractContextManager[None]:
    """Name a custom optimizer's class, and `what` is called of it, in the errors of the block.

    Those of a device, the others that `foreign_code` does not translate, and those of torch's own
    optimizers are raised as they are.
    """
    if type(optimizer) in _KNOWN:
        return nullcontext()
    where = f"train.optimizer: {what} of {type(optimizer).__name__}"
    return foreign_code(where, *device_errors(), advice=advice)


def saved_state(
    optimizers: Iterable[torch.optim.Optimizer],
    names: Mapping[int, str],
    copied: Callable[[Tensor], HostTensor] = to_host,
) -> tuple[dict[str, HostTensor], OptimizerProgress]:
    """Return moments by `{parameter}/{moment}`, and what is not a tensor.

    `names` are the parameters' names by id; `copied` copies a moment to the host. ConfigError where
    a custom optimizer has a state of another type, or of what is no parameter, or that cannot be
    read.
    """
    tensors: dict[str, HostTensor] = {}
    updates: dict[str, int] = {}
    moments: dict[str, tuple[str, ...]] = {}
    numbers: dict[str, dict[str, float | int]] = {}
    for optimizer in optimizers:
        with _calling(optimizer, "reading the state"):
            for parameter, state in optimizer.state.items():
                name, own = _name(optimizer, parameter, names), []
                for key, value in state.items():
                    if key == STEP and _counts_steps(value):
                        updates[name] = int(value)
                        continue
                    _check_storable(optimizer, name, key, value)
                    if isinstance(value, Tensor):
                        own.append(key)
                        tensors[f"{name}/{key}"] = copied(value)
                    else:
                        is_flag = isinstance(value, bool)
                        numbers.setdefault(name, {})[key] = int(value) if is_flag else value
                if name not in updates or sorted(own) != sorted(MOMENTS):
                    moments[name] = tuple(sorted(own))
    return tensors, OptimizerProgress(updates=updates, moments=moments, numbers=numbers)


def _name(optimizer: torch.optim.Optimizer, parameter: object, names: Mapping[int, str]) -> str:
    """Return the name of what has a state; ConfigError where it is no parameter of the model."""
    name = names.get(id(parameter))
    if name is None:
        raise ConfigError(
            f"train.optimizer: {type(optimizer).__name__} has a state of {_key(parameter)}, which "
            "is no parameter of the model; keep it in the state of a parameter"
        )
    return name


def _check_storable(
    optimizer: torch.optim.Optimizer, name: str, key: object, value: object
) -> None:
    """Raise ConfigError for a key or value in the state of a parameter that no checkpoint has."""
    owner = f"train.optimizer: {type(optimizer).__name__}"
    if not isinstance(key, str):
        raise ConfigError(
            f"{owner}: {key!r} in the state of {name} is a key that is no text, which no "
            "checkpoint can have"
        )
    if not (_can_be_stored(value) if isinstance(value, Tensor) else _is_number(value)):
        raise ConfigError(
            f"{owner}: {key} in the state of {name} is {_described(value)}; only "
            f"finite numbers and dense tensors of {', '.join(DTYPES)} can be saved"
        )


def _is_number(value: object) -> bool:
    """Return whether a checkpoint can have a number."""
    if isinstance(value, int):
        return value.bit_length() <= INTEGER_BITS
    return isinstance(value, float) and math.isfinite(value)


def _can_be_stored(tensor: Tensor) -> bool:
    return tensor.dtype in NAMES and tensor.layout == torch.strided


def _key(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return reprlib.repr(value)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and {value.layout}"
    return str(value) if isinstance(value, float) else f"a {type(value).__name__}"


def _counts_steps(value: object) -> bool:
    """Return whether a state is a counter as the optimizers of torch have it: a float32 number."""
    return (
        isinstance(value, Tensor)
        and value.dim() == 0
        and value.dtype == torch.float32
        and float(value).is_integer()
        and 0 <= float(value) <= QUANTITY_MAX
    )


def restore_state(
    optimizers: Iterable[torch.optim.Optimizer],
    names: Mapping[int, str],
    moments: Mapping[str, Mapping[str, Tensor]],
    progress: OptimizerProgress,
) -> None:
    """Restore what `saved_state` returned, checked by `checked_moments`.

    CorruptError where the state is not one of these optimizers; ConfigError where the `state_dict`
    of a custom one fails.
    """
    for optimizer in optimizers:
        with _calling(optimizer, "state_dict()"):
            template = optimizer.state_dict()
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        named = {parameter: names[id(parameter)] for parameter in parameters}
        for index, name in enumerate(named.values()):
            if name in moments:
                _check_kind(optimizer, name, moments[name].keys(), name in progress.updates)
                state: dict[str, object] = dict(progress.numbers.get(name, {}))
                if name in progress.updates:
                    state[STEP] = torch.tensor(float(progress.updates[name]))
                template["state"][index] = state | dict(moments[name])
        try:
            optimizer.load_state_dict(template)
        except FOREIGN_ERRORS as error:  # of a custom optimizer
            if isinstance(
                error, (ConfigError, TransientError, MemoryError, OSError, *device_errors())
            ):
                raise
            raise CorruptError(
                f"{type(optimizer).__name__} refuses its saved state: {described(error)}"
            ) from error
        if type(optimizer) not in _KNOWN:
            _keep_dtypes(
                optimizer, {each: moments[name] for each, name in named.items() if name in moments}
            )


def _keep_dtypes(
    optimizer: torch.optim.Optimizer, moments: Mapping[torch.nn.Parameter, Mapping[str, Tensor]]
) -> None:
    """Give the tensors of a state their own dtypes, which `load_state_dict` made the parameters'.

    Those that the optimizer has put into another form itself stay as they are.
    """
    for parameter, saved in moments.items():
        state = optimizer.state[parameter]
        for key, tensor in saved.items():
            loaded = state.get(key)
            if isinstance(loaded, Tensor) and loaded.dtype == parameter.dtype != tensor.dtype:
                state[key] = tensor.to(loaded.device)


def _check_kind(
    optimizer: torch.optim.Optimizer, name: str, moments: Iterable[str], has_step: bool
) -> None:
    expected = _KNOWN.get(type(optimizer))
    has_state = set(moments), has_step
    if expected is not None and has_state != (set(expected), expected == MOMENTS):
        raise CorruptError(
            f"the optimizer's state of {name} is not one of {type(optimizer).__name__}, which "
            f"train.optimizer selects: its moments are {', '.join(sorted(moments)) or 'none'}"
        )


def checked_moments(
    tensors: Mapping[str, HostTensor],
    updates: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    others: Mapping[str, Iterable[str]] = MappingProxyType({}),
    *,
    is_custom: bool = False,
) -> dict[str, dict[str, Tensor]]:
    """Return parameter → moment → tensor on the CPU.

    `tensors` are the moments by `{parameter}/{moment}`, `updates` the parameters with the moments
    of AdamW, `others` the moments of those that have different ones, `shapes` those of the model's
    parameters. `is_custom`: the moments may have any dtype and shape. CorruptError unless the
    optimizer can continue from the moments.
    """
    names = dict.fromkeys(updates, MOMENTS) | {name: tuple(each) for name, each in others.items()}
    expected = {f"{name}/{moment}" for name, moments in names.items() for moment in moments}
    if expected != tensors.keys() or not names.keys() <= shapes.keys():
        raise CorruptError(
            "the optimizer's state does not belong to this model: its parameters have other names"
        )
    return {
        name: {
            moment: _checked(
                f"{name}/{moment}", tensors[f"{name}/{moment}"], None if is_custom else shapes[name]
            )
            for moment in moments
        }
        for name, moments in names.items()
    }


def _checked(label: str, moment: HostTensor, shape: tuple[int, ...] | None) -> Tensor:
    """Return the moment; `shape` is that of its parameter, and None for a custom optimizer."""
    name = label.rpartition("/")[2]
    is_known = shape is not None and name in (*MOMENTS, MOMENTUM)
    if is_known and (moment.dtype, moment.shape) != ("F32", shape):
        raise CorruptError(
            f"optimizer/{label} is {moment.dtype} {list(moment.shape)}; its parameter is "
            f"F32 {list(shape or ())}"
        )
    tensor = to_torch(moment)
    if not tensor.isfinite().all():
        raise CorruptError(f"optimizer/{label} has an element that is not finite")
    if is_known and name == SECOND_MOMENT and (tensor < 0).any():
        raise CorruptError(f"optimizer/{label} is a mean of squares and has a negative element")
    return tensor
