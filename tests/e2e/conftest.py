"""A local stack in a home of its own, on free ports, and its commands as a person types them; one for all tests that need no
other.

It is brought up as late and only as often as needed, and nothing of it is left at the end, whatever the tests did.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId, FlowRunFilterTags

from deployments import environment, flow_runs, plan, processes, stack
from deployments.home import Home
from deployments.ports import HOST
from deployments.prefect_api import connected
from deployments.record import Stack
from storage import heartbeats, layout, runs
from storage.objects import ObjectStore, open_store
from storage.records import Heartbeat

RECIPE = Path(__file__).with_name("tiny.yaml")
BIN = Path(sys.executable).parent
OURS = ("PREFECT_", "MLFLOW_", "ASTRAFLOW_", "AWS_")
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Laptop:
    """A home with a running stack."""

    home: Home
    stack: Stack

    @property
    def store(self) -> ObjectStore:
        return open_store(self.stack.store_url)

    def run(self, run_id: str) -> ObjectStore:
        return runs.open_run(self.store, run_id)

    def run_folder(self, run_id: str) -> ObjectStore:
        """The same before the run exists."""
        return self.store.sub(layout.run_prefix(run_id))

    def astraflow(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """The command line, in another process that knows nothing but the home."""
        return self._command("astraflow", *arguments, timeout_s=timeout_s)

    def prefect(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Prefect's own command line, in the folder where it finds the stack's address."""
        return self._command("prefect", *arguments, timeout_s=timeout_s)

    def start(self, run_id: str, *settings: str) -> str:
        """Starts a run of the tests' recipe with `key=value` settings; returns its supervisor's flow run."""
        overrides = [part for setting in settings for part in ("--set", setting)]
        said = self.astraflow("run", "--recipe", str(RECIPE), "--run-id", run_id, *overrides, "--detach")
        assert said.returncode == 0, said.stderr
        return said.stdout.split("/runs/flow-run/")[1].split()[0]

    def wait_for_end(self, flow_run_id: str, limit_s: float = 120.0) -> str:
        """Prefect's word for how a flow run ended."""
        wait_until(lambda: flow_runs.read(self.stack.prefect_url, flow_run_id).final, limit_s)
        return flow_runs.read(self.stack.prefect_url, flow_run_id).state

    def member(self, run_id: str, member: str) -> Heartbeat:
        """The last heartbeat of a member of a run."""
        return next(beat for beat in heartbeats.read_all(self.run(run_id)) if beat.id == member)

    def flow_runs(self, run_id: str) -> dict[str, list[str]]:
        """Name → states, oldest first, of the run's flow runs and of the flow runs inside them."""
        tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:{run_id}"]))
        with connected(self.stack.prefect_url) as client:
            found = client.read_flow_runs(flow_run_filter=tagged)
            parents = FlowRunFilterParentFlowRunId(any_=[one.id for one in found])
            found += client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parents))
        states: dict[str, list[str]] = {}
        for one in sorted({one.id: one for one in found}.values(), key=lambda one: one.created):
            states.setdefault(one.name, []).append(one.state.name)
        return states

    def flow_processes(self) -> list[int]:
        """Processes of flow runs that live."""
        found = []
        for one in processes.marked(str(self.home.root)):
            with suppress(psutil.NoSuchProcess):  # it ends at this moment; a zombie counts as ended
                if "deployments.flow_process" in one.cmdline():
                    found.append(one.pid)
        return found

    def flow_log(self, flow_run_id: str) -> str:
        """What the process of a flow run printed."""
        return (self.home.flow_logs / f"{flow_run_id}.log").read_text()

    def _command(self, name: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
        environment["ASTRAFLOW_HOME"] = str(self.home.root)
        return subprocess.run(
            [str(BIN / name), *arguments],
            cwd=self.home.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def wait_until(happened: Callable[[], bool], limit_s: float = 60.0, look_s: float = 0.2) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline, f"did not happen within {limit_s:.0f} s"
        time.sleep(look_s)


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    with stack_in(Home(tmp_path_factory.mktemp("laptop") / "home")) as laptop:
        yield laptop


@contextmanager
def stack_in(home: Home, variables: Mapping[str, str] = NOTHING) -> Iterator[Laptop]:
    """A stack that was brought up with these environment variables, until the block is left."""
    try:
        up = _up(home, variables)
        with pytest.MonkeyPatch.context() as patch:  # so that clients in this process are known to the servers
            complete = environment.of_stack(home, up, {})
            for name in (environment.PREFECT_AUTH, *environment.MLFLOW_AUTH):
                if name in complete:
                    patch.setenv(name, complete[name])
            yield Laptop(home, up)
    finally:
        try:
            with _own_environment():
                stack.down(home, lambda words: None)
        finally:
            for left in processes.marked(str(home.root)):
                os.kill(left.pid, signal.SIGKILL)
            assert all(not psutil.pid_exists(left.pid) for left in processes.marked(str(home.root)))


def _up(home: Home, variables: Mapping[str, str]) -> Stack:
    with _own_environment(), pytest.MonkeyPatch.context() as patch:
        os.environ.update(variables)
        patch.setattr(plan, "PREFECT_PORT", _free_port())
        patch.setattr(plan, "MLFLOW_PORT", _free_port())
        return stack.up(home, lambda words: None)


class _own_environment:  # noqa: N801  # a context manager reads like a function
    """The stack's commands make this process speak to the stack; afterwards the other tests have their environment back."""

    def __enter__(self) -> None:
        self._before = dict(os.environ)
        for name in [name for name in os.environ if name.startswith(OURS)]:
            del os.environ[name]

    def __exit__(self, *error: object) -> None:
        os.environ.clear()
        os.environ.update(self._before)


def _free_port() -> int:
    """One that the system chose: two stacks that start at once would both find the usual one free."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
