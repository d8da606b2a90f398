"""Publish version 0 of each policy from its base model.

tiny ────▶ models/{build digest}/ in the store, built once ┐
path ────▶ the folder                                      ├─▶ weights/{policy}/00000000/
hub ─────▶ the local snapshot of the hub's client          │
custom ──▶ tensors and files of a class by import path     ┘
run, registered ──▶ a version of another run: `publish_origin`, without a copy of its tensors
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from storage import layout
from storage.errors import UNREADABLE, ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats.model_config import MODEL_CONFIG, check_sizes
from storage.formats.safetensors import is_finite, weights_digest
from storage.plain_names import quoted
from storage.records.weights import HostTensor, Origin, StoredAdapter
from storage.run import checkpoints, runs
from storage.run.base_models import discard_model, has_model, load_model, save_model
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from tasks.base_models import origins
from tasks.base_models.config import ModelConfig, ModelFiles, TinyBase
from tasks.base_models.folders import Progress
from tasks.base_models.stored import StoredModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class BaseModel:
    """A model before any training."""

    tensors: Mapping[str, HostTensor]
    """By Hugging Face parameter name, floating-point ones in BF16, tied ones once."""
    files: Mapping[str, bytes]
    """`config.json`, the tokenizer's files, …, by name."""
    digest: str
    """`weights_digest` of the tensors."""


def ensure_base_model(store: ObjectStore, model: ModelConfig, progress: Progress) -> BaseModel:
    """Load the base model of a policy; a tiny one is built at most once per store.

    Raises ConfigError when a folder or a hub model cannot be read, a tensor has values that are not
    finite, or the sizes in `config.json` do not fit the tensors.
    """
    tensors, files = model.files(store, progress)
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ConfigError(
                f"model: the tensor {quoted(name)} has values that are not finite: NaN, infinity, "
                f"or beyond the largest number of {tensor.dtype}; no training starts from it, use "
                "another model"
            )
    if MODEL_CONFIG in files:
        shapes = (tensor.shape for tensor in tensors.values())
        try:
            check_sizes(files[MODEL_CONFIG], shapes, MODEL_CONFIG)
        except CorruptError as error:
            raise ConfigError(f"model: {error}") from error
    return BaseModel(tensors, files, weights_digest(tensors))


def publish_base_models(
    store: ObjectStore, run: ObjectStore, models: Mapping[str, ModelConfig], progress: Progress
) -> None:
    """Publish version 0 of every policy (name → model) that has none; safe to repeat and to race.

    `progress` is called with the finished share of all models.
    """
    unpublished = {
        policy: model for policy, model in models.items() if not manifests.exists(run, policy, 0)
    }
    settings = {policy: model.model_dump_json() for policy, model in unpublished.items()}
    num_models = len(set(settings.values()))
    loaded: dict[str, BaseModel] = {}
    for policy, model in unpublished.items():
        key = settings[policy]
        if key not in loaded:
            loaded[key] = ensure_base_model(store, model, _part(len(loaded), num_models, progress))
        try:
            publisher.publish(run, policy, 0, loaded[key].tensors, extra_files=loaded[key].files)
        except ConflictError:
            continue  # another publisher of the same base model was first


def publish_origin(
    run: ObjectStore,
    policy: str,
    model: ModelConfig,
    adapter: StoredAdapter | None,
    origin: Origin,
) -> None:
    """Publish version 0 of a policy, if it has none, as a version of another run; safe to repeat.

    Args:
        model: the source that was resolved to `origin`.
        adapter: the form of the adapters that the run publishes.

    Raises:
        ConfigError: the origin cannot be read.
    """
    if manifests.exists(run, policy, 0):
        return
    if isinstance(model, StoredModel) and model.with_optimizer:
        try:
            checkpoints.copy_as_first(
                runs.sibling(run, origin.run), origin.policy, origin.version, run, policy
            )
        except (CorruptError, NotFoundError) as error:
            raise ConfigError(
                f"policies.{policy}.model.with_optimizer: the checkpoint of step {origin.version} "
                f"of {origin.policy} in run {origin.run} cannot be read: {error}; start a new run "
                "from a version that has a checkpoint, or without with_optimizer"
            ) from error
    with suppress(ConflictError):  # another publisher was first
        origins.share(run, policy, origin, adapter)


def _part(index: int, count: int, progress: Progress) -> Progress:
    return lambda stage, share: progress(stage, (index + share) / count)


def build_digest(base: TinyBase) -> str:
    """Return the digest of all settings of a build; other machines may compute other bits."""
    from tasks.base_models.tiny import FORMAT

    recipe = json.dumps({"format": FORMAT, **base.model_dump()}, sort_keys=True)
    return hashlib.sha256(recipe.encode()).hexdigest()


def ensure_tiny(store: ObjectStore, base: TinyBase, progress: Progress) -> ModelFiles:
    """Load the tiny model from the store, after building it there if it is missing or damaged.

    Several runs may do this at once. Each loads the stored model after its build, and replaces it
    only while that is damaged; the last of them wins.
    """
    digest = build_digest(base)
    try:
        if has_model(store, digest):
            return load_model(store, digest)
    except (NotFoundError, *UNREADABLE) as error:  # not found: another run replaces it
        log.warning("the stored base model is damaged, and is built again: %s", error)
    from tasks.base_models.tiny import build, model_files

    tensors, losses = build(base, progress)
    files = model_files(base)
    metrics = {f"loss after {phase}": loss for phase, loss in losses.items()}
    for replaces in (False, True):
        try:
            if replaces:
                discard_model(store, digest)
            save_model(store, digest, tensors, files, metrics)
            return load_model(store, digest)
        except (NotFoundError, *UNREADABLE) as error:
            fault = error
    log.warning(
        "the base model that was just built cannot be read back, and is used from memory; "
        "if the next run reports this too, delete %s/%s: %s",
        store.url,
        layout.model_prefix(digest),
        fault,
    )
    return tensors, files
