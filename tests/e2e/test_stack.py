"""The local stack with real processes, ports, a Prefect server and workers. One stack serves all
tests here, in their order.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.events import Event
from prefect.events.clients import PrefectEventsClient, PrefectEventSubscriber
from prefect.settings import temporary_settings
from websockets import ConnectionClosedError, InvalidStatus, Origin, Subprotocol
from websockets.asyncio.client import connect

from deployments.paths import OTHERS, Home
from deployments.registration import deployments, flow_runs, pools, work_pools
from deployments.registration.client import connected
from deployments.registration.deployments import Deployment
from deployments.registration.pools import Pool, RegionQueue
from deployments.servers import auth
from deployments.stack import commands, pages, plan, processes, readiness, startup, state, up_down
from deployments.stack.state import Stack
from storage.errors import ConfigError
from storage.machine.ports import HOST, unusual_port
from tasks.services.prefect_settings import settings_for
from tests.e2e.conftest import E2E_TIMEOUT_S, wait_until
from tests.support.stacks import process_of, recorded_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(E2E_TIMEOUT_S)]

FLOW = """
import os, time
from prefect import flow

@flow(name="probe")
def probe(seconds: float = 0.0) -> str:
    print("store", os.environ["ASTRAFLOW_STORE"], flush=True)
    time.sleep(seconds)
    return "done"
