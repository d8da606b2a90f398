"""Tracking of a run in MLflow. The store holds everything, so it is the backlog, too: a `Tracker`
reads what is new since its cursor and logs it; the first sync after MLflow did not answer catches
up.

    store (manifests, batches, evaluations, heartbeats) ──sync──▶ MLflow

The parent run in MLflow has evaluations with traces of their episodes, samples of heartbeats and
data windows; its children have the policies' steps.
"""

import logging
import math
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping

from storage import layout
from storage.coordination import heartbeats
from storage.errors import AstraFlowError, NotFoundError
from storage.records.progress import RolloutProgress
from storage.records.promotions import TeamVersion
from storage.run import evaluations, runs
from storage.run.evaluations import Evaluation
from storage.store.addresses import check_no_credentials
from storage.store.object_store import ObjectStore
from storage.weights import manifests
from tasks.monitoring.status import region_rates
from tasks.monitoring.training_curves import read_steps
from tasks.recipes.run_config import RunConfig
from tasks.recipes.stored_config import flatten, read_config
from tasks.tracking.evaluation_traces import EvaluationTraces
from tasks.tracking.loadable_models import loadable_model
from tasks.tracking.mlflow_client import (
    DIGEST_TAG,
    PARENT,
    POLICY_TAG,
    RUN_TAG,
    STORE_TAG,
    VERSION_TAG,
    Board,
    Point,
    patient,
)
from tasks.tracking.system_metrics import machine_points
from tasks.tracking.window_inputs import dataset_inputs

log = logging.getLogger(__name__)

URI_VARIABLE = "MLFLOW_TRACKING_URI"
STEPS_PER_SYNC_MAX = 500
"""Steps of one policy that one sync logs; a longer backlog takes several syncs."""
STEPS_PER_CALL = 25
CATCH_UP_S = 60.0
"""Time limit for the backlog at the end of a run, before the report and the models."""
SAMPLED_POINTS_MAX = 50_000
"""Samples of heartbeats that are kept while MLflow does not answer; they are not in the store."""
STATUS = {
    "completed": "FINISHED",
    "exhausted": "FINISHED",
    "suspended": "SCHEDULED",
    "cancelled": "KILLED",
    "failed": "FAILED",
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./ -]{0,249}")
"""A metric's name that MLflow accepts."""
_NOT_IN_PART = re.compile(r"[^A-Za-z0-9_.-]")
_STEP = re.compile(r"[0-9]{1,18}")
PART_CHARACTERS_MAX = 60
ACCURACY_TAG = "astraflow.accuracy"
"""Of a registered version, followed by data set and workflow."""
CURSOR_TAG = "astraflow.next_step"
"""Of a child: every step below it has been logged."""


def tracking_uri() -> str | None:
    """Return MLflow's address, from the environment variable MLFLOW_TRACKING_URI; None when unset.

    Raises:
        ConfigError: the address holds a credential, which would be stored with the run.
    """
    uri = os.environ.get(URI_VARIABLE) or None
    if uri is not None:
        check_no_credentials(URI_VARIABLE, uri)
    return uri


