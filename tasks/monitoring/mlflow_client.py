"""The MLflow side of one training run: a parent run, a child for each policy, found again by their
tags.

    experiment ── parent (tag astraflow.run_id = R) ─┬─ child "solver"   (… and astraflow.policy = solver)
                                                     └─ child "verifier"

Everything here may raise MlflowError, which means "later": what is logged twice is stored once.
MLflow is imported when a `Board` is opened (2 s), never with this module. What is logged, and when,
is `tracking.py`'s business.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from storage.errors import TransientError
from storage.store.addresses import without_credentials

REQUEST_TIMEOUT_S = 5
REQUEST_TRIES_MAX = 1
"""Requests are not repeated by MLflow's client: the next sync repeats them, and nobody waits."""
METRICS_PER_CALL_MAX = 1000
PARAMS_PER_CALL_MAX = 100
PARAM_CHARACTERS_MAX = 6000
RUN_TAG, POLICY_TAG, VERSION_TAG = "astraflow.run_id", "astraflow.policy", "astraflow.version"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Lets MLflow's page open on runs and curves; otherwise it guesses an application of language
models, and shows traces.
"""
PARENT = ""
"""The name under which the parent stands among the policies' children."""

T = TypeVar("T")


class MlflowError(TransientError):
    """MLflow could not be reached, or refused; the same call may succeed later."""


@dataclass(frozen=True)
class Point:
    """One value of one metric. Example:
    `Point("trainer/kl/mean", 0.01, step=3, time_s=1700000000.0)`.
    """

    key: str
    value: float
    step: int
    time_s: float
    """Unix time. Derived from stored objects, so that a repeated point is the same point."""


class Board:
    """The MLflow runs of one training run. Not for use from two threads at once."""

    def __init__(self, uri: str, experiment: str, run_id: str, policies: Sequence[str]) -> None:
        """Attaches to the runs that carry the tags of `run_id`, creating what is missing;
        MlflowError when it cannot.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_TIMEOUT_S))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(REQUEST_TRIES_MAX))
        from mlflow.tracking import MlflowClient

        self.uri = uri
        self.experiment = experiment
        with _translated():
            self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            self.experiment_id = self._experiment_id()
            found = self._find(run_id)
            self.is_new = PARENT not in found
            parent = found.get(PARENT) or self._create(run_id, {}, run_id)
            self._ids = {PARENT: parent}
            for policy in policies:
                tags = {POLICY_TAG: policy, "mlflow.parentRunId": parent}
                self._ids[policy] = found.get(policy) or self._create(
                    f"{run_id} {policy}", tags, run_id
                )
            for mlflow_id in self._ids.values():
                self._client.update_run(mlflow_id, status="RUNNING")

    def log(self, who: str, points: Sequence[Point], tags: Mapping[str, str] | None = None) -> None:
        """Points of the policy `who` (or PARENT), then `tags`: a tag that stands says that the
        points before it do.

        One request for each `METRICS_PER_CALL_MAX` points; MLflow stores the tags of a request
        after its metrics.
        """
        from mlflow.entities import Metric, RunTag

        with _translated():
            metrics = [Metric(p.key, p.value, round(p.time_s * 1000), p.step) for p in points]
            *full, last = list(_chunks(metrics, METRICS_PER_CALL_MAX)) or [[]]
            for chunk in full:
                self._client.log_batch(self._ids[who], metrics=chunk)
            if last or tags:
                last_tags = [RunTag(key, value) for key, value in (tags or {}).items()]
                self._client.log_batch(self._ids[who], metrics=last, tags=last_tags)

    def tag(self, who: str, key: str) -> str | None:
        with _translated():
            value: str | None = self._client.get_run(self._ids[who]).data.tags.get(key)
            return value

    def log_params(self, who: str, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        with _translated():
            values = [
                Param(key, str(value)[:PARAM_CHARACTERS_MAX]) for key, value in params.items()
            ]
            for chunk in _chunks(values, PARAMS_PER_CALL_MAX):
                self._client.log_batch(self._ids[who], params=chunk)

    def log_text(self, who: str, text: str, name: str) -> None:
        with _translated():
            self._client.log_text(self._ids[who], text, name)

    def register(self, policy: str, version: int, model: Path) -> str:
        """The folder `model` as an artifact and as a version of the registered model
        `{experiment}-{policy}`; returns that version's number. Registering the same version of the
        same run again changes nothing.
        """
        from mlflow.exceptions import MlflowException

        name, mlflow_id = f"{self.experiment}-{policy}", self._ids[policy]
        with _translated():
            try:
                self._client.create_registered_model(
                    name, description=f"Weights of the policy {policy}"
                )
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            # The name is no part of the search: a quotation mark in the experiment's name would end
            # the search's own.
            for known in self._client.search_model_versions(f"run_id='{mlflow_id}'"):
                if known.name == name and known.tags.get(VERSION_TAG) == str(version):
                    return str(known.version)
            self._client.log_artifacts(mlflow_id, str(model), "model")
            source = f"{self._client.get_run(mlflow_id).info.artifact_uri}/model"
            created = self._client.create_model_version(
                name, source, mlflow_id, tags={VERSION_TAG: str(version)}
            )
            return str(created.version)

    def end(self, status: str) -> None:
        """`status` is MLflow's: FINISHED, FAILED or KILLED."""
        with _translated():
            for mlflow_id in self._ids.values():
                self._client.set_terminated(mlflow_id, status)

    @property
    def link(self) -> str | None:
        """The parent's page; None where MLflow is a file and has no pages."""
        if not self.uri.startswith("http"):
            return None
        return f"{without_credentials(self.uri).rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self._ids[PARENT]}"

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        known = self._client.get_experiment_by_name(self.experiment)
        if known is None:
            try:
                created: str = self._client.create_experiment(
                    self.experiment, artifact_location=_artifacts_of(self.uri), tags=EXPERIMENT_TAGS
                )
                return created
            except MlflowException as error:
                if (
                    error.error_code != "RESOURCE_ALREADY_EXISTS"
                ):  # else another run's tracker was first
                    raise
                return self._experiment_id()
        return str(known.experiment_id)

    def _find(self, run_id: str) -> dict[str, str]:
        """Policy (PARENT for the parent) → MLflow's id, of the runs that this training run has made
        before.
        """
        runs = self._client.search_runs([self.experiment_id], f"tags.`{RUN_TAG}` = '{run_id}'")
        return {run.data.tags.get(POLICY_TAG, PARENT): run.info.run_id for run in reversed(runs)}

    def _create(self, name: str, tags: Mapping[str, str], run_id: str) -> str:
        run = self._client.create_run(
            self.experiment_id, run_name=name, tags={RUN_TAG: run_id, **tags}
        )
        return str(run.info.run_id)


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted ones. Example: `{"a": {"b": 1}}` → `{"a.b": 1}`; lists stay
    whole.
    """
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= (
            flatten(item, f"{prefix}{key}.")
            if isinstance(item, Mapping) and item
            else {f"{prefix}{key}": item}
        )
    return flat


def _artifacts_of(uri: str) -> str | None:
    """A database file has its artifacts in a folder beside it; a server decides by itself."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).resolve().parent / "artifacts").as_uri()


@contextmanager
def _translated() -> Iterator[None]:
    """MLflow's, its HTTP client's and its database's errors as one of ours."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise MlflowError(
            f"MLflow does not take it: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


def _chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
