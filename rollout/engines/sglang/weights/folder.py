"""Weights as a folder of safetensors files in memory, from which a server on this machine reads."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollout.engines.engine import EngineFailedError
from storage.formats.safetensors import to_safetensors
from storage.machine.temporary_folders import temporary_folder
from storage.records.weights import HostTensor
from storage.written_files import write_inside

MEMORY_FOLDER = Path("/dev/shm")
FILE_BYTES_MAX = 2**30
"""Tensors are written in files of about this size, so that no second copy of a model is made."""


@contextmanager
def weights_folder(tensors: Mapping[str, HostTensor]) -> Iterator[Path]:
    """Write the tensors into a new folder, which is deleted at the end.

    Raises:
        EngineFailedError: there is no space for them now.
    """
    parent = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else Path(tempfile.gettempdir())
    with temporary_folder("astraflow-weights-", parent) as folder:
        try:
            for number, part in enumerate(_parts(tensors)):
                write_inside(folder, f"model-{number:05d}.safetensors", to_safetensors(part))
        except OSError as error:
            raise EngineFailedError(
                f"new weights for the SGLang server cannot be written to {folder}: {error}; give "
                f"{parent} more space"
            ) from error
        yield folder


def _parts(tensors: Mapping[str, HostTensor]) -> Iterator[dict[str, HostTensor]]:
    part: dict[str, HostTensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.bits.nbytes > FILE_BYTES_MAX:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.bits.nbytes
    yield part
