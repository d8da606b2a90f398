"""Prices of members: which price of `budget.price_per_hour` is that of a member.

    control        base models, dataflow, evaluation
    trainers       trainers, each of their nodes
    rollout        rollout workers and mirrors, of all regions without a price of their own
    rollout/NAME   those of one region

The first three are the names of the work pools (`deployments/pools.yaml`).
"""

from collections.abc import Iterator, Mapping

from storage.plain_names import listed
from storage.records.progress import ServiceKind
from tasks.recipes.run_config import RunConfig
from tasks.recipes.yaml_file import KeyPath

ROLLOUT = "rollout"
POOLS: Mapping[ServiceKind, str] = {
    "base_model": "control",
    "dataflow": "control",
    "evaluation": "control",
    "trainer": "trainers",
    "trainer_node": "trainers",
    "rollout": ROLLOUT,
    "mirror": ROLLOUT,
}
"""Kind of member → its work pool. The supervisor is no member."""
_AT: KeyPath = ("budget", "price_per_hour")


def price_per_hour(prices: Mapping[str, float], kind: ServiceKind, region: str) -> float:
    """Return the price of a member for an hour.

    A worker of a region that the recipe does not have costs as much as one of the dearest region.
    """
    pool = POOLS.get(kind, "")
    if pool != ROLLOUT:
        return prices.get(pool, 0.0)
    of_pool = [price for key, price in prices.items() if key.partition("/")[0] == ROLLOUT]
    return prices.get(f"{ROLLOUT}/{region}", prices.get(ROLLOUT, max(of_pool, default=0.0)))


def faults(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield prices of what the run does not have, and a cost whose prices are incomplete."""
    prices, regions = config.budget.price_per_hour, config.rollout.regions
    known = [*dict.fromkeys(POOLS.values()), *(f"{ROLLOUT}/{region}" for region in regions)]
    for key in prices.keys() - known:
        yield (
            (*_AT, key),
            f"is neither a pool nor a region of this recipe; it has {listed(known)}",
        )
    if config.budget.cost is None:
        return
    used = [f"{ROLLOUT}/{name}" for name, spec in regions.items() if spec.workers or spec.mirror]
    pools = [pool for pool in known if pool in POOLS.values() and pool != ROLLOUT]
    missing = [key for key in pools if key not in prices]
    missing += [key for key in used if key not in prices and ROLLOUT not in prices]
    if missing:
        yield (
            ("budget", "cost"),
            f"cannot be counted without the price of {listed(missing)}: add it to "
            f"{'.'.join(_AT)}, 0 for what costs nothing",
        )
