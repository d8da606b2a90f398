"""Progress records of services: what each kind of service counts and measures, for its heartbeat.

A count goes on from 0 when the service is launched again. A field with a mapping holds one number
per policy. Every field has a default, which means "nothing measured yet".

Example: `RolloutProgress(orders_done=7, tokens_per_s=512.0, refresh_s={"solver": 1.2})`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from storage.plain_names import PartName
from storage.records.numbers import QUANTITY_MAX, Quantity, SignedQuantity

ServiceKind: TypeAlias = Literal[
    "supervisor",
    "base_model",
    "dataflow",
    "rollout",
    "trainer",
    "trainer_node",
    "evaluation",
    "mirror",
]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Total: TypeAlias = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=QUANTITY_MAX)]
"""A whole number from 0 to 2^53; may be stored as a float."""
Totals: TypeAlias = Mapping[PartName, Total]
"""policy → number."""

Share: TypeAlias = Annotated[Quantity, AfterValidator(lambda share: min(share, 1.0))]
"""A fraction of a whole; a larger number is 1."""


@dataclass(frozen=True, kw_only=True)
class SupervisorProgress:
    members: Total = 0
    members_done: Total = 0
    closing_share: Share = 0.0
    """Completed share of the current closing step; 0 for a step that is not measured."""


@dataclass(frozen=True, kw_only=True)
class BaseModelProgress:
    base_model: Share | None = None
    """Completed share of building the base models; None before the first report."""


@dataclass(frozen=True, kw_only=True)
class DataflowProgress:
    """The totals of fates count the sequences of batches that were made since the launch."""

    closed_below: Total = 0
    """Every order below it is ingested for every policy; where workers begin to look for orders."""
    orders: Total = 0
    """Orders written."""
    batches: Totals = field(default_factory=dict)
    waiting: Totals = field(default_factory=dict)
    """Sequences that wait for a batch."""
    trained: Totals = field(default_factory=dict)
    replayed: Totals = field(default_factory=dict)
    filtered: Totals = field(default_factory=dict)
    expired: Totals = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RolloutProgress:
    orders_done: Total = 0
    episodes: Total = 0
    episodes_failed: Total = 0
    tokens: Total = 0
    """Sampled tokens."""
    tokens_per_s: Quantity = 0.0
    running: Total = 0
    """Requests that the engines generate for at this moment."""
    shard_bytes: Total = 0
    """Bytes of the shards it wrote."""
    weights_bytes_home: Totals = field(default_factory=dict)
    """Bytes of weights that were read from the run's own store."""
    weights_bytes_mirror: Totals = field(default_factory=dict)
    """Bytes of weights that were read from the region's mirror."""
    refresh_s: Mapping[PartName, Quantity] = field(default_factory=dict)
    """Duration of the last change of version: fetched, applied, verified, swapped. Absent for a
    policy whose version has not changed since the launch.
    """
    refresh_failures: Totals = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainerProgress:
    step: Total = 0
    tokens_trained: Total = 0
    tokens_per_s: Quantity = 0.0
    """Of the last step."""
    wait_fraction: Share = 0.0
    """Share of the last step's wall-clock that passed waiting for its batch."""
    reward_mean: SignedQuantity | None = None
    """Mean reward of the sequences of the policy that were played before the last step's batch was
    made; None before the first step. The only field that may be negative.
    """
    staleness_mean: Quantity | None = None
    """Of the last step's batch, in versions."""
    staleness_max: Quantity | None = None


@dataclass(frozen=True, kw_only=True)
class TrainerNodeProgress:
    """Nothing: a node makes the calls of its trainer, whose progress is that of both."""


@dataclass(frozen=True, kw_only=True)
class EvaluationProgress:
    episodes: Total = 0


@dataclass(frozen=True, kw_only=True)
class MirrorProgress:
    mirrored_bytes: Totals = field(default_factory=dict)
    """Bytes of weights that were copied into the mirror."""


SIGNED = frozenset({"reward_mean"})
"""Fields that may be negative."""
Progress: TypeAlias = (
    SupervisorProgress
    | BaseModelProgress
    | DataflowProgress
    | RolloutProgress
    | TrainerProgress
    | TrainerNodeProgress
    | EvaluationProgress
    | MirrorProgress
)
PROGRESS_OF: Mapping[ServiceKind, type[Progress]] = {
    "supervisor": SupervisorProgress,
    "base_model": BaseModelProgress,
    "dataflow": DataflowProgress,
    "rollout": RolloutProgress,
    "trainer": TrainerProgress,
    "trainer_node": TrainerNodeProgress,
    "evaluation": EvaluationProgress,
    "mirror": MirrorProgress,
}
"""Kind of service → class of its progress record."""
