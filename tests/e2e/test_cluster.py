"""Two homes that play two machines. One has the servers and the pool `control`; the other has only
the address of the Prefect server and its auth string, and serves the other pools with `astraflow
worker`. Where Postgres is installed, both servers have their databases there, and MLflow's is
started as in `docker/compose.yaml`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.client.schemas.actions import WorkPoolCreate

from deployments.paths import PROJECT, Home
from deployments.registration import deployments, flow_runs
from deployments.registration.client import connected
from deployments.registration.deployments import DEPLOYMENTS
from deployments.servers import auth
from deployments.stack import commands, processes, readiness, state
from storage import layout
from storage.machine.ports import HOST, unusual_port
from tests.e2e.conftest import BIN, E2E_TIMEOUT_S, OURS, RECIPE, LocalStack, stack_in
from tests.support import compose, postgres
from tests.support.patience import until
from tests.support.stacks import process_of, recorded_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(E2E_TIMEOUT_S)]

STEPS = 2
REGION = "eu-west"
SERVED_ELSEWHERE = ("trainers", "rollout")
WITHOUT_POSTGRES = postgres.missing()
needs_postgres = pytest.mark.skipif(bool(WITHOUT_POSTGRES), reason=WITHOUT_POSTGRES)


@pytest.fixture(scope="module")
def databases() -> Iterator[str]:
    """The authority of Postgres' URLs; empty where it is not installed."""
    if WITHOUT_POSTGRES:
        yield ""
        return
    with postgres.postgres(compose.FOLDER / "postgres.sql") as authority:
        yield authority


