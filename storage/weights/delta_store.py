"""The files of a delta: what of one version's tensors is not as in its base.

    {write id}.delta-00000.safetensors   a U8 tensor per changed tensor, its blob of blocks; __metadata__ names the codec
    {write id}.whole-00000.safetensors   tensors that have nothing to come from in the base, as a whole

A tensor whose bits are those of some tensor of the base, by whatever name, needs no file at all;
tied tensors share one entry. What is read of an anchor has the same form: there every tensor is
there as a whole.
"""

import os
import reprlib
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from storage.errors import CorruptError
from storage.formats import tensor_set
from storage.formats.safetensors import (
    Digest,
    digest,
    file_digest,
    from_safetensors,
    read_metadata,
    to_safetensors,
)
from storage.formats.safetensors import num_bytes as bytes_of
from storage.formats.tensor_set import Contents
from storage.records.weights import FileInfo, HostTensor, TensorInfo
from storage.store.object_store import ObjectStore, read_twice
from storage.store.ordered_map import ordered_map
from storage.weights.codec import deltas
from storage.weights.codec.delta_numpy import Bits
from storage.weights.codec.deltas import BLOCK_BYTES, Change

CODEC = {"format": "astraflow.delta", "codec": "steps", "version": "1"}
FILE_BYTES_MIN, FILE_BYTES_MAX = 2**18, 2**22
FILES_PER_MODEL = 4096
"""A file is closed when it has grown beyond this part of the model: a step of a hundredth of the
weights then lies in some twenty-five files, which cross an ocean faster than one.
"""
TRANSFERS_MAX = 32
"""Files of a delta that are on their way at once."""


GROWTH_MAX = 4
"""The tensors that changes are made into take at most so many times the bytes of the base's: a
manifest of a few lines could name any number of changes, each of a whole tensor.
"""

Entry: TypeAlias = tuple[str, str]
"""File, and name in it."""
Room: TypeAlias = dict[tuple[str, tuple[int, ...]], list[Bits]]
"""dtype and shape → arrays that may be written over."""


@dataclass(frozen=True)
class Written:
    """A stored delta."""

    contents: Contents
    num_changed: int
    """Elements that differ; those of whole tensors count too."""
    encode_s: float
    """Until the last change was encoded. What had been encoded was on its way by then."""


