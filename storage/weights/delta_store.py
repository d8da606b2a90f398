"""The files of a stored delta, written and read.

    {write id}.delta-00000.safetensors   a U8 tensor for each changed tensor: its blob of blocks
    {write id}.whole-00000.safetensors   tensors that have no source in the base, as a whole

The `__metadata__` of a delta file names the codec. A tensor that is bit-equal to some tensor of the
base, of whatever name, needs no file; tied tensors share one entry. An anchor has the same form,
with whole tensors only. `delta_applier` applies what is read here.
"""

import reprlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from storage.errors import CorruptError
from storage.formats import tensor_set
from storage.formats.safetensors import (
    digest,
    file_digest,
    from_safetensors,
    read_metadata,
    to_safetensors,
)
from storage.formats.tensor_set import Contents
from storage.machine.cpus import num_cpus
from storage.records.weights import FileInfo, HostTensor, TensorInfo
from storage.store.object_store import ObjectStore, read_twice
from storage.store.ordered_map import ordered_map
from storage.weights.codec import deltas
from storage.weights.codec.deltas import BLOCK_BYTES, Change

CODEC = {"format": "astraflow.delta", "codec": "steps", "version": "1"}
FILE_BYTES_MIN, FILE_BYTES_MAX = 2**18, 2**22
FILES_PER_MODEL = 4096
"""A file is closed once it is larger than the model divided by this: a training step that changes a
hundredth of the weights then takes about 25 files, which cross an ocean faster than one.
"""
TRANSFERS_MAX = 32
"""Files of a delta that are transferred at once."""


@dataclass(frozen=True)
class WrittenDelta:
    """A delta that was stored."""

    contents: Contents
    num_changed: int
    """Elements that differ, those of whole tensors included."""
    encode_s: float
    """Seconds until the last change was encoded. Files are uploaded meanwhile."""


