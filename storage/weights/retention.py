"""Which versions' data a run still needs, and letting go of the rest. Manifests stay for ever: they
are small, and with them every digest, parent and batch can still be verified; what goes is the
data.

    plan   kept versions ──closure over bases──▶ needed data       everything else of a version is retired
    retire `retired.json` beside the manifest, created once ──▶ then the data files are deleted; in mirrors after home

Kept are version 0, the newest ones, every n-th, those a person names or has tagged, those younger
than the grace period or newer than what a living worker holds (its chain goes on from there), and
whatever these need to be reached. Knows nothing of training.
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
from storage.formats.json_objects import seal, unseal
from storage.formats.tensor_set import MANIFEST
from storage.records.numbers import Number
from storage.records.weights import FileInfo, Manifest
from storage.store.object_store import ObjectStore
from storage.weights import manifests, tags
from storage.weights.tags import Tag

READ_THREADS = 16
ALIVE_S = 600.0
"""A worker whose heartbeat is not older counts as living: it may be in the middle of a chain."""
READERS = ("rollout", "evaluation")
"""Kinds of services that read versions other than the newest."""


@dataclass(frozen=True)
class Retention:
    """What to keep of each policy."""

    last: int = 5
    """The newest versions."""
    every: int = 20
    """Every so-manieth version; 0: none of them."""
    versions: Mapping[str, Collection[int]] | None = None
    """policy → versions to keep in any case."""
    grace_s: float = 3600.0
    """Nothing younger is retired."""

    def __post_init__(self) -> None:
        """ConfigError for numbers by which nothing could be kept as it is meant: not-a-number
        compares with no age.
        """
        if not 0 <= self.grace_s < math.inf or self.last < 1 or self.every < 0:
            raise ConfigError(
                f"keep the newest {self.last}, every {self.every}th and what is younger than "
                f"{self.grace_s:g} s: "
                "the first is at least 1, the others are finite and at least 0"
            )


@dataclass(frozen=True, kw_only=True)
class Retired:
    """`weights/{policy}/{version}/retired.json`: the data of this version was let go on purpose."""

    policy: str
    version: int
    at_s: Number
    num_bytes: int
    write_id: str = ""


@dataclass(frozen=True, kw_only=True)
class RetirementPlan:
    """What would happen to one policy's versions."""

    policy: str
    kept: Mapping[int, str]
    """version → why its data stays."""
    retired: Mapping[int, tuple[str, ...]]
    """version → keys of its data files that are still there, those of writers that were cut off
    included.
    """
    num_bytes: int
    """Bytes that go, as far as manifests tell."""
    tags: tuple[Tag, ...] = ()
    """Those that were heeded."""
    returned: tuple[int, ...] = ()
    """Kept versions that an execution which was cut off had told to go, before any of their data
    went.
    """


def named(versions: Iterable[str], policies: Collection[str]) -> dict[str, set[int]]:
    """`["solver@40"]` → `{"solver": {40}}`; ConfigError for what does not read like this, or names
    another policy.
    """
    found: dict[str, set[int]] = defaultdict(set)
    for word in versions:
        policy, version = tags.parse(word)
        if policy not in policies:
            raise ConfigError(
                f"{word!r} names no version; write POLICY@VERSION, the policy one of "
                f"{', '.join(policies)}"
            )
        found[policy].add(version)
    return dict(found)


def refuse_absent(run: ObjectStore, versions: Mapping[str, Collection[int]]) -> None:
    """ConfigError for a version that the run does not have: whoever names it for this very run has
    mistyped it.
    """
    for policy, numbers in versions.items():
        newest = manifests.latest(run, policy)
        for version in sorted(numbers):
            if newest is None:
                raise ConfigError(
                    f"there is no {policy}@{version} to keep; {policy} has no version yet"
                )
            if version > newest:
                raise ConfigError(
                    f"there is no {policy}@{version} to keep; the newest is {policy}@{newest}"
                )


def freeze(run: ObjectStore) -> None:
    """Nothing of the run is retired any more. Freezing twice is no error."""
    if not run.exists(layout.FROZEN):
        run.put(layout.FROZEN, b"{}")


def is_frozen(run: ObjectStore) -> bool:
    return run.exists(layout.FROZEN)


def thaw(run: ObjectStore) -> None:
    """Takes a freeze back."""
    run.delete(layout.FROZEN)


