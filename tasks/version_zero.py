"""Publishes every policy's base model as its version 0, from which everything else in a run begins."""

from collections.abc import Callable, Mapping

from storage import weights
from storage.errors import ConflictError
from storage.objects import ObjectStore
from tasks.base_models import ensure_base_model
from tasks.config import ModelConfig


def publish_version_zero(
    store: ObjectStore, run: ObjectStore, models: Mapping[str, ModelConfig], progress: Callable[[str, float], None]
) -> None:
    """Build, or fetch, each distinct model once; publish it for every policy that starts from it and has no version 0 yet.

    Raises:
        ConfigError: a model cannot be built or fetched; names the policy's source and the fix.
    """
    wanted = {policy: model for policy, model in models.items() if not weights.exists(run, policy, 0)}
    made = {model: ensure_base_model(store, model, progress) for model in dict.fromkeys(wanted.values())}
    for policy, model in wanted.items():
        try:
            weights.publish(run, policy, 0, made[model].tensors, extra_files=made[model].files)
        except ConflictError:
            continue  # another attempt of this service was faster, with the same model
