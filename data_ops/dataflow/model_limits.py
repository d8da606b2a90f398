"""The limits of each policy's sequences: those of its model, from the `config.json` of its version
0, and the longest context of the run's rollout engines.
"""

import logging
from collections.abc import Mapping, Sequence

from data_ops.algorithms.policy_groups import ModelLimits
from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.formats import json_objects, model_config, tensor_set
from storage.plain_names import without_write_id
from storage.store.object_store import ObjectStore, read_twice
from storage.weights import manifests

log = logging.getLogger(__name__)


class RunLimits:
    """The limits of a run's policies; each is read once, when version 0 is there.

    Version 0 is never deleted, and all later versions have its limits.
    """

    def __init__(self, run: ObjectStore, policies: Sequence[str], max_tokens: int) -> None:
        """`max_tokens` is `rollout.engine.max_tokens` of the run: no engine makes more."""
        self._run, self._policies, self._max_tokens = run, policies, max_tokens
        self._limits: dict[str, ModelLimits] = {}

    def read(self) -> Mapping[str, ModelLimits]:
        """Return policy → limits; where there is no version 0, only the context is limited.

        Raises TransientError.
        """
        for policy in self._policies:
            if policy in self._limits:
                continue
            try:
                limits = read_limits(self._run, policy)
            except NotFoundError:
                continue
            except CorruptError as error:
                log.warning(
                    "the vocabulary size of %s and the length of its contexts are unknown, and its "
                    "sequences are not compared with them: %s",
                    policy,
                    error,
                )
                limits = ModelLimits()
            positions = min(self._max_tokens, limits.positions or self._max_tokens)
            self._limits[policy] = limits._replace(positions=positions)
        unknown = ModelLimits(positions=self._max_tokens)
        return {policy: self._limits.get(policy, unknown) for policy in self._policies}


def read_limits(run: ObjectStore, policy: str) -> ModelLimits:
    """Return the limits of a policy's model; none where its version 0 has no `config.json`.

    Raises NotFoundError while version 0 does not exist, CorruptError when it cannot be read.
    """
    manifest = manifests.read_manifest(run, policy, 0)
    named = {without_write_id(file.name): file for file in manifest.files}
    info = named.get(model_config.MODEL_CONFIG)
    if info is None:
        return ModelLimits()
    folder = run.sub(layout.weights(policy, 0))
    body = read_twice(lambda: tensor_set.read_file(folder, info))
    config = json_objects.parse(body, f"{folder.url}/{info.name}")
    text_config = config.get("text_config")
    size = (text_config if isinstance(text_config, dict) else config).get("vocab_size")
    positions = model_config.longest_context(config)
    return ModelLimits(size if type(size) is int else None, positions)
