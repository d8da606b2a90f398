"""Two homes that play two machines, and a run whose store and regional mirrors are on two S3 servers.

One machine has the stack's servers and the pool `control`; the other has only the address of the
Prefect server and its auth string, and serves the other pools with `astraflow worker`. All S3
credentials are in a Prefect block. Where Postgres is installed, both servers have their databases
there, and MLflow's is started as in `docker/compose.yaml`.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.blocks.system import Secret
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import temporary_settings

from deployments.paths import PROJECT, Home
from deployments.registration import deployments, flow_runs
from deployments.registration.client import connected
from deployments.registration.deployments import DEPLOYMENTS
from deployments.servers import auth
from deployments.stack import commands, processes, readiness, state
from storage import layout
from storage.coordination import heartbeats
from storage.formats.safetensors import weights_digest
from storage.machine.ports import HOST
from storage.records.progress import MirrorProgress, RolloutProgress
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests, reader
from tasks.services.prefect_settings import settings_for
from tests.e2e.conftest import BIN, E2E_TIMEOUT_S, OURS, POLICIES, RECIPE, LocalStack, stack_in
from tests.support import compose, postgres
from tests.support.composed_mlflow import mlflow_server
from tests.support.stacks import process_of, recorded_stack
from tests.support.stores.s3_process import s3_process

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.timeout(E2E_TIMEOUT_S)]

STEPS = 3
REGIONS = ("us-east", "eu-west")
SERVED_ELSEWHERE = ("trainers", "rollout")
STORE = {"ASTRAFLOW_STORE": "s3://home/astraflow", "ASTRAFLOW_STORE_SECRET": "store"}
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIANOBODYMAYSEETHIS",
    "AWS_SECRET_ACCESS_KEY": "nobody/may+see/this/either",
}
WITHOUT_POSTGRES = postgres.missing()
needs_postgres = pytest.mark.skipif(bool(WITHOUT_POSTGRES), reason=WITHOUT_POSTGRES)


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[str, str]]:
    """Addresses of the home store's server and of the mirrors' server. This process uses the first
    by its environment; the processes of the two machines do not have these variables.
    """
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**KEYS, "AWS_DEFAULT_REGION": "us-east-1"}.items():
            environment.setenv(name, value)
        with s3_process(["home"]) as near, s3_process(["mirror-us", "mirror-eu"]) as far:
            environment.setenv("AWS_ENDPOINT_URL", near)
            yield near, far


@pytest.fixture(scope="module")
def mirrors(s3: tuple[str, str]) -> dict[str, str]:
    """Region → URL."""
    return {
        "us-east": f"s3://mirror-us/weights?endpoint={s3[1]}",
        "eu-west": f"s3://mirror-eu?endpoint={s3[1]}",
    }


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
    """The variables of the stack: the store, its databases, an MLflow server that has been started."""
    if not databases:
        yield STORE
        return
    folder = tmp_path_factory.mktemp("mlflow")
    database = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{databases}/prefect"
    }
    with mlflow_server(folder, f"postgresql+psycopg2://{databases}/mlflow", _bare()) as tracking:
        yield STORE | database | tracking


@pytest.fixture(scope="module")
def here(
    s3: tuple[str, str], servers: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    """The machine with the servers. It serves only the pool `control`."""
    with ExitStack() as stack:
        cluster = stack.enter_context(stack_in(Home(tmp_path_factory.mktemp("here")), servers))
        with temporary_settings(settings_for(cluster.stack.prefect_url)):
            block = {**KEYS, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": s3[0]}
            Secret(value=json.dumps(block)).save("store")
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
def ended(here: LocalStack, elsewhere: dict[str, str], mirrors: dict[str, str]) -> list[int]:
    """A run that was started on the other machine, and has ended. Return the exit codes of that
    machine's workers, which were then asked to end. The weight decay is high, so that every step
    changes the weights. Polls are rare because each costs the S3 servers some milliseconds of CPU.
    """
    pools = [["trainers"], *(["rollout", "--region", region] for region in REGIONS)]
    workers = [
        subprocess.Popen(
            [str(BIN / "astraflow"), "worker", "--pool", *arguments],
            env=elsewhere,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for arguments in pools
    ]
    try:
        settings = [
            f"steps={STEPS}",
            "policies.*.train.weight_decay=100",
            "evaluation=null",
            "supervise.poll_interval_s=2",
            "supervise.heartbeat_interval_s=2",
            "rollout.refresh_interval_s=0.5",
            *(f"rollout.regions.{region}.mirror={mirrors[region]}" for region in REGIONS),
        ]
        overrides = [part for setting in settings for part in ("--set", setting)]
        run = ["run", "--recipe", str(RECIPE), "--run-id", "far", *overrides, "--detach"]
        started = _astraflow(here, elsewhere | STORE, *run)
        assert (started.returncode, started.stderr) == (0, ""), started.stdout + started.stderr
        here.wait_until(lambda: here.run_folder("far").exists(layout.REPORT), look_s=1.0)
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


@pytest.fixture
def run(here: LocalStack, ended: list[int]) -> ObjectStore:
    return here.run("far")


def test_a_run_over_two_machines_completes_and_verifies(
    here: LocalStack, elsewhere: dict[str, str], ended: list[int]
) -> None:
    status = _json(here, elsewhere | STORE, "status", "far", "--json")
    assert (status["state"], status["reason"]) == (
        "completed",
        f"all policies reached version {STEPS}",
    )
    verdict = _json(here, elsewhere | STORE, "verify", "far", "--json")
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
    assert len(of_pools["there"]) == 6  # two trainers, a rollout worker and a mirror of each region
    assert state.load(there) is None
    assert list(there.store.iterdir()) == []


@pytest.mark.parametrize("region", REGIONS)
def test_every_version_is_in_both_mirrors_bit_for_bit(
    run: ObjectStore, mirrors: dict[str, str], region: str
) -> None:
    mirror = open_store(mirrors[region]).sub(layout.run_prefix("far"))
    for policy in POLICIES:
        assert manifests.latest(run, policy) == STEPS
        chain = [manifests.read_manifest(run, policy, version) for version in range(STEPS + 1)]
        for manifest in chain:
            folder = layout.weights(policy, manifest.version)
            for name in ("manifest.json", *(file.name for file in manifest.files)):
                assert mirror.get(f"{folder}/{name}") == run.get(f"{folder}/{name}")
        assert [manifest.kind for manifest in chain] == ["anchor", *["delta"] * STEPS]
        assert sum(file.num_bytes for manifest in chain[1:] for file in manifest.files) > 0
        assert weights_digest(reader.fetch(mirror, policy, STEPS)) == chain[-1].digest


def test_weights_cross_once_and_are_read_in_the_region(run: ObjectStore) -> None:
    beats = {beat.id: beat for beat in heartbeats.readable(run)}
    for region in REGIONS:
        mirror, worker = beats[f"mirror-{region}"], beats[f"rollout-{region}-0"]
        assert (mirror.state, mirror.versions) == ("done", dict.fromkeys(POLICIES, STEPS))
        for policy in POLICIES:
            chain = [manifests.read_manifest(run, policy, version) for version in range(STEPS + 1)]
            whole = sum(file.num_bytes for manifest in chain for file in manifest.files)
            assert isinstance(mirror.progress, MirrorProgress)
            assert isinstance(worker.progress, RolloutProgress)
            assert mirror.progress.mirrored_bytes[policy] >= whole
            assert worker.progress.weights_bytes_mirror[policy] > 0


def test_commands_use_the_store_of_the_stack(here: LocalStack, ended: list[int]) -> None:
    weights = here.astraflow("weights", "far", "solver", "--json")
    assert [row["version"] for row in json.loads(weights.stdout)] == list(range(STEPS + 1))
    report = f"{STORE['ASTRAFLOW_STORE']}/runs/far/report.html"
    assert here.astraflow("report", "far").stdout == f"{report}\n"


def test_no_object_log_or_stack_record_contains_the_credentials(
    here: LocalStack,
    elsewhere: dict[str, str],
    run: ObjectStore,
    databases: str,
    mirrors: dict[str, str],
) -> None:
    """Prefect's database has parameters, work pools and the encrypted block. It is in the folder of
    the stack, where Postgres has none.
    """
    places = [here.store, *map(open_store, mirrors.values())]
    homes = [here.home.root, Path(elsewhere["ASTRAFLOW_HOME"])]
    bodies = {f"{store.url}/{key}": store.get(key) for store in places for key in store.list()}
    bodies |= {
        str(path): path.read_bytes() for home in homes for path in home.rglob("*") if path.is_file()
    }
    assert {f"{run.url}/{layout.RUN}", str(here.home.record)} <= bodies.keys()
    assert any(name.startswith(str(here.home.flow_logs)) for name in bodies)
    with connected(here.stack.prefect_url) as prefect:
        bodies["the block, as Prefect shows it"] = prefect.request(
            "GET", "/block_types/slug/secret/block_documents"
        ).content
    if databases:
        bodies["Prefect's database"] = postgres.dump(databases, "prefect")
    for text in KEYS.values():
        assert [name for name, body in bodies.items() if text.encode() in body] == []


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
