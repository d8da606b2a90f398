import os
import stat
import subprocess
import sys
from pathlib import Path

from tasks.services.service_logs import PACKAGES
from tests.support.checkout import ROOT


def test_only_the_owner_may_read_the_output_of_a_flow_run(tmp_path: Path) -> None:
    log = tmp_path / "flows" / "id.log"
    code = (
        "import os, pathlib; os.umask(0); from deployments.registration import flow_entrypoint; "
        f"path = pathlib.Path({str(log)!r}); "
    )
    subprocess.run(
        [sys.executable, "-c", f"{code}flow_entrypoint._redirect_output(path); print(1)"],
        check=True,
    )
    assert log.read_text() == "1\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700


def test_a_process_of_a_worker_that_was_started_by_hand_logs_to_prefect(tmp_path: Path) -> None:
    engine = tmp_path / "prefect"
    engine.mkdir()
    (engine / "__init__.py").touch()
    (engine / "engine.py").write_text(
        "import logging, os\n"
        "print(os.environ['PREFECT_LOGGING_EXTRA_LOGGERS'])\n"
        "print(os.environ['PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW'])\n"
        "print(logging.getLogger('trainer.service').isEnabledFor(logging.INFO))\n"
    )
    started = subprocess.run(
        [sys.executable, "-m", "deployments.registration.flow_entrypoint"],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "warn",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    loggers, missing_flow, is_enabled = started.stdout.split()
    assert set(loggers.split(",")) == set(PACKAGES)
    assert (missing_flow, is_enabled) == ("warn", "True")
