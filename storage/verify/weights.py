"""Audit of one policy's versions: no gaps, true parents, batches and digests."""

from collections.abc import Callable, Collection, Mapping
from functools import partial

from storage import layout
from storage.errors import UNREADABLE, AstraFlowError, ConfigError, NotFoundError, TransientError
from storage.records.weights import Manifest, Origin
from storage.run import batches
from storage.store.object_store import ObjectStore
from storage.verify.missing_numbers import gaps
from storage.verify.violations import Findings, Invariant
from storage.weights import manifests, reader, update_path
from storage.weights.manifests import MERGED_SPAN, LoadedWeights
from storage.weights.update_path import PathDelta

Progress = Callable[[str, float], None]
READS_FROM_ANCHOR_MAX = 16
"""Versions of a policy that are read from their anchors, because the version before is not at hand:
each reads a chain that may have all versions.
"""


class WeightsAudit:
    """Audit of every published version of one policy, in their order."""

    def __init__(
        self, run: ObjectStore, policy: str, findings: Findings, origin: Origin | None = None
    ) -> None:
        """`origin` is the version of another run with which the policy was to begin."""
        self._run, self._policy, self._findings = run, policy, findings
        self._origin = origin
        self._loaded: dict[int, LoadedWeights] = {}
        """Versions that later ones are made of: the last one, and bases of merged deltas."""
        self._unreadable: set[int] = set()
        """Versions that no later delta leads over."""
        self._reads_from_anchor = 0

    def audit(self, due: int, progress: Progress) -> Mapping[int, str]:
        """Read every version in every way that leads to it.

        Manifests are not kept: there may be ten thousand large ones.

        Args:
            due: the version that must exist, with all before it; −1 where none must.

        Returns:
            version → digest, of the versions whose manifest can be read.
        """
        folder = f"{layout.WEIGHTS}/{self._policy}"
        keys = self._findings.listed(folder, lambda: self._run.list(folder))
        versions = layout.numbers(
            keys, lambda version: layout.manifest(layout.weights(self._policy, version))
        )
        self._check_numbers(versions, due)
        merged_bases = {  # of others, which no reader uses, each would keep a version in memory
            version: [base for base in bases if base == version - MERGED_SPAN]
            for version, bases in layout.merged_deltas(keys, self._policy).items()
            if version % MERGED_SPAN == 0
        }
        last_use = {base: version for version, bases in merged_bases.items() for base in bases}
        digests: dict[int, str] = {}
        for index, version in enumerate(versions):
            progress(f"weights of {self._policy}", (index + 1) / len(versions))
            manifest = self._read_manifest(version)
            if manifest is None:
                continue
            self._check_ancestry(manifest)
            loaded = self._read_all_ways(manifest, merged_bases.get(version, ()))
            self._loaded = {
                base: weights
                for base, weights in self._loaded.items()
                if version < last_use.get(base, version)
            }
            if loaded:
                self._loaded[version] = loaded
            digests[version] = manifest.digest
        return digests

    def _check_numbers(self, versions: Collection[int], due: int) -> None:
        last = max([-1, *versions])
        missing = gaps(versions, 0, max(last, due) + 1)
        for version in missing.first:
            why = f"version {last} exists" if version < last else "and the run is completed"
            self._findings.add(
                Invariant.CONTIGUOUS,
                layout.weights(self._policy, version),
                f"version {version} is missing, {why}",
            )
        if missing.more:
            self._findings.add(
                Invariant.CONTIGUOUS,
                f"{layout.WEIGHTS}/{self._policy}",
                f"and {missing.more:,} more versions are missing",
            )

    def _read_manifest(self, version: int) -> Manifest | None:
        try:
            return manifests.read_manifest(self._run, self._policy, version)
        except TransientError:
            raise
        except AstraFlowError as error:
            key = layout.manifest(layout.weights(self._policy, version))
            self._findings.add(Invariant.LINEAGE, key, str(error))
            return None

    def _check_ancestry(self, manifest: Manifest) -> None:
        key = layout.manifest(layout.weights(manifest.policy, manifest.version))
        parent = manifest.version - 1 if manifest.version else None
        batch = manifest.version or None
        if manifest.parent != parent:
            self._findings.add(
                Invariant.LINEAGE,
                key,
                f"names parent {manifest.parent}; the parent of version {manifest.version} is "
                f"{parent}",
            )
        if manifest.batch != batch:
            self._findings.add(
                Invariant.LINEAGE,
                key,
                f"names batch {manifest.batch}; version {manifest.version} is made of batch "
                f"{batch}",
            )
        origin = None if manifest.version else self._origin
        if manifest.origin != origin:
            self._findings.add(
                Invariant.LINEAGE,
                key,
                f"names {_words(manifest.origin)} as its origin, and {layout.RUN} {_words(origin)}",
            )
        if batch is not None and not self._has_batch(batch):
            self._findings.add_missing(
                layout.batch(manifest.policy, batch),
                f"batch {batch} is missing, version {manifest.version} was made of it",
            )

    def _has_batch(self, step: int) -> bool:
        try:
            return batches.exists(self._run, self._policy, step)
        except ConfigError:
            return True  # the folder of the batches is a link: a violation of its own

    def _read_all_ways(
        self, manifest: Manifest, merged_bases: Collection[int]
    ) -> LoadedWeights | None:
        """Read the version as an anchor, by its delta, and by merged deltas from `merged_bases`.

        Returns:
            The version; None where its data was retired, or cannot be read in any way.
        """
        if self._is_retired(manifest):
            base = manifest.step.base if manifest.step else manifest.base
            if base in self._unreadable:
                self._unreadable.add(manifest.version)
            return None
        if manifest.version == 0:
            self._try(manifest, self._read_files)
        usable = [
            delta
            for delta in update_path.path_deltas(manifest)
            if delta.base is None or delta.base in self._loaded
        ]
        reads: list[Callable[[], LoadedWeights | None]] = [
            *(partial(self._apply, manifest, delta) for delta in usable),
            *(partial(self._apply_merged, manifest, base) for base in merged_bases),
        ]
        if not usable:  # its base is not at hand, or is a version of another run
            reads.append(partial(self._read_from_anchor, manifest))
        loaded: LoadedWeights | None = None
        for read in reads:
            result = self._try(manifest, read)
            loaded = loaded or result
        if loaded is None:
            self._unreadable.add(manifest.version)
        return loaded

    def _try(
        self, manifest: Manifest, read: Callable[[], LoadedWeights | None]
    ) -> LoadedWeights | None:
        """Return what `read` returns; its error is a violation, unless the data was retired."""
        folder = layout.weights(manifest.policy, manifest.version)
        try:
            return read()
        except NotFoundError as error:
            # An interrupted retirement may leave a version's data, but not all of its base's.
            if not self._run.exists(layout.retired(manifest.policy, manifest.version)):
                self._findings.add(Invariant.LINEAGE, folder, str(error))
        except UNREADABLE as error:
            if not self._is_retired(manifest):  # it may be retired meanwhile
                self._findings.add(Invariant.LINEAGE, folder, str(error))
        return None

    def _is_retired(self, manifest: Manifest) -> bool:
        """Whether data of the version was deleted on purpose, be it data that readers do without,
        or data of the versions on its chain.
        """
        folder = layout.weights(manifest.policy, manifest.version)
        if not self._run.exists(layout.retired(manifest.policy, manifest.version)):
            return False
        return manifests.is_retired(self._run, manifest) or not all(
            self._run.exists(f"{folder}/{file.name}") for file in manifests.all_files(manifest)
        )

    def _read_from_anchor(self, manifest: Manifest) -> LoadedWeights:
        """Read a version without the one before. NotFoundError where that was tried in vain."""
        if manifest.base is not None:
            self._reads_from_anchor += manifest.base not in self._unreadable
            if manifest.base in self._unreadable or self._reads_from_anchor > READS_FROM_ANCHOR_MAX:
                raise NotFoundError(
                    f"version {manifest.version} of {manifest.policy} is not read, because version "
                    f"{manifest.base}, which it is a change of, cannot be read"
                )
        return reader.read(self._run, self._policy, manifest.version)

    def _apply(self, manifest: Manifest, delta: PathDelta) -> LoadedWeights:
        base = self._loaded[delta.base] if delta.base is not None else None
        return update_path.apply_path(self._run, manifest, [delta], base)

    def _apply_merged(self, manifest: Manifest, base: int) -> LoadedWeights | None:
        """Read the merged delta, and apply it where its base could be read."""
        merged = manifests.read_merged(self._run, manifest.policy, manifest.version, base)
        if base not in self._loaded:
            return None
        return self._apply(manifest, update_path.merged_path_delta(merged))

    def _read_files(self) -> None:
        reader.fetch_files(self._run, self._policy, 0)


def _words(origin: Origin | None) -> str:
    if origin is None:
        return "none"
    return f"{origin.policy}@{origin.version} of run {origin.run} ({origin.digest})"
