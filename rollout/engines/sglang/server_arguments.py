"""What an SGLang server is started with: the model's configuration, arguments, variables.

The configuration and the arguments come from the store and from a recipe; they must not name code,
nor sizes by which a server takes all memory.
"""

import os
import sys
from pathlib import Path
from typing import Final

from rollout.config import EngineConfig
from rollout.engines.sglang.weights.adapters import TARGETS
from rollout.memory import SLOTS_FLAG, SLOTS_PER_POLICY
from rollout.placement import engine_gpus, static_fraction
from storage.errors import ConfigError
from storage.formats.model_config import positions, without_code
from storage.machine import gpus
from storage.records.types import Json

HOST = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
CPU_MEMORY_SHARE = 0.5
"""Default of `memory_share` on a CPU: a limit; `--max-total-tokens` determines the cache."""
SLACK_TOKENS = 8
"""SGLang reserves some tokens of the context; so many more are asked for."""
POSITIONS_MAX = 2**24
"""Longest context of a model: SGLang computes a rotation for each of its positions (4 GiB)."""
HEALTH_TIMEOUT_S = 120
ENVIRONMENT: Final = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
        *("TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_ORDER"),
        *("CUDA_VISIBLE_DEVICES", "CC", "CXX", "ONEDNN_MAX_CPU_ISA", "ASTRAFLOW_STACK"),
    )
)
"""Variables that a server inherits: no credentials. Those of its libraries have these prefixes:"""
ENVIRONMENT_PREFIXES = ("NCCL_", "SGLANG_", "SGL_", "TORCH", "TRITON_", "FLASHINFER_", "NVIDIA_")


def served_config(model_config: Json) -> Json:
    """Return the model's `config.json` for the server.

    Without end tokens: a request names its own, and the class of the model would add its default
    if the key were absent. With the class of the model in transformers, which SGLang needs. Without
    the names of code, which SGLang imports for a class that it does not have.

    Raises:
        ConfigError: transformers has no causal language model of this type, the model has another
            class, or an absurd number of positions.
    """
    served: Json = {**without_code(model_config), "eos_token_id": None}
    if isinstance(text := served.get("text_config"), dict):
        served["text_config"] = {**text, "eos_token_id": None}
    served["architectures"] = [_known_class(served)]
    for num_positions in positions(served):
        if not num_positions <= POSITIONS_MAX:
            raise ConfigError(
                f"config.json has {num_positions:g} positions, and at most {POSITIONS_MAX} are "
                "served; correct max_position_embeddings, or the factor of rope_scaling"
            )
    return served


def _known_class(served: Json) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = str(served.get("model_type"))
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"config.json has model_type {model_type!r}, and transformers has no causal language "
            "model of this type; the engine sglang serves those only"
        )
    known = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    if (named := served.get("architectures")) and named != [known]:
        raise ConfigError(
            f"config.json has architectures {named!r}, and the class of model_type {model_type} is "
            f"{known}; correct it, or leave architectures out"
        )
    return known


def server_args(
    config: EngineConfig, model: Path, port: int, free: float = 1.0, num_policies: int = 1
) -> list[str]:
    """Return the arguments of `sglang.launch_server`; ConfigError for an unknown device.

    Args:
        free: share of its devices that is free now.
        num_policies: number of policies that it serves.
    """
    sglang = config.sglang
    max_concurrent = num_policies * config.max_concurrent
    # Adapters are read by the loader of the weights, and `dummy` reads none.
    load_format = "safetensors" if sglang.adapter_rank else "dummy"
    args = ["--model-path", str(model), "--load-format", load_format, "--skip-tokenizer-init"]
    args += ["--host", HOST, "--port", str(port), "--skip-server-warmup"]
    args += ["--log-level", "warning"]
    args += ["--dtype", config.dtype, "--tp-size", str(sglang.tensor_parallel)]
    args += ["--context-length", str(config.max_tokens + SLACK_TOKENS)]
    args += ["--max-running-requests", str(max_concurrent)]
    if config.device == "cpu":
        cache_tokens = max_concurrent * (config.max_tokens + SLACK_TOKENS)
        args += ["--device", "cpu", "--attention-backend", "torch_native"]
        args += ["--disable-overlap-schedule", "--max-total-tokens", str(cache_tokens)]
    elif engine_gpus(config):
        args += ["--device", "cuda", "--base-gpu-id", "0"]  # it sees its own GPUs alone
        if sglang.kv_cache == "keep":
            # With it, the token that is in progress at new weights would count as theirs.
            args += ["--disable-overlap-schedule"]
    else:
        raise ConfigError(
            f"rollout.engine.device {config.device!r} cannot be used by sglang; use cpu, cuda or "
            "cuda:N"
        )
    if sglang.adapter_rank:
        args += ["--enable-lora", "--max-lora-rank", str(sglang.adapter_rank)]
        args += ["--lora-target-modules", *TARGETS]
        args += [SLOTS_FLAG, str(num_policies * SLOTS_PER_POLICY)]
        args += ["--lora-backend", "torch_native"] if config.device == "cpu" else []
    if config.device == "cpu":
        args += ["--mem-fraction-static", str(sglang.memory_share or CPU_MEMORY_SHARE)]
    elif sglang.memory_share is not None:
        args += ["--mem-fraction-static", str(static_fraction(sglang.memory_share, free))]
    return [*args, *sglang.server_args]


def server_environment(config: EngineConfig, folder: Path) -> dict[str, str]:
    """Return the environment variables of a server, whose files are in `folder`.

    ConfigError where CUDA_VISIBLE_DEVICES of this process lists fewer GPUs than it needs.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in ENVIRONMENT or name.startswith(ENVIRONMENT_PREFIXES)
    }
    variables |= {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(HEALTH_TIMEOUT_S),
        "HF_HUB_OFFLINE": "1",
        # Compiled code is kept in folders of these. In /tmp another user may have made them.
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        # With it SGLang starts its processes by a script in /tmp into which every user may write.
        # Without it they bind themselves to the memory of their GPU.
        "SGLANG_NUMA_BIND_V2": "0",
        # By a file and by the loopback interface: a TCP store of torch listens on all interfaces.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/rendezvous",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
    }
    if own := gpus.names(engine_gpus(config), os.environ):
        variables[gpus.VARIABLE] = ",".join(own)
    if config.device == "cpu":
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(config.threads)}
    return variables
