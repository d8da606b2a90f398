"""The GPUs of a worker's engines, and the share of each. Importing this module imports no torch.

rollout.engine ──policies──▶ settings of each policy's engine: its own devices and memory share
"""

import re
from collections.abc import Sequence

from rollout.config import EngineConfig

STATIC_SHARE = 0.85
"""About SGLang's own default of its `--mem-fraction-static`, weights and KV cache; the rest of a
device is for activations and CUDA graphs.
"""
STATIC_SHARE_MAX = 0.95
_NUMBERED = re.compile(r"cuda:(\d{1,4})", re.ASCII)


def placed(config: EngineConfig, policies: Sequence[str]) -> dict[str, EngineConfig]:
    """Return the settings of each policy's engine: `devices` are its own, and `memory_share` is
    that of its own server.

    Example: `devices: [0, 1]` for `solver` and `verifier` gives (0,) and (1,); `devices: [0]` gives
    (0,) to both, and two SGLang servers there 0.425 of its memory each. With `sglang.shared` both
    have the devices and the share of their one server.
    """
    size = group_size(config)
    first = config.devices or tuple(range(size))
    groups = [first] * len(policies)
    if len(config.devices) == size * len(policies):
        groups = [config.devices[at : at + size] for at in range(0, len(config.devices), size)]
    sglang = config.sglang
    if config.name == "sglang" and groups:
        share = server_share(config, 1 if sglang.shared else groups.count(groups[0]))
        sglang = sglang.model_copy(update={"memory_share": share})
    return {
        policy: config.model_copy(
            update={"sglang": sglang, "devices": group if config.device == "cuda" else ()}
        )
        for policy, group in zip(policies, groups, strict=True)
    }


def group_size(config: EngineConfig) -> int:
    """Return the number of devices over which one engine is divided."""
    return config.sglang.tensor_parallel if config.name == "sglang" else 1


def server_share(config: EngineConfig, num_servers: int) -> float | None:
    """Return the share of a device for each of its SGLang servers; None: the server decides."""
    given = config.sglang.memory_share
    alone = num_servers == 1 and config.device_share == 1
    if given is not None or alone or not config.device.startswith("cuda"):
        return given
    return STATIC_SHARE * config.device_share / num_servers


def static_fraction(share: float, free: float) -> float:
    """Return the `--mem-fraction-static` by which a server gets `share` of its device.

    SGLang takes that fraction of the memory that is free at its start, and `free` is the share of
    the device that is free then: of 0.575, the fraction 0.74 is a share of 0.425.
    """
    return round(min(share / max(free, share), STATIC_SHARE_MAX), 4)


def engine_gpus(config: EngineConfig) -> tuple[int, ...]:
    """Return the GPUs of one engine of `placed`; none on a CPU, and for servers by URL."""
    if config.name == "sglang" and config.sglang.urls:
        return ()
    if numbered := _NUMBERED.fullmatch(config.device):
        first = int(numbered[1])
        return tuple(range(first, first + group_size(config)))
    if config.device != "cuda":
        return ()
    return config.devices or tuple(range(group_size(config)))


def worker_gpus(config: EngineConfig, policies: Sequence[str]) -> tuple[int, ...]:
    """Return the GPUs of all engines of a worker, each once."""
    engines = placed(config, policies).values()
    return tuple(dict.fromkeys(gpu for engine in engines for gpu in engine_gpus(engine)))
