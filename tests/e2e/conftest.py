"""A local stack in its own home on free ports, and its command line.

Nothing of it is left at the end, whatever the tests did.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import Artifact, TaskRun, TaskRunResult
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import PrefectHTTPStatusError

from deployments.paths import Home
from deployments.registration import flow_runs
from deployments.registration.client import connected
from deployments.stack import environment, plan, processes, state, up_down
from deployments.stack.state import Stack
from storage import layout
from storage.coordination import heartbeats
from storage.errors import ConfigError
from storage.machine.ports import unusual_port
from storage.records.control import Heartbeat
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests
from tests.support.patience import until
from tests.support.stacks import process_of, recorded_stack

POLICIES = ("solver", "verifier")
"""Of RECIPE."""
RECIPE = Path(__file__).with_name("tiny.yaml")
BIN = Path(sys.executable).parent
OURS = ("PREFECT_", "MLFLOW_", "ASTRAFLOW_", "AWS_")
NOTHING: Mapping[str, str] = {}
E2E_TIMEOUT_S = 3600
"""Of one test: a distant backstop, for the tests themselves wait as long as there is progress."""
STALL_LIMIT_S = 300.0
"""A wait fails when the stack did nothing that can be seen for so long: on a machine with eight
times the work that it has cores for, the start of a process takes a minute.
"""
HANG_LIMIT_S = E2E_TIMEOUT_S + 100
"""After it, the process of a test ends with the stacks of its threads; the limit of other tests is
shorter (`faulthandler_timeout`).
"""
TRACES_INTERVAL_S = 15.0
"""Between two looks at what the stack does; each costs it some CPU time."""
LOOK_S = 0.5
ASK_PREFECT_S = 1.5
"""Between two questions to the server, each of which makes a client of its own."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Replace the limit that pytest's own plugin has set just before."""
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(HANG_LIMIT_S, file=stderr, exit=True)


@dataclass(frozen=True)
class ShownTask:
    """A task run, as Prefect's graph shows it."""

    state: str
    tags: tuple[str, ...]
    after: set[str]
    """The names of the task runs that it depends on."""


