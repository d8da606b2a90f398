"""Ranks that die or fail alone, in real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from storage.errors import AstraFlowError, ConfigError, CorruptError, TransientError
from storage.machine import gpu_locks
from tests.support.checkout import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.runs.builders import batch, row
from trainer.config import TrainConfig
from trainer.engines.engine import make_engine
from trainer.engines.ranks import children, leader, process_group
from trainer.engines.ranks import engine as ranked
from trainer.engines.ranks.engine import RankedEngine
from trainer.engines.ranks.rendezvous import RankLostError, Rendezvous

GIVEN = batch(row())
ENGINES = "tests.support.models.engines_of_ranks"


def started(engine_class: str = "Summing") -> RankedEngine:
    engine = RankedEngine(TrainConfig(engine=f"{ENGINES}:{engine_class}", ranks=2), {}, seed=1)
    engine.set_weights({})
    return engine


def sums(engine: RankedEngine) -> list[float]:
    return engine.weights()["sums"].bits.view(np.float32).tolist()


def rank_pids() -> list[int]:
    return [
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE  # of another test, which has not looked at it
        and "trainer.engines.ranks.rank" in child.cmdline()
    ]


def test_a_killed_rank_ends_the_step_and_new_ranks_can_be_started() -> None:
    engine = started("KilledOnRankOne")
    pids = rank_pids()
    assert len(pids) == 1
    with pytest.raises(
        RankLostError, match=r"rank 1 of 2 was ended by SIGKILL during step; a restarted"
    ) as lost:
        engine.step(GIVEN)
    assert isinstance(lost.value, TransientError)
    assert rank_pids() == []
    with pytest.raises(RankLostError, match="the ranks of this trainer have ended"):
        engine.weights()
    other = started()
    other.step(GIVEN)
    assert rank_pids() not in ([], pids)
    assert sums(other) == [2.0] * 4


def test_a_rank_killed_between_two_calls_is_reported_by_the_next() -> None:
    engine = started()
    os.kill(rank_pids()[0], signal.SIGKILL)
    with pytest.raises(RankLostError, match="rank 1 of 2 was ended by SIGKILL during step"):
        engine.step(GIVEN)


def test_a_rank_that_fails_alone_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "PATIENCE_S", 1.0)
    engine = started("RaisesOnRankOne")
    with pytest.raises(
        RankLostError,
        match=r"rank 1 of 2 alone failed during step "
        r"\(ConfigError: train\.engine: step of .*:RaisesOnRankOne failed: rank 1 has a fault of its",
    ):
        engine.step(GIVEN)
    assert rank_pids() == []


def test_an_error_of_collectives_after_a_rank_failed_names_that_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader, "PATIENCE_S", 1.0)
    engine = started("LacksMemoryOnRankOne")
    with pytest.raises(RankLostError, match=r"rank 1 of 2 alone failed .*RuntimeError: no memory"):
        engine.step(GIVEN)
    assert rank_pids() == []


def test_a_rank_does_not_end_before_its_leader_when_all_processes_are_asked_to() -> None:
    engine = started()
    pids = rank_pids()
    os.kill(pids[0], signal.SIGTERM)
    os.kill(pids[0], signal.SIGINT)
    engine.step(GIVEN)
    assert rank_pids() == pids


def test_a_stopped_rank_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started()
    monkeypatch.setattr(leader, "PATIENCE_S", 0.5)
    monkeypatch.setattr(children, "STALLED_S", 0.5)
    os.kill(rank_pids()[0], signal.SIGSTOP)
    with pytest.raises(RankLostError, match="rank 1 of 2"):
        engine.set_weights({})
    assert rank_pids() == []


def test_an_error_of_all_ranks_is_raised_and_leaves_them_usable() -> None:
    faulty, engine = started("RaisesOnEveryRank"), started()
    pids = rank_pids()
    with pytest.raises(CorruptError, match="all ranks see it"):
        faulty.step(GIVEN)
    engine.step(GIVEN)
    assert sums(engine) == [2.0] * 4
    assert rank_pids() == pids


def test_a_process_has_one_number_of_ranks_while_they_are_used() -> None:
    engine = started()
    with pytest.raises(ConfigError, match="this process trains already with 1 × 2 ranks on cpu"):
        make_engine(TrainConfig(ranks=3), {}, seed=1)
    engine.step(GIVEN)


def test_a_killed_leader_leaves_no_rank_behind_and_its_folder_is_deleted_by_the_next(
    tmp_path: Path,
) -> None:
    program = (
        "import tests.faults.test_ranks_kill as ranks\n"
        "engine = ranks.started()\n"
        "print(ranks.rank_pids()[0], flush=True)\n"
        "while True: engine.step(ranks.GIVEN)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        rank = psutil.Process(int(process.stdout.readline()))
        process.kill()
    rank.wait(timeout=PATIENCE_S)
    assert not rank.is_running()
    (left,) = tmp_path.glob("astraflow-ranks-*")
    subprocess.run(
        [sys.executable, "-c", "import tests.faults.test_ranks_kill as ranks; ranks.started()"],
        cwd=ROOT,
        env=environment,
        check=True,
    )
    assert not left.exists()
    assert list(tmp_path.glob("astraflow-ranks-*")) == []


def test_a_rank_sees_its_own_gpu_alone_and_no_credentials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path / "gpus")
    if ranked._current is not None:
        ranked._current.close()  # that of other tests: a process is in one group
    seen: list[dict[str, str]] = []
    start = children.start_rank

    def start_and_look(
        rank: int, num_ranks: int, gpu: str, rendezvous: Rendezvous | None
    ) -> children.Child:
        child = start(rank, num_ranks, gpu, rendezvous)  # it waits for its first message
        if child.process is None:
            raise LookupError(f"rank {rank} has no process on this machine")
        process = psutil.Process(child.process.pid)
        while not (variables := process.environ()):
            time.sleep(0.01)  # the system has not written them yet
        seen.append(variables)
        return child

    def stop(*_: object) -> None:
        raise ConfigError("the group cannot be joined without a GPU")

    monkeypatch.setattr(leader, "start_rank", start_and_look)
    monkeypatch.setattr(process_group, "join", stop)
    config = TrainConfig(ranks=3, device="cuda", devices=(2, 0, 1))
    with pytest.raises(AstraFlowError):  # of the rank that fails first: none has a GPU
        leader.Ranks(config)
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in seen] == ["4", "6"]
    assert all("AWS_SECRET_ACCESS_KEY" not in variables for variables in seen)
    assert rank_pids() == []
