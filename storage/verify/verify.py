"""Checks the invariants of a run from its stored objects alone, and says what is broken and where.

    orders ─ shards ─┬─▶ audit_shards   1 contiguous, 4 every token names weights that exist and were held
    batches ─────────┼─▶ audit_books    1 contiguous, 2 trained once, 5 staleness, 6 the books balance, 7 the same tokens
    weights ─────────┼─▶ audit_weights  1 contiguous, 3 parents, batches and digests
    evals ─ tags ────┴─▶ check_named    4 can be read, and names versions that exist

A run that is still going can be verified too: later objects are read after the ones they refer to.
Of a completed run all batches and versions must be there. Keys of no known pattern are no objects
of the run. Knows what the objects promise each other, and nothing of how they came about.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from storage import layout, plain_names
from storage.errors import UNREADABLE, ConfigError, CorruptError, NotFoundError
from storage.records.numbers import QUANTITY_MAX
from storage.records.types import Json
from storage.run import quarantine, runs
from storage.store.object_store import ObjectStore
from storage.verify.ledger import PolicyBooks, Terms, audit_books
from storage.verify.names import check_named, named_versions
from storage.verify.shards import Broken, audit_shards
from storage.verify.weights import audit_checkpoints, audit_weights


class Violation(NamedTuple):
    """One broken promise. Example:
    `Violation(2, "batches/solver/00000003.arrow", "order 7 … is trained on again")`.
    """

    invariant: int
    """Number in the design's list of invariants, 1–7."""
    where: str
    """Key of the object, relative to the run."""
    what: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What `verify` found."""

    violations: tuple[Violation, ...]
    orders: int
    shards: int
    quarantined: int
    sequences: int
    """Sequences in all shards that can be read."""
    policies: Mapping[str, PolicyBooks] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.violations


Progress = Callable[[str, float], None]
"""Called with what is being checked and the share of it that is done."""


def verify(run: ObjectStore, progress: Progress = lambda stage, share: None) -> Verdict:
    """Check every invariant of the run. Reads every object once; damage becomes a violation, never
    an exception.

    Raises:
        ConfigError: the run does not exist, or its `run.json` cannot be read or lacks a setting
        that others must heed. TransientError: the store stopped answering.
    """
    found: list[Violation] = []

    def broken(invariant: int, where: str, what: str) -> None:
        found.append(Violation(invariant, where, what))

    # The run's end is read first, then batches are listed: everything they speak of was written
    # before them, so a live run cannot look broken.
    terms = _terms(run, broken)
    steps = {
        policy: layout.numbers(
            run.list(f"{layout.BATCHES}/{policy}/"), partial(layout.batch, policy)
        )
        for policy in terms
    }
    named = named_versions(run, broken)
    set_aside = quarantine.read_quarantine(run)
    audit = audit_shards(run, set_aside, broken, progress)
    books = {
        policy: audit_books(
            run, policy, steps[policy], terms[policy], audit, set_aside, broken, progress
        )
        for policy in terms
    }
    published = {
        policy: audit_weights(run, policy, terms[policy].due, broken, progress) for policy in terms
    }
    for policy in terms:
        audit_checkpoints(run, policy, broken)
    audit.check_versions(published, broken)
    check_named(named, published, broken)
    ordered = sorted(
        set(found), key=lambda violation: (violation.invariant, violation.where, violation.what)
    )
    return Verdict(
        violations=tuple(ordered),
        orders=audit.num_orders,
        shards=audit.num_shards,
        quarantined=len(set_aside),
        sequences=audit.num_sequences,
        policies=books,
    )


def _terms(run: ObjectStore, broken: Broken) -> dict[str, Terms]:
    """What the run's configuration and end promise of each policy, sorted by name."""
    config = _config(run)
    steps = _whole(config.get("steps"), run, "steps")
    due = steps if _completed(run, broken) else -1
    staleness = _whole(
        _section(config.get("data"), run, "data").get("max_staleness"), run, "data.max_staleness"
    )
    policies = _section(config.get("policies"), run, "policies")
    return {
        policy: Terms(
            _whole(
                _section(settings, run, f"policies.{policy}").get("batch_size"),
                run,
                f"policies.{policy}.batch_size",
            ),
            staleness,
            due,
        )
        for policy, settings in sorted(policies.items())
        if _can_be_a_key(policy, broken)
    }


def _can_be_a_key(policy: str, broken: Broken) -> bool:
    if layout.NAME.fullmatch(policy):
        return True
    broken(
        1,
        layout.RUN,
        f"names the policy {plain_names.quoted(policy)}, of which there can be no batch and no "
        "version",
    )
    return False


def _section(value: Any, run: ObjectStore, key: str) -> Json:
    if isinstance(value, dict):
        return value
    raise ConfigError(
        f"{run.url} cannot be verified, because the config in its {layout.RUN} has no section "
        f"{key!r}"
    )


def _whole(value: Any, run: ObjectStore, key: str) -> int:
    if type(value) is int and 0 <= value <= QUANTITY_MAX:
        return value
    raise ConfigError(
        f"{run.url} cannot be verified, because the config in its {layout.RUN} has no whole number "
        f"{key!r}"
    )


def _completed(run: ObjectStore, broken: Broken) -> bool:
    try:
        stop = runs.read_stop(run)
    except UNREADABLE as error:
        broken(1, layout.STOP, str(error))
        return False
    return stop is not None and stop.state == "completed"


def _config(run: ObjectStore) -> Json:
    try:
        return runs.read_run_config(run)
    except (NotFoundError, CorruptError) as error:
        raise ConfigError(
            f"{run.url} cannot be verified, because its {layout.RUN} cannot be read: {error}; put "
            "it back from a copy"
        ) from error
