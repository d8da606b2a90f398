"""The files of a delta: what of one version's tensors is not as in its base.

    {write id}.delta-00000.safetensors   a U8 tensor per changed tensor, its blob of blocks; __metadata__ names the codec
    {write id}.model-00000.safetensors   tensors that have nothing to come from in the base, as a whole

A tensor whose bits are those of some tensor of the base, by whatever name, needs no file at all; tied tensors share one entry.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from storage import deltas, tensor_folders
from storage.deltas import Change
from storage.errors import CorruptError
from storage.objects import ObjectStore
from storage.records import FileInfo, HostTensor, TensorInfo
from storage.second_reads import read_twice
from storage.tensor_folders import TRANSFERS_MAX, Contents
from storage.tensors import digest, file_digest, from_safetensors, to_safetensors

CODEC = {"format": "astraflow.delta", "codec": "steps", "version": "1"}
FILE_BYTES = 2**20
"""A file is closed when it has grown beyond this: several files cross an ocean faster than one."""


def write(
    folder: ObjectStore,
    base: Mapping[str, HostTensor],
    base_infos: Mapping[str, TensorInfo],
    tensors: Mapping[str, HostTensor],
    write_id: str,
    *,
    bytes_max: float,
    compact: bool,
    threads: int,
) -> Contents | None:
    """Store what turns `base` into `tensors`; nobody sees it as long as no manifest lists it.

    None, and nothing stays stored, as soon as it takes more than `bytes_max`.
    """
    origins = _origins(base_infos, tensors)
    own = {name: info for name, info in origins.items() if not info.entry}
    whole = {name: tensors[name] for name, info in own.items() if not info.source}
    changed = {name: info.source for name, info in own.items() if info.source and info.digest != base_infos[info.source].digest}

    def store(number: int, blobs: Mapping[str, bytes]) -> tuple[FileInfo, list[str]]:
        name = f"{write_id}.delta-{number:05d}.safetensors"
        body = to_safetensors({name: _as_tensor(blob) for name, blob in blobs.items()}, CODEC)
        folder.put(name, body)
        return FileInfo(name, len(body), file_digest(body)), list(blobs)

    num_bytes = sum(tensor.bits.nbytes for tensor in whole.values())
    parts: list[tuple[FileInfo, list[str]]] = []
    ahead: deque[Future[tuple[FileInfo, list[str]]]] = deque()
    with ThreadPoolExecutor(TRANSFERS_MAX) as pool:
        for number, blobs in enumerate(_parts(deltas.encode(base, tensors, changed, compact=compact, threads=threads))):
            num_bytes += sum(map(len, blobs.values()))
            if num_bytes > bytes_max:
                break
            if len(ahead) == TRANSFERS_MAX:  # no more is encoded than can be on its way; and a failure is heard of at once
                parts.append(ahead.popleft().result())
            ahead.append(pool.submit(store, number, blobs))
        parts.extend(put.result() for put in ahead)
    if num_bytes > bytes_max:
        for file, _ in parts:
            folder.delete(file.name)
        return None
    stored = tensor_folders.write(folder, whole, {}, write_id) if whole else Contents({}, ())
    file_of = {name: file.name for file, names in parts for name in names}
    file_of |= {name: info.file for name, info in stored.tensors.items()}
    infos = {name: replace(info, file=file_of.get(info.entry or name, "")) for name, info in origins.items()}
    return Contents(infos, stored.files + tuple(file for file, _ in parts))


def read(folder: ObjectStore, contents: Contents, base: Mapping[str, HostTensor], *, threads: int) -> dict[str, HostTensor]:
    """The tensors that the delta makes of `base`; unchanged ones are the base's own, unless those are parts of a file's memory.

    Only the files are verified here: whether the base was the right one, the tensors' digests tell. CorruptError after the
    second try at a file.
    """
    files = {info.name: info for info in contents.files}

    def fetch(name: str) -> dict[str, HostTensor]:
        if name not in files:
            raise CorruptError(f"{folder.url}/manifest.json does not list its file {name}")
        return read_twice(lambda: from_safetensors(tensor_folders.checked_file(folder, files[name])))

    names = sorted({info.file for info in contents.tensors.values() if info.file})
    with ThreadPoolExecutor(TRANSFERS_MAX) as pool:
        stored = dict(zip(names, pool.map(fetch, names), strict=True))
    made: dict[tuple[str, str], HostTensor] = {}
    tensors: dict[str, HostTensor] = {}
    for name, info in contents.tensors.items():
        entry = info.entry or name
        if info.file and (info.file, entry) not in made:
            made[info.file, entry] = _made(f"{folder.url}/{info.file}", stored[info.file].get(entry), info, base, threads)
        tensors[name] = made[info.file, entry] if info.file else _owned(_source(folder.url, info, base))
    return tensors


def _owned(tensor: HostTensor) -> HostTensor:
    """The tensor with memory of its own: a view would hold the whole file it was read from, all through the run."""
    if tensor.bits.base is None:
        return tensor
    return HostTensor(tensor.dtype, tensor.shape, tensor.bits.copy())


def _made(where: str, stored: HostTensor | None, info: TensorInfo, base: Mapping[str, HostTensor], threads: int) -> HostTensor:
    if stored is None:
        raise CorruptError(f"{where} does not hold a tensor that its manifest lists")
    if not info.source:
        return stored
    return deltas.apply(_source(where, info, base), stored.bits.reshape(-1).data, threads=threads)


def _source(where: str, info: TensorInfo, base: Mapping[str, HostTensor]) -> HostTensor:
    source = base.get(info.source)
    if source is None or (source.dtype, source.shape) != (info.dtype, info.shape):
        raise CorruptError(f"{where} needs the tensor {info.source!r}, {info.dtype} {list(info.shape)}, which its base lacks")
    return source


def _origins(base: Mapping[str, TensorInfo], tensors: Mapping[str, HostTensor]) -> dict[str, TensorInfo]:
    """Where each tensor comes from: the base's tensor of its name, else one of its very bits, else nowhere.

    Of tensors with the same bits, which are tied, only the first is stored; the others name its entry.
    """
    by_bits = {_kind(info): name for name, info in base.items()}
    first: dict[tuple[str, tuple[int, ...], str], str] = {}
    origins: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        plain = TensorInfo(tensor.dtype, tensor.shape, digest(tensor), "")
        twin = first.setdefault(_kind(plain), name)
        namesake = base.get(name)
        if twin != name:
            origins[name] = replace(plain, entry=twin, source=origins[twin].source)
        elif namesake and (namesake.dtype, namesake.shape) == (plain.dtype, plain.shape):
            origins[name] = replace(plain, source=name)
        else:
            origins[name] = replace(plain, source=by_bits.get(_kind(plain), ""))
    return origins


def _kind(info: TensorInfo) -> tuple[str, tuple[int, ...], str]:
    return info.dtype, info.shape, info.digest


def _parts(changes: Iterable[Change]) -> Iterator[dict[str, bytes]]:
    """The blobs by name, cut into files."""
    blobs: dict[str, bytes] = {}
    for change in changes:
        blobs[change.name] = change.blob
        if sum(map(len, blobs.values())) >= FILE_BYTES:
            yield blobs
            blobs = {}
    if blobs:
        yield blobs


def _as_tensor(blob: bytes) -> HostTensor:
    return HostTensor("U8", (len(blob),), np.frombuffer(blob, dtype=np.uint8))
