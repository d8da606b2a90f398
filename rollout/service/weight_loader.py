"""Gives the versions of one policy to its engine, with their adapters merged.

    version n: W, A, B ──merge, in a thread──▶ W + scale · B A ──▶ engine.load
                       ──▶ engine.load_adapter, where the engine applies adapters itself

An engine has no access to manifests. Versions without an adapter are given as they are. One with a
number that is not finite is given to no engine, which could sample nothing with it.
"""

from collections.abc import Mapping

from rollout.engines.engine import AdapterEngine, Engine
from storage.coordination.system_threads import in_system_thread
from storage.errors import CorruptError
from storage.formats import adapters
from storage.formats.adapters import Merged
from storage.formats.safetensors import is_finite
from storage.records.weights import HostTensor
from storage.weights.manifests import LoadedWeights


class WeightLoader:
    """The engine of one policy, and the versions that it was given."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._tensors: Mapping[str, HostTensor] = {}
        """What was given last."""
        self._merged: Merged | None = None
        self._published: dict[int, str] = {}
        """Version → digest in its manifest, of versions with an adapter."""

    async def load(self, weights: LoadedWeights) -> None:
        """Load a version that was read and verified.

        Raises what `Engine.load` raises, and CorruptError for weights that are not finite.
        """
        manifest, given = weights.manifest, weights.tensors
        if manifest.adapter is None:
            await in_system_thread(self._check, manifest.version, given)
            await self.engine.load(manifest.version, given)
        elif isinstance(self.engine, AdapterEngine) and self.engine.serves_adapters:
            await in_system_thread(self._check, manifest.version, given)
            await self.engine.load_adapter(manifest.version, manifest.adapter, given)
        else:
            merged = await in_system_thread(adapters.merged, manifest.adapter, given, self._merged)
            given = merged.tensors
            await in_system_thread(self._check, manifest.version, given)
            # Before the engine samples with it: the engine's own digest is that of merged tensors.
            self._published[manifest.version] = manifest.digest
            await self.engine.load(manifest.version, given)
            self._merged = merged
        self._tensors = given

    def digest(self, version: int) -> str:
        """Return the published digest of a version that was loaded; KeyError for another one."""
        return self._published.get(version) or self.engine.digest(version)

    def _check(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        """Raise CorruptError for a tensor that is not finite, unless it was given before."""
        for name, tensor in tensors.items():
            if tensor is not self._tensors.get(name) and not is_finite(tensor):
                raise CorruptError(f"{name} of version {version} has values that are not finite")
