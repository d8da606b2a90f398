"""The tables of data algorithms, one for each place, and their construction from a recipe's lists.

A model of these unions is both the settings of an algorithm and, for a built-in one, the algorithm.
An entry of a recipe selects by its name; a name with a colon is the import path of a class.
"""

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

from pydantic import Discriminator, Tag

from data_ops.algorithms.curators import AcceptAll
from data_ops.algorithms.custom import CustomCurator, CustomFilter, CustomSampler
from data_ops.algorithms.filters import ZeroAdvantage
from data_ops.algorithms.protocols import Curate, Filter, Sample
from data_ops.algorithms.samplers import Edf, Fifo
from storage.config_union import ByPath, variants

CurateConfig: TypeAlias = Annotated[
    Annotated[AcceptAll, Tag("accept_all")] | Annotated[CustomCurator, Tag("custom")],
    Discriminator(ByPath()),
]
"""Before rollout: which prompts are rolled out."""
FilterConfig: TypeAlias = Annotated[
    Annotated[ZeroAdvantage, Tag("zero_advantage")] | Annotated[CustomFilter, Tag("custom")],
    Discriminator(ByPath()),
]
"""After rollout: which (prompt, policy) groups are kept."""
SampleConfig: TypeAlias = Annotated[
    Annotated[Edf, Tag("edf")]
    | Annotated[Fifo, Tag("fifo")]
    | Annotated[CustomSampler, Tag("custom")],
    Discriminator(ByPath()),
]
"""When a batch is assembled: in which order waiting sequences are used."""

CURATORS: Final = variants(CurateConfig)
FILTERS: Final = variants(FilterConfig)
SAMPLERS: Final = variants(SampleConfig)


def curators(configs: Sequence[CurateConfig]) -> tuple[Curate, ...]:
    """Make one new curator for each entry of `data.curate`; ConfigError names the entry."""
    return tuple(config.make(f"data.curate.{at}") for at, config in enumerate(configs))


def filters(configs: Sequence[FilterConfig]) -> tuple[tuple[str, Filter], ...]:
    """Make (name, filter) for each entry of `data.filter`; the name is the reason in the ledger."""
    return tuple(
        (config.name, config.make(f"data.filter.{at}")) for at, config in enumerate(configs)
    )


def samplers(configs: Sequence[SampleConfig]) -> tuple[Sample, ...]:
    """Make one sampler for each entry of `data.sample`; ConfigError names the entry."""
    return tuple(config.make(f"data.sample.{at}") for at, config in enumerate(configs))