"""


@dataclass(kw_only=True)
class World:
    """A home with a stack whose usual ports are taken."""

    home: Home
    folder: Path
    taken: list[int]
    stack: Stack
    said: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("stack")
    home = Home(folder / "home")
    (folder / "probe_flow_for_test.py").write_text(FLOW)
    environment = dict(os.environ)
    listeners = [_listener(), _listener()]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name in ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI", "ASTRAFLOW_STORE"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
        patch.setenv("PREFECT_SERVER_API_HOST", "0.0.0.0")
        patch.setenv("MLFLOW_HOST", "0.0.0.0")
        taken = [listener.getsockname()[1] for listener in listeners]
        patch.setattr(plan, "PREFECT_PORT", taken[0])
        patch.setattr(plan, "MLFLOW_PORT", taken[1])
        _leave_a_stale_record(home, *taken)
        messages: list[str] = []
        try:
            yield World(
                home=home,
                folder=folder,
                taken=taken,
                stack=up_down.up(home, messages.append, wait_for_mlflow=False),
                said=messages,
            )
        finally:
            up_down.down(home, messages.append)
            for listener in listeners:
                listener.close()
            os.environ.clear()
            os.environ.update(environment)


def test_up_replaces_a_stale_record_and_avoids_taken_ports(world: World) -> None:
    assert len(world.stack.processes) == 6
    assert all(map(processes.is_alive, world.stack.processes))
    ports = {
        int(url.split(":")[2].split("/")[0])
        for url in (world.stack.prefect_url, world.stack.mlflow_url)
    }
    assert len(ports) == 2
    assert not ports & set(world.taken)


def test_all_deployments_are_registered_and_the_nightly_schedules_are_off(world: World) -> None:
    with connected(world.stack.prefect_url) as client:
        registered = client.read_deployments()
        wanted = Counter(deployment.name for deployment in deployments.DEPLOYMENTS)
        assert Counter(deployment.name for deployment in registered) == wanted
        active = [schedule.active for deployment in registered for schedule in deployment.schedules]
        assert active == [False, False]  # astraflow/nightly and gc/nightly
        multi_policy = client.read_deployment_by_name("astraflow/multi-policy")
        assert multi_policy.parameters == {"recipe": "multi_policy_tiny"}
        assert "description" in multi_policy.parameter_openapi_schema["properties"]["recipe"]


def test_a_second_up_starts_nothing_and_waits_for_mlflow(world: World) -> None:
    again = up_down.up(world.home, world.said.append)
    assert again.processes == world.stack.processes
    assert up_down.running(world.home) == again


def test_a_pool_that_exists_keeps_its_type_image_namespace_and_limit(world: World) -> None:
    url, name = world.stack.prefect_url, "theirs"
    theirs = Pool(
        type="kubernetes",
        concurrency=7,
        environment={"THEIRS": "1"},
        job_variables={"image": "registry.example/theirs:2", "namespace": "training"},
    )
    ours = Pool(type="process", description="ours")
    own = {"ASTRAFLOW_STORE": "s3://bucket"}
    assert work_pools.create_or_merge(url, {name: theirs}, "python", {}, own) == [
        "created the work pool theirs of type kubernetes"
    ]
    assert work_pools.create_or_merge(url, {name: ours}, "/opt/python", own, own) == [
        "the work pool theirs keeps its type kubernetes; process is not set",
        "changed the work pool theirs: base_job_template",
    ]
    with connected(url) as client:
        pool = client.read_work_pool(name)
        client.delete_work_pool(name)
    assert (pool.type, pool.concurrency_limit) == ("kubernetes", 7)
    variables = {
        variable: each.get("default")
        for variable, each in pool.base_job_template["variables"]["properties"].items()
    }
    assert variables["image"] == "registry.example/theirs:2"
    assert variables["namespace"] == "training"
    assert variables["command"] == "/opt/python -m deployments.registration.flow_entrypoint"
    assert variables["env"] == {"THEIRS": "1", **own}


def test_the_queue_of_a_region_gets_its_limit_and_a_later_file_changes_it(world: World) -> None:
    url = world.stack.prefect_url
    for limit in (3, 5):
        rollout = Pool(regions={"eu-limited": RegionQueue(concurrency=limit)})
        work_pools.create_or_merge(url, {"rollout": rollout}, sys.executable, {}, ())
        with connected(url) as client:
            queue = client.read_work_queue_by_name("eu-limited", work_pool_name="rollout")
            assert queue.concurrency_limit == limit


def test_a_pool_of_an_unknown_type_is_refused_with_the_known_ones(world: World) -> None:
    with pytest.raises(ConfigError, match=r"has no type 'cubes'; it has .*kubernetes"):
        work_pools.create_or_merge(
            world.stack.prefect_url, {"mine": Pool(type="cubes")}, "python", {}, ()
        )


def test_workers_for_another_server_need_its_pools_and_change_nothing_there(
    world: World,
) -> None:
    elsewhere = replace(world.stack, own_server=False)
    before = defaults_of_pool(world.stack.prefect_url)
    assert startup._served_pools(elsewhere, world.said.append) == list(pools.NAMES)
    assert defaults_of_pool(world.stack.prefect_url) == before


def test_one_more_worker_serves_a_region_with_its_own_gpus(world: World) -> None:
    name = f"rollout:eu-limited:0+1@{socket.gethostname()}"
    arguments = ["--pool", "rollout", "--region", "eu-limited", "--gpus", "0,1"]
    with subprocess.Popen(
        [sys.executable, "-m", "deployments.cli.app", "worker", *arguments],
        env=os.environ | {"ASTRAFLOW_HOME": str(world.home.root)},
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            _wait(
                world,
                lambda: (
                    ("rollout", name)
                    in readiness.worker_beats(world.stack.prefect_url, ["rollout"])
                ),
            )
            process = psutil.Process(started.pid)
            assert process.cmdline()[-4:] == ["--work-queue", "eu-limited", "--limit", "1"]
            variables = process.environ()
            assert variables["CUDA_VISIBLE_DEVICES"] == "0,1"
            assert variables["PREFECT_API_URL"] == world.stack.prefect_url
            assert variables["OMP_NUM_THREADS"] == "1"
            second = ["worker", "--pool", "rollout", "--gpus", "1"]
            refused = subprocess.run(
                [sys.executable, "-m", "deployments.cli.app", *second],
                env=os.environ | {"ASTRAFLOW_HOME": str(world.home.root)},
                capture_output=True,
                text=True,
                check=False,
            )
            assert refused.returncode == 1
            assert f"belongs to another worker-rollout (process {started.pid})" in refused.stderr
        finally:
            started.terminate()
        output, _ = started.communicate()
        assert output.startswith(f"{name} serves {world.stack.prefect_url}; Ctrl-C ends it\n")


def defaults_of_pool(url: str, name: str = "rollout") -> dict[str, Any]:
    """Return the default values of a pool's job variables."""
    with connected(url) as client:
        template = client.read_work_pool(name).base_job_template
    return {
        variable: each.get("default")
        for variable, each in template["variables"]["properties"].items()
    }


