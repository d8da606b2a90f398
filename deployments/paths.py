"""Paths and private files of the local stack's home folder, which ASTRAFLOW_HOME names.

The default is `.astraflow` in the project. Only this module spells the paths below the home.

    .astraflow/
      auth                          the secret of both servers, while the stack is up
      stack.json  stack.lock        the stack's processes; the lock of `up` and `down`
      watchdog.json  watchdog.lock  the restarts by the watchdog; the lock of the watchdog
      bf16                          the result of the CPU probe
      prefect/                      PREFECT_HOME, with the server's database
      mlflow/                       the tracking database and the artifacts
      store/                        the object store, unless ASTRAFLOW_STORE names another
      logs/                         every log; `logs/flows/` has one file per flow run's process

While the stack is down, everything may be deleted; only `store/` cannot be made again. Only the
owner has access: folders have mode 0700 and files 0600.
"""

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from storage.errors import ConfigError

PROJECT = Path(__file__).resolve().parent.parent
"""The clone: it has the flow files, and it is the working directory of flow runs."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""The mode bits that give access to other users."""
SYSTEM_FILES = {"lost+found", ".DS_Store"}
"""Files that the system puts into an empty folder."""
UNUSABLE = "?%"
"""Characters that end or change a path in the addresses of the servers' databases and artifacts."""


