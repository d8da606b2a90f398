import stat
import subprocess
import sys
from pathlib import Path


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
