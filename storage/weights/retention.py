"""Retention: which versions' data a run still needs, and the deletion of the rest.

    plan     versions to keep ──and their bases──▶ data to keep; the data of all others is retired
    retire   `retired.json` beside the manifest, created once ──▶ data files are deleted
             at home first, then in the mirrors

Only data is deleted. Manifests are small and stay, so that every digest, parent and batch can still
be verified. Kept are version 0, the newest versions, every n-th, those that a person names or has
tagged, those from which another run continues, those younger than the grace period, those from the
oldest one on that a live reader has loaded, and the bases of all these down to an undamaged anchor.
"""

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from storage import layout
from storage.coordination import heartbeats
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import seal
from storage.formats.tensor_set import MANIFEST
from storage.records.numbers import Number
from storage.records.weights import Manifest
from storage.store.object_store import ObjectStore
from storage.weights import manifests, tags
from storage.weights.tags import Tag

READ_THREADS = 16
ALIVE_S = 600.0
"""A service whose heartbeat is not older counts as live: it may be reading an update path."""
READERS = ("rollout", "evaluation")
"""Kinds of services that read older versions than the newest."""


@dataclass(frozen=True)
class Retention:
    """Which versions of each policy to keep."""

    last: int = 5
    """How many of the newest versions."""
    every: int = 20
    """Versions divisible by this number; 0: none of them."""
    versions: Mapping[str, Collection[int]] | None = None
    """policy → further versions."""
    grace_s: float = 3600.0
    """Nothing younger is retired."""

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers out of range, not-a-number included."""
        if not 0 <= self.grace_s < math.inf or self.last < 1 or self.every < 0:
            raise ConfigError(
                f"keep the newest {self.last}, every {self.every}th and what is younger than "
                f"{self.grace_s:g} s: "
                "the first is at least 1, the others are finite and at least 0"
            )


@dataclass(frozen=True, kw_only=True)
class Retired:
    """`weights/{policy}/{version}/retired.json`: this version's data is deleted on purpose."""

    policy: str
    version: int
    at_s: Number
    num_bytes: int
    write_id: str = ""


@dataclass(frozen=True, kw_only=True)
class RetirementPlan:
    """Which versions of a policy keep their data, and which data is to be deleted."""

    policy: str
    kept: Mapping[int, str]
    """version → why its data is kept."""
    retired: Mapping[int, tuple[str, ...]]
    """version → keys of its data files that still exist, those of interrupted writers included."""
    num_bytes: int
    """Bytes to delete, as far as manifests list them."""
    tags: tuple[Tag, ...] = ()
    """Tags that were taken into account."""
    returned: tuple[int, ...] = ()
    """Kept versions that an interrupted gc recorded as retired, and that can still be read."""
    lost: tuple[int, ...] = ()
    """Versions that a person names and that cannot be kept: their data is deleted already."""


