"""Decides where the stack's servers listen and which of its processes may stay, from what the environment names and
what the record says of the stack before. Starts and stops nothing."""

from dataclasses import replace
from urllib.parse import urlsplit

from deployments import environment
from deployments.home import Home
from deployments.ports import HOST, free_port, is_free
from deployments.processes import is_alive
from deployments.record import MLFLOW, SERVER, Stack
from storage.errors import ConfigError

PREFECT_PORT = 4200
MLFLOW_PORT = 5000


def plan(home: Home, standing: Stack | None) -> Stack:
    """The stack to bring up; its `processes` are those that stay.

    Raises ConfigError when processes of the stack live under other settings than the environment asks for now: moving
    them would end runs that are under way.
    """
    prefect = _elsewhere("PREFECT_API_URL", standing.prefect_url if standing and standing.own_server else "")
    tracking = _elsewhere("MLFLOW_TRACKING_URI", standing.mlflow_url if standing and standing.own_mlflow else "")
    alive = tuple(filter(is_alive, standing.processes)) if standing else ()
    wanted = Stack(
        prefect_url=prefect or f"http://{HOST}:{_port(standing, SERVER, PREFECT_PORT)}/api",
        mlflow_url=tracking or f"http://{HOST}:{_port(standing, MLFLOW, MLFLOW_PORT)}",
        store_url=environment.store_url(home),
        own_server=prefect is None,
        own_mlflow=tracking is None,
    )
    if standing is None or not alive:
        return wanted
    _refuse_a_move(standing, wanted)
    return replace(
        wanted,
        processes=tuple(process for process in alive if process.name in (SERVER, MLFLOW) or _same(standing, wanted)),
        deployed=standing.deployed if standing.process(SERVER) or not wanted.own_server else "",
    )


def _elsewhere(variable: str, own_url: str) -> str | None:
    """What the person named, unless it is our own server's address, which a shell may well have exported."""
    named = environment.given(variable)
    return None if named is None or named == own_url else named


def _port(standing: Stack | None, name: str, usual: int) -> int:
    """The recorded port while the server lives or could come back to it, else the usual one or the next that is
    free."""
    url = "" if standing is None else standing.prefect_url if name == SERVER else standing.mlflow_url
    local = urlsplit(url)
    port = local.port if local.hostname == HOST else None
    if standing is not None and port and (standing.process(name) is not None or is_free(port)):
        return port
    return free_port(usual)


def _same(standing: Stack, wanted: Stack) -> bool:
    """Whether workers that were started for the one serve the other: they know both servers by address."""
    return (standing.prefect_url, standing.mlflow_url) == (wanted.prefect_url, wanted.mlflow_url)


def _refuse_a_move(standing: Stack, wanted: Stack) -> None:
    moves = {
        "ASTRAFLOW_STORE": (standing.store_url, wanted.store_url, True),
        "PREFECT_API_URL": (standing.prefect_url, wanted.prefect_url, standing.own_server != wanted.own_server),
        "MLFLOW_TRACKING_URI": (standing.mlflow_url, wanted.mlflow_url, standing.own_mlflow != wanted.own_mlflow),
    }
    for variable, (runs_with, asked, matters) in moves.items():
        if matters and runs_with != asked:
            raise ConfigError(
                f"the stack is running with {runs_with}, but {variable} now asks for {asked}; "
                f"run `astraflow down` first, or set {variable} back"
            )
