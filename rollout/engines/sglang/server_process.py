"""An SGLang server as a child process: its arguments, its log, its end.

The server and its own child processes form one process group. They end with the worker, however
it ends: the worker holds the standard input of `launch.py`, and its end kills the group.
"""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from rollout.config import EngineConfig
from storage.errors import ConfigError
from storage.records.types import Json
from storage.written_files import write_inside

LAUNCH = Path(__file__).with_name("launch.py")
HOST = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
CPU_MEMORY_SHARE = 0.5
"""Default of `memory_share` on a CPU: a limit; `--max-total-tokens` determines the cache."""
SLACK_TOKENS = 8
"""SGLang reserves some tokens of the context; so many more are asked for."""
LOG_TAIL_CHARACTERS = 2000
FOREIGN_VARIABLES = ("AWS_", "PREFECT_", "MLFLOW_", "ASTRAFLOW_", "HF_TOKEN")
"""Prefixes of environment variables that the server does not need."""
_CUDA = re.compile(r"cuda(?::(\d+))?")


class ServerProcess:
    """One server, started with random weights; the engine loads the real ones."""

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        """Start the server of a `served_config`; it is ready some time later.

        Raises:
            ConfigError: the interpreter or the device cannot be used.
        """
        self.api_key = secrets.token_hex(16)
        self._temporary = tempfile.TemporaryDirectory(
            prefix="astraflow-sglang-", ignore_cleanup_errors=True
        )
        self._folder = Path(self._temporary.name)
        write_inside(self._folder / "model", "config.json", json.dumps(model_config).encode())
        port = _free_port()
        self.url = f"http://{HOST}:{port}"
        self._log = self._folder / "server.log"
        order = {
            "args": server_args(config, self._folder / "model", port),
            "api_key": self.api_key,
            "without_kernels": config.device == "cpu",
        }
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [
                        config.sglang.python or sys.executable,
                        str(Path(__file__).with_name("launch.py")),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._folder,
                    env=_environment(config, self._folder),
                    start_new_session=True,
                )
            except OSError as error:
                self._temporary.cleanup()
                raise ConfigError(
                    f"rollout.engine.sglang.python {config.sglang.python!r} cannot be started: "
                    f"{error}"
                ) from error
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended at once; `ended` says why
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> str:
        """Return why the server ended: its exit status and last words; empty while it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        return f"the SGLang server ended with status {status}; its last words: {self._last_words()}"

    def progress(self) -> tuple[int, float]:
        """Return what grows while the server starts: the size of its log, its CPU seconds."""
        seconds = 0.0
        with suppress(psutil.Error):
            parent = psutil.Process(self._process.pid)
            for process in [parent, *parent.children(recursive=True)]:
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
        self._temporary.cleanup()

    def _last_words(self) -> str:
        with suppress(OSError):
            text = self._log.read_bytes()[-LOG_TAIL_CHARACTERS:].decode(errors="replace")
            return " ⏎ ".join(line.strip() for line in text.splitlines() if line.strip())
        return "none"


def served_config(model_config: Json) -> Json:
    """Return the model's `config.json` for the server.

    Without end tokens: a request names its own, and the class of the model would add its default
    if the key were absent. With the class of the model, which SGLang needs.

    Raises:
        ConfigError: transformers knows no causal language model of this type.
    """
    served: Json = {**model_config, "eos_token_id": None}
    if isinstance(text := served.get("text_config"), dict):
        served["text_config"] = {**text, "eos_token_id": None}
    if not served.get("architectures"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        model_type = str(served.get("model_type"))
        if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ConfigError(
                f"config.json has model_type {model_type!r}, and transformers knows no causal "
                "language model of this type; name its class in `architectures`"
            )
        served["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    return served


def server_args(config: EngineConfig, model: Path, port: int) -> list[str]:
    """Return the arguments of `sglang.launch_server`; ConfigError for an unknown device."""
    sglang = config.sglang
    args = ["--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init"]
    args += ["--host", HOST, "--port", str(port), "--skip-server-warmup"]
    args += ["--dtype", config.dtype, "--tp-size", str(sglang.tensor_parallel)]
    args += ["--context-length", str(config.max_tokens + SLACK_TOKENS)]
    args += ["--max-running-requests", str(config.max_concurrent)]
    cuda = _CUDA.fullmatch(config.device)
    if config.device == "cpu":
        cache_tokens = config.max_concurrent * (config.max_tokens + SLACK_TOKENS)
        args += ["--device", "cpu", "--attention-backend", "torch_native"]
        args += ["--disable-overlap-schedule", "--max-total-tokens", str(cache_tokens)]
    elif cuda:
        args += ["--device", "cuda", "--base-gpu-id", cuda[1] or "0"]
        if sglang.kv_cache == "keep":
            # With it, the token that is in progress at new weights would count as theirs.
            args += ["--disable-overlap-schedule"]
    else:
        raise ConfigError(
            f"rollout.engine.device {config.device!r} cannot be used by sglang; use cpu, cuda or "
            "cuda:N"
        )
    memory_share = sglang.memory_share or (CPU_MEMORY_SHARE if config.device == "cpu" else None)
    if memory_share is not None:
        args += ["--mem-fraction-static", str(memory_share)]
    return [*args, *sglang.server_args]


def _environment(config: EngineConfig, folder: Path) -> dict[str, str]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*FOREIGN_VARIABLES, "PYTHON"))
    }
    variables |= {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "HF_HUB_OFFLINE": "1",
        # By a file and by the loopback interface: a TCP store of torch listens on all interfaces.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/rendezvous",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
    }
    if config.device == "cpu":
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(config.threads)}
    return variables


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
