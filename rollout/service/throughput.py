"""Counters of a worker's finished orders, episodes and tokens, for its heartbeats."""

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from storage.records.progress import RolloutProgress
from storage.records.rollouts import NOT_SAMPLED, Episode

WINDOW_S = 10.0
"""Rates are averages over this time, in seconds."""


class Throughput:
    """Counters since the worker started, and the rate of sampled tokens. Used from one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = clock()
        self._recent: deque[tuple[float, int]] = deque()
        self._orders_done = 0
        self._episodes = 0
        self._episodes_failed = 0
        self._tokens = 0

    def episode(self, episode: Episode) -> None:
        """An episode is over, whatever becomes of its order."""
        tokens = sum(
            int(np.count_nonzero(sequence.owners != NOT_SAMPLED)) for sequence in episode.sequences
        )
        self._episodes += 1
        self._episodes_failed += episode.error is not None
        self._tokens += tokens
        self._recent.append((self._clock(), tokens))

    def order_done(self) -> None:
        """This worker's shard is the order's."""
        self._orders_done += 1

    def progress(self) -> RolloutProgress:
        """The counters and the rate, for a heartbeat; all other fields are at their defaults."""
        return RolloutProgress(
            orders_done=self._orders_done,
            episodes=self._episodes,
            episodes_failed=self._episodes_failed,
            tokens=self._tokens,
            tokens_per_s=self.tokens_per_s(),
        )

    def tokens_per_s(self) -> float:
        """Sampled tokens of episodes that ended within the last `WINDOW_S`, or since the start
        where that is shorter.
        """
        now_s = self._clock()
        while self._recent and self._recent[0][0] < now_s - WINDOW_S:
            self._recent.popleft()
        window_s = min(WINDOW_S, now_s - self._start_s)
        return sum(tokens for _, tokens in self._recent) / window_s if window_s > 0 else 0.0
