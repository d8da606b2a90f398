"""Where the local stack keeps what it needs: one folder, named by ASTRAFLOW_HOME, `.astraflow` in
the project by default. Nothing else here spells a path below it.

    .astraflow/
      auth                          the secret that both servers ask for, while the stack is up
      stack.json  stack.lock        which processes run, and who may start some
      prefect/                      PREFECT_HOME, with the server's database
      mlflow/                       the tracking database and the artifacts
      store/                        the object store, unless ASTRAFLOW_STORE names another
      logs/                         every log; `logs/flows/` has one file for each flow run's process

A person may delete any of it while the stack is down; only `store/` holds what cannot be made
again. Only its owner may read any of it: folders have mode 0700, and files 0600.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from storage.errors import ConfigError

PROJECT = Path(__file__).resolve().parent.parent
"""The clone: flow files are found below it, and flow runs have it as their working directory."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""The bits of a mode that give access to other users."""


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
    def lock(self) -> Path:
        return self.root / "stack.lock"

    @property
    def prefect_toml(self) -> Path:
        """Where Prefect's own commands look for the server's address: the folder they are called
        in. The clone has the file when the stack is the clone's own; any other home keeps it to
        itself.
        """
        return (PROJECT if self.root == PROJECT / ".astraflow" else self.root) / "prefect.toml"

    def create(self) -> None:
        """Makes the folders and takes away what other users may do with them and with the files in
        them.

        Raises ConfigError when that is not allowed, when the disk is full, or when the root is a
        folder of other users too.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_a_shared_root()
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

    def exposed(self) -> Iterator[Path]:
        """Folders and files that other users have any access to. A private folder hides the files
        in it.
        """
        folders = (self.root, self.prefect, self.mlflow, self.store, self.logs, self.flow_logs)
        databases = [*self.prefect.glob("*.db*"), *self.mlflow.glob("*.db*")]
        logs = [*self.logs.glob("*.*"), *self.flow_logs.glob("*.log")]
        for path in (
            *folders,
            self.auth,
            self.record,
            self.lock,
            self.prefect_toml,
            *databases,
            *logs,
        ):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mode & OTHERS:
                    yield path

    def _refuse_a_shared_root(self) -> None:
        found = self.root.stat()
        others = os.geteuid() not in (0, found.st_uid)
        if others or found.st_mode & stat.S_ISVTX:
            raise ConfigError(
                f"{self.root} is a folder of other users too, and the stack's must be private; "
                f"set ASTRAFLOW_HOME to a folder of your own, such as {self.root / 'astraflow'}"
            )


def open_private(path: str | Path, flags: int) -> int:
    """Opens a file that only its owner may read, as an `opener` of `open` or by itself. Returns its
    descriptor.
    """
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def home() -> Home:
    """The home that ASTRAFLOW_HOME names, else the default. ConfigError where that can be no
    folder.
    """
    named = os.environ.get("ASTRAFLOW_HOME")
    try:
        root = Path(named).expanduser().resolve() if named else PROJECT / ".astraflow"
        if root.exists() and not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return Home(root)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # a loop of links, a user that is not there, a name that is none
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"ASTRAFLOW_HOME={named} can be no folder ({why}); name a writable one"
        ) from None