def plan(run: ObjectStore, policy: str, retention: Retention, now_s: float) -> RetirementPlan:
    """What of the policy's weights may go at Unix time `now_s`. Reads every manifest. CorruptError
    for one that is damaged, and for a damaged tag or heartbeat, whose versions are not known.
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
                lambda version: _bare(manifests.read_manifest(run, policy, version)),
                range(newest + 1),
            )
        )
    tagged = tags.require_all(run)
    kept = _wanted(run, chain, retention, tagged, now_s)
    for version in sorted(kept, reverse=True):
        base = chain[version].base
        while base is not None and base not in kept:
            kept[base] = f"leads to version {version}"
            base = chain[base].base
    data = _by_version(policy, keys)
    told = set(layout.numbers(keys, partial(layout.retired, policy)))
    gone = told - data.keys()
    going = [
        version
        for version in range(newest + 1)
        if version not in kept and (version in data or version not in told)
    ]
    retired = {
        version: tuple(data.get(version, ())) for version in going
    }  # also of a delta that changes nothing: its base goes
    num_bytes = _num_bytes(run, [chain[version] for version in retired], retired)
    reasons = {version: kept[version] for version in sorted(kept) if version not in gone}
    returned = tuple(
        v for v in sorted(kept) if v in told and not manifests.is_retired(run, chain[v])
    )
    return RetirementPlan(
        policy=policy,
        kept=reasons,
        retired=retired,
        num_bytes=num_bytes,
        tags=tuple(tagged),
        returned=returned,
    )


def retire(run: ObjectStore, planned: RetirementPlan) -> None:
    """Carry the plan out: first the record, then the data, so that a reader never takes what was
    let go for damage. Killed in between, the next `retire` of a new plan deletes the rest.
    ConfigError when the run is frozen, or a version was tagged since the plan was made.
    """
    if is_frozen(run):
        raise ConfigError(f"{run.url} is frozen; thaw it first (astraflow gc RUN --thaw)")
    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(partial(_tell, run, planned.policy), planned.retired))
        # Whoever tags a version looks for its record after the tag stands: one of the two sees the
        # other.
        if late := [
            tag
            for tag in tags.require_all(run)
            if tag not in planned.tags and tag.policy == planned.policy
        ]:
            raise ConfigError(
                f"{late[0].policy}@{late[0].version} was tagged {late[0].name} while this was "
                "planned; run gc again"
            )
        keys = [key for of_version in planned.retired.values() for key in of_version]
        for named_first in (True, False):  # what names files goes before them
            list(
                pool.map(run.delete, (key for key in keys if key.endswith(".json") is named_first))
            )
        list(
            pool.map(
                run.delete,
                (layout.retired(planned.policy, version) for version in planned.returned),
            )
        )


def plan_mirror(home: ObjectStore, mirror: ObjectStore, planned: RetirementPlan) -> RetirementPlan:
    """What may go in a mirror once `planned` is carried out at home: the data of every version that
    is retired there, now or by an earlier plan. A version that the mirror shows without saying that
    it is retired stands in the plan with no keys.
    """
    policy = planned.policy
    folder = f"{layout.WEIGHTS}/{policy}"
    gone = (
        set(layout.numbers(home.list(folder), partial(layout.retired, policy)))
        | planned.retired.keys()
    )
    gone -= set(planned.returned)
    shown = mirror.list(folder)
    told = set(layout.numbers(shown, partial(layout.retired, policy)))
    seen = set(
        layout.numbers(shown, lambda version: layout.manifest(layout.weights(policy, version)))
    )
    data = _by_version(policy, shown)
    retired = {
        version: tuple(data.get(version, ()))
        for version in sorted(gone)
        if version in data or version in seen - told
    }
    with ThreadPoolExecutor(READ_THREADS) as pool:
        chain = list(
            pool.map(
                partial(manifests.read_manifest, home, policy),
                (v for v, keys in retired.items() if keys),
            )
        )
    return RetirementPlan(
        policy=policy, kept={}, retired=retired, num_bytes=_num_bytes(mirror, chain, retired)
    )


def retire_mirror(home: ObjectStore, mirror: ObjectStore, planned: RetirementPlan) -> None:
    """Carry the plan of a mirror out, after home's. Every version's record is home's own:
    NotFoundError where home has none, and then the mirror keeps its data.
    """

    def retire_one(version: int) -> None:
        key = layout.retired(planned.policy, version)
        record = home.get(key)
        with suppress(ConflictError):  # of another run that had this name: nobody reads it
            mirror.create(key, record)
        for data_key in planned.retired[version]:
            mirror.delete(data_key)

    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(retire_one, planned.retired))


def read_retired(run: ObjectStore, policy: str, version: int) -> Retired | None:
    """What was recorded when the version's data was let go; None when it was not."""
    key = layout.retired(policy, version)
    try:
        return unseal(Retired, run.get(key), key)
    except NotFoundError:
        return None


