"""Version 0 of a policy: the embedded tiny model, a folder, the Hugging Face hub, or a class of
one's own.

    tiny ──▶ models/{digest of the build recipe}/ in the store, built when it is first needed
    path ──▶ the folder itself                                              ──▶ weights/{policy}/00000000/ of the run
    hub  ──▶ the local snapshot of the hub's client
    custom ─▶ what the class loads

Plain functions; Prefect wraps them in `flows/`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from storage.errors import ConfigError, ConflictError, CorruptError
from storage.formats.model_config import MODEL_CONFIG, check_sizes
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor
from storage.run.base_models import has_model, load_model, save_model
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from tasks.base_models.config import ModelConfig, ModelFiles, TinyBase
from tasks.base_models.folders import Progress


@dataclass(frozen=True, eq=False)
class BaseModel:
    """A model before any training."""

    tensors: Mapping[str, HostTensor]
    """By Hugging Face's names, floating-point ones in BF16, tied ones once."""
    files: Mapping[str, bytes]
    """`config.json`, the tokenizer's files, …: with the tensors a folder that `from_pretrained`
    loads.
    """
    digest: str
    """`storage.formats.safetensors.weights_digest` of the tensors."""


def ensure_base_model(store: ObjectStore, model: ModelConfig, progress: Progress) -> BaseModel:
    """The base model of a policy. A tiny one is built at most once per store: of two builders the
    first stands.

    Raises ConfigError when a folder or a hub model cannot be read, or `config.json` is not that of
    the tensors.
    """
    tensors, files = model.files(store, progress)
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
    """Publish version 0 of every policy (name → model) that has none yet; doing it again, or twice
    at once, is harmless. `progress` hears the finished share of all of them.
    """
    lacking = {
        policy: model for policy, model in models.items() if not manifests.exists(run, policy, 0)
    }
    settings = {policy: model.model_dump_json() for policy, model in lacking.items()}
    num_models = len(set(settings.values()))
    made: dict[str, BaseModel] = {}
    for policy, model in lacking.items():
        key = settings[policy]
        if key not in made:
            made[key] = ensure_base_model(store, model, _part(len(made), num_models, progress))
        try:
            publisher.publish(run, policy, 0, made[key].tensors, extra_files=made[key].files)
        except ConflictError:
            continue  # another publisher of the same base model was first


def _part(index: int, count: int, progress: Progress) -> Progress:
    return lambda stage, share: progress(stage, (index + share) / count)


def build_digest(base: TinyBase) -> str:
    """Names what a build depends on: equal digests mean the same recipe, not yet the same bits on
    another machine.
    """
    from tasks.base_models.tiny import FORMAT

    recipe = json.dumps({"format": FORMAT, **base.model_dump()}, sort_keys=True)
    return hashlib.sha256(recipe.encode()).hexdigest()


def ensure_tiny(store: ObjectStore, base: TinyBase, progress: Progress) -> ModelFiles:
    """Load the tiny model from the store, where it is built first if it is not there."""
    digest = build_digest(base)
    if not has_model(store, digest):
        from tasks.base_models.tiny import build, model_files

        tensors, losses = build(base, progress)
        metrics = {f"loss after {phase}": loss for phase, loss in losses.items()}
        save_model(store, digest, tensors, model_files(base), metrics)
    return load_model(store, digest)
