"""Records of recurring training: what a night does, and how it ended.

A night is one execution of a recurring training: a run that begins with the champion, a gate, and a
decision. It may be at any time of the day.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from storage.plain_names import PartName, RunId
from storage.records.numbers import Count, UnixTime
from storage.records.promotions import POLICIES_MAX, TeamVersion


class NightEnd(StrEnum):
    """How a night ended."""

    PROMOTED = "promoted"
    """Its candidate passed the gate and is the champion."""
    REJECTED = "rejected"
    """Its candidate did not pass the gate."""
    SKIPPED = "skipped"
    """It did not train: no new data, a night before it still ran, or it was too late."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    """A person ended its training run."""
    ABANDONED = "abandoned"
    """Its process ended without an outcome, and a later night found that."""


JUDGED = frozenset({NightEnd.PROMOTED, NightEnd.REJECTED})
"""Ends after which a night's data is not used again."""


@dataclass(frozen=True, kw_only=True)
class NightPlan:
    """What a night does. Created once when the night begins, so that a retry does the same.

    Example: `NightPlan(name="tiny", night="20260102-0200", run_id="tiny-20260102-0200", number=1,
    due_s=1767319200.0, began_s=1767319203.5, champion=1, team={"solver": TeamVersion(…)},
    since_s=1767232800.0)`.
    """

    name: RunId
    """Of the recurring training; that of its promotion log, too."""
    night: RunId
    """Its due time in UTC, such as `20260102-0200`."""
    run_id: RunId
    number: Count
    """Nights that began before it."""
    due_s: UnixTime
    """When it was to begin."""
    began_s: UnixTime
    champion: Count | None = None
    """Number of the decision with the champion that it begins with; None: there was no champion."""
    team: Annotated[Mapping[PartName, TeamVersion], Field(max_length=POLICIES_MAX)] = field(
        default_factory=dict
    )
    """The champion's team: policy → version."""
    since_s: UnixTime | None = None
    """Where its data window begins: the end of the last judged night's. None: with the recipe."""
    prompts_of: RunId | None = None
    """Run behind whose last prompts it goes on; None: it begins with the first prompt."""
    write_id: str = ""

    @property
    def until_s(self) -> float:
        """Where its data window ends: at its due time, or before, when it began before. Rows that
        come between the two are the next night's.
        """
        return min(self.due_s, self.began_s)


@dataclass(frozen=True, kw_only=True)
class NightStart:
    """A night was started again, because its process had ended without an outcome. Created once.

    Example: `NightStart(name="tiny", night="20260102-0200", number=1, at_s=1767319500.0,
    results=12)`.
    """

    name: RunId
    night: RunId
    number: Count
    """From 1; the first start of a night has its plan instead."""
    at_s: UnixTime
    results: Count
    """Objects that were stored of the night by then: versions, shards, outcomes, …"""
    write_id: str = ""


@dataclass(frozen=True, kw_only=True)
class NightOutcome:
    """How a night ended. Created once. Example:
    `NightOutcome(name="tiny", night="20260102-0200", end="promoted", reason="…", decision=2, …)`.
    """

    name: RunId
    night: RunId
    end: NightEnd
    reason: str
    """One sentence for people."""
    ended_s: UnixTime
    decision: Count | None = None
    """Number of the decision about its candidate."""
    write_id: str = ""
