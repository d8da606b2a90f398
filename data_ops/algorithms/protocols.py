"""The three places where a data algorithm plugs in, as Protocols, and the one table of built-ins for each.

    prompts ──Curate──▶ orders ──rollout──▶ groups ──Filter──▶ waiting rows ──Sample──▶ batch

They compose as lists in the config; each entry is a built-in's name or an import path. A crash at any moment must not
change what an algorithm decides afterwards, hence three rules: state is a deterministic fold over stored objects that
never change (so it is rebuilt by folding again), random numbers come from the generator that is handed in, and
nothing else is read. `docs/data_algorithms.md` is the contract for people who write one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from data_ops.algorithms.curators import AcceptAll
from data_ops.algorithms.filters import ZeroAdvantage
from data_ops.algorithms.policy_groups import PolicyGroup
from data_ops.algorithms.samplers import Draft, Edf, Fifo
from data_ops.config import Algorithm
from storage.errors import ConfigError
from storage.import_path import Kind, resolve, unfit
from storage.records.rollouts import Order, Prompt, Shard


class Curate(Protocol):
    """Before rollout: which prompts are worth playing."""

    needs_shards: bool
    """Whether `observe` wants to be called; where nobody does, a restart reads no shard for it."""

    def observe(self, order: Order, shard: Shard) -> None:
        """Fold in one finished order. Called once for each, in the sequence that `Order.seen` records."""
        ...

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        """Whether to roll out the prompt. A function of what was observed and of `draw`; must not change any state."""
        ...


class Filter(Protocol):
    """After rollout: which (prompt, policy) groups are worth training on."""

    def keep(self, group: PolicyGroup) -> bool:
        """Whether to keep the group, which has at least one row. Runs in parallel, and again after a crash: no
        state."""
        ...


class Sample(Protocol):
    """When a batch is assembled: which sequences go first, and which come back."""

    def arrange(self, draft: Draft) -> Draft:
        """The draft with its rows reordered, some left out, or replays added. No state."""
        ...


PAGE = "docs/data_algorithms.md"
CURATOR = Kind("curator", Curate, PAGE)
FILTER = Kind("filter", Filter, PAGE)
SAMPLER = Kind("sampler", Sample, PAGE)
CURATORS: Mapping[str, Callable[..., Curate]] = {"accept_all": AcceptAll}
FILTERS: Mapping[str, Callable[..., Filter]] = {"zero_advantage": ZeroAdvantage}
SAMPLERS: Mapping[str, Callable[..., Sample]] = {"edf": Edf, "fifo": Fifo}


def curators(algorithms: Sequence[Algorithm]) -> tuple[Curate, ...]:
    """One new curator for each entry of `data.curate`; raises ConfigError for a wrong name or wrong arguments."""
    made = tuple(_make(algorithm, CURATORS, CURATOR, f"data.curate.{at}") for at, algorithm in enumerate(algorithms))
    for at, curator in enumerate(made):
        if not hasattr(curator, "needs_shards"):
            raise ConfigError(f"data.curate.{at}: {algorithms[at].name} has no needs_shards; see {PAGE}")
    return made


def filters(algorithms: Sequence[Algorithm]) -> tuple[tuple[str, Filter], ...]:
    """(name, filter) for each entry of `data.filter`: the name is the reason that the books give."""
    made = (_make(algorithm, FILTERS, FILTER, f"data.filter.{at}") for at, algorithm in enumerate(algorithms))
    return tuple((algorithm.name, one) for algorithm, one in zip(algorithms, made, strict=True))


def samplers(algorithms: Sequence[Algorithm]) -> tuple[Sample, ...]:
    """One sampler for each entry of `data.sample`; raises ConfigError for a wrong name or wrong arguments."""
    return tuple(_make(algorithm, SAMPLERS, SAMPLER, f"data.sample.{at}") for at, algorithm in enumerate(algorithms))


def check(place: str, algorithm: Algorithm) -> None:
    """Raise ConfigError for an entry of `data.{place}` that leads to no class of its kind, or to one with other arguments.
    Builds nothing."""
    tables: Mapping[str, tuple[Mapping[str, Callable[..., Any]], Kind]] = {
        "curate": (CURATORS, CURATOR),
        "filter": (FILTERS, FILTER),
        "sample": (SAMPLERS, SAMPLER),
    }
    _class_of(algorithm, *tables[place])


def _class_of(algorithm: Algorithm, table: Mapping[str, Callable[..., Any]], kind: Kind) -> Callable[..., Any]:
    found = resolve(algorithm.name, table, kind)
    if wrong := unfit(found, kind, algorithm.args):
        raise ConfigError(f"{algorithm.name} does not take args {algorithm.args} ({wrong}); correct them")
    return found


def _make(algorithm: Algorithm, table: Mapping[str, Callable[..., Any]], kind: Kind, key: str) -> Any:
    try:
        return _class_of(algorithm, table, kind)(**algorithm.args)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {algorithm.name} does not take args {algorithm.args} ({error}); correct them") from error
