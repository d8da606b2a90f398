"""The record of the running stack: `stack.json` in its home.

It is written after every change, so that `astraflow down` finds every process that a killed command
has started.
"""

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace

from deployments.paths import Home, open_regular, private_file
from deployments.stack import tracking_uri
from deployments.stack.machine import Machine, this_machine
from deployments.stack.processes import Process, is_alive
from storage.errors import ConfigError
from storage.store import addresses

FORMAT = 1
PID_MAX = 2**31 - 1
SERVER = "prefect-server"
MLFLOW = "mlflow"
WATCHDOG = "watchdog"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A local stack.

    Example: `Stack(prefect_url="http://127.0.0.1:4200/api", mlflow_url="http://127.0.0.1:5000",
    store_url="file:///clone/.astraflow/store", own_server=True)`.
    """

    prefect_url: str
    """URL of the API; without `/api` it is that of the web page."""
    mlflow_url: str
    store_url: str
    """URL of the object store, with its parameters."""
    own_server: bool
    """False: PREFECT_API_URL names the Prefect server, and `down` does not stop it."""
    own_mlflow: bool = True
    """The same for MLFLOW_TRACKING_URI."""
    store_secret: str = ""
    """Prefect block with the store's credentials; empty: they are in the environment."""
    processes: tuple[Process, ...] = ()
    deployed: str = ""
    """Digest of the last registration at the Prefect server."""
    auth_digest: str = ""
    """Digest of the servers' auth string; empty: they have none."""
    ready: bool = False
    """Every part but MLflow has been checked and works."""
    machine: Machine = field(default_factory=Machine)
    """Where the processes were started."""

    @property
    def ui_url(self) -> str:
        return self.prefect_url.removesuffix("/api")

    def process(self, name: str) -> Process | None:
        """Return the process of this name if it runs."""
        return next(
            (process for process in self.processes if process.name == name and is_alive(process)),
            None,
        )

    def with_process(self, started: Process) -> "Stack":
        """Return the stack with this process in place of the one of the same name."""
        others = tuple(process for process in self.processes if process.name != started.name)
        return replace(self, processes=(*others, started))


def load(home: Home) -> Stack | None:
    """Return the recorded stack, running or not; None without a readable record."""
    try:
        with open(home.record, opener=open_regular) as file:
            body = json.load(file)
        if body.pop("format") != FORMAT:
            return None
        processes = tuple(Process(**process) for process in body.pop("processes"))
        machine = Machine(**body.pop("machine", {}))
        stack = Stack(processes=processes, machine=machine, **body)
    except (ConfigError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # absent, damaged or of another release; processes are found by their mark
    is_valid = (
        _has_types(stack)
        and _has_types(machine)
        and all(_has_types(process) and 0 < process.pid <= PID_MAX for process in processes)
    )
    return stack if is_valid and _has_addresses(stack) else None


def _has_addresses(stack: Stack) -> bool:
    """Return whether both servers' addresses can be used."""
    try:
        addresses.check_server_address("PREFECT_API_URL", stack.prefect_url)
        if stack.own_mlflow:
            addresses.check_server_address("MLFLOW_TRACKING_URI", stack.mlflow_url)
        else:
            tracking_uri.refuse_unusable(stack.mlflow_url)
    except ConfigError:
        return False
    return True


def exists(home: Home) -> bool:
    """Return whether there is a record, readable or not."""
    return os.path.lexists(home.record)


def refuse_foreign(home: Home, stack: Stack | None) -> None:
    """Raise ConfigError for the stack of another machine or container that shares the home: its
    processes cannot be seen from here.
    """
    if (
        stack is not None
        and stack.machine.is_foreign_to(this_machine())
        and not any(map(is_alive, stack.processes))
    ):
        raise ConfigError(
            f"{home.record} belongs to the stack of another machine or container, named "
            f"{stack.machine.host}, whose processes cannot be seen from here; run `astraflow down` "
            f"there, or set ASTRAFLOW_HOME to a folder of this machine. If its processes have "
            f"ended, delete {home.record}"
        )


def _has_types(record: Stack | Process | Machine) -> bool:
    """Return whether every plain field has the type of its annotation."""
    types = {
        plain.name: plain.type for plain in fields(record) if plain.type in (str, bool, int, float)
    }
    return all(type(getattr(record, name)) is kind for name, kind in types.items())


def save(home: Home, stack: Stack) -> Stack:
    """Write the record; return the stack."""
    with private_file(home.new_record) as file:
        json.dump({"format": FORMAT, **asdict(stack)}, file, indent=2)
    os.replace(home.new_record, home.record)
    return stack


def delete(home: Home) -> None:
    """Delete the record."""
    home.record.unlink(missing_ok=True)
