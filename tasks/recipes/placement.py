"""Which member of a run uses which GPU of its machine, and how much of it; whom servers serve.

GPUs are counted among those that CUDA_VISIBLE_DEVICES leaves to the pool's worker that starts the
member. Members on one machine may so have the same numbers and different GPUs.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from rollout.config import EngineConfig
from rollout.placement import engine_gpus, group_size, placed
from tasks.recipes.run_config import RunConfig
from tasks.recipes.yaml_file import KeyPath
from trainer.placement import rank_gpus

ROUNDING = 1e-6


@dataclass(frozen=True)
class Placed:
    """An engine and its GPUs. Example: `Placed("a worker", "solver", (0,), 0.5, 0.425)`."""

    member: str
    policy: str
    """All of them for a shared server: `solver and verifier`."""
    gpus: tuple[int, ...]
    member_share: float
    """Share of each of these GPUs that all engines of the member may use."""
    server_share: float | None = None
    """Share for weights and KV cache of an SGLang server; None: it decides."""


def evaluation_engine(config: RunConfig) -> EngineConfig:
    """Return the settings of the evaluation's engines: those of a worker, with its own GPUs."""
    engine, evaluation = config.rollout.engine, config.evaluation
    if evaluation is None:
        return engine
    own = {"max_concurrent": evaluation.max_concurrent}
    devices = {"devices": evaluation.devices or engine.devices}
    return engine.model_copy(update={**own, **devices})


def placement(config: RunConfig) -> tuple[Placed, ...]:
    """Return the engines of every trainer, of a worker and of the evaluation that use GPUs."""
    engines = [
        Placed(f"trainer {policy}", policy, rank_gpus(spec.train), spec.train.device_share)
        for policy, spec in config.policies.items()
    ]
    members = {"a worker": config.rollout.engine}
    if config.evaluation is not None:
        members["the evaluation"] = evaluation_engine(config)
    for member, engine in members.items():
        by_policy = placed(engine, tuple(config.policies))
        if engine.sglang.shared and by_policy:
            by_policy = {" and ".join(by_policy): next(iter(by_policy.values()))}
        for policy, own in by_policy.items():
            share = own.sglang.memory_share if own.name == "sglang" else None
            gpus = engine_gpus(own)
            engines.append(Placed(member, policy, gpus, engine.device_share, share))
    return tuple(engine for engine in engines if engine.gpus)


def shares_of_gpus(engines: tuple[Placed, ...]) -> dict[int, dict[str, float]]:
    """Return for each GPU the members that use it, each with its share."""
    shares: dict[int, dict[str, float]] = defaultdict(dict)
    for engine in engines:
        for gpu in engine.gpus:
            shares[gpu][engine.member] = engine.member_share
    return dict(sorted(shares.items()))


def overfull(engines: tuple[Placed, ...]) -> dict[int, str]:
    """Return the GPUs that these engines cannot use at the same time, and which members they have.

    Example: `{0: "trainer solver 1, a worker 1"}`.
    """
    return {
        gpu: ", ".join(f"{member} {share:g}" for member, share in shares.items())
        for gpu, shares in shares_of_gpus(engines).items()
        if sum(shares.values()) > 1 + ROUNDING
    }