EVIL = {"origin": "http://evil.example"}


def test_prefect_requires_the_secret_for_every_request(world: World) -> None:
    deployment = _deployment_id(world)
    run_a_command = {"job_variables": {"command": "touch /tmp/evil"}}
    with httpx.Client(base_url=world.stack.prefect_url, trust_env=False) as anyone:
        for headers in ({}, {"authorization": auth.basic("astraflow:wrong")}):
            started = anyone.post(
                f"deployments/{deployment}/create_flow_run", json=run_a_command, headers=headers
            )
            read = anyone.post(
                "block_documents/filter", json={"include_secrets": True}, headers=headers
            )
            assert (started.status_code, read.status_code) == (401, 401)
    secret = {"authorization": auth.basic(auth.create(world.home))}
    with httpx.Client(base_url=world.stack.prefect_url, trust_env=False, headers=secret) as known:
        foreign = known.post(
            f"deployments/{deployment}/create_flow_run", json=run_a_command, headers=EVIL
        )
        rebound = known.get("flow_runs/filter", headers={"host": "evil.example:4200"})
        preflight = known.options(f"deployments/{deployment}/create_flow_run", headers=EVIL)
        assert [answer.status_code for answer in (foreign, rebound, preflight)] == [403, 403, 403]
        assert known.post("block_documents/filter", json={"include_secrets": True}).json() == []
        assert known.post("flow_runs/count", json={}).json() == 0


async def test_prefects_event_stream_requires_the_secret(world: World) -> None:
    stream = f"{world.stack.prefect_url.replace('http', 'ws')}/events/out"
    async with connect(stream, subprotocols=[Subprotocol("prefect")], proxy=None) as anyone:
        await anyone.send(json.dumps({"type": "auth", "token": "astraflow:wrong"}))
        with pytest.raises(ConnectionClosedError, match="Invalid token"):
            await anyone.recv()
    with pytest.raises(InvalidStatus, match="403"):
        await connect(
            stream, subprotocols=[Subprotocol("prefect")], proxy=None, origin=Origin(EVIL["origin"])
        )
    with temporary_settings(settings_for(world.stack.prefect_url)):
        async with PrefectEventSubscriber(reconnection_attempts=0) as subscriber:
            async with PrefectEventsClient() as client:
                await client.emit(Event(event="probe", resource={"prefect.resource.id": "probe"}))
            async for event in subscriber:
                if event.event == "probe":
                    break


def test_mlflow_requires_the_secret(world: World) -> None:
    search = f"{world.stack.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=5"
    secret = {"authorization": auth.basic(auth.create(world.home))}
    with httpx.Client(trust_env=False) as client:
        assert client.get(search).status_code == 401
        assert client.get(search, headers={**secret, **EVIL}).status_code == 403
        assert [
            item["name"] for item in client.get(search, headers=secret).json()["experiments"]
        ] == ["Default"]


def test_the_printed_address_logs_a_browser_in(world: World) -> None:
    """Send the request as the page does, which reads the text after the `#`."""
    for address in (pages.prefect(world.home, world.stack), pages.mlflow(world.home, world.stack)):
        login, _, ticket = address.removesuffix("/").partition("#")
        with httpx.Client(trust_env=False) as browser:
            assert browser.get(login).headers["content-type"].startswith("text/html")
            response = browser.post(login, headers={"authorization": f"Ticket {ticket}"})
            assert response.status_code == 200
            assert browser.get(world.stack.mlflow_url).text.lower().startswith("<!doctype html>")
            if response.text:
                stored = {"authorization": f"Basic {response.text}"}
                assert (
                    browser.get(
                        f"{world.stack.prefect_url}/admin/version", headers=stored
                    ).status_code
                    == 200
                )