def named(versions: Iterable[str], policies: Collection[str]) -> dict[str, set[int]]:
    """Parse `["solver@40"]` into `{"solver": {40}}`.

    Raises:
        ConfigError: text of another form, or of a policy that is not among `policies`.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    for word in versions:
        policy, version = tags.parse(word)
        if policy not in policies:
            raise ConfigError(
                f"{word!r} names no version; write POLICY@VERSION, the policy one of "
                f"{', '.join(policies)}"
            )
        numbers[policy].add(version)
    return dict(numbers)


def check_versions_exist(run: ObjectStore, versions: Mapping[str, Collection[int]]) -> None:
    """Raise ConfigError for a version, policy → versions, that the run does not have."""
    for policy, numbers in versions.items():
        newest = manifests.latest(run, policy)
        for version in sorted(numbers):
            if newest is None or version > newest:
                has = (
                    f"{policy} has no version yet"
                    if newest is None
                    else f"the newest is {policy}@{newest}"
                )
                raise ConfigError(f"there is no {policy}@{version} to keep; {has}")


def freeze(run: ObjectStore) -> None:
    """Forbid to retire anything of the run; nothing happens to a frozen run."""
    if not run.exists(layout.FROZEN):
        run.put(layout.FROZEN, b"{}")


def is_frozen(run: ObjectStore) -> bool:
    """Return whether nothing of the run may be retired."""
    return run.exists(layout.FROZEN)


def thaw(run: ObjectStore) -> None:
    """Undo `freeze`."""
    run.delete(layout.FROZEN)


def plan(
    run: ObjectStore, policy: str, retention: Retention, now_s: float, *, verify: bool = True
) -> RetirementPlan:
    """Plan which of the policy's versions lose their data, at Unix time `now_s`.

    A plan that is to be carried out needs `verify` (`manifests.with_bases`).

    Raises:
        CorruptError: a manifest is missing or damaged, or a tag or a reader's heartbeat cannot be
            read, so that the versions which it keeps are not known.
    """
    keys = run.list(f"{layout.WEIGHTS}/{policy}")
    versions = layout.numbers(
        keys, lambda version: layout.manifest(layout.weights(policy, version))
    )
    if not versions:
        return RetirementPlan(policy=policy, kept={}, retired={}, num_bytes=0)
    newest = versions[-1]
    missing = next((n for n, version in enumerate(versions) if version != n), None)
    if missing is not None:
        raise CorruptError(
            f"version {missing} of {policy} is missing, version {newest} exists; what the versions "
            "after it need is not known: put its manifest back"
        )
    with ThreadPoolExecutor(READ_THREADS) as pool:
        chain = list(
            pool.map(
                lambda version: _without_tensors(manifests.read_manifest(run, policy, version)),
                versions,
            )
        )
    tagged = tags.holding(run)
    recorded = set(layout.numbers(keys, partial(layout.retired, policy)))
    gone = _unreadable(chain, recorded, set(keys))
    wanted = _kept_versions(run, chain, retention, tagged, now_s)
    named = set((retention.versions or {}).get(policy, ()))
    readable = {version: why for version, why in wanted.items() if version not in gone}
    kept = manifests.with_bases(run, chain, readable, set(keys), gone, verify=verify)
    data = _data_keys(policy, keys)
    # A version without data, whose delta changes nothing, is recorded too: its base is retired.
    retired = {
        version: tuple(data.get(version, ()))
        for version in versions
        if version not in kept and (version in data or version not in recorded)
    }
    num_bytes = _num_bytes(run, [chain[version] for version in retired], retired)
    return RetirementPlan(
        policy=policy,
        kept={version: kept[version] for version in sorted(kept) if version not in gone},
        retired=retired,
        num_bytes=num_bytes,
        tags=tuple(tagged),
        returned=tuple(sorted((recorded & kept.keys()) - gone)),
        lost=tuple(sorted(gone & named)),
    )


def _unreadable(
    chain: Sequence[Manifest], recorded: Collection[int], keys: Collection[str]
) -> set[int]:
    """Return the versions for which `manifests.is_retired` is true, by the keys that exist."""
    gone: set[int] = set()
    for manifest in chain:
        start = manifests.read_from(manifest, keys.__contains__)
        if manifest.version in recorded and (start is None or start in gone):
            gone.add(manifest.version)
    return gone


def retire(run: ObjectStore, planned: RetirementPlan) -> None:
    """Carry out a plan: create the records, then delete the data, so that a reader never reports
    retired data as damage. After an interruption, the next plan deletes the rest.

    Raises:
        ConfigError: the run is frozen, or a version was tagged since the plan was made.
    """
    if is_frozen(run):
        raise ConfigError(f"{run.url} is frozen; thaw it first (astraflow gc RUN --thaw)")
    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(partial(_record, run, planned.policy), planned.retired))
        # Tags are read after the records were created, and `tags.create` checks for a record after
        # it created the tag: at least one of the two detects the other.
        if new_tags := [
            tag
            for tag in tags.holding(run)
            if tag not in planned.tags and tag.policy == planned.policy
        ]:
            tag = new_tags[0]
            raise ConfigError(
                f"{tag.policy}@{tag.version} was tagged {tag.label} while this was planned; run gc "
                "again"
            )
        keys = [key for of_version in planned.retired.values() for key in of_version]
        for lists_files in (True, False):  # manifests of merged deltas before their files
            list(
                pool.map(run.delete, (key for key in keys if key.endswith(".json") is lists_files))
            )
        list(
            pool.map(
                run.delete,
                (layout.retired(planned.policy, version) for version in planned.returned),
            )
        )


def plan_mirror(home: ObjectStore, mirror: ObjectStore, planned: RetirementPlan) -> RetirementPlan:
    """Plan the retirement in a mirror of every version that is retired at home, by `planned` or
    before.

    A version that the mirror shows without a record of its retirement is in the plan, too, with no
    keys where its data is deleted already.
    """
    policy = planned.policy
    folder = f"{layout.WEIGHTS}/{policy}"
    retired_at_home = set(layout.numbers(home.list(folder), partial(layout.retired, policy)))
    to_retire = (retired_at_home | planned.retired.keys()) - set(planned.returned)
    keys = mirror.list(folder)
    recorded = set(layout.numbers(keys, partial(layout.retired, policy)))
    shown = set(
        layout.numbers(keys, lambda version: layout.manifest(layout.weights(policy, version)))
    )
    data = _data_keys(policy, keys)
    retired = {
        version: tuple(data.get(version, ()))
        for version in sorted(to_retire)
        if version in data or version in shown - recorded
    }
    with ThreadPoolExecutor(READ_THREADS) as pool:
        chain = list(
            pool.map(
                partial(manifests.read_manifest, home, policy),
                (version for version, keys in retired.items() if keys),
            )
        )
    return RetirementPlan(
        policy=policy, kept={}, retired=retired, num_bytes=_num_bytes(mirror, chain, retired)
    )


def retire_mirror(home: ObjectStore, mirror: ObjectStore, planned: RetirementPlan) -> None:
    """Carry out the plan of a mirror, after that of home, whose records are copied.

    Raises:
        NotFoundError: home has no record of a version; the mirror keeps its data.
    """

    def retire_one(version: int) -> None:
        key = layout.retired(planned.policy, version)
        record = home.get(key)
        with suppress(ConflictError):  # the record of an earlier run of this name is not read
            mirror.create(key, record)
        # manifests of merged deltas before their files, as at home
        for data_key in sorted(planned.retired[version], key=lambda key: not key.endswith(".json")):
            mirror.delete(data_key)

    with ThreadPoolExecutor(READ_THREADS) as pool:
        results = [pool.submit(retire_one, version) for version in planned.retired]
    for result in results:  # one that failed does not keep the others
        result.result()


def _kept_versions(
    run: ObjectStore,
    chain: list[Manifest],
    retention: Retention,
    tagged: Iterable[Tag],
    now_s: float,
) -> dict[int, str]:
    """version → why its data is kept, without the bases of these versions."""
    newest, policy = len(chain) - 1, chain[0].policy
    tag_reasons = {tag.version: tag.reason for tag in tagged if tag.policy == policy}
    named = (retention.versions or {}).get(policy, ())
    loaded = _oldest_loaded(run, policy, now_s)
    kept: dict[int, str] = {}
    for manifest in chain:
        version = manifest.version
        if version == 0:
            kept[version] = "the base model"
        elif version in tag_reasons:
            kept[version] = tag_reasons[version]
        elif version in named:
            kept[version] = "named"
        elif version > newest - retention.last:
            kept[version] = f"one of the newest {retention.last}"
        elif retention.every and version % retention.every == 0:
            kept[version] = f"every {retention.every}th"
        elif now_s - manifest.created_s < retention.grace_s:
            kept[version] = f"younger than {retention.grace_s / 3600:g} h"
        elif loaded is not None and version >= loaded:
            kept[version] = f"a live worker or evaluation has loaded version {loaded}"
    return kept


def _oldest_loaded(run: ObjectStore, policy: str, now_s: float) -> int | None:
    """The oldest version that a live reader has loaded.

    CorruptError when a reader's heartbeat cannot be read, for example one of another release.
    """
    stored = heartbeats.read_all(run)
    for key, why in stored.unreadable.items():
        if key == layout.HEARTBEATS:
            raise CorruptError(f"{why}; which versions are loaded is not known")
        if key.split("/")[1] in READERS:
            raise CorruptError(
                f"{why}; which versions its writer has loaded is not known: wait for its next "
                f"heartbeat, or delete {run.url}/{key} if it has ended"
            )
    versions = [
        beat.versions[policy]
        for beat in stored.beats
        if beat.kind in READERS
        and not beat.has_ended
        and policy in beat.versions
        and now_s - beat.beat_s < ALIVE_S
    ]
    return min(versions, default=None)


def _record(run: ObjectStore, policy: str, version: int) -> None:
    """Create the record that the version's data is deleted."""
    num_bytes = sum(
        file.num_bytes
        for file in manifests.all_files(manifests.read_manifest(run, policy, version))
    )
    with suppress(ConflictError):  # another gc retires the same version, or began to
        run.create(
            layout.retired(policy, version),
            seal(Retired(policy=policy, version=version, at_s=time.time(), num_bytes=num_bytes)),
        )


