"""Audit of the objects by which services coordinate: each one that exists can be read.

    heartbeats ─ leases ─ rounds ─ reasons in quarantine ─ usage.json ─ orders/end.json

None of them decides what is trained on, and a run that goes on writes them at any time, so one that
does not exist is no violation. Only rounds are numbered without gaps: processes search for the
newest one.
"""

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import get_args

from storage import layout
from storage.coordination import heartbeats, leases, rounds
from storage.errors import UNREADABLE, NotFoundError
from storage.records.progress import ServiceKind
from storage.run import orders, quarantine, usage
from storage.store.object_store import ObjectStore
from storage.verify.missing_numbers import gaps
from storage.verify.violations import Findings, Invariant

Progress = Callable[[str, float], None]
Read = Callable[[], object]
"""Reads one object; raises what its reader raises."""

READ_THREADS = 16
_ENTRY = re.compile(r"/(\d{8,19})/[0-9a-f]{64}\.json")


def audit_coordination(
    run: ObjectStore, policies: Iterable[str], findings: Findings, progress: Progress
) -> None:
    """Read every heartbeat, lease, round and reason in quarantine of the run, its usage and the end
    of its orders.
    """
    for key, why in heartbeats.read_all(run).unreadable.items():
        if key.count("/") < 2 or key.split("/")[1] in get_args(ServiceKind):  # else no member's
            findings.add(Invariant.READABLE, key, f"cannot be read: {why}")
    unreadable = findings.listed(
        layout.QUARANTINE, lambda: list(quarantine.unreadable_reasons(run).items())
    )
    for key, why in unreadable:
        findings.add(Invariant.READABLE, key, f"cannot be read: {why}")
    reads: dict[str, Read] = {
        layout.USAGE: partial(usage.read, run),
        layout.orders_end(): partial(orders.read_end, run),
    }
    keys = findings.listed(layout.LEASES, lambda: run.list(layout.LEASES))
    for order, attempt in layout.leases(keys):
        reads[layout.lease(order, attempt)] = partial(leases.read, run, order, attempt)
    for policy in policies:
        reads |= _rounds(run, policy, findings)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for index, (key, why) in enumerate(
            zip(reads, pool.map(_fault, reads.values()), strict=True)
        ):
            progress("leases and rounds", (index + 1) / len(reads))
            if why:
                findings.add(Invariant.READABLE, key, f"cannot be read: {why}")


def _rounds(run: ObjectStore, policy: str, findings: Findings) -> dict[str, Read]:
    """Return how every round of the policy, and every entry of them, is read."""
    folder = layout.rounds(policy)
    keys = findings.listed(folder, lambda: run.list(folder))
    numbers = layout.numbers(keys, partial(layout.round_start, policy))
    last = max(numbers, default=0)
    missing = gaps(numbers, 1, last)
    for number in missing.first:
        key = layout.round_start(policy, number)
        findings.add_missing(key, f"round {number} is missing, round {last} exists")
    if missing.more:
        what = f"and {missing.more:,} more rounds are missing, round {last} exists"
        findings.add(Invariant.CONTIGUOUS, folder, what)
    reads: dict[str, Read] = {
        layout.round_start(policy, number): partial(rounds.read, run, policy, number)
        for number in numbers
    }
    entries = (key for key in keys if _ENTRY.fullmatch(key.removeprefix(folder)))
    return reads | {key: partial(rounds.read_entry_key, run, key) for key in entries}


def _fault(read: Read) -> str:
    """Return why an object cannot be read; empty for a valid one, and where there is none."""
    try:
        read()
    except NotFoundError:
        return ""
    except UNREADABLE as error:
        return str(error)
    return ""
