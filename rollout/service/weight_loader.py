"""Gives the versions of one policy to its engine, with their adapters merged.

    version n: W, A, B ──merge, in a thread──▶ W + scale · B A ──▶ engine.load
                       ──▶ engine.load_adapter, where the engine applies adapters itself

An engine has no access to manifests. Versions without an adapter are given as they are.
"""

from rollout.engines.engine import AdapterEngine, Engine
from storage.coordination.system_threads import in_system_thread
from storage.formats import adapters
from storage.formats.adapters import Merged
from storage.weights.manifests import LoadedWeights


class WeightLoader:
    """The engine of one policy, and the versions that it was given."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._merged: Merged | None = None
        self._published: dict[int, str] = {}
        """Version → digest in its manifest, of versions with an adapter."""

    async def load(self, weights: LoadedWeights) -> None:
        """Load a version that was read and verified; raises what `Engine.load` raises."""
        manifest, given = weights.manifest, weights.tensors
        if manifest.adapter is None:
            await self.engine.load(manifest.version, given)
            return
        if isinstance(self.engine, AdapterEngine) and self.engine.serves_adapters:
            await self.engine.load_adapter(manifest.version, manifest.adapter, given)
            return
        merged = await in_system_thread(adapters.merged, manifest.adapter, given, self._merged)
        # Before the engine samples with it: the engine's own digest is that of merged tensors.
        self._published[manifest.version] = manifest.digest
        await self.engine.load(manifest.version, merged.tensors)
        self._merged = merged

    def digest(self, version: int) -> str:
        """Return the published digest of a version that was loaded; KeyError for another one."""
        return self._published.get(version) or self.engine.digest(version)
