import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments import paths
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


def test_a_shared_folder_that_no_stack_has_used_is_refused_and_not_changed(tmp_path: Path) -> None:
    shared = tmp_path / "opt"
    (shared / "share").mkdir(parents=True)
    (shared / "logs").mkdir()
    for folder in (shared, shared / "share", shared / "logs"):
        folder.chmod(0o755)
    with pytest.raises(ConfigError) as raised:
        Home(shared).create()
    assert str(raised.value) == (
        f"{shared} has other files in it ('share'), and other users have access to it; the stack "
        f"would make it private: set ASTRAFLOW_HOME to a folder of its own, such as "
        f"{shared / 'astraflow'}, or run `chmod 700 {shared}`"
    )
    assert {_mode(folder) for folder in (shared, shared / "share", shared / "logs")} == {0o755}
    assert sorted(path.name for path in shared.iterdir()) == ["logs", "share"]


@pytest.mark.parametrize("name", ["store", "logs", "mlflow", "prefect"])
def test_a_shared_folder_with_files_in_a_folder_of_the_stacks_names_is_not_changed(
    name: str, tmp_path: Path
) -> None:
    shared = tmp_path / "the team's"
    (shared / name).mkdir(parents=True)
    (shared / name / "cron.log").touch(mode=0o664)
    for folder in (shared, shared / name):
        folder.chmod(0o2775)
    with pytest.raises(ConfigError) as raised:
        Home(shared).create()
    assert f"has other files in it ('{name}/cron.log'), and other users have" in str(raised.value)
    quoted = str(shared).replace("'", "'\"'\"'")
    assert str(raised.value).endswith(f"or run `chmod 700 '{quoted}'`")
    assert {_mode(folder) for folder in (shared, shared / name)} == {0o2775}
    assert [path.name for path in shared.iterdir()] == [name]


@pytest.mark.parametrize("name", ["store", "lost+found", ".DS_Store"])
def test_a_folder_with_only_a_store_or_files_of_the_system_becomes_a_home(
    name: str, tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    (home.root / name).mkdir(parents=True)
    home.root.chmod(0o755)
    home.create()
    assert _mode(home.root) == 0o700


def test_a_link_as_the_root_of_a_home_leads_to_a_private_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o755)
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    Home(tmp_path / "home").create()
    assert _mode(tmp_path / "disk") == 0o700


@pytest.mark.parametrize("file", ["stack.lock", "stack.json", "auth", "bf16"])
def test_a_home_of_an_earlier_release_becomes_private(file: str, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    home.root.chmod(0o755)
    (home.root / file).touch()
    home.create()
    assert _mode(home.root) == 0o700


def test_an_empty_folder_becomes_a_private_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    home.root.chmod(0o775)
    home.create()
    assert _mode(home.root) == 0o700


def test_what_a_link_leads_to_and_a_users_prefect_toml_keep_their_modes(tmp_path: Path) -> None:
    target = tmp_path / "data"
    target.mkdir()
    target.chmod(0o775)
    home = Home(tmp_path / "home")
    home.create()
    home.store.rmdir()
    home.store.symlink_to(target)
    home.prefect_toml.touch()
    home.prefect_toml.chmod(0o644)
    home.create()
    assert (_mode(target), _mode(home.prefect_toml)) == (0o775, 0o644)
    assert list(home.exposed()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("what?", "the path contains '?', which databases cannot have"),
        ("per%41c/home", "the path contains '%', which databases cannot have"),
        ("by\udcff", "its name is not UTF-8"),
    ],
)
def test_a_name_that_the_servers_cannot_have_is_refused(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / name))
    with pytest.raises(ConfigError) as raised:
        paths.home()
    assert str(raised.value) == (
        f"ASTRAFLOW_HOME={tmp_path / name} cannot be the stack's folder ({reason}); name a writable "
        "one"
    )
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "plain #1 é"))
    assert paths.home().root == tmp_path / "plain #1 é"


@pytest.mark.parametrize("name", ["s3://key:S3CR3T@bucket/home", "http://ada:S3CR3T@host/"])
def test_an_address_as_home_is_refused_and_not_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASTRAFLOW_HOME", name)
    with pytest.raises(ConfigError, match=r"^ASTRAFLOW_HOME is an address") as raised:
        paths.home()
    assert "S3CR3T" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("name", ["stack.lock", "watchdog.lock", "stack.tmp", "watchdog.tmp"])
def test_a_link_in_place_of_a_lock_or_of_a_new_record_is_refused(name: str, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    (home.root / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
        home.refuse_irregular_files()


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
