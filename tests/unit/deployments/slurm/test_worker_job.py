"""The job script of Slurm, run by bash with stand-ins for Prefect and Slurm."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.patience import until

SCRIPT = ROOT / "deployments" / "slurm" / "worker.sbatch"
PREFECT = """#!/usr/bin/env bash
echo "$CUDA_VISIBLE_DEVICES | $SECRET | $*" >> calls
trap 'echo "worker ended" >> events; exit 0' TERM
bash -c 'trap "echo service drained >> events; exit 0" TERM; echo started >> services; while :; do sleep 0.1; done' &
wait
wait
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose Prefect worker starts one service, which drains on SIGTERM."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for path, text in (
        (".venv/bin/prefect", PREFECT),
        ("bin/scontrol", '#!/bin/sh\necho "scontrol $*" >> events\n'),
    ):
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    secrets = tmp_path / "secrets"
    secrets.write_text("PREFECT_API_URL=http://prefect.example:4200/api\nSECRET=s3cret\n")
    secrets.chmod(0o600)
    return tmp_path


@contextmanager
def job(clone: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    variables = {
        "PATH": f"{clone / 'bin'}:{os.environ['PATH']}",
        "HOME": str(clone),
        "SLURM_SUBMIT_DIR": str(clone),
        "SLURM_JOB_ID": "71",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        "ASTRAFLOW_SECRETS": str(clone / "secrets"),
    }
    process = subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        env=variables,
        cwd=clone,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout
        process.stdout.close()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def started(clone: Path, count: int) -> None:
    until(lambda: len(lines(clone / "services")) == count)


def test_before_the_time_limit_services_drain_and_the_job_is_requeued(clone: Path) -> None:
    with job(clone, "trainers") as process:
        started(clone, 1)
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate()
        assert process.returncode == 0, output
    assert lines(clone / "events") == ["service drained", "worker ended", "scontrol requeue 71"]
    (call,) = lines(clone / "calls")
    assert call.startswith("4,5,6,7 | s3cret | worker start --type process --pool trainers --name ")
    assert call.endswith("-71")
    assert "s3cret" not in output


def test_a_cancelled_job_drains_and_is_not_requeued(clone: Path) -> None:
    with job(clone, "rollout", "eu-west") as process:
        started(clone, 1)
        process.terminate()
        process.communicate()
        assert process.returncode == 0
    assert lines(clone / "events") == ["service drained", "worker ended"]
    assert "--pool rollout --work-queue eu-west --name " in lines(clone / "calls")[0]


def test_each_group_of_gpus_has_a_worker_that_runs_one_service(clone: Path) -> None:
    with job(clone, "rollout", "", "2") as process:
        started(clone, 2)
        process.terminate()
        process.communicate()
    calls = sorted(lines(clone / "calls"))
    assert [call.split(" | ")[0] for call in calls] == ["4,5", "6,7"]
    assert all(call.endswith("--limit 1") and "--work-queue" not in call for call in calls)
    assert len({call.split("--name ")[1] for call in calls}) == 2
    assert sorted(lines(clone / "events")) == ["service drained"] * 2 + ["worker ended"] * 2


def test_a_worker_that_ends_by_itself_fails_the_job(clone: Path) -> None:
    (clone / ".venv" / "bin" / "prefect").write_text("#!/bin/sh\nexit 3\n")
    with job(clone, "trainers") as process:
        output, _ = process.communicate()
    assert process.returncode == 1
    assert "a Prefect worker ended by itself" in output


def test_secrets_that_others_can_read_are_refused(clone: Path) -> None:
    (clone / "secrets").chmod(0o640)
    with job(clone, "trainers") as process:
        output, _ = process.communicate()
    assert process.returncode == 78
    assert f"chmod 600 {clone / 'secrets'}" in output
    assert not (clone / "calls").exists()


def test_a_job_without_a_pool_or_without_an_address_is_refused(clone: Path) -> None:
    (clone / "secrets").write_text("SECRET=s3cret\n")
    for arguments, words in (((), "name a work pool"), (("trainers",), "write PREFECT_API_URL")):
        with job(clone, *arguments) as process:
            output, _ = process.communicate()
        assert process.returncode != 0
        assert words in output
