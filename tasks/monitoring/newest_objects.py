"""The newest version and batch of a policy, as far as a status shows them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from storage.errors import UNREADABLE, NotFoundError
from storage.run import batches
from storage.store.object_store import ObjectStore
from storage.store.remembered import remembered
from storage.weights import manifests

BATCHES_MAX = 256
"""Batches of which what is shown is kept: a batch may be large, and views ask every second."""


@dataclass(frozen=True)
class Newest:
    """The newest objects of one policy."""

    version: int | None = None
    batches: int = 0
    """Number of the newest batch; 0 before the first. What follows is of this batch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    closed_below: int = 0
    orders_done: int = 0


def find(run: ObjectStore, policy: str, hint: int, problems: list[str]) -> Newest:
    """Find the newest objects; a batch that cannot be read is added to `problems`.

    `hint`: see `version`.
    """
    newest = version(run, policy, hint)
    # Version n was made from batch n, so the search for the newest batch can begin behind the
    # newest version.
    made = batches.next_step(run, policy, start=(newest or 0) + 1) - 1
    found = Newest()
    try:
        found = _of_batch(run, policy, made) if made else found
    except (NotFoundError, *UNREADABLE) as error:
        problems.append(f"batch {made} of {policy} cannot be read: {error}")
    return replace(found, version=newest, batches=made)


def version(run: ObjectStore, policy: str, hint: int = 0) -> int | None:
    """Find the newest published version; a right `hint` makes it two requests, a wrong one does no
    harm.
    """
    latest = manifests.latest(run, policy, hint) if hint > 0 else None
    return manifests.latest(run, policy) if latest is None else latest


@remembered(BATCHES_MAX)
def _of_batch(run: ObjectStore, policy: str, step: int) -> Newest:
    batch = batches.read(run, policy, step)
    return Newest(
        metrics=batch.metrics,
        closed_below=batch.closed_below,
        orders_done=batch.closed_below + len(batch.closed),
    )
