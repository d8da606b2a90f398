"""Records of the promotion log: which team of versions is in use, and why.

A team is one version of each policy that were trained together; it is promoted as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from storage.plain_names import PartName, RunId
from storage.records.numbers import Count, Number, UnixTime

POLICIES_MAX = 100
ROWS_MAX = 101
"""Rows of a gate's table: a hundred data sets, and all of them pooled."""


class DecisionKind(StrEnum):
    """What a decision does to the champion."""

    PROMOTED = "promoted"
    """The team of the decision is the champion."""
    REJECTED = "rejected"
    """The champion stays; the team of the decision is the challenger."""
    ROLLED_BACK = "rolled_back"
    """The team of the decision, an earlier champion, is the champion again."""


class Requirement(StrEnum):
    """What the gate requires of a row of its table."""

    GAIN = "gain"
    """Better than the champion."""
    LOSS = "loss"
    """Not worse than the allowed loss."""


@dataclass(frozen=True, kw_only=True)
class TeamVersion:
    """One policy's version in a team. Example:
    `TeamVersion(run_id="tiny-1", version=40, digest="sha256:9f…")`.
    """

    run_id: RunId
    version: Count
    digest: str
    """Of the weights, as the version's manifest has it."""


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """Champion and candidate on the problems of one data set, or of all of them pooled.

    The numbers are NaN where no problem could be compared.
    """

    dataset: str
    problems: Count
    """Compared problems; those on which each episode of the champion failed are left out."""
    champion_failed: Count
    """Failed episodes of the champion; their pairs are left out."""
    candidate_failed: Count
    """Failed episodes of the candidate in the compared pairs; they count as wrong."""
    champion: Number
    """Mean of the compared problems."""
    candidate: Number
    gain: Number
    """`candidate - champion`."""
    low: Number
    """The gain is at least this, with the gate's confidence."""
    high: Number
    """The gain is at most this, with the gate's confidence."""
    p_value: Number
    """Probability of such a gain where champion and candidate do not differ; one-sided."""
    requirement: Requirement
    required: Number
    """`low` must be at least this."""
    passed: bool
    why: str
    """One clause for people."""


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """What the gate decided, and its table."""

    passed: bool
    reason: str
    """One sentence for people."""
    test: str
    """Name or import path of the test."""
    confidence: Number
    rows: Annotated[tuple[GateRow, ...], Field(max_length=ROWS_MAX)]


Team = Annotated[Mapping[PartName, TeamVersion], Field(min_length=1, max_length=POLICIES_MAX)]
"""policy → version."""


@dataclass(frozen=True, kw_only=True)
class PromotionDecision:
    """One entry of a promotion log. Example:

    PromotionDecision(name="tiny", number=3, kind="promoted", at_s=1767225600.0, by="ada",
                      reason="…", team={"solver": TeamVersion(run_id="tiny-1", version=40, …)})
    """

    name: RunId
    """Name of the log; the same form as a run id."""
    number: Count
    """1, 2, … without gaps."""
    kind: DecisionKind
    at_s: UnixTime
    by: str
    """The user or the flow run that decided."""
    reason: str
    team: Team
    returns_to: Count | None = None
    """Of `rolled_back`: the decision whose champion is the champion again."""
    gate: GateVerdict | None = None
    """None for a decision by hand."""
    write_id: str = ""
