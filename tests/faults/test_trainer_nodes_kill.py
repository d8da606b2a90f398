"""A trainer on two nodes whose processes are killed: only time is lost."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import cast

import pytest

from storage import layout
from storage.coordination import rounds
from storage.records.control import Stop
from storage.run import runs
from storage.store.object_store import open_store
from storage.weights import manifests
from tests.faults import trainer_nodes_process
from tests.faults.trainer_process import POLICY, STEPS, outcome, prepare
from tests.support.patience import PATIENCE_S
from trainer.engines.ranks import leader

pytestmark = pytest.mark.slow


class Services:
    """The trainer and its node, each started again when it ends before its work is done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = open_store(str(folder))
        self.running: dict[str, ForkServerProcess] = {}
        self.starts = {"trainer": 0, "node": 0}
        self.others: list[ForkServerProcess] = []

    def start(self, service: str, patience_s: float = leader.PATIENCE_S) -> None:
        self.starts[service] += 1
        self.running[service] = trainer_nodes_process.start(self.folder, service, patience_s)

    def replace(self, service: str) -> None:
        """Start another process of a service that goes on."""
        self.others.append(self.running[service])
        self.start(service)

    def version(self) -> int:
        return manifests.latest(self.run, POLICY, 0) or 0

    def watch(self) -> None:
        """Start again what has failed."""
        for service, process in list(self.running.items()):
            if process.exitcode not in (None, 0):
                self.start(service)
        time.sleep(0.02)

    def wait_for_version(self, version: int) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while self.version() < version:
            assert time.monotonic() < end_s, f"version {version} does not come"
            self.watch()

    def finish(self) -> None:
        """Wait until both have ended by themselves, their work done."""
        end_s = time.monotonic() + PATIENCE_S
        while any(process.exitcode != 0 for process in self.running.values()):
            assert time.monotonic() < end_s, "the services do not end"
            self.watch()


@contextmanager
def services(folder: Path, prepared: Path) -> Iterator[Services]:
    shutil.copytree(prepared, folder)
    both = Services(folder)
    try:
        yield both
    finally:
        for process in (*both.running.values(), *both.others):
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes") / "prepared"
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def straight(prepared: Path) -> list[str]:
    """The outcome of a training in which nothing happens."""
    with services(prepared.parent / "straight", prepared) as both:
        both.start("trainer")
        both.start("node")
        both.finish()
        assert both.starts == {"trainer": 1, "node": 1}
        return outcome(both.folder)


@pytest.mark.parametrize("killed", ["node", "trainer"])
def test_a_killed_process_changes_nothing_but_time(
    killed: str, prepared: Path, straight: list[str], tmp_path: Path
) -> None:
    with services(tmp_path / "run", prepared) as both:
        both.start("trainer")
        both.start("node")
        both.wait_for_version(3)
        both.running[killed].kill()
        both.finish()
        assert min(both.starts.values()) >= 2, "the other one has ended, too"
        assert outcome(both.folder) == straight
        newest = rounds.newest_number(both.run, POLICY)
    assert newest >= 2


def test_a_trainer_killed_after_its_last_version_and_before_its_checkpoint_saves_it(
    prepared: Path, straight: list[str], tmp_path: Path
) -> None:
    with services(tmp_path / "run", prepared.parent / "straight") as both:
        shutil.rmtree(both.folder / layout.checkpoint(POLICY, STEPS))
        assert both.version() == STEPS
        both.start("trainer")
        both.start("node")
        both.finish()
        assert outcome(both.folder) == straight


def test_a_node_that_does_not_answer_is_replaced_by_another_process_of_it(
    prepared: Path, straight: list[str], tmp_path: Path
) -> None:
    """As on a machine that is cut off: its connections are never closed."""
    with services(tmp_path / "run", prepared) as both:
        both.start("trainer", 1.0)
        both.start("node")
        both.wait_for_version(2)
        os.kill(cast(int, both.running["node"].pid), signal.SIGSTOP)  # of a started process
        both.replace("node")
        both.finish()
        assert both.starts["trainer"] >= 2
        assert outcome(both.folder) == straight


def test_a_stopped_run_ends_the_trainer_and_its_node(prepared: Path, tmp_path: Path) -> None:
    with services(tmp_path / "run", prepared) as both:
        both.start("trainer")
        both.start("node")
        both.wait_for_version(1)
        runs.request_stop(both.run, Stop("cancelled", "enough", 1700000000.0))
        both.finish()
        assert both.starts == {"trainer": 1, "node": 1}
        alone = both.version()
        assert alone <= STEPS


def test_a_node_without_a_trainer_ends_with_the_run(prepared: Path, tmp_path: Path) -> None:
    with services(tmp_path / "run", prepared) as both:
        both.start("node")
        runs.request_stop(both.run, Stop("cancelled", "enough", 1700000000.0))
        both.finish()
