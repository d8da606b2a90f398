"""Reading a version of the weights, by the update path with the fewest bytes, verified bit for bit.

    anchor 0 ──delta 1──▶ 1 ──delta 2──▶ 2 …  anchor 20 ──delta 21──▶ …

An anchor holds every tensor, and also the delta from the version before; a delta only that. A
reader that holds a version needs only the deltas since; every other reader starts from the nearest
anchor.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.formats import tensor_set
from storage.records.weights import HostTensor, Manifest
from storage.store.object_store import ObjectStore
from storage.weights import update_path
from storage.weights.manifests import (
    MEMORY_BYTES,
    MERGED_SPAN,
    READ_THREADS,
    LoadedWeights,
    chain_from_anchor,
    contents,
    is_gone,
    read_manifest,
    read_manifests,
    read_merged,
)
from storage.weights.update_path import PathStep

log = logging.getLogger(__name__)
LOOK_BACK_MAX = 64
"""Who is further behind starts from an anchor."""


def fetch(run: ObjectStore, policy: str, version: int) -> dict[str, HostTensor]:
    """All tensors of a version. Every file and tensor is verified; CorruptError when a second fetch
    fails too.
    """
    return dict(read(run, policy, version).tensors)


def read(
    run: ObjectStore,
    policy: str,
    version: int,
    held: LoadedWeights | None = None,
    *,
    known: Manifest | None = None,
    spare: LoadedWeights | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> LoadedWeights:
    """A version, by the cheapest way from `held`, else from the nearest anchor; unchanged tensors
    are shared with `held`.

    Every file and every resulting tensor is verified. What does not come out right from `held` is
    read once more, from an anchor. `known` is the version's manifest, where that was read already.
    The memory of `spare`, a version that nobody uses any more, is written over: fresh memory costs
    more than all else. CorruptError names the version that cannot be read, and the chain it lies
    on; NotFoundError when data of the chain was retired. Beside the versions it takes about
    `memory_bytes`.
    """
    if (
        held is not None
        and held.manifest.version <= version <= held.manifest.version + LOOK_BACK_MAX
    ):
        try:
            return _from_held(run, policy, version, held, known, spare, memory_bytes)
        except (CorruptError, NotFoundError) as error:
            log.warning("%s; version %d of %s is read from an anchor", error, version, policy)
    return _from_anchor(run, policy, version, memory_bytes)


def apply_path(
    run: ObjectStore,
    manifest: Manifest,
    way: Sequence[PathStep],
    held: LoadedWeights | None,
    memory_bytes: int = MEMORY_BYTES,
    spare: LoadedWeights | None = None,
) -> LoadedWeights:
    """The version of `manifest`, by just this way; CorruptError when it does not lead there."""
    tensors, digested = update_path.follow(
        run, way, held.tensors if held else {}, memory_bytes, spare.tensors if spare else {}
    )
    known = (
        {id(tensor): held.manifest.tensors[name].digest for name, tensor in held.tensors.items()}
        if held
        else {}
    )
    update_path.check(manifest, tensors, digested, known)
    return LoadedWeights(manifest, tensors)


def fetch_files(run: ObjectStore, policy: str, version: int = 0) -> dict[str, bytes]:
    """The model's other files by their own names, verified: `config.json`, `tokenizer.json`, …"""
    manifest = read_manifest(run, policy, version)
    return tensor_set.read_extra_files(run.sub(layout.weights(policy, version)), contents(manifest))


def _from_held(
    run: ObjectStore,
    policy: str,
    version: int,
    held: LoadedWeights,
    known: Manifest | None,
    spare: LoadedWeights | None,
    memory_bytes: int,
) -> LoadedWeights:
    """By the cheapest way, else by the cheapest without merged changes."""
    start = held.manifest.version
    if version == start:
        return held
    between = read_manifests(run, policy, range(start + 1, version))
    chain = [found for found in between if isinstance(found, Manifest)] + [
        known or read_manifest(run, policy, version)
    ]
    single = [leg for manifest in chain for leg in update_path.legs(manifest)]
    merged = _merged_legs(run, policy, start, version)
    way, longer = (update_path.cheapest(legs, start, version) for legs in (single + merged, single))
    if way is None:
        raise CorruptError(
            f"no unbroken chain leads from version {start} to version {version} of {policy}"
        )
    try:
        return apply_path(run, chain[-1], way, held, memory_bytes, spare)
    except CorruptError as error:
        if longer is None or longer == way:
            raise
        log.warning("%s; version %d of %s is read without merged changes", error, version, policy)
        return apply_path(run, chain[-1], longer, held, memory_bytes)


def _from_anchor(run: ObjectStore, policy: str, version: int, memory_bytes: int) -> LoadedWeights:
    """From the nearest anchor; where that one is damaged and carries its delta, from the one
    before.
    """
    damaged: set[int] = set()
    told: CorruptError | NotFoundError | None = None
    while True:
        try:
            chain = chain_from_anchor(run, policy, version, damaged)
            legs = [leg for manifest in chain for leg in update_path.legs(manifest)]
            way = update_path.cheapest(
                [leg for leg in legs if leg.base is not None or leg.version not in damaged],
                None,
                version,
            )
            if way is None:
                raise CorruptError(
                    f"no unbroken chain leads from an anchor to version {version} of {policy}"
                )
        except CorruptError as error:
            raise told or error from error
        try:
            return apply_path(run, chain[-1], way, None, memory_bytes)
        except update_path.DamagedPathError as error:
            told = told or _explained(run, chain, way, error)
            if error.leg.base is not None or chain[0].step is None:
                raise told from error
            damaged.add(error.leg.version)


def _explained(
    run: ObjectStore, chain: Sequence[Manifest], way: Sequence[PathStep], error: CorruptError
) -> CorruptError | NotFoundError:
    """What a person is told of a way that does not lead to the version at its end."""
    policy, version = chain[-1].policy, chain[-1].version
    passed = {leg.version for leg in way}
    for link in chain:
        if link.version in passed and is_gone(run, link):
            needed = "" if link.version == version else f", which version {version} needs,"
            return NotFoundError(
                f"the data of version {link.version} of {policy}{needed} was retired on purpose"
            )
    links = " ← ".join(str(leg.version) for leg in reversed(way))
    return CorruptError(
        f"version {version} of {policy} cannot be read, whose chain is {links}: {error}; "
        "put the object back as it was, or go on from the next anchor"
    )


def _merged_legs(run: ObjectStore, policy: str, start: int, version: int) -> list[PathStep]:
    """The merged changes that stand between two versions."""
    spans = pairwise(range(-(-start // MERGED_SPAN) * MERGED_SPAN, version + 1, MERGED_SPAN))

    def read_leg(span: tuple[int, int]) -> list[PathStep]:
        try:
            return [update_path.merged_leg(read_merged(run, policy, span[1], span[0]))]
        except (NotFoundError, CorruptError):
            return []  # only a shorter way

    with ThreadPoolExecutor(READ_THREADS) as pool:
        return [leg for found in pool.map(read_leg, spans) for leg in found]
