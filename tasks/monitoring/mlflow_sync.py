"""What MLflow is told of a run. The store is the truth and the backlog: a `Tracker` reads what is
new since its cursor and passes it on; while MLflow is away it passes nothing, and the next sync
that reaches it catches up.

    store (manifests, batches, evaluations, heartbeats) ──sync──▶ MLflow (parent: evaluation, throughput; children: steps)
"""

import logging
import math
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from storage import layout
from storage.coordination import heartbeats
from storage.errors import AstraFlowError, NotFoundError
from storage.run import evaluations
from storage.run.evaluations import Evaluation
from storage.store.addresses import check_no_credentials
from storage.store.object_store import ObjectStore
from storage.weights import manifests
from tasks.export import export_model
from tasks.monitoring.mlflow_client import PARENT, Board, Point, flatten
from tasks.monitoring.status import region_rates
from tasks.monitoring.training_curves import read_steps
from tasks.recipes.run_config import RunConfig

log = logging.getLogger(__name__)

URI_VARIABLE = "MLFLOW_TRACKING_URI"
STEPS_PER_SYNC_MAX = 500
"""Steps of one policy that one sync passes on; a longer backlog takes several syncs."""
STEPS_PER_CALL = 25
CATCH_UP_S = 60.0
"""How long the end of a run passes on a backlog before it goes on to the report and the models."""
THROUGHPUT_POINTS_MAX = 5000
"""Throughput is sampled, not stored; so many samples are kept while MLflow is away."""
STATUS = {"completed": "FINISHED", "cancelled": "KILLED", "failed": "FAILED"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./ -]{0,249}")
"""A metric's name, as MLflow takes it."""
CURSOR_TAG = "astraflow.next_step"
"""Of a child: every step below it has been logged."""


def tracking_uri() -> str | None:
    """Where MLflow is: the environment variable MLFLOW_TRACKING_URI; None when it is not set.
    ConfigError for an address that holds a credential, since it is stored with the run.
    """
    uri = os.environ.get(URI_VARIABLE) or None
    if uri is not None:
        check_no_credentials(URI_VARIABLE, uri)
    return uri


