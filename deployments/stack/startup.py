"""Starts what a planned stack lacks, in the order in which its parts need each other, and waits
until they work.

Every start is recorded at once, since `up` may be killed at any line. A part that already runs is
left as it is, and when nothing is missing Prefect is not even imported: `up` on a running stack
takes a fraction of a second.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from deployments.paths import PROJECT, Home
from deployments.registration import deployments, work_pools
from deployments.servers import auth, prefect_toml
from deployments.stack import commands, cpu_features, environment, processes, readiness, state
from deployments.stack.state import MLFLOW, SERVER, Stack
from storage.errors import ConfigError

FLOW_LOGS_MAX = 300
"""Logs of flow runs' processes that are kept."""

PRIVATE_UMASK = 0o077
"""Of the servers, and of workers and flow runs unless they write to a store outside the home, which
others may share.
"""

Say = Callable[[str], None]


def bring_up(home: Home, stack: Stack, say: Say, wait_for_mlflow: bool) -> Stack:
    """Returns the stack as it runs. Raises ConfigError for the first part that cannot start."""
    environment.adopt(environment.of_stack(home, stack, {}))
    stack = _start_servers(home, stack, say)
    ceiling = cpu_features.isa_ceiling(home.root / "bf16")
    deployed = _deployment_digest(home, stack, ceiling)
    if deployed != stack.deployed:
        deployments.import_flows()  # a second or two of work while the server starts
    _wait_for_prefect(stack, say)
    if deployed != stack.deployed:
        shared = environment.of_pool(environment.of_stack(home, stack, ceiling))
        work_pools.create(stack.prefect_url, sys.executable, shared)
    stack, started = _start_workers(home, stack, ceiling, say)
    if deployed != stack.deployed:
        deployments.register(stack.prefect_url)
        stack = state.save(home, replace(stack, deployed=deployed))
    _wait_for_workers(stack, started, say)
    if stack.own_server and not prefect_toml.write(
        home.prefect_toml, stack.prefect_url, auth.known(home)
    ):
        say(
            f"{home.prefect_toml} is not ours and stays; for `prefect`, set "
            f"PREFECT_API_URL={stack.prefect_url} and "
            f"PREFECT_API_AUTH_STRING to what {home.auth} holds"
        )
    _prune_flow_logs(home)
    if wait_for_mlflow and stack.own_mlflow:
        _wait_for_server(stack, MLFLOW, stack.mlflow_url, "MLflow", say)
    return state.save(home, replace(stack, ready=True))


def _start_servers(home: Home, stack: Stack, say: Say) -> Stack:
    if not stack.own_server:
        say(
            f"PREFECT_API_URL is set: using the Prefect server at {stack.prefect_url}, starting "
            "none"
        )
    elif stack.process(SERVER) is None:
        say("starting the Prefect server")
        command = commands.prefect_server(_port(stack.prefect_url))
        stack = _start(
            home, stack, SERVER, command, environment.of_prefect_server(home, stack), PRIVATE_UMASK
        )
    if not stack.own_mlflow:
        say(f"MLFLOW_TRACKING_URI is set: using MLflow at {stack.mlflow_url}, starting none")
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
            f"the Prefect server at {stack.prefect_url} does not answer ({trouble}); "
            "start it, correct PREFECT_API_URL, or unset it to run a local one"
        )


def _wait_for_server(stack: Stack, name: str, url: str, what: str, say: Say) -> None:
    """Until it answers, and it is ours that answers: two stacks that start at once may have found
    the same port free.
    """
    server = next(process for process in stack.processes if process.name == name)

    def serves() -> bool:
        return readiness.answers(f"{url}/health") and processes.listens(server, _port(url))

    readiness.wait_until(serves, what, server, say)


def _start_workers(
    home: Home, stack: Stack, ceiling: Mapping[str, str], say: Say
) -> tuple[Stack, Mapping[str, str | None]]:
    """A worker for every pool that has none; and for each of those pools the last heartbeat of the
    worker before it.
    """
    idle = [pool.name for pool in work_pools.POOLS if stack.process(_worker(pool.name)) is None]
    if not idle:
        return stack, {}
    say(f"starting workers for {', '.join(idle)}")
    before = readiness.worker_beats(stack.prefect_url, idle)
    complete = environment.of_stack(home, stack, ceiling)
    umask = PRIVATE_UMASK if stack.store_url == home.store.as_uri() else processes.KEPT_UMASK
    for name in idle:
        stack = _start(home, stack, _worker(name), commands.worker(name), complete, umask)
    return stack, {name: before.get((name, commands.worker_name(name))) for name in idle}


def _wait_for_workers(stack: Stack, before: Mapping[str, str | None], say: Say) -> None:
    """Until Prefect shows each as ONLINE with a heartbeat that it did not have before the worker
    was started.
    """
    for pool, old_beat in before.items():

        def beats(pool: str = pool, old_beat: str | None = old_beat) -> bool:
            try:
                beat = readiness.worker_beats(stack.prefect_url, [pool]).get(
                    (pool, commands.worker_name(pool))
                )
            except ConfigError:  # a busy server that let one request time out
                return False
            return beat is not None and beat != old_beat

        readiness.wait_until(beats, f"the worker of pool {pool}", stack.process(_worker(pool)), say)


def _start(
    home: Home,
    stack: Stack,
    name: str,
    command: Sequence[str],
    complete: Mapping[str, str],
    umask: int,
) -> Stack:
    started = processes.start(name, command, complete, home.logs / f"{name}.log", PROJECT, umask)
    return state.save(home, stack.with_process(started))


def _deployment_digest(home: Home, stack: Stack, ceiling: Mapping[str, str]) -> str:
    """Equal digests: pools and deployments need not be registered again."""
    shared = environment.of_pool(environment.of_stack(home, stack, ceiling))
    return hashlib.sha256(
        f"{deployments.digest()} {sys.executable} {sorted(shared.items())}".encode()
    ).hexdigest()


def _worker(pool: str) -> str:
    return f"worker-{pool}"


def _port(url: str) -> int:
    return urlsplit(url).port or 80


def _prune_flow_logs(home: Home) -> None:
    logs = sorted(home.flow_logs.glob("*.log"), key=lambda log: log.stat().st_mtime)
    for log in logs[:-FLOW_LOGS_MAX]:
        log.unlink(missing_ok=True)
