"""Start the missing parts of a planned stack in the order of their dependencies, and wait for them.

Every start is recorded at once, since `up` may be killed at any line. A running part is not
restarted. When nothing is missing, Prefect is not imported: `up` on a running stack takes a
fraction of a second.
"""

import hashlib
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from deployments.paths import PROJECT, Home
from deployments.registration import automations, deployments, pools, work_pools
from deployments.servers import auth, prefect_toml
from deployments.stack import commands, cpu_features, environment, processes, readiness, state
from deployments.stack.state import MLFLOW, SERVER, WATCHDOG, Stack
from storage.errors import ConfigError

FLOW_LOGS_MAX = 300
"""Number of logs of flow runs' processes that are kept."""

STOP_GRACE_S = 10.0
"""Time for a process whose record could not be written to stop."""
PRIVATE_UMASK = 0o077
"""Umask of the servers; also of workers and flow runs, unless their store is outside the home,
where other users may share it."""

Say = Callable[[str], None]


def bring_up(home: Home, stack: Stack, say: Say, wait_for_mlflow: bool) -> Stack:
    """Return the running stack. Raises ConfigError for the first part that cannot start."""
    environment.adopt(environment.of_stack(home, stack, {}))
    stack = start_servers(home, stack, say)
    ceiling = cpu_features.isa_ceiling(home.bf16)
    deployed = _deployment_digest(home, stack, ceiling)
    registers = stack.own_server and deployed != stack.deployed
    if registers:
        deployments.import_flows()  # takes a second or two, while the server starts
    _wait_for_prefect(stack, say)
    if registers:
        shared = environment.of_pool(environment.of_stack(home, stack, ceiling))
        work_pools.create_or_merge(
            stack.prefect_url, pools.load(), sys.executable, shared, environment.POOL
        )
    served = pools.NAMES if stack.own_server else _served_pools(stack, say)
    stack, started = _start_idle_workers(home, stack, served, ceiling, say)
    if registers:
        deployments.register(stack.prefect_url)
        automations.register(stack.prefect_url, environment.given(environment.NOTIFY) or "")
        stack = state.save(home, replace(stack, deployed=deployed))
    _wait_for_workers(stack, started, say)
    if stack.own_server and not prefect_toml.write(
        home.prefect_toml, stack.prefect_url, auth.read_or_empty(home)
    ):
        say(
            f"{home.prefect_toml} was not written by `astraflow up` and is not changed; for "
            f"`prefect`, set PREFECT_API_URL={stack.prefect_url}, and PREFECT_API_AUTH_STRING to "
            f"the content of {home.auth}"
        )
    _prune_flow_logs(home)
    if wait_for_mlflow and stack.own_mlflow:
        _wait_for_server(stack, MLFLOW, stack.mlflow_url, "MLflow", say)
    return _start_watchdog(home, state.save(home, replace(stack, ready=True)))


def start_servers(
    home: Home, stack: Stack, say: Say, names: Container[str] = (SERVER, MLFLOW)
) -> Stack:
    """Start those of the stack's own servers, among `names`, that do not run."""
    if SERVER not in names:
        pass
    elif not stack.own_server:
        say(
            f"PREFECT_API_URL is set: using the Prefect server at {stack.prefect_url}, no local "
            "one is started"
        )
    elif stack.process(SERVER) is None:
        say("starting the Prefect server")
        command = commands.prefect_server(_port(stack.prefect_url))
        stack = _start(
            home, stack, SERVER, command, environment.of_prefect_server(home, stack), PRIVATE_UMASK
        )
    if MLFLOW not in names:
        pass
    elif not stack.own_mlflow:
        say(
            f"MLFLOW_TRACKING_URI is set: using MLflow at {stack.mlflow_url}, no local server is "
            "started"
        )
    elif stack.process(MLFLOW) is None:
        command = commands.mlflow_server(home, _port(stack.mlflow_url))
        stack = _start(
            home, stack, MLFLOW, command, environment.of_mlflow_server(home), PRIVATE_UMASK
        )
    return stack


def _wait_for_prefect(stack: Stack, say: Say) -> None:
    if stack.own_server:
        _wait_for_server(stack, SERVER, stack.prefect_url, "the Prefect server", say)
    elif trouble := readiness.prefect_trouble(stack.prefect_url):
        raise ConfigError(
            f"the Prefect server at {stack.prefect_url} does not respond ({trouble}); "
            "start it, correct PREFECT_API_URL, or unset it to run a local one"
        )


def _wait_for_server(stack: Stack, name: str, url: str, what: str, say: Say) -> None:
    """Wait until our server responds: another stack that started at the same time may have taken
    the port.
    """
    server = _recorded(stack, name)

    def serves() -> bool:
        return readiness.responds(f"{url}/health") and processes.listens(server, _port(url))

    readiness.wait_until(serves, what, server, say)


