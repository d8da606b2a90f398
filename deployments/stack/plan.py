"""Plan a stack: where its servers listen, and which running processes it keeps.

The inputs are the environment variables and the record of the previous stack. Nothing is started or
stopped here.
"""

from dataclasses import replace
from urllib.parse import urlsplit

from deployments.paths import Home
from deployments.servers import auth
from deployments.stack import environment
from deployments.stack.machine import this_machine
from deployments.stack.processes import is_alive
from deployments.stack.state import MLFLOW, SERVER, Stack
from storage.errors import ConfigError
from storage.machine.ports import HOST, free_port, is_free

PREFECT_PORT = 4200
MLFLOW_PORT = 5000


def plan(home: Home, recorded: Stack | None) -> Stack:
    """Return the stack to start; its `processes` are those that keep running.

    A running stack keeps its settings where the environment sets no others. Raises ConfigError when
    the environment contradicts them: a move would end active runs.
    """
    alive = if_running(recorded)
    auth_digest = auth.digest(auth.read_or_empty(home))
    if alive is not None:
        _refuse_a_move(home, alive)
        _refuse_another_auth_string(home, alive, auth_digest)
    prefect = _external(
        "PREFECT_API_URL", alive, recorded.prefect_url if recorded and recorded.own_server else ""
    )
    tracking = _external(
        "MLFLOW_TRACKING_URI",
        alive,
        recorded.mlflow_url if recorded and recorded.own_mlflow else "",
    )
    planned = Stack(
        prefect_url=prefect or f"http://{HOST}:{_port(recorded, SERVER, PREFECT_PORT)}/api",
        mlflow_url=tracking or f"http://{HOST}:{_port(recorded, MLFLOW, MLFLOW_PORT)}",
        store_url=environment.store_url(home, alive),
        own_server=prefect is None,
        own_mlflow=tracking is None,
        store_secret=environment.secret_name(alive),
        auth_digest=auth_digest,
        machine=this_machine(),
    )
    if alive is None:
        return planned
    running = [process for process in alive.processes if is_alive(process)]
    is_same = _has_same_servers(alive, planned)
    return replace(
        planned,
        processes=tuple(
            process for process in running if process.name in (SERVER, MLFLOW) or is_same
        ),
        deployed=alive.deployed if alive.process(SERVER) or not planned.own_server else "",
    )


def if_running(recorded: Stack | None) -> Stack | None:
    """Return the recorded stack if any of its processes runs."""
    return recorded if recorded is not None and any(map(is_alive, recorded.processes)) else None


def _external(variable: str, alive: Stack | None, own_url: str) -> str | None:
    """Return the address of a server that the stack does not start; None for one of its own.

    It is the variable's value, unless that is our own server's address; where the variable is
    unset, it is the running stack's.
    """
    url = environment.given(variable)
    if url is None and alive is not None and not own_url:
        return alive.prefect_url if variable == "PREFECT_API_URL" else alive.mlflow_url
    return None if url is None or url == own_url else url


def _port(recorded: Stack | None, name: str, usual: int) -> int:
    """Return the recorded port if our server uses it or can use it again, else a free one."""
    if recorded is not None and (recorded.own_server if name == SERVER else recorded.own_mlflow):
        port = urlsplit(recorded.prefect_url if name == SERVER else recorded.mlflow_url).port
        if port and (recorded.process(name) is not None or is_free(port)):
            return port
    return free_port(usual)


def _has_same_servers(alive: Stack, planned: Stack) -> bool:
    """Return whether the running workers, which have both servers' addresses, can be kept."""
    return (alive.prefect_url, alive.mlflow_url) == (planned.prefect_url, planned.mlflow_url)


def _refuse_a_move(home: Home, alive: Stack) -> None:
    moves = {
        "ASTRAFLOW_STORE": (alive.store_url, environment.store_url(home, alive)),
        "ASTRAFLOW_STORE_SECRET": (alive.store_secret, environment.given("ASTRAFLOW_STORE_SECRET")),
        "PREFECT_API_URL": (alive.prefect_url, environment.given("PREFECT_API_URL")),
        "MLFLOW_TRACKING_URI": (alive.mlflow_url, environment.given("MLFLOW_TRACKING_URI")),
    }
    for variable, (current, requested) in moves.items():
        if requested is not None and current != requested:
            raise ConfigError(
                f"the stack is running with {current or f'no {variable}'}, but {variable} is now "
                f"{requested}; run `astraflow down` first, or set {variable} back"
            )


def _refuse_another_auth_string(home: Home, alive: Stack, auth_digest: str) -> None:
    """Raise ConfigError when the running servers have another auth string than the home."""
    servers = [
        alive.process(SERVER) if alive.own_server else None,
        alive.process(MLFLOW) if alive.own_mlflow else None,
    ]
    if any(servers) and alive.auth_digest != auth_digest:
        raise ConfigError(
            "the servers of the running stack were not started with the auth string in "
            f"{home.auth}; "
            "run `astraflow down`, then `astraflow up`"
        )