def write(
    folder: ObjectStore,
    base: Mapping[str, HostTensor],
    base_infos: Mapping[str, TensorInfo],
    tensors: Mapping[str, HostTensor],
    write_id: str,
    *,
    bytes_max: float,
    memory_bytes: int,
) -> WrittenDelta | None:
    """Store the files of the delta from `base` to `tensors`, which readers ignore until a manifest
    lists them.

    Args:
        base_infos: the entries of the base's manifest.
        bytes_max: a delta that takes more is given up: its files are deleted, None is returned.
        memory_bytes: for encoding (half) and for files that are being uploaded (half).
    """
    infos = _origins(base_infos, tensors)
    untied = {name: info for name, info in infos.items() if not info.entry}
    whole = {name: tensors[name] for name, info in untied.items() if not info.source}
    changed = {
        name: info.source
        for name, info in untied.items()
        if info.source and info.digest != base_infos[info.source].digest
    }
    threads = max(1, min(num_cpus(), memory_bytes // 2 // BLOCK_BYTES))
    changes = deltas.encode(base, tensors, changed, threads=threads)
    return write_changes(
        folder, infos, changes, whole, write_id, bytes_max=bytes_max, memory_bytes=memory_bytes // 2
    )


def write_changes(
    folder: ObjectStore,
    infos: Mapping[str, TensorInfo],
    changes: Iterable[Change],
    whole: Mapping[str, HostTensor],
    write_id: str,
    *,
    bytes_max: float,
    memory_bytes: int,
) -> WrittenDelta | None:
    """Store encoded changes while further ones are being encoded, then the whole tensors.

    Args:
        infos: the entries of all tensors, `file` still empty.
        bytes_max, memory_bytes: as for `write`; the memory is for files that are being uploaded.
    """
    start_s = time.monotonic()
    model_bytes = sum(np.prod(info.shape, dtype=int) for info in infos.values())
    file_bytes = min(max(model_bytes // FILES_PER_MODEL, FILE_BYTES_MIN), FILE_BYTES_MAX)
    num_bytes = sum(tensor.bits.nbytes for tensor in whole.values())
    num_changed = sum(tensor.bits.size for tensor in whole.values())
    encode_s = 0.0

    def bodies() -> Iterator[tuple[str, bytes, list[str]]]:
        nonlocal num_bytes, num_changed, encode_s
        for number, part in enumerate(_cut_into_files(changes, file_bytes)):
            num_bytes += sum(len(change.blob) for change in part)
            num_changed += sum(change.num_changed for change in part)
            if num_bytes > bytes_max:
                return
            blobs = {change.name: _as_tensor(change.blob) for change in part if change.blob}
            if blobs:
                file_name = f"{write_id}.delta-{number:05d}.safetensors"
                yield file_name, to_safetensors(blobs, CODEC), list(blobs)
        encode_s = time.monotonic() - start_s

    def upload(file: tuple[str, bytes, list[str]]) -> tuple[FileInfo, list[str]]:
        name, body, entries = file
        folder.put(name, body)
        return FileInfo(name, len(body), file_digest(body)), entries

    with ordered_map(
        upload,
        bodies(),
        threads=TRANSFERS_MAX,
        budget=memory_bytes,
        cost=lambda file: len(file[1]),
    ) as results:
        uploaded = list(results)
    if num_bytes > bytes_max:
        for file, _ in uploaded:
            folder.delete(file.name)
        return None
    stored = Contents({}, ())
    if whole:
        stored = tensor_set.write(
            folder, whole, {}, write_id, stem="whole", memory_bytes=memory_bytes
        )
    file_of = {name: file.name for file, names in uploaded for name in names}
    file_of |= {name: info.file for name, info in stored.tensors.items()}
    placed = {
        name: replace(info, file=file_of.get(info.entry or name, ""))
        for name, info in infos.items()
    }
    contents = Contents(placed, stored.files + tuple(file for file, _ in uploaded))
    return WrittenDelta(contents, num_changed, encode_s)


def tensor_files(
    where: str, infos: Mapping[str, TensorInfo], files: Iterable[FileInfo]
) -> list[FileInfo]:
    """Return those of `files` that hold tensors, sorted by name.

    Raises:
        CorruptError: a tensor's file is not among `files`.
    """
    listed = {file.name: file for file in files}
    names = sorted({info.file for info in infos.values() if info.file})
    if missing := [name for name in names if name not in listed]:
        raise CorruptError(f"{where} does not list its tensor files {', '.join(missing)}")
    return [listed[name] for name in names]


def fetch(folder: ObjectStore, file: FileInfo) -> dict[str, HostTensor]:
    """Read the entries of a file and verify its digest.

    Raises:
        CorruptError: the file is damaged at the second read, too, or its codec is unknown.
    """

    def read() -> dict[str, HostTensor]:
        body = tensor_set.read_file(folder, file)
        metadata = read_metadata(body)
        if metadata.get("format") == CODEC["format"] and any(
            metadata.get(name) != value for name, value in CODEC.items()
        ):
            codec, version = (reprlib.repr(metadata.get(name)) for name in ("codec", "version"))
            raise CorruptError(
                f"{folder.url}/{file.name} holds changes of the codec {codec}, version {version}; "
                f"this release reads {CODEC['codec']} {CODEC['version']}: use the release that "
                "wrote it"
            )
        return from_safetensors(body)

    return read_twice(read)


def blob_of(entry: HostTensor) -> memoryview:
    """Return the change that an entry of a file holds; CorruptError for one of another form."""
    if entry.dtype != "U8" or len(entry.shape) != 1:
        raise CorruptError(
            f"the entry is {entry.dtype} {list(entry.shape)}; a change is bytes (U8 of one "
            "dimension)"
        )
    return entry.bits.data


def _origins(
    base: Mapping[str, TensorInfo], tensors: Mapping[str, HostTensor]
) -> dict[str, TensorInfo]:
    """Find the source of each tensor: a tensor of the base with the same bits (if possible of the
    same name), else the tensor of the same name, else none.

    Only the first of several tied tensors, which have the same bits, is stored; the others name its
    entry.
    """
    by_key = {_key(info): name for name, info in base.items()}
    first: dict[tuple[str, tuple[int, ...], str], str] = {}
    origins: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        plain = TensorInfo(dtype=tensor.dtype, shape=tensor.shape, digest=digest(tensor), file="")
        twin = first.setdefault(_key(plain), name)
        namesake = base.get(name)
        if twin != name:
            origins[name] = replace(plain, entry=twin, source=origins[twin].source)
        elif _key(plain) in by_key:
            same = namesake is not None and _key(namesake) == _key(plain)
            origins[name] = replace(plain, source=name if same else by_key[_key(plain)])
        elif namesake and (namesake.dtype, namesake.shape) == (plain.dtype, plain.shape):
            origins[name] = replace(plain, source=name)
        else:
            origins[name] = plain
    return origins


def _key(info: TensorInfo) -> tuple[str, tuple[int, ...], str]:
    """Equal for tensors with the same bits."""
    return info.dtype, info.shape, info.digest


def _cut_into_files(changes: Iterable[Change], file_bytes: int) -> Iterator[list[Change]]:
    """Group changes into files of at least `file_bytes`, except the last one."""
    part: list[Change] = []
    num_bytes = 0
    for change in changes:
        part.append(change)
        num_bytes += len(change.blob)
        if num_bytes >= file_bytes:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def _as_tensor(blob: bytes) -> HostTensor:
    return HostTensor("U8", (len(blob),), np.frombuffer(blob, dtype=np.uint8))
