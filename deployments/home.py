"""Where the local stack keeps what it needs: one folder, named by ASTRAFLOW_HOME, `.astraflow` in the project by
default. Nothing else here spells a path below it.

    .astraflow/
      stack.json  stack.lock        which processes run, and who may start some
      prefect/                      PREFECT_HOME, with the server's database
      mlflow/                       the tracking database and the artifacts
      store/                        the object store, unless ASTRAFLOW_STORE names another
      logs/                         every log; `logs/flows/` has one file for each flow run's process

A person may delete any of it while the stack is down; only `store/` holds what cannot be made again.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from storage.errors import ConfigError

PROJECT = Path(__file__).resolve().parent.parent
"""The clone: flow files are found below it, and flow runs have it as their working directory."""


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
    def record(self) -> Path:
        return self.root / "stack.json"

    @property
    def lock(self) -> Path:
        return self.root / "stack.lock"

    @property
    def prefect_toml(self) -> Path:
        """Where Prefect's own commands look for the server's address: the folder they are called in. The clone has the
        file when the stack is the clone's own; any other home keeps it to itself."""
        return (PROJECT if self.root == PROJECT / ".astraflow" else self.root) / "prefect.toml"

    def create(self) -> None:
        """Makes the folders; raises ConfigError when that is not allowed or the disk is full."""
        try:
            for folder in (self.prefect, self.mlflow, self.store, self.flow_logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.root} cannot hold the stack ({error.strerror}); set ASTRAFLOW_HOME to a writable folder"
            ) from None


def home() -> Home:
    """The home this process was told to use. ConfigError where ASTRAFLOW_HOME can be no folder."""
    named = os.environ.get("ASTRAFLOW_HOME")
    try:
        return Home(Path(named).expanduser().resolve() if named else PROJECT / ".astraflow")
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a user that is not there, a name that is none
        raise ConfigError(f"ASTRAFLOW_HOME={named} can be no folder ({error}); name a writable one") from None
