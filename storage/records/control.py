"""Records by which services coordinate: leases, heartbeats, the end of the orders, and the stop of
the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from storage.plain_names import PartName
from storage.records.numbers import Count, Quantity, UnixTime


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
    """Orders that the writer knows of; a hint."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a service says of itself every few seconds. A hint: overwritten, never the base of a
    correctness decision.
    """

    kind: Literal[
        "supervisor", "base_model", "dataflow", "rollout", "trainer", "evaluation", "mirror"
    ]
    id: PartName
    """`dataflow`, `trainer-solver`, `rollout-us-east-0`, …: the member's name, stable over
    restarts.
    """
    attempt: Count
    """Which launch of the member this is."""
    beats: Count
    beat_s: UnixTime
    """Unix time of this beat."""
    started_s: UnixTime
    pid: Count
    host: str
    state: str
    """`starting`, `working`, `waiting`, `draining`, `done`, `failed`; a supervisor's also a step
    after the run's end.
    """
    region: str = ""
    progress: Mapping[str, Quantity] = field(default_factory=dict)
    """Counters: `orders_done`, `episodes`, `tokens`, `step`, `closed_below`, …"""
    rates: Mapping[str, Quantity] = field(default_factory=dict)
    """Gauges: `tokens_per_s`, `running`, …"""
    seconds: Mapping[str, Quantity] = field(default_factory=dict)
    """Cumulative wall seconds by component: `wait`, `step`, `publish`, `generate`, `store`, …; and
    `cpu` of the process.
    """
    versions: Mapping[str, Count] = field(default_factory=dict)
    """policy → version held."""
    note: str = ""
    """The last thing worth telling a person."""


@dataclass(frozen=True)
class Stop:
    """The run has ended, or shall. Services drain and leave when they see it."""

    state: Literal["completed", "cancelled", "failed"]
    reason: str
    at_s: UnixTime