@dataclass(frozen=True)
class LocalStack:
    """A home with a running stack."""

    home: Home
    stack: Stack

    @property
    def store(self) -> ObjectStore:
        return open_store(self.stack.store_url)

    def run(self, run_id: str) -> ObjectStore:
        return runs.open_run(self.store, run_id)

    def run_folder(self, run_id: str) -> ObjectStore:
        """The folder of a run that may not exist yet."""
        return self.store.sub(layout.run_prefix(run_id))

    def wait_until(self, happened: Callable[[], bool], look_s: float = LOOK_S) -> None:
        """Wait while the stack makes progress."""
        wait_until(happened, self.home, self.stack, look_s)

    def wait_for_version(self, run_id: str, version: int) -> None:
        """Wait until both policies of a run have reached the version."""
        run = self.run_folder(run_id)
        self.wait_until(lambda: all(manifests.exists(run, policy, version) for policy in POLICIES))

    def kill(self, name: str) -> None:
        """Kill a process of the stack, and wait until another one runs in its place."""
        victim = process_of(recorded_stack(self.home), name)
        os.kill(victim.pid, signal.SIGKILL)

        def is_replaced() -> bool:
            stack = state.load(self.home)
            process = stack.process(name) if stack else None
            return process is not None and process != victim

        self.wait_until(is_replaced)

    def astraflow(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line in another process that gets only the home."""
        return self._command("astraflow", *arguments)

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Prefect's command in the folder with the stack's `prefect.toml`."""
        return self._command("prefect", *arguments)

    def start(self, run_id: str, *settings: str) -> str:
        """Start a run of the tests' recipe with `key=value` settings; return its supervisor's flow
        run.
        """
        overrides = [part for setting in settings for part in ("--set", setting)]
        result = self.astraflow(
            "run", "--recipe", str(RECIPE), "--run-id", run_id, *overrides, "--detach"
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.split("/runs/flow-run/")[1].split()[0]

    def wait_for_end(self, flow_run_id: str) -> str:
        """Prefect's state name at the end of a flow run."""
        self.wait_until(
            lambda: flow_runs.read(self.stack.prefect_url, flow_run_id).final, ASK_PREFECT_S
        )
        return flow_runs.read(self.stack.prefect_url, flow_run_id).state

    def member(self, run_id: str, member: str) -> Heartbeat:
        """The last heartbeat of a member of a run."""
        return next(beat for beat in heartbeats.readable(self.run(run_id)) if beat.id == member)

    def flow_runs(self, run_id: str) -> dict[str, list[str]]:
        """Name → states, oldest first, of the run's flow runs and of the flow runs inside them."""
        tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:{run_id}"]))
        with connected(self.stack.prefect_url) as client:
            result = client.read_flow_runs(flow_run_filter=tagged)
            parents = FlowRunFilterParentFlowRunId(any_=[item.id for item in result])
            result += client.read_flow_runs(
                flow_run_filter=FlowRunFilter(parent_flow_run_id=parents)
            )
        states: dict[str, list[str]] = {}
        for item in sorted(
            {item.id: item for item in result}.values(), key=lambda item: item.created
        ):
            states.setdefault(item.name, []).append(item.state.name)
        return states

    def flow_run_id(self, run_id: str) -> UUID:
        """The first flow run that supervised the run."""
        return self.flow_run_ids(run_id)[0]

    def flow_run_ids(self, name: str) -> list[UUID]:
        """The flow runs of this name, oldest first."""
        named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
        with connected(self.stack.prefect_url) as client:
            found = client.read_flow_runs(
                flow_run_filter=named, sort=FlowRunSort.EXPECTED_START_TIME_ASC
            )
        return [each.id for each in found]

    def task_runs(self, flow_run_id: UUID) -> dict[str, ShownTask]:
        """Name → task run of the flow run that has ended; the server stores their last states a
        while after they were reached.
        """
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        with connected(self.stack.prefect_url) as client:

            def read() -> list[TaskRun]:
                return list(client.read_task_runs(flow_run_filter=wanted))

            self.wait_until(
                lambda: all(each.state is not None and each.state.is_final() for each in read())
            )
            found = read()
        names = {each.id: each.name for each in found}
        return {
            each.name: ShownTask(
                state=each.state_name or "",
                tags=tuple(sorted(each.tags)),
                after={
                    names[given.id]
                    for inputs in each.task_inputs.values()
                    for given in inputs
                    if isinstance(given, TaskRunResult)
                },
            )
            for each in found
        }

    def artifacts(self, flow_run_id: UUID) -> dict[str, Artifact]:
        """Key → artifact of the flow run."""
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        with connected(self.stack.prefect_url) as client:
            return {each.key or "": each for each in client.read_artifacts(artifact_filter=wanted)}

    def flow_processes(self) -> list[int]:
        """Live processes of flow runs."""
        return flow_processes(self.home)

    def flow_log(self, flow_run_id: str) -> str:
        """The output of the process of a flow run."""
        return (self.home.flow_logs / f"{flow_run_id}.log").read_text()

    def _command(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
        environment["ASTRAFLOW_HOME"] = str(self.home.root)
        command = [str(BIN / name), *arguments]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = subprocess.Popen(
                command, cwd=self.home.root, env=environment, stdout=out, stderr=err
            )
            try:
                self.wait_until(lambda: child.poll() is not None, look_s=0.05)
            finally:
                child.kill()
                child.wait()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, child.returncode, out.read(), err.read())


def wait_until(
    happened: Callable[[], bool], home: Home, running: Stack, look_s: float = LOOK_S
) -> None:
    """Wait while the stack leaves new traces: objects, heartbeats, states of flow runs, processes."""
    seen, looked_at, moved_at = _traces(home, running), time.monotonic(), time.monotonic()
    while not happened():
        time.sleep(look_s)
        if time.monotonic() - looked_at < TRACES_INTERVAL_S:
            continue
        traces, looked_at = _traces(home, running), time.monotonic()
        if traces != seen:
            seen, moved_at = traces, time.monotonic()
        idle_s = time.monotonic() - moved_at
        assert idle_s < STALL_LIMIT_S, (
            f"it did not happen, and the stack has done nothing for {idle_s:.0f} s; last: {seen}"
        )


def _traces(home: Home, running: Stack) -> tuple[object, ...]:
    """The traces of a working stack. Counters of time and traffic are left out because they also
    grow in idle members.
    """
    store = open_store(running.store_url)
    keys = [key for key in store.list() if f"/{layout.HEARTBEATS}" not in key]
    said = [
        (
            run_id,
            heartbeat.id,
            heartbeat.attempt,
            heartbeat.state,
            heartbeat.note,
            getattr(heartbeat.progress, "base_model", None),
            getattr(heartbeat.progress, "episodes", None),
        )
        for run_id in runs.read_all(store).ids
        for heartbeat in heartbeats.readable(store.sub(layout.run_prefix(run_id)))
    ]
    return len(keys), tuple(said), _flow_states(running.prefect_url), tuple(flow_processes(home))


def _flow_states(api_url: str) -> tuple[tuple[str, str], ...]:
    """Names and states of the flow runs; empty while the server does not respond."""
    try:
        with connected(api_url) as client:
            return tuple(
                sorted(
                    (str(item.id), item.state.name)
                    for item in client.read_flow_runs()
                    if item.state is not None
                )
            )
    except (ConfigError, PrefectHTTPStatusError):
        return ()


def flow_processes(home: Home) -> list[int]:
    """Live processes of flow runs."""
    results = []
    for item in processes.marked(str(home.root)):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile; a zombie counts as ended
            if "deployments.registration.flow_entrypoint" in item.cmdline():
                results.append(item.pid)
    return results


@contextmanager
def stack_in(home: Home, variables: Mapping[str, str] = NOTHING) -> Iterator[LocalStack]:
    """A stack that is started with these environment variables and stopped at the end of the block."""
    try:
        up = _up(home, variables)
        with pytest.MonkeyPatch.context() as patch:  # for clients in this process
            complete = environment.of_stack(home, up, {})
            for name in (environment.PREFECT_AUTH, *environment.MLFLOW_AUTH):
                if name in complete:
                    patch.setenv(name, complete[name])
            yield LocalStack(home, up)
    finally:
        try:
            with _own_environment():
                up_down.down(home, lambda words: None)
        finally:
            for left in processes.marked(str(home.root)):
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(left.pid, signal.SIGKILL)
            until(lambda: processes.marked(str(home.root)) == [])  # a zombie counts as ended


def _up(home: Home, variables: Mapping[str, str]) -> Stack:
    with _own_environment(), pytest.MonkeyPatch.context() as patch:
        os.environ.update(variables)
        patch.setattr(plan, "PREFECT_PORT", unusual_port())
        patch.setattr(plan, "MLFLOW_PORT", unusual_port())
        return up_down.up(home, lambda words: None)


class _own_environment:  # noqa: N801  # a context manager reads like a function
    """Restore the environment of this process after commands of the stack have set its addresses."""

    def __enter__(self) -> None:
        self._before = dict(os.environ)
        for name in [name for name in os.environ if name.startswith(OURS)]:
            del os.environ[name]

    def __exit__(self, *error: object) -> None:
        os.environ.clear()
        os.environ.update(self._before)