class Tracker:
    """Tracks one run in MLflow, whose tags hold the cursors: after a crash a new tracker goes on
    from there. Used by one thread at a time.
    """

    def __init__(
        self,
        run: ObjectStore,
        run_id: str,
        config: RunConfig,
        uri: str,
        clock: Callable[[], float] = time.time,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Reads neither the store nor MLflow yet. `tags` are set on the parent run
        (`provenance.py`).
        """
        self.uri = uri
        self._run, self._run_id, self._config, self._clock = run, run_id, config, clock
        self._tags = dict(tags or {})
        self._board: Board | None = None
        self._next: dict[str, int] = {}
        self._evaluated = ""
        self._has_inputs = False
        self._sampled: deque[Point] = deque(maxlen=SAMPLED_POINTS_MAX)
        self._logged_failure = False
        self._traces = EvaluationTraces(run, run_id)

    @property
    def page(self) -> str | None:
        """The address of the run's page in MLflow; None before the first sync that reached it."""
        return None if self._board is None else self._board.link

    def sync(self) -> bool:
        """Log what is new; False when MLflow or the store did not answer, and a later sync has to
        catch up.
        """
        try:
            self._sample_heartbeats()
            board = self._attached()
            for policy in self._config.policies:
                self._send_steps(board, policy)
            self._send_evaluations(board)
            self._send_sampled(board)
            self._send_inputs(board)
            self._traces.send(board)  # last: it takes longest
        except AstraFlowError as error:
            if not self._logged_failure:
                log.warning("tracking is delayed, the run is not: %s", error)
            self._logged_failure = True
            return False
        self._logged_failure = False
        return True

    def finish(self, status: str) -> str | None:
        """Log the last metrics, the report and the final weights as model versions.

        Args:
            status: the run's: `completed`, `exhausted`, `suspended`, `cancelled` or `failed`.
                Models of the first two are registered.

        Returns:
            The address of MLflow's page; None when there is none or MLflow did not answer.
        """
        try:
            board = self._attached()
            with patient():
                try:
                    self._catch_up()
                    self._send_mean_rates(board)
                    self._send_report(board)
                    if self._config.tracking.register_models and STATUS.get(status) == "FINISHED":
                        self._register_all(board)
                finally:
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
            board.log(PARENT, [], self._tags)
            for policy, settings in policies.items():
                board.log_params(policy, flatten(settings))
                self._next[policy] = _step(board.tag(policy, CURSOR_TAG))
            self._board = board
        return self._board

    def _send_steps(self, board: Board, policy: str) -> None:
        """Log the metrics of every new version and of its batch; the cursor is moved after every
        STEPS_PER_CALL steps.
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
            board.log(policy, _finite(points), {CURSOR_TAG: str(first + len(steps))})
            self._next[policy] = first + len(steps)
            if len(steps) < STEPS_PER_CALL:
                return

    def _send_evaluations(self, board: Board) -> None:
        for key in evaluations.keys(self._run, start_after=self._evaluated):
            for evaluation in evaluations.read_all(self._run, [key]).readable:
                board.log(PARENT, _finite(_evaluation_points(evaluation)))
                self._evaluated = key  # not of a stranger's, after which others may not be listed

    def _sample_heartbeats(self) -> None:
        """Sample each region's tokens per second and each machine's use from fresh heartbeats."""
        seen = heartbeats.readable(self._run)
        now_s = self._clock()
        step = max((version for beat in seen for version in beat.versions.values()), default=0)
        limit_s = self._config.supervise.heartbeat_limit_s
        for region, rate in region_rates(seen, now_s, limit_s).items():
            self._sampled.append(Point(f"rollout/{region}/tokens_per_s", rate, step, now_s))
        self._sampled.extend(machine_points(seen, step, now_s, limit_s))

    def _send_mean_rates(self, board: Board) -> None:
        """Log each region's mean rate as its last value, which MLflow's tables of runs show: the
        last sample is of workers that have nothing left to do.
        """
        seen = heartbeats.readable(self._run)
        step = max((version for beat in seen for version in beat.versions.values()), default=0)
        means: defaultdict[str, float] = defaultdict(float)
        for beat in seen:
            if isinstance(beat.progress, RolloutProgress) and beat.alive_s:
                means[beat.region] += beat.progress.tokens / beat.alive_s
        points = [
            Point(f"rollout/{region}/tokens_per_s", rate, step, self._clock())
            for region, rate in means.items()
        ]
        board.log(PARENT, _finite(points))

    def _send_sampled(self, board: Board) -> None:
        waiting = list(self._sampled)
        board.log(PARENT, _finite(waiting))
        for _ in waiting:
            self._sampled.popleft()

    def _send_inputs(self, board: Board) -> None:
        """Log the run's data windows, once for each tracker."""
        if not self._has_inputs:
            board.log_inputs(PARENT, dataset_inputs(self._run))
            self._has_inputs = True

    def _catch_up(self) -> None:
        deadline_s = time.monotonic() + CATCH_UP_S
        while self.sync() and self._behind():
            if time.monotonic() > deadline_s:
                log.warning(
                    "MLflow is too slow: the end of run %s is in its store only", self._run_id
                )
                break

    def _behind(self) -> bool:
        """Whether the store holds a step or an episode that was not logged."""
        return self._traces.is_behind or any(
            manifests.exists(self._run, policy, step) for policy, step in self._next.items()
        )

    def _send_report(self, board: Board) -> None:
        try:
            report = self._run.get(layout.REPORT)
        except NotFoundError:
            return
        board.log_text(PARENT, report.decode(errors="replace"), layout.REPORT)

    def _register_all(self, board: Board) -> None:
        for policy in self._config.policies:
            try:
                self._register(board, policy)
            except (AstraFlowError, OSError) as error:
                log.warning(
                    "MLflow has no model of %s from run %s, `astraflow export` writes it: %s",
                    policy,
                    self._run_id,
                    error,
                )

    def _register(self, board: Board, policy: str) -> None:
        version = manifests.latest(self._run, policy, max(self._next[policy] - 1, 0))
        if version is None:
            return
        number = register_version(board, self._run, policy, version)
        log.info(
            "%s version %d is registered as version %s of its model in MLflow",
            policy,
            version,
            number,
        )


def register_version(board: Board, run: ObjectStore, policy: str, version: int) -> str:
    """Register a version of a run as a version of its model, and return that version's number.

    Its weights are copied, or stay in the store (`tracking.registered_weights`). Raises what
    `export_model` raises, and MlflowError.
    """
    record = runs.read_run(run)
    digest = manifests.read_manifest(run, policy, version).digest
    tags = {
        RUN_TAG: record.run_id,
        POLICY_TAG: policy,
        VERSION_TAG: str(version),
        DIGEST_TAG: digest,
        STORE_TAG: runs.store_of(run).address,
        **_accuracies(run, policy, version),
    }
    team_version = TeamVersion(run_id=record.run_id, version=version, digest=digest)
    place = read_config(run).tracking.registered_weights
    with loadable_model(run, policy, team_version, place, tags) as folder:
        return board.register(policy, folder, tags)


def _accuracies(run: ObjectStore, policy: str, version: int) -> dict[str, str]:
    """Return the accuracies of the newest evaluation of the version, as tags."""
    of_version = [
        evaluation
        for evaluation in evaluations.read_all(run).readable
        if evaluation.versions.get(policy) == version
    ]
    return {
        ".".join((ACCURACY_TAG, _part(newest.dataset), _part(score.workflow))): (
            f"{score.accuracy:.4f}"
        )
        for newest in of_version[-1:]
        for score in evaluations.scores(newest)
    }


def _evaluation_points(evaluation: Evaluation) -> list[Point]:
    """Return `eval/{data set}/{workflow}/accuracy` of first attempts and of the whole workflow."""
    step = max(evaluation.versions.values(), default=0)
    return [
        Point(
            f"eval/{_part(evaluation.dataset)}/{_part(score.workflow)}/accuracy",
            score.accuracy,
            step,
            evaluation.created_s,
        )
        for score in evaluations.scores(evaluation)
    ]


def _step(tag: str | None) -> int:
    """Return the step that a cursor names; 0 for none, and for text that others wrote there."""
    return int(tag) if tag and _STEP.fullmatch(tag) else 0


def _part(name: str) -> str:
    """Return a data set or workflow as a part of a metric's name: other characters become `_`."""
    return _NOT_IN_PART.sub("_", name)[:PART_CHARACTERS_MAX]


def _finite(points: Iterable[Point]) -> list[Point]:
    """Drop infinities, which MLflow would store as other numbers that spoil a curve's scale, and
    names for which it would refuse the whole request.
    """
    return [point for point in points if math.isfinite(point.value) and _is_name(point.key)]


def _is_name(key: str) -> bool:
    parts = key.split("/")
    return bool(_NAME.fullmatch(key)) and not any(part in ("", ".", "..") for part in parts)
