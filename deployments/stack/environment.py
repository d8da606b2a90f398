"""The environment variables of the stack's processes, and of the commands that talk to them.

A person's own variables win wherever they make sense: PREFECT_API_URL, MLFLOW_TRACKING_URI and
ASTRAFLOW_STORE name a server or a store elsewhere, and the local stack then leaves that part out.
Secrets (AWS keys, PREFECT_API_KEY) are inherited by workers and flow runs, not by the servers, and
never written anywhere; ASTRAFLOW_STORE_SECRET is only the name of one.
"""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from deployments.paths import Home
from deployments.servers import auth
from deployments.servers.guard import HOSTS
from deployments.stack import state
from deployments.stack.processes import MARK
from deployments.stack.state import Stack
from storage.store import addresses, object_store
from storage.store.object_store import ObjectStore
from tasks.services import store_credentials

UNTRACKED = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""For every command and every process, wherever the servers are."""

PREFECT = {
    "PREFECT_WORKER_QUERY_SECONDS": "6",
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "10",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "storage,data_ops,rollout,trainer,tasks",
    "PREFECT_CLI_PROMPT": "false",
}
"""For workers and flow runs. One look of a worker for work costs the server 20 ms of CPU
(docs/benchmarks.md): every second, three pools would take a sixteenth of a core from the runs;
every six seconds a service starts three seconds later. That a task "finished in state Completed"
its state says already; as a log line it would be one more row for the server.
"""

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
"""Batches bring a task's cost in the server from 30 ms of CPU to 6; leases on disk survive the
server's restart. Our own server asks for no CSRF tokens, so that clients need not ask it for one
first, which every new client would. What it looks after every five seconds by itself, and no run of
ours needs, it looks after every minute.
"""

MLFLOW_SERVER = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
"""Job execution is for MLflow's hosted judges: eight more processes, 1.3 GB, and nothing here uses
it.
"""

FLOW_RUN = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::FutureWarning",
}
"""For the processes that compute: many of them share the cores, so each takes one thread and says
so.
"""

POOL = (
    *("ASTRAFLOW_STORE", "ASTRAFLOW_STORE_SECRET", "MLFLOW_TRACKING_URI", "ONEDNN_MAX_CPU_ISA"),
    *UNTRACKED,
    *FLOW_RUN,
)
"""What a work pool hands its flow runs. Prefect's own address, and every secret, they get from
their worker.
"""

PREFECT_AUTH = "PREFECT_API_AUTH_STRING"
MLFLOW_AUTH = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
MLFLOW_OTHER_AUTH = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")
"""Other ways to authenticate, which a person may have set for a server elsewhere."""

SYSTEM = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "TMP",
        "TEMP",
        "VIRTUAL_ENV",
    ),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
SYSTEM_PREFIXES = ("LC_", "PYTHON", "LD_", "DYLD_", "XDG_", "OPENBLAS_")
PREFECT_SERVER_PREFIXES = ("PREFECT_SERVER_", "PREFECT_API_DATABASE_", "PREFECT_LOGGING_", "PG")
"""What a server inherits: nothing that opens a store. The last ones are Postgres's."""

ADOPTED = (
    *(
        "PREFECT_API_URL",
        "PREFECT_HOME",
        "MLFLOW_TRACKING_URI",
        "ASTRAFLOW_STORE",
        "ASTRAFLOW_STORE_SECRET",
    ),
    *("NO_PROXY", "no_proxy"),
    *(PREFECT_AUTH, *MLFLOW_AUTH),
    *PREFECT,
    *UNTRACKED,
    "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED",
)


def given(name: str) -> str | None:
    """What the person set in the environment; an empty value counts as unset. ConfigError for an
    address that holds a credential, and for a Prefect server's that is none.
    """
    value = os.environ.get(name) or None
    if value is not None and name in addresses.VARIABLES:
        addresses.check_no_credentials(name, value)
        if name == "PREFECT_API_URL":
            addresses.check_server_address(name, value)
    return value


def store_url(home: Home, living: Stack | None = None) -> str:
    """What ASTRAFLOW_STORE names, else the living stack's, else the home's own. Absolute, since the
    stack's processes have another working directory. Raises ConfigError for what cannot be a
    store's URL.
    """
    if named := given("ASTRAFLOW_STORE"):
        return object_store.open_store(named).address
    return living.store_url if living else home.store.as_uri()


def secret_name(living: Stack | None = None) -> str:
    """The block that ASTRAFLOW_STORE_SECRET names, else the living stack's; empty for none."""
    return given("ASTRAFLOW_STORE_SECRET") or (living.store_secret if living else "")


