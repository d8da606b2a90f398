import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.paths import Home, open_private, open_regular
from storage.errors import ConfigError


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_home_and_its_folders_are_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "home")
    home.create()
    folders = (home.root, home.prefect, home.mlflow, home.store, home.logs, home.flow_logs)
    assert {_mode(folder) for folder in folders} == {0o700}
    assert list(home.exposed()) == []


def test_a_home_readable_by_others_becomes_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    files = (
        *(
            home.record,
            home.lock,
            home.auth,
            home.prefect_toml,
            home.prefect / "prefect.db",
            home.prefect / "prefect.db-wal",
        ),
        *(
            home.mlflow / "mlflow.db",
            home.logs / "mlflow.log",
            home.logs / "worker-trainers.old",
            home.flow_logs / "id.log",
        ),
    )
    folders = (home.root, home.prefect, home.mlflow, home.store, home.logs, home.flow_logs)
    for file in files:
        file.touch()
        file.chmod(0o644)
    for folder in folders:
        folder.chmod(0o755)
    assert sorted(home.exposed()) == sorted((*files, *folders))
    home.create()
    assert {_mode(file) for file in files} == {0o600}
    assert {_mode(folder) for folder in folders} == {0o700}


def test_a_folder_writable_by_all_users_is_refused_and_not_changed(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(
        ConfigError,
        match=f"set ASTRAFLOW_HOME to a folder of your own, such as {tmp_path / 'astraflow'}",
    ):
        Home(tmp_path).create()
    assert _mode(tmp_path) == 0o1777
    assert list(tmp_path.iterdir()) == []


def test_a_private_file_is_private_with_any_umask_and_previous_mode(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "old").chmod(0o666)
    before = os.umask(0)
    try:
        for name in ("old", "new"):
            with open(tmp_path / name, "w", opener=open_private) as file:
                file.write("secret")
            assert _mode(tmp_path / name) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "name",
    ["auth", "stack.json", "stack.lock", "stack.tmp", "bf16", "prefect.toml", "logs/mlflow.log"],
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_by_name(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    home.refuse_irregular_files()
    make(home.root / name)
    with pytest.raises(ConfigError) as raised:
        home.refuse_irregular_files()
    assert str(raised.value) == (
        f"{home.root / name} is not a regular file, and the stack keeps a file there; delete it"
    )


@pytest.mark.parametrize(
    "flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_APPEND]
)
@pytest.mark.parametrize("opener", [open_regular, open_private])
def test_opening_a_pipe_never_blocks(
    opener: Callable[[Path, int], int], flags: int, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=f"{pipe} is not a regular file"):
        opener(pipe, flags)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ConfigError, match=f"{pipe} is not a regular file"):
        opener(pipe, flags)
    os.close(reader)