class Tracker:
    """Tells MLflow of one run. One thread at a time; made again after a crash, it goes on where
    MLflow's tags say.
    """

    def __init__(
        self,
        run: ObjectStore,
        run_id: str,
        config: RunConfig,
        uri: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Touches neither the store nor MLflow yet."""
        self.uri = uri
        self._run, self._run_id, self._config, self._clock = run, run_id, config, clock
        self._board: Board | None = None
        self._next: dict[str, int] = {}
        self._evaluated = ""
        self._throughput: deque[Point] = deque(maxlen=THROUGHPUT_POINTS_MAX)
        self._complained = False

    def sync(self) -> bool:
        """Pass on what is new. False when MLflow or the store could not be reached: nothing is
        lost, sync again later.
        """
        try:
            self._sample_throughput()
            board = self._attached()
            for policy in self._config.policies:
                self._send_steps(board, policy)
            self._send_evaluations(board)
            self._send_throughput(board)
        except AstraFlowError as error:
            if not self._complained:
                log.warning("tracking waits, the run does not: %s", error)
            self._complained = True
            return False
        self._complained = False
        return True

    def finish(self, status: str) -> str | None:
        """The rest: last metrics, report, final weights as model versions. `status` is the run's
        (`completed`, …). Returns the address of MLflow's page, None when there is none or when
        MLflow stayed away.
        """
        try:
            board = self._attached()
            deadline_s = time.monotonic() + CATCH_UP_S
            while self.sync() and self._behind():
                if time.monotonic() > deadline_s:
                    log.warning(
                        "MLflow is too slow: the end of run %s is in its store only", self._run_id
                    )
                    break
            self._send_report(board)
            if self._config.tracking.register_models and status == "completed":
                self._register(board)
            board.end(STATUS.get(status, "FAILED"))
            return board.link
        except AstraFlowError as error:
            log.warning(
                "MLflow did not get the end of run %s, its store has it: %s", self._run_id, error
            )
            return None

    def _attached(self) -> Board:
        if self._board is None:
            tracking = self._config.tracking
            board = Board(self.uri, tracking.experiment, self._run_id, list(self._config.policies))
            resolved = self._config.model_dump(mode="json")
            policies = resolved.pop("policies")
            if board.is_new:
                board.log_text(PARENT, self._config.model_dump_json(indent=2), "config.json")
            board.log_params(PARENT, flatten(resolved))
            for policy, settings in policies.items():
                board.log_params(policy, flatten(settings))
                self._next[policy] = int(board.tag(policy, CURSOR_TAG) or 0)
            self._board = board
        return self._board

    def _send_steps(self, board: Board, policy: str) -> None:
        """The metrics of every new version and of the batch that made it; the cursor follows each
        handful of steps.
        """
        end = self._next[policy] + STEPS_PER_SYNC_MAX
        while (first := self._next[policy]) < end:
            steps = read_steps(self._run, policy, range(first, min(first + STEPS_PER_CALL, end)))
            points = [
                Point(key, value, step.number, step.created_s)
                for step in steps
                for key, value in step.metrics.items()
            ]
            if not steps:
                return
            self._next[policy] = first + len(steps)
            board.log(policy, _finite(points), {CURSOR_TAG: str(first + len(steps))})
            if len(steps) < STEPS_PER_CALL:
                return

    def _send_evaluations(self, board: Board) -> None:
        for key in evaluations.keys(self._run, start_after=self._evaluated):
            for evaluation in evaluations.read_all(self._run, [key]).readable:
                board.log(PARENT, _finite(_evaluation_points(evaluation)))
            self._evaluated = key

    def _sample_throughput(self) -> None:
        """Tokens per second of each region, as its workers' fresh beats say."""
        seen = heartbeats.read_all(self._run)
        now_s = self._clock()
        step = max((version for beat in seen for version in beat.versions.values()), default=0)
        for region, rate in region_rates(
            seen, now_s, self._config.supervise.heartbeat_limit_s
        ).items():
            self._throughput.append(Point(f"rollout/{region}/tokens_per_s", rate, step, now_s))

    def _send_throughput(self, board: Board) -> None:
        waiting = list(self._throughput)
        board.log(PARENT, _finite(waiting))
        for _ in waiting:
            self._throughput.popleft()

    def _behind(self) -> bool:
        """Whether the store holds a step that was not passed on."""
        return any(manifests.exists(self._run, policy, step) for policy, step in self._next.items())

    def _send_report(self, board: Board) -> None:
        try:
            report = self._run.get(layout.REPORT)
        except NotFoundError:
            return
        board.log_text(PARENT, report.decode(errors="replace"), layout.REPORT)

    def _register(self, board: Board) -> None:
        for policy in self._config.policies:
            version = manifests.latest(self._run, policy, max(self._next[policy] - 1, 0))
            if version is None:
                continue
            with tempfile.TemporaryDirectory() as folder:
                export_model(self._run, policy, version, Path(folder))
                number = board.register(policy, version, Path(folder))
            log.info(
                "%s version %d is registered as version %s of its model in MLflow",
                policy,
                version,
                number,
            )


def _evaluation_points(evaluation: Evaluation) -> list[Point]:
    """`eval/{policy}/accuracy` of the policy that answers alone, `eval/team/accuracy` of all
    together.
    """
    step = max(evaluation.versions.values(), default=0)
    names = {evaluations.SOLO_WORKFLOW: "solver"}
    return [
        Point(
            f"eval/{names.get(score.workflow, 'team')}/accuracy",
            score.accuracy,
            step,
            evaluation.created_s,
        )
        for score in evaluations.scores(evaluation)
    ]


def _finite(points: Iterable[Point]) -> list[Point]:
    """MLflow keeps infinities as other numbers, which would spoil every curve's scale; and it
    refuses a whole request for one name that it does not allow.
    """
    return [point for point in points if math.isfinite(point.value) and _NAME.fullmatch(point.key)]