@pytest.fixture(scope="module")
def servers(databases: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of the stack: its databases, an MLflow server that has been started, the store
    that both machines share.
    """
    folder = tmp_path_factory.mktemp("cluster")
    named = {"ASTRAFLOW_STORE": (folder / "store").as_uri()}
    if not databases:
        yield named
        return
    database = f"postgresql+asyncpg://{databases}/prefect"
    named["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database
    with mlflow_server(folder, f"postgresql+psycopg2://{databases}/mlflow") as tracking:
        yield named | tracking


@contextmanager
def mlflow_server(folder: Path, database: str) -> Iterator[dict[str, str]]:
    """The variables of a client of an MLflow server with the command, the settings and the secrets of
    `docker/compose.yaml`, at other addresses.
    """
    port = unusual_port()
    composed = compose.compose(compose.new_env())
    service, settings = (
        composed["services"]["mlflow"],
        composed["configs"]["mlflow-auth"]["content"],
    )
    theirs = service["environment"]["MLFLOW_BACKEND_STORE_URI"]
    (folder / "auth.ini").write_text(settings.replace(theirs, database))
    addresses = {
        "MLFLOW_BACKEND_STORE_URI": database,
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
    }
    changed = {
        "--host": HOST,
        "--port": str(port),
        "--workers": "1",
        "--artifacts-destination": str(folder / "artifacts"),
    }
    options = dict(option.split("=", 1) for option in service["command"][2:]) | changed
    command = [sys.executable, "-m", *service["command"][:2]]
    address = f"http://{HOST}:{port}"
    with (folder / "mlflow.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *(f"{name}={value}" for name, value in options.items())],
            env={**_bare(), **service["environment"], **addresses},
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
    try:
        until(lambda: server.poll() is not None or readiness.responds(f"{address}/health"), 0.2)
        assert server.poll() is None, (folder / "mlflow.log").read_text()[-4000:]
        yield {
            "MLFLOW_TRACKING_URI": address,
            "MLFLOW_TRACKING_USERNAME": service["environment"]["MLFLOW_AUTH_ADMIN_USERNAME"],
            "MLFLOW_TRACKING_PASSWORD": service["environment"]["MLFLOW_AUTH_ADMIN_PASSWORD"],
        }
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def here(servers: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The machine with the servers. It serves only the pool `control`."""
    with ExitStack() as stack:
        cluster = stack.enter_context(stack_in(Home(tmp_path_factory.mktemp("here")), servers))
        for name in ("watchdog", *(f"worker-{pool}" for pool in SERVED_ELSEWHERE)):
            processes.stop([process_of(cluster.stack, name)], 10.0)
        yield cluster


@pytest.fixture(scope="module")
def elsewhere(here: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the other machine, without the addresses of the store and of MLflow."""
    return {
        **_bare(),
        "ASTRAFLOW_HOME": str(tmp_path_factory.mktemp("elsewhere")),
        "PREFECT_API_URL": here.stack.prefect_url,
        "PREFECT_API_AUTH_STRING": auth.create(here.home),
    }


@pytest.fixture(scope="module")
def ended(here: LocalStack, elsewhere: dict[str, str]) -> list[int]:
    """A run that was started on the other machine, and has ended. Return the exit codes of that
    machine's workers, which were then asked to end.
    """
    pools = [["--pool", "trainers"], ["--pool", "rollout", "--region", REGION]]
    workers = [
        subprocess.Popen(
            [str(BIN / "astraflow"), "worker", *arguments],
            env=elsewhere,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for arguments in pools
    ]
    try:
        settings = [
            f"steps={STEPS}",
            "rollout.regions.us-east.workers=0",
            f"rollout.regions.{REGION}.workers=1",
            "evaluation=null",
        ]
        overrides = [part for setting in settings for part in ("--set", setting)]
        run = ["run", "--recipe", str(RECIPE), "--run-id", "far", *overrides, "--detach"]
        started = _astraflow(here, elsewhere | {"ASTRAFLOW_STORE": here.stack.store_url}, *run)
        assert started.returncode == 0, started.stderr
        here.wait_until(lambda: here.run_folder("far").exists(layout.REPORT), look_s=0.5)
        flow_run = started.stdout.split("/runs/flow-run/")[1].split()[0]
        assert here.wait_for_end(flow_run) == "Completed"
        left = [child for worker in workers for child in psutil.Process(worker.pid).children()]
        psutil.wait_procs(left, timeout=60)
        for worker in workers:
            worker.terminate()
        return [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_a_run_over_two_machines_completes_and_verifies(
    here: LocalStack, elsewhere: dict[str, str], ended: list[int]
) -> None:
    stored = elsewhere | {"ASTRAFLOW_STORE": here.stack.store_url}
    status = _json(here, stored, "status", "far", "--json")
    assert (status["state"], status["reason"]) == (
        "completed",
        f"all policies reached version {STEPS}",
    )
    verdict = _json(here, stored, "verify", "far", "--json")
    assert (verdict["ok"], verdict["violations"]) == (True, [])
    assert all(code in (0, -signal.SIGTERM) for code in ended)


def test_each_machine_ran_the_services_of_its_pools(
    here: LocalStack, elsewhere: dict[str, str], ended: list[int]
) -> None:
    with connected(here.stack.prefect_url) as client:
        taken = {str(item.id): item.work_pool_name for item in client.read_flow_runs()}
    there = Home(Path(elsewhere["ASTRAFLOW_HOME"]))
    of_pools = {
        name: {item for item, pool in taken.items() if pool in pools}
        for name, pools in (("here", ("control",)), ("there", SERVED_ELSEWHERE))
    }
    assert {log.stem for log in there.flow_logs.glob("*.log")} == of_pools["there"]
    assert {log.stem for log in here.home.flow_logs.glob("*.log")} == of_pools["here"]
    assert len(of_pools["there"]) == 3  # two trainers and a rollout worker
    assert state.load(there) is None
    assert list(there.store.iterdir()) == []


@needs_postgres
def test_prefect_keeps_its_flow_runs_in_postgres(
    here: LocalStack, databases: str, ended: list[int]
) -> None:
    with connected(here.stack.prefect_url) as client:
        known = {str(item.id) for item in client.read_flow_runs()}
    assert set(postgres.rows(databases, "prefect", "select id from flow_run")) == known
    assert len(known) >= 6
    assert list(here.home.prefect.glob("*.db")) == []


@needs_postgres
def test_mlflow_keeps_its_runs_in_postgres_and_requires_a_password(
    here: LocalStack, servers: dict[str, str], databases: str, ended: list[int]
) -> None:
    assert here.stack.mlflow_url == servers["MLFLOW_TRACKING_URI"]
    assert here.stack.process(state.MLFLOW) is None
    named = postgres.rows(databases, "mlflow", "select name from runs")
    assert any("far" in name for name in named), named
    searched = f"{here.stack.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=5"
    own = (servers["MLFLOW_TRACKING_USERNAME"], servers["MLFLOW_TRACKING_PASSWORD"])
    with httpx.Client(trust_env=False) as client:
        assert client.get(searched).status_code == 401
        assert client.get(searched, auth=(own[0], "wrong")).status_code == 401
        for host, status in (("mlflow:5000", 200), ("mlflow.example", 200), ("evil.example", 403)):
            answer = client.get(searched, auth=own, headers={"host": host})
            assert (host, answer.status_code) == (host, status)


def test_prefects_own_command_registers_the_deployments(
    here: LocalStack, elsewhere: dict[str, str], ended: list[int]
) -> None:
    pools = _pools(here)
    before = _deployments(here)
    with connected(here.stack.prefect_url) as client:
        for item in DEPLOYMENTS:
            known = client.read_deployment_by_name(f"{item.flow}/{item.name}")
            client.delete_deployment(known.id)
    done = subprocess.run(
        [str(BIN / "prefect"), "--no-prompt", "deploy", "--all"],
        cwd=PROJECT,
        env={**elsewhere, "DO_NOT_TRACK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert _deployments(here) == before
    assert _pools(here) == pools
    collected = flow_runs.start(here.stack.prefect_url, "gc/nightly", {}, "by hand", [])
    assert here.wait_for_end(collected.id) == "Completed"


def test_up_with_the_server_of_others_starts_workers_alone_and_changes_nothing_there(
    here: LocalStack, elsewhere: dict[str, str], servers: dict[str, str], ended: list[int]
) -> None:
    """The pool `rollout` there is that of `deployments/kubernetes`, with a limit."""
    template = json.loads((PROJECT / "deployments/kubernetes/job_template.json").read_text())
    theirs = WorkPoolCreate(
        name="rollout", type="kubernetes", concurrency_limit=7, base_job_template=template
    )
    with connected(here.stack.prefect_url) as client:
        client.delete_work_pool("rollout")
        client.create_work_pool(theirs)
    deployments.register(here.stack.prefect_url, directory="/opt/theirs")
    pools, registered = _pools(here), _deployments(here)
    named = {"MLFLOW_TRACKING_URI": f"http://{HOST}:9", **servers}
    try:
        up = _astraflow(here, {**named, **elsewhere}, "up")
        assert up.returncode == 0, up.stderr
        assert (
            "the work pool rollout is of type kubernetes: no worker of it is started" in up.stdout
        )
        recorded = recorded_stack(Home(Path(elsewhere["ASTRAFLOW_HOME"])))
        started = [process.name for process in recorded.processes]
        assert started == ["worker-control", "worker-trainers", "watchdog"]
        assert (_pools(here), _deployments(here)) == (pools, registered)
        refused = _astraflow(here, elsewhere, "worker", "--pool", "rollout")
        assert refused.returncode == 2
        assert "`prefect worker start --pool rollout`" in refused.stderr
    finally:
        down = _astraflow(here, elsewhere, "down")
    assert down.returncode == 0, down.stderr
    names = {(pool, commands.worker_name(pool)) for pool in ("control", "trainers")}
    assert names <= set(readiness.worker_beats(here.stack.prefect_url, ["control", "trainers"]))
    assert (_pools(here), _deployments(here)) == (pools, registered)


def _pools(cluster: LocalStack) -> dict[str, Any]:
    """What is stored of each work pool, without the state of its workers."""
    with connected(cluster.stack.prefect_url) as client:
        return {
            pool.name: pool.model_dump(exclude={"status", "updated"})
            for pool in client.read_work_pools()
        }


def _deployments(cluster: LocalStack) -> dict[str, Any]:
    """What is stored of each deployment, without its identity and its texts for people."""
    names = [f"{item.flow}/{item.name}" for item in DEPLOYMENTS]
    with connected(cluster.stack.prefect_url) as client:
        stored = {name: client.read_deployment_by_name(name) for name in names}
    return {
        name: {
            "entrypoint": each.entrypoint,
            "pool": each.work_pool_name,
            "parameters": each.parameters,
            "enforced": each.enforce_parameter_schema,
            "steps": each.pull_steps,
            "tags": each.tags,
            "schedules": [(item.schedule, item.active) for item in each.schedules],
            "form": set(each.parameter_openapi_schema["properties"]),
        }
        for name, each in stored.items()
    }


def _bare() -> dict[str, str]:
    """The environment of this process without settings of AstraFlow or of its servers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)}


def _astraflow(
    cluster: LocalStack, environment: Mapping[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "astraflow"), *arguments],
        env=dict(environment),
        cwd=cluster.home.root,
        capture_output=True,
        text=True,
        check=False,
    )


def _json(cluster: LocalStack, environment: Mapping[str, str], *arguments: str) -> Any:
    done = _astraflow(cluster, environment, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
