"""The memory that the members of a run need, each on its devices: `astraflow doctor --recipe`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollout.config import EngineConfig
from rollout.memory import (
    cache_token_bytes,
    rollout_bytes,
    rollout_host_bytes,
    shared_server_bytes,
)
from rollout.placement import group_size, placed
from storage.formats.model_sizes import ModelSizes
from tasks.recipes.run_config import RunConfig
from trainer.memory import published_bytes, train_bytes, train_host_bytes
from trainer.placement import rank_gpus

HOST = "cpu"


@dataclass(frozen=True)
class MemoryNeed:
    """The memory of one member on one device, or in its machine's memory (device `cpu`).

    Example: `MemoryNeed("trainer solver", "cuda", 1, {"weights": 6_880_000_000, …})`.
    """

    member: str
    device: str
    count: int
    """Devices that each need this much."""
    parts: Mapping[str, int]
    """Part → bytes."""
    gpus: tuple[int, ...] = ()
    """Their numbers, where the recipe gives them."""
    share: float = 1.0
    """Share of a device that it may use."""
    cache_token_bytes: int = 0
    """Bytes of a token in a KV cache that takes what the other parts leave of the share; else 0."""

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


def memory_plan(config: RunConfig, sizes: Mapping[str, ModelSizes]) -> Iterator[MemoryNeed]:
    """Yield the needs of every trainer and of a worker; `sizes` are those of each policy's model.

    What runs on the CPU is one need, with its host's part.
    """
    for policy in config.policies:
        yield from _trainer_needs(config, policy, sizes[policy])
    yield from _worker_needs(config, sizes)


def _trainer_needs(config: RunConfig, policy: str, model: ModelSizes) -> Iterator[MemoryNeed]:
    train, member = config.policies[policy].train, f"trainer {policy}"
    parts, host = train_bytes(train, model), train_host_bytes(train, model)
    if train.device == HOST:
        of_ranks = {part: train.ranks * num_bytes for part, num_bytes in parts.items()}
        yield MemoryNeed(member, HOST, 1, of_ranks | host)
        return
    gpus = rank_gpus(train) if train.devices else ()
    yield MemoryNeed(member, train.device, train.ranks, parts, gpus, train.device_share)
    yield MemoryNeed(f"{member}, host", HOST, 1, host)


def _worker_needs(config: RunConfig, sizes: Mapping[str, ModelSizes]) -> Iterator[MemoryNeed]:
    """Yield the needs of a worker.

    Policies on the same devices need them together, except SGLang servers, each of which has a
    share of its own.
    """
    engine = config.rollout.engine
    published = {
        policy: published_bytes(config.policies[policy].train, model)
        for policy, model in sizes.items()
    }
    host = _by_policy(
        {policy: rollout_host_bytes(config.rollout, each) for policy, each in published.items()}
    )
    engines = placed(engine, tuple(config.policies))
    if engine.sglang.shared:
        yield from _shared_server_needs(engines, sizes, host)
        return
    needs = {policy: rollout_bytes(own, sizes[policy]) for policy, own in engines.items()}
    if engine.device == HOST:
        yield MemoryNeed("a worker", HOST, 1, _by_policy(needs) | host)
        return
    groups: dict[tuple[int, ...], list[str]] = {}
    for policy, own in engines.items():
        groups.setdefault(own.devices, []).append(policy)
    for devices, policies in groups.items():
        gpus = devices if engine.devices else ()
        if engines[policies[0]].sglang.memory_share is not None:
            for policy in policies:
                yield _server_need(engines[policy], policy, sizes[policy], gpus)
            continue
        member = f"a worker ({', '.join(policies)})" if len(groups) > 1 else "a worker"
        parts = _by_policy({policy: needs[policy] for policy in policies})
        size = group_size(engine)
        yield MemoryNeed(member, engine.device, size, parts, gpus, engine.device_share)
    yield MemoryNeed("a worker, host", HOST, 1, host)


def _server_need(
    engine: EngineConfig, policy: str, model: ModelSizes, gpus: tuple[int, ...]
) -> MemoryNeed:
    """Return the need of an SGLang server with a share of its own."""
    return MemoryNeed(
        f"a worker, server of {policy}",
        engine.device,
        group_size(engine),
        rollout_bytes(engine, model),
        gpus,
        engine.sglang.memory_share or engine.device_share,
        cache_token_bytes(engine, model),
    )


def _shared_server_needs(
    engines: Mapping[str, EngineConfig], sizes: Mapping[str, ModelSizes], host: Mapping[str, int]
) -> Iterator[MemoryNeed]:
    """Yield the needs of a worker whose policies share a server, which has their base once."""
    policies = tuple(engines)
    engine, model = engines[policies[0]], sizes[policies[0]]
    for_servers = [f"version for the server of {policy}" for policy in policies]
    base = {"base for the server": max(host[part] for part in for_servers)}
    host = {part: num for part, num in host.items() if part not in for_servers} | base
    parts = shared_server_bytes(engine, model, policies)
    if engine.device == HOST:
        yield MemoryNeed("a worker", HOST, 1, parts | host)
        return
    yield MemoryNeed(
        f"a worker, server of {' and '.join(policies)}",
        engine.device,
        group_size(engine),
        parts,
        engine.devices,
        engine.sglang.memory_share or engine.device_share,
        0 if engine.sglang.memory_share is None else cache_token_bytes(engine, model),
    )
    yield MemoryNeed("a worker, host", HOST, 1, host)


def _by_policy(needs: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {
        f"{part} of {policy}": num_bytes
        for policy, parts in needs.items()
        for part, num_bytes in parts.items()
    }
