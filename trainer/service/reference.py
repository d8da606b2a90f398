"""Read the reference of a policy: the version from which `train.reference` keeps it near.

It is in no checkpoint: every trainer that starts or resumes reads it again, by its version.
"""

from collections.abc import Mapping

from storage.errors import ConfigError, NotFoundError
from storage.formats.adapters import merged
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore
from storage.weights import reader
from storage.weights.manifests import LoadedWeights


def read_reference(
    run: ObjectStore, policy: str, version: int, loaded: LoadedWeights | None = None
) -> Mapping[str, HostTensor]:
    """Return the tensors of a version, with its adapter merged; raises what `reader.read` raises.

    `loaded` is a version that was read, and is not read again if it is this one. ConfigError, which
    ends the run, where the version was not published, or its data was deleted.
    """
    if loaded is None or loaded.manifest.version != version:
        try:
            loaded = reader.read(run, policy, version)
        except NotFoundError as error:
            raise ConfigError(
                f"policies.{policy}.train.reference.version: version {version} of {policy} cannot "
                f"be read: {error}. A reference must exist when the trainer starts; use 0, the "
                "base model, in a new run"
            ) from error
    return merged(loaded.manifest.adapter, loaded.tensors).tensors
