"""A model that a run registered in MLflow is found again as a version of that run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from storage.errors import ConfigError
from storage.run import runs
from storage.store.object_store import open_store
from storage.weights import manifests, publisher
from tasks.base_models.stored import RegisteredModel, resolve
from tasks.tracking import registered_models
from tasks.tracking.mlflow_client import MlflowError
from tasks.tracking.mlflow_sync import Tracker
from tests.support.runs.builders import tensors
from tests.support.runs.small_run import RUN_ID, SmallRun

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own imports and database layer warn

NAME = "astraflow-solver"


@pytest.fixture(scope="module")
def mlflow_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with the tables of MLflow, which take seconds to create."""
    from mlflow.tracking import MlflowClient

    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments()
    return file.read_bytes()


@pytest.fixture
def client(tmp_path: Path, mlflow_file: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    from mlflow.tracking import MlflowClient

    (tmp_path / "mlflow.db").write_bytes(mlflow_file)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def registered(name: str, client: Any) -> SmallRun:
    """A completed run whose version 2 of both policies MLflow has registered."""
    small = SmallRun(f"{name}-{uuid4().hex}")
    for policy in ("solver", "verifier"):
        small.version(policy, 0, {"config.json": b"{}"})
        for step in (1, 2):
            small.batch(policy, step)
            publisher.publish(small.run, policy, step, tensors(step))
    Tracker(small.run, RUN_ID, small.config, client.tracking_uri).finish("completed")
    return small


def put_model(client: Any, tags: Mapping[str, str]) -> None:
    client.create_registered_model("foreign")
    client.create_model_version("foreign", "file:///nowhere", tags=dict(tags))


def origin_of(small: SmallRun, uri: str) -> tuple[str, str, int, str]:
    found = resolve(small.store, {"x": RegisteredModel(registered=uri)})["x"]
    return found.run, found.policy, found.version, found.digest


def test_an_alias_and_a_number_lead_to_the_version_of_the_run(client: Any):
    small = registered("registered-found", client)
    client.set_registered_model_alias(NAME, "champion", "1")
    digest = manifests.read_manifest(small.run, "solver", 2).digest
    for uri in (f"models:/{NAME}@champion", f"models:/{NAME}/1"):
        assert origin_of(small, uri) == (RUN_ID, "solver", 2, digest)
    (version,) = client.search_model_versions(f"name='{NAME}'")
    assert version.tags == {
        "astraflow.run_id": RUN_ID,
        "astraflow.policy": "solver",
        "astraflow.version": "2",
        "astraflow.weights_digest": digest,
        "astraflow.store": small.store.address,
    }


def test_a_version_that_an_earlier_release_registered_is_found_and_gets_its_tags(client: Any):
    """Its run and policy are tags of the MLflow run alone."""
    small = registered("registered-earlier", client)
    (version,) = client.search_model_versions(f"name='{NAME}'")
    for key in version.tags.keys() - {"astraflow.version"}:
        client.delete_model_version_tag(NAME, "1", key)
    found = registered_models.find("models:/x", NAME, None, "1")
    assert (found.run, found.policy, found.version) == (RUN_ID, "solver", 2)
    assert (found.digest, found.store) == ("", "")
    assert origin_of(small, f"models:/{NAME}/1")[:3] == (RUN_ID, "solver", 2)
    Tracker(small.run, RUN_ID, small.config, client.tracking_uri).finish("completed")
    (again,) = client.search_model_versions(f"name='{NAME}'")
    assert again.tags == version.tags


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (
            "models:/astraflow-judge/1",
            r"policies\.x\.model: MLflow at sqlite:.* has no models:/astr",
        ),
        ("models:/astraflow-judge@champion", "has no models:/astraflow-judge@champion"),
        (f"models:/{NAME}@champion", rf"has no models:/{NAME}@champion \(.*champion not found"),
        (f"models:/{NAME}/2", f"has no models:/{NAME}/2"),
    ],
)
def test_a_model_that_mlflow_does_not_have_is_refused(client: Any, uri: str, message: str):
    small = registered("registered-absent", client)
    with pytest.raises(ConfigError, match=message):
        origin_of(small, uri)


def test_without_an_address_of_mlflow_the_variable_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="whose address is not known; set MLFLOW_TRACKING_URI"):
        registered_models.find("models:/x/1", "x", None, "1")


def test_an_mlflow_that_does_not_answer_is_a_transient_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(MlflowError):
        registered_models.find("models:/x/1", "x", None, "1")


GOOD = {"astraflow.run_id": RUN_ID, "astraflow.policy": "solver", "astraflow.version": "2"}


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({}, r"not registered by AstraFlow: its tag astraflow\.run_id is ''"),
        ({**GOOD, "astraflow.run_id": "../x"}, r"run_id is '\.\./x'"),
        ({**GOOD, "astraflow.policy": "a/b"}, r"policy is 'a/b'"),
        ({**GOOD, "astraflow.version": "-2"}, r"version is '-2'"),
        ({**GOOD, "astraflow.version": "²"}, r"version is '²'"),
        ({**GOOD, "astraflow.version": "9" * 19}, r"version is '9999"),
        ({**GOOD, "astraflow.weights_digest": "sha256:"}, r"weights_digest is 'sha256:'"),
        ({**GOOD, "astraflow.version": "7"}, r"models:/foreign/1 cannot be used: there is no version 7"),
        (
            {**GOOD, "astraflow.run_id": "other", "astraflow.store": "s3://far/away"},
            r"there is no run 'other' in .*; it was registered from the store s3://far/away$",
        ),
        (
            {**GOOD, "astraflow.weights_digest": f"sha256:{'0' * 64}", "astraflow.store": "s3://f"},
            r"is another model than solver@2 of run tiny-1 in memory:.*from the store s3://f; use",
        ),
        (
            {**GOOD, "astraflow.run_id": "other", "astraflow.store": "s3://\x1b[2J"},
            r"from the store 's3://\\x1b\[2J'$",
        ),
    ],
)  # fmt: skip
def test_tags_are_not_trusted(client: Any, tags: dict[str, str], message: str):
    small = registered("registered-hostile", client)
    put_model(client, tags)
    with pytest.raises(ConfigError, match=message):
        origin_of(small, "models:/foreign/1")


def test_a_copy_of_the_run_in_another_store_is_the_same_model(client: Any):
    """The digest says that it is; the address of the store may have changed."""
    small = registered("registered-copied", client)
    digest = manifests.read_manifest(small.run, "solver", 2).digest
    other = open_store("memory://registered-copy")
    for key in small.store.list():
        other.put(key, small.store.get(key))
    model = RegisteredModel(registered=f"models:/{NAME}/1")
    assert resolve(other, {"x": model})["x"].digest == digest
    assert runs.open_run(other, RUN_ID).exists("run.json")
