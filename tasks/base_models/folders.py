"""Read a model folder in the layout of the Hugging Face hub: `config.json`, tokenizer, safetensors.

Code in the folder is never run. Its files are copied into the store, which others can read, so
nothing outside the folder may be read: a symbolic link is refused, except in the hub's cache, where
a snapshot is a folder of links into the `blobs` of the same model:

    models--openai--x/snapshots/{revision}/config.json ──▶ models--openai--x/blobs/{digest}
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeAlias

from storage.errors import ConfigError, CorruptError
from storage.formats.json_objects import parse
from storage.formats.model_config import MODEL_CONFIG
from storage.formats.safetensors import from_safetensors
from storage.formats.tensor_set import EXTRA_FILE_BYTES_MAX
from storage.plain_names import MODEL_SUFFIXES, TENSOR_SUFFIX, fault, model_file_fault, quoted
from storage.records.types import Json
from storage.records.weights import HostTensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_PATTERNS = tuple(f"*{suffix}" for suffix in (TENSOR_SUFFIX, *MODEL_SUFFIXES))
REPORT_INTERVAL_S = 0.5

Progress: TypeAlias = Callable[[str, float], None]
"""Called with a sentence about the current work and its finished share."""


def read_model_folder(
    folder: Path, progress: Progress
) -> tuple[dict[str, HostTensor], dict[str, bytes]]:
    """Read the tensors, floating-point ones rounded to BF16, and the other files, by name.

    ConfigError when the folder is not a model, a file is missing or cannot be read, or the tensors
    do not fit in memory.
    """
    try:
        return _read(folder, progress)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise ConfigError(f"model.path: {folder} cannot be read: {error}") from error
    except MemoryError:
        raise ConfigError(
            f"model.path: the tensors of {folder} do not fit in the memory of this machine; start "
            "the base model on a larger one"
        ) from None


def _read(folder: Path, progress: Progress) -> tuple[dict[str, HostTensor], dict[str, bytes]]:
    if not folder.is_dir():
        raise ConfigError(
            f"model.path: {folder} is not a folder; name one that "
            "AutoModelForCausalLM.from_pretrained loads"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} has no config.json; name the folder that holds the model's files"
        )
    refuse_links(folder)
    files = {path.name: _bounded(path) for path in _other_files(folder)}
    tensors: dict[str, HostTensor] = {}
    names = _tensor_files(folder)
    for number, name in enumerate(names):
        progress(f"reading {name}", number / len(names))
        read = _read_tensors(folder / name)
        if twice := sorted(tensors.keys() & read.keys()):
            raise ConfigError(
                f"model.path: {folder / name} holds the tensor {quoted(twice[0])}, which another "
                "file of the folder holds, too; fetch the model again"
            )
        tensors |= read
    progress(f"read {folder.name}", 1.0)
    return tensors, files


def folder_config(folder: Path) -> Json:
    """Read `config.json` of a model folder. ConfigError when there is none that can be read."""
    path = folder / MODEL_CONFIG
    try:
        refuse_links(folder)
        return parse(_bounded(path), MODEL_CONFIG)
    except (OSError, RuntimeError, CorruptError) as error:  # RuntimeError: a loop of links
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from error


def snapshot(repository: str, progress: Progress, patterns: Sequence[str] = FILE_PATTERNS) -> Path:
    """Return the local folder of a hub model, after downloading the files of these patterns.

    ConfigError when that fails.
    """
    try:
        import httpx
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            "model.hub needs the package huggingface_hub: pip install huggingface_hub"
        ) from error
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(
            huggingface_hub.snapshot_download, repository, allow_patterns=list(patterns)
        )
        while not wait([fetching], REPORT_INTERVAL_S).done:
            progress(f"fetching {repository}", 0.0)
    try:
        return Path(fetching.result())
    except (
        OSError,
        ValueError,
        httpx.HTTPError,
    ) as error:  # no network, no such name, no permission, no space
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model.hub: {repository} cannot be fetched from the Hugging Face hub ({reason}); "
            "check its name and the network, or set model.path to a local folder"
        ) from error


def _other_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if (
            path.is_file()
            and _is_read(path)
            and path.suffix in MODEL_SUFFIXES
            and path.name != INDEX
        ):
            if reason := model_file_fault(path.name):
                raise ConfigError(
                    f"model.path: {quoted(path.name)} in {folder} {reason}; rename it, or remove it"
                )
            yield path


def _bounded(path: Path) -> bytes:
    """Read a file.

    ConfigError when it is larger than a file without tensors may be, and for a pipe, which has no
    end, or a device.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"model.path: {path} is not a regular file; replace it by the file")
    with path.open("rb") as file:
        body = file.read(EXTRA_FILE_BYTES_MAX + 1)
    if len(body) > EXTRA_FILE_BYTES_MAX:
        raise ConfigError(
            f"model.path: {path} is larger than {EXTRA_FILE_BYTES_MAX} bytes; remove files "
            "that are not part of the model"
        )
    return body


def refuse_links(folder: Path) -> None:
    """Raise ConfigError, naming the link, for a model file that is a symbolic link.

    Links of a snapshot in the hub's cache into the blobs of its model are allowed. The folder
    itself may be a link.
    """
    resolved = folder.resolve()
    is_snapshot = resolved.parent.name == "snapshots" and resolved.parent.parent.name.startswith(
        "models--"
    )
    blobs = resolved.parent.parent / "blobs"
    for path in sorted(resolved.iterdir()):
        if not _is_read(path) or not path.is_symlink():
            continue
        if not is_snapshot or os.path.dirname(os.path.realpath(path)) != str(blobs):
            raise ConfigError(
                f"model.path: {folder / path.name} is a symbolic link to {os.readlink(path)}; "
                "replace it by the file (cp -L copies a folder and replaces its links)"
            )


def _is_read(path: Path) -> bool:
    """Return whether a file can be part of the model; hidden files (`._config.json`) cannot."""
    return path.suffix in (TENSOR_SUFFIX, *MODEL_SUFFIXES) and not path.name.startswith(".")


def _tensor_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files: the single one, or those in the index."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        raise ConfigError(
            f"model.path: {folder} holds neither {WEIGHTS} nor {INDEX}; "
            "save the model with save_pretrained(..., safe_serialization=True)"
        )
    try:
        names = sorted(set(map(str, parse(_bounded(index), INDEX)["weight_map"].values())))
    except (CorruptError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"model.path: {index} is not an index of safetensors files; fetch the model again"
        ) from error
    for name in names:
        if fault(name) or not name.endswith(TENSOR_SUFFIX) or not (folder / name).is_file():
            raise ConfigError(
                f"model.path: {index} lists {quoted(name)}, which is not in the folder; fetch the "
                "model again"
            )
    return names


def _read_tensors(path: Path) -> dict[str, HostTensor]:
    try:
        tensors = from_safetensors(path.read_bytes())
    except CorruptError as error:
        raise ConfigError(
            f"model.path: {path} cannot be read ({error}); fetch the model again"
        ) from error
    return {name: _as_bf16(tensor) for name, tensor in tensors.items()}


def _as_bf16(tensor: HostTensor) -> HostTensor:
    from trainer.engines.torch.host_tensors import to_host, to_torch

    return to_host(to_torch(tensor), "BF16") if tensor.dtype in ("F64", "F32", "F16") else tensor
