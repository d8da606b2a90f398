"""The environment variables of the stack's processes, and of the commands that use the stack.

The user's variables take precedence: where PREFECT_API_URL, MLFLOW_TRACKING_URI or ASTRAFLOW_STORE
name an external server or store, the stack starts none. Workers and flow runs inherit secrets (AWS
keys, PREFECT_API_KEY); the servers do not, and no file contains them. ASTRAFLOW_STORE_SECRET is the
name of a secret.
"""

import os
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from deployments.paths import Home
from deployments.servers import auth
from deployments.servers.guard import HOSTS
from deployments.stack import state, tracking_uri
from deployments.stack.processes import MARK
from deployments.stack.state import Stack
from storage.machine import gpus as gpu_numbers
from storage.machine.ports import HOST
from storage.store import addresses, object_store
from storage.store.object_store import ObjectStore
from tasks.services import notification_block, store_credentials
from tasks.services.prefect_settings import COMMAND

UNTRACKED = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""No telemetry: for every command and every process, with local and remote servers."""

PREFECT = {
    "PREFECT_WORKER_QUERY_SECONDS": "6",
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "10",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_CLI_PROMPT": "false",
}
"""For workers and flow runs. One poll of a worker costs the server 20 ms of CPU time
(docs/benchmarks.md): three pools polled every second would use 6 % of a core; polled every six
seconds, a service starts three seconds later on average."""

PREFECT_SERVER = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
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
    "PREFECT_SERVER_EVENTS_RELATED_RESOURCE_CACHE_TTL": "PT0S",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false",
}
"""Batches reduce a task's cost in the server from 30 ms of CPU time to 6 ms; leases on disk survive
a restart of the server. Our own server requires no CSRF tokens, which every new client would
request first. Loops that no run needs run every minute instead of every five seconds. Events have
the tags that a flow run has, not those of five minutes ago: automations select supervisors by tags
that these get when they begin."""

MLFLOW_SERVER = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
"""MLflow uses job execution for hosted judges; unused here, it would take eight processes and
1.3 GB."""

FLOW_RUN = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::FutureWarning",
}
"""For the services of a run: they share the cores, so each uses one thread."""

POOL = (
    *("ASTRAFLOW_STORE", "ASTRAFLOW_STORE_SECRET", "MLFLOW_TRACKING_URI", "ONEDNN_MAX_CPU_ISA"),
    *UNTRACKED,
    *FLOW_RUN,
)
"""Variables that a work pool passes to its flow runs. Prefect's address and every secret are
inherited from the worker."""

TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""torch makes this folder when it is imported; its default is one in /tmp, which another user may
have made, or a file of this name. Compiled code is kept elsewhere (`compiled_layers.py`)."""

NOTIFY = "ASTRAFLOW_NOTIFY"
"""The notification block, TYPE/NAME, of the automations that notify."""
PREFECT_AUTH = "PREFECT_API_AUTH_STRING"
MLFLOW_AUTH = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
MLFLOW_OTHER_AUTH = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")
"""Other means of authentication, which the user may have set for an external server."""

