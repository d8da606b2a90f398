"""Verification of a run: its invariants, checked from its stored objects alone.

    prompts ─────────┬─▶ PromptAudit     3 frozen rows have their digest, orders no other prompts
    orders ─ shards ─┼─▶ ShardAudit      1 contiguous, 4 tokens name published weights
    batches ─────────┼─▶ LedgerAudit     1 contiguous, 2 trained once, 5 stale, 6 ledger, 7 tokens
    weights ─────────┼─▶ WeightsAudit    1 contiguous, 3 parents, batches and digests
    checkpoints ─────┼─▶ checkpoints     3 complete, digests of those that a resume reads
    evals ─ tags ────┼─▶ named_versions  4 readable, and names versions that exist; samples, too
    heartbeats ─ … ──┴─▶ coordination    8 heartbeats, leases, rounds, usage and end are readable

A run that goes on can be verified, too: later objects are read after the ones they refer to. Of a
completed run all batches and versions must exist. Keys of no known pattern are no objects of the
run. The caller passes the terms that the run's recipe sets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from storage import layout, plain_names
from storage.errors import UNREADABLE
from storage.records.weights import Origin
from storage.records.windows import PromptWindow
from storage.run import batches, quarantine, runs
from storage.run.fates import LedgerCounts
from storage.store.object_store import ObjectStore
from storage.verify.checkpoints import audit_checkpoints
from storage.verify.coordination import audit_coordination
from storage.verify.frozen_prompts import PromptAudit
from storage.verify.ledger import LedgerAudit
from storage.verify.named_versions import check_named_versions, read_named_versions
from storage.verify.shards import ShardAudit
from storage.verify.violations import Findings, Invariant, Violation
from storage.verify.weights import WeightsAudit


@dataclass(frozen=True, kw_only=True)
class RunTerms:
    """What the recipe of a run promises. Example:
    `RunTerms(steps=80, max_staleness=8, batch_sizes={"solver": 128})`.
    """

    steps: int
    """Batches, and versions after version 0, of every policy of the completed run."""
    max_staleness: int
    batch_sizes: Mapping[str, int]
    """policy → rows of every batch."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """policy → the version of another run that is its version 0."""
    windows: Mapping[str, PromptWindow] = field(default_factory=dict)
    """Place in the recipe → its frozen rows."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a verification."""

    violations: tuple[Violation, ...]
    orders: int
    shards: int
    quarantined: int
    sequences: int
    """Sequences in all shards that can be read."""
    policies: Mapping[str, LedgerCounts] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no violation was found."""
        return not self.violations


Progress = Callable[[str, float], None]
"""Called with the name of a stage and the share of it that is done."""


def verify(
    run: ObjectStore, terms: RunTerms, progress: Progress = lambda stage, share: None
) -> Verdict:
    """Check every invariant of the run. Every object is read once; damage is a violation, never an
    exception.

    Raises:
        TransientError: the store stopped answering.
    """
    findings = Findings()
    # The run's end is read first, then batches are listed: the objects that these refer to were
    # written before them, so a run that goes on has no violations.
    due = terms.steps if _is_completed(run, findings) else -1
    policies = [policy for policy in sorted(terms.batch_sizes) if _is_name(policy, findings)]
    steps = {policy: _steps(run, policy, findings) for policy in policies}
    named = read_named_versions(run, findings)
    reasons = findings.listed(
        layout.QUARANTINE, lambda: list(quarantine.read_quarantine(run).items())
    )
    quarantined = dict(reasons)
    prompts = PromptAudit(run, terms.windows, findings)
    shards = ShardAudit(run, quarantined, findings, prompts)
    shards.audit(progress)
    counts, published = {}, {}
    for policy in policies:
        ledger = LedgerAudit(
            run,
            policy,
            shards,
            findings,
            batch_size=terms.batch_sizes[policy],
            max_staleness=terms.max_staleness,
        )
        counts[policy] = ledger.audit(steps[policy], due, progress)
    for policy in policies:
        audit = WeightsAudit(run, policy, findings, terms.origins.get(policy))
        published[policy] = audit.audit(due, progress)
    for policy in policies:
        audit_checkpoints(run, policy, findings, progress)
    audit_coordination(run, policies, findings, progress)
    shards.check_versions(published)
    check_named_versions(named, published, findings)
    return Verdict(
        violations=findings.violations(),
        orders=shards.num_orders,
        shards=shards.num_shards,
        quarantined=len(quarantined),
        sequences=shards.num_sequences,
        policies=counts,
    )


def _is_name(policy: str, findings: Findings) -> bool:
    if layout.NAME.fullmatch(policy):
        return True
    findings.add(
        Invariant.CONTIGUOUS,
        layout.RUN,
        f"names the policy {plain_names.quoted(policy)}, of which there can be no batch and no "
        "version",
    )
    return False


def _steps(run: ObjectStore, policy: str, findings: Findings) -> list[int]:
    folder = f"{layout.BATCHES}/{policy}"
    return findings.listed(folder, lambda: batches.steps(run, policy))


def _is_completed(run: ObjectStore, findings: Findings) -> bool:
    try:
        stop = runs.read_stop(run)
    except UNREADABLE as error:
        findings.add(Invariant.CONTIGUOUS, layout.STOP, str(error))
        return False
    return stop is not None and stop.state == "completed"
