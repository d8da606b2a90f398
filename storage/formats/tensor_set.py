"""A folder of tensors and files that becomes real with its manifest: data first, `manifest.json`
last, created once.

    {write id}.model-00000.safetensors   {write id}.config.json   …   manifest.json

Names of data files hold the write id, so that rival writers never touch each other's files; the
manifest decides whose count. Weights, checkpoints and base models are such folders; what their
manifests say stands in their own modules.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
"""Tensors are spread over files of about this size; a larger tensor gets a file of its own."""
EXTRA_FILE_BYTES_MAX = 2**26
"""Of a file that holds no tensors: configuration, tokenizer. All of them are read into memory at
once.
"""
EXTRA_FILES_MAX = 64
"""Files of a folder that hold no tensors."""
TRANSFERS_MAX = 4
"""Files that are moved, and therefore held in memory, at once."""
MANIFEST = "manifest.json"
MEMORY_BYTES = 2**30
"""What writing takes of memory beside the tensors, as long as none of them is larger."""
_TENSOR_FILE = re.compile(r"(model|delta|whole)-\d{5,}\.safetensors")
"""Names that tensor files get here; no other file of a folder may bear one."""


@dataclass(frozen=True)
class Contents:
    """What a manifest lists: every tensor with its digest and file, and every file with its
    digest.
    """

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
    """Store the data files, several at once; nobody sees them as long as no manifest lists them.
    Those of tensors are called `{stem}-00000.safetensors` and so on.

    ConfigError when one of `extra_files` bears the name of a tensor file, which it would overwrite,
    or one that no file beside a model's tensors may have (`plain_names.py`).
    """
    if reserved := [name for name in extra_files if _TENSOR_FILE.fullmatch(name)]:
        raise ConfigError(
            f"{reserved[0]} in {folder.url} would overwrite the tensors; store the file by another "
            "name"
        )
    for name in extra_files:
        if wrong := plain_names.model_file_fault(name):
            raise ConfigError(
                f"{plain_names.quoted(name)} cannot be stored in {folder.url}: the name {wrong}"
            )
    large = [name for name, body in extra_files.items() if len(body) > EXTRA_FILE_BYTES_MAX]
    if large or len(extra_files) > EXTRA_FILES_MAX:
        raise ConfigError(
            f"{len(extra_files)} files, of which {', '.join(large) or 'none'} have more than "
            f"{EXTRA_FILE_BYTES_MAX:,} bytes, "
            f"cannot be stored in {folder.url}: at most {EXTRA_FILES_MAX} smaller ones are read; "
            "leave out what is no part"
        )

    def store_file(name: str, body: bytes) -> FileInfo:
        folder.put(f"{write_id}.{name}", body)
        return FileInfo(f"{write_id}.{name}", len(body), file_digest(body))

    def store_part(
        numbered: tuple[int, Mapping[str, HostTensor]],
    ) -> tuple[FileInfo, dict[str, TensorInfo]]:
        number, part = numbered
        file = store_file(f"{stem}-{number:05d}.safetensors", to_safetensors(part))
        infos = {
            name: TensorInfo(
                dtype=tensor.dtype, shape=tensor.shape, digest=digest(tensor), file=file.name
            )
            for name, tensor in part.items()
        }
        return file, infos

    cut = enumerate(_parts(tensors, min(FILE_BYTES_MAX, memory_bytes // TRANSFERS_MAX)))
    parts = list(
        ordered_map(
            store_part,
            cut,
            threads=TRANSFERS_MAX,
            budget=memory_bytes,
            cost=lambda one: _num_bytes(one[1]),
        )
    )
    with ThreadPoolExecutor(TRANSFERS_MAX) as pool:
        files = list(pool.map(store_file, extra_files.keys(), extra_files.values()))
    infos = {name: info for _, part in parts for name, info in part.items()}
    return Contents(infos, tuple(file for file, _ in parts) + tuple(files))


def commit(folder: ObjectStore, contents: Contents, manifest: object) -> None:
    """Make the folder real. ConflictError when a rival's manifest stands; the own data files are
    gone then.
    """
    try:
        folder.create(MANIFEST, seal(manifest))
    except ConflictError:
        with suppress(
            AstraFlowError
        ):  # what cannot be deleted stays as the rest of a writer that lost
            for file in contents.files:
                folder.delete(file.name)
        raise


def read_tensors(folder: ObjectStore, contents: Contents) -> dict[str, HostTensor]:
    """Every tensor, its own digest and its file's digest verified. CorruptError after the second
    try at a file.
    """
    names = {info.file for info in contents.tensors.values()}
    files = {info.name: info for info in contents.files}
    if missing := names - files.keys():
        raise CorruptError(
            f"{folder.url}/manifest.json does not list its tensor files "
            f"{', '.join(sorted(missing))}"
        )

    def fetch(name: str) -> dict[str, HostTensor]:
        return read_twice(lambda: _checked_tensors(folder, files[name], contents.tensors))

    with ThreadPoolExecutor(TRANSFERS_MAX) as pool:
        found = {
            name: tensor for part in pool.map(fetch, sorted(names)) for name, tensor in part.items()
        }
    return {name: found[name] for name in contents.tensors}


def read_extra_files(folder: ObjectStore, contents: Contents) -> dict[str, bytes]:
    """Every file that holds no tensors, verified, by its name without the write id. CorruptError
    for two of one name, and for a file of a kind that does not belong beside a model's tensors.
    """
    holders = {info.file for info in contents.tensors.values()}
    others = [info for info in contents.files if info.name not in holders]
    names = [plain_names.without_write_id(info.name) for info in others]
    if len(others) > EXTRA_FILES_MAX:
        raise CorruptError(
            f"{folder.url}/{MANIFEST} lists {len(others)} files beside its tensors; at most "
            f"{EXTRA_FILES_MAX} are read"
        )
    for info in others:
        if info.num_bytes > EXTRA_FILE_BYTES_MAX:
            raise CorruptError(
                f"{folder.url}/{MANIFEST} lists {plain_names.quoted(info.name)} with "
                f"{info.num_bytes:,} bytes; a file without "
                f"tensors has at most {EXTRA_FILE_BYTES_MAX:,}"
            )
    for name, count in Counter(names).items():
        if wrong := plain_names.model_file_fault(name) or ("is listed twice" if count > 1 else ""):
            raise CorruptError(
                f"{folder.url}/{MANIFEST} lists the file {plain_names.quoted(name)}, whose name "
                f"{wrong}"
            )
    with ThreadPoolExecutor(TRANSFERS_MAX) as pool:
        bodies = list(pool.map(lambda info: read_twice(lambda: read_file(folder, info)), others))
    return dict(zip(names, bodies, strict=True))


def _parts(tensors: Mapping[str, HostTensor], bytes_max: int) -> Iterator[dict[str, HostTensor]]:
    """The tensors in the order of their names, cut into files; one empty file when there are
    none.
    """
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
    """One fetch of a file; CorruptError when it is not the one the manifest lists."""
    where = f"{folder.url}/{info.name}"
    try:
        body = folder.get(info.name, info.num_bytes)
    except NotFoundError:
        raise CorruptError(f"{where} is missing, though its manifest lists it") from None
    if len(body) != info.num_bytes or file_digest(body) != info.digest:
        raise CorruptError(
            f"{where} is not what its manifest lists: {len(body)} of {info.num_bytes} bytes, other "
            "digest"
        )
    return body


def _checked_tensors(
    folder: ObjectStore, info: FileInfo, infos: Mapping[str, TensorInfo]
) -> dict[str, HostTensor]:
    where = f"{folder.url}/{info.name}"
    tensors = from_safetensors(read_file(folder, info))
    expected = {name: tensor for name, tensor in infos.items() if tensor.file == info.name}
    if tensors.keys() != expected.keys():
        raise CorruptError(
            f"{where} holds other tensors than its manifest lists: "
            f"{_first(tensors.keys() ^ expected.keys())}"
        )
    for name, tensor in tensors.items():
        if (tensor.dtype, tensor.shape, digest(tensor)) != (
            expected[name].dtype,
            expected[name].shape,
            expected[name].digest,
        ):
            raise CorruptError(f"the tensor {name} in {where} is not the one its manifest lists")
    return tensors


def _first(names: Sequence[str] | set[str]) -> str:
    return ", ".join(sorted(names)[:3])