def faults(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield what is wrong with the devices, the shares and the servers of engines, and where."""
    for check in (_servers_by_url, _served_adapters, _shared_server):
        yield from check(config)
    engine = config.rollout.engine
    at: KeyPath = ("rollout", "engine")
    if engine.devices:
        yield from _number_of_gpus((*at, "devices"), engine.devices, config)
    if config.evaluation is not None and config.evaluation.devices:
        path: KeyPath = ("evaluation", "devices")
        if engine.device != "cuda":
            yield path, f"has no effect with rollout.engine.device: {engine.device}; leave it out"
        yield from _number_of_gpus(path, config.evaluation.devices, config)
    yield from _shares((*at, "sglang", "memory_share"), config)


def _number_of_gpus(
    path: KeyPath, gpus: tuple[int, ...], config: RunConfig
) -> Iterator[tuple[KeyPath, str]]:
    size, policies = group_size(config.rollout.engine), len(config.policies)
    if config.rollout.engine.sglang.shared:
        policies = 1
    if len(gpus) not in (size, size * policies):
        whose = "the shared server" if config.rollout.engine.sglang.shared else "each policy"
        wanted = f"{size * policies}, {size} for {whose}"
        if policies > 1:
            wanted += f", or {size}, which all policies share"
        yield path, f"names {len(gpus)} GPUs; name {wanted}"


def _shares(path: KeyPath, config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Check that the servers of a member do not get more of a GPU than the member may use."""
    totals: dict[tuple[str, int], float] = defaultdict(float)
    limit = config.rollout.engine.device_share
    for engine in placement(config):
        for gpu in engine.gpus:
            totals[engine.member, gpu] += engine.server_share or 0.0
    for (member, gpu), total in totals.items():
        if total > limit + ROUNDING:
            yield (
                path,
                f"is that of one server, and the servers of {member} on GPU {gpu} would have "
                f"{total:g} of it together; at most {limit:g} can be used (device_share): lower "
                "it, leave it out, or name more GPUs in devices",
            )
            return


def _servers_by_url(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """A server by URL serves one engine: of one policy, in one worker or the evaluation; or all
    policies of that worker.
    """
    sglang = config.rollout.engine.sglang
    members = sum(region.workers for region in config.rollout.regions.values())
    members += bool(config.evaluation)
    engines = members if sglang.shared else members * len(config.policies)
    if sglang.urls and engines > 1:
        each = "each worker and the" if sglang.shared else "each policy of each worker and of the"
        yield (
            ("rollout", "engine", "sglang", "urls"),
            f"would serve {engines} engines (one for {each} evaluation), and a server serves one; "
            "remove urls, so that each engine starts its own",
        )


def _served_adapters(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Servers that apply adapters have room for those of all policies, and there is one."""
    room = config.rollout.engine.sglang.adapter_rank
    if not room:
        return
    ranks = {
        name: adapter.rank
        for name, policy in config.policies.items()
        if (adapter := policy.train.adapter.stored())
    }
    if not ranks:
        yield (
            ("rollout", "engine", "sglang", "adapter_rank"),
            "has no effect: no policy publishes adapters; set train.adapter.publish: adapter, or "
            "leave adapter_rank out",
        )
    for name, rank in ranks.items():
        if rank > room:
            yield (
                ("policies", name, "train", "adapter", "rank"),
                f"{rank} is above rollout.engine.sglang.adapter_rank {room}, for which the servers "
                "have room; raise that",
            )


def _shared_server(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Policies share a server if it has one base model, and an adapter of each policy."""
    sglang = config.rollout.engine.sglang
    if not sglang.shared:
        return
    at: KeyPath = ("rollout", "engine", "sglang", "shared")
    if len(config.policies) == 1:
        yield (at, "has no effect: there is one policy, and a worker has one server for it")
    if not sglang.adapter_rank:
        yield (
            at,
            "needs rollout.engine.sglang.adapter_rank: the policies' adapters are all that differs "
            "in the server; set it to the largest rank of train.adapter",
        )
    first = next(iter(config.policies))
    for name, policy in config.policies.items():
        if policy.train.adapter.stored() is None:
            yield (
                ("policies", name, "train", "adapter"),
                "publishes no adapter, and with rollout.engine.sglang.shared one server serves all "
                "policies, by their adapters; set {name: lora, publish: adapter}, or leave shared "
                "out",
            )
        if policy.model != config.policies[first].model:
            yield (
                ("policies", name, "model"),
                f"is not that of {first}, and with rollout.engine.sglang.shared one server serves "
                "both, with one base model; use the same, or leave shared out",
            )
