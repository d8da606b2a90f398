"""Locks by which the processes of one user share the GPUs of a machine.

    /tmp/astraflow-gpus-UID/            for this user alone
        guard                           held while a process looks who holds what
        GPU-5f1a….4711.3f9c21aa         held by process 4711: {"holder", "pid", "share"}
        worker-rollout.GPU-5f1a…        held by the Prefect worker of that pool, for its flow runs

A process holds a file for each of its GPUs. The kernel releases it when the process has ended, and
its child processes that were given `descriptors()`: only then their memory is free. A file that
nobody holds is deleted by the next process.
"""

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from filelock import FileLock

from storage.errors import AstraFlowError, ConfigError
from storage.machine import gpus

FOLDER = Path("/tmp") / f"astraflow-gpus-{os.geteuid()}"
"""The same for all processes of the user, whatever their TMPDIR."""
GUARD = "guard"
ROUNDING = 1e-6
"""Of sums of shares."""
RECORD_BYTES_MAX = 4096


class GpuBusyError(AstraFlowError):
    """Another process uses a GPU, and their shares add up to more than 1."""


@dataclass(frozen=True)
class GpuHolder:
    """A process that uses a GPU. Example: `GpuHolder("trainer-solver of tiny-1", 4711, 0.5)`."""

    holder: str
    pid: int
    share: float


_held: dict[str, list[int]] = {}
"""GPU → descriptors of the files that this process holds."""


@contextmanager
def held_gpus(holder: str, numbers: Sequence[int], share: float = 1.0) -> Iterator[None]:
    """Hold a share of each of these GPUs, which are counted among those that the process may use.

    All or none of them are taken. What this process holds already does not count.

    Args:
        holder: what uses them, for people.

    Raises:
        GpuBusyError: others hold too much of one; the message names them.
        ConfigError: CUDA_VISIBLE_DEVICES lists fewer GPUs, or the folder is another user's.
    """
    if not numbers:
        yield
        return
    names = gpus.names(numbers, os.environ)
    identities = gpus.identities(names, gpus.installed())
    with ExitStack() as stack:
        folder = _private_folder()
        # Programs that delete old files of /tmp leave a folder alone that is locked.
        stack.callback(os.close, in_use := os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        fcntl.flock(in_use, fcntl.LOCK_SH)
        with FileLock(folder / GUARD):
            for number, identity in zip(numbers, identities, strict=True):
                _check_free(folder, number, identity, share)
            for identity in identities:
                stack.callback(_close, identity, _take(folder, identity, holder, share))
        yield


def reserve_gpus(holder: str, names: Sequence[str]) -> None:
    """Reserve GPUs until this process has ended, or the program that it executes in its place.

    `held_gpus` does not count a reservation: it keeps a second holder of the same name from
    reserving a GPU, and nobody from using one.

    Args:
        holder: what reserves them, of letters, digits and `-`.
        names: of the GPUs in CUDA_VISIBLE_DEVICES, each once.

    Raises:
        GpuBusyError: another process has reserved one.
        ConfigError: the folder is another user's.
    """
    if not names:
        return
    folder = _private_folder()
    identities = gpus.identities(names, gpus.installed())
    with ExitStack() as stack:
        in_use = _open_for_good(stack, folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(in_use, fcntl.LOCK_SH)
        for name, identity in zip(names, identities, strict=True):
            path = folder / f"{holder}.{identity}"
            descriptor = _open_for_good(stack, path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = _parse(os.read(descriptor, RECORD_BYTES_MAX))
                raise GpuBusyError(
                    f"GPU {name} ({identity}) belongs to another {holder} (process {other.pid}); "
                    "end it, or name other GPUs"
                ) from None
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _record(holder, 1.0))
        stack.pop_all()  # all are reserved: nothing is closed


def descriptors() -> tuple[int, ...]:
    """Return the descriptors of all held files, for child processes that use the same GPUs."""
    return tuple(descriptor for held in _held.values() for descriptor in held)


def _check_free(folder: Path, number: int, identity: str, share: float) -> None:
    others = _holders(folder, identity)
    if share + sum(other.share for other in others) <= 1 + ROUNDING:
        return
    named = ", ".join(
        f"{other.holder} (process {other.pid} or a child of it, share {other.share:g})"
        for other in others
    )
    raise GpuBusyError(
        f"GPU {number} ({identity}) is used by {named}, and a share of {share:g} is wanted; end "
        "that process, name other GPUs in devices, or let both share it by device_share"
    )


def _holders(folder: Path, identity: str) -> list[GpuHolder]:
    """Return the other processes that hold a file of this GPU; delete the files of ended ones."""
    own = {os.fstat(descriptor).st_ino for descriptor in _held.get(identity, ())}
    holders = []
    for path in sorted(folder.glob(f"{identity}.*")):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_ino in own:
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except BlockingIOError:
            holders.append(_parse(os.read(descriptor, RECORD_BYTES_MAX)))
        finally:
            os.close(descriptor)
    return holders


def _parse(record: bytes) -> GpuHolder:
    with suppress(ValueError, KeyError, TypeError):
        stored = json.loads(record)
        share = float(stored["share"])
        if 0 < share <= 1:
            return GpuHolder(str(stored["holder"])[:200], int(stored["pid"]), share)
    return GpuHolder("a process with an unreadable record", 0, 1.0)


def _take(folder: Path, identity: str, holder: str, share: float) -> int:
    path = folder / f"{identity}.{os.getpid()}.{uuid4().hex[:8]}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, _record(holder, share))
    _held.setdefault(identity, []).append(descriptor)
    return descriptor


def _open_for_good(stack: ExitStack, path: Path, flags: int) -> int:
    """Open a file that stays open in a program which this process executes in its place."""
    descriptor = os.open(path, flags, 0o600)
    stack.callback(os.close, descriptor)
    os.set_inheritable(descriptor, True)
    return descriptor


def _record(holder: str, share: float) -> bytes:
    return json.dumps({"holder": holder, "pid": os.getpid(), "share": share}).encode()


def _close(identity: str, descriptor: int) -> None:
    """Close the file without unlocking it: a child process may still hold it."""
    _held[identity].remove(descriptor)
    os.close(descriptor)


def _private_folder() -> Path:
    with suppress(FileExistsError):
        FOLDER.mkdir(mode=0o700)
    found = FOLDER.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or found.st_mode & 0o077:
        raise ConfigError(
            f"{FOLDER} must be a folder of this user alone (mode 0700), since it has the locks of "
            "the GPUs; delete it, or have its owner delete it"
        )
    return FOLDER
