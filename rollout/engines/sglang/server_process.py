"""An SGLang server as a child process: its arguments, its log, its end.

The server and its own child processes form one process group. They end with the worker, however
it ends: the worker holds the standard input of `launch.py`, and its end kills the group.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import psutil

from rollout.config import EngineConfig
from rollout.engines.sglang.server_arguments import HOST, server_args, server_environment
from rollout.placement import engine_gpus
from storage.errors import ConfigError
from storage.formats.safetensors import to_safetensors
from storage.machine import gpu_locks, gpus, ports
from storage.machine.temporary_folders import temporary_folder
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.written_files import write_inside

LAUNCH = Path(__file__).with_name("launch.py")
LOG_TAIL_BYTES = 2000
HIDDEN_MAX = 2**20
"""Largest hidden size of a model whose adapters are served."""
EXIT_ARGUMENTS = 2
"""Exit status of Python's argparse."""
EXIT_SETTINGS = 78
"""Exit status of `launch.py` where SGLang cannot be imported."""


class ServerProcess:
    """One server, started with random weights; the engine loads the real ones."""

    def __init__(self, config: EngineConfig, model_config: Json, num_policies: int = 1) -> None:
        """Start the server of a `served_config` for so many policies; it is ready some time later.

        Raises:
            ConfigError: the interpreter or the device cannot be used.
        """
        self.api_key = secrets.token_hex(16)
        self._port = ports.unusual_port()
        self.url = f"http://{HOST}:{self._port}"
        with ExitStack() as temporary:
            self._folder = temporary.enter_context(temporary_folder("astraflow-sglang-"))
            write_inside(self._folder / "model", "config.json", json.dumps(model_config).encode())
            if config.sglang.adapter_rank:
                write_inside(
                    self._folder / "model", "model.safetensors", _first_tensor(model_config)
                )
            self._log = self._folder / "server.log"
            order = {
                "args": server_args(
                    config, self._folder / "model", self._port, _free_share(config), num_policies
                ),
                "api_key": self.api_key,
                "without_kernels": config.device == "cpu",
            }
            self._process = self._launched(config)
            self._temporary = temporary.pop_all()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended at once; `ended` says why
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _launched(self, config: EngineConfig) -> subprocess.Popen[bytes]:
        try:
            with self._log.open("wb") as log:
                return subprocess.Popen(
                    [config.sglang.python or sys.executable, str(LAUNCH)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._folder,
                    env=server_environment(config, self._folder),
                    pass_fds=gpu_locks.descriptors(),
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(
                f"rollout.engine.sglang.python {config.sglang.python!r} cannot be started: {error}"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> str:
        """Return why the server ended: its exit status and last words; empty while it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        return f"the SGLang server ended with status {status}; its last words: {self._last_words()}"

    def refused(self) -> bool:
        """Return whether the server ended because it cannot be started with these settings."""
        return self._process.poll() in (EXIT_ARGUMENTS, EXIT_SETTINGS)

    def listens(self) -> bool:
        """Return whether the server runs and listens on its port."""
        return not self.ended() and ports.listens(self._tree(), self._port)

    def displaced(self) -> str:
        """Return that another process listens on its port; empty where none does."""
        if not ports.is_open(self._port) or self.listens():
            return ""
        return f"another process listens on the port of the SGLang server, {self.url}"

    def progress(self) -> tuple[int, float]:
        """Return what grows while the server starts: the size of its log, its CPU seconds."""
        seconds = 0.0
        for process in self._tree():
            with suppress(psutil.Error):
                seconds += sum(process.cpu_times()[:2])
        with suppress(OSError):
            return self._log.stat().st_size, round(seconds, 1)
        return 0, round(seconds, 1)

    def stop(self) -> None:
        """Kill the server with its child processes. Idempotent."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._temporary.close()

    def _tree(self) -> list[psutil.Process]:
        """Return the server's process and its descendants."""
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.Error:
            return []

    def _last_words(self) -> str:
        with suppress(OSError), self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            text = log.read(LOG_TAIL_BYTES).decode(errors="replace")
            return " ⏎ ".join(line.strip() for line in text.splitlines() if line.strip())
        return "none"


def _free_share(config: EngineConfig) -> float:
    """Return the share of the engine's GPUs that is free now; 1 on a CPU."""
    if not (own := engine_gpus(config)):
        return 1.0
    return gpus.free_share(gpus.names(own, os.environ), gpus.installed())


def _first_tensor(model_config: Json) -> bytes:
    """Return a file with one tensor of the model, for a server that must be given a file."""
    hidden = model_config.get("hidden_size")
    if type(hidden) is not int or not 0 < hidden <= HIDDEN_MAX:
        raise ConfigError(
            f"config.json has hidden_size {hidden!r}; with sglang.adapter_rank it must be a number "
            f"from 1 to {HIDDEN_MAX}"
        )
    bits = np.zeros(hidden, np.uint32)
    return to_safetensors({"model.norm.weight": HostTensor("F32", (hidden,), bits)})
