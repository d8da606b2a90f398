"""Memory that a worker needs, on each device and on its host: an estimate before it starts.

Not counted: the CUDA context and the libraries (about 1 GB a process), CUDA graphs, and temporary
tensors of one operation.

Importing this module does not import torch.
"""

from collections.abc import Sequence
from itertools import pairwise

from rollout.config import EngineConfig, RolloutConfig
from storage.formats.model_sizes import ModelSizes

SLOTS_PER_POLICY = 8
"""Adapters of one policy by which a server computes answers at once; no adapter counts as one."""
SLOTS_FLAG = "--max-loras-per-batch"
DIVIDED_INPUTS = ("o_proj", "down_proj")
"""Linear layers whose inputs are divided over the devices of a server; of others, the outputs."""


def rollout_bytes(config: EngineConfig, model: ModelSizes) -> dict[str, int]:
    """Return the bytes of each part for one policy, on one device.

    The engine `torch` has a transposed output head of its own, and the KV cache of `max_concurrent`
    sequences of `max_tokens`; while it loads a version, it holds that twice beside the old one, as
    it was read and as it is used. SGLang changes its weights in place; it makes the cache as large
    as its share of the device allows, and lets further sequences wait: one sequence must fit.
    """
    if config.name == "sglang":
        parts = {
            "weights": _bits(config) * model.parameters // config.sglang.tensor_parallel,
            "adapters": adapter_bytes(config, model),
            "KV cache": cache_token_bytes(config, model) * config.max_tokens,
        }
        return {part: num_bytes for part, num_bytes in parts.items() if num_bytes}
    layers = _bits(config) * (model.parameters - model.embeddings)
    head = _bits(config) * model.vocab * model.hidden
    return {
        "weights": layers + 2 * head,
        "next weights": _bits(config) * model.parameters + layers + head,
        "KV cache": cache_token_bytes(config, model) * config.max_concurrent * config.max_tokens,
    }


def shared_server_bytes(
    config: EngineConfig, model: ModelSizes, policies: Sequence[str]
) -> dict[str, int]:
    """Return the bytes of each part of a server that several policies share, on one device."""
    parts = rollout_bytes(config, model)
    each = adapter_bytes(config, model, len(policies)) // len(policies)
    adapters = {f"adapters of {policy}": each for policy in policies}
    return {"weights": parts["weights"], **adapters, "KV cache": parts["KV cache"]}


def adapter_bytes(config: EngineConfig, model: ModelSizes, num_policies: int = 1) -> int:
    """Return the bytes of a server's slots for adapters, on one device: A and B of the largest rank
    for all linear layers.
    """
    devices = config.sglang.tensor_parallel
    elements = 0
    for name, (inputs, outputs) in model.linear_layers().items():
        if name in DIVIDED_INPUTS:
            elements += inputs // devices + outputs
        else:
            elements += inputs + outputs // devices
    slot = config.sglang.adapter_rank * model.layers * elements
    return adapter_slots(config, num_policies) * _bits(config) * slot


def adapter_slots(config: EngineConfig, num_policies: int) -> int:
    """Return the number of adapters by which a server computes answers at once."""
    slots = num_policies * SLOTS_PER_POLICY
    args = " ".join(config.sglang.server_args).replace("=", " ").split()
    for flag, value in pairwise(args):
        if flag.replace("_", "-") == SLOTS_FLAG and value.isdecimal():
            slots = int(value)
    return slots


def rollout_host_bytes(config: RolloutConfig, published_bytes: int) -> dict[str, int]:
    """Return the bytes of each part for one policy, in the memory of the worker's machine.

    `published_bytes` are those of a version. The loaded version and the next one are in memory. An
    SGLang server reads the changed tensors, which are nearly all, from a folder in memory.
    """
    parts = {
        "two versions": 2 * published_bytes,
        "reading": min(config.refresh_memory_mb * 2**20, published_bytes),
    }
    if config.engine.name == "sglang":
        parts["version for the server"] = published_bytes
    return parts


def cache_token_bytes(config: EngineConfig, model: ModelSizes) -> int:
    """Return the bytes of the keys and values of one token on each device of the engine."""
    devices = config.sglang.tensor_parallel if config.name == "sglang" else 1
    return _bits(config) * model.layers * model.kv_elements // devices


def _bits(config: EngineConfig) -> int:
    return 4 if config.dtype == "float32" else 2