def open_store(home: Home, living: Stack | None = None) -> ObjectStore:
    """The store of `store_url`, with its credentials in this process. Raises ConfigError where they
    cannot be had.
    """
    store_credentials.load(
        secret_name(living), given("PREFECT_API_URL") or (living.prefect_url if living else None)
    )
    return object_store.open_store(store_url(home, living))


def prepare(home: Home) -> None:
    """Prepares this process, a command of ours, before anything of Prefect or MLflow is imported:
    no telemetry, and the auth string for the local stack's server. Prefect's own file in the clone
    names the same one, which is kept from a server elsewhere.
    """
    for name, value in UNTRACKED.items():
        os.environ.setdefault(name, value)
    named, known = os.environ.get("PREFECT_API_URL"), state.load(home)
    if known is not None and known.own_server and named in (None, "", known.prefect_url):
        os.environ[PREFECT_AUTH] = auth.known(home)
    elif named:
        os.environ.setdefault(PREFECT_AUTH, "")


def of_stack(home: Home, stack: Stack, extra: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a worker, and of its flow runs."""
    chosen = {
        **{name: value for name, value in FLOW_RUN.items() if name not in os.environ},
        **PREFECT,
        **UNTRACKED,
        **extra,
        "PREFECT_API_URL": stack.prefect_url,
        "MLFLOW_TRACKING_URI": stack.mlflow_url,
        "ASTRAFLOW_STORE": stack.store_url,
        "ASTRAFLOW_STORE_SECRET": stack.store_secret,
        "ASTRAFLOW_LOGS": str(home.logs),
        **_of_every_process(home),
    }
    inherited = dict(os.environ)
    auth_string = auth.known(home)
    if stack.own_server:
        chosen["PREFECT_HOME"] = str(
            home.prefect
        )  # a profile in the person's own home may name another server
        chosen["PREFECT_CLIENT_CSRF_SUPPORT_ENABLED"] = "false"
        chosen[PREFECT_AUTH] = auth_string
        inherited.pop("PREFECT_API_KEY", None)
    else:
        chosen[PREFECT_AUTH] = inherited.get(
            PREFECT_AUTH, ""
        )  # never that of a `prefect.toml` in the clone
    if stack.own_mlflow:
        chosen |= dict(zip(MLFLOW_AUTH, auth_string.split(":", 1), strict=False))
        for name in MLFLOW_OTHER_AUTH:
            inherited.pop(name, None)
    return {**inherited, **chosen}


def of_prefect_server(home: Home, stack: Stack) -> dict[str, str]:
    """The whole environment of our own Prefect server."""
    port = urlsplit(stack.prefect_url).port
    return {
        **_inherited(PREFECT_SERVER_PREFIXES),
        **PREFECT_SERVER,
        **UNTRACKED,
        "PREFECT_HOME": str(home.prefect),
        "PREFECT_API_URL": stack.prefect_url,
        "PREFECT_SERVER_API_AUTH_STRING": auth.known(home),
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(
            f"http://{host}:{port}" for host in HOSTS
        ),
        **_of_every_process(home),
    }


def of_mlflow_server(home: Home) -> dict[str, str]:
    """The whole environment of our own MLflow server."""
    return {**_inherited(()), **MLFLOW_SERVER, **UNTRACKED, **_of_every_process(home)}


def of_pool(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a work pool may show to everyone who can read it. ConfigError
    for an address with credentials in it.
    """
    for name in addresses.VARIABLES:
        if url := environment.get(name):
            addresses.check_no_credentials(name, url)
    if url := environment.get("ASTRAFLOW_STORE"):
        object_store.open_store(url)
    return {name: environment[name] for name in POOL if environment.get(name)}


def adopt(environment: Mapping[str, str]) -> None:
    """Directs this process, a command of ours, to the stack. Before Prefect or MLflow are
    imported.
    """
    for name in ADOPTED:
        if name in environment:
            os.environ[name] = environment[name]


def _inherited(prefixes: tuple[str, ...]) -> dict[str, str]:
    """The part of this process's environment that a server needs."""
    kept = (*SYSTEM_PREFIXES, *prefixes)
    return {
        name: value for name, value in os.environ.items() if name in SYSTEM or name.startswith(kept)
    }


def _of_every_process(home: Home) -> dict[str, str]:
    return {
        **_past_proxies(),
        "ASTRAFLOW_HOME": str(home.root),
        "PYTHONUNBUFFERED": "1",
        MARK: str(home.root),
    }


def _past_proxies() -> dict[str, str]:
    """The stack's own addresses are never asked of a proxy."""
    listed = [part for part in (given("no_proxy") or given("NO_PROXY") or "").split(",") if part]
    value = ",".join(
        [*listed, *(host for host in ("127.0.0.1", "localhost") if host not in listed)]
    )
    return {"NO_PROXY": value, "no_proxy": value}