def _wanted(
    run: ObjectStore,
    chain: list[Manifest],
    retention: Retention,
    tagged: Iterable[Tag],
    now_s: float,
) -> dict[int, str]:
    newest, policy = len(chain) - 1, chain[0].policy
    tag_names = {tag.version: tag.name for tag in tagged if tag.policy == policy}
    named = (retention.versions or {}).get(policy, ())
    held = _oldest_held(run, policy, now_s)
    kept: dict[int, str] = {}
    for manifest in chain:
        version = manifest.version
        if version == 0:
            kept[version] = "the base model"
        elif version in tag_names:
            kept[version] = f"tagged {tag_names[version]}"
        elif version in named:
            kept[version] = "named"
        elif version > newest - retention.last:
            kept[version] = f"one of the newest {retention.last}"
        elif retention.every and version % retention.every == 0:
            kept[version] = f"every {retention.every}th"
        elif now_s - manifest.created_s < retention.grace_s:
            kept[version] = f"younger than {retention.grace_s / 3600:g} h"
        elif held is not None and version >= held:
            kept[version] = f"a living worker or evaluation holds version {held}"
    return kept


def _oldest_held(run: ObjectStore, policy: str, now_s: float) -> int | None:
    """CorruptError when a reader's heartbeat cannot be read, be it one of another release: what it
    holds is not known.
    """
    seen = heartbeats.look(run)
    for key, why in seen.unreadable.items():
        if key == layout.HEARTBEATS:
            raise CorruptError(f"{why}; which versions are held is not known")
        if key.split("/")[1] in READERS:
            raise CorruptError(
                f"{why}; which versions its writer holds is not known: wait for its next "
                f"heartbeat, or delete {run.url}/{key} "
                "if it has ended"
            )
    versions = [
        beat.versions[policy]
        for beat in seen.beats
        if beat.kind in READERS
        and not beat.has_ended
        and policy in beat.versions
        and now_s - beat.beat_s < ALIVE_S
    ]
    return min(versions, default=None)


def _tell(run: ObjectStore, policy: str, version: int) -> None:
    """Record that the version's data goes."""
    num_bytes = sum(
        file.num_bytes for file in _files(manifests.read_manifest(run, policy, version))
    )
    with suppress(ConflictError):  # another one retires the same version, or began to
        run.create(
            layout.retired(policy, version),
            seal(Retired(policy=policy, version=version, at_s=time.time(), num_bytes=num_bytes)),
        )


def _by_version(policy: str, keys: Iterable[str]) -> dict[int, list[str]]:
    """version → keys of everything in its folder but its manifest and the record that it is
    retired.
    """
    found: dict[int, list[str]] = defaultdict(list)
    for key in keys:
        folder, _, name = key.rpartition("/")
        version = layout.version_of(folder, policy)
        if version is not None and name not in (MANIFEST, layout.RETIRED):
            found[version].append(key)
    return found


def _bare(manifest: Manifest) -> Manifest:
    """Without its tensors: ten thousand manifests of large models would not fit into memory."""
    step = replace(manifest.step, tensors={}) if manifest.step else None
    return replace(manifest, tensors={}, step=step)


def _files(manifest: Manifest) -> Sequence[FileInfo]:
    return manifest.files + (manifest.step.files if manifest.step else ())


def _num_bytes(
    run: ObjectStore, chain: Sequence[Manifest], retired: Mapping[int, Sequence[str]]
) -> int:
    """Of the files among `retired` that their manifests and merged changes list."""
    going = {key for keys in retired.values() for key in keys}
    listed = {
        f"{layout.weights(one.policy, one.version)}/{file.name}": file
        for one in chain
        for file in _files(one)
    }
    for policy in {one.policy for one in chain}:
        for version, bases in layout.merged_deltas(going, policy).items():
            for base in bases:
                with suppress(CorruptError, NotFoundError):  # only a count
                    files = manifests.read_merged(run, policy, version, base).step.files
                    listed |= {
                        f"{layout.weights(policy, version)}/{file.name}": file for file in files
                    }
    return sum(file.num_bytes for key, file in listed.items() if key in going)
