"""The main program of an SGLang server that a rollout worker starts.

It runs in the environment of the server, in which AstraFlow is not installed, so that it imports
nothing of it. The first line of its standard input is a JSON object, so that no other user of the
machine can read the API key:

    {"args": ["--model-path", "/dev/shm/…", …], "api_key": "…", "without_kernels": true}

The worker never closes the other end of the standard input while it needs the server: when it ends,
however it ends, the server and its processes are killed.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

EXIT_SETTINGS = 78
"""Exit status where SGLang cannot be imported."""
WITHOUT_KERNELS = "ASTRAFLOW_SGLANG_WITHOUT_KERNELS"
"""Set for the server's own child processes, which import this module, too."""
KERNEL_PACKAGES = {"sgl_kernel", "torchvision"}
"""Packages that SGLang imports at its start, and that cannot be imported without a GPU's libraries.
With the attention backend `torch_native` nothing of them is called.
"""


class _Missing:
    """An attribute of a package that is not there; calling it is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> object:
        raise NotImplementedError(f"{self._name} needs a GPU")


class _MissingPackage(types.ModuleType):
    __version__ = "0.0.0"
    __path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in KERNEL_PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _MissingPackage(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _do_without_gpu() -> None:
    """Stand in for what SGLang imports or calls although it serves from a CPU."""
    sys.meta_path.insert(0, _KernelFinder())
    import torch

    torch.cuda.synchronize = lambda device=None: None
    # The code of adapters pins host memory, which needs a GPU.
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010  # mypy
    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def call(*args: Any, **settings: Any) -> Any:
        return make(*args, **{**settings, "pin_memory": False})

    return call


if os.environ.get(WITHOUT_KERNELS):
    _do_without_gpu()


def _end_with_the_worker() -> None:
    """Wait for the end of the standard input, then kill this process group."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    # The server's processes unpickle what they get by sockets in the folder of temporary files.
    os.umask(0o077)
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("the worker ended before its server started")
        line += byte
    order = json.loads(line)
    threading.Thread(target=_end_with_the_worker, daemon=True).start()
    if order["without_kernels"]:
        os.environ[WITHOUT_KERNELS] = "1"
        _do_without_gpu()

    try:
        from sglang.launch_server import run_server
        from sglang.srt.server_args import prepare_server_args
    except ImportError:
        traceback.print_exc()
        raise SystemExit(EXIT_SETTINGS) from None

    run_server(prepare_server_args([*order["args"], "--api-key", order["api_key"]]))


if __name__ == "__main__":
    main()
