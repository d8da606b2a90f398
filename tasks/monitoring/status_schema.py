"""Schema of the JSON of `astraflow status` and `astraflow runs`, documented in `docs/schemas.md`
and filled by `status.py`. Stable: keys are added, never renamed.
"""

from collections.abc import Mapping
from typing import Literal

from storage.config_model import Frozen
from storage.records.control import BudgetKind, ClosingStep, RunEnd, ServiceState
from tasks.monitoring.budget_status import BudgetStatus

State = RunEnd | Literal["starting", "running", "interrupted", "unreadable"]


SILENT = "silent"
"""State of a member whose heartbeat is too old to mean anything."""


class PolicyStatus(Frozen):
    """One policy. A number is null while nothing has been measured yet."""

    step: int
    """Training steps done."""
    steps: int
    """Training steps to do."""
    version: int | None
    """Newest published weights; null before the base model is."""
    batches: int
    """Batches made; those beyond `step` wait for the trainer."""
    wait_fraction: float | None
    """Share of the trainer's wall-clock, since it was last launched, that it waited for data."""
    reward_mean: float | None
    """Mean reward of the policy's own sequences played lately, before any filter."""
    accuracy: float | None
    """Share of recent episodes whose final answer was right, of all policies together."""
    staleness_mean: float | None
    staleness_max: float | None
    """Versions between the trainer and the oldest token of a sequence, over the newest batch."""
    tokens_trained: int
    """Sampled tokens trained on, over all steps."""


class RegionStatus(Frozen):
    workers: int
    """Workers with a fresh heartbeat."""
    tokens_per_s: float
    """Sampled tokens per second of these workers."""
    orders_done: int
    """Orders that the region's workers have finished, by their own count."""
    weights_in_home: dict[str, int] = {}
    """Policy → bytes of its weights that the region's workers read from the run's own store."""
    weights_in_mirror: dict[str, int] = {}
    """The same from the region's mirror."""
    mirrored: dict[str, int] = {}
    """Policy → bytes of its weights that were copied into the region's mirror."""
    shards_out: int = 0
    """Bytes of the shards that the region's workers wrote."""


class EvalStatus(Frozen):
    versions: dict[str, int]
    dataset: str
    workflow: str
    """`single_turn`: the answering policy alone, on its first attempts; otherwise the whole
    workflow.
    """
    accuracy: float
    n: int
    """Problems."""


class MemberStatus(Frozen):
    id: str
    kind: str
    state: str
    """State in its heartbeat; `silent` when that is too old."""
    age_s: float
    """Since its last heartbeat."""
    attempt: int
    """How often it has been launched again."""
    region: str
    wait_reason: str = ""
    """What it waits for: a `WaitReason`; empty when it does not wait, or is silent."""
    note: str


class Closing(Frozen):
    """The supervisor's work after the run's end."""

    step: ClosingStep
    part: str
    """Of the step, for people; may be empty."""
    share: float
    """Completed share (0-1) of the part."""


class OriginStatus(Frozen):
    """The version of another run that a policy began with."""

    run: str
    policy: str
    version: int


def continues(origins: Mapping[str, OriginStatus]) -> str:
    """Return what people are shown: `continues tiny-1 from version 40`; empty for no origins."""
    parts: list[str] = []
    for run in dict.fromkeys(origin.run for origin in origins.values()):
        of_run = {policy: each for policy, each in origins.items() if each.run == run}
        versions = {each.version for each in of_run.values()}
        if len(versions) == 1 and all(policy == each.policy for policy, each in of_run.items()):
            parts.append(f"{run} from version {versions.pop()}")
        else:
            named = ", ".join(f"{each.policy}@{each.version}" for each in of_run.values())
            parts.append(f"{run} from {named}")
    return f"continues {'; '.join(parts)}" if parts else ""


class Status(Frozen):
    run_id: str
    state: State
    reason: str
    """Why the run ended, or what it waits for."""
    closing: Closing | None = None
    """Null before the run's end, and after its supervisor has left."""
    deployment: str
    started: float
    """Unix time of its creation."""
    elapsed_s: float
    """Until its end (of an interrupted run: its last heartbeat), or until now."""
    steps: int
    origins: dict[str, OriginStatus] = {}
    """Policy → the version of another run that is its version 0; without the other policies."""
    policies: dict[str, PolicyStatus]
    regions: dict[str, RegionStatus]
    evals: list[EvalStatus]
    """In the order of their versions; for each, the answering policy alone, then the team."""
    budget: dict[BudgetKind, BudgetStatus] = {}
    """Limits that are set, and what is used of them."""
    members: list[MemberStatus]
    counts: dict[str, int]
    """`orders` written, `orders_done` ingested by the dataflow, `evaluations`."""
    problems: list[str] = []
    """Objects of the run that cannot be read, and why; the other fields are computed without them.
    """

    @property
    def supervisor_has_ended(self) -> bool:
        """Whether the supervisor left, by its last heartbeat."""
        ended = (ServiceState.DONE, ServiceState.FAILED)
        return any(each.id == "supervisor" and each.state in ended for each in self.members)


class RunSummary(Frozen):
    run_id: str
    state: State
    reason: str
    deployment: str
    started: float | None
    """Null, as the two below, of a run that is unreadable."""
    elapsed_s: float | None
    steps: int | None
    versions: dict[str, int | None]
    """Policy → newest published version."""
    origins: dict[str, OriginStatus] = {}
    """As in a status."""
    problems: list[str] = []
    """As in a status."""
