"""The vocabulary size of each policy, from the `config.json` of its version 0."""

import logging
from collections.abc import Mapping, Sequence

from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.formats import json_objects, tensor_set
from storage.plain_names import without_write_id
from storage.store.object_store import ObjectStore, read_twice
from storage.weights import manifests

CONFIG = "config.json"

log = logging.getLogger(__name__)


class VocabSizes:
    """The vocabulary sizes of a run's policies; each is read once, when version 0 is there.

    Version 0 is never deleted, and all later versions have its vocabulary.
    """

    def __init__(self, run: ObjectStore, policies: Sequence[str]) -> None:
        self._run, self._policies = run, policies
        self._sizes: dict[str, int | None] = {}

    def read(self) -> Mapping[str, int | None]:
        """Return policy → size; None, or no entry, where it is unknown. Raises TransientError."""
        for policy in self._policies:
            if policy in self._sizes:
                continue
            try:
                self._sizes[policy] = read_vocab_size(self._run, policy)
            except NotFoundError:
                continue
            except CorruptError as error:
                log.warning(
                    "the vocabulary size of %s is unknown, and its sequences are not compared with "
                    "it: %s",
                    policy,
                    error,
                )
                self._sizes[policy] = None
        return self._sizes


def read_vocab_size(run: ObjectStore, policy: str) -> int | None:
    """Return the vocabulary size of a policy; None when its version 0 has no `config.json`, or that
    has no `vocab_size`.

    Raises NotFoundError while version 0 does not exist, CorruptError when it cannot be read.
    """
    manifest = manifests.read_manifest(run, policy, 0)
    info = next((file for file in manifest.files if without_write_id(file.name) == CONFIG), None)
    if info is None:
        return None
    folder = run.sub(layout.weights(policy, 0))
    body = read_twice(lambda: tensor_set.read_file(folder, info))
    config = json_objects.parse(body, f"{folder.url}/{info.name}")
    text_config = config.get("text_config")
    size = (text_config if isinstance(text_config, Mapping) else config).get("vocab_size")
    return size if isinstance(size, int) and not isinstance(size, bool) else None