@dataclass(frozen=True)
class Home:
    """The stack's folder. Example: `Home(Path("/clone/.astraflow"))`."""

    root: Path

    @property
    def prefect(self) -> Path:
        return self.root / "prefect"

    @property
    def mlflow(self) -> Path:
        return self.root / "mlflow"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def flow_logs(self) -> Path:
        return self.logs / "flows"

    @property
    def auth(self) -> Path:
        return self.root / "auth"

    @property
    def record(self) -> Path:
        return self.root / "stack.json"

    @property
    def new_record(self) -> Path:
        """The record while it is written; then renamed to `record`."""
        return self.root / "stack.tmp"

    @property
    def lock(self) -> Path:
        return self.root / "stack.lock"

    @property
    def watchdog(self) -> Path:
        return self.root / "watchdog.json"

    @property
    def new_watchdog(self) -> Path:
        """The watchdog's record while it is written."""
        return self.root / "watchdog.tmp"

    @property
    def watchdog_lock(self) -> Path:
        return self.root / "watchdog.lock"

    @property
    def bf16(self) -> Path:
        return self.root / "bf16"

    @property
    def prefect_toml(self) -> Path:
        """The file with the server's address for Prefect's own command, which reads it from the
        current folder: in the clone for the clone's own stack, else in the home.
        """
        return (PROJECT if self.root == PROJECT / ".astraflow" else self.root) / "prefect.toml"

    def create(self) -> None:
        """Create the folders, and remove other users' access to them and to their files.

        Raises ConfigError when that is not permitted, when the disk is full, or when the root is a
        folder that other users share or that has been used for something else.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_a_shared_root()
            self._refuse_a_used_root()
            for folder in (self.prefect, self.mlflow, self.store, self.logs, self.flow_logs):
                folder.mkdir(mode=0o700, exist_ok=True)
            for path in self.exposed():
                with contextlib.suppress(FileNotFoundError):  # another command removed it
                    path.chmod(path.stat().st_mode & ~OTHERS)
        except OSError as error:
            raise ConfigError(
                f"{self.root} cannot hold the stack ({error.strerror}); set ASTRAFLOW_HOME to a "
                "writable folder of your own"
            ) from None

    def is_used(self) -> bool:
        """Return whether `up` has written a file here."""
        return any(map(os.path.lexists, (self.lock, self.record, self.auth, self.bf16)))

    def refuse_irregular_files(self) -> None:
        """Raise ConfigError for a pipe, a device, a socket or a folder in the place of a file, and
        for a link in that of a lock, which would not be followed, or of a record while it is
        written, which would.
        """
        stack = (self.auth, self.record, self.new_record, self.lock, self.bf16, self.prefect_toml)
        watchdog = (self.watchdog, self.new_watchdog, self.watchdog_lock)
        for path in (*stack, *watchdog, *self.logs.glob("*.log")):
            is_own = path in (self.lock, self.watchdog_lock, self.new_record, self.new_watchdog)
            if (path.exists() and not path.is_file()) or (is_own and path.is_symlink()):
                raise ConfigError(not_regular(path))

    def exposed(self) -> Iterator[Path]:
        """Yield the folders and files that other users have access to. Files in a private folder
        need no check of their own. The root may be a link. The target of any other link is not the
        stack's, nor may `prefect.toml` be: it is made private when it is written.
        """
        folders = (self.root, self.prefect, self.mlflow, self.store, self.logs, self.flow_logs)
        files = (self.auth, self.record, self.lock, self.watchdog, self.watchdog_lock)
        databases = [*self.prefect.glob("*.db*"), *self.mlflow.glob("*.db*")]
        logs = [*self.logs.glob("*.*"), *self.flow_logs.glob("*.log")]
        for path in (*folders, *files, *databases, *logs):
            with contextlib.suppress(FileNotFoundError):
                is_ours = path == self.root or not path.is_symlink()
                if is_ours and path.stat().st_mode & OTHERS:
                    yield path

    def _refuse_a_used_root(self) -> None:
        """Raise ConfigError for a folder that other users have access to, and that has files of
        others but none of a stack: making it private would take it from them.
        """
        if not self.root.stat().st_mode & OTHERS or self.is_used():
            return
        if other := next(self._files_of_others(), None):
            raise ConfigError(
                f"{self.root} has other files in it ({str(other)!r}), and other users have access "
                "to it; the stack would make it private: set ASTRAFLOW_HOME to a folder of its "
                f"own, such as {self.root / 'astraflow'}, or run "
                f"`{shlex.join(['chmod', '700', str(self.root)])}`"
            )

    def _files_of_others(self) -> Iterator[Path]:
        """Yield what a folder that no stack has used contains, relative to it, except the system's
        files and empty folders with the names of the stack's: others may use such names, too.
        """
        folders = (self.prefect, self.mlflow, self.store, self.logs)
        for path in sorted(self.root.iterdir()):
            contents = sorted(path.iterdir()) if path in folders and path.is_dir() else [path]
            for entry in contents:
                if entry.name not in SYSTEM_FILES:
                    yield entry.relative_to(self.root)

    def _refuse_a_shared_root(self) -> None:
        status = self.root.stat()
        foreign = os.geteuid() not in (0, status.st_uid)
        if foreign or status.st_mode & stat.S_ISVTX:
            raise ConfigError(
                f"other users share the folder {self.root}, and the stack's must be private; "
                f"set ASTRAFLOW_HOME to a folder of your own, such as {self.root / 'astraflow'}"
            )


def not_regular(path: str | Path) -> str:
    """Return the error message for something else in the place of a file."""
    return f"{path} is not a regular file, and the stack keeps a file there; delete it"


def open_regular(path: str | Path, flags: int) -> int:
    """Open a regular file, as an `opener` of `open` or alone; return its descriptor.

    Raises ConfigError for anything else, such as a pipe: opening one would block until another
    process opens its other end. A file that is created has mode 0600.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe without a reader, a socket
            raise ConfigError(not_regular(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(not_regular(path))
    os.set_blocking(descriptor, True)
    return descriptor


def open_private(path: str | Path, flags: int) -> int:
    """Open a regular file as `open_regular` does, and give it mode 0600."""
    descriptor = open_regular(path, flags)
    os.fchmod(descriptor, 0o600)
    return descriptor


@contextlib.contextmanager
def private_file(path: Path, mode: Literal["w", "x"] = "w") -> Iterator[TextIO]:
    """Open a file of the stack with mode 0600 to write text.

    Raises ConfigError that names it where the disk is full: the system's error for that has no
    name.
    """
    try:
        with open(path, mode, opener=open_private) as file:
            yield file
    except OSError as error:
        if error.filename is not None:
            raise
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); free some space, or set ASTRAFLOW_HOME "
            "to another folder"
        ) from None


def home() -> Home:
    """Return the home that ASTRAFLOW_HOME names, else the default.

    Raises ConfigError where that cannot be a folder.
    """
    name = os.environ.get("ASTRAFLOW_HOME")
    if name and "://" in name:  # not shown: it may have a credential
        raise ConfigError(
            "ASTRAFLOW_HOME is an address, and the stack keeps its files in a local folder; name a "
            "writable one, and a store in ASTRAFLOW_STORE"
        )
    try:
        root = Path(name).expanduser().resolve() if name else PROJECT / ".astraflow"
        if root.exists() and not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not _is_utf8(str(root)):
            raise ValueError("its name is not UTF-8")
        if unusable := [character for character in UNUSABLE if character in str(root)]:
            raise ValueError(f"the path contains {unusable[0]!r}, which databases cannot have")
        return Home(root)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no such user, a NUL
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"ASTRAFLOW_HOME={name or PROJECT / '.astraflow'} cannot be the stack's folder "
            f"({reason}); name a writable one"
        ) from None


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # a byte of the name that is not text
        return False
    return True
