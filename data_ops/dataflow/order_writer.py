"""Choose the prompts of the next order: the prompt stream, its cursor, and the curators' state.

    PromptStream ──take(cursor)──▶ Curate.accept ──▶ Order n ──advance──▶ cursor, n + 1
    finished orders ──see──▶ Curate.observe ──▶ Order.seen

All of it is a fold over the run's orders and the shards they list as seen, so a restart ends in the
same state. Orders and shards that are damaged or lost are left out of the fold, and so are cursors
that are no position of prompts. How many orders there should be is decided in `admission`.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from data_ops.algorithms.protocols import Curate, calling, decision
from data_ops.prompts.stream import PromptStream, check_cursor
from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.records.numbers import COUNT_MAX
from storage.records.rollouts import Order, Prompt, Shard
from storage.records.types import Json
from storage.run import orders, shards
from storage.store.object_store import ObjectStore

REFUSALS_MAX = 256
"""After this many refusals in a row the next prompt is rolled out without asking the curators: a
run must not starve.
"""
READ_THREADS = 8
"""Orders read at once on a restart."""

log = logging.getLogger(__name__)


class OrderWriter:
    """The orders of a run, from the newest one on."""

    def __init__(
        self,
        run: ObjectStore,
        stream: PromptStream,
        curators: Sequence[Curate],
        prompts_per_order: int,
        seed: int,
        start: Json | None = None,
    ) -> None:
        """Rebuild the state from the store; `curators` must be new objects.

        `start` is the cursor of the first order. Raises TransientError.
        """
        self._run = run
        self._stream = stream
        self._curators = curators
        self._observers = [curator for curator in curators if _observes(curator)]
        self._prompts_per_order = prompts_per_order
        self._seed = seed
        self.next_number = orders.next_number(run)
        self._cursor: Json = start or {}
        self._seen: set[int] = set()
        self._to_see: list[int] = []
        self._tokens = 0
        """Sampled tokens in the shards of all orders that are seen."""
        with ThreadPoolExecutor(READ_THREADS) as pool:
            for order in pool.map(self._read, range(self.next_number)):
                if order is not None:
                    self._refold(order)

    @property
    def needs_shards(self) -> bool:
        """Whether a curator observes shards."""
        return bool(self._observers)

    def is_seen(self, number: int) -> bool:
        """Return whether the order is in some order's `seen`, or will be in the next one's."""
        return number in self._seen

    def see(self, number: int, shard: Shard | None, num_sampled: int = 0) -> None:
        """Record a finished order and its sampled tokens, and let the curators observe its shard;
        None when that cannot be read, or `needs_shards` is False. Does nothing the second time.
        """
        if number in self._seen:
            return
        if shard is not None and self.needs_shards:
            self._observe(number, shard)
        self._seen.add(number)
        self._to_see.append(number)
        self._tokens += num_sampled

    def draft(self, samples_per_prompt: int, now_s: float) -> Order:
        """Return the next order, still to be committed. Nothing changes before `advance`.

        Raises ConfigError for an order that would be too large, before its prompts are made.
        """
        orders.check_size(self._prompts_per_order, samples_per_prompt)
        draws = [
            np.random.default_rng([self._seed, self.next_number, place])
            for place in range(len(self._curators))
        ]
        prompts: list[Prompt] = []
        cursor, refusals = self._cursor, 0
        while len(prompts) < self._prompts_per_order:
            (prompt,), cursor = self._stream.take(cursor, 1)
            if refusals >= REFUSALS_MAX or self._is_wanted(prompt, draws):
                prompts.append(prompt)
                refusals = 0
            else:
                refusals += 1
                if refusals == REFUSALS_MAX:
                    log.warning(
                        "curators refused %d prompts in a row; rolling out the next one anyway",
                        refusals,
                    )
        seed = int(np.random.SeedSequence([self._seed, self.next_number]).generate_state(1)[0])
        return Order(
            number=self.next_number,
            prompts=tuple(prompts),
            samples_per_prompt=samples_per_prompt,
            seed=seed,
            seen=tuple(self._to_see),
            cursor=cursor,
            tokens=min(self._tokens, COUNT_MAX),
            created_s=now_s,
        )

    def advance(self, order: Order) -> None:
        """Begin the next order: this one is committed."""
        if order.number != self.next_number:
            raise ValueError(f"order {order.number} is not the next one, {self.next_number}")
        self._cursor = order.cursor
        self._to_see = self._to_see[len(order.seen) :]
        self.next_number += 1

    def _is_wanted(self, prompt: Prompt, draws: Sequence[np.random.Generator]) -> bool:
        for curator, draw in zip(self._curators, draws, strict=True):
            with calling(curator, "accept"):
                if not decision(curator.accept(prompt, draw)):
                    return False
        return True

    def _read(self, number: int) -> Order | None:
        """Read an order; None when it is damaged or lost."""
        try:
            return orders.read(self._run, number)
        except (CorruptError, NotFoundError) as error:
            if isinstance(error, NotFoundError) and not self._run.exists(layout.RUN):
                raise  # the whole run is missing: an unmounted folder
            log.warning(
                "%s is damaged or lost, and the run continues without it (put a good copy of the "
                "object back before the next restart, to keep its part of the curators' state): %s",
                layout.order(number),
                error,
            )
            return None

    def _observe(self, number: int, shard: Shard) -> None:
        order = self._read(number)
        if order is None:
            return
        for curator in self._observers:
            with calling(curator, "observe"):
                curator.observe(order, shard)

    def _refold(self, order: Order) -> None:
        """Repeat the changes of state that a stored order records."""
        for number in order.seen:
            if number in self._seen:
                continue  # listed again, after a restart without the order that listed it first
            self._seen.add(number)
            if self.needs_shards:
                try:
                    shard = shards.read(self._run, number)
                except (CorruptError, NotFoundError):
                    continue  # most likely then, too: created-once bytes do not change
                self._observe(number, shard)
        self._tokens = max(self._tokens, order.tokens)
        try:
            check_cursor(order.cursor)
        except CorruptError as error:
            log.warning("%s has no cursor: %s", layout.order(order.number), error)
        else:
            self._cursor = order.cursor


def _observes(curator: Curate) -> bool:
    with calling(curator, "needs_shards"):
        return bool(curator.needs_shards)
