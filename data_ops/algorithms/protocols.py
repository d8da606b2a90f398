"""The Protocols of data algorithms, one for each of the three places where they plug in.

    prompts ──Curate──▶ orders ──rollout──▶ groups ──Filter──▶ waiting rows ──Sample──▶ batch

They compose as lists in the config; each entry is the name of a built-in one (the tables are in
`data_ops/algorithms/__init__.py`) or an import path. A crash must not change an algorithm's later
decisions, hence three rules: state is a deterministic fold over stored objects that never change (a
restart folds again), random numbers come from the generator that is an argument, and nothing else
is read. `docs/extending/data_algorithms.md` is the contract for people who write one.
"""

from contextlib import AbstractContextManager
from typing import Final, Protocol

import numpy as np

from data_ops.algorithms.policy_groups import PolicyGroup
from data_ops.algorithms.samplers import Draft
from storage.import_path import PluginKind, foreign_code
from storage.records.rollouts import Order, Prompt, Shard


class Curate(Protocol):
    """Before rollout: which prompts are rolled out."""

    @property
    def needs_shards(self) -> bool:
        """Whether `observe` is to be called; an attribute, `needs_shards = True`, which is read
        once.

        Where no curator needs it, a restart reads no shard for them.
        """

    def observe(self, order: Order, shard: Shard) -> None:
        """Fold in one finished order. Called once for each, in the sequence that `Order.seen`
        records.
        """
        ...

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        """Return whether to roll out the prompt: a function of the observed shards and of `draw`.
        Must not change any state.
        """
        ...


class Filter(Protocol):
    """After rollout: which (prompt, policy) groups are kept."""

    def keep(self, group: PolicyGroup) -> bool:
        """Return whether to keep the group, which has at least one row.

        Called in parallel, in any process, and again after a crash: no state.
        """
        ...


class Sample(Protocol):
    """When a batch is assembled: which sequences go first, and which are replayed."""

    def arrange(self, draft: Draft) -> Draft:
        """Return the draft with its rows reordered, some left out, or replays added. No state."""
        ...


def calling(
    algorithm: Curate | Filter | Sample, method: str, *passed: type[Exception]
) -> AbstractContextManager[None]:
    """Call a method of an algorithm, which may be a user's, or read its `needs_shards`, within the
    block.

    Raises ConfigError, naming setting, class and method, as `foreign_code` does.
    """
    return foreign_code(f"{SETTINGS[method]}: {method} of {type(algorithm).__name__}", *passed)


def decision(value: object) -> bool:
    """Return what `accept` or `keep` has returned.

    Raises TypeError for another type: a coroutine would count as true.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"it returned a {type(value).__name__}, not True or False; see {PAGE}")


SETTINGS: Final = {
    "accept": "data.curate",
    "observe": "data.curate",
    "needs_shards": "data.curate",
    "keep": "data.filter",
    "arrange": "data.sample",
}
"""The setting that selects the class of each method."""
PAGE = "docs/extending/data_algorithms.md"
CURATOR = PluginKind("curator", Curate, PAGE)
FILTER = PluginKind("filter", Filter, PAGE)
SAMPLER = PluginKind("sampler", Sample, PAGE)
