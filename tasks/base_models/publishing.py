"""Where version 0 of a policy comes from: the embedded tiny model, a folder, or the Hugging Face hub.

    tiny ──▶ models/{digest of the build recipe}/ in the store, built when it is first needed
    path ──▶ the folder itself                                              ──▶ weights/{policy}/00000000/ of the run
    hub  ──▶ the local snapshot of the hub's client

Plain functions; Prefect wraps them in `flows/`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from storage.errors import ConflictError
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor
from storage.run.base_models import has_model, load_model, save_model
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from tasks.base_models.config import ModelConfig, TinyBase
from tasks.base_models.folders import read_model_folder, snapshot

Progress: TypeAlias = Callable[[str, float], None]
"""Hears what is being done, in words, and the finished share of it."""


@dataclass(frozen=True, eq=False)
class BaseModel:
    """A model before any training."""

    tensors: Mapping[str, HostTensor]
    """By Hugging Face's names, floating-point ones in BF16, tied ones once."""
    files: Mapping[str, bytes]
    """`config.json`, the tokenizer's files, …: with the tensors a folder that `from_pretrained` loads."""
    digest: str
    """`storage.formats.safetensors.weights_digest` of the tensors."""


def ensure_base_model(store: ObjectStore, model: ModelConfig, progress: Progress) -> BaseModel:
    """The base model of a policy. A tiny one is built at most once per store: of two builders the first stands.

    Raises ConfigError when a folder or a hub model cannot be read.
    """
    if model.tiny is not None:
        tensors, files = _ensure_tiny(store, model.tiny, progress)
    elif model.path is not None:
        tensors, files = read_model_folder(Path(model.path), progress)
    else:
        assert model.hub is not None, "ModelConfig names exactly one source"
        tensors, files = read_model_folder(snapshot(model.hub, progress), progress)
    return BaseModel(tensors, files, weights_digest(tensors))


def publish_base_models(store: ObjectStore, run: ObjectStore, models: Mapping[str, ModelConfig], progress: Progress) -> None:
    """Publish version 0 of every policy (name → model) that has none yet; doing it again, or twice at once, is harmless.
    `progress` hears the finished share of all of them."""
    lacking = {policy: model for policy, model in models.items() if not manifests.exists(run, policy, 0)}
    num_models = len(set(lacking.values()))
    made: dict[ModelConfig, BaseModel] = {}
    for policy, model in lacking.items():
        if model not in made:
            made[model] = ensure_base_model(store, model, _part(len(made), num_models, progress))
        try:
            publisher.publish(run, policy, 0, made[model].tensors, extra_files=made[model].files)
        except ConflictError:
            continue  # another publisher of the same base model was first


def _part(index: int, count: int, progress: Progress) -> Progress:
    return lambda stage, share: progress(stage, (index + share) / count)


def build_digest(base: TinyBase) -> str:
    """Names what a build depends on: equal digests mean the same recipe, not yet the same bits on another machine."""
    from tasks.base_models.tiny import FORMAT

    recipe = json.dumps({"format": FORMAT, **base.model_dump()}, sort_keys=True)
    return hashlib.sha256(recipe.encode()).hexdigest()


def _ensure_tiny(
    store: ObjectStore, base: TinyBase, progress: Progress
) -> tuple[Mapping[str, HostTensor], Mapping[str, bytes]]:
    digest = build_digest(base)
    if not has_model(store, digest):
        from tasks.base_models.tiny import build, model_files

        tensors, losses = build(base, progress)
        metrics = {f"loss after {phase}": loss for phase, loss in losses.items()}
        save_model(store, digest, tensors, model_files(base), metrics)
    return load_model(store, digest)
