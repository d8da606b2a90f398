"""Decides where the stack's servers listen and which of its processes may stay, from what the
environment names and what the record says of the stack before. Starts and stops nothing.
"""

from dataclasses import replace
from urllib.parse import urlsplit

from deployments.paths import Home
from deployments.servers import auth
from deployments.servers.ports import HOST, free_port, is_free
from deployments.stack import environment
from deployments.stack.processes import is_alive
from deployments.stack.state import MLFLOW, SERVER, Stack
from storage.errors import ConfigError

PREFECT_PORT = 4200
MLFLOW_PORT = 5000


def plan(home: Home, standing: Stack | None) -> Stack:
    """The stack to bring up; its `processes` are those that stay. A living stack keeps what it was
    started with where the environment names nothing else.

    Raises ConfigError when processes of the stack live under other settings than the environment
    names now: moving them would end runs that are under way.
    """
    alive = living(standing)
    auth_digest = auth.digest(auth.known(home))
    if alive is not None:
        _refuse_a_move(home, alive)
        _refuse_another_auth_string(home, alive, auth_digest)
    prefect = _elsewhere(
        "PREFECT_API_URL", alive, standing.prefect_url if standing and standing.own_server else ""
    )
    tracking = _elsewhere(
        "MLFLOW_TRACKING_URI",
        alive,
        standing.mlflow_url if standing and standing.own_mlflow else "",
    )
    wanted = Stack(
        prefect_url=prefect or f"http://{HOST}:{_port(standing, SERVER, PREFECT_PORT)}/api",
        mlflow_url=tracking or f"http://{HOST}:{_port(standing, MLFLOW, MLFLOW_PORT)}",
        store_url=environment.store_url(home, alive),
        own_server=prefect is None,
        own_mlflow=tracking is None,
        store_secret=environment.secret_name(alive),
        auth_digest=auth_digest,
    )
    if alive is None:
        return wanted
    kept = [process for process in alive.processes if is_alive(process)]
    return replace(
        wanted,
        processes=tuple(
            process for process in kept if process.name in (SERVER, MLFLOW) or _same(alive, wanted)
        ),
        deployed=alive.deployed if alive.process(SERVER) or not wanted.own_server else "",
    )


def living(standing: Stack | None) -> Stack | None:
    """The stack of a record, when any of its processes lives."""
    return standing if standing is not None and any(map(is_alive, standing.processes)) else None


def _elsewhere(variable: str, alive: Stack | None, own_url: str) -> str | None:
    """The server that is not ours: what the person named, unless it is our own server's address,
    which a shell may well have exported; unnamed, what the living stack was started with.
    """
    named = environment.given(variable)
    if named is None and alive is not None and not own_url:
        return alive.prefect_url if variable == "PREFECT_API_URL" else alive.mlflow_url
    return None if named is None or named == own_url else named


def _port(standing: Stack | None, name: str, usual: int) -> int:
    """The recorded port while our server lives or could come back to it, else the usual one or the
    next that is free.
    """
    if standing is not None and (standing.own_server if name == SERVER else standing.own_mlflow):
        port = urlsplit(standing.prefect_url if name == SERVER else standing.mlflow_url).port
        if port and (standing.process(name) is not None or is_free(port)):
            return port
    return free_port(usual)


def _same(standing: Stack, wanted: Stack) -> bool:
    """Whether workers that were started for the one serve the other: they know both servers by
    address.
    """
    return (standing.prefect_url, standing.mlflow_url) == (wanted.prefect_url, wanted.mlflow_url)


def _refuse_a_move(home: Home, alive: Stack) -> None:
    moves = {
        "ASTRAFLOW_STORE": (alive.store_url, environment.store_url(home, alive)),
        "ASTRAFLOW_STORE_SECRET": (alive.store_secret, environment.given("ASTRAFLOW_STORE_SECRET")),
        "PREFECT_API_URL": (alive.prefect_url, environment.given("PREFECT_API_URL")),
        "MLFLOW_TRACKING_URI": (alive.mlflow_url, environment.given("MLFLOW_TRACKING_URI")),
    }
    for variable, (runs_with, asked) in moves.items():
        if asked is not None and runs_with != asked:
            raise ConfigError(
                f"the stack is running with {runs_with or f'no {variable}'}, but {variable} now "
                f"asks for {asked}; "
                f"run `astraflow down` first, or set {variable} back"
            )


def _refuse_another_auth_string(home: Home, alive: Stack, auth_digest: str) -> None:
    """The auth string of a living stack was deleted or replaced, or the stack is of a release that
    had none.
    """
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