def write(
    folder: ObjectStore,
    base: Mapping[str, HostTensor],
    base_infos: Mapping[str, TensorInfo],
    tensors: Mapping[str, HostTensor],
    write_id: str,
    *,
    bytes_max: float,
    memory_bytes: int,
) -> Written | None:
    """Store what turns `base` into `tensors`; nobody sees it as long as no manifest lists it.

    None, and nothing stays stored, as soon as it takes more than `bytes_max`. Beside the two
    versions it takes about `memory_bytes`, half of them for encoding, half for files under way.
    """
    infos = _origins(base_infos, tensors)
    own = {name: info for name, info in infos.items() if not info.entry}
    whole = {name: tensors[name] for name, info in own.items() if not info.source}
    changed = {
        name: info.source
        for name, info in own.items()
        if info.source and info.digest != base_infos[info.source].digest
    }
    threads = max(1, min(os.cpu_count() or 1, memory_bytes // 2 // BLOCK_BYTES))
    changes = deltas.encode(base, tensors, changed, threads=threads)
    return store(
        folder, infos, changes, whole, write_id, bytes_max=bytes_max, memory_bytes=memory_bytes // 2
    )


def store(
    folder: ObjectStore,
    infos: Mapping[str, TensorInfo],
    changes: Iterable[Change],
    whole: Mapping[str, HostTensor],
    write_id: str,
    *,
    bytes_max: float,
    memory_bytes: int,
) -> Written | None:
    """Store `changes` as they come, and the tensors that are there as a `whole`; `infos` lack but
    the files.
    """
    start_s = time.monotonic()
    model_bytes = sum(np.prod(info.shape, dtype=int) for info in infos.values())
    file_bytes = min(max(model_bytes // FILES_PER_MODEL, FILE_BYTES_MIN), FILE_BYTES_MAX)
    num_bytes = sum(tensor.bits.nbytes for tensor in whole.values())
    num_changed = sum(tensor.bits.size for tensor in whole.values())
    encode_s = 0.0

    def bodies() -> Iterator[tuple[str, bytes, list[str]]]:
        nonlocal num_bytes, num_changed, encode_s
        for number, part in enumerate(_parts(changes, file_bytes)):
            num_bytes += sum(len(change.blob) for change in part)
            num_changed += sum(change.num_changed for change in part)
            if num_bytes > bytes_max:
                return
            blobs = {change.name: _as_tensor(change.blob) for change in part if change.blob}
            if blobs:
                yield (
                    f"{write_id}.delta-{number:05d}.safetensors",
                    to_safetensors(blobs, CODEC),
                    list(blobs),
                )
        encode_s = time.monotonic() - start_s

    def put(one: tuple[str, bytes, list[str]]) -> tuple[FileInfo, list[str]]:
        name, body, entries = one
        folder.put(name, body)
        return FileInfo(name, len(body), file_digest(body)), entries

    parts = list(
        ordered_map(
            put, bodies(), threads=TRANSFERS_MAX, budget=memory_bytes, cost=lambda one: len(one[1])
        )
    )
    if num_bytes > bytes_max:
        for file, _ in parts:
            folder.delete(file.name)
        return None
    stored = Contents({}, ())
    if whole:
        stored = tensor_set.write(
            folder, whole, {}, write_id, stem="whole", memory_bytes=memory_bytes
        )
    file_of = {name: file.name for file, names in parts for name in names}
    file_of |= {name: info.file for name, info in stored.tensors.items()}
    placed = {
        name: replace(info, file=file_of.get(info.entry or name, ""))
        for name, info in infos.items()
    }
    return Written(
        Contents(placed, stored.files + tuple(file for file, _ in parts)), num_changed, encode_s
    )


def needed(
    where: str, infos: Mapping[str, TensorInfo], files: Iterable[FileInfo]
) -> list[FileInfo]:
    """The files that the tensors come from, in order; CorruptError when one is not listed."""
    listed = {file.name: file for file in files}
    names = sorted({info.file for info in infos.values() if info.file})
    if missing := [name for name in names if name not in listed]:
        raise CorruptError(f"{where} does not list its tensor files {', '.join(missing)}")
    return [listed[name] for name in names]


def fetch(folder: ObjectStore, file: FileInfo) -> dict[str, HostTensor]:
    """The entries of a file, verified; CorruptError after the second try, and for changes of a
    codec that is not known.
    """

    def read() -> dict[str, HostTensor]:
        body = tensor_set.read_file(folder, file)
        found = read_metadata(body)
        if found.get("format") == CODEC["format"] and any(
            found.get(name) != value for name, value in CODEC.items()
        ):
            codec, version = (reprlib.repr(found.get(name)) for name in ("codec", "version"))
            raise CorruptError(
                f"{folder.url}/{file.name} holds changes of the codec {codec}, version {version}; "
                "this release reads "
                f"{CODEC['codec']} {CODEC['version']}: use the release that wrote it"
            )
        return from_safetensors(body)

    return read_twice(read)


def apply(
    where: str,
    infos: Mapping[str, TensorInfo],
    stored: Iterable[tuple[FileInfo, Mapping[str, HostTensor]]],
    base: Mapping[str, HostTensor],
    own: Collection[int],
    room: Room,
    digested: dict[str, str] | None = None,
) -> dict[str, HostTensor]:
    """The tensors that the files, which are taken one after the other, make of `base`.

    Unchanged tensors are the base's own, unless those are parts of a file's memory. Tensors of the
    base whose `id` is among `own` are nobody else's: they may be changed in place. The others take
    up `room`. Whether the base was the right one, the tensors' digests tell; those of tensors that
    were changed here are laid into `digested`, by name.
    """
    threads = os.cpu_count() or 1
    entries = {name: (info.file, info.entry or name) for name, info in infos.items()}
    first = {entry: name for name, entry in reversed(entries.items())}
    uses = Counter(
        id(base.get(info.source))
        for name, info in infos.items()
        if not info.file or first[entries[name]] == name
    )
    by_file: dict[str, list[Entry]] = defaultdict(list)
    for entry in first:
        by_file[entry[0]].append(entry)
    made_bytes = sum(
        bytes_of(infos[name]) for entry, name in first.items() if entry[0] and infos[name].source
    )
    base_bytes = sum(
        bits.nbytes for bits in {id(tensor.bits): tensor.bits for tensor in base.values()}.values()
    )
    if made_bytes > GROWTH_MAX * base_bytes:
        raise CorruptError(
            f"{where} makes {made_bytes} bytes of tensors of a base of {base_bytes}: more than "
            f"{GROWTH_MAX} times"
        )

    def make(one: tuple[Entry, HostTensor | None]) -> tuple[Entry, HostTensor, str]:
        entry, found = one
        info, place = infos[first[entry]], f"{where}/{entry[0]}"
        if not info.source:
            return entry, _whole(place, found, info), ""
        source = _source(place, info, base)
        alone = id(source) in own and uses[id(source)] == 1
        made_digest = Digest()
        stored_change = _stored(place, found)
        try:
            tensor = deltas.apply(
                source,
                blob_of(stored_change),
                in_place=alone,
                into=None if alone else _taken(room, source),
                tell=_nobody if digested is None else made_digest.add,
            )
        except CorruptError as error:
            raise CorruptError(f"{place}, the change of {first[entry]}: {error}") from error
        return entry, tensor, str(made_digest)

    given = (
        (entry, contents.get(entry[1])) for file, contents in stored for entry in by_file[file.name]
    )
    made: dict[Entry, HostTensor] = {}
    digests: dict[Entry, str] = {}
    for entry, tensor, told in ordered_map(make, given, threads=threads, budget=2 * threads):
        made[entry], digests[entry] = tensor, told
    if digested is not None:
        digested |= {
            name: digests[entries[name]]
            for name, info in infos.items()
            if info.file and info.source
        }
    sources = {name: _source(where, info, base) for name, info in infos.items() if not info.file}
    kept = {
        key: _owned(source)
        for key, source in {id(source): source for source in sources.values()}.items()
    }
    return {
        name: made[entries[name]] if info.file else kept[id(sources[name])]
        for name, info in infos.items()
    }


def _nobody(new: Bits) -> None:
    """Whom it is told when nobody asks for digests."""


def room(tensors: Iterable[HostTensor]) -> Room:
    """The memory of tensors that nobody uses any more, by what fits into it; none of parts of a
    file's memory.
    """
    found: Room = {}
    for tensor in {id(tensor.bits): tensor for tensor in tensors}.values():
        if (
            tensor.bits.flags.writeable
            and tensor.bits.flags.c_contiguous
            and tensor.bits.base is None
        ):
            found.setdefault((tensor.dtype, tensor.shape), []).append(tensor.bits)
    return found


def _taken(room: Room, like: HostTensor) -> Bits | None:
    with suppress(KeyError, IndexError):  # other threads take from it too
        return room[like.dtype, like.shape].pop()
    return None


def _stored(place: str, stored: HostTensor | None) -> HostTensor:
    if stored is None:
        raise CorruptError(f"{place} does not hold a tensor that its manifest lists")
    return stored


def blob_of(stored: HostTensor) -> memoryview:
    """The change that an entry of a file holds; CorruptError when the entry is of another form."""
    if stored.dtype != "U8" or len(stored.shape) != 1:
        raise CorruptError(
            f"the entry is {stored.dtype} {list(stored.shape)}; a change is bytes (U8 of one "
            "dimension)"
        )
    return stored.bits.data


def _whole(place: str, stored: HostTensor | None, info: TensorInfo) -> HostTensor:
    found = _stored(place, stored)
    if (found.dtype, found.shape) != (info.dtype, info.shape):
        raise CorruptError(
            f"{place} holds a tensor of another form than its manifest lists: {found.dtype} "
            f"{found.shape}"
        )
    return found


def _owned(tensor: HostTensor) -> HostTensor:
    """The tensor with memory of its own: a view would hold the whole file it was read from, all
    through the run.
    """
    if tensor.bits.base is None:
        return tensor
    return HostTensor(tensor.dtype, tensor.shape, tensor.bits.copy())


def _source(place: str, info: TensorInfo, base: Mapping[str, HostTensor]) -> HostTensor:
    source = base.get(info.source)
    if source is None or (source.dtype, source.shape) != (info.dtype, info.shape):
        raise CorruptError(
            f"{place} needs the tensor {info.source!r}, {info.dtype} {list(info.shape)}, which its "
            "base lacks"
        )
    return source


def _origins(
    base: Mapping[str, TensorInfo], tensors: Mapping[str, HostTensor]
) -> dict[str, TensorInfo]:
    """Where each tensor comes from: one of the base's with its very bits (its namesake, if that has
    them), else its namesake, else nowhere.

    Of tensors with the same bits, which are tied, only the first is stored; the others name its
    entry.
    """
    by_bits = {_kind(info): name for name, info in base.items()}
    first: dict[tuple[str, tuple[int, ...], str], str] = {}
    origins: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        plain = TensorInfo(dtype=tensor.dtype, shape=tensor.shape, digest=digest(tensor), file="")
        twin = first.setdefault(_kind(plain), name)
        namesake = base.get(name)
        if twin != name:
            origins[name] = replace(plain, entry=twin, source=origins[twin].source)
        elif _kind(plain) in by_bits:
            same = namesake is not None and _kind(namesake) == _kind(plain)
            origins[name] = replace(plain, source=name if same else by_bits[_kind(plain)])
        elif namesake and (namesake.dtype, namesake.shape) == (plain.dtype, plain.shape):
            origins[name] = replace(plain, source=name)
        else:
            origins[name] = plain
    return origins


def _kind(info: TensorInfo) -> tuple[str, tuple[int, ...], str]:
    return info.dtype, info.shape, info.digest


def _parts(changes: Iterable[Change], file_bytes: int) -> Iterator[list[Change]]:
    """The changes, cut into files."""
    part: list[Change] = []
    for change in changes:
        part.append(change)
        if sum(len(one.blob) for one in part) >= file_bytes:
            yield part
            part = []
    if part:
        yield part


def _as_tensor(blob: bytes) -> HostTensor:
    return HostTensor("U8", (len(blob),), np.frombuffer(blob, dtype=np.uint8))
