"""Outstanding orders of which an object cannot be read, while the store answers for others.

A bad sector of a disk, or one key that a server always answers with an error, must not stop the
run. Such an order stays outstanding and is tried again; only a person can decide that it is lost.
"""

import logging
from contextlib import suppress
from dataclasses import replace

from storage import layout
from storage.errors import CorruptError, NotFoundError, TransientError
from storage.run import orders, runs, shards
from storage.store.object_store import ObjectStore

RETRY_PATIENCE_S = 1.0
"""How long an object is retried that could not be read before: other orders wait meanwhile."""
REPLACED_MAX = 16
"""Unreachable orders that are replaced by new ones. Further ones count as outstanding, so that a
fault of many objects does not write orders without end.
"""

log = logging.getLogger(__name__)


class UnreachableOrders:
    """The unreachable orders of a run, each with its last error."""

    def __init__(self, run: ObjectStore) -> None:
        self._run = run
        self._impatient_run = replace(run, patience_s=min(run.patience_s, RETRY_PATIENCE_S))
        self._errors: dict[int, str] = {}

    def __contains__(self, order: int) -> bool:
        return order in self._errors

    def add(self, order: int, error: TransientError | str) -> None:
        """Record that an object of the order cannot be read now.

        Raises TransientError when the store answers nothing at all.
        """
        runs.check_answers(self._run)
        if order not in self._errors:
            log.warning("order %d is left out until its objects can be read: %s", order, error)
        self._errors[order] = str(error)

    def discard(self, order: int) -> None:
        """Forget the order: its objects can be read, or it is closed."""
        self._errors.pop(order, None)

    def problem(self, order: int) -> str:
        """Read an order and return why no worker can lease it; empty when one can, and for an order
        with a shard.

        Raises TransientError when the order, or its shard that was unreachable, cannot be read now.
        """
        run = self._run
        if order in self:
            run = self._impatient_run
            if shards.exists(run, order):
                with suppress(CorruptError):
                    run.get(layout.shard(order))
                return ""  # it can be ingested
        try:
            orders.read(run, order)
            return ""
        except (CorruptError, NotFoundError) as error:
            problem = str(error)
        # A worker had read it before, or the whole run is missing: an unmounted folder.
        is_harmless = shards.exists(run, order) or not run.exists(layout.RUN)
        return "" if is_harmless else problem

    @property
    def replaced(self) -> frozenset[int]:
        """The orders that do not count as outstanding when new ones are written."""
        return frozenset(sorted(self._errors)[:REPLACED_MAX])

    @property
    def note(self) -> str:
        """What a person can do; empty when there is no unreachable order."""
        if not self._errors:
            return ""
        order, error = min(self._errors.items())
        others = f" and {len(self._errors) - 1} more" if len(self._errors) > 1 else ""
        return (
            f"the run goes on without order {order}{others}, since this fails while other objects "
            f"can be read: {error}; put a good copy of the object back, or delete it: a deleted "
            "order is quarantined as lost, and the order of a deleted shard is rolled out again"
        )
