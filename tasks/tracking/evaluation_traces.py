"""The episodes that evaluations keep, as traces of the parent run in MLflow.

    evals, eval_samples ──EvaluationTraces.send──▶ one trace for each episode

The parent's tag `astraflow.traced` is the cursor: the key of the last evaluation whose traces are
all stored. Traces after it may be logged again, which replaces them.
"""

import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice

from storage.errors import UNREADABLE, NotFoundError
from storage.run import evaluation_samples, evaluations
from storage.store.object_store import ObjectStore
from tasks.episodes.token_decoder import TokenDecoders
from tasks.tracking.episode_traces import EpisodeTrace, episode_traces
from tasks.tracking.mlflow_client import PARENT, Board, MlflowError

log = logging.getLogger(__name__)

TRACED_TAG = "astraflow.traced"
SEND_S = 5.0
"""Time after which one call sends no further trace; the next call goes on."""
TRIES_MAX = 2
"""Tries of one trace, in different calls, before it is left out."""
LEFT_OUT_MAX = 3
"""Traces left out in a row, after which no further one is sent: MLflow takes none."""


class EvaluationTraces:
    """Sends the traces of one run. Used by one thread at a time.

    What MLflow refuses is logged once, and stops nothing.
    """

    def __init__(
        self, run: ObjectStore, run_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_behind = False
        """Whether the last call left traces for the next one."""
        self._run, self._run_id, self._clock = run, run_id, clock
        self._done: str | None = None
        self._key = ""
        """The evaluation whose traces are being sent."""
        self._unsent: Iterator[EpisodeTrace] | None = None
        """Its traces, each of which is made once: one may take seconds. None: none is made yet."""
        self._refused: EpisodeTrace | None = None
        """The last trace, if it is to be tried again."""
        self._place = 0
        """Traces of the evaluation that were sent or left out."""
        self._tries = 0
        self._left_out = 0
        self._logged_failure = False
        self._decoders = TokenDecoders(run)

    def send(self, board: Board) -> None:
        """Send traces for at most SEND_S; the first one at any rate.

        Raises MlflowError when the cursor cannot be read or moved, and errors of the store.
        """
        if self._left_out >= LEFT_OUT_MAX:
            return
        if self._done is None:
            self._done = board.tag(PARENT, TRACED_TAG) or ""
        self.is_behind = True
        end_s = self._clock() + SEND_S
        for key in evaluations.keys(self._run, start_after=self._done):
            if not evaluations.read_all(self._run, [key]).readable:
                continue  # a stranger's, after which others may not be listed
            if not self._send_evaluation(board, key, end_s):
                break
            board.log(PARENT, [], {TRACED_TAG: key})
            self._done = key
        else:
            self.is_behind = False

    def _send_evaluation(self, board: Board, key: str, end_s: float) -> bool:
        """Send the traces of one evaluation; False when the next call has to go on."""
        if self._key != key:
            self._key, self._place, self._unsent, self._refused = key, 0, None, None
        while (trace := self._refused or self._next()) is not None:
            self._refused = None
            try:
                board.log_trace(PARENT, trace)
            except MlflowError as error:
                return self._failed(trace, error)
            self._place, self._tries, self._left_out = self._place + 1, 0, 0
            if self._clock() >= end_s:
                return False
        return True

    def _next(self) -> EpisodeTrace | None:
        """Return the next trace of the evaluation; None after its last one."""
        if self._unsent is None:
            self._unsent = islice(self._traces(self._key), self._place, None)
        try:
            return next(self._unsent, None)
        except BaseException:
            self._unsent = None  # it has ended
            raise

    def _failed(self, trace: EpisodeTrace, error: MlflowError) -> bool:
        """Count a failure; after `TRIES_MAX` of them, the trace is left out."""
        self._tries += 1
        if not self._logged_failure:
            log.warning("MLflow does not take the trace of %s: %s", trace.identity, error)
        self._logged_failure = True
        if self._tries >= TRIES_MAX:
            self._place, self._tries, self._left_out = self._place + 1, 0, self._left_out + 1
        else:
            self._refused = trace
        if self._left_out >= LEFT_OUT_MAX:
            log.warning("no further trace of run %s is sent to MLflow", self._run_id)
            self.is_behind = False
        return False

    def _traces(self, key: str) -> Iterator[EpisodeTrace]:
        """Yield the traces of an evaluation; none if it or its sample cannot be read."""
        for evaluation in evaluations.read_all(self._run, [key]).readable:
            if not evaluation.num_kept:
                continue
            try:
                sample = evaluation_samples.read(self._run, evaluation.versions)
            except (NotFoundError, *UNREADABLE) as error:
                log.warning("an evaluation has no traces in MLflow: %s", error)
                continue
            yield from episode_traces(self._run_id, evaluation, sample, self._text)

    def _text(self, policy: str, tokens: list[int]) -> str:
        return self._decoders.of(policy).text(tokens)