def test_only_the_owner_may_read_the_home(world: World) -> None:
    assert list(world.home.exposed()) == []
    assert world.home.record.exists()
    assert (world.home.prefect / "prefect.db").exists()
    assert [item for item in world.home.logs.glob("*.log") if item.stat().st_mode & OTHERS] == []


def test_servers_listen_on_the_loopback_interface_only(world: World) -> None:
    for name in ("prefect-server", "mlflow"):
        server = psutil.Process(process_of(world.stack, name).pid)
        listened = [
            item.laddr.ip for item in server.net_connections() if item.status == psutil.CONN_LISTEN
        ]
        assert listened == ["127.0.0.1"]


def test_servers_have_no_credentials_of_the_store(world: World) -> None:
    for item in world.stack.processes:
        inherited = psutil.Process(item.pid).environ()
        assert (inherited.get("AWS_SECRET_ACCESS_KEY") == "hidden") == item.name.startswith(
            ("worker", "watchdog")
        ), item.name


@pytest.mark.parametrize("name", ["worker-trainers", "prefect-server", "mlflow"])
def test_the_watchdog_starts_what_was_killed_with_the_same_ports_and_secrets(
    world: World, name: str
) -> None:
    environment_before = _environment(world.stack, name)
    _kill(world, name)
    _wait(world, lambda: up_down.running(world.home) is not None)
    healed = recorded_stack(world.home)
    assert _replaced(world, healed) == {name}
    assert replace(healed, processes=()) == replace(world.stack, processes=())
    for url in (world.stack.prefect_url, world.stack.mlflow_url):
        _wait(world, lambda url=url: readiness.responds(f"{url}/health"))  # type: ignore[misc]
    pool = {"worker-trainers": "trainers"}.get(name)
    if pool is not None:
        worker = (pool, commands.worker_name(pool))
        _wait(world, lambda: worker in readiness.worker_beats(world.stack.prefect_url, [pool]))
    assert _environment(healed, name) == environment_before
    world.stack = healed


def test_up_repairs_after_the_death_of_the_watchdog_and_of_another_process(world: World) -> None:
    _kill(world, "watchdog")
    _kill(world, "worker-trainers")
    assert up_down.running(world.home) is None
    mended = up_down.up(world.home, world.said.append)
    assert _replaced(world, mended) == {"watchdog", "worker-trainers"}
    world.stack = mended


def test_an_active_schedule_creates_flow_runs(world: World) -> None:
    """With an unsupported SQLAlchemy, the scheduler creates no flow runs and logs nothing."""
    probe = Deployment(
        flow="probe",
        name="probe",
        entrypoint="probe_flow_for_test.py:probe",
        pool="control",
        description="for a test",
    )
    nightly = Deployment(
        flow="probe",
        name="cron",
        entrypoint="probe_flow_for_test.py:probe",
        pool="trainers",
        description="for a test",
        cron="0 2 * * *",
        cron_active=True,
    )
    assert deployments.register(world.stack.prefect_url, [probe, nightly], str(world.folder)) == [
        "probe/probe",
        "probe/cron",
    ]
    _wait(world, lambda: _planned_runs(world, "cron") > 0)


def test_registering_again_does_not_change_a_schedule_that_a_user_set(world: World) -> None:
    nightly = Deployment(
        flow="probe",
        name="cron",
        entrypoint="probe_flow_for_test.py:probe",
        pool="trainers",
        description="for a test",
        cron="0 2 * * *",
    )
    deployments.register(world.stack.prefect_url, [nightly], str(world.folder))
    with connected(world.stack.prefect_url) as client:
        assert [
            schedule.active for schedule in client.read_deployment_by_name("probe/cron").schedules
        ] == [True]


