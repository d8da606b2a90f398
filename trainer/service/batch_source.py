"""The batches of one policy, each awaited by its trainer.

    dataflow ──▶ batches/{policy}/{n} ──▶ trainer

A batch that was made and is gone is named while the trainer waits for it.
"""

import time
from collections.abc import Callable

from storage import layout
from storage.coordination.lifetime import Lifetime
from storage.errors import CorruptError, NotFoundError
from storage.records.batches import Batch
from storage.records.control import ServiceState, WaitReason
from storage.run import batches
from storage.store.object_store import ObjectStore

LOST_INTERVAL_S = 10.0
"""Time of waiting before each check whether the batch was lost, which costs one or two requests."""


class BatchSource:
    """Waits for batches, and says in the heartbeat what it waits for."""

    def __init__(
        self,
        lifetime: Lifetime,
        run: ObjectStore,
        policy: str,
        batch_size: int,
        max_tokens: int,
        poll_interval_s: float,
    ) -> None:
        """Every batch has `batch_size` rows of at most `max_tokens` tokens."""
        self._lifetime = lifetime
        self._run = run
        self._policy = policy
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self._poll_interval_s = poll_interval_s
        self.wait_s = 0.0
        """Time spent waiting for the last batch."""

    def after(self, step: int, published: int, check: Callable[[], None]) -> Batch | None:
        """Wait for the batch after `step`; None: the service must stop.

        Args:
            step: version of the trainer's weights.
            published: the newest version; up to it, each was made of a batch.
            check: called at each look for the batch, which may depend on a version whose
                publication failed; what it raises ends the waiting.

        Raises:
            CorruptError: the batch is damaged, or has other rows.
        """
        step += 1
        heartbeat = self._lifetime.heartbeat
        start_s = time.monotonic()
        check_at_s = start_s + LOST_INTERVAL_S
        batch: Batch | None = None
        lost = ""
        with heartbeat.span("wait"):
            while (
                batch := self._lifetime.retry("reading a batch", lambda: self._read(step))
            ) is None:
                if time.monotonic() >= check_at_s:
                    lost = self._lifetime.retry(
                        "looking for a batch", lambda: self._fault(step, published)
                    )
                    check_at_s = time.monotonic() + LOST_INTERVAL_S
                heartbeat.update(
                    state=ServiceState.WAITING,
                    wait_reason=WaitReason.DAMAGED_OBJECT if lost else WaitReason.BATCH,
                    note=lost or None,
                )
                check()
                if self._lifetime.wait(self._poll_interval_s):
                    break
        self.wait_s = time.monotonic() - start_s
        heartbeat.update(state=ServiceState.WORKING, note="" if lost else None)
        return batch

    def _fault(self, step: int, published: int) -> str:
        """Return the fault of a batch that was made and does not exist; empty when it was not made
        yet.
        """
        if step <= published and not batches.exists(self._run, self._policy, step):
            why = f"version {step} was made of it"
        elif batches.is_lost(self._run, self._policy, step):
            why = f"batch {step + 1} exists"
        else:
            return ""
        return f"{layout.batch(self._policy, step)} is lost, {why}: put a good copy back"

    def _read(self, step: int) -> Batch | None:
        try:
            batch = batches.read(self._run, self._policy, step)
            if len(batch.rows) != self._batch_size:
                raise CorruptError(
                    f"it has {len(batch.rows):,} rows, and every batch of {self._policy} has "
                    f"{self._batch_size:,}"
                )
            longest = max(len(row.tokens) for row in batch.rows)
            if longest > self._max_tokens:
                raise CorruptError(
                    f"it has a row of {longest:,} tokens, and rollout.engine.max_tokens is "
                    f"{self._max_tokens:,}"
                )
            return batch
        except NotFoundError:
            return None
        except CorruptError as error:
            raise CorruptError(
                f"the trainer of {self._policy} cannot go on: {layout.batch(self._policy, step)} "
                f"is damaged ({error}); restore the object, or start a new run"
            ) from error
