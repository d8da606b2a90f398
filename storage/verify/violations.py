"""The invariants of a run, and the violations of them that an audit finds."""

from collections import defaultdict
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, TypeVar

from storage.errors import ConfigError

T = TypeVar("T")

TEXT_MAX = 2_000
"""Characters of a violation; a stored text in it may have millions."""
VIOLATIONS_MAX = 1_000
"""Violations of one invariant that are listed of one object; a small shard may have millions."""
MORE = "and more violations of this kind"


class Invariant(IntEnum):
    """What must hold for the objects of every run. `astraflow verify` prints the numbers."""

    CONTIGUOUS = 1
    """Orders, and each policy's batches, versions and rounds, have no gaps; a shard belongs to an
    order.
    """
    TRAINED_ONCE = 2
    """A sequence is trained on at most once per policy, except where the batch says `replayed`."""
    LINEAGE = 3
    """A version names its parent and its batch, every stored tensor has the listed digest, and
    orders have prompts of the rows that `run.json` names, if it names any.
    """
    VERSIONS_EXIST = 4
    """A version that a token, an evaluation or a tag names exists; the worker had its digest."""
    STALENESS = 5
    """No sequence is older than `max_staleness`, or newer than the version that is trained."""
    LEDGER = 6
    """Every sequence of every shard is trained, filtered, expired or waiting, and exactly one."""
    TOKENS = 7
    """A batch holds the tokens, log-probabilities and rewards of the shard, unchanged, and names
    its region.
    """
    READABLE = 8
    """Every folder can be listed; every heartbeat, lease, round and reason in quarantine,
    `usage.json` and `orders/end.json` can be read.
    """


class Violation(NamedTuple):
    """One violation. Example:
    `Violation(Invariant.TRAINED_ONCE, "batches/solver/00000003.arrow", "order 7 … is trained")`.
    """

    invariant: Invariant
    where: str
    """Key of the object, relative to the run."""
    what: str


class Findings:
    """The violations that the audits of one run have found so far."""

    def __init__(self) -> None:
        self._texts: dict[tuple[Invariant, str], set[str]] = defaultdict(set)
        self._missing: set[str] = set()

    def add(self, invariant: Invariant, where: str, what: str) -> None:
        """Add a violation; one that was added before is not counted again. Those of one object
        beyond VIOLATIONS_MAX are one.
        """
        texts, text = self._texts[invariant, where], what[:TEXT_MAX]
        if text not in texts:
            texts.add(text if len(texts) < VIOLATIONS_MAX else MORE)

    def add_missing(self, where: str, what: str) -> None:
        """Add an object of a contiguous series that is missing, unless it was added before."""
        if where not in self._missing:
            self._missing.add(where)
            self.add(Invariant.CONTIGUOUS, where, what)

    def listed(self, folder: str, listing: Callable[[], list[T]]) -> list[T]:
        """Return what `listing` returns. A folder that cannot be listed, such as a link, is a
        violation and counts as an empty one.
        """
        try:
            return listing()
        except ConfigError as error:
            self.add(Invariant.READABLE, folder, f"cannot be listed: {error}")
            return []

    def violations(self) -> tuple[Violation, ...]:
        """Return the violations, sorted by invariant, object and text."""
        return tuple(
            Violation(invariant, where, what)
            for (invariant, where), texts in sorted(self._texts.items())
            for what in sorted(texts, key=lambda text: (text == MORE, text))
        )