def _data_keys(policy: str, keys: Iterable[str]) -> dict[int, list[str]]:
    """version → keys in its folder, except its manifest and the record of its retirement."""
    of_version: dict[int, list[str]] = defaultdict(list)
    for key in keys:
        folder, _, name = key.rpartition("/")
        version = layout.version_of(folder, policy)
        if version is not None and name not in (MANIFEST, layout.RETIRED):
            of_version[version].append(key)
    return of_version


def _without_tensors(manifest: Manifest) -> Manifest:
    """The manifest without its tensors: ten thousand of large models do not fit into memory."""
    step = replace(manifest.step, tensors={}) if manifest.step else None
    return replace(manifest, tensors={}, step=step)


def _num_bytes(
    run: ObjectStore, chain: Sequence[Manifest], retired: Mapping[int, Sequence[str]]
) -> int:
    """Bytes of the files among `retired` that manifests and merged deltas list."""
    keys_to_delete = {key for keys in retired.values() for key in keys}
    listed = {
        f"{layout.weights(manifest.policy, manifest.version)}/{file.name}": file
        for manifest in chain
        for file in manifests.all_files(manifest)
    }
    for policy in {manifest.policy for manifest in chain}:
        for version, bases in layout.merged_deltas(keys_to_delete, policy).items():
            for base in bases:
                with suppress(CorruptError, NotFoundError):  # the number is for people
                    files = manifests.read_merged(run, policy, version, base).step.files
                    listed |= {
                        f"{layout.weights(policy, version)}/{file.name}": file for file in files
                    }
    return sum(file.num_bytes for key, file in listed.items() if key in keys_to_delete)
