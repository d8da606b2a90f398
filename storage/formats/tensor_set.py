"""Folders of tensors and extra files, committed by a manifest that is created once, after the data.

    {write id}.model-00000.safetensors   {write id}.config.json   …   manifest.json

Names of data files begin with a write id, so that concurrent writers never overwrite each other's
files. Weights, checkpoints and base models are such folders; their manifests are defined in their
own modules.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from storage import plain_names
from storage.errors import AstraFlowError, ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import seal
from storage.formats.safetensors import digest, file_digest, from_safetensors, to_safetensors
from storage.records.weights import FileInfo, HostTensor, TensorInfo
from storage.store.object_store import ObjectStore, read_twice
from storage.store.ordered_map import ordered_map

FILE_BYTES_MAX = 2**28
"""Approximate size of a tensor file; a larger tensor has a file for itself."""
EXTRA_FILE_BYTES_MAX = 2**26
"""Size of an extra file, without tensors: configuration, tokenizer. All are read into memory."""
EXTRA_FILES_MAX = 64
"""Extra files of a folder."""
TRANSFERS_MAX = 4
"""Files that are transferred, and therefore in memory, at once."""
MANIFEST = "manifest.json"
MEMORY_BYTES = 2**30
"""Memory for writing, beside the tensors, as long as none of them is larger."""
_TENSOR_FILE = re.compile(r"(model|delta|whole)-\d{5,}\.safetensors")
"""Names of tensor files, which no extra file may have."""


@dataclass(frozen=True)
class Contents:
    """The tensors and files of a manifest, with their digests."""

    tensors: Mapping[str, TensorInfo]
    files: tuple[FileInfo, ...]


def write(
    folder: ObjectStore,
    tensors: Mapping[str, HostTensor],
    extra_files: Mapping[str, bytes],
    write_id: str,
    *,
    stem: str = "model",
    memory_bytes: int = MEMORY_BYTES,
) -> Contents:
    """Store the data files, several at once. Readers ignore them until a manifest lists them.

    Args:
        stem: tensor files are named `{stem}-00000.safetensors` and so on.

    Raises:
        ConfigError: an extra file has an invalid name (see `plain_names.py`) or that of a tensor
            file, is too large, or there are too many.
    """
    _check_extra_files(folder, extra_files)

    def store_part(
        numbered: tuple[int, Mapping[str, HostTensor]],
    ) -> tuple[FileInfo, dict[str, TensorInfo]]:
        number, part = numbered
        name = f"{write_id}.{stem}-{number:05d}.safetensors"
        file = _store_file(folder, name, to_safetensors(part))
        infos = {
            name: TensorInfo(
                dtype=tensor.dtype, shape=tensor.shape, digest=digest(tensor), file=file.name
            )
            for name, tensor in part.items()
        }
        return file, infos

    numbered_parts = enumerate(_parts(tensors, min(FILE_BYTES_MAX, memory_bytes // TRANSFERS_MAX)))
    with ordered_map(
        store_part,
        numbered_parts,
        threads=TRANSFERS_MAX,
        budget=memory_bytes,
        cost=lambda numbered: _num_bytes(numbered[1]),
    ) as stored:
        parts = list(stored)
    infos = {name: info for _, part in parts for name, info in part.items()}
    files = write_extra_files(folder, extra_files, write_id)
    return Contents(infos, tuple(file for file, _ in parts) + files)


def write_extra_files(
    folder: ObjectStore, extra_files: Mapping[str, bytes], write_id: str
) -> tuple[FileInfo, ...]:
    """Store files without tensors; ConfigError as for `write`."""
    _check_extra_files(folder, extra_files)

    def store_file(name: str, body: bytes) -> FileInfo:
        return _store_file(folder, f"{write_id}.{name}", body)

    with ThreadPoolExecutor(TRANSFERS_MAX) as pool:
        return tuple(pool.map(store_file, extra_files.keys(), extra_files.values()))


def _store_file(folder: ObjectStore, name: str, body: bytes) -> FileInfo:
    folder.put(name, body)
    return FileInfo(name, len(body), file_digest(body))


def _check_extra_files(folder: ObjectStore, extra_files: Mapping[str, bytes]) -> None:
    if reserved := [name for name in extra_files if _TENSOR_FILE.fullmatch(name)]:
        raise ConfigError(
            f"{reserved[0]} in {folder.url} would overwrite the tensors; store the file by another "
            "name"
        )
    for name in extra_files:
        if fault := plain_names.model_file_fault(name):
            raise ConfigError(
                f"{plain_names.quoted(name)} cannot be stored in {folder.url}: the name {fault}"
            )
    large = [name for name, body in extra_files.items() if len(body) > EXTRA_FILE_BYTES_MAX]
    if large or len(extra_files) > EXTRA_FILES_MAX:
        raise ConfigError(
            f"{len(extra_files)} files, of which {', '.join(large) or 'none'} have more than "
            f"{EXTRA_FILE_BYTES_MAX:,} bytes, "
            f"cannot be stored in {folder.url}: at most {EXTRA_FILES_MAX} smaller ones are read; "
            "remove files that do not belong to the model"
        )


def commit(folder: ObjectStore, contents: Contents, manifest: object) -> None:
    """Create the manifest.

    Raises ConflictError when another writer's manifest exists; the data files of `contents` are
    deleted then.
    """
    try:
        folder.create(MANIFEST, seal(manifest))
    except ConflictError:
        with suppress(AstraFlowError):  # files that cannot be deleted remain as orphans
            for file in contents.files:
                folder.delete(file.name)
        raise


def read_tensors(folder: ObjectStore, contents: Contents) -> dict[str, HostTensor]:
    """Read all tensors; the digests of files and of tensors are verified, else CorruptError."""
    infos_of = _infos_by_file(folder, contents)
    files = {info.name: info for info in contents.files}

    def fetch(name: str) -> dict[str, HostTensor]:
        return read_twice(lambda: _checked_tensors(folder, files[name], infos_of[name]))

    with ThreadPoolExecutor(TRANSFERS_MAX) as pool:
        tensors = {
            name: tensor
            for part in pool.map(fetch, sorted(infos_of))
            for name, tensor in part.items()
        }
    return {name: tensors[name] for name in contents.tensors}


def read_extra_files(folder: ObjectStore, contents: Contents) -> dict[str, bytes]:
    """Read and verify the extra files, by name without write id.

    Raises CorruptError for a wrong digest, a duplicate or invalid name, or a file that is too
    large.
    """
    tensor_files = {info.file for info in contents.tensors.values()}
    extra = [info for info in contents.files if info.name not in tensor_files]
    names = [plain_names.without_write_id(info.name) for info in extra]
    if len(extra) > EXTRA_FILES_MAX:
        raise CorruptError(
            f"{folder.url}/{MANIFEST} lists {len(extra)} files beside its tensors; at most "
            f"{EXTRA_FILES_MAX} are read"
        )
    for info in extra:
        if info.num_bytes > EXTRA_FILE_BYTES_MAX:
            raise CorruptError(
                f"{folder.url}/{MANIFEST} lists {plain_names.quoted(info.name)} with "
                f"{info.num_bytes:,} bytes; a file without "
                f"tensors has at most {EXTRA_FILE_BYTES_MAX:,}"
            )
    for name, count in Counter(names).items():
        if fault := plain_names.model_file_fault(name) or ("is listed twice" if count > 1 else ""):
            raise CorruptError(
                f"{folder.url}/{MANIFEST} lists the file {plain_names.quoted(name)}, whose name "
                f"{fault}"
            )
    with ThreadPoolExecutor(TRANSFERS_MAX) as pool:
        bodies = list(pool.map(lambda info: read_twice(lambda: read_file(folder, info)), extra))
    return dict(zip(names, bodies, strict=True))


def _parts(tensors: Mapping[str, HostTensor], bytes_max: int) -> Iterator[dict[str, HostTensor]]:
    """Divide the tensors, sorted by name, into files; without tensors, one empty file."""
    part: dict[str, HostTensor] = {}
    for name in sorted(tensors):
        if part and _num_bytes(part) + tensors[name].bits.nbytes > bytes_max:
            yield part
            part = {}
        part[name] = tensors[name]
    yield part


def _num_bytes(tensors: Mapping[str, HostTensor]) -> int:
    return sum(tensor.bits.nbytes for tensor in tensors.values())


def read_file(folder: ObjectStore, info: FileInfo) -> bytes:
    """Read and verify a file once; CorruptError when it differs from the manifest."""
    location = f"{folder.url}/{info.name}"
    try:
        body = folder.get(info.name, info.num_bytes)
    except NotFoundError:
        raise CorruptError(f"{location} is missing, though its manifest lists it") from None
    if len(body) != info.num_bytes or file_digest(body) != info.digest:
        raise CorruptError(
            f"{location} is not what its manifest lists: {len(body)} of {info.num_bytes} bytes, "
            "other digest"
        )
    return body


def check(folder: ObjectStore, contents: Contents) -> None:
    """Read every file, a few at a time; CorruptError for a file or a tensor that is missing or
    differs from the manifest.
    """
    infos_of = _infos_by_file(folder, contents)

    def check_file(info: FileInfo) -> None:
        if info.name in infos_of:
            _checked_tensors(folder, info, infos_of[info.name])
        else:
            read_file(folder, info)

    with ordered_map(
        lambda info: read_twice(lambda: check_file(info)),
        contents.files,
        threads=TRANSFERS_MAX,
        budget=MEMORY_BYTES,
        cost=lambda info: info.num_bytes,
    ) as checked:
        deque(checked, maxlen=0)


def _infos_by_file(
    folder: ObjectStore, contents: Contents
) -> Mapping[str, Mapping[str, TensorInfo]]:
    """Return the tensors of each file, by name; CorruptError for a file that is not listed."""
    infos_of: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in contents.tensors.items():
        infos_of[info.file][name] = info
    if missing := infos_of.keys() - {info.name for info in contents.files}:
        raise CorruptError(
            f"{folder.url}/manifest.json does not list its tensor files "
            f"{', '.join(sorted(missing))}"
        )
    return infos_of


def _checked_tensors(
    folder: ObjectStore, info: FileInfo, expected: Mapping[str, TensorInfo]
) -> dict[str, HostTensor]:
    location = f"{folder.url}/{info.name}"
    tensors = from_safetensors(read_file(folder, info))
    if tensors.keys() != expected.keys():
        raise CorruptError(
            f"{location} holds other tensors than its manifest lists: "
            f"{', '.join(sorted(tensors.keys() ^ expected.keys())[:3])}"
        )
    for name, tensor in tensors.items():
        if (tensor.dtype, tensor.shape, digest(tensor)) != (
            expected[name].dtype,
            expected[name].shape,
            expected[name].digest,
        ):
            raise CorruptError(f"the tensor {name} in {location} is not the one its manifest lists")
    return tensors
