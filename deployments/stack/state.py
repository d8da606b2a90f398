"""What is known of the running stack: `stack.json` in its home. Written after every change, so that
a command that was killed halfway leaves nothing that `astraflow down` does not know of.
"""

import json
import os
from dataclasses import asdict, dataclass, fields, replace

from deployments.paths import Home, open_private
from deployments.stack.processes import Process, is_alive

FORMAT = 1
PID_MAX = 2**31 - 1
SERVER = "prefect-server"
MLFLOW = "mlflow"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A local stack. Example:
    `Stack("http://127.0.0.1:4200/api", "http://127.0.0.1:5000", "file:///clone/…", True)`.
    """

    prefect_url: str
    """Of the API; the web page is the same without `/api`."""
    mlflow_url: str
    store_url: str
    """With the parameters that it was given."""
    own_server: bool
    """False: the Prefect server was named by PREFECT_API_URL and is not ours to stop."""
    own_mlflow: bool = True
    store_secret: str = ""
    """The Prefect block that holds the store's credentials; empty: they are in the environment."""
    processes: tuple[Process, ...] = ()
    deployed: str = ""
    """Digest of what was registered with the server last."""
    auth_digest: str = ""
    """Of the auth string that the servers were started with; empty: of none."""
    ready: bool = False
    """Everything but MLflow was seen working."""

    @property
    def ui_url(self) -> str:
        return self.prefect_url.removesuffix("/api")

    def process(self, name: str) -> Process | None:
        """The process of this name, when it lives."""
        return next(
            (process for process in self.processes if process.name == name and is_alive(process)),
            None,
        )

    def with_process(self, started: Process) -> "Stack":
        others = tuple(process for process in self.processes if process.name != started.name)
        return replace(self, processes=(*others, started))


def load(home: Home) -> Stack | None:
    """The recorded stack, whether it lives or not; None without a readable record."""
    try:
        body = json.loads(home.record.read_text())
        if body.pop("format") != FORMAT:
            return None
        processes = tuple(Process(**process) for process in body.pop("processes"))
        found = Stack(processes=processes, **body)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # absent, cut short or from another version: nothing to go by, the sweep finds what is left
    sound = _has_types(found) and all(
        _has_types(one) and 0 < one.pid <= PID_MAX for one in processes
    )
    return found if sound else None


def exists(home: Home) -> bool:
    """Whether there is a record, readable or not."""
    return os.path.lexists(home.record)


def _has_types(one: Stack | Process) -> bool:
    """Whether every plain field holds what its annotation says."""
    wanted = {
        field.name: field.type for field in fields(one) if field.type in (str, bool, int, float)
    }
    return all(type(getattr(one, name)) is kind for name, kind in wanted.items())


def save(home: Home, stack: Stack) -> Stack:
    written = home.record.with_suffix(".tmp")
    with open(written, "w", opener=open_private) as file:
        json.dump({"format": FORMAT, **asdict(stack)}, file, indent=2)
    os.replace(written, home.record)
    return stack


def forget(home: Home) -> None:
    home.record.unlink(missing_ok=True)
