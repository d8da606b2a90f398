import os
import stat
import subprocess
import sys
from pathlib import Path

from deployments.servers import prefect_toml

URL = "http://127.0.0.1:4999/api"
SECRET = "astraflow:0123456789"


def test_prefect_reads_the_address_and_the_secret_from_the_working_directory(
    tmp_path: Path,
) -> None:
    assert prefect_toml.write(tmp_path / "prefect.toml", URL, SECRET)
    assert stat.S_IMODE((tmp_path / "prefect.toml").stat().st_mode) == 0o600
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    }
    code = (
        "from prefect.settings import get_current_settings; api = get_current_settings().api; "
        "print(api.url, api.auth_string.get_secret_value())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == f"{URL} {SECRET}"


def test_our_own_file_is_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "prefect.toml"
    assert prefect_toml.write(path, "http://127.0.0.1:1/api", SECRET)
    path.chmod(0o644)
    assert prefect_toml.write(path, URL, SECRET)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert URL in path.read_text()
    prefect_toml.remove(path)
    assert not path.exists()
    prefect_toml.remove(path)


def test_a_foreign_file_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "prefect.toml"
    path.write_text('[api]\nurl = "https://example.com/api"\n')
    assert not prefect_toml.write(path, URL, SECRET)
    prefect_toml.remove(path)
    assert path.read_text() == '[api]\nurl = "https://example.com/api"\n'


def test_a_secret_is_not_written_through_any_symbolic_link(tmp_path: Path) -> None:
    path, target = tmp_path / "prefect.toml", tmp_path / "elsewhere"
    path.symlink_to(target)
    assert not prefect_toml.write(path, URL, SECRET)
    assert not target.exists()
    assert prefect_toml.write(target, "http://127.0.0.1:1/api", "astraflow:other")
    before = target.read_text()
    assert not prefect_toml.write(path, URL, SECRET)
    prefect_toml.remove(path)
    assert path.is_symlink()
    assert target.read_text() == before


def test_a_pipe_in_place_of_the_file_is_neither_read_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "prefect.toml"
    os.mkfifo(path)
    assert not prefect_toml.write(path, URL, SECRET)
    prefect_toml.remove(path)
    assert path.is_fifo()
