"""One training run in MLflow: a parent run and a child for each policy, identified by tags.

    experiment ── parent (astraflow.run_id = R) ─┬─ child "solver"   (astraflow.policy = solver)
                                                 └─ child "verifier"

Every call may raise MlflowError and can then be repeated: what is logged twice is stored once.
MLflow is imported when a `Board` is opened (2 s), never with this module. `mlflow_sync.py` decides
what is logged, and when.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from storage.errors import TransientError
from storage.store.addresses import without_credentials
from tasks.tracking import mlflow_traces
from tasks.tracking.episode_traces import EpisodeTrace

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5
PATIENT_TIMEOUT_S = 60
"""For the end of a run, which no later sync repeats: a server on a loaded machine is slow."""
REQUEST_TRIES_MAX = 1
"""MLflow's client does not repeat requests: the next sync does, without delaying the run."""
METRICS_PER_CALL_MAX = 1000
PARAMS_PER_CALL_MAX = 100
PARAMS_MAX = 2000
"""Parameters of one MLflow run, which reads all that are stored for each request. A recipe has some
hundred, a run.json of a megabyte may have a hundred thousand.
"""
PARAM_CHARACTERS_MAX = 6000
_NOT_IN_PARAM = re.compile(r"[^\w. :-]")
"""Characters that MLflow may refuse in the name of a parameter, with all parameters of the call."""
RUN_TAG, POLICY_TAG, VERSION_TAG = "astraflow.run_id", "astraflow.policy", "astraflow.version"
DIGEST_TAG, STORE_TAG = "astraflow.weights_digest", "astraflow.store"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Makes MLflow's page open with runs and curves; its default for such an experiment is traces."""
PARENT = ""
"""Name of the parent run where a policy names a child."""

_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"

T = TypeVar("T")


class MlflowError(TransientError):
    """MLflow did not answer, or refused the request; the same call may succeed later."""


@dataclass(frozen=True)
class Point:
    """One value of one metric. Example: `Point("trainer/kl/mean", 0.01, 3, 1700000000.0)`."""

    key: str
    value: float
    step: int
    time_s: float
    """Unix time. Derived from stored objects, so that a repeated point is the same point."""


@dataclass(frozen=True, kw_only=True)
class DatasetInput:
    """A data set that a run used."""

    name: str
    digest: str
    """At most 36 characters."""
    source_type: str
    source: str
    """JSON, at most 65,535 characters."""
    profile: str
    """JSON."""
    tags: Mapping[str, str]
    """Of this use of the data set."""


