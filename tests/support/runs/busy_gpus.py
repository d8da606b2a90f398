"""GPUs that another process uses, on a machine without one."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.machine import gpu_locks


@contextmanager
def held_by_another(folder: Path, gpu: int) -> Iterator[int]:
    """The descriptor of a file of GPU `gpu`, as another process would hold it."""
    record = {"holder": "trainer-solver of runs/tiny-1", "pid": 4711, "share": 1.0}
    (folder / f"{gpu}.4711.abc").write_text(json.dumps(record))
    descriptor = os.open(folder / f"{gpu}.4711.abc", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def busy_gpu(folder: Path) -> Iterator[None]:
    """Let another process hold GPU 0 within the block, by files in `folder`."""
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch, held_by_another(folder, 0):
        patch.setattr(gpu_locks, "FOLDER", folder)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield
