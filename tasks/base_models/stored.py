"""Base models that are versions of other runs of the store: named by the run, or by the model that
a run has registered in MLflow.

    {run: tiny-1, version: best} ──────────────┐
    {registered: "models:/NAME@champion"} ─────┴─▶ Origin: run, policy, version, digest

Which version that is is decided once, when the new run is created, and stored in its `run.json`.
Importing this module does not import torch.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from storage import layout
from storage.config_model import Frozen
from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.formats import adapters
from storage.formats.json_objects import parse
from storage.formats.model_config import MODEL_CONFIG
from storage.plain_names import NAME, RUN_ID, quoted
from storage.records.types import Json
from storage.records.weights import HostTensor, Origin
from storage.run import checkpoints
from storage.store import object_store
from storage.store.object_store import ObjectStore
from storage.weights import reader
from tasks.base_models import origins
from tasks.base_models.folders import Progress

_REGISTERED = re.compile(r"models:/([^/:]{1,256})(?:@([A-Za-z0-9_-]{1,255})|/(\d{1,18}))")


def _run_id(name: str) -> str:
    if not RUN_ID.fullmatch(name):
        raise ValueError(
            f"{quoted(name)} is no run id of up to 100 letters, digits, '.', '_' and '-'; "
            "`astraflow runs` lists the runs of the store"
        )
    return name


def _version_word(word: Any) -> Any:
    """Return a number as text; YAML reads `version: 40` as a number."""
    return str(word) if isinstance(word, int) and not isinstance(word, bool) else word


def _known_word(word: str) -> str:
    if not NAME.fullmatch(word) or (word.isdecimal() and len(word) > 18):
        raise ValueError(f"{quoted(word)} is no version; write its number, a tag, or latest")
    return word


def _policy(name: str | None) -> str | None:
    if name is not None and not NAME.fullmatch(name):
        raise ValueError(f"{quoted(name)} is no name of a policy")
    return name


def _model_uri(uri: str) -> str:
    if not _REGISTERED.fullmatch(uri):
        raise ValueError(
            f"{quoted(uri)} names no registered model; write models:/NAME@ALIAS or "
            "models:/NAME/VERSION, as MLflow's page of the model has it"
        )
    return uri


class StoredModel(Frozen, ABC):
    """What both sources have in common."""

    with_optimizer: bool = False
    """Also begin with the moments and the random states of the checkpoint of exactly that version.
    """

    def origin(self, store: ObjectStore) -> Origin:
        """Return the version that this is now; ConfigError where it cannot be used."""
        origin = self._origin(store)
        if self.with_optimizer:
            run = store.sub(layout.run_prefix(origin.run))
            steps = checkpoints.steps(run, origin.policy)
            if origin.version not in steps:
                raise ConfigError(
                    f"with_optimizer: run {origin.run} has no checkpoint of {origin.policy} at "
                    f"step {origin.version}; it has {', '.join(map(str, steps)) or 'none'}: name "
                    "one of these versions, or leave with_optimizer out"
                )
        return origin

    @abstractmethod
    def _origin(self, store: ObjectStore) -> Origin:
        """Return the version, whatever its checkpoint is."""

    def files(
        self, store: ObjectStore, progress: Progress
    ) -> tuple[Mapping[str, HostTensor], Mapping[str, bytes]]:
        """Read the version, with its adapter merged."""
        origin = self.origin(store)
        run = store.sub(layout.run_prefix(origin.run))
        progress(f"reading {origin.policy}@{origin.version} of {origin.run}", 0.0)
        try:
            weights = reader.read(run, origin.policy, origin.version)
            files = reader.fetch_files(run, origin.policy)
        except (CorruptError, NotFoundError) as error:
            raise ConfigError(f"model: {error}") from error
        return adapters.merged(weights.manifest.adapter, weights.tensors).tensors, files

    def config_json(self) -> Json:
        """Read the `config.json` of the run; ConfigError when that is impossible."""
        store = object_store.default_store()
        origin = self.origin(store)
        run = store.sub(layout.run_prefix(origin.run))
        try:
            return parse(reader.fetch_files(run, origin.policy)[MODEL_CONFIG], MODEL_CONFIG)
        except (CorruptError, NotFoundError, KeyError) as error:
            raise ConfigError(
                f"the {MODEL_CONFIG} of run {origin.run} cannot be read: {error}"
            ) from error


class RunModel(StoredModel):
    """`model: {run: tiny-1, version: best}`."""

    run: Annotated[str, AfterValidator(_run_id)]
    """A run of the same store."""
    version: Annotated[str, BeforeValidator(_version_word), AfterValidator(_known_word)] = (
        origins.LATEST
    )
    """Number or tag of its version; `latest`: the newest one when the new run is created."""
    policy: Annotated[str | None, AfterValidator(_policy)] = None
    """Policy of that run; where it is not set, the one of the same name."""

    def _origin(self, store: ObjectStore) -> Origin:
        if self.policy is None:
            raise ValueError("RunConfig sets the policy")
        return origins.find(store, self.run, self.policy, self.version)


class RegisteredModel(StoredModel):
    """`model: {registered: "models:/astraflow-solver@champion"}`."""

    registered: Annotated[str, AfterValidator(_model_uri)]
    """A model that a run of the same store has registered in MLflow, with an alias or a number."""

    def _origin(self, store: ObjectStore) -> Origin:
        from tasks.tracking import registered_models

        match = _REGISTERED.fullmatch(self.registered)
        assert match is not None, "the recipe was validated"
        name, alias, number = match.groups()
        found = registered_models.find(self.registered, name, alias, number)
        try:
            origin = origins.find(store, found.run, found.policy, str(found.version))
        except ConfigError as error:
            elsewhere = found.store and found.store != store.address
            where = f"; it was registered from the store {found.store}" if elsewhere else ""
            raise ConfigError(f"{self.registered} cannot be used: {error}{where}") from error
        if found.digest not in ("", origin.digest):
            raise ConfigError(
                f"{self.registered} is another model than {found.policy}@{found.version} of run "
                f"{found.run} in {store.address}: it has the digest {found.digest} and was "
                f"registered from the store {found.store or 'of an earlier release'}; use that "
                "store, or name the run of this one with run"
            )
        return origin


def resolve(store: ObjectStore, models: Mapping[str, object]) -> dict[str, Origin]:
    """Return policy → the version that it begins with, of those models that are stored versions.

    ConfigError names the policy.
    """
    resolved: dict[str, Origin] = {}
    for policy, model in models.items():
        if isinstance(model, StoredModel):
            try:
                resolved[policy] = model.origin(store)
            except ConfigError as error:
                raise ConfigError(f"policies.{policy}.model: {error}") from error
    return resolved