def client_of(uri: str) -> Any:
    """Return an MLflow client, which repeats no request; call it within `translated`."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault(_TIMEOUT, str(REQUEST_TIMEOUT_S))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(REQUEST_TRIES_MAX))
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


class Board:
    """The MLflow runs of one training run. Not for use from two threads at once."""

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_id: str,
        policies: Sequence[str],
        *,
        is_live: bool = True,
    ) -> None:
        """Find the MLflow runs with the tags of `run_id`, and create those that are missing.

        Args:
            is_live: mark them as running; False leaves the states and times of those that exist.

        Raises:
            MlflowError: MLflow did not answer, or the experiment is deleted there.
        """
        self.uri = uri
        self.experiment = experiment
        with translated():
            self._client = client_of(uri)
            self.experiment_id = self._experiment_id()
            existing = self._find(run_id)
            self.is_new = PARENT not in existing
            parent = existing.get(PARENT) or self._create(run_id, {}, run_id)
            self._ids = {PARENT: parent}
            for policy in policies:
                tags = {POLICY_TAG: policy, "mlflow.parentRunId": parent}
                self._ids[policy] = existing.get(policy) or self._create(
                    f"{run_id} {policy}", tags, run_id
                )
            for who, mlflow_id in self._ids.items():
                if is_live:
                    self._client.update_run(mlflow_id, status="RUNNING")
                elif who not in existing:
                    self._client.set_terminated(mlflow_id)

    def log(self, who: str, points: Sequence[Point], tags: Mapping[str, str] | None = None) -> None:
        """Log points of the policy `who` (or PARENT), then `tags`: where a tag is stored, so are
        the points before it.

        One request for each `METRICS_PER_CALL_MAX` points; MLflow stores the tags of a request
        after its metrics.
        """
        from mlflow.entities import Metric, RunTag

        with translated():
            metrics = [Metric(p.key, p.value, round(p.time_s * 1000), p.step) for p in points]
            *full, last = list(_chunks(metrics, METRICS_PER_CALL_MAX)) or [[]]
            for chunk in full:
                self._client.log_batch(self._ids[who], metrics=chunk)
            if last or tags:
                last_tags = [RunTag(key, value) for key, value in (tags or {}).items()]
                self._client.log_batch(self._ids[who], metrics=last, tags=last_tags)

    def tag(self, who: str, key: str) -> str | None:
        with translated():
            value: str | None = self._client.get_run(self._ids[who]).data.tags.get(key)
            return value

    def log_params(self, who: str, params: Mapping[str, Any]) -> None:
        """Log the first PARAMS_MAX parameters. In their names other characters become `_`."""
        from mlflow.entities import Param

        if len(params) > PARAMS_MAX:
            log.warning("MLflow gets the first %d of %d settings", PARAMS_MAX, len(params))
        named = {
            _NOT_IN_PARAM.sub("_", key): str(value)[:PARAM_CHARACTERS_MAX]
            for key, value in islice(params.items(), PARAMS_MAX)
        }
        with translated():
            values = [Param(key, value) for key, value in named.items()]
            for chunk in _chunks(values, PARAMS_PER_CALL_MAX):
                self._client.log_batch(self._ids[who], params=chunk)

    def log_text(self, who: str, text: str, name: str) -> None:
        with translated():
            self._client.log_text(self._ids[who], text, name)

    def log_inputs(self, who: str, inputs: Sequence[DatasetInput]) -> None:
        """Log data sets; of two with one name and digest, MLflow keeps the first."""
        from mlflow import entities

        with translated():
            logged = [
                entities.DatasetInput(
                    entities.Dataset(
                        each.name, each.digest, each.source_type, each.source, profile=each.profile
                    ),
                    [entities.InputTag(key, value) for key, value in each.tags.items()],
                )
                for each in inputs
            ]
            if logged:
                self._client.log_inputs(self._ids[who], logged)

    def log_trace(self, who: str, trace: EpisodeTrace) -> None:
        """Store a trace of one of the runs; one that is stored already is replaced.

        Raises MlflowError also where the server or MLflow's release has no traces.
        """
        with translated():
            try:
                mlflow_traces.log_trace(self.uri, self.experiment_id, self._ids[who], trace)
            except (NotImplementedError, ImportError, ValueError) as error:
                raise MlflowError(f"MLflow does not take traces: {error}") from error

    def register(self, policy: str, model: Path, tags: Mapping[str, str]) -> str:
        """Log the folder `model` as an artifact and register it as a version of `model_name`.

        Returns that version's number. `tags` name the version (`VERSION_TAG`) and where it is from.
        A repeated call only adds those that an earlier release did not write.
        """
        from mlflow.exceptions import MlflowException

        name, mlflow_id = model_name(self.experiment, policy), self._ids[policy]
        with translated():
            try:
                self._client.create_registered_model(
                    name, description=f"Weights of the policy {policy}"
                )
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            # The search leaves out the name, whose quotation marks would end the search's string.
            for registered in self._client.search_model_versions(f"run_id='{mlflow_id}'"):
                same = all(
                    registered.tags.get(key, tags[key]) == tags[key]
                    for key in (VERSION_TAG, DIGEST_TAG)
                    if key in tags
                )
                if registered.name == name and same:
                    for key in tags.keys() - registered.tags.keys():
                        self._client.set_model_version_tag(name, registered.version, key, tags[key])
                    return str(registered.version)
            self._client.log_artifacts(mlflow_id, str(model), "model")
            source = f"{self._client.get_run(mlflow_id).info.artifact_uri}/model"
            created = self._client.create_model_version(name, source, mlflow_id, tags=dict(tags))
            return str(created.version)

    def end(self, status: str) -> None:
        """Set the state of the MLflow runs: FINISHED, SCHEDULED, FAILED or KILLED."""
        with translated():
            for mlflow_id in self._ids.values():
                self._client.set_terminated(mlflow_id, status)

    @property
    def link(self) -> str | None:
        """The parent's page of curves; None where MLflow is a file and has no pages."""
        if not self.uri.startswith("http"):
            return None
        page = f"#/experiments/{self.experiment_id}/runs/{self._ids[PARENT]}/model-metrics"
        return f"{without_credentials(self.uri).rstrip('/')}/{page}"

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        existing = self._client.get_experiment_by_name(self.experiment)
        if existing is None:
            try:
                created: str = self._client.create_experiment(
                    self.experiment, artifact_location=_artifacts_of(self.uri), tags=EXPERIMENT_TAGS
                )
                return created
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                # Another run's tracker was first.
                return self._experiment_id()
        if existing.lifecycle_stage == "deleted":
            raise MlflowError(
                f"the experiment {self.experiment!r} is deleted in MLflow; restore it (`mlflow "
                f"experiments restore --experiment-id {existing.experiment_id}`), or set "
                "tracking.experiment to another name"
            )
        return str(existing.experiment_id)

    def _find(self, run_id: str) -> dict[str, str]:
        """Find this training run's MLflow runs: policy (PARENT for the parent) → MLflow's id."""
        runs = self._client.search_runs([self.experiment_id], f"tags.`{RUN_TAG}` = '{run_id}'")
        return {run.data.tags.get(POLICY_TAG, PARENT): run.info.run_id for run in reversed(runs)}

    def _create(self, name: str, tags: Mapping[str, str], run_id: str) -> str:
        run = self._client.create_run(
            self.experiment_id, run_name=name, tags={RUN_TAG: run_id, **tags}
        )
        return str(run.info.run_id)


def model_name(experiment: str, policy: str) -> str:
    """Return the name of a policy's registered model: `{experiment}-{policy}`, with `-` for `/` and
    `:`, which MLflow allows in the names of experiments only.
    """
    return re.sub("[/:]", "-", f"{experiment}-{policy}")


def _artifacts_of(uri: str) -> str | None:
    """Return the artifact folder, which is beside a database file; None lets a server choose."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).resolve().parent / "artifacts").as_uri()


@contextmanager
def translated() -> Iterator[None]:
    """Turn errors of MLflow, its HTTP client and its database into MlflowError."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise MlflowError(
            f"MLflow does not take it: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


@contextmanager
def patient() -> Iterator[None]:
    """Wait longer for the answer to each request in the block, unless the user set the time."""
    usual = os.environ.get(_TIMEOUT, str(REQUEST_TIMEOUT_S))
    if usual == str(REQUEST_TIMEOUT_S):
        os.environ[_TIMEOUT] = str(PATIENT_TIMEOUT_S)
    try:
        yield
    finally:
        os.environ[_TIMEOUT] = usual


def _chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
