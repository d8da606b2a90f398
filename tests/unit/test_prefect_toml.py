import os
import subprocess
import sys
from pathlib import Path

from deployments import prefect_toml

URL = "http://127.0.0.1:4999/api"


def test_prefect_finds_the_address_in_the_folder_it_is_called_in(tmp_path: Path) -> None:
    assert prefect_toml.write(tmp_path / "prefect.toml", URL)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    code = "from prefect.settings import get_current_settings; print(get_current_settings().api.url)"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == URL


def test_our_own_file_is_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "prefect.toml"
    assert prefect_toml.write(path, "http://127.0.0.1:1/api")
    assert prefect_toml.write(path, URL)
    assert URL in path.read_text()
    prefect_toml.remove(path)
    assert not path.exists()
    prefect_toml.remove(path)


def test_a_file_of_somebody_else_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "prefect.toml"
    path.write_text('[api]\nurl = "https://example.com/api"\n')
    assert not prefect_toml.write(path, URL)
    prefect_toml.remove(path)
    assert path.read_text() == '[api]\nurl = "https://example.com/api"\n'