def test_prefects_command_reaches_the_stack_without_environment_variables(world: World) -> None:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [
        sys.executable,
        "-m",
        "prefect",
        "deployment",
        "run",
        "probe/probe",
        "--param",
        "seconds=0",
    ]
    result = subprocess.run(
        command, cwd=world.home.root, env=bare, capture_output=True, text=True, check=True
    ).stdout
    flow_run_id = result.split("UUID: ")[1].split()[0]
    _wait(world, lambda: flow_runs.read(world.stack.prefect_url, flow_run_id).state == "Completed")
    printed = (world.home.flow_logs / f"{flow_run_id}.log").read_text()
    assert f"store {world.stack.store_url}" in printed
    assert (world.home.flow_logs / f"{flow_run_id}.log").stat().st_mode & OTHERS == 0


def test_the_secret_is_in_no_log_and_not_in_prefects_database(world: World) -> None:
    password = auth.create(world.home).partition(":")[2].encode()
    kept = [
        path
        for path in world.home.root.rglob("*")
        if path.is_file() and password in path.read_bytes()
    ]
    assert sorted(kept) == [world.home.auth, world.home.prefect_toml]


def test_down_cancels_flow_runs_and_leaves_no_process(world: World) -> None:
    url = world.stack.prefect_url
    running = flow_runs.start(url, "probe/probe", {"seconds": 600.0}, "a long one", [])
    _wait(world, lambda: flow_runs.read(url, running.id).state == "Running")
    everything = processes.marked(str(world.home.root))
    assert len(everything) >= 6
    up_down.down(world.home, world.said.append)
    assert "cancelled 1 flow runs" in world.said
    assert not [process for process in everything if _lives(process)]
    assert processes.marked(str(world.home.root)) == []
    assert not world.home.prefect_toml.exists()
    assert not world.home.auth.exists()
    assert state.load(world.home) is None
    up_down.down(world.home, world.said.append)
    assert world.said[-1] == "nothing was running"


def _kill(world: World, name: str) -> None:
    victim = process_of(world.stack, name)
    os.kill(victim.pid, signal.SIGKILL)
    _wait(world, lambda: not processes.is_alive(victim))


def _environment(stack: Stack, name: str) -> dict[str, str]:
    return psutil.Process(process_of(stack, name).pid).environ()


def _replaced(world: World, stack: Stack) -> set[str]:
    return {process.name for process in stack.processes if process not in world.stack.processes}


def _leave_a_stale_record(home: Home, prefect_port: int, mlflow_port: int) -> None:
    """Write a record as after a power loss: its process ids and ports now belong to other
    processes, one of the ids to this one.
    """
    home.create()
    stale = {"name": "prefect-server", "pid": os.getpid(), "created_s": 1.0, "log": ""}
    body = {
        "format": 1,
        "prefect_url": f"http://{HOST}:{prefect_port}/api",
        "mlflow_url": f"http://{HOST}:{mlflow_port}",
        "store_url": "x",
    }
    home.record.write_text(
        json.dumps(
            {**body, "own_server": True, "processes": [stale], "deployed": "", "ready": True}
        )
    )


def _listener() -> socket.socket:
    listener = socket.socket()
    listener.bind((HOST, unusual_port()))
    listener.listen(1)
    return listener


def _deployment_id(world: World) -> str:
    with connected(world.stack.prefect_url) as client:
        return str(client.read_deployment_by_name("astraflow/multi-policy").id)


def _planned_runs(world: World, deployment: str) -> int:
    with connected(world.stack.prefect_url) as client:
        which = DeploymentFilter(name=DeploymentFilterName(any_=[deployment]))
        result = client.read_flow_runs(deployment_filter=which)
        return sum(run.state is not None and run.state.is_scheduled() for run in result)


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _wait(world: World, happened: Callable[[], bool]) -> None:
    wait_until(happened, world.home, world.stack)
