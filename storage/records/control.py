"""Records by which services coordinate: leases, heartbeats, the end of the orders, the stop of the
run, and what it has used of its budget.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from storage.plain_names import PartName
from storage.records.machine_use import MachineUse
from storage.records.numbers import Count, Quantity, UnixTime
from storage.records.progress import Progress, ServiceKind

PID_MAX: Final = 2**31 - 1
"""Number of a process; operating systems refuse to look up larger ones."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A worker's claim on an order."""

    order: Count
    attempt: Count
    """Leases on the order before this one, however they ended."""
    worker: str
    region: str
    lost: Count = 0
    """How many of those expired: their workers were killed or cut off, maybe by the order itself.
    """
    renewals: Count = 0
    """Counts up at every renewal. Others judge a lease by watching this number on their own clock,
    so clocks need not agree.
    """
    released: bool = False
    """Given back: the next attempt is open at once."""
    write_id: str = ""


@dataclass(frozen=True)
class OrdersEnd:
    """No further shard is needed: every policy has all of its batches."""

    orders: int
    """Number of orders that the writer has seen; a hint."""


class ServiceState(StrEnum):
    """State of a service, as its heartbeat reports it."""

    STARTING = "starting"
    WORKING = "working"
    WAITING = "waiting"
    """It can do nothing until something else exists or answers: the heartbeat's `wait_reason`."""
    DRAINING = "draining"
    """It was asked to stop, and finishes what it has begun."""
    DONE = "done"
    FAILED = "failed"


class ClosingStep(StrEnum):
    """State of a supervisor after the run's end: the steps that it takes, in this order."""

    LEAVING = "leaving"
    """Members leave by themselves; those that do not are cancelled."""
    VERIFYING = "verifying"
    REPORTING = "reporting"
    TRACKING = "tracking"
    """MLflow gets the last metrics, the report and the models."""
    NOTIFYING = "notifying"
    """The end of the run is shown in Prefect."""


class WaitReason(StrEnum):
    """What a service waits for."""

    NONE = ""
    BASE_MODEL = "base_model"
    """Version 0 of a policy."""
    VERSION = "version"
    """The next versions to evaluate."""
    BATCH = "batch"
    ORDERS = "orders"
    SHARDS = "shards"
    NODES = "nodes"
    """Other nodes of the trainer."""
    MEMBERS = "members"
    """Members of the run that are not at work yet, or not done."""
    STORE = "store"
    """The object store, or a mirror, does not answer."""
    PREFECT = "prefect"
    """The Prefect server does not answer."""
    DAMAGED_OBJECT = "damaged_object"
    """A stored object is missing or cannot be read."""
    UNTRAINABLE = "untrainable"
    """No sequence that was ingested lately can be trained on."""
    GPU = "gpu"
    """Another process of its machine uses a GPU that it needs."""


FAULTS = frozenset(
    {
        WaitReason.STORE,
        WaitReason.PREFECT,
        WaitReason.DAMAGED_OBJECT,
        WaitReason.UNTRAINABLE,
        WaitReason.GPU,
    }
)
"""Wait reasons that a person may have to act on. The others occur in every run."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatHeader:
    """Fields of a heartbeat that every kind of service has."""

    kind: ServiceKind
    id: PartName
    """`dataflow`, `trainer-solver`, `rollout-us-east-0`, …: the member's name, stable over
    restarts.
    """
    attempt: Count
    """Which launch of the member this is."""
    beats: Count
    beat_s: UnixTime
    """Unix time at which the heartbeat was written."""
    started_s: UnixTime
    pid: Annotated[int, Field(ge=0, le=PID_MAX)]
    host: str
    state: ServiceState | ClosingStep | str
    """A plain string only where a newer release wrote a state that this one does not have."""
    wait_reason: WaitReason | str = WaitReason.NONE
    """A plain string only where a newer release wrote a reason that this one does not have."""
    region: str = ""
    alive_s: Quantity = 0.0
    """Seconds from the start of the attempt's process to this heartbeat, by a clock that is never
    set.
    """
    seconds: Mapping[str, Quantity] = field(default_factory=dict)
    """Cumulative wall seconds by component: `wait`, `step`, `publish`, `generate`, `store`, …; and
    `cpu` of the process.
    """
    versions: Mapping[str, Count] = field(default_factory=dict)
    """policy → version loaded."""
    note: str = ""
    """Text for people; no program reads it."""
    machine: MachineUse | None = None
    """What its machine has in use; None before the first measurement, and in heartbeats of earlier
    releases.
    """


@dataclass(frozen=True, kw_only=True)
class Heartbeat(HeartbeatHeader):
    """State of a service, which it writes every few seconds. A hint: overwritten, never the base
    of a correctness decision. Its stored form is that of `storage.coordination.heartbeats`.
    """

    progress: Progress

    @property
    def has_ended(self) -> bool:
        """Whether the service left, by its own account."""
        return self.state in (ServiceState.DONE, ServiceState.FAILED)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One try of the nodes of a trainer to train together; over as soon as the next one exists.

    Example: `Round(policy="solver", number=3, is_open=True)`.
    """

    policy: PartName
    number: Count
    """From 1, without gaps."""
    is_open: bool
    """Nodes may join it; False: it only ends the round before."""


@dataclass(frozen=True, kw_only=True)
class RoundEntry:
    """A value that one process publishes to the others in a round. Example:
    `RoundEntry(name="node/1", value="")`.
    """

    name: str
    value: str
    """Bytes in hexadecimal."""


RunEnd: TypeAlias = Literal["completed", "cancelled", "failed", "exhausted", "suspended"]
"""How a run ended. `exhausted`: a budget is used up. `suspended`: until a person resumes it."""
PLANNED_ENDS: tuple[RunEnd, ...] = ("completed", "exhausted", "suspended")
"""Ends for which members that work get more time: a trainer saves its checkpoint."""


@dataclass(frozen=True)
class Stop:
    """The run has ended, or shall. Services drain and leave when they see it."""

    state: RunEnd
    reason: str
    at_s: UnixTime


BudgetKind: TypeAlias = Literal["hours", "tokens", "cost"]


@dataclass(frozen=True, kw_only=True)
class CountedLife:
    """How much of a member's newest attempt is in `Usage.used`."""

    attempt: Count
    started_s: UnixTime
    """Distinguishes two processes of one attempt, such as two windows of the dataflow."""
    alive_s: Quantity


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a run has used of its budget; the supervisor overwrites it at every poll.

    Example: `Usage(limits={"hours": 8.0}, used={"hours": 2.5, "tokens": 0.0, "cost": 0.0})`.
    """

    limits: Mapping[BudgetKind, Quantity]
    """The budget of the newest start of the run; without the kinds that are not limited."""
    used: Mapping[BudgetKind, Quantity]
    """Never decreases."""
    members: Mapping[PartName, CountedLife] = field(default_factory=dict)
