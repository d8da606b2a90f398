"""The checks of `astraflow doctor --recipe`: does the run fit this machine, do sampler and trainer
agree?
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Literal

import psutil

from deployments.cli.doctor.machine import Check
from storage.errors import AstraFlowError
from storage.formats.model_sizes import ModelSizes
from storage.machine import gpus
from storage.machine.gpu_locks import GpuBusyError
from storage.store.object_store import ObjectStore
from tasks.base_models.folders import Progress
from tasks.recipes.memory_plan import MemoryNeed, memory_plan
from tasks.recipes.placement import Placed, overfull, placement
from tasks.recipes.run_config import RunConfig
from trainer import cpu_bf16
from trainer.config import MismatchLimits
from trainer.losses.mismatch import PREFIX, STATISTIC

PAGE = "docs/extending/losses.md, Corrections"
TOO_LARGE = (
    "use more ranks or devices, activation_checkpointing, smaller micro_batch_tokens, "
    "max_concurrent or max_tokens, or a smaller model"
)
TOO_LARGE_HOST = (
    "use a machine with more memory, fewer ranks, smaller publish_memory_mb or refresh_memory_mb, "
    "or a smaller model"
)


def examine_recipe(models: ObjectStore, config: RunConfig, progress: Progress) -> Iterator[Check]:
    """Compare the memory of each member with that of this machine, and measure the mismatch of each
    policy, unless a member does not fit; tiny base models are kept in `models`.

    `progress` is called with each stage and its finished share.
    """
    yield from placement_checks(config)
    sizes: dict[str, ModelSizes] = {}
    try:
        for policy, spec in config.policies.items():
            sizes[policy] = ModelSizes.of(spec.model.config_json())
    except AstraFlowError as error:
        yield Check("memory of the run", "warn", f"not estimated: {error}", "check the model")
    else:
        checks = list(memory_checks(config, sizes, device_bytes()))
        yield from checks
        if any(check.verdict == "fail" for check in checks):
            return
    for name, value in cpu_bf16.SAFE_ISA.items():  # read when torch is imported, below
        os.environ.setdefault(name, value)
    from rollout.engines.engine import EngineFailedError
    from tasks.mismatch_probe import measure_mismatch

    try:
        yield from mismatch_checks(config, measure_mismatch(models, config, progress))
    except GpuBusyError as error:
        yield Check("mismatch", "warn", f"not measured: {error}", "measure it on free GPUs")
    except (AstraFlowError, EngineFailedError, OSError) as error:
        yield Check("mismatch", "fail", str(error), "correct the recipe; a run would end with this")


def mismatch_checks(
    config: RunConfig, metrics_of: Mapping[str, Mapping[str, float]]
) -> Iterator[Check]:
    """Compare each policy's mean |Δ log p| with the limits of its `train.mismatch`."""
    for policy, metrics in metrics_of.items():
        if not metrics.get(f"{PREFIX}tokens"):
            finding = "its train engine does not measure it"
            yield Check(f"mismatch {policy}", "warn", finding, f"see {PAGE}")
            continue
        value = metrics.get(PREFIX + STATISTIC, math.inf)  # left out where it is not finite
        verdict = _verdict(value, config.policies[policy].train.mismatch)
        yield Check(
            f"mismatch {policy}",
            verdict,
            f"{config.rollout.engine.name} and trainer: mean |Δ log p| {value:.2g}, largest ratio "
            f"{metrics.get(f'{PREFIX}ratio_max', math.inf):.4g}, "
            f"{metrics.get(f'{PREFIX}beyond_2x_share', math.nan):.1%} of "
            f"{metrics[f'{PREFIX}tokens']:.0f} tokens beyond 2×",
            "" if verdict == "ok" else f"make them compute alike, or correct for it: {PAGE}",
        )


def _verdict(value: float, limits: MismatchLimits) -> Literal["ok", "warn", "fail"]:
    if not math.isfinite(value) or (limits.stop is not None and value > limits.stop):
        return "fail"
    return "warn" if limits.warn is not None and value > limits.warn else "ok"


def device_bytes() -> dict[str, int]:
    """Return the memory of this machine by kind of device: `cpu`, `cuda` (its smallest GPU)."""
    found = {"cpu": psutil.virtual_memory().total}
    if installed := gpus.installed():
        found["cuda"] = min(gpu.memory_bytes for gpu in installed)
    return found


def placement_checks(config: RunConfig) -> Iterator[Check]:
    """Show which engine uses which GPU, and warn of members that cannot share one."""
    engines = placement(config)
    if engines:
        yield Check("GPUs", "ok", "; ".join(map(_placed, engines)))
    for gpu, named in overfull(engines).items():
        yield Check(
            f"GPU {gpu}",
            "warn",
            f"used by several members whose shares add up to more than 1: {named}; on one machine "
            "one of them waits until the others have ended",
            "name other GPUs in devices, lower device_share, or start the pools' workers with "
            f"different {gpus.VARIABLE}",
        )


def _placed(engine: Placed) -> str:
    numbers = ", ".join(map(str, engine.gpus))
    name = engine.member if engine.member.endswith(engine.policy) else None
    name = name or f"{engine.policy} of {engine.member}"
    share = "" if engine.server_share is None else f" ({engine.server_share:.3g} of its memory)"
    return f"{name} on GPU {numbers}{share}"


def memory_checks(
    config: RunConfig, sizes: Mapping[str, ModelSizes], available: Mapping[str, int]
) -> Iterator[Check]:
    """Compare each member's need with `available`, bytes by kind of device."""
    for need in memory_plan(config, sizes):
        there = available.get(need.device.partition(":")[0])
        parts = ", ".join(f"{part} {_gb(num)}" for part, num in need.parts.items())
        each = f" on each of {need.count} devices" if need.count > 1 else ""
        if need.gpus:
            each += f" on GPU {', '.join(map(str, need.gpus))}"
        finding = f"about {_gb(need.num_bytes)}{each} ({parts})"
        name = f"memory {need.member}"
        if there is None:
            yield Check(
                name, "warn", f"{finding}; this machine has no {need.device}", "run it elsewhere"
            )
            continue
        usable = int(there * need.share)
        of_all = f", {need.share:.0%} of {_gb(there)}" if need.share < 1 else ""
        if need.num_bytes > usable:
            finding = f"{finding}; this machine has {_gb(usable)}{of_all}"
            yield Check(name, "fail", finding, TOO_LARGE_HOST if _is_host(need) else TOO_LARGE)
        else:
            yield Check(name, "ok", f"{finding} of {_gb(usable)}{of_all}{_cache(need, usable)}")


def _is_host(need: MemoryNeed) -> bool:
    return need.member.endswith("host")


def _cache(need: MemoryNeed, usable: int) -> str:
    """Return how many tokens a KV cache has that takes what weights and adapters leave."""
    if not need.cache_token_bytes:
        return ""
    others = need.num_bytes - need.parts["KV cache"]
    tokens = (usable - others) // need.cache_token_bytes
    return f"; the KV cache has about {tokens:,} tokens"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 1e11 else f"{num_bytes / 1e9:.3g} GB"
