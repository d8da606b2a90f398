import re
import runpy
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from tests.support.compose import FOLDER

SCRIPT = FOLDER / "new_env.py"


def test_each_secret_is_another_one_and_comments_stay() -> None:
    new_env = runpy.run_path(str(SCRIPT))["new_env"]
    written = new_env("# of GENERATED\nA=GENERATED\nB=me:GENERATED\nC=plain\n").splitlines()
    assert written[0] == "# of GENERATED"
    assert written[3] == "C=plain"
    first, second = written[1].removeprefix("A="), written[2].removeprefix("B=me:")
    assert re.fullmatch(r"[0-9a-f]{48}", first)
    assert re.fullmatch(r"[0-9a-f]{48}", second)
    assert first != second


def test_the_file_is_private_and_never_replaced(tmp_path: Path) -> None:
    for name in ("new_env.py", "env.example"):
        shutil.copy(FOLDER / name, tmp_path)
    command = [sys.executable, str(tmp_path / "new_env.py")]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    path = tmp_path / ".env"
    assert first.stdout == f"wrote {path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert "GENERATED" not in re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (second.returncode, path.read_text()) == (1, text)
    assert "delete it only together with the volumes" in second.stderr
