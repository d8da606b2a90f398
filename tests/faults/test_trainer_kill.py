import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT


@pytest.mark.slow
def test_a_trainer_killed_before_any_of_its_writes_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.trainer_process", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    # Five versions with a data file and a manifest each, one of them an anchor that also has its delta;
    # three checkpoints of the same form (steps 2, 4, 5), two of them pruned.
    assert len(outcomes["killed"]) == 5 * 2 + 1 + 3 * 2 + 2 * 2
    assert (
        len(set(outcomes["straight"])) == 7
    )  # version 0 to 5 and the checkpoint: every step changed the weights
    for writes, outcome in enumerate(outcomes["killed"]):
        assert outcome == outcomes["straight"], f"killed before write {writes + 1}"
