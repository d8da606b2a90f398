"""Look up a registered model in MLflow: which version of which run it is.

MLflow's answer is untrusted: others may write its tags.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from storage.errors import ConfigError
from storage.plain_names import NAME, RUN_ID, quoted
from tasks.tracking import mlflow_client
from tasks.tracking.mlflow_client import DIGEST_TAG, POLICY_TAG, RUN_TAG, STORE_TAG, VERSION_TAG
from tasks.tracking.mlflow_sync import URI_VARIABLE, tracking_uri

NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's error codes for a model, a version or an alias that does not exist."""
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_DIGEST = re.compile(r"(sha256:[0-9a-f]{64})?")
_STORE_MAX = 1000


@dataclass(frozen=True, kw_only=True)
class RegisteredVersion:
    """What the tags of a registered model say of it."""

    run: str
    policy: str
    version: int
    digest: str
    """Weights digest; empty for one that an earlier release registered."""
    store: str
    """Address of the store of the run, for messages; empty as above."""


def find(uri: str, name: str, alias: str | None, number: str | None) -> RegisteredVersion:
    """Return what `uri`, the model `name` with an alias or a number, is.

    Raises:
        ConfigError: there is no such model, or AstraFlow did not register it.
        MlflowError: MLflow does not answer.
    """
    address = tracking_uri()
    if address is None:
        raise ConfigError(
            f"{uri} is looked up in MLflow, whose address is not known; set {URI_VARIABLE}, or "
            "name the run with run"
        )
    from mlflow.exceptions import MlflowException

    with mlflow_client.translated():
        client = mlflow_client.client_of(address)
        try:
            if alias is not None:
                model = client.get_model_version_by_alias(name, alias)
            else:
                model = client.get_model_version(name, str(number))
        except MlflowException as error:
            if error.error_code not in NOT_THERE:
                raise
            raise ConfigError(
                f"MLflow at {address} has no {uri} ({str(error).splitlines()[0]}); its page "
                "`Models` lists names, versions and aliases"
            ) from error
        tags: Mapping[str, str] = dict(model.tags)
        if RUN_TAG not in tags and model.run_id:  # an earlier release tagged the MLflow run only
            tags = {**client.get_run(model.run_id).data.tags, **tags}
    return _checked(uri, tags)


def _checked(uri: str, tags: Mapping[str, str]) -> RegisteredVersion:
    run, policy, version = (tags.get(key, "") for key in (RUN_TAG, POLICY_TAG, VERSION_TAG))
    digest, store = tags.get(DIGEST_TAG, ""), tags.get(STORE_TAG, "")
    for key, value, pattern in (
        (RUN_TAG, run, RUN_ID),
        (POLICY_TAG, policy, NAME),
        (VERSION_TAG, version, _NUMBER),
        (DIGEST_TAG, digest, _DIGEST),
    ):
        if not pattern.fullmatch(value):
            raise ConfigError(
                f"{uri} was not registered by AstraFlow: its tag {key} is {quoted(value)}; name "
                "another model, or the run with run"
            )
    shown = store if store.isprintable() and len(store) <= _STORE_MAX else quoted(store)
    return RegisteredVersion(
        run=run, policy=policy, version=int(version), digest=digest, store=shown
    )
