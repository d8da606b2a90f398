import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from storage.errors import ConfigError
from storage.store.addresses import (
    VARIABLES,
    check_local_path,
    check_no_credentials,
    holds_credentials,
    text_without_credentials,
    without_credentials,
)

HIDDEN = [
    ("https://me:s3cr3t@host:4200/api", "https://host:4200/api"),
    ("https://s3cr3t@host/api", "https://host/api"),
    ("https://me:s3/cr3t@host/api", "https://host/api"),
    ("https://me:s3#cr3t@host/api", "https://host/api"),
    ("https://me:s3?cr3t@host/api", "https://host/api"),
    ("https://host/api?token=s3cr3t", "https://host/api"),
    ("https://host/api?a=b&X-Amz-Signature=s3cr3t", "https://host/api"),
    ("https://host/api#access_token=s3cr3t", "https://host/api"),
    ("postgresql://me:s3cr3t@host/db", "postgresql://host/db"),
    ("postgresql://host/db?password=s3cr3t", "postgresql://host/db"),
    ("s3://key:s3cr3t@bucket/prefix", "s3://bucket/prefix"),
    ("s3://key:s3/cr3t@bucket/prefix", "s3://bucket/prefix"),
    ("file://me:s3cr3t@host/store", "file://host/store"),
    ("me:s3cr3t@host:4200/api", "host:4200/api"),
    ("//me:s3cr3t@host:4200/api", "host:4200/api"),
    ("http:/me:s3cr3t@host:4200/api", "http://host:4200/api"),
    ("https:/host/model?token=s3cr3t", "https://host/model"),
    ("s3:/key:s3/cr3t@bucket/model", "s3://bucket/model"),
    ("s3:/key:s3cr3t/bucket", "s3://…"),
    ("s3://key:s3cr3t/bucket", "s3://…"),
    ("S3://key:s3cr3t/bucket", "S3://…"),
    ("https://host/api;token=s3cr3t", "https://host/api"),
    ("https://host/api&token=s3cr3t", "https://host/api"),
    ("postgresql://host/db?%70assword=s3cr3t", "postgresql://host/db"),
    ("https://host/api?pass=s3cr3t", "https://host/api"),
    ("https://host/api?api-key=s3cr3t", "https://host/api"),
    ("https://host/api?jwt=s3cr3t", "https://host/api"),
    ("https://host/api?sas=s3cr3t", "https://host/api"),
    ("mssql+pyodbc:///?odbc_connect=Server%3Ddb%3BUid%3Dsa%3BPwd%3Ds3cr3t", "mssql+pyodbc:///"),
    ("mssql+pyodbc://?odbc_connect=Uid%3Dsa%3B+PWD+%3D+s3cr3t", "mssql+pyodbc://"),
    ("mssql+pyodbc:///?odbc_connect=%7BUid%3Dsa%7D%2Cpwd%20%3Ds3cr3t", "mssql+pyodbc:///"),
    ("postgresql:///?dsn=host%3Ddb%20password%3Ds3cr3t", "postgresql:///"),
    ("s3://bucket/prefix?endpoint=http://me:s3cr3t@host:9000", "s3://…"),
    ("s3://bucket/prefix?endpoint=http%3A%2F%2Fme:s3cr3t%40host:9000", "s3://bucket/prefix"),
]
CLEAN = [
    "http://127.0.0.1:4200/api",
    "https://host/#/experiments/1/runs/2",
    "s3://bucket/me@home?endpoint=http://host:9000&profile=eu",
    "file:///home/me@domain/store",
    "sqlite:////home/me@domain/mlflow.db",
    "/home/me@domain/store",
    "FILE:///home/me@domain/store",
    "https://host/api?compass=north",
    "mssql+pyodbc:///?odbc_connect=Driver%3DODBC+Driver+18%3BServer%3Ddb%3BTrusted_Connection%3Dyes",
    "postgresql:///db?options=-c%20search_path%3Dmlflow",
    "here",
    "databricks://profile",
]


@pytest.mark.parametrize(("url", "shown"), HIDDEN)
def test_a_credential_in_an_address_is_not_shown(url: str, shown: str) -> None:
    assert holds_credentials(url)
    assert without_credentials(url) == shown


@pytest.mark.parametrize("scheme", ["https", "s3"])
def test_an_address_that_was_taken_for_a_path_is_shown_without_its_credential(scheme: str) -> None:
    path = Path(f"{scheme}://me:s3cr3t@host/org/model")
    text = f"{path} holds no config.json; name a folder"
    shown = f"{scheme}://host/org/model holds no config.json; name a folder"
    assert text_without_credentials(text) == shown
    text = (
        "C:/data, file:/home/me@domain/store, run:/no.user and models:/solver@champion hold nothing"
    )
    assert text_without_credentials(text) == text


@pytest.mark.parametrize("url", ["https://me:s3cr3t@host/model", "s3://key:s3cr3t@bucket/model"])
def test_a_setting_that_is_a_local_path_refuses_an_address_with_a_credential(url: str) -> None:
    with pytest.raises(ValueError, match="contains a user, a password or a token"):
        check_local_path(url)
    assert check_local_path("/home/me@domain/model") == "/home/me@domain/model"


@pytest.mark.parametrize("url", CLEAN)
def test_an_address_without_a_credential_is_shown_unchanged(url: str) -> None:
    assert not holds_credentials(url)
    assert without_credentials(url) == url
    check_no_credentials("ASTRAFLOW_STORE", url)


def nested(address: str, times: int) -> str:
    for _ in range(times):
        address = f"https://host/?at={quote(address, safe='')}"
    return address


@pytest.mark.parametrize(("times", "is_shown"), [(3, True), (4, False)])
def test_addresses_in_addresses_are_searched_down_to_three(times: int, is_shown: bool) -> None:
    assert holds_credentials(nested("https://host/?token=s3cr3t", times))
    assert holds_credentials(nested("https://host/?at=here", times)) is not is_shown


def test_a_long_row_of_addresses_in_one_another_is_refused_at_once() -> None:
    address = "memory://?=" + "".join(f"://%{'25' * n}3F=" for n in range(330)) + "://host"
    assert len(address) > 100_000
    assert without_credentials(address) == "memory://"


@pytest.mark.parametrize("variable", list(VARIABLES))
def test_the_error_names_the_variables_to_use_instead(variable: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_no_credentials(variable, "https://me:s3cr3t@host/api")
    assert str(refused.value).startswith(
        f"{variable} contains a credential beside the address https://host/api"
    )
    assert VARIABLES[variable] in str(refused.value)
    assert "s3cr3t" not in str(refused.value)


COMMANDS = [
    ["up"],
    ["run", "--detach"],
    ["deploy"],
    ["doctor"],
    ["status"],
    ["cancel", "nobody"],
    ["--debug", "down"],
]


@pytest.mark.parametrize("variable", list(VARIABLES))
def test_no_command_prints_a_credential_or_stores_it_in_the_home(
    variable: str, tmp_path: Path
) -> None:
    own = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = {
        **own,
        "ASTRAFLOW_HOME": str(tmp_path / "home"),
        variable: "https://me:s3cr3t@127.0.0.1:1/api",
    }
    for command in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "deployments.cli.app", *command],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "s3cr3t" not in done.stdout + done.stderr, command
        if command[0] in ("up", "run"):
            assert done.returncode == 2, command
            assert f"{variable} contains a credential" in done.stderr, command
    for file in (tmp_path / "home").rglob("*"):
        assert file.is_dir() or b"s3cr3t" not in file.read_bytes()
