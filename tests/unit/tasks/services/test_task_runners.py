"""`data.task_runner`: the dataflow's own flow, with tasks in threads, processes and Dask workers."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import TaskRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from data_ops.config import DaskRunner, ProcessRunner, RayRunner, ThreadRunner
from flows.run_dataflow import window_of_dataflow
from storage.errors import ConfigError
from storage.import_path import ALLOW_VARIABLE
from storage.run import batches, runs, shards
from storage.store.object_store import ObjectStore, open_store
from storage.weights import publisher
from tasks.recipes import loader
from tasks.services import parallel_ingest, run_service
from tasks.services.store_credentials import VARIABLE
from tasks.services.task_runners import DASK_PREFIX, RAY_PREFIX, make_task_runner
from tests.support.checkout import ROOT
from tests.support.patience import PATIENCE_S, until
from tests.support.runs.builders import episode, group, sequence, shard, tensors

STEPS, BATCH_SIZE, NUM_SHARDS = 2, 16, 48
KEY, SECRET_KEY = "key-of-the-block", "wJalrXUtnFEMI/K7MDENG"
MODULE = '''
import os, time
from pathlib import Path

class Meeting:
    """Keeps every group, once as many processes as expected have called it."""

    def __init__(self, folder, processes, patience_s):
        self.folder, self.processes, self.patience_s = Path(folder), processes, patience_s

    def keep(self, group):
        key = os.environ.get("AWS_ACCESS_KEY_ID", "")
        (self.folder / str(os.getpid())).write_text(key)
        end_s = time.monotonic() + self.patience_s
        while len(list(self.folder.iterdir())) < self.processes and time.monotonic() < end_s:
            time.sleep(0.01)
        return True
'''


def importable_filter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the filter `meeting:Meeting` importable from `folder`; return its folder of pids."""
    (folder / "meeting.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    pids = folder / "pids"
    pids.mkdir()
    return pids


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the filter `meeting:Meeting`, whose module is not part of AstraFlow."""
    return importable_filter(tmp_path, monkeypatch)


@pytest.fixture
def open_runs() -> Iterator[None]:
    yield
    parallel_ingest._open_run.cache_clear()


@pytest.fixture(scope="module")
def batches_of_threads(prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The content of the batches of the default runner, whose tasks run in this process."""
    folder = tmp_path_factory.mktemp("threads")
    with pytest.MonkeyPatch.context() as monkeypatch:
        pids = importable_filter(folder, monkeypatch)
        expected = served(folder / "store", pids, 1, "threads")
    parallel_ingest._open_run.cache_clear()
    assert [path.name for path in pids.iterdir()] == [str(os.getpid())]
    assert len(expected[0][3]) == BATCH_SIZE
    return expected


def run_with_shards(folder: Path, meeting: Path, processes: int, runner: object) -> ObjectStore:
    """The run `r` in a new store: version 0 of both policies, and more shards than it needs, two
    groups of two episodes each.
    """
    config = loader.load(
        "multi_policy_tiny",
        {
            "steps": STEPS,
            "policies.*.batch_size": BATCH_SIZE,
            "data.samples_per_prompt": 2,
            "data.prompts_per_order": 2,
            "data.batches_ahead": STEPS,
            "data.shards_per_task": 1,
            "data.task_runner": runner,
            "data.filter": [
                {
                    "name": "meeting:Meeting",
                    "args": {
                        "folder": str(meeting),
                        "processes": processes,
                        "patience_s": PATIENCE_S,
                    },
                }
            ],
        },
    )
    run = runs.create_run(open_store(str(folder)), "r", config.model_dump(mode="json"))
    manifests = {name: publisher.publish(run, name, 0, tensors(0)) for name in config.policies}
    digests = {name: {0: manifest.digest} for name, manifest in manifests.items()}
    verdict = sequence((11, 40), (50, 2), policy="verifier", reward=0.5, starts_episode=False)
    for number in range(NUM_SHARDS):
        plays = [
            group(
                episode(sequence(answer=(40 + number, 41, 2), reward=1.0), verdict),
                episode(sequence(answer=(40 + number, 43, 2), reward=0.0), verdict),
                prompt_id=f"{number}/{place}",
            )
            for place in range(2)
        ]
        shards.create(run, shard(*plays, order=number, weights=digests))
    return run


def served(folder: Path, meeting: Path, processes: int, runner: object) -> list[Any]:
    """The content of the batches after one window of the dataflow; all of its shards exist before."""
    run = run_with_shards(folder, meeting, processes, runner)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ASTRAFLOW_STORE", str(folder))
        assert window_of_dataflow("r", "dataflow", 0, 0) == "done"
    return contents(run)


def contents(run: ObjectStore) -> list[Any]:
    return [
        (
            policy,
            step,
            batch.shards,
            [(row.key, row.tokens.tolist(), row.advantages.tolist()) for row in batch.rows],
            batch.ledger,
            batch.metrics["dataflow/reward/mean"],
        )
        for policy in ("solver", "verifier")
        for step in range(1, STEPS + 1)
        for batch in [batches.read(run, policy, step)]
    ]


def test_a_batch_follows_the_tasks_of_its_shards(
    prefect_server: None, tmp_path: Path, meeting: Path, open_runs: None
) -> None:
    served(tmp_path / "edges", meeting, 1, "threads")
    run = open_store(str(tmp_path / "edges")).sub("runs/r")
    expected = {
        f"assemble batch {step} of {policy}": {
            f"read, filter, advantages: [{order}]"
            for order in {row.key.order for row in batches.read(run, policy, step).rows}
        }
        for policy in ("solver", "verifier")
        for step in range(1, STEPS + 1)
    }
    assert all(expected.values())

    def edges() -> dict[str, set[str]]:
        tasks = tasks_of_last_window()
        names = {task.id: task.name for task in tasks}
        return {
            task.name: {names.get(each.id, "?") for each in task.task_inputs["wait_for"]}
            for task in tasks
            if task.name.startswith("assemble")
        }

    until(lambda: edges() == expected, pause_s=0.2)  # the server records tasks with a delay


def tasks_of_last_window() -> list[TaskRun]:
    """What Prefect has recorded of the tasks of the newest flow run."""
    with get_client(sync_client=True) as client:
        (window, *_) = client.read_flow_runs(limit=1, sort=FlowRunSort.START_TIME_DESC)
        of_window = FlowRunFilter(id=FlowRunFilterId(any_=[window.id]))
        return client.read_task_runs(flow_run_filter=of_window, limit=200)


@pytest.mark.slow
@pytest.mark.usefixtures("open_runs")
def test_processes_and_threads_make_the_same_batches(
    tmp_path: Path, meeting: Path, batches_of_threads: list[Any]
) -> None:
    runner = {"name": "processes", "workers": 2}
    assert served(tmp_path / "processes", meeting, 2, runner) == batches_of_threads
    pids = {int(path.name) for path in meeting.iterdir()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.slow
@pytest.mark.usefixtures("open_runs")
def test_dask_workers_make_the_same_batches_with_their_own_credentials(
    tmp_path: Path,
    meeting: Path,
    batches_of_threads: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distributed = pytest.importorskip("distributed", reason="astraflow[dask] is not installed")
    monkeypatch.setenv(VARIABLE, "store-keys")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")  # variables of the block are removed at the end
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    values = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    Secret(value=json.dumps(values)).save("store-keys", overwrite=True)
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        config={"distributed.worker.profile.enabled": False},  # it can block a worker for ever
    ) as cluster:
        runner = {"name": "dask", "address": cluster.scheduler_address}
        assert served(tmp_path / "dask", meeting, 2, runner) == batches_of_threads
    keys = {int(path.name): path.read_text() for path in meeting.iterdir()}
    assert len(keys) == 2
    assert os.getpid() not in keys
    assert set(keys.values()) == {KEY}

    def stored() -> list[str]:
        return [each.model_dump_json() for each in tasks_of_last_window()]

    until(lambda: any("advantages: [" in each for each in stored()), pause_s=0.2)
    assert not any(KEY in each or SECRET_KEY in each for each in stored())


@pytest.mark.slow
def test_a_dask_cluster_of_the_dataflow_has_tls_no_open_port_and_no_profiler() -> None:
    dask = pytest.importorskip("dask", reason="astraflow[dask] is not installed")

    def listening() -> set[tuple[str, int]]:
        this = psutil.Process()
        return {
            connection.laddr
            for process in (this, *this.children(recursive=True))
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }

    def folders_of(client: Any) -> list[str]:
        """What Python's path begins with."""
        of_workers = client.run(lambda dask_worker: dask_worker.local_directory)
        return [
            *of_workers.values(),
            client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.local_directory),
        ]

    before = listening()
    runner: Any = make_task_runner(DaskRunner())
    with runner:
        assert all(f"/{DASK_PREFIX}" in folder for folder in folders_of(runner.client))
        enabled = runner.client.run(dask.config.get, "distributed.worker.profile.enabled")
        assert set(enabled.values()) == {False}
        assert {address.partition(":")[0] for address in enabled} == {"tls"}
        assert runner.client.scheduler.address.startswith("tls://127.0.0.1:")
        assert {address for address, _ in listening() - before} == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.usefixtures("open_runs")
def test_ray_workers_make_the_same_batches(
    tmp_path: Path,
    meeting: Path,
    batches_of_threads: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("prefect_ray", reason="astraflow[ray] is not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the filter's module
    assert served(tmp_path / "ray", meeting, 2, "ray") == batches_of_threads
    pids = {int(path.name) for path in meeting.iterdir()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.parametrize("address", [None, "ray://10.0.0.1:10001"])
def test_a_ray_cluster_of_the_dataflow_is_its_own_and_has_its_own_folder(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray opens its folder to every user, and reads its token from a file that all may read. The
    package is not imported.
    """
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of somebody")
    fake: Any = ModuleType("prefect_ray.task_runners")
    fake.RayTaskRunner = lambda *args, **settings: (*args, settings["init_kwargs"])
    monkeypatch.setitem(sys.modules, "prefect_ray", ModuleType("prefect_ray"))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    made: Any = make_task_runner(RayRunner(address=address))
    if address:
        assert made == (address, None)
        assert os.environ["RAY_AUTH_TOKEN"] == "of somebody"
    else:
        assert made[0] == "local"
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert re.fullmatch(r"[0-9a-f]{64}", os.environ["RAY_AUTH_TOKEN"])
        token = os.environ["RAY_AUTH_TOKEN"]
        make_task_runner(RayRunner())  # of the next window; Ray keeps the token that it has read
        assert os.environ["RAY_AUTH_TOKEN"] == token
        folder = Path(made[1]["_temp_dir"]).parent
        assert (folder.name.startswith(RAY_PREFIX), folder.stat().st_mode) == (True, 0o40700)
        assert folder.parent == Path("/tmp")  # paths of sockets have at most 107 bytes


@pytest.mark.parametrize(
    "config", [DaskRunner(address="tcp://x:1"), RayRunner(address="ray://x:1")]
)
def test_a_cluster_that_a_stored_run_names_is_asked_only_where_its_code_is_allowed(
    config: DaskRunner | RayRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (f"prefect_{config.name}", f"prefect_{config.name}.task_runners"):
        monkeypatch.setitem(sys.modules, module, None)
    for allowed in ("", "numpy"):
        monkeypatch.setenv(ALLOW_VARIABLE, allowed)
        with pytest.raises(ConfigError, match=rf"can run code here.*add {config.name} there"):
            make_task_runner(config)
    monkeypatch.setenv(ALLOW_VARIABLE, config.name)
    with pytest.raises(ConfigError, match="install its extra"):
        make_task_runner(config)


@pytest.mark.parametrize(("config", "package"), [(DaskRunner(), "dask"), (RayRunner(), "ray")])
def test_a_runner_whose_package_is_missing_names_the_extra(
    config: DaskRunner | RayRunner, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (f"prefect_{package}", f"prefect_{package}.task_runners"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"install its extra: .*astraflow\[{package}\]"):
        make_task_runner(config)


def test_a_run_with_a_missing_runner_package_fails_with_this_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "prefect_ray", None)
    config = loader.load("multi_policy_tiny", {"data.task_runner": "ray"})
    run = runs.create_run(open_store(str(tmp_path)), "r", config.model_dump(mode="json"))
    with pytest.raises(ConfigError):
        run_service.run_dataflow_window("r", "dataflow", 0)
    stop = runs.read_stop(run)
    assert stop is not None
    assert stop.state == "failed"
    assert stop.reason.startswith("dataflow: data.task_runner: ray cannot be used where")


def test_a_recipe_selects_a_runner_by_name_or_by_a_section() -> None:
    def runner(overrides: dict[str, object]) -> object:
        return loader.load("multi_policy_tiny", overrides).data.task_runner

    assert runner({}) == ThreadRunner()
    assert runner({"data.task_runner": "processes"}) == ProcessRunner()
    assert runner({"data.task_runner": {"name": "processes", "workers": 3}}) == ProcessRunner(
        workers=3
    )
    address = "tcp://10.0.0.5:8786"
    assert runner({"data.task_runner": {"name": "dask", "address": address}}) == DaskRunner(
        address=address
    )
    known = "'spark' is not known; use one of threads, processes, dask, ray$"
    with pytest.raises(ConfigError, match=f"data.task_runner: {known}"):
        runner({"data.task_runner": "spark"})
    with pytest.raises(ConfigError, match=r"workers"):
        runner({"data.task_runner": {"name": "threads", "workers": 3}})


def test_threads_and_processes_need_no_extra() -> None:
    assert isinstance(make_task_runner(ThreadRunner()), ThreadPoolTaskRunner)
    processes = make_task_runner(ProcessRunner(workers=3))
    assert isinstance(processes, ProcessPoolTaskRunner)
    assert processes._max_workers == 3


def test_there_is_a_worker_process_for_each_cpu_that_the_dataflow_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    processes = make_task_runner(ProcessRunner())
    assert isinstance(processes, ProcessPoolTaskRunner)
    assert processes._max_workers == 1


def test_a_worker_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, time\n"
        "from tasks.services.task_runners import exit_with_parent\n"
        "def work():\n"
        "    exit_with_parent()\n"
        "    time.sleep(100000)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    child.start()\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(100000)\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        until(lambda: child.num_threads() > 1)  # the parent watcher of the process
        parent.kill()
    until(lambda: not child.is_running())
