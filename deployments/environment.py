"""The environment variables of the stack's processes, and of the commands that talk to them.

A person's own variables win wherever they make sense: PREFECT_API_URL, MLFLOW_TRACKING_URI and ASTRAFLOW_STORE name a
server or a store elsewhere, and the local stack then leaves that part out. Secrets (AWS keys, PREFECT_API_KEY) are
inherited by the processes and never written anywhere; ASTRAFLOW_STORE_SECRET is only the name of one.
"""

import os
from collections.abc import Mapping

from deployments.home import Home
from deployments.processes import MARK
from deployments.record import Stack
from storage import objects
from storage.objects import ObjectStore
from tasks import store_secret

PREFECT = {
    "PREFECT_WORKER_QUERY_SECONDS": "6",
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "10",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "storage,data_ops,rollout,trainer,tasks",
    "PREFECT_CLI_PROMPT": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
"""For workers and flow runs. One look of a worker for work costs the server 20 ms of CPU (docs/benchmarks.md): every
second, four pools would take a twelfth of a core from the runs; every six seconds a service starts three seconds later. That
a task "finished in state Completed" its state says already; as a log line it would be one more row for the server."""

PREFECT_SERVER = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "2",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "10",
    "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT60S",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false",
}
"""Batches bring a task's cost in the server from 30 ms of CPU to 6; leases on disk survive the server's restart. Our own
server asks for no CSRF tokens, so that clients need not ask it for one first, which every new client would. What it looks
after every five seconds by itself, and no run of ours needs, it looks after every minute."""

MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
"""Job execution is for MLflow's hosted judges: eight more processes, 1.3 GB, and nothing here uses it."""

FLOW_RUN = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::FutureWarning",
}
"""For the processes that compute: many of them share the cores, so each takes one thread and says so."""

POOL = (
    *("ASTRAFLOW_STORE", "ASTRAFLOW_STORE_SECRET", "MLFLOW_TRACKING_URI", "MLFLOW_DISABLE_TELEMETRY", "ONEDNN_MAX_CPU_ISA"),
    *FLOW_RUN,
)
"""What a work pool hands its flow runs. Prefect's own address they get from their worker."""

ADOPTED = (
    *("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI", "ASTRAFLOW_STORE", "ASTRAFLOW_STORE_SECRET"),
    *("NO_PROXY", "no_proxy"),
    *PREFECT,
    *MLFLOW,
    "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED",
)


def given(name: str) -> str | None:
    """What the person set in the environment; an empty value counts as unset."""
    return os.environ.get(name) or None


def store_url(home: Home, living: Stack | None = None) -> str:
    """What ASTRAFLOW_STORE names, else the living stack's, else the home's own. Absolute, since the stack's processes have
    another working directory. Raises ConfigError for what cannot be a store's URL."""
    if named := given("ASTRAFLOW_STORE"):
        return objects.open_store(named).address
    return living.store_url if living else home.store.as_uri()


def secret_name(living: Stack | None = None) -> str:
    """The block that ASTRAFLOW_STORE_SECRET names, else the living stack's; empty for none."""
    return given("ASTRAFLOW_STORE_SECRET") or (living.store_secret if living else "")


def open_store(home: Home, living: Stack | None = None) -> ObjectStore:
    """The store of `store_url`, with its credentials in this process. Raises ConfigError where they cannot be had."""
    store_secret.load(secret_name(living), given("PREFECT_API_URL") or (living.prefect_url if living else None))
    return objects.open_store(store_url(home, living))


def of_stack(home: Home, stack: Stack, extra: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a process of the stack."""
    chosen = {
        **{name: value for name, value in FLOW_RUN.items() if name not in os.environ},
        **PREFECT,
        **(PREFECT_SERVER if stack.own_server else {}),
        **MLFLOW,
        **extra,
        "PREFECT_API_URL": stack.prefect_url,
        "MLFLOW_TRACKING_URI": stack.mlflow_url,
        "ASTRAFLOW_HOME": str(home.root),
        "ASTRAFLOW_STORE": stack.store_url,
        "ASTRAFLOW_STORE_SECRET": stack.store_secret,
        **_past_proxies(),
        "ASTRAFLOW_LOGS": str(home.logs),
        "PYTHONUNBUFFERED": "1",
        MARK: str(home.root),
    }
    if stack.own_server:
        chosen["PREFECT_HOME"] = str(home.prefect)  # a profile in the person's own home may name another server
    return {**os.environ, **chosen}


def of_pool(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a work pool may show to everyone who can read it. ConfigError for a store's URL with
    credentials in it."""
    if url := environment.get("ASTRAFLOW_STORE"):
        objects.open_store(url)
    return {name: environment[name] for name in POOL if environment.get(name)}


def adopt(environment: Mapping[str, str]) -> None:
    """Makes this process, a command of ours, speak to the stack. Before Prefect or MLflow are imported."""
    for name in ADOPTED:
        if name in environment:
            os.environ[name] = environment[name]


def _past_proxies() -> dict[str, str]:
    """The stack's own addresses are never asked of a proxy."""
    listed = [part for part in (given("no_proxy") or given("NO_PROXY") or "").split(",") if part]
    value = ",".join([*listed, *(host for host in ("127.0.0.1", "localhost") if host not in listed)])
    return {"NO_PROXY": value, "no_proxy": value}