SYSTEM = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ"),
    *("TMPDIR", "TMP", "TEMP", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("LC_ALL", "LC_COLLATE", "LC_CTYPE", "LC_MESSAGES", "LC_MONETARY", "LC_NUMERIC", "LC_TIME"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
    *("DYLD_FRAMEWORK_PATH", "DYLD_INSERT_LIBRARIES"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH"),
    *("PYTHONUTF8", "PYTHONIOENCODING", "PYTHONCOERCECLOCALE", "PYTHONHASHSEED"),
    *("PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONFAULTHANDLER", "PYTHONMALLOC", "PYTHONOPTIMIZE"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
)
SYSTEM_PREFIXES = ("OPENBLAS_",)
PREFECT_SERVER_PREFIXES = ("PREFECT_SERVER_", "PREFECT_API_DATABASE_", "PREFECT_LOGGING_")
POSTGRES = (
    *("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGPASSWORD", "PGPASSFILE"),
    *("PGSERVICE", "PGSERVICEFILE", "PGSYSCONFDIR", "PGOPTIONS", "PGAPPNAME"),
    *("PGSSLMODE", "PGSSLCERT", "PGSSLKEY", "PGSSLROOTCERT", "PGSSLCRL", "PGSSLNEGOTIATION"),
    *("PGSSLMINPROTOCOLVERSION", "PGSSLMAXPROTOCOLVERSION", "PGTARGETSESSIONATTRS"),
    *("PGKRBSRVNAME", "PGGSSLIB", "PGCONNECT_TIMEOUT"),
)
"""Variables that a server inherits: no credentials of a store. A prefix names the settings of one
program; `PG` or `PYTHON` would include secrets of others, such as PGP_PASSPHRASE."""

ADOPTED = (
    *("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI"),
    *("ASTRAFLOW_STORE", "ASTRAFLOW_STORE_SECRET", "NO_PROXY", "no_proxy"),
    *(PREFECT_AUTH, *MLFLOW_AUTH),
    *PREFECT,
    *UNTRACKED,
    "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED",
)


def given(name: str) -> str | None:
    """Return a variable of the environment; None when it is unset or empty.

    Raises ConfigError for an address that contains a credential or that cannot be a server's.
    """
    value = os.environ.get(name) or None
    if value is not None and name in addresses.VARIABLES:
        addresses.check_no_credentials(name, value)
        if name == "PREFECT_API_URL":
            addresses.check_server_address(name, value)
        elif name == "MLFLOW_TRACKING_URI":
            tracking_uri.refuse_unusable(value)
    return value


def refuse_bad_addresses() -> None:
    """Raise ConfigError for the first variable whose address or block name cannot be used."""
    for name in addresses.VARIABLES:
        given(name)
    secret_name()
    notification_block.check_name(NOTIFY, given(NOTIFY))


def store_url(home: Home, running: Stack | None = None) -> str:
    """Return the store that ASTRAFLOW_STORE names, else the running stack's, else the home's.

    It is absolute, since the stack's processes have another working directory. Raises ConfigError
    for a value that cannot be a store's URL.
    """
    if url := given("ASTRAFLOW_STORE"):
        return object_store.open_store(url).address
    return running.store_url if running else home.store.as_uri()


def secret_name(running: Stack | None = None) -> str:
    """Return the block of ASTRAFLOW_STORE_SECRET, else of the running stack; empty: none.

    Raises ConfigError for what cannot be the name of a block.
    """
    name = given(store_credentials.VARIABLE)
    store_credentials.check_name(name)
    return name or (running.store_secret if running else "")


def open_store(home: Home, running: Stack | None = None) -> ObjectStore:
    """Open the store of `store_url`, after loading its credentials into this process.

    Raises ConfigError when they cannot be loaded.
    """
    server = given("PREFECT_API_URL") or (running.prefect_url if running else None)
    store_credentials.load(secret_name(running), server, COMMAND)
    return object_store.open_store(store_url(home, running))


def prepare(home: Home) -> None:
    """Prepare a command's process before Prefect or MLflow are imported: disable telemetry, set the
    auth string of the local stack's server, and exclude that server from proxies, which would read
    the auth string.

    The addresses of our own servers are set as the stack has them: `localhost` may resolve to an
    address on which another user's process listens. For another server the auth string of
    `prefect.toml` in the clone is overridden.
    """
    for name, value in UNTRACKED.items():
        os.environ.setdefault(name, value)
    stack = state.load(home)
    if stack is not None:
        os.environ.setdefault(TORCH_CACHE, _torch_cache(home))
    if stack is not None and stack.own_server:
        _set_as_recorded("PREFECT_API_URL", stack.prefect_url)
    if stack is not None and stack.own_mlflow:
        _set_as_recorded("MLFLOW_TRACKING_URI", stack.mlflow_url)
    api_url = os.environ.get("PREFECT_API_URL")
    if stack is not None and stack.own_server and api_url in (None, "", stack.prefect_url):
        os.environ[PREFECT_AUTH] = auth.read_or_empty(home)
        os.environ.update(_without_proxy())
    elif api_url:
        os.environ.setdefault(PREFECT_AUTH, "")


def _set_as_recorded(variable: str, own_url: str) -> None:
    """Replace another spelling of our own server's address, such as `http://localhost:4200/api/`."""
    spelled = os.environ.get(variable, "").rstrip("/").lower()
    if spelled in (own_url, own_url.replace(HOST, "localhost")):
        os.environ[variable] = own_url


def of_stack(home: Home, stack: Stack, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a worker and of its flow runs."""
    settings = {
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
    auth_string = auth.read_or_empty(home)
    if stack.own_server:
        # a profile in the user's home folder may name another server
        settings["PREFECT_HOME"] = str(home.prefect)
        settings["PREFECT_CLIENT_CSRF_SUPPORT_ENABLED"] = "false"
        settings[PREFECT_AUTH] = auth_string
        inherited.pop("PREFECT_API_KEY", None)
    else:
        # overrides that of `prefect.toml` in the clone
        settings[PREFECT_AUTH] = inherited.get(PREFECT_AUTH, "")
    if stack.own_mlflow:
        settings |= dict(zip(MLFLOW_AUTH, auth_string.split(":", 1), strict=False))
        for name in MLFLOW_OTHER_AUTH:
            inherited.pop(name, None)
    return {**inherited, **settings}


def of_prefect_server(home: Home, stack: Stack) -> dict[str, str]:
    """Return the whole environment of our own Prefect server."""
    port = urlsplit(stack.prefect_url).port
    return {
        **_inherited(PREFECT_SERVER_PREFIXES, POSTGRES),
        **PREFECT_SERVER,
        **UNTRACKED,
        "PREFECT_HOME": str(home.prefect),
        "PREFECT_API_URL": stack.prefect_url,
        "PREFECT_SERVER_API_AUTH_STRING": auth.read_or_empty(home),
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(
            f"http://{host}:{port}" for host in HOSTS
        ),
        **_of_every_process(home),
    }


def of_mlflow_server(home: Home) -> dict[str, str]:
    """Return the whole environment of our own MLflow server."""
    return {**_inherited(), **MLFLOW_SERVER, **UNTRACKED, **_of_every_process(home)}


def of_watchdog(home: Home) -> dict[str, str]:
    """Return the environment of the watchdog: that of this process, from which it derives those of
    the processes that it starts again.
    """
    return {**os.environ, **UNTRACKED, **_of_every_process(home)}


def of_worker(home: Home, gpus: Sequence[str], ceiling: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker of another machine's Prefect server, and of its flow runs.

    The user's variables take precedence. `gpus` are the names of the GPUs that they may use; empty:
    those of this process.
    """
    own = {"ASTRAFLOW_HOME": str(home.root)}  # absolute: the worker starts in another folder
    own |= {gpu_numbers.VARIABLE: ",".join(gpus)} if gpus else {}
    folders = {"ASTRAFLOW_LOGS": str(home.logs), TORCH_CACHE: _torch_cache(home)}
    return {**FLOW_RUN, **PREFECT, **UNTRACKED, **ceiling, **folders, **os.environ, **own}


def of_pool(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that a work pool stores, where many users can read it.

    Raises ConfigError for an address with credentials in it.
    """
    for name in addresses.VARIABLES:
        if url := environment.get(name):
            addresses.check_no_credentials(name, url)
    if url := environment.get("ASTRAFLOW_STORE"):
        object_store.open_store(url)
    return {name: environment[name] for name in POOL if environment.get(name)}


def adopt(environment: Mapping[str, str]) -> None:
    """Set the stack's variables in this process; call it before Prefect or MLflow are imported."""
    for name in ADOPTED:
        if name in environment:
            os.environ[name] = environment[name]


def _inherited(prefixes: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the part of this process's environment that a server needs."""
    allowed = (*SYSTEM_PREFIXES, *prefixes)
    return {
        name: value
        for name, value in os.environ.items()
        if name in SYSTEM or name in names or name.startswith(allowed)
    }


def _of_every_process(home: Home) -> dict[str, str]:
    return {
        **_without_proxy(),
        "ASTRAFLOW_HOME": str(home.root),
        "PYTHONUNBUFFERED": "1",
        MARK: str(home.root),
        TORCH_CACHE: _torch_cache(home),
    }


def _torch_cache(home: Home) -> str:
    return str(home.root / "torch")


def _without_proxy() -> dict[str, str]:
    """Return the variables that exclude the stack's own addresses from proxies."""
    listed = [part for part in (given("no_proxy") or given("NO_PROXY") or "").split(",") if part]
    if "*" in listed:
        return {"NO_PROXY": "*", "no_proxy": "*"}  # it counts only alone
    value = ",".join([*listed, *(host for host in HOSTS if host not in listed)])
    return {"NO_PROXY": value, "no_proxy": value}