def _served_pools(stack: Stack, say: Say) -> list[str]:
    """Return the pools of another server that this machine can serve.

    Nothing of that server is changed. ConfigError where it lacks a pool.
    """
    types = work_pools.types(stack.prefect_url, pools.NAMES)
    if lacking := [name for name in pools.NAMES if name not in types]:
        raise ConfigError(
            f"the Prefect server at {stack.prefect_url} has no work pool "
            f"{' and none '.join(lacking)}; register AstraFlow there: `astraflow deploy --help`"
        )
    for name, kind in types.items():
        if kind != "process":
            say(f"the work pool {name} is of type {kind}: no worker of it is started here")
    return [name for name, kind in types.items() if kind == "process"]


def _start_idle_workers(
    home: Home, stack: Stack, served: Iterable[str], ceiling: Mapping[str, str], say: Say
) -> tuple[Stack, Mapping[str, str | None]]:
    """Start a worker for every one of the pools that has none.

    Return the stack and, for each of those pools, the last heartbeat of the previous worker.
    """
    idle = [name for name in served if stack.process(_worker(name)) is None]
    if not idle:
        return stack, {}
    before = readiness.worker_beats(stack.prefect_url, idle)
    stack = start_workers(home, stack, idle, say, ceiling)
    return stack, {name: before.get((name, commands.worker_name(name))) for name in idle}


def start_workers(
    home: Home,
    stack: Stack,
    idle: Sequence[str],
    say: Say,
    ceiling: Mapping[str, str] | None = None,
) -> Stack:
    """Start a worker for each of these pools, which have none."""
    if not idle:
        return stack
    say(f"starting workers for {', '.join(idle)}")
    if ceiling is None:
        ceiling = cpu_features.isa_ceiling(home.bf16)
    complete = environment.of_stack(home, stack, ceiling)
    umask = PRIVATE_UMASK if stack.store_url == home.store.as_uri() else processes.INHERITED_UMASK
    for name in idle:
        stack = _start(home, stack, _worker(name), commands.worker(name), complete, umask)
    return stack


def pools_of(stack: Stack, names: Container[str]) -> list[str]:
    """Return the pools of those of the stack's workers that are among `names`."""
    recorded = {process.name for process in stack.processes}
    return [pool for pool in pools.NAMES if _worker(pool) in recorded and _worker(pool) in names]


def _start_watchdog(home: Home, stack: Stack) -> Stack:
    """Start the watchdog of the ready stack, unless it runs."""
    if stack.process(WATCHDOG) is not None:
        return stack
    complete = environment.of_watchdog(home)
    return _start(home, stack, WATCHDOG, commands.watchdog(), complete, PRIVATE_UMASK)


def _wait_for_workers(stack: Stack, before: Mapping[str, str | None], say: Say) -> None:
    """Wait until Prefect shows each worker as ONLINE with a new heartbeat."""
    for pool, old_beat in before.items():

        def beats(pool: str = pool, old_beat: str | None = old_beat) -> bool:
            try:
                beat = readiness.worker_beats(stack.prefect_url, [pool]).get(
                    (pool, commands.worker_name(pool))
                )
            except ConfigError:  # one request to a busy server timed out
                return False
            return beat is not None and beat != old_beat

        worker = _recorded(stack, _worker(pool))
        readiness.wait_until(beats, f"the worker of pool {pool}", worker, say)


def _recorded(stack: Stack, name: str) -> processes.Process:
    """Return the process of this name, whether it still runs or not."""
    return next(process for process in stack.processes if process.name == name)


def _start(
    home: Home,
    stack: Stack,
    name: str,
    command: Sequence[str],
    complete: Mapping[str, str],
    umask: int,
) -> Stack:
    started = processes.start(name, command, complete, home.logs / f"{name}.log", PROJECT, umask)
    try:
        return state.save(home, stack.with_process(started))
    except BaseException:  # a process without a record would start twice
        processes.stop([started], STOP_GRACE_S)
        raise


def _deployment_digest(home: Home, stack: Stack, ceiling: Mapping[str, str]) -> str:
    """Return a digest of everything that is registered at the server, to skip a registration."""
    shared = environment.of_pool(environment.of_stack(home, stack, ceiling))
    return hashlib.sha256(
        f"{deployments.digest()} {sys.executable} {sorted(shared.items())} "
        f"{environment.given(environment.NOTIFY) or ''}".encode()
    ).hexdigest()


def _worker(pool: str) -> str:
    return f"worker-{pool}"


def _port(url: str) -> int:
    return urlsplit(url).port or 80


def _prune_flow_logs(home: Home) -> None:
    logs = sorted(home.flow_logs.glob("*.log"), key=lambda log: log.stat().st_mtime)
    for log in logs[:-FLOW_LOGS_MAX]:
        log.unlink(missing_ok=True)
