"""Export of a version as a folder that `AutoModelForCausalLM.from_pretrained` loads."""

from pathlib import Path

from storage.errors import ConfigError, NotFoundError
from storage.formats import adapters, model_config
from storage.formats.safetensors import to_safetensors
from storage.store.object_store import ObjectStore
from storage.weights import manifests, reader
from tasks.maintenance import export_folder
from tasks.maintenance.export_folder import METADATA, WEIGHTS_FILE


def export_model(run: ObjectStore, policy: str, version: int | None, folder: Path) -> int:
    """Write the weights of `version` and the base model's other files into `folder`.

    An adapter is merged. The configuration is written without names of code and without that of an
    adapter (`model_config.data_files`).

    Args:
        version: None exports the newest version.

    Returns the number of the exported version.

    Raises:
        ConfigError: the version does not exist, or the folder cannot be written or contains a file
            that is not one of an earlier export.
        CorruptError: a digest differs, or the manifest lists a file whose name is not plain.
    """
    newest = manifests.latest(run, policy)
    if newest is None:
        raise ConfigError(
            f"{policy} has no published weights in {run.url}; name a policy of the run, or wait "
            "for version 0"
        )
    exported = newest if version is None else version
    try:
        weights = reader.read(run, policy, exported)
        files = model_config.data_files(reader.fetch_files(run, policy, 0))
    except NotFoundError as error:
        why = (
            f"has no version {exported}"
            if not 0 <= exported <= newest
            else f"cannot export version {exported}: {error}"
        )
        raise ConfigError(f"{policy} {why}; its newest is {newest}") from None
    tensors = adapters.merged(weights.manifest.adapter, weights.tensors).tensors
    try:
        export_folder.refuse_foreign(folder, {*files, WEIGHTS_FILE})
        export_folder.write(folder, {**files, WEIGHTS_FILE: to_safetensors(tensors, METADATA)})
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror or error}; choose another folder"
        ) from error
    return exported
