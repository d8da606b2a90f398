"""The layers of a transformers model, compiled by torch.compile.

Only the forward pass of each layer is compiled, and the backward pass with it: layers of one kind
share their code, whatever their number, and hooks around a layer (FSDP2, checkpointing of
activations) stay as they are. Rows and lengths are symbols, so that one compiled form serves all
blocks; a dimension of size 1 makes another.
"""

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, wraps
from typing import Any

import torch

from storage.errors import ConfigError
from storage.machine.temporary_folders import temporary_folder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
CACHE_PREFIX = "astraflow-inductor-"
FORMS_MAX = 64
"""Compiled forms of one layer class; beyond them torch would run it uncompiled. A form exists for
each combination of: gradients or none, one row or several, an adapter before it or not, on or off,
and the model in training or its reference.
"""


def layers_of(model: Any) -> list[torch.nn.Module]:
    """Return the modules that the model's class declares indivisible: its transformer layers."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: Any) -> None:
    """Compile each layer of `model` where it is first called.

    Raises:
        ConfigError: the class of the model names no layers. A layer that cannot be compiled raises
            it where it is first called.
    """
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"train.compile: models of type {model.config.model_type} name no layers to compile; "
            "leave compile out"
        )
    _prepare()
    for layer in layers:
        layer.forward = _compiled(layer.forward, model.config.model_type)


@cache
def check_compiler(device: torch.device) -> None:
    """Compile a sum on `device`; ConfigError where that fails, as without a C++ compiler."""
    _prepare()
    value = torch.ones(2, device=device)
    try:
        torch.compile(lambda: value + value, fullgraph=True)()
    except torch._dynamo.exc.TorchDynamoException as error:
        raise ConfigError(
            f"train.compile: torch cannot compile for {device.type} on this machine: "
            f"{_reason(error)}; install a C++ compiler (the package g++), or leave "
            "compile out"
        ) from error


def _compiled(forward: Callable[..., Any], model_type: str) -> Callable[..., Any]:
    # fullgraph: a part that cannot be compiled, and one form too many, are errors.
    compiled = torch.compile(forward, dynamic=True, fullgraph=True)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except (
            torch._dynamo.exc.TorchDynamoException,
            torch._dynamo.exc.FailOnRecompileLimitHit,
        ) as error:
            raise ConfigError(
                f"train.compile: a layer of a model of type {model_type} cannot be compiled: "
                f"{_reason(error)}; leave compile out"
            ) from error

    return call


@cache
def _prepare() -> None:
    """Give this process a cache of compiled code of its own, and limits that are errors.

    In a shared cache a process that is killed while it compiles would leave a truncated library,
    which ends the next process that loads it.
    """
    temporary = ExitStack()
    atexit.register(temporary.close)
    folder = temporary.enter_context(temporary_folder(CACHE_PREFIX))
    os.environ[CACHE_VARIABLE] = str(folder)  # before the imports, which make the folder
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.codecache as code_cache

    # torch keeps compiled headers in /tmp/torchinductor_USER, which another user may have made.
    code_cache._HEADER_DIR = str(folder / "headers")
    code_cache._HEADER_LOCK_DIR = str(folder / "headers" / "locks")
    torch._dynamo.config.recompile_limit = FORMS_MAX
    # The backward pass is compiled with the forward pass, where errors get their names.
    torch._functorch.config.force_non_lazy_backward_lowering = True


def _reason(error: Exception) -> str:
    """Return the first lines of torch's message, up to the one with a reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    return " ".join(shown) or type(error).__name__
