"""The three places where a data algorithm plugs in, as Protocols. The tables are in
`data_ops/algorithms/__init__.py`.

    prompts ──Curate──▶ orders ──rollout──▶ groups ──Filter──▶ waiting rows ──Sample──▶ batch

They compose as lists in the config; each entry is a built-in's name or an import path. A crash at
any moment must not change what an algorithm decides afterwards, hence three rules: state is a
deterministic fold over stored objects that never change (so it is rebuilt by folding again), random
numbers come from the generator that is handed in, and nothing else is read.
`docs/data_algorithms.md` is the contract for people who write one.
"""

from typing import Protocol

import numpy as np

from data_ops.algorithms.policy_groups import PolicyGroup
from data_ops.algorithms.samplers import Draft
from storage.import_path import PluginKind
from storage.records.rollouts import Order, Prompt, Shard


class Curate(Protocol):
    """Before rollout: which prompts are worth playing."""

    @property
    def needs_shards(self) -> bool:
        """Whether `observe` is to be called. Where no curator needs it, a restart reads no shard
        for them.

        An attribute: `needs_shards = True`.
        """

    def observe(self, order: Order, shard: Shard) -> None:
        """Fold in one finished order. Called once for each, in the sequence that `Order.seen`
        records.
        """
        ...

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        """Whether to roll out the prompt. A function of what was observed and of `draw`; must not
        change any state.
        """
        ...


class Filter(Protocol):
    """After rollout: which (prompt, policy) groups are worth training on."""

    def keep(self, group: PolicyGroup) -> bool:
        """Whether to keep the group, which has at least one row. Runs in parallel, and again after
        a crash: no state.
        """
        ...


class Sample(Protocol):
    """When a batch is assembled: which sequences go first, and which come back."""

    def arrange(self, draft: Draft) -> Draft:
        """The draft with its rows reordered, some left out, or replays added. No state."""
        ...


PAGE = "docs/data_algorithms.md"
CURATOR = PluginKind("curator", Curate, PAGE)
FILTER = PluginKind("filter", Filter, PAGE)
SAMPLER = PluginKind("sampler", Sample, PAGE)
